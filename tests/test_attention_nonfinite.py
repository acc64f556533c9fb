"""NaN and Inf: no influence where a key is excluded, and exactly the right influence elsewhere."""

import numpy as np
import pytest
from _support import (
    DTYPES,
    SIZES_OF_PATH,
    assert_attention_correct,
    assert_close,
    assert_same_bits,
    expected,
    normal_inputs,
)

import mha_fast

POISONS = (np.nan, np.inf, -np.inf, "largest")
PATHS = tuple(SIZES_OF_PATH)


def _poison(name, dtype):
    return np.finfo(dtype).max if name == "largest" else name


def _inputs(path, dtype, **sizes):
    return normal_inputs(dtype, **SIZES_OF_PATH[path] | sizes)


def _excluding(n_query, n_key):
    """Ways to exclude keys from every query, and the keys each one excludes."""
    some = np.zeros(n_key, bool)
    some[[0, 5, 63, 64, 65, 100, n_key - 1]] = True
    block = np.arange(n_key) < 70
    tail = np.arange(n_key) >= n_key - 45
    both_ends = (np.arange(n_key) < 30) | tail
    return {
        "bool mask": ({"attn_mask": ~some}, some),
        "float mask": ({"attn_mask": np.where(some, -np.inf, 0.5)}, some),
        "mask of whole blocks": ({"attn_mask": ~block}, block),
        "one length for all": ({"kv_lengths": n_key - 45}, tail),
        "causal": ({"is_causal": True, "query_offset": n_key - 45 - n_query}, tail),
        "window": (
            {"window": (n_key - 45 - n_query - 30, 0), "query_offset": n_key - 45 - n_query},
            both_ends,
        ),
        "no key at all": ({"attn_mask": np.zeros((n_query, 1), bool)}, np.ones(n_key, bool)),
    }


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("poison", POISONS)
@pytest.mark.parametrize("way", _excluding(2, 150))
def test_excluded_key_has_no_influence(way, poison, dtype, path, isa):
    query, key, value = _inputs(path, dtype)
    options, excluded = _excluding(**SIZES_OF_PATH[path])[way]
    if path == "tiles" and way == "window":
        options, excluded = {"window": (20, 0), "query_offset": 60}, np.arange(150) < 40
    right, right_lse = mha_fast.attention(query, key, value, **options, return_lse=True)
    key[..., excluded, :] = _poison(poison, dtype)
    value[..., excluded, :] = _poison(poison, dtype)
    out, lse = mha_fast.attention(query, key, value, **options, return_lse=True)
    assert np.isfinite(out).all()
    assert_same_bits(out, right)
    assert_same_bits(lse, right_lse)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("poison", POISONS)
