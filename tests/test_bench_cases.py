"""The benchmarks' problems are what they say, and a wrong result of one is noticed."""

from dataclasses import replace

import numpy as np
import pytest
from _bench import DTYPES, SMALL, cases

import mha_fast
from bench import accuracy
from mha_fast import reference

small_cases = pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name)


@pytest.mark.parametrize(("n_query", "n_key"), [(1, 1), (1, 5), (5, 1), (4, 7), (7, 4), (0, 3)])
def test_pairs_are_those_of_the_triangle(n_query, n_key):
    case = cases.Case("", 1, 1, 1, n_query, n_key, 1)
    assert case.n_pairs == n_query * n_key
    assert replace(case, is_causal=True).n_pairs == np.tri(n_query, n_key).sum()


def test_flop_counts_both_products_of_every_head():
    assert cases.CASES["odd"].n_flop == 2 * (2 * 8 * 8 * 37 * 53 * 80)


@pytest.mark.parametrize("dtype", DTYPES)
@small_cases
def test_bytes_are_inputs_and_output_once(case, dtype):
    case = replace(case, dtype=dtype)
    inputs = cases.make_inputs(case)
    arrays = [array for array in (*inputs, inputs.query) if array is not None]
    assert case.n_bytes == sum(array.nbytes for array in arrays)
    assert {array.dtype for array in arrays[:3]} == {cases.dtype_of(dtype)}


@small_cases
def test_inputs_depend_on_the_seed_alone(case):
    one, again, other = (cases.make_inputs(case, seed) for seed in (1, 1, 2))
    for array, equal, different in zip(one[:3], again, other, strict=False):
        assert np.array_equal(array, equal)
        assert not np.array_equal(array, different)


@small_cases
def test_expected_rows_are_rows_of_the_reference(case):
    inputs = cases.make_inputs(case)
    expected = accuracy.expected_rows(case, inputs)
    full = reference.attention(*inputs, is_causal=case.is_causal)
    np.testing.assert_allclose(expected.values, full[..., expected.rows, :], rtol=1e-12, atol=1e-15)
    assert {0, case.n_query - 1} <= set(expected.rows)


def test_scores_are_those_of_all_heads():
    assert cases.CASES["odd"].n_score == 8 * 8 * 37 * 53


def test_names_of_one_head_need_no_list():
    assert cases.find("one_head_700_causal") == cases.one_head(700, True)
    assert cases.one_head(700, False).shape == "1, 1, 700, 700, 64"
    assert cases.find("tiny") == cases.CASES["tiny"]
    with pytest.raises(ValueError, match="no case 'one_head'; there are prefill_512_e64, "):
        cases.find("one_head")


@pytest.mark.parametrize("dtype", DTYPES)
@small_cases
def test_right_result_passes_and_a_wrong_one_is_refused(case, dtype):
    case = replace(case, dtype=dtype)
    inputs = cases.make_inputs(case)
    expected = accuracy.expected_rows(case, inputs)
    result = mha_fast.attention(*inputs, is_causal=case.is_causal)
    assert expected.error_of(result) <= expected.bound.max()
    result[-1, -1, -1, -1] = np.nan
    with pytest.raises(accuracy.WrongResult, match="error nan"):
        expected.error_of(result)
    with pytest.raises(accuracy.WrongResult, match="has shape"):
        expected.error_of(result[..., :-1])


@pytest.mark.parametrize("precision", ["highest", "high"])
def test_error_counts_in_the_roundings_of_the_precision(precision):
    inputs = cases.make_inputs(SMALL[0])
    expected = accuracy.expected_rows(SMALL[0], inputs)
    result = mha_fast.attention(*inputs)
    result[0, 0, 0, 0] += 20 * expected.bound.max()
    if precision == "high":
        assert expected.error_of(result, precision) > expected.bound.max()
    else:
        with pytest.raises(accuracy.WrongResult, match="against float64"):
            expected.error_of(result, precision)


@pytest.mark.parametrize("dtype", DTYPES)
def test_zeros_are_refused_where_the_right_result_is_small(dtype):
    case = cases.Case("", 1, 1, 1, 8, 4000, 16, dtype=dtype)
    inputs = cases.make_inputs(case)
    expected = accuracy.expected_rows(case, inputs)
    with pytest.raises(accuracy.WrongResult, match="against float64"):
        expected.error_of(np.zeros_like(inputs.query))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", [c for c in SMALL if c.is_causal], ids=lambda case: case.name)
def test_result_without_the_causal_rule_is_refused(case, dtype):
    case = replace(case, dtype=dtype)
    inputs = cases.make_inputs(case)
    with pytest.raises(accuracy.WrongResult, match="against float64"):
        accuracy.expected_rows(case, inputs).error_of(mha_fast.attention(*inputs))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", [c for c in SMALL if c.mask], ids=lambda case: case.name)
def test_result_without_the_mask_is_refused(case, dtype):
    case = replace(case, dtype=dtype)
    inputs = cases.make_inputs(case)
    with pytest.raises(accuracy.WrongResult, match="against float64"):
        unmasked = mha_fast.attention(*inputs[:3], is_causal=case.is_causal)
        accuracy.expected_rows(case, inputs).error_of(unmasked)
