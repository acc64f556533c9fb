"""Faults that other implementations shipped: small inputs whose right answer is known by heart.

Each case runs through the kernel, with every instruction set, and through the reference, which
is judged here by numbers that do not come from a program.
"""

import numpy as np
import pytest
from _support import DTYPES, ISAS, using_isa

import mha_fast
from mha_fast import reference

INF = np.inf


@pytest.fixture(params=["reference", *ISAS])
def attend(request):
    """The reference, and the kernel once per instruction set."""
    if request.param == "reference":
        yield reference.attention
        return
    with using_isa(request.param):
        yield mha_fast.attention


@pytest.fixture(params=DTYPES)
def dtype(request):
    return request.param


def _zeros(dtype, n_query, n_key, *, head_width=4, heads=()):
    """Zero queries: every output row is the mean of the values it may see."""
    rng = np.random.default_rng(0)
    query = np.zeros((*heads, n_query, head_width), dtype)
    return query, rng.standard_normal((*heads, n_key, head_width)).astype(dtype)


def _counting(dtype, n_key, start=0, heads=()):
    """V_j = j + start."""
    numbers = np.arange(start, n_key + start, dtype=dtype)[:, None]
    return np.broadcast_to(numbers, (*heads, n_key, 1))


def _close(result, right, dtype):
    np.testing.assert_allclose(result, right, rtol=8 * np.finfo(dtype).eps, atol=1e-30)


