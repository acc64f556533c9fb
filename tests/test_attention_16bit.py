"""float16 and bfloat16: widened exactly, computed in float32, rounded to nearest even once."""

import functools
import importlib.util
import itertools

import numpy as np
import pytest
from _dtypes import (
    BFLOAT16,
    DTYPES_16,
    NEEDS_BFLOAT16,
    assert_rounded_once,
    assert_same_numbers,
    expected_widened,
)
from _options import N_BATCH, N_HEAD, OPTIONS, arguments_of
from _support import SIZES_OF_PATH, assert_same_bits, normal_inputs, run_python, weight_rounding

import mha_fast
from mha_fast import reference

INF, NAN = np.inf, np.nan
OPERANDS = ("query", "key", "value")


@pytest.fixture(params=DTYPES_16)
def dtype(request):
    return request.param


@pytest.fixture(params=SIZES_OF_PATH)
def path(request):
    return request.param


def _bits(dtype):
    """Every bit pattern of a dtype."""
    return np.arange(1 << 16, dtype=np.uint16).view(dtype)


def _numbers(dtype):
    """Every finite number of a dtype, neighbours beside each other within a sign."""
    patterns = _bits(dtype)
    return patterns[np.isfinite(patterns.astype(np.float32))]


# ---- every number there is ----------------------------------------------------------------------


