"""Error against a wider dtype: at most twice that of the same formula in the same dtype."""

import numpy as np
import pytest
from _support import (
    DTYPES,
    SIZES_OF_PATH,
    WIDER,
    assert_attention_correct,
    assert_close,
    assert_rms_error_small,
    expected,
    normal_inputs,
)

import mha_fast
from mha_fast import reference

PATHS = tuple(SIZES_OF_PATH)


@pytest.fixture(scope="module")
def long_inputs():
    inputs = normal_inputs(
        np.float32, batch=(1,), n_head=8, n_kv_head=8, n_query=2048, n_key=2048, head_width=64,
        value_width=64,
    )  # fmt: skip
    right = np.empty(inputs[0].shape)
    for head in range(8):  # one head at a time: all the scores in float64 would be 256 MiB
        one = slice(head, head + 1)
        right[:, one] = reference.attention(*(x[:, one] for x in inputs))
    return inputs, right


def test_float32_error_on_a_long_sequence(long_inputs, isa):
    inputs, right = long_inputs
    assert np.abs(mha_fast.attention(*inputs) - right).max() <= 1e-6


def test_float64_error_on_a_long_sequence(isa):
    inputs = normal_inputs(
        np.float64, batch=(1,), n_head=2, n_kv_head=2, n_query=384, n_key=768, head_width=64,
        value_width=64,
    )  # fmt: skip
    error = np.abs(mha_fast.attention(*inputs) - reference.attention(*inputs)).max()
    assert error <= 1e-14 * np.abs(inputs[2]).max()


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n_key", [64, 700, 3000])
def test_error_is_at_most_twice_that_of_the_usual_five_lines(n_key, dtype, path, isa):
    n_query = SIZES_OF_PATH[path]["n_query"]
    inputs = normal_inputs(dtype, n_kv_head=4, n_query=n_query, n_key=n_key, head_width=64)
    right = reference._attention_in(WIDER[dtype], *inputs)[0]
    naive = np.abs(reference.naive_attention(*inputs) - right).max()
    floor = np.finfo(dtype).eps * np.abs(inputs[2]).max()
    assert_close(mha_fast.attention(*inputs), right, 2 * naive + floor)


def _sample(dtype, path, **sizes):
    """Enough rows on either path for an rms error to mean something."""
    batch = (2,) if path == "tiles" else (30,)
    return normal_inputs(dtype, **{"batch": batch, **SIZES_OF_PATH[path]} | sizes)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"is_causal": True, "query_offset": 100},
        {"window": (20, 0), "query_offset": 100},
        {"kv_lengths": 101},
        {"attn_mask": np.linspace(-3, 3, 150)[:, None].repeat(4, axis=1).reshape(1, 600)},
        {"softcap": 2.0},
        {"alibi_slopes": [0.01, 0.1, 0.5, 1.0]},
        {"sinks": [-1.0, 0.0, 1.0, 5.0]},
        {"scale": 0.7},
    ],
    ids=lambda options: " ".join(options) or "plain",
)
def test_rms_error(options, dtype, path, isa):
    inputs = _sample(dtype, path)
    if "attn_mask" in options:
        options = {"attn_mask": options["attn_mask"][:, : inputs[1].shape[-2]]}
    assert_rms_error_small(*inputs, **options)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("factor", [4, 30])
def test_rms_error_with_big_logits(factor, dtype, path, isa):
    query, key, value = _sample(dtype, path)
    assert_rms_error_small((query * factor).astype(dtype), key, value)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("exponent", [4, 10, 20, 100])
def test_huge_logits_that_are_exact(exponent, dtype, path, isa):
    """Integers times a power of two have no rounding error, so ties are ties at any size."""
    _, _, value = normal_inputs(dtype, **SIZES_OF_PATH[path])
    rng = np.random.default_rng(0)
    query = rng.integers(-1, 2, (2, 4, SIZES_OF_PATH[path]["n_query"], 6)).astype(dtype)
    key = rng.integers(-1, 2, (2, 2, SIZES_OF_PATH[path]["n_key"], 6)).astype(dtype)
    size = dtype(2.0**exponent)
    for call in ((query * size, key, 1.0), (query, key * size, 1.0), (query, key, float(size))):
        assert_attention_correct(call[0], call[1], value, scale=call[2])


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("share", [0.5, 0.9])
def test_logits_close_to_the_largest_number(share, dtype, path, isa):
    """A finite logit stays finite, also where its product with log2(e) would overflow."""
    sizes = SIZES_OF_PATH[path] | {"head_width": 1, "value_width": 3}
    _, _, value = normal_inputs(dtype, **sizes)
    query = np.ones((2, 4, sizes["n_query"], 1), dtype)
    key = np.resize([1, -1, 0.5], (2, 2, sizes["n_key"], 1)).astype(dtype)
    for query_sign in (1, -1):
        huge = (query_sign * share * np.finfo(dtype).max).astype(dtype)
        assert_attention_correct(query * huge, key, value)
        assert_attention_correct(query, key * huge, value)
        assert_attention_correct(query, key, value, scale=float(huge))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", [0.0, -1.0, 1e30, -1e30, 1e-30])
@pytest.mark.parametrize("is_causal", [False, True])
def test_scale(is_causal, scale, dtype, path, isa):
    inputs = normal_inputs(dtype, **SIZES_OF_PATH[path])
    assert_attention_correct(*inputs, scale=scale, is_causal=is_causal)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("size", [1e-15, 1e15])
