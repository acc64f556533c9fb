"""Masks: every way to broadcast, every layout, every kind, and patterns that hit block edges."""

import itertools

import numpy as np
import pytest
from _support import (
    DTYPES,
    SIZES_OF_PATH,
    assert_attention_correct,
    assert_same_bits,
    normal_inputs,
)

import mha_fast

MASK_KINDS = ("bool", "float16", "float32", "float64", ">f4", ">f8")


def _mask(kind, shape, seed=0):
    rng = np.random.default_rng(seed)
    if kind == "bool":
        return rng.random(shape) < 0.6
    numbers = rng.standard_normal(shape)
    return np.where(rng.random(shape) < 0.2, -np.inf, numbers).astype(kind)


def _stretched(mask):
    """The same numbers with gaps between them in every axis."""
    larger = np.zeros([2 * n for n in mask.shape], mask.dtype)
    inside = larger[(..., *(slice(None, None, 2) for _ in mask.shape))]
    inside[...] = mask
    return inside


def _backwards(mask):
    flip = (slice(None, None, -1),) * mask.ndim
    return mask[flip].copy()[flip]


MASK_LAYOUTS = {
    "contiguous": np.ascontiguousarray,
    "stretched": _stretched,
    "backwards": _backwards,
    "Fortran order": np.asfortranarray,
}


def _mask_shapes(n_query, n_key):
    sizes = itertools.product((1, 2), (1, 4), (1, n_query), (1, n_key))
    per_rank = [(4, n_query, n_key), (1, n_query, 1), (n_query, n_key), (1, n_key), (n_key,), (1,)]
    return [*sizes, *per_rank, ()]


@pytest.mark.parametrize("path", SIZES_OF_PATH)
@pytest.mark.parametrize("layout", MASK_LAYOUTS)
@pytest.mark.parametrize("kind", ["bool", "float32"])
def test_mask_equals_its_broadcast_copy(kind, layout, path, isa):
    sizes = SIZES_OF_PATH[path]
    inputs = normal_inputs(np.float32, **sizes)
    for shape in _mask_shapes(**sizes):
        mask = _mask(kind, shape)
        full = np.broadcast_to(mask, (2, 4, sizes["n_query"], sizes["n_key"]))
        right = mha_fast.attention(*inputs, full.copy(), return_lse=True)
        for given in (MASK_LAYOUTS[layout](mask), full):
            out, lse = mha_fast.attention(*inputs, given, return_lse=True)
            assert_same_bits(out, right[0])
            assert_same_bits(lse, right[1])


@pytest.mark.parametrize("path", SIZES_OF_PATH)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", MASK_KINDS)
def test_mask_of_every_kind(kind, dtype, path, isa):
    sizes = SIZES_OF_PATH[path]
    inputs = normal_inputs(dtype, **sizes)
    assert_attention_correct(*inputs, _mask(kind, (sizes["n_query"], sizes["n_key"])))
    assert_attention_correct(*inputs, _mask(kind, (2, 1, 1, sizes["n_key"])))


@pytest.mark.parametrize("path", SIZES_OF_PATH)
def test_mask_of_a_wider_dtype_is_not_rounded_to_16_bits(path, isa):
    sizes = SIZES_OF_PATH[path]
    inputs = normal_inputs(np.float32, **sizes)
    mask = _mask("float64", (sizes["n_query"], sizes["n_key"])) + 2049.0
    assert_attention_correct(*inputs, mask)
    assert_attention_correct(*inputs, np.where(np.isfinite(mask), 1e5, -np.inf))