@pytest.mark.parametrize("width", [1024, 7])
@pytest.mark.parametrize("n_query", [1, 9])  # few rows, a row tile
@pytest.mark.parametrize("keys", ["one", "one of two"])
def test_every_value_comes_through_one_key_unchanged(keys, n_query, width, dtype, isa):
    patterns = np.resize(_bits(dtype), (-(-(1 << 16) // width), 1, width))
    value = np.full((len(patterns), 2, width), NAN, dtype)
    value[:, 1:] = patterns
    value = patterns if keys == "one" else value
    query = np.ones((len(value), n_query, 3), dtype)
    key = np.ones((len(value), value.shape[1], 3), dtype)
    seen = np.arange(value.shape[1]) == value.shape[1] - 1
    out = mha_fast.attention(query, key, value, None if keys == "one" else seen)
    for row in range(n_query):
        assert_same_numbers(out[:, row : row + 1], patterns)


def _scores_of_single_keys(query, key, n_query):
    """Log-sum-exp of one key per query: the score itself."""
    if n_query == 1:
        query, key = query[:, None, None], key[:, None, None]
        return mha_fast.attention(query, key, key, scale=1.0, return_lse=True)[1][:, 0]
    query, key = query[:, None], key[:, None]
    diagonal = {"window": (0, 0), "return_lse": True}
    return mha_fast.attention(query, key, key, scale=1.0, **diagonal)[1]


@pytest.mark.parametrize("n_query", [1, 1 << 16])
@pytest.mark.parametrize("operand", ["query", "key"])
def test_every_query_and_key_is_widened_exactly(operand, n_query, dtype, isa):
    patterns, ones = _bits(dtype), np.ones(1 << 16, dtype)
    pair = (patterns, ones) if operand == "query" else (ones, patterns)
    right = patterns.astype(np.float32)
    right[right == INF] = NAN  # inf - inf, as in the reference
    if n_query > 1 and weight_rounding(dtype):  # the matrix unit takes subnormal numbers for 0
        right[np.abs(right) < np.finfo(np.float32).smallest_normal] = 0
    np.testing.assert_array_equal(_scores_of_single_keys(*pair, n_query), right)


@pytest.mark.parametrize("n_query", [1, 9])
@pytest.mark.parametrize("step", [1, 2])  # of the keys in the mask
@pytest.mark.parametrize("mask_dtype", DTYPES_16)
def test_every_number_of_a_16_bit_mask_is_widened_exactly(mask_dtype, step, n_query, isa):
    """Of three keys the mask leaves one, and gives it the number as its score."""
    numbers = _numbers(mask_dtype)
    mask = np.full((len(numbers), 1, 1, 3 * step), -INF, mask_dtype)
    mask[..., step] = numbers[:, None, None]
    query, key = np.zeros((n_query, 2), np.float32), np.zeros((1, 3, 2), np.float32)
    query = np.broadcast_to(query, (len(numbers), 1, n_query, 2))
    lse = mha_fast.attention(query, key[None], key[None], mask[..., ::step], return_lse=True)[1]
    right = np.broadcast_to(numbers.astype(np.float32)[:, None, None], lse.shape)
    np.testing.assert_array_equal(lse, right)


@pytest.mark.parametrize("width", [1024, 7])
@pytest.mark.parametrize("n_query", [1, 9])
def test_output_halfway_between_two_numbers_goes_to_the_even_one(n_query, width, dtype, isa):
    """Two keys of equal weight and neighbouring values, for every pair of neighbours."""
    numbers = _numbers(dtype)
    # The sum of both must stay in float32, which bfloat16 reaches to the end.
    numbers = numbers[np.abs(numbers.astype(np.float32)) < 1e38]
    first = np.resize(numbers, (-(-len(numbers) // width), 1, width))
    second = (first.view(np.uint16) + np.uint16(1)).view(dtype)
    query = np.zeros((len(first), n_query, 1), dtype)
    key = np.zeros((len(first), 2, 1), dtype)
    out = mha_fast.attention(query, key, np.concatenate([first, second], axis=1))
    even = np.where(first.view(np.uint16) % 2 == 0, first, second)
    assert_same_numbers(out, np.broadcast_to(even, out.shape))


@pytest.mark.parametrize("n_query", [1, 9])
def test_output_just_beside_halfway_goes_to_the_nearer_number(n_query, dtype, isa):
    """A third value moves the mean of two off the tie by less than 16 bits can tell."""
    first = np.array([1.0, -1.0, 3.0, -3.0, 0.125], dtype)
    first = (first[:, None].view(np.uint16) + np.arange(4, dtype=np.uint16)).view(dtype).ravel()
    second = (first.view(np.uint16) + np.uint16(1)).view(dtype)
    query, key = np.zeros((n_query, 1), dtype), np.zeros((4, 1), dtype)
    nothing = np.zeros_like(first)
    for nudge in (-(2.0**-20), 2.0**-20):
        value = np.stack([first, second, nothing + dtype(nudge), nothing])
        out = mha_fast.attention(query, key, value, head_mask=[2.0])
        larger = np.maximum(first, second) if nudge > 0 else np.minimum(first, second)
        assert_same_numbers(out, np.broadcast_to(larger, out.shape))


# Largest number, and what must be added to it to be halfway to the next power of two.
EDGE = {"float16": (65504.0, 16.0), "bfloat16": (float.fromhex("0x1.fep127"), 2.0**119)}


@pytest.mark.parametrize("n_query", [1, 9])
@pytest.mark.parametrize("sign", [1, -1])
def test_output_becomes_infinite_exactly_where_rounding_says(sign, n_query, dtype, isa):
    largest, half = EDGE[np.dtype(dtype).name]
    below = np.nextafter(dtype(half), dtype(0))
    above = np.nextafter(dtype(half), dtype(largest))
    value = np.array([[largest] * 4, [0, below, half, above]], dtype) * dtype(sign)
    query, key = np.zeros((n_query, 1), dtype), np.zeros((2, 1), dtype)
    out = mha_fast.attention(query, key, value, head_mask=[2.0])  # the sum of both values
    right = sign * np.array([largest, largest, INF, INF])
    np.testing.assert_array_equal(out.astype(np.float64), np.broadcast_to(right, (n_query, 4)))


@pytest.mark.parametrize("n_query", [1, 9])
def test_subnormal_inputs_and_outputs(n_query, dtype, isa):
    """Sums of subnormal numbers, rounded at the smallest step there is."""
    steps = np.array([0, 1, 2, 3, 5, 100, 101, 127], np.uint16)
    value = np.array(list(itertools.product(steps, steps)), np.uint16).view(dtype).T
    query, key = np.zeros((n_query, 1), dtype), np.zeros((2, 1), dtype)
    out = mha_fast.attention(query, key, np.ascontiguousarray(value))
    right = np.rint(value.view(np.uint16).astype(np.float64).mean(axis=0))  # ties to even
    np.testing.assert_array_equal(out.view(np.uint16), np.broadcast_to(right, out.shape))


def test_subnormal_queries_and_keys_count(path, dtype, isa):
    inputs = normal_inputs(dtype, **SIZES_OF_PATH[path])
    query, key = (x.view(np.uint16) & 0x803F for x in inputs[:2])  # sign and 6 lowest bits
    query, key = query.astype(np.uint16).view(dtype), key.astype(np.uint16).view(dtype)
    scale = 1 / float(np.abs(query).max()) if dtype == np.float16 else 2.0**120
    right = expected_widened(query, inputs[1], inputs[2], scale=scale)
    result = mha_fast.attention(query, *inputs[1:], scale=scale, return_lse=True)
    assert_rounded_once(result, right, dtype)
    right = expected_widened(inputs[0], key, inputs[2], scale=scale)
    result = mha_fast.attention(inputs[0], key, inputs[2], scale=scale, return_lse=True)
    assert_rounded_once(result, right, dtype)


def test_score_far_past_the_largest_float16(path, dtype, isa):
    n_query, n_key = SIZES_OF_PATH[path].values()
    query, key = np.full((n_query, 64), 576, dtype), np.zeros((n_key, 64), dtype)
    key[0] = 382
    value = np.random.default_rng(0).standard_normal((n_key, 5)).astype(dtype)
    out, lse = mha_fast.attention(query, key, value, return_lse=True)
    assert_same_bits(out, np.broadcast_to(value[0], out.shape).copy())
    exact = 8 * 576 * float(key[0, 0])
    np.testing.assert_allclose(lse, np.full(n_query, exact), rtol=1e-6)


# ---- masks keep their own dtype -----------------------------------------------------------------


@pytest.mark.parametrize("n_query", [1, 9])
@pytest.mark.parametrize("mask_dtype", [np.float32, np.float64])
def test_wide_mask_is_not_rounded_to_16_bits(mask_dtype, n_query, dtype, isa):
    query, key = np.zeros((n_query, 4), dtype), np.zeros((2, 4), dtype)
    value = np.array([[0.0], [1.0]], dtype)
    mask = np.array([4096.0, 4097.0], mask_dtype)  # the same number in 16 bits
    out = mha_fast.attention(query, key, value, mask)
    np.testing.assert_array_equal(out, np.full((n_query, 1), 1 / (1 + np.exp(-1)), dtype))
    mask = np.array([-INF, -1e6], mask_dtype)  # -inf as float16; still lets the key through
    out, lse = mha_fast.attention(query, key, value, mask, return_lse=True)
    np.testing.assert_array_equal(out, np.ones((n_query, 1), dtype))
    np.testing.assert_array_equal(lse, np.full(n_query, np.float32(-1e6)))
    mask = np.array([-INF, 1.0001], mask_dtype)
    lse = mha_fast.attention(query, key, value, mask, return_lse=True)[1]
    np.testing.assert_array_equal(lse, np.full(n_query, np.float32(1.0001)))


@pytest.mark.parametrize("mask_dtype", [*DTYPES_16, np.float32, np.float64])
def test_float_mask_of_every_dtype(mask_dtype, path, dtype, isa):
    n_query, n_key = SIZES_OF_PATH[path].values()
    inputs = normal_inputs(dtype, **SIZES_OF_PATH[path])
    mask = arguments_of(("float mask",), mask_dtype, n_query, n_key)["attn_mask"].astype(mask_dtype)
    for layout in (mask, mask[::-1, ::-1], mask.T.copy().T, mask[:1]):
        result = mha_fast.attention(*inputs, layout, return_lse=True)
        assert_rounded_once(result, expected_widened(*inputs, layout), dtype)


# ---- options ------------------------------------------------------------------------------------

# Each of these excludes keys, adds to scores or changes the end in its own way.
PARTNERS = ("bool mask", "float mask", "window", "offset at the end", "lengths", "softcap", "sinks")


def _case(names, dtype, path):
    """Inputs, options and the right answer within the limits of the instruction set in use."""
    return _case_within(names, dtype, path, weight_rounding(dtype))


@functools.cache  # most instruction sets ask for the same
def _case_within(names, dtype, path, _rounding):
    sizes = SIZES_OF_PATH[path]
    inputs = normal_inputs(dtype, batch=(N_BATCH,), n_head=N_HEAD, **sizes)
    options = arguments_of(names, np.float32, **sizes)
    return inputs, options, expected_widened(*inputs, **options)


def _pairs():
    for pair in itertools.combinations(OPTIONS, 2):
        if set(pair) & set(PARTNERS) and arguments_of(pair, np.float32, 2, 3) is not None:
            yield pair


@pytest.mark.parametrize("names", [(), *zip(OPTIONS), *_pairs()], ids=" + ".join)
def test_options_alone_and_in_pairs(names, dtype, path, isa):
    inputs, options, right = _case(names, dtype, path)
    result = mha_fast.attention(*inputs, **options, return_lse=True)
    assert_rounded_once(result, right, dtype)


def test_all_options_together(dtype, path, isa):
    names = ("float mask", "causal", "window", "offset per sequence", "lengths", "scale",
             "softcap", "alibi", "sinks", "head mask")  # fmt: skip
    inputs, options, right = _case(names, dtype, path)
    result = mha_fast.attention(*inputs, **options, return_lse=True)
    assert_rounded_once(result, right, dtype)


@pytest.mark.parametrize("name", OPTIONS)
def test_result_does_not_depend_on_what_is_returned_beside_it(name, dtype, path, isa):
    inputs, options, _ = _case((name,), dtype, path)
    out, _ = mha_fast.attention(*inputs, **options, return_lse=True)
    given = np.empty_like(out)
    assert_same_bits(mha_fast.attention(*inputs, **options), out)
    assert mha_fast.attention(*inputs, **options, out=given) is given
    assert_same_bits(given, out)
    assert_same_bits(mha_fast.attention(*inputs, **options, precision="high"), out)


# ---- sizes --------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", range(1, 41))
def test_tails_of_every_length(width, dtype, path, isa):
    few = path == "few rows"
    inputs = normal_inputs(
        dtype, batch=(), n_query=1 + width % 4 if few else 8 + width,
        n_key=490 + width if few else width, head_width=width, value_width=41 - width,
    )  # fmt: skip
    result = mha_fast.attention(*inputs, return_lse=True)
    assert_rounded_once(result, expected_widened(*inputs), dtype)


@pytest.mark.parametrize("n_key", [1, 63, 64, 65, 511, 512, 513, 1025])
@pytest.mark.parametrize("n_query", [1, 64, 257])
def test_sizes_at_the_edges_of_blocks(n_query, n_key, dtype, isa):
    inputs = normal_inputs(
        dtype, batch=(), n_head=1, n_kv_head=1, n_query=n_query, n_key=n_key, head_width=33,
        value_width=65,
    )  # fmt: skip
    result = mha_fast.attention(*inputs, is_causal=True, query_offset="end", return_lse=True)
    right = expected_widened(*inputs, is_causal=True, query_offset="end")
    assert_rounded_once(result, right, dtype)


EMPTY = {
    "query": ((2, 0, 4), (2, 5, 4), (2, 5, 3)),
    "batch": ((0, 2, 9, 4), (0, 2, 5, 4), (0, 2, 5, 3)),
    "heads": ((0, 9, 4), (0, 5, 4), (0, 5, 3)),
    "keys": ((2, 9, 4), (2, 0, 4), (2, 0, 3)),
    "keys for one row": ((2, 1, 4), (2, 0, 4), (2, 0, 3)),
    "head width": ((2, 9, 0), (2, 5, 0), (2, 5, 3)),
    "head width for one row": ((2, 1, 0), (2, 5, 0), (2, 5, 3)),
    "value width": ((2, 9, 4), (2, 5, 4), (2, 5, 0)),
    "value width for one row": ((2, 1, 4), (2, 5, 4), (2, 5, 0)),
}


@pytest.mark.parametrize("case", EMPTY)
def test_axis_of_length_0(case, dtype, isa):
    inputs = [np.ones(shape, dtype) for shape in EMPTY[case]]
    out, lse = mha_fast.attention(*inputs, return_lse=True)
    right, right_lse = reference.attention(*inputs, return_lse=True)
    assert out.dtype == dtype
    assert lse.dtype == np.float32
    np.testing.assert_array_equal(out.astype(np.float64), right)
    np.testing.assert_allclose(lse, right_lse, rtol=1e-6)


# ---- layouts ------------------------------------------------------------------------------------


def _unaligned(x):
    shifted = np.empty(x.nbytes + 1, np.uint8)[1:].view(x.dtype).reshape(x.shape)
    shifted[...] = x
    assert not shifted.flags.aligned
    return shifted


def _inside_nan(x):
    larger = np.full([n + 3 for n in x.shape], NAN, x.dtype)
    inside = larger[tuple(slice(1, 1 + n) for n in x.shape)]
    inside[...] = x
    return inside


def _read_only(x):
    x = x.copy()
    x.flags.writeable = False
    return x


LAYOUTS = {
    "heads and rows swapped": lambda x: x.swapaxes(-3, -2).copy().swapaxes(-3, -2),
    "inside a larger array": _inside_nan,
    "every second head": lambda x: x.repeat(2, axis=1)[:, ::2],
    "every second row": lambda x: x.repeat(2, axis=2)[:, :, ::2],
    "every second feature": lambda x: x.repeat(2, axis=3)[..., ::2],
    "features backwards": lambda x: x[..., ::-1].copy()[..., ::-1],
    "all backwards": lambda x: x[::-1, ::-1, ::-1, ::-1].copy()[::-1, ::-1, ::-1, ::-1],
    "features before rows": lambda x: x.swapaxes(-1, -2).copy().swapaxes(-1, -2),
    "unaligned": _unaligned,
    "read-only": _read_only,
}


@pytest.mark.parametrize("operand", OPERANDS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layout_of_one_operand(layout, operand, dtype, path, isa):
    inputs = dict(zip(OPERANDS, normal_inputs(dtype, **SIZES_OF_PATH[path]), strict=True))
    changed = LAYOUTS[layout](inputs[operand])
    before = changed.tobytes()
    out = mha_fast.attention(**inputs | {operand: changed})
    assert_same_bits(out, mha_fast.attention(**inputs))
    assert changed.tobytes() == before


@pytest.mark.parametrize("operand", OPERANDS)
@pytest.mark.parametrize("axis", [0, 1, 2, 3])
def test_axis_of_stride_0(axis, operand, dtype, path, isa):
    inputs = dict(zip(OPERANDS, normal_inputs(dtype, **SIZES_OF_PATH[path]), strict=True))
    x = inputs[operand]
    repeated = np.broadcast_to(x.take([0], axis=axis), x.shape)
    assert repeated.strides[axis] == 0
    right = mha_fast.attention(**inputs | {operand: repeated.copy()})
    assert_same_bits(mha_fast.attention(**inputs | {operand: repeated}), right)


def test_foreign_byte_order(path, isa):
    inputs = normal_inputs(np.float16, **SIZES_OF_PATH[path])
    foreign = [x.astype(x.dtype.newbyteorder()) for x in inputs]
    assert_same_bits(mha_fast.attention(*foreign), mha_fast.attention(*inputs))


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "read-only"])
def test_out_of_any_layout(layout, dtype, path, isa):
    inputs = normal_inputs(dtype, **SIZES_OF_PATH[path])
    right = mha_fast.attention(*inputs)
    out = LAYOUTS[layout](np.zeros_like(right))
    assert mha_fast.attention(*inputs, out=out) is out
    assert_same_bits(out, right)
    if layout == "inside a larger array":
        assert np.isnan(out.base).sum() == out.base.size - out.size


@pytest.mark.parametrize("shift", [-1, 0, 1, 5])
@pytest.mark.parametrize("operand", OPERANDS)
def test_out_over_an_input(operand, shift, dtype, path, isa):
    n_row = {"tiles": 70, "few rows": 7}[path]
    inputs = normal_inputs(dtype, n_kv_head=4, n_query=n_row, n_key=n_row, value_width=20)
    inputs = dict(zip(OPERANDS, inputs, strict=True))
    right = mha_fast.attention(**inputs)
    room = np.zeros(right.size + 16, dtype)
    shared = room[8 : 8 + right.size].reshape(right.shape)
    shared[...] = inputs[operand]
    out = room[8 + shift : 8 + shift + right.size].reshape(right.shape)
    mha_fast.attention(**inputs | {operand: shared}, out=out)
    assert_same_bits(out, right)


@pytest.mark.parametrize("wrong", [np.float32, np.float64, np.uint16, *DTYPES_16])
def test_out_of_another_dtype_is_an_error(wrong, dtype):
    if wrong == dtype:
        wrong = np.int16
    inputs = normal_inputs(dtype)
    out = np.full((2, 4, 37, 12), 7, wrong)
    with pytest.raises(TypeError, match=rf"^out has dtype {out.dtype}; .*{np.dtype(dtype)}"):
        mha_fast.attention(*inputs, out=out)
    assert (out == 7).all()


@pytest.mark.parametrize("wrong", [np.float32, np.float64, np.uint16, np.int16, *DTYPES_16])
@pytest.mark.parametrize("operand", OPERANDS[1:])
def test_mixed_dtypes_are_an_error(operand, wrong, dtype):
    if wrong == dtype:
        wrong = np.bool_
    inputs = dict(zip(OPERANDS, normal_inputs(dtype), strict=True))
    inputs[operand] = inputs[operand].astype(wrong)
    with pytest.raises(TypeError, match=f"^{operand} has dtype {np.dtype(wrong)}; expected"):
        mha_fast.attention(**inputs)


# ---- NaN and Inf --------------------------------------------------------------------------------


@pytest.mark.parametrize("junk", [NAN, INF, -INF])
@pytest.mark.parametrize("way", ["lengths", "mask", "window"])
def test_excluded_key_has_no_influence(way, junk, dtype, path, isa):
    n_query, n_key = SIZES_OF_PATH[path].values()
    query, key, value = normal_inputs(dtype, **SIZES_OF_PATH[path])
    seen = np.arange(n_key) < n_key - 30
    options = {
        "lengths": {"kv_lengths": n_key - 30},
        "mask": {"attn_mask": seen},
        "window": {"window": (None, n_key - 31), "query_offset": -(n_query - 1)},
    }[way]
    right = mha_fast.attention(query, key, value, **options, return_lse=True)
    key[..., n_key - 30 :, :] = value[..., n_key - 30 :, :] = junk
    result = mha_fast.attention(query, key, value, **options, return_lse=True)
    for one, clean in zip(result, right, strict=True):
        assert_same_bits(one, clean)


@pytest.mark.parametrize("junk", [NAN, INF, -INF])
@pytest.mark.parametrize("operand", OPERANDS)
def test_visible_nan_and_inf_reach_what_depends_on_them_alone(operand, junk, dtype, path, isa):
    n_query, n_key = SIZES_OF_PATH[path].values()
    inputs = dict(zip(OPERANDS, normal_inputs(dtype, **SIZES_OF_PATH[path]), strict=True))
    options = {"is_causal": True, "query_offset": n_key // 3}
    inputs[operand][1, 1, n_query // 2 if operand == "query" else n_key // 3 + 1, 3] = junk
    out, lse = mha_fast.attention(**inputs, **options, return_lse=True)
    right, right_lse = reference.attention(**inputs, **options, return_lse=True)
    for one, formula in ((out, right), (lse, right_lse)):
        assert np.isfinite(formula).any()
        one = one.astype(np.float64)
        np.testing.assert_array_equal(np.isnan(one), np.isnan(formula))
        np.testing.assert_array_equal(one[np.isinf(formula)], formula[np.isinf(formula)])
        np.testing.assert_array_equal(np.isinf(one), np.isinf(formula))


# ---- threads, and the whole -----------------------------------------------------------------------

SHAPES = {
    "tiles": {"n_query": 300, "n_key": 300},
    "few rows": {"n_query": 1, "n_key": 2600},
    "many heads": {"n_query": 1, "n_key": 40, "n_head": 64, "n_kv_head": 64},
}


@pytest.mark.parametrize("shape", SHAPES)
def test_same_bits_for_any_number_of_threads(shape, dtype, isa):
    inputs = normal_inputs(dtype, **SHAPES[shape])
    options = {"is_causal": True, "query_offset": "end", "return_lse": True}
    right = mha_fast.attention(*inputs, **options, num_threads=1)
    for num_threads in (2, 3, 7, None):
        result = mha_fast.attention(*inputs, **options, num_threads=num_threads)
        for one, same in zip(result, right, strict=True):
            assert_same_bits(one, same)


@pytest.mark.parametrize("shape", SHAPES)
def test_same_bits_alone_and_inside_a_batch(shape, dtype, isa):
    batch = normal_inputs(dtype, **{"batch": (3,), **SHAPES[shape]})
    out, lse = mha_fast.attention(*batch, kv_lengths=[20, 0, 33], return_lse=True)
    for b, length in enumerate((20, 0, 33)):
        alone = mha_fast.attention(*(x[b] for x in batch), kv_lengths=length, return_lse=True)
        assert_same_bits(out[b], alone[0])
        assert_same_bits(lse[b], alone[1])


TORCH = """
import numpy as np
import torch

rng = np.random.default_rng(0)
query, key, value = (
    torch.from_numpy(rng.standard_normal((1, 8, 2048, 64), dtype=np.float32)).to(torch.bfloat16)
    for _ in range(3)
)
out = torch.nn.functional.scaled_dot_product_attention(query, key, value)
np.save("torch.npy", out.float().numpy())
"""


@pytest.fixture(scope="module")
def long_bfloat16(tmp_path_factory):
    """Inputs, the right output, and the rms error of torch; torch runs in a process of its own,
    since it brings an OpenMP runtime that other tests do not expect here."""
    if importlib.util.find_spec("torch") is None:
        pytest.skip("torch is not installed")
    folder = tmp_path_factory.mktemp("torch")
    process = run_python(TORCH, folder)
    assert process.returncode == 0, process.stderr
    rng = np.random.default_rng(0)
    inputs = [
        rng.standard_normal((1, 8, 2048, 64), dtype=np.float32).astype(BFLOAT16) for _ in range(3)
    ]
    heads = range(8)  # one by one: the reference writes all weights out
    right = np.concatenate(
        [reference.attention(*(x[:, h : h + 1] for x in inputs)) for h in heads], axis=1
    )
    return inputs, right, _rms(np.load(folder / "torch.npy") - right)


def _rms(x):
    return np.sqrt(np.mean(np.square(x)))


@NEEDS_BFLOAT16
def test_rms_error_of_bfloat16_is_no_larger_than_that_of_torch(long_bfloat16, isa):
    inputs, right, error_of_torch = long_bfloat16
    error = _rms(mha_fast.attention(*inputs).astype(np.float64) - right)
    if isa.startswith("amx"):
        assert 0 < error <= 1.01 * error_of_torch  # its weights are rounded too
        return
    assert 0 < error <= error_of_torch
    # Not luck: what is left is the one rounding.
    assert error <= 1.01 * _rms(right.astype(BFLOAT16).astype(np.float64) - right)
