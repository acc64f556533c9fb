"""Each option alone and every pair of options, on both paths, against the reference."""

import functools
import itertools

import numpy as np
import pytest
from _options import N_BATCH, N_HEAD, OPTIONS, arguments_of
from _support import (
    DTYPES,
    SIZES_OF_PATH,
    assert_as_expected,
    assert_attention_correct,
    assert_close,
    assert_same_bits,
    expected,
    normal_inputs,
)

import mha_fast


@functools.cache
def _case(names, dtype, path):
    """Inputs, options and the right answer; kept, since every instruction set asks for them."""
    sizes = SIZES_OF_PATH[path]
    inputs = normal_inputs(dtype, batch=(N_BATCH,), n_head=N_HEAD, **sizes)
    options = arguments_of(names, dtype, **sizes)
    return inputs, options, expected(*inputs, **options)


def _compatible_pairs():
    for pair in itertools.combinations(OPTIONS, 2):
        if arguments_of(pair, np.float64, 2, 3) is not None:
            yield pair


@pytest.mark.parametrize("path", SIZES_OF_PATH)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", OPTIONS)
def test_option_alone(name, dtype, path, isa):
    inputs, options, right = _case((name,), dtype, path)
    result = mha_fast.attention(*inputs, **options, return_lse=True)
    assert_as_expected(result, right, dtype)


@pytest.mark.parametrize("path", SIZES_OF_PATH)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("pair", list(_compatible_pairs()), ids=" + ".join)
def test_pair_of_options(pair, dtype, path, isa):
    inputs, options, right = _case(pair, dtype, path)
    result = mha_fast.attention(*inputs, **options, return_lse=True)
    assert_as_expected(result, right, dtype)


@pytest.mark.parametrize("path", SIZES_OF_PATH)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", OPTIONS)
def test_result_does_not_depend_on_what_is_returned_beside_it(name, dtype, path, isa):
    inputs, options, _ = _case((name,), dtype, path)
    out, _ = mha_fast.attention(*inputs, **options, return_lse=True)
    given = np.empty_like(out)
    assert_same_bits(mha_fast.attention(*inputs, **options), out)
    assert mha_fast.attention(*inputs, **options, out=given) is given
    assert_same_bits(given, out)


@pytest.mark.parametrize("path", SIZES_OF_PATH)
@pytest.mark.parametrize("dtype", DTYPES)
def test_all_options_together(dtype, path, isa):
    names = ("float mask", "causal", "window", "offset per sequence", "lengths", "scale",
             "softcap", "alibi", "sinks", "head mask")  # fmt: skip
    inputs, options, right = _case(names, dtype, path)
    result = mha_fast.attention(*inputs, **options, return_lse=True)
    assert_as_expected(result, right, dtype)


@pytest.mark.parametrize("path", SIZES_OF_PATH)
@pytest.mark.parametrize("dtype", DTYPES)
def test_precision_high_stays_within_its_promise(dtype, path, isa):
    inputs, _, right = _case((), dtype, path)
    out = mha_fast.attention(*inputs, precision="high")
    # Normal inputs keep |score| under 8 and |value| under 6: 2^-16 per product, twice.
    assert_close(out, right.out, 100 * 2.0**-16 if dtype == np.float32 else right.out_limit)


@pytest.mark.parametrize("option", ["alibi_slopes", "sinks", "head_mask"])
@pytest.mark.parametrize("kind", [list, np.float32, np.float64, np.int64, ">f8"])
def test_per_head_numbers_of_any_kind(option, kind):
    numbers = [1, 0, -2, 3]
    given = numbers if kind is list else np.array(numbers, dtype=kind)
    inputs = normal_inputs(np.float32, n_query=9)
    out = mha_fast.attention(*inputs, **{option: given})
    as_float = np.array(numbers, np.float32)
    assert_same_bits(out, mha_fast.attention(*inputs, **{option: as_float}))


@pytest.mark.parametrize("kind", [list, np.int8, np.uint16, np.int32, np.int64, np.uint64, ">i4"])
def test_lengths_and_offsets_of_any_integer_kind(kind):
    def given(numbers):
        return numbers if kind is list else np.array(numbers, dtype=kind)

    inputs = normal_inputs(np.float32, n_query=9)
    options = {"kv_lengths": given([40, 7]), "query_offset": given([12, 0]), "is_causal": True}
    assert_attention_correct(*inputs, **options)


@pytest.mark.parametrize("number", [7, np.int16(7), np.uint64(7), np.array(7)])
def test_length_and_offset_as_one_number(number, isa):
    inputs = normal_inputs(np.float32, n_query=9)
    assert_attention_correct(*inputs, kv_lengths=number, query_offset=number, is_causal=True)


@pytest.mark.parametrize("offset", [-(2**60), -(2**31), -200, 200, 2**31, 2**60])
@pytest.mark.parametrize("path", SIZES_OF_PATH)
def test_offset_far_from_the_keys(offset, path, isa):
    inputs = normal_inputs(np.float64, **SIZES_OF_PATH[path])
    assert_attention_correct(*inputs, query_offset=offset, is_causal=True)
    assert_attention_correct(*inputs, query_offset=offset, window=(5, 5))


@pytest.mark.parametrize("bound", [2**31 - 1, 2**31, 2**62, 2**63 - 1])
@pytest.mark.parametrize("path", SIZES_OF_PATH)
def test_window_wider_than_everything_is_no_window(bound, path, isa):
    inputs = normal_inputs(np.float32, **SIZES_OF_PATH[path])
    out = mha_fast.attention(*inputs)
    assert_same_bits(mha_fast.attention(*inputs, window=(bound, bound)), out)
    assert_same_bits(mha_fast.attention(*inputs, window=(None, None)), out)


@pytest.mark.parametrize("path", SIZES_OF_PATH)
def test_sink_far_above_or_below_the_scores(path, isa):
    inputs = normal_inputs(np.float32, **SIZES_OF_PATH[path])
    assert_attention_correct(*inputs, sinks=np.array([1e4, -1e4, 80, -np.inf], np.float32))


@pytest.mark.parametrize("path", SIZES_OF_PATH)
def test_head_mask_leaves_the_lse_alone(path, isa):
    inputs = normal_inputs(np.float32, **SIZES_OF_PATH[path])
    _, lse = mha_fast.attention(*inputs, return_lse=True)
    gates = np.array([0, 1, 2, np.nan], np.float32)
    _, gated = mha_fast.attention(*inputs, return_lse=True, head_mask=gates)
    assert_same_bits(gated, lse)