def test_scale_that_undoes_the_size_of_the_inputs(size, path, isa):
    """Neither scale * query nor query * key may leave the range of float32 on the way."""
    query, key, value = normal_inputs(np.float32, **SIZES_OF_PATH[path])
    assert_attention_correct((query * size).astype(np.float32), key, value, scale=0.3 / size)
    query, key = ((x * size).astype(np.float32) for x in (query, key))
    assert_attention_correct(query, key, value, scale=0.3 / size**2)


@pytest.mark.parametrize("path", PATHS)
def test_scale_times_query_alone_would_overflow(path, isa):
    query, key, value = normal_inputs(np.float32, **SIZES_OF_PATH[path])
    query, key = query * np.float32(1e3), key * np.float32(1e-36)
    assert_attention_correct(query, key, value, scale=1e36)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shift", [-500.0, 3.0, 500.0])
def test_common_shift_of_all_logits(shift, dtype, path, isa):
    query, key, value = normal_inputs(dtype, **SIZES_OF_PATH[path])
    query[..., 0], key[..., 0] = 1.0, shift
    assert_attention_correct(query, key, value, scale=1.0)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("order", ["rising", "falling"])
def test_maximum_that_moves_with_every_block(order, dtype, path, isa):
    query, key, value = normal_inputs(dtype, **SIZES_OF_PATH[path])
    n_key = key.shape[-2]
    query[..., 0] = 1.0
    key[..., 0] = np.linspace(-80, 80, n_key)[:: 1 if order == "rising" else -1]
    assert_attention_correct(query, key, value, scale=1.0)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_common_offset_of_all_values(dtype, path, isa):
    query, key, value = normal_inputs(dtype, **SIZES_OF_PATH[path])
    assert_attention_correct(query, key, value + dtype(1000))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_values_of_every_magnitude(dtype, path, isa):
    query, key, value = normal_inputs(dtype, **SIZES_OF_PATH[path], value_width=9)
    magnitudes = np.logspace(-36, 36, 9).astype(dtype)
    out = mha_fast.attention(query, key, value * magnitudes)
    for feature, magnitude in enumerate(magnitudes):
        one = value[..., feature : feature + 1] * magnitude
        right = expected(query, key, one)
        assert_close(out[..., feature : feature + 1], right.out, right.out_limit)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("dtype", "score", "big", "tolerance"),
    [(np.float32, -87.0, 1e38, 1e-4), (np.float64, -708.0, 1e308, 1e-11)],
)
def test_smallest_weight_still_counts(dtype, score, big, tolerance, path, isa):
    """exp(score) is just above the smallest normal number; a lower score weighs nothing."""
    sizes = SIZES_OF_PATH[path] | {"head_width": 1, "value_width": 1}
    query, key, value = normal_inputs(dtype, **sizes)
    query[...], key[...], value[...] = 1, 2 * score, 1
    key[..., 0, 0], value[..., 0, 0] = 0, 0
    key[..., 100, 0], value[..., 100, 0] = score, big
    out = mha_fast.attention(query, key, value, scale=1.0)
    if isa == "amx, all sizes" and dtype == np.float32 and path == "tiles":
        # The lower parts of such a weight are subnormal: the unit takes them for 0.
        tolerance = 2.0**-8
    np.testing.assert_allclose(out, big * np.exp(score), rtol=tolerance)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("softcap", [1.0, 5.0, 30.0, 1e6])
@pytest.mark.parametrize("factor", [1e-3, 1.0, 20.0])
def test_rms_error_with_softcap(factor, softcap, dtype, path, isa):
    query, key, value = _sample(dtype, path)
    assert_rms_error_small((query * factor).astype(dtype), key, value, softcap=softcap)


@pytest.mark.parametrize("dtype", DTYPES)
def test_softcap_of_one_score_at_a_time(dtype, isa):
    """With one key the lse is the score itself, so tanh shows its own error."""
    scores = np.concatenate([-np.logspace(-30, 4, 300), [0], np.logspace(-30, 4, 300)])
    query = scores[:, None].astype(dtype)
    one = np.ones((1, 1), dtype)
    lse = mha_fast.attention(query, one, one, scale=1.0, softcap=1.0, return_lse=True)[1]
    right = np.tanh(query[:, 0].astype(np.longdouble))
    np.testing.assert_allclose(lse, right, rtol=8 * np.finfo(dtype).eps, atol=0)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_alibi_far_from_the_keys(dtype, path, isa):
    inputs = normal_inputs(dtype, **SIZES_OF_PATH[path])
    slopes = np.array([0.0, 1e-3, 0.5, -0.01])
    assert_attention_correct(*inputs, alibi_slopes=slopes, query_offset=10_000)
    assert_attention_correct(*inputs, alibi_slopes=slopes, query_offset=-10_000)


def test_reference_agrees_with_the_usual_five_lines():
    inputs = normal_inputs(np.float64, n_query=20, n_key=30)
    mask = np.random.default_rng(0).random((20, 30)) < 0.8
    mask[:, 0] = True
    for options in ({}, {"is_causal": True}, {"attn_mask": mask},
                    {"attn_mask": np.where(mask, 0.5, -np.inf)}):  # fmt: skip
        right = reference.naive_attention(*inputs, **options)
        np.testing.assert_allclose(reference.attention(*inputs, **options), right, atol=1e-14)
