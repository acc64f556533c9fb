"""merge_attention(): parts over disjoint keys against the whole, empty parts, NaN, every error."""

import ml_dtypes
import numpy as np
import pytest
from _support import DTYPES, assert_as_expected, expected, normal_inputs

import mha_fast
from mha_fast._merge import merge_attention

INF, NAN = np.inf, np.nan
ALL_DTYPES = (np.float16, ml_dtypes.bfloat16, np.float32, np.float64)

# Where the keys are cut. Pieces of one key, and of none, are among them.
CUTS = {
    "halves": [75],
    "uneven": [1, 2, 70, 149],
    "empty pieces": [0, 0, 64, 64, 150],
    "every key": list(range(1, 150)),
}


def _attend_in_parts(query, key, value, cuts, **options):
    spans = zip([0, *cuts], [*cuts, key.shape[-2]], strict=True)
    return list(
        zip(
            *(
                mha_fast.attention(
                    query, key[..., a:b, :], value[..., a:b, :], return_lse=True, **options
                )
                for a, b in spans
            ),
            strict=True,
        )
    )


def _stacked(parts):
    return tuple(np.stack(part) for part in parts)


@pytest.mark.parametrize("hand_over", [tuple, _stacked])
@pytest.mark.parametrize("cuts", CUTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_parts_join_to_the_whole(dtype, cuts, hand_over):
    query, key, value = normal_inputs(dtype)
    outs, lses = hand_over(_attend_in_parts(query, key, value, CUTS[cuts]))
    result = merge_attention(outs, lses)
    assert_as_expected(result, expected(query, key, value), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_part_with_the_sink_joins_to_the_whole_with_it(dtype):
    query, key, value = normal_inputs(dtype)
    sinks = [0.5, 3.0, -2.0, 8.0]
    parts = [
        mha_fast.attention(
            query, key[..., :40, :], value[..., :40, :], sinks=sinks, return_lse=True
        ),
        mha_fast.attention(query, key[..., 40:, :], value[..., 40:, :], return_lse=True),
    ]
    result = merge_attention(*zip(*parts, strict=True))
    assert_as_expected(result, expected(query, key, value, sinks=sinks), dtype)


@pytest.mark.parametrize("dtype", ALL_DTYPES)
def test_16_bit_parts_are_added_in_float32_and_rounded_once(dtype):
    rng = np.random.default_rng(0)
    outs = rng.standard_normal((50, 30, 7)).astype(dtype)
    lses = rng.standard_normal((50, 30)).astype(np.float64 if dtype == np.float64 else np.float32)
    weights = np.exp(lses.astype(np.longdouble))
    right = (weights[..., None] * outs.astype(np.longdouble)).sum(axis=0) / weights.sum(0)[:, None]
    out, lse = merge_attention(outs, lses)
    assert out.dtype == dtype
    assert lse.dtype == lses.dtype
    sum_error = 50 * np.finfo(lses.dtype).eps  # of 50 addends of size 1
    rounding = ml_dtypes.finfo(dtype).eps / 2 * np.abs(right).astype(np.float64)
    assert np.all(np.abs(out.astype(np.longdouble) - right) <= rounding * 1.001 + sum_error)
    np.testing.assert_allclose(lse, np.log(weights.sum(axis=0)).astype(np.float64), rtol=sum_error)


@pytest.mark.parametrize("lse_dtype", [np.float32, np.float64])
@pytest.mark.parametrize("dtype", ALL_DTYPES)
def test_each_pair_of_dtypes_keeps_both(dtype, lse_dtype):
    outs, lses = np.ones((3, 2, 5), dtype), np.zeros((3, 2), lse_dtype)
    out, lse = merge_attention(outs, lses)
    assert out.dtype == dtype
    assert lse.dtype == lse_dtype
    np.testing.assert_array_equal(out, np.ones((2, 5), dtype))
    np.testing.assert_allclose(lse, np.log(3), rtol=4 * np.finfo(lse_dtype).eps)


@pytest.mark.parametrize("dtype", ALL_DTYPES)
def test_one_part_is_returned_equal_in_memory_of_its_own(dtype):
    rng = np.random.default_rng(0)
    outs = rng.standard_normal((1, 4, 9, 3)).astype(dtype)
    lses = rng.standard_normal((1, 4, 9)).astype(np.float32)
    outs[0, 1, 2], outs[0, 1, 3], outs[0, 2, 2] = -0.0, NAN, INF
    lses[0, 0, 0], lses[0, 3, 3] = INF, NAN
    outs[0, 3, 3] = NAN
    out, lse = merge_attention(outs, lses)
    assert out.dtype == dtype
    # NumPy's comparison of arrays does not know the NaN of bfloat16.
    np.testing.assert_array_equal(out.astype(np.float64), outs[0].astype(np.float64))
    np.testing.assert_array_equal(np.signbit(out), np.signbit(outs[0]))
    np.testing.assert_array_equal(lse, lses[0])
    assert not np.shares_memory(out, outs)
    assert not np.shares_memory(lse, lses)


@pytest.mark.parametrize("n_part", [1, 2, 5])
@pytest.mark.parametrize("dtype", ALL_DTYPES)
def test_only_empty_parts_give_0_and_minus_infinity(dtype, n_part):
    out, lse = merge_attention(
        np.full((n_part, 2, 3, 4), NAN, dtype), np.full((n_part, 2, 3), -INF, np.float32)
    )
    np.testing.assert_array_equal(out, np.zeros((2, 3, 4), dtype))
    np.testing.assert_array_equal(lse, np.full((2, 3), -INF))


@pytest.mark.parametrize("junk", [NAN, INF, -INF, 7.0])
@pytest.mark.parametrize("empty", [0, 1, 2])
@pytest.mark.parametrize("dtype", ALL_DTYPES)
def test_empty_part_adds_nothing_whatever_it_holds(dtype, empty, junk):
    outs = np.array([[[1, 5]], [[3, 7]]], dtype)
    lses = np.full((2, 1), -800, np.float32)
    out, lse = merge_attention(
        np.insert(outs, empty, dtype(junk), axis=0), np.insert(lses, empty, -INF, axis=0)
    )
    np.testing.assert_array_equal(out, np.array([[2, 6]], dtype))
    np.testing.assert_allclose(lse, np.log(2) - 800, rtol=1e-6)


@pytest.mark.parametrize("lse_of_nan", [0.0, -1e30, 1e30, NAN])
@pytest.mark.parametrize("dtype", ALL_DTYPES)
def test_nan_in_a_part_that_counts_reaches_its_element_alone(dtype, lse_of_nan):
    outs = np.ones((2, 3, 4), dtype)
    outs[1, 1, 2] = NAN
    lses = np.zeros((2, 3), np.float32)
    lses[1, 1] = lse_of_nan
    out, lse = merge_attention(outs, lses)
    right = np.zeros((3, 4), bool)
    right[1, slice(None) if np.isnan(lse_of_nan) else 2] = True
    np.testing.assert_array_equal(np.isnan(out), right)
    np.testing.assert_array_equal(np.isnan(lse), [False, np.isnan(lse_of_nan), False])


@pytest.mark.parametrize("dtype", DTYPES)
def test_huge_lse_neither_overflows_nor_underflows(dtype):
    big = np.finfo(dtype).max / 4
    outs = np.array([[[1.0]], [[3.0]]], dtype).repeat(6, axis=1)
    lses = np.array(
        [[big, -big, big, -big, 1000, -1000], [big, -big, -big, big, 1000, -1000]], dtype
    )
    out, lse = merge_attention(outs, lses)
    np.testing.assert_array_equal(out[:, 0], [2, 2, 1, 3, 2, 2])
    ln2 = np.log(2)
    np.testing.assert_allclose(lse, [big, -big, big, big, 1000 + ln2, -1000 + ln2], rtol=1e-6)


@pytest.mark.parametrize("dtype", ALL_DTYPES)
def test_huge_outputs_do_not_overflow(dtype):
    half = ml_dtypes.finfo(dtype).max / 2
    out, _ = merge_attention(np.full((4, 1, 1), half, dtype), np.zeros((4, 1), np.float32))
    np.testing.assert_array_equal(out, np.full((1, 1), half, dtype))


@pytest.mark.parametrize("shape", [(5,), (3, 5), (2, 0, 5), (2, 3, 0), (2, 3, 4, 5)])
def test_any_number_of_axes_and_empty_ones(shape):
    out, lse = merge_attention(np.ones((2, *shape), np.float32), np.zeros((2, *shape[:-1])))
    np.testing.assert_array_equal(out, np.ones(shape))
    assert np.shape(lse) == shape[:-1]
    np.testing.assert_allclose(lse, np.full(shape[:-1], np.log(2)))


def test_strided_read_only_and_foreign_byte_order_parts_stay_as_they_are():
    rng = np.random.default_rng(0)
    outs = rng.standard_normal((3, 4, 6)).astype(np.float32)
    lses = rng.standard_normal((3, 4)).astype(np.float32)
    right = merge_attention(outs, lses)
    foreign = [
        np.asfortranarray(outs).astype(">f4"),
        np.repeat(lses, 2, axis=1).astype(">f4")[:, ::2],
    ]
    before = [x.copy() for x in foreign]
    for x in foreign:
        x.flags.writeable = False
    for result, same in zip(merge_attention(*foreign), right, strict=True):
        np.testing.assert_array_equal(result, same)
        assert result.dtype.isnative
    for x, same in zip(foreign, before, strict=True):
        np.testing.assert_array_equal(x, same)


def _o(*shape, dtype=np.float32):
    return np.zeros(shape, dtype)


# id: (outs, lses, error, words that the message has to contain)
ERRORS = {
    "no outs": (None, [_o(3)], TypeError, "outs NoneType sequence"),
    "iterator": (iter([_o(3, 5)]), [_o(3)], TypeError, "outs iterator sequence"),
    "text": ("ab", [_o(3)], TypeError, "outs str sequence"),
    "number": ([_o(3, 5)], 1.0, TypeError, "lses float sequence"),
    "array without axes": ([_o(3, 5)], _o(), TypeError, "lses () first axis"),
    "no part": ([], [], ValueError, "outs no part at least one"),
    "no part in an array": (_o(0, 3, 5), _o(0, 3), ValueError, "outs no part at least one"),
    "fewer lses": ([_o(3, 5)] * 3, [_o(3)] * 2, ValueError, "lses 2 parts 3 outs"),
    "more lses": (_o(2, 3, 5), _o(3, 3), ValueError, "lses 3 parts 2 outs"),
    "integer outs": (_o(2, 3, 5, dtype=np.int64), _o(2, 3), TypeError, "outs[0] int64 bfloat16"),
    "object": ([[{}]], [_o()], TypeError, "outs[0] object float64"),
    "16-bit lses": (_o(2, 3, 5), _o(2, 3, dtype=np.float16), TypeError, "lses[0] float16 float32"),
    "mixed outs": (
        [_o(3, 5), _o(3, 5, dtype=np.float64)],
        _o(2, 3),
        TypeError,
        "outs[1] float64 float32 outs[0]",
    ),
    "mixed lses": (
        _o(2, 3, 5),
        [_o(3), _o(3, dtype=np.float64)],
        TypeError,
        "lses[1] float64 float32 lses[0]",
    ),
    "part without axes": ([_o()], [_o()], ValueError, "outs[0] () width"),
    "shape of outs": (
        [_o(3, 5), _o(3, 5), _o(1, 5)],
        _o(3, 3),
        ValueError,
        "outs[2] (1, 5) (3, 5) outs[0]",
    ),
    "shape of lses": (_o(2, 3, 5), _o(2, 3, 1), ValueError, "lses[0] (3, 1) (3,) outs[0]"),
    "shape of one of lses": (
        [_o(3, 5)] * 2,
        [_o(3), _o(5)],
        ValueError,
        "lses[1] (5,) (3,) outs[0]",
    ),
    "masked array": (
        [np.ma.masked_array(_o(3, 5), False)],
        [_o(3)],
        TypeError,
        "outs[0] masked array",
    ),
}


@pytest.mark.parametrize("case", ERRORS)
def test_error_names_argument_expectation_and_finding(case):
    outs, lses, error, words = ERRORS[case]
    with pytest.raises(error) as raised:
        merge_attention(outs, lses)
    message = str(raised.value)
    assert [word for word in words.split() if word not in message] == [], message