@pytest.mark.parametrize("kind", ["float16", "bfloat16"])
@pytest.mark.parametrize("n_key", [1, 80])
@pytest.mark.parametrize("n_head", [1, 2**13])
@pytest.mark.parametrize("arithmetic", DTYPES)
def test_every_16_bit_number(arithmetic, n_head, n_key, kind, isa):
    """With one visible key and a score of 0 the lse is the mask itself."""
    dtype = np.float16 if kind == "float16" else pytest.importorskip("ml_dtypes").bfloat16
    number = np.arange(2**16, dtype=np.uint16).view(dtype).reshape(-1, n_head).T
    mask = np.full((*number.shape, n_key), -np.inf, dtype)
    here = (np.arange(number.shape[1]) % n_key)[None, :, None]
    np.put_along_axis(mask, here, number[..., None], axis=-1)
    query, one = np.zeros((*number.shape, 1), arithmetic), np.ones((n_head, n_key, 1), arithmetic)
    out, lse = mha_fast.attention(query, one, one, mask, return_lse=True)
    with np.errstate(invalid="ignore"):  # ARM raises the flag when it widens a signalling NaN
        right = number.astype(arithmetic)
    ordinary = np.isfinite(right) | np.isneginf(right)
    np.testing.assert_array_equal(lse[ordinary], right[ordinary])
    assert not np.isfinite(lse[~ordinary]).any()
    np.testing.assert_array_equal(out[ordinary][:, 0], np.isfinite(right[ordinary]))


@pytest.mark.parametrize("path", SIZES_OF_PATH)
@pytest.mark.parametrize("dtype", DTYPES)
def test_sum_of_finite_score_and_mask_below_the_range(dtype, path, isa):
    """Equal keys share the weight, also where score + mask has no finite number of its own."""
    sizes = SIZES_OF_PATH[path] | {"head_width": 1, "value_width": 3}
    query, key, value = normal_inputs(dtype, **sizes)
    lowest = np.finfo(dtype).min
    query[...], key[...] = 1, lowest / 4
    mask = np.full((sizes["n_query"], sizes["n_key"]), lowest)
    mask[:, ::2] = -np.inf
    right = value[..., 1::2, :].mean(axis=-2, keepdims=True, dtype=np.float64).repeat(2, axis=1)
    for given in (mask, mask[0]):
        out, lse = mha_fast.attention(query, key, value, given, return_lse=True)
        np.testing.assert_allclose(out, np.broadcast_to(right, out.shape), rtol=0, atol=1e-6)
        assert np.isfinite(lse).all()


@pytest.mark.parametrize("path", SIZES_OF_PATH)
def test_finite_mask_past_the_range_of_float32(path, isa):
    inputs = normal_inputs(np.float32, **SIZES_OF_PATH[path])
    sizes = SIZES_OF_PATH[path]
    mask = np.zeros((sizes["n_query"], sizes["n_key"]))
    mask[:, :100] = -1e300
    right = mha_fast.attention(*(x[..., 100:, :] if i else x for i, x in enumerate(inputs)))
    for given in (mask, mask[0]):
        np.testing.assert_allclose(mha_fast.attention(*inputs, given), right, rtol=0, atol=1e-6)
    for given in (np.full(1, -1e300), np.full_like(mask, -1e300)):
        out, lse = mha_fast.attention(*inputs, given, return_lse=True)
        assert np.isfinite(out).all()
        assert np.isfinite(lse).all()
        assert (out != 0).any()


@pytest.mark.parametrize("path", SIZES_OF_PATH)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [2.0**99, 2.0**101, 2.0**120])
def test_number_near_the_size_from_which_sums_overflow(size, dtype, path, isa):
    """The last key with a mask of 0 has all the weight, whatever way the others are added up."""
    sizes = SIZES_OF_PATH[path]
    inputs = normal_inputs(dtype, **sizes)
    mask = np.full((sizes["n_query"], sizes["n_key"]), -size, dtype)
    mask[:, -1] = 0
    right = np.broadcast_to(inputs[2][..., -1:, :].repeat(2, axis=1), (2, 4, sizes["n_query"], 12))
    assert_same_bits(mha_fast.attention(*inputs, mask), right)
    mask[:, 3] = size
    right = inputs[2][..., 3:4, :].repeat(2, axis=1)
    assert_same_bits(
        mha_fast.attention(*inputs, mask), np.broadcast_to(right, (2, 4, sizes["n_query"], 12))
    )


def test_mask_as_nested_list():
    inputs = normal_inputs(np.float32, batch=(), n_head=2, n_query=1, n_key=3)
    right = mha_fast.attention(*inputs, np.array([[True, False, True]]))
    assert_same_bits(mha_fast.attention(*inputs, [[True, False, True]]), right)