def test_memory_past_the_length_of_each_sequence(poison, dtype, path, isa):
    query, key, value = _inputs(path, dtype, batch=(4,))
    n_key = key.shape[-2]
    lengths = np.array([0, 1, n_key // 2, n_key - 1])
    right = mha_fast.attention(query, key, value, kv_lengths=lengths)
    for b, length in enumerate(lengths):
        key[b, :, length:] = _poison(poison, dtype)
        value[b, :, length:] = _poison(poison, dtype)
    out = mha_fast.attention(query, key, value, kv_lengths=lengths)
    assert_same_bits(out, right)
    assert_same_bits(out[0], np.zeros_like(out[0]))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("operand", ["key", "value"])
@pytest.mark.parametrize(
    "options",
    [
        {"is_causal": True, "query_offset": 90},
        {"window": (3, 2), "query_offset": 95},
        {"window": (0, None), "query_offset": 80},
        {"attn_mask": np.arange(37)[:, None] % 3 == 0},
        {"attn_mask": np.where(np.arange(37)[:, None] % 3 == 0, 0.0, -np.inf)},
    ],
    ids=lambda options: " ".join(options),
)
def test_partly_visible_key_reaches_only_the_queries_that_see_it(
    options, operand, poison, dtype, path, isa
):
    query, key, value = _inputs(path, dtype)
    if "attn_mask" in options:
        options = {"attn_mask": options["attn_mask"][: query.shape[-2]]}
    for j in (90, 97, 110):
        changed = {"key": key.copy(), "value": value.copy()}
        changed[operand][1, 0, j, 4] = poison
        _assert_correct_but_for_lse_of_inf(query, changed["key"], changed["value"], **options)


def _assert_correct_but_for_lse_of_inf(query, key, value, **options):
    """Compare with the reference, and the lse only where no score is +inf or NaN."""
    out, lse = mha_fast.attention(query, key, value, return_lse=True, **options)
    right = expected(query, key, value, **options)
    assert_close(out, right.out, right.out_limit)
    ordinary = np.isfinite(right.lse) | np.isneginf(right.lse)
    assert_close(lse[ordinary], right.lse[ordinary], right.lse_limit)
    assert not np.isfinite(lse[~ordinary]).any()


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_in_a_query_reaches_its_own_row_and_no_other(dtype, path, isa):
    query, key, value = _inputs(path, dtype)
    right, right_lse = mha_fast.attention(query, key, value, return_lse=True)
    query[1, 2, 1, 0] = np.nan
    out, lse = mha_fast.attention(query, key, value, return_lse=True)
    assert np.isnan(out[1, 2, 1]).all()
    assert np.isnan(lse[1, 2, 1])
    out[1, 2, 1], lse[1, 2, 1] = right[1, 2, 1], right_lse[1, 2, 1]
    assert_same_bits(out, right)
    assert_same_bits(lse, right_lse)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_in_a_query_without_a_key_reaches_nothing(dtype, path, isa):
    query, key, value = _inputs(path, dtype)
    query[:, :, 1] = np.nan
    mask = np.ones((query.shape[-2], 1), bool)
    mask[1] = False
    out, lse = mha_fast.attention(query, key, value, mask, return_lse=True)
    assert (out[:, :, 1] == 0).all()
    assert np.isneginf(lse[:, :, 1]).all()
    assert np.isfinite(out).all()


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
def test_value_reaches_its_own_feature_and_no_other(poison, dtype, path, isa):
    query, key, value = _inputs(path, dtype)
    right, right_lse = mha_fast.attention(query, key, value, return_lse=True)
    value[1, 1, 77, 3] = poison
    out, lse = mha_fast.attention(query, key, value, return_lse=True)
    np.testing.assert_array_equal(out[1, 2:, :, 3], poison)
    out[1, 2:, :, 3] = right[1, 2:, :, 3]
    assert_same_bits(out, right)
    assert_same_bits(lse, right_lse)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_values_of_both_infinities_cancel_to_nan(dtype, path, isa):
    query, key, value = _inputs(path, dtype)
    value[0, 0, 3, 0], value[0, 0, 70, 0] = np.inf, -np.inf
    out = mha_fast.attention(query, key, value)
    assert np.isnan(out[0, :2, :, 0]).all()
    assert np.isnan(out).sum() == out[0, :2, :, 0].size


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_in_a_float_mask_reaches_its_own_row(dtype, path, isa):
    inputs = _inputs(path, dtype)
    mask = np.zeros((4, SIZES_OF_PATH[path]["n_query"], SIZES_OF_PATH[path]["n_key"]), dtype)
    right = mha_fast.attention(*inputs, mask)
    mask[3, 1, 66] = np.nan
    out, lse = mha_fast.attention(*inputs, mask, return_lse=True)
    assert np.isnan(out[:, 3, 1]).all()
    assert np.isnan(lse[:, 3, 1]).all()
    out[:, 3, 1] = right[:, 3, 1]
    assert_same_bits(out, right)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("way", ["length", "causal"])
def test_nan_in_a_float_mask_has_no_influence_on_an_excluded_key(way, path, isa):
    sizes = SIZES_OF_PATH[path]
    inputs = _inputs(path, np.float32)
    options = {"kv_lengths": 100}
    if way == "causal":
        options = {"is_causal": True, "query_offset": 99 - sizes["n_query"]}
    mask = np.random.default_rng(0).standard_normal((sizes["n_query"], sizes["n_key"]))
    right = mha_fast.attention(*inputs, mask, **options)
    mask[:, 100:] = np.nan
    assert_same_bits(mha_fast.attention(*inputs, mask, **options), right)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("option", ["sinks", "alibi_slopes"])
def test_nan_per_head_reaches_its_own_head(option, path, isa):
    inputs = _inputs(path, np.float32)
    numbers = np.array([0.5, 0.25, 1.0, 0.0], np.float32)
    right = mha_fast.attention(*inputs, **{option: numbers})
    numbers[2] = np.nan
    out, lse = mha_fast.attention(*inputs, **{option: numbers}, return_lse=True)
    assert np.isnan(out[:, 2]).all()
    assert np.isnan(lse[:, 2]).all()
    out[:, 2] = right[:, 2]
    assert_same_bits(out, right)


@pytest.mark.parametrize("path", PATHS)
def test_nan_sink_of_a_row_without_a_key(path, isa):
    out, lse = assert_attention_correct(
        *_inputs(path, np.float32), kv_lengths=[0, 9], sinks=[0.0, np.nan, 1.0, np.nan]
    )
    assert (out[0] == 0).all()
    assert np.isnan(lse[:, [1, 3]]).all()


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_gate_of_zero_silences_even_nan(dtype, path, isa):
    query, key, value = _inputs(path, dtype)
    value[:, 0] = np.nan
    out, lse = mha_fast.attention(
        query, key, value, head_mask=[0.0, 1.0, -0.0, np.nan], return_lse=True
    )
    assert (out[:, [0, 2]] == 0).all()
    assert np.isnan(out[:, [1, 3]]).all()
    assert np.isfinite(lse).all()


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("key_sign", [-1, 1])
def test_infinite_scores(key_sign, dtype, path, isa):
    """A score of -inf is a visible key of weight 0; one of +inf makes the row NaN."""
    query, key, value = _inputs(path, dtype, head_width=1, value_width=3)
    query = np.abs(query) + 0.5
    right = mha_fast.attention(query, np.delete(key, 80, axis=-2), np.delete(value, 80, axis=-2))
    key[..., 80, 0] = key_sign * np.inf
    out, lse = mha_fast.attention(query, key, value, return_lse=True)
    if key_sign < 0:
        np.testing.assert_allclose(out, right, rtol=0, atol=30 * np.finfo(dtype).eps)
        assert np.isfinite(lse).all()
    else:
        assert np.isnan(out).all()
        assert not np.isfinite(lse).any()


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n_infinite", [64, 130, "all"])
def test_rows_of_scores_that_are_minus_infinity(n_infinite, dtype, path, isa):
    query, key, value = _inputs(path, dtype, head_width=1, value_width=3)
    query = np.abs(query) + 0.5
    key[..., : (None if n_infinite == "all" else n_infinite), 0] = -np.inf
    out, lse = assert_attention_correct(query, key, value)
    assert np.isfinite(out).all()
    if n_infinite == "all":
        assert (out == 0).all()
        assert np.isneginf(lse).all()


@pytest.mark.parametrize("path", PATHS)
def test_scores_that_are_minus_infinity_beside_a_sink(path, isa):
    query, key, value = _inputs(path, np.float32, head_width=1, value_width=3)
    query, key = np.abs(query) + 0.5, np.full_like(key, -np.inf)
    out, lse = mha_fast.attention(query, key, value, sinks=[1, 2, 3, 4], return_lse=True)
    assert (out == 0).all()
    np.testing.assert_array_equal(lse, np.broadcast_to([[1], [2], [3], [4]], lse.shape))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_in_a_neighbouring_sequence_and_head(dtype, path, isa):
    query, key, value = _inputs(path, dtype, batch=(3,), n_kv_head=4)
    right = mha_fast.attention(query, key, value)
    for x in (query, key, value):
        x[1] = np.nan
        x[:, 2] = np.inf
    out = mha_fast.attention(query, key, value)
    untouched = np.ix_([0, 2], [0, 1, 3])
    assert_same_bits(out[untouched], right[untouched])
    assert np.isnan(out[1]).all()
    assert np.isnan(out[:, 2]).all()


def test_no_warning_and_no_floating_point_error_is_raised(isa):
    query, key, value = _inputs("tiles", np.float32)
    query[0], key[1], value[:, :, 5] = np.inf, np.nan, 3e38
    with np.errstate(all="raise"):
        mha_fast.attention(query, key, value, scale=1e30)


@pytest.mark.parametrize("n_query", [2, 20])
def test_query_whose_every_score_is_minus_infinity_ignores_what_values_hold(n_query, isa):
    query = np.ones((1, n_query, 2), np.float32)
    key = np.full((1, 70, 2), -np.inf, np.float32)
    value = np.full((1, 70, 3), np.nan, np.float32)
    out, lse = mha_fast.attention(query, key, value, return_lse=True)
    assert (out == 0).all()
    assert (lse == -np.inf).all()