@pytest.mark.parametrize("n", [640, 64, 65, 130, 1000])
@pytest.mark.parametrize("width", [10, 1, 64, 65, 200])
def test_band_whose_first_blocks_are_wholly_masked(width, n, attend, dtype):
    query, key = _zeros(dtype, n, n)
    i, j = np.ogrid[:n, :n]
    mask = np.where((j <= i) & (j > i - width), 0, -INF).astype(dtype)
    out, lse = attend(query, key, _counting(dtype, n), mask, return_lse=True)
    seen = np.minimum(np.arange(n) + 1, width)
    _close(out[:, 0], np.arange(n) - (seen - 1) / 2, dtype)
    np.testing.assert_allclose(lse, np.log(seen), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("n_query", [3, 1, 40])
@pytest.mark.parametrize("n_key", [4, 65, 600])
@pytest.mark.parametrize("way", ["bool", "float", "length", "no keys", "causal", "window"])
def test_row_with_no_key(way, n_key, n_query, attend, dtype):
    n_key = 0 if way == "no keys" else n_key
    query, key = _zeros(dtype, n_query, n_key, heads=(1, 1))
    options = {
        "bool": {"attn_mask": np.zeros((n_query, n_key), bool)},
        "float": {"attn_mask": np.full((1, n_key), -INF, dtype)},
        "length": {"kv_lengths": [0]},
        "no keys": {},
        "causal": {"is_causal": True, "query_offset": -n_query},
        "window": {"window": (0, 5), "query_offset": n_key},
    }[way]
    value = np.ones((1, 1, n_key, 2), dtype)
    out, lse = attend(query, key, value, **options, return_lse=True)
    np.testing.assert_array_equal(out, np.zeros((1, 1, n_query, 2)))
    np.testing.assert_array_equal(lse, np.full((1, 1, n_query), -INF))


def test_memory_past_the_length(attend, dtype):
    rng = np.random.default_rng(0)
    query, key, value = (rng.standard_normal((2, 1, 3, 4)).astype(dtype) for _ in range(3))
    key[0, :, 1:] = value[0, :, 1:] = np.nan
    out = attend(query, key, value, kv_lengths=[1, 3])
    np.testing.assert_array_equal(out[0], value[0, :, [0, 0, 0]].swapaxes(0, 1))
    _close(out[1], attend(query[1], key[1], value[1]), dtype)


@pytest.mark.parametrize("row", [5, 0, 63, 64, 599])
def test_nan_value_behind_the_causal_edge(row, attend, dtype):
    query, key = _zeros(dtype, 600, 600)
    value = _counting(dtype, 600).copy()
    value[row] = np.nan
    out = attend(query, key, value, is_causal=True)
    _close(out[:row, 0], np.arange(row) / 2, dtype)
    assert np.isnan(out[row:]).all()


def test_mask_made_of_the_smallest_number(attend, dtype):
    lowest = np.finfo(dtype).min
    value = np.array([[1.0], [2.0], [6.0]], dtype)
    query, key = _zeros(dtype, 1, 3)
    _close(attend(query, key, value, np.full((1, 3), lowest)), [[3.0]], dtype)
    _close(attend(query, key, value, np.array([[-INF, lowest, lowest]])), [[4.0]], dtype)
    query, key = _zeros(dtype, 441, 441)
    mask = np.where(np.arange(441) < 128, lowest, 0).astype(dtype)
    out = attend(query, key, _counting(dtype, 441), mask)
    _close(out, np.full((441, 1), (128 + 440) / 2), dtype)


# (L, S, first value, offset): the right rows
CAUSAL = {
    (2, 6, 0, 0): [0, 0.5],
    (2, 6, 0, "end"): [2, 2.5],
    (1, 6, 0, 0): [0],
    (1, 6, 0, "end"): [2.5],
    (4, 2, 1, "end"): [0, 0, 1, 1.5],
    (4, 2, 1, 0): [1, 1.5, 1.5, 1.5],
    (1, 6, 0, 3): [1.5],
    (3, 3, 0, "end"): [0, 0.5, 1],
    (1, 1, 5, "end"): [5],
}


@pytest.mark.parametrize("case", CAUSAL, ids=str)
def test_causal_with_unequal_lengths(case, attend, dtype):
    n_query, n_key, start, offset = case
    query, key = _zeros(dtype, n_query, n_key)
    value = _counting(dtype, n_key, start)
    out = attend(query, key, value, is_causal=True, query_offset=offset)
    _close(out[:, 0], CAUSAL[case], dtype)


def test_causal_end_means_the_last_valid_key(attend, dtype):
    query, key = _zeros(dtype, 2, 6, heads=(3, 1))
    value = _counting(dtype, 6, heads=(3, 1))
    out = attend(query, key, value, is_causal=True, query_offset="end", kv_lengths=[6, 4, 1])
    _close(out[:, 0, :, 0], [[2, 2.5], [1, 1.5], [0, 0]], dtype)


# window, is_causal, row: the right value, with V_j = j
WINDOWS = {
    ((3, 0), True, 10): 8.5,
    ((4, 0), True, 10): 8.0,
    ((2, 0), False, 5): 4.0,
    ((0, 0), False, 7): 7.0,
    ((0, 0), True, 7): 7.0,
    ((None, 0), False, 6): 3.0,
    ((0, None), False, 15): 17.0,
    ((0, 4), True, 9): 9.0,
    ((1, 2), False, 9): 9.5,
    ((9, 9), False, 0): 4.5,
    ((9, 9), False, 19): 14.5,
}


@pytest.mark.parametrize("case", WINDOWS, ids=str)
def test_window_bounds_are_inclusive(case, attend, dtype):
    window, is_causal, row = case
    query, key = _zeros(dtype, 20, 20)
    value = _counting(dtype, 20)
    out = attend(query, key, value, window=window, is_causal=is_causal)
    _close(out[row, 0], WINDOWS[case], dtype)
    alone = attend(query[:1], key, value, window=window, is_causal=is_causal, query_offset=row)
    _close(alone[0, 0], WINDOWS[case], dtype)


@pytest.mark.parametrize("n_mask", [20, 16, 0, 18, 34])
@pytest.mark.parametrize("kind", [bool, np.float32])
def test_mask_too_long_or_too_short(n_mask, kind):
    x = np.zeros((1, 2, 3, 17), np.float32).swapaxes(-1, -2)
    with pytest.raises(ValueError, match=rf"attn_mask.*\b{n_mask}\b.*\b17\b|\b17\b.*\b{n_mask}\b"):
        mha_fast.attention(x, x, x, np.zeros((17, n_mask), kind))


@pytest.mark.parametrize("shape", [(7, 7, 0, 7), (0, 0, 2, 0), (0, 7, 3, 5), (3, 4, 0, 0)])
def test_zero_sizes(shape, attend, dtype):
    x = np.zeros(shape, dtype)
    out, lse = attend(x, x, x, is_causal=True, return_lse=True)
    assert out.shape == shape
    assert lse.shape == shape[:-1]


def test_scale_of_zero_averages(attend, dtype):
    rng = np.random.default_rng(0)
    query, key = (rng.standard_normal((90, 8)).astype(dtype) for _ in range(2))
    out = attend(query, key, _counting(dtype, 90), scale=0, is_causal=True)
    _close(out[:, 0], np.arange(90) / 2, dtype)


def test_scale_decides_between_two_keys(attend, dtype):
    query, key = np.ones((1, 1), dtype), np.array([[0], [1]], dtype)
    value = _counting(dtype, 2)
    for scale, right in [(1e30, 1), (-1e30, 0), (1e-30, 0.5), (-1, 1 / (1 + np.e)), (0, 0.5)]:
        _close(attend(query, key, value, scale=scale), [[right]], dtype)


@pytest.mark.parametrize("way", ["bool", "float", "length", "causal", "window"])
@pytest.mark.parametrize("softcap", [1, 0.1, 50])
def test_softcap_does_not_leak_past_the_mask(softcap, way, attend, dtype):
    options = {
        "bool": {"attn_mask": np.array([True, False])},
        "float": {"attn_mask": np.array([0, -INF])},
        "length": {"kv_lengths": 1},
        "causal": {"is_causal": True},
        "window": {"window": (0, 0)},
    }[way]
    query, key = _zeros(dtype, 1, 2)
    out = attend(query, key, np.array([[0], [1]], dtype), softcap=softcap, **options)
    np.testing.assert_array_equal(out, [[0]])


def test_softcap_bounds_the_score_and_not_the_mask(attend, dtype):
    query, key = np.full((1, 1), 1e6, dtype), np.array([[1], [-1]], dtype)
    value = np.array([[0], [1]], dtype)
    out = attend(query, key, value, np.array([[0.0, 5.0]]), softcap=2)
    _close(out, [[1 / (1 + np.exp(4 - 5))]], dtype)


@pytest.mark.parametrize("n_query", [5, 1, 40])
def test_sinks(n_query, attend, dtype):
    query, key = _zeros(dtype, n_query, 4, heads=(3,))
    value = np.ones((3, 4, 1), dtype)
    out, lse = attend(query, key, value, sinks=[0, 1, 2], return_lse=True)
    for head, (right, total) in enumerate(
        [(0.8, 5), (0.5953904, 4 + np.e), (0.3512144, 4 + np.e**2)]
    ):
        np.testing.assert_allclose(out[head], right, rtol=1e-6)
        np.testing.assert_allclose(lse[head], np.log(total), rtol=1e-6)


def test_sink_of_a_row_without_a_key(attend, dtype):
    query, key = _zeros(dtype, 2, 3, heads=(2,))
    mask = np.array([[True], [False]])
    out, lse = attend(query, key, np.ones((2, 3, 1), dtype), mask, sinks=[1.5, -2], return_lse=True)
    np.testing.assert_array_equal(out[:, 1], [[0], [0]])
    np.testing.assert_array_equal(lse[:, 1], np.array([1.5, -2]))


def test_alibi_counts_from_the_position(attend, dtype):
    query, key = _zeros(dtype, 1, 3)
    slopes = [np.log(2)]
    for offset, weights in [(2, [1, 2, 4]), (1, [1, 2, 1]), (0, [4, 2, 1])]:
        out = attend(query, key, np.eye(3, dtype=dtype), alibi_slopes=slopes, query_offset=offset)
        np.testing.assert_allclose(out[0], np.array(weights) / sum(weights), rtol=1e-6)


def test_query_head_reads_the_key_head_of_its_group(attend, dtype):
    query, key = _zeros(dtype, 1, 2, heads=(3,))
    value = np.broadcast_to(np.array([10, 20, 30], dtype)[:, None, None], (3, 2, 1))
    query = np.repeat(query, 4, axis=0)
    _close(attend(query, key, value)[:, 0, 0], np.repeat([10, 20, 30], 4), dtype)


def test_head_mask_multiplies_the_output(attend, dtype):
    query, key = _zeros(dtype, 2, 3, heads=(2, 2))
    value = np.ones((2, 2, 3, 1), dtype)
    out = attend(query, key, value, head_mask=[0.25, -3])
    np.testing.assert_array_equal(out[:, 0], np.full((2, 2, 1), 0.25))
    np.testing.assert_array_equal(out[:, 1], np.full((2, 2, 1), -3.0))
    out = attend(query, key, value, head_mask=[[1, 0], [2, 4]])
    np.testing.assert_array_equal(out[:, :, 0, 0], [[1, 0], [2, 4]])


def test_one_softmax_against_two(attend, dtype):
    """The vectors are made for one head of width 4; cut in half they make two of width 2."""
    query = np.array([[1, 2, 0, 1]], dtype)
    key = np.array([[2, 1, 0, 0], [0, 1, 0, 2], [0, 0, 2, 1]], dtype)
    value = np.eye(4, dtype=dtype)[:3]
    np.testing.assert_allclose(attend(query, key, value), [[0.450, 0.450, 0.100, 0]], atol=5e-4)
    halves = [x.reshape(-1, 2, 2).swapaxes(0, 1) for x in (query, key, value)]
    np.testing.assert_allclose(attend(*halves).reshape(4), [0.768, 0.187, 0.284, 0], atol=5e-4)