def test_true_is_any_byte_but_zero(isa):
    inputs = normal_inputs(np.float32)
    mask = _mask("bool", (37, 150))
    bytes_ = np.where(mask, np.random.default_rng(0).integers(1, 256, mask.shape), 0)
    right = mha_fast.attention(*inputs, mask)
    assert_same_bits(mha_fast.attention(*inputs, bytes_.astype(np.uint8).view(np.bool_)), right)


@pytest.mark.parametrize("path", SIZES_OF_PATH)
def test_mask_that_excludes_nothing(path, isa):
    inputs = normal_inputs(np.float64, **SIZES_OF_PATH[path])
    right = mha_fast.attention(*inputs)
    for mask in (np.array(True), np.array(0.0), np.zeros((1, 1, 1, 1)), np.ones((1, 1), bool)):
        out = mha_fast.attention(*inputs, mask)
        np.testing.assert_allclose(out, right, rtol=0, atol=1e-14)


PATTERNS = {
    "checkers": lambda i, j: (i + j) % 2 == 0,
    "band": lambda i, j: abs(i - j) < 10,
    "far band": lambda i, j: (j > i + 130) & (j < i + 140),
    "upper triangle": lambda i, j: j > i,
    "first block excluded": lambda i, j: (j >= 64) | (i < 0),
    "only the last key": lambda i, j: (j == j.max()) | (i < 0),
    "only the first key": lambda i, j: (j == 0) | (i < 0),
    "one key per query": lambda i, j: j == (i * 37) % (j.max() + 1),
    "every second block": lambda i, j: (j // 64 % 2 == 0) | (i < 0),
    "every second query": lambda i, j: (i % 2 == 0) | (j < 0),
    "blocks at odds": lambda i, j: (i // 16 + j // 64) % 2 == 0,
    "nothing": lambda i, j: (i < 0) | (j < 0),
}


@pytest.mark.parametrize("path", SIZES_OF_PATH)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("as_float", [False, True])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_pattern(pattern, as_float, dtype, path, isa):
    sizes = SIZES_OF_PATH[path]
    i, j = np.ogrid[: sizes["n_query"], : sizes["n_key"]]
    mask = PATTERNS[pattern](i, j)
    if as_float:
        mask = np.where(mask, 0.0, -np.inf).astype(dtype)
    assert_attention_correct(*normal_inputs(dtype, **sizes), mask)


@pytest.mark.parametrize("path", SIZES_OF_PATH)
@pytest.mark.parametrize("dtype", DTYPES)
def test_very_negative_finite_mask_is_an_ordinary_logit(dtype, path, isa):
    sizes = SIZES_OF_PATH[path]
    inputs = normal_inputs(dtype, **sizes)
    lowest = np.finfo(dtype).min
    mask = np.zeros((sizes["n_query"], sizes["n_key"]), dtype)
    mask[0] = lowest  # every key equally far below: still a mean
    mask[1, :-3] = -np.inf
    mask[1, -3:] = lowest
    mask[:, :70] = lowest
    assert_attention_correct(*inputs, mask)
    assert_attention_correct(*inputs, mask / 2)
    assert_attention_correct(*inputs, np.where(mask == lowest, -1e30, mask).astype(dtype))


@pytest.mark.parametrize("path", SIZES_OF_PATH)
@pytest.mark.parametrize("n_head", [1, 3])
def test_bands_from_causal_window_and_mask_agree(n_head, path, isa):
    sizes = SIZES_OF_PATH[path]
    inputs = normal_inputs(np.float64, n_head=n_head, n_kv_head=1, **sizes)
    position = 60 + np.arange(sizes["n_query"])[:, None]
    key = np.arange(sizes["n_key"])
    mask = (key <= position) & (key >= position - 9)
    options = [
        {"attn_mask": mask},
        {"attn_mask": np.where(mask, 0.0, -np.inf)},
        {"is_causal": True, "window": (9, None), "query_offset": 60},
        {"window": (9, 0), "query_offset": 60},
        {"attn_mask": key <= position, "window": (9, 5), "query_offset": 60},
    ]
    right = mha_fast.attention(*inputs, **options[0])
    for option in options:
        out, _ = assert_attention_correct(*inputs, **option)
        np.testing.assert_allclose(out, right, rtol=0, atol=1e-14)
