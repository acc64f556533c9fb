"""KVCache: any way of filling it equals the one-shot call; what fails changes nothing."""

import copy
import functools
import sys
import tracemalloc

import ml_dtypes
import numpy as np
import pytest
from _support import (
    Expected,
    assert_close,
    assert_same_bits,
    expected,
    largest,
    normal_inputs,
    run_python,
    weight_rounding,
)

import mha_fast
from mha_fast import reference
from mha_fast.cache import KVCache
from mha_fast.cache import _contiguous as cache_module

INF, NAN = np.inf, np.nan
ALL_DTYPES = (np.float16, ml_dtypes.bfloat16, np.float32, np.float64)
HEADS = {"one group each": (3, 3), "grouped": (6, 2), "one key/value head": (4, 1)}


def _right(query, key, value, **options):
    """What `_support.expected` gives, for 16-bit dtypes too: float32, rounded at the end."""
    dtype = query.dtype
    if dtype.itemsize > 2:
        return expected(query, key, value, **options)
    out, lse = reference.attention(query, key, value, **options, return_lse=True)
    wide = [x.astype(np.float32) for x in (query, key, value)]
    same_out, same_lse = reference._attention_in(np.float32, *wide, **options)
    out_error = np.abs(same_out.astype(dtype).astype(np.float64) - out).max()
    lse_error = np.abs(same_lse - lse).max() + 2 * np.finfo(np.float32).eps * np.abs(lse).max()
    rounding = weight_rounding(dtype)
    out_error += rounding * largest(value.astype(np.float32))
    return Expected(out, lse, 2 * out_error, 2 * lse_error + rounding)


def _cache_for(key, value, capacity=0):
    n_batch, n_kv_head, _, head_width = key.shape
    return KVCache(
        n_batch, n_kv_head, head_width, value.shape[-1], dtype=key.dtype, capacity=capacity
    )


def _filled(lengths, dtype=np.float32, capacity=0, n_kv_head=2, seed=0):
    """A cache of random tokens, and what each of its sequences holds."""
    rng = np.random.default_rng(seed)
    n_batch, longest = len(lengths), max(lengths, default=0)
    key = rng.standard_normal((n_batch, n_kv_head, longest, 5)).astype(dtype)
    value = rng.standard_normal((n_batch, n_kv_head, longest, 3)).astype(dtype)
    cache = _cache_for(key, value, capacity)
    cache.append(key, value, counts=lengths)
    return cache, [(key[i, :, :n], value[i, :, :n]) for i, n in enumerate(lengths)]


def _assert_holds(cache, sequences):
    """Every sequence of the cache is the given (key, value), to the bit."""
    np.testing.assert_array_equal(cache.lengths, [key.shape[1] for key, _ in sequences])
    for i, (key, value) in enumerate(sequences):
        assert_same_bits(cache.keys[i, :, : key.shape[1]], key)
        assert_same_bits(cache.values[i, :, : key.shape[1]], value)


def _contents(cache):
    return [
        (cache.keys[i, :, :n].copy(), cache.values[i, :, :n].copy())
        for i, n in enumerate(cache.lengths)
    ]


# ---- the one-shot result ----------------------------------------------------------------------


@functools.cache
def _one_shot(dtype, heads):
    """300 tokens, and the right causal result for them."""
    n_head, n_kv_head = HEADS[heads]
    inputs = normal_inputs(dtype, n_head=n_head, n_kv_head=n_kv_head, n_query=300, n_key=300)
    return *inputs, _right(*inputs, is_causal=True)


@pytest.mark.parametrize("chunk", [1, 7, 64, 300])
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("dtype", ALL_DTYPES)
def test_300_tokens_in_chunks_equal_the_one_shot_causal_result(dtype, heads, chunk):
    query, key, value, right = _one_shot(dtype, heads)
    cache = _cache_for(key, value)
    parts = []
    for start in range(0, 300, chunk):
        tokens = np.s_[:, :, start : start + chunk]
        cache.append(key[tokens], value[tokens])
        parts.append(cache.attend(query[tokens], return_lse=True))
    out, lse = (np.concatenate(part, axis=2) for part in zip(*parts, strict=True))
    assert out.dtype == dtype
    assert lse.dtype == (np.float64 if dtype == np.float64 else np.float32)
    assert_close(out.astype(right.out.dtype), right.out, right.out_limit)
    assert_close(lse, right.lse, right.lse_limit)


@pytest.mark.parametrize("most", [1, 3, 40])
@pytest.mark.parametrize("dtype", ALL_DTYPES)
def test_different_numbers_of_tokens_per_sequence(dtype, most):
    """Each sequence gets its own result, 0 in the padding, and NaN in padding goes nowhere."""
    rng = np.random.default_rng(most)
    n_batch, n_step = 4, 12
    counts = rng.integers(0, most + 1, (n_step, n_batch))
    counts[:, 3] = 0  # a sequence that never begins
    total = counts.sum(axis=0)
    query, key, value = normal_inputs(
        dtype, batch=(n_batch,), n_query=total.max(), n_key=total.max()
    )
    cache = _cache_for(key, value)
    outs, lses = np.zeros((*query.shape[:3], value.shape[3]), dtype), np.zeros(query.shape[:3])
    for step in range(n_step):
        begin = counts[:step].sum(axis=0)
        new = [np.full((n_batch, x.shape[1], most, x.shape[3]), NAN, dtype) for x in (query, key)]
        new.append(np.full((n_batch, value.shape[1], most, value.shape[3]), NAN, dtype))
        for b, (first, n) in enumerate(zip(begin, counts[step], strict=True)):
            for x, padded in zip((query, key, value), new, strict=True):
                padded[b, :, :n] = x[b, :, first : first + n]
        cache.append(new[1], new[2], counts=counts[step])
        out, lse = cache.attend(new[0], counts=counts[step], return_lse=True)
        for b, (first, n) in enumerate(zip(begin, counts[step], strict=True)):
            outs[b, :, first : first + n] = out[b, :, :n]
            lses[b, :, first : first + n] = lse[b, :, :n]
            np.testing.assert_array_equal(out[b, :, n:].astype(np.float32), 0)
            np.testing.assert_array_equal(lse[b, :, n:], -INF)
    np.testing.assert_array_equal(cache.lengths, total)
    for b, n in enumerate(total[:3]):
        right = _right(query[b, :, :n], key[b, :, :n], value[b, :, :n], is_causal=True)
        assert_close(outs[b, :, :n].astype(right.out.dtype), right.out, right.out_limit)
        assert_close(lses[b, :, :n], right.lse, right.lse_limit)


# One call for each option that attend() hands on, and all together.
_WITH_3_QUERIES = {
    "nothing": {},
    "bool mask": {"attn_mask": np.arange(70) % 3 > 0},
    "float mask": {"attn_mask": np.linspace(-3, 3, 210).reshape(3, 70)},
    "not causal": {"is_causal": False},
    "window": {"window": (10, 0)},
    "scale": {"scale": -0.7},
    "softcap": {"softcap": 0.5},
    "alibi": {"alibi_slopes": [0.5, 0.25, 0.1, 0.0]},
    "sinks": {"sinks": [1.0, -2.0, 0.0, 5.0]},
    "gates": {"head_mask": [1.0, 0.0, -0.5, 2.0]},
    "precision": {"precision": "high"},
    "threads": {"num_threads": 1},
}
_WITH_3_QUERIES["all"] = {k: v for x in _WITH_3_QUERIES.values() for k, v in x.items()}


@pytest.mark.parametrize("return_lse", [False, True])
@pytest.mark.parametrize("with_out", [False, True])
@pytest.mark.parametrize("options", _WITH_3_QUERIES)
def test_attend_is_attention_at_the_end_of_each_sequence(options, with_out, return_lse):
    lengths = [70, 1, 33, 0]
    cache, sequences = _filled(lengths)
    query = np.random.default_rng(1).standard_normal((4, 4, 3, 5), dtype=np.float32)
    key, value = np.full((4, 2, 70, 5), NAN, np.float32), np.full((4, 2, 70, 3), NAN, np.float32)
    for b, (k, v) in enumerate(sequences):
        key[b, :, : lengths[b]], value[b, :, : lengths[b]] = k, v
    options = {"is_causal": True} | _WITH_3_QUERIES[options]
    right = mha_fast.attention(
        query, key, value, kv_lengths=lengths, query_offset="end", return_lse=True, **options
    )
    out = np.full((4, 4, 3, 3), NAN, np.float32) if with_out else None
    result = cache.attend(query, out=out, return_lse=return_lse, **options)
    results = result if return_lse else (result,)
    assert not with_out or results[0] is out
    for array, same in zip(results, right, strict=False):
        assert_same_bits(array, same)


def test_causal_is_the_default():
    cache, _ = _filled([9, 9])
    query = np.random.default_rng(1).standard_normal((2, 2, 4, 5), dtype=np.float32)
    assert_same_bits(cache.attend(query), cache.attend(query, is_causal=True))
    assert not np.array_equal(cache.attend(query), cache.attend(query, is_causal=False))


@pytest.mark.parametrize("return_lse", [False, True])
def test_padding_with_a_sink_and_out_is_still_0_and_minus_infinity(return_lse):
    cache, _ = _filled([9, 0, 5])
    out = np.full((3, 5, 2, 3), NAN, np.float32).swapaxes(1, 2)
    result = cache.attend(
        np.ones((3, 2, 5, 5), np.float32),
        counts=[5, 2, 0],
        sinks=[0.0, 1.0],
        out=out,
        return_lse=return_lse,
    )
    assert (result[0] if return_lse else result) is out
    assert np.all(out[0] != 0)
    np.testing.assert_array_equal(out[1:], 0)
    if return_lse:
        right = [[0, 0, -INF, -INF, -INF], [1, 1, -INF, -INF, -INF]]  # no key: the sink alone
        np.testing.assert_array_equal(result[1][1], right)
        np.testing.assert_array_equal(result[1][2], np.full((2, 5), -INF))


def test_one_count_serves_all_sequences():
    key, value = np.ones((2, 1, 6, 4), np.float32), np.ones((2, 1, 6, 4), np.float32)
    cache = _cache_for(key, value)
    cache.append(key, value, counts=2)
    np.testing.assert_array_equal(cache.lengths, [2, 2])
    out = cache.attend(key, counts=2)
    np.testing.assert_array_equal(out, np.repeat([1, 1, 0, 0, 0, 0], 4).reshape(6, 4) + 0 * out)


@pytest.mark.parametrize("n_query", [1, 5])
def test_nothing_left_in_the_cache_gives_0(n_query):
    cache = KVCache(2, 3, 4, 5)
    cache.append(np.ones((2, 3, 1, 4), np.float32), np.ones((2, 3, 1, 5), np.float32))
    cache.truncate(0)
    out, lse = cache.attend(np.ones((2, 6, n_query, 4), np.float32), return_lse=True)
    np.testing.assert_array_equal(out, np.zeros((2, 6, n_query, 5)))
    np.testing.assert_array_equal(lse, np.full((2, 6, n_query), -INF))


@pytest.mark.parametrize("sizes", [(0, 2, 4, 3), (2, 0, 4, 3), (2, 2, 0, 3), (2, 2, 4, 0)])
def test_sizes_of_0(sizes):
    n_batch, n_kv_head, head_width, value_width = sizes
    cache = KVCache(*sizes)
    for n_token in (3, 0, 1):
        cache.append(
            np.ones((n_batch, n_kv_head, n_token, head_width), np.float32),
            np.ones((n_batch, n_kv_head, n_token, value_width), np.float32),
        )
    cache.reorder(np.arange(n_batch)[::-1])
    np.testing.assert_array_equal(cache.lengths, [4] * n_batch)
    out = cache.attend(np.ones((n_batch, n_kv_head * 2, 1, head_width), np.float32))
    np.testing.assert_array_equal(out, np.ones((n_batch, n_kv_head * 2, 1, value_width)))


def test_any_layout_of_new_tokens_is_stored():
    rng = np.random.default_rng(0)
    token_major = rng.standard_normal((2, 6, 3, 4)).astype(">f4")
    token_major.flags.writeable = False
    key, value = token_major.swapaxes(1, 2), token_major.swapaxes(1, 2)[..., ::-2]
    cache = KVCache(2, 3, 4, 2)
    cache.append(key, value)
    cache.append(key[:, :, ::-1], value[:, :, ::-1])
    np.testing.assert_array_equal(cache.keys, np.concatenate([key, key[:, :, ::-1]], axis=2))
    np.testing.assert_array_equal(cache.values, np.concatenate([value, value[:, :, ::-1]], axis=2))


def test_part_of_the_cache_can_be_appended_to_it():
    cache, sequences = _filled([4, 4], capacity=6)
    for _ in range(3):  # in place first, then with growth
        cache.append(cache.keys[:, :, :2], cache.values[:, :, :2])
    right = [
        tuple(np.concatenate([x, x[:, :2], x[:, :2], x[:, :2]], axis=1) for x in pair)
        for pair in sequences
    ]
    _assert_holds(cache, right)


# ---- growth and memory ------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ALL_DTYPES)
def test_growth_keeps_what_is_there(dtype):
    rng = np.random.default_rng(0)
    key = rng.standard_normal((3, 2, 200, 5)).astype(dtype)
    value = rng.standard_normal((3, 2, 200, 4)).astype(dtype)
    cache = _cache_for(key, value)
    ends = np.zeros(3, int)
    capacities = set()
    while ends.max() < 190:
        counts = rng.integers(0, 7, 3)
        new = [np.stack([x[b, :, e : e + 6] for b, e in enumerate(ends)]) for x in (key, value)]
        cache.append(*new, counts=counts)
        ends += counts
        capacities.add(cache.capacity)
        _assert_holds(cache, [(key[b, :, :e], value[b, :, :e]) for b, e in enumerate(ends)])
    assert len(capacities) <= 8  # it doubles: 190 tokens need no more steps from 1


def test_capacity_grows_by_doubling_or_to_what_is_needed():
    cache = KVCache(1, 1, 1, capacity=5)
    capacities = []
    for n_token in (5, 1, 4, 1, 100):
        cache.append(*np.ones((2, 1, 1, n_token, 1), np.float32))
        capacities.append(cache.capacity)
    assert capacities == [5, 10, 10, 20, 111]


def test_no_growth_within_the_capacity():
    cache = KVCache(1, 2, 4, capacity=10)
    cache.append(*np.ones((2, 1, 2, 1, 4), np.float32))
    first = cache.keys
    for _ in range(9):
        cache.append(*np.ones((2, 1, 2, 1, 4), np.float32))
    assert cache.capacity == 10
    assert np.shares_memory(first, cache.keys)


def test_room_behind_a_sequence_may_hold_nan():
    cache, sequences = _filled([50, 70, 9])
    clean = cache.attend(np.ones((3, 4, 3, 5), np.float32))
    poison = [np.full((3, 2, 80, width), NAN, np.float32) for width in (5, 3)]
    cache = KVCache(3, 2, 5, 3)
    cache.append(*poison)
    cache.truncate(0)
    for b, (key, value) in enumerate(sequences):
        padded = [np.full((3, *x.shape), NAN, np.float32) for x in (key, value)]
        padded[0][b], padded[1][b] = key, value
        cache.append(*padded, counts=np.where(np.arange(3) == b, key.shape[1], 0))
    assert np.isnan(cache.keys).any()
    assert_same_bits(cache.attend(np.ones((3, 4, 3, 5), np.float32)), clean)


def _peak_bytes(call):
    call()  # what is made once is not counted
    tracemalloc.start()
    try:
        call()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("n_query", [1, 40])
@pytest.mark.parametrize("counts", [None, [1, 0]])
def test_attend_allocates_no_more_for_a_longer_cache(counts, n_query):
    query = np.ones((2, 4, n_query, 5), np.float32)
    small, large = _filled([100, 90])[0], _filled([30_000, 29_990])[0]
    assert large.nbytes > 3_000_000
    peaks = [_peak_bytes(lambda c=c: c.attend(query, counts=counts)) for c in (small, large)]
    assert peaks[1] <= peaks[0] + 1000


@pytest.mark.parametrize("counts", [None, [1, 0]])
def test_append_allocates_no_more_for_a_longer_cache(counts):
    new = np.ones((2, 2, 1, 5), np.float32), np.ones((2, 2, 1, 3), np.float32)
    caches = [_filled([n, n], capacity=n + 10)[0] for n in (100, 30_000)]
    peaks = [_peak_bytes(lambda c=c: c.append(*new, counts=counts)) for c in caches]
    assert peaks[1] <= peaks[0] + 1000


def test_reorder_allocates_no_more_than_its_buffer():
    cache, _ = _filled([60_000, 59_000])
    assert cache.nbytes > 7_000_000
    assert _peak_bytes(lambda: cache.reorder([1, 0])) < 2.5 * 2**20  # two of 1 MiB each


def test_reorder_copies_nothing_for_a_sequence_that_stays():
    cache, _ = _filled([60_000, 59_000])
    assert _peak_bytes(lambda: cache.reorder([0, 1])) < 10_000


@pytest.mark.parametrize("change", ["growth", "more sequences", "in place"])
def test_room_behind_a_sequence_stays_untouched(change, monkeypatch):
    """Memory that no token needs is not even written to, so the system need not provide it."""
    empty, fill = cache_module.empty, iter(range(1000, 2000))

    def marked(shape, dtype):
        array = empty(shape, dtype)
        array[...] = next(fill)
        return array

    monkeypatch.setattr(cache_module, "empty", marked)
    cache, _ = _filled([9, 2, 4])
    if change == "growth":
        cache.append(*(np.ones((3, 2, 3, width), np.float32) for width in (5, 3)), counts=[3, 0, 0])
    else:
        cache.reorder([0, 1, 2, 2] if change == "more sequences" else [0, 2, 1])
    for array in (cache.keys, cache.values):
        behind = np.concatenate([array[b, :, n:].ravel() for b, n in enumerate(cache.lengths)])
        marks = np.unique(behind)
        # The longer of two sequences that changed places leaves its last tokens behind.
        assert (marks >= 1000).sum() == 1
        assert change == "in place" or marks.size == 1


PEAK = """
import numpy as np
from mha_fast.cache import KVCache

def peak():
    with open("/proc/self/status") as status:
        line = next(line for line in status if line.startswith("VmHWM"))
    return int(line.split()[1]) / 1024

n = 40_000
cache = KVCache(1, 4, 64, capacity=n)
block = np.ones((1, 4, 1000, 64), np.float32)
for _ in range(n // 1000):
    cache.append(block, block)
small = KVCache(1, 4, 64)
small.append(block, block)
for n_query in (1, 20):
    small.attend(block[:, :, :n_query])  # thread stacks and the like
before = peak()
for n_query in (1, 20):
    out = cache.attend(block[:, :, :n_query])
print(cache.nbytes / 2**20, peak() - before, np.isfinite(out).all())
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_process_grows_by_under_4_mib_when_it_attends_to_78_mib(tmp_path):
    process = run_python(PEAK, tmp_path)
    assert process.returncode == 0, process.stderr
    size, above, finite = process.stdout.split()
    assert float(size) > 78
    assert float(above) < 4
    assert finite == "True"


# ---- truncate, reorder ------------------------------------------------------------------------


@pytest.mark.parametrize("new", [0, 4, [9, 0, 5], [9, 7, 5], np.array([1, 2, 3], np.uint8)])
def test_truncate_then_append(new):
    cache, sequences = _filled([9, 7, 5])
    capacity = cache.capacity
    cache.truncate(new)
    kept = np.broadcast_to(new, 3)
    short = [(key[:, :n], value[:, :n]) for (key, value), n in zip(sequences, kept, strict=True)]
    _assert_holds(cache, short)
    assert cache.capacity == capacity
    more = [np.full((3, 2, 6, width), -3.0, np.float32) for width in (5, 3)]
    cache.append(*more)
    _assert_holds(
        cache,
        [
            tuple(np.concatenate([x, y[b]], axis=1) for x, y in zip(pair, more, strict=True))
            for b, pair in enumerate(short)
        ],
    )


def test_truncate_takes_the_cache_back_to_kept_lengths():
    cache, sequences = _filled([9, 7])
    before = cache.lengths
    cache.append(np.ones((2, 2, 4, 5), np.float32), np.ones((2, 2, 4, 3), np.float32), [4, 2])
    cache.truncate(before)
    _assert_holds(cache, sequences)


def test_truncate_leaves_the_array_of_the_caller_alone():
    cache, _ = _filled([9, 7])
    lengths = np.array([3, 3])
    cache.truncate(lengths)
    lengths[0] = 100
    np.testing.assert_array_equal(cache.lengths, [3, 3])


@pytest.fixture(params=[1, 200, 1 << 20])
def buffer_bytes(request, monkeypatch):
    """Room for one row at a time, for a few, and for all that the tests hold."""
    monkeypatch.setattr(cache_module, "_BUFFER_BYTES", request.param)


# Same number of sequences (in place), more, fewer.
INDICES = {
    "same": [0, 1, 2, 3, 4],
    "all the first": [0, 0, 0, 0, 0],
    "all the empty one": [2, 2, 2, 2, 2],
    "ring": [1, 2, 3, 4, 0],
    "ring the other way": [4, 0, 1, 2, 3],
    "two rings": [1, 0, 3, 4, 2],
    "ring with a tail": [1, 2, 0, 0, 3],
    "chain": [0, 0, 1, 2, 3],
    "beams": [3, 3, 1, 1, 1],
    "spread": [0, 0, 1, 1, 2, 2, 3, 3, 4, 4],
    "one more": [4, 3, 2, 1, 0, 0],
    "drop": [1, 4],
    "none": [],
}


@pytest.mark.parametrize("indices", INDICES)
def test_reorder_equals_a_rebuilt_cache(indices, buffer_bytes):
    cache, sequences = _filled([40, 7, 0, 100, 63], capacity=120)
    indices = INDICES[indices]
    cache.reorder(indices)
    rebuilt = [sequences[i] for i in indices]
    _assert_holds(cache, rebuilt)
    assert cache.capacity == 120
    # Sequences that came from one are apart from now on.
    n = len(indices)
    more = [np.arange(n * 2 * width, dtype=np.float32).reshape(n, 2, 1, width) for width in (5, 3)]
    cache.append(*more)
    _assert_holds(
        cache,
        [
            tuple(np.concatenate([x, y[b]], axis=1) for x, y in zip(pair, more, strict=True))
            for b, pair in enumerate(rebuilt)
        ],
    )


def test_random_reorders_one_after_the_other(buffer_bytes):
    rng = np.random.default_rng(0)
    cache, sequences = _filled([12, 5, 9, 1])
    for _ in range(60):
        indices = rng.integers(0, len(sequences), rng.choice([len(sequences), rng.integers(1, 7)]))
        cache.reorder(indices)
        sequences = [sequences[i] for i in indices]
        _assert_holds(cache, sequences)


def test_reorder_of_as_many_sequences_stays_in_place():
    cache, _ = _filled([9, 7, 5])
    before = cache.keys
    cache.reorder([1, 0, 0])
    assert np.shares_memory(before, cache.keys)


def test_beam_search_through_the_cache_equals_attention_on_each_beam():
    rng = np.random.default_rng(0)
    cache, sequences = _filled([11, 8])
    cache.reorder(np.repeat(np.arange(2), 3))
    beams = [sequences[i] for i in (0, 0, 0, 1, 1, 1)]
    for indices in ([0, 0, 2, 5, 4, 3], [2, 1, 1, 3, 3, 3], [1, 0, 2, 4, 5, 3]):
        query = rng.standard_normal((6, 4, 1, 5), dtype=np.float32)
        new = [rng.standard_normal((6, 2, 1, width), dtype=np.float32) for width in (5, 3)]
        cache.reorder(indices)
        cache.append(*new)
        beams = [
            tuple(np.concatenate([x, y[b]], axis=1) for x, y in zip(beams[i], new, strict=True))
            for b, i in enumerate(indices)
        ]
        out = cache.attend(query)
        for b, beam in enumerate(beams):
            assert_same_bits(out[b], mha_fast.attention(query[b], *beam))


# ---- what it tells ----------------------------------------------------------------------------


def test_properties_and_repr():
    cache = KVCache(2, 3, 4, 5, dtype="float16", capacity=6)
    assert (cache.capacity, cache.dtype, cache.lengths.dtype) == (6, np.float16, np.int64)
    assert cache.nbytes == 2 * 3 * 6 * (4 + 5) * 2
    assert cache.keys.shape == (2, 3, 0, 4)
    cache.append(np.ones((2, 3, 6, 4), np.float16), np.ones((2, 3, 6, 5), np.float16), [6, 2])
    assert cache.keys.shape == (2, 3, 6, 4)
    assert cache.values.shape == (2, 3, 6, 5)
    assert repr(cache) == (
        "KVCache(n_batch=2, num_kv_heads=3, head_width=4, value_width=5, dtype=float16, capacity=6, "
        "lengths=[6 2])"
    )
    assert repr(KVCache(1000, 1, 1)).endswith("lengths=[0 0 0 ... 0 0 0])")


def test_value_width_is_the_head_width_unless_given():
    assert KVCache(1, 1, 7).values.shape == (1, 1, 0, 7)
    assert KVCache(1, 1, 7, 0).values.shape == (1, 1, 0, 0)
    assert KVCache(1, 1, 7).dtype == np.float32


@pytest.mark.parametrize("dtype", [*ALL_DTYPES, ">f4", "f8", float])
def test_every_float_dtype_in_native_byte_order(dtype):
    cache = KVCache(1, 1, 1, dtype=dtype)
    assert cache.dtype == np.dtype(dtype).newbyteorder("=")
    assert cache.dtype.isnative


def test_lengths_are_read_only_and_of_their_moment():
    cache, _ = _filled([9, 7])
    lengths = cache.lengths
    with pytest.raises(ValueError, match="read-only"):
        lengths[0] = 1
    cache.append(np.ones((2, 2, 1, 5), np.float32), np.ones((2, 2, 1, 3), np.float32))
    cache.truncate([2, 1])
    cache.reorder([1, 0])
    np.testing.assert_array_equal(lengths, [9, 7])
    np.testing.assert_array_equal(cache.lengths, [1, 2])


def test_keys_and_values_can_be_written_to():
    cache, _ = _filled([9, 7])
    cache.values[...] = 5
    np.testing.assert_allclose(cache.attend(np.ones((2, 2, 1, 5), np.float32)), 5, rtol=1e-6)


def test_deep_copy_is_independent():
    cache, sequences = _filled([9, 7])
    other = copy.deepcopy(cache)
    other.keys[...] = 0
    other.truncate(1)
    other.append(np.ones((2, 2, 3, 5), np.float32), np.ones((2, 2, 3, 3), np.float32))
    _assert_holds(cache, sequences)


# ---- errors -----------------------------------------------------------------------------------


def _o(*shape, dtype=np.float32):
    return np.zeros(shape, dtype)


# id: (arguments in place of the valid ones, error, words that the message has to contain)
NEW_ERRORS = {
    "n_batch": ({"n_batch": -1}, ValueError, "n_batch -1 at least 0"),
    "num_kv_heads": ({"num_kv_heads": 2.0}, TypeError, "num_kv_heads 2.0 int"),
    "head_width": ({"head_width": "4"}, TypeError, "head_width '4' int"),
    "value_width": ({"value_width": -3}, ValueError, "value_width -3 at least 0"),
    "capacity": ({"capacity": None}, TypeError, "capacity None int"),
    "integer dtype": ({"dtype": np.int64}, TypeError, "dtype int64 float16 bfloat16 float64"),
    "no dtype": ({"dtype": None}, TypeError, "dtype None float32"),
    "not a dtype": ({"dtype": "abc"}, TypeError, "dtype 'abc' float32"),
    "structured dtype": ({"dtype": "f4,f4"}, TypeError, "dtype 'f4,f4' float32"),
    "capacity beyond memory": ({"capacity": 1 << 58}, MemoryError, ""),
    "capacity beyond addresses": ({"capacity": 1 << 61}, MemoryError, "(2, 2, 23058430 float32"),
    "capacity beyond int64": ({"capacity": 1 << 80}, MemoryError, "(2, 2, 12089258 float32"),
}


@pytest.mark.parametrize("case", NEW_ERRORS)
def test_error_of_a_new_cache(case):
    arguments, error, words = NEW_ERRORS[case]
    with pytest.raises(error) as raised:
        KVCache(**{"n_batch": 2, "num_kv_heads": 2, "head_width": 5} | arguments)
    assert [word for word in words.split() if word not in str(raised.value)] == []


_KEY, _VALUE, _QUERY = _o(3, 2, 4, 5), _o(3, 2, 4, 3), _o(3, 4, 4, 5)

# id: (method, arguments, error, words that the message has to contain)
CALL_ERRORS = {
    "key dtype": ("append", (_KEY.astype("f8"), _VALUE), TypeError, "key float64 float32 cache"),
    "value dtype": ("append", (_KEY, _VALUE.astype(int)), TypeError, "value int64 float32 cache"),
    "masked key": ("append", (np.ma.array(_KEY), _VALUE), TypeError, "key masked array"),
    "key heads": ("append", (_o(3, 4, 4, 5), _VALUE), ValueError, "key (3, 4, 4, 5) (3, 2, tokens, 5)"),
    "key batch": ("append", (_o(1, 2, 4, 5), _VALUE), ValueError, "key (1, 2, 4, 5) (3, 2, tokens, 5)"),
    "key width": ("append", (_o(3, 2, 4, 3), _VALUE), ValueError, "key (3, 2, 4, 3) (3, 2, tokens, 5)"),
    "key rank": ("append", (_o(2, 4, 5), _VALUE), ValueError, "key (2, 4, 5) (3, 2, tokens, 5)"),
    "value width": ("append", (_KEY, _KEY), ValueError, "value (3, 2, 4, 5) (3, 2, tokens, 3)"),
    "value rows": ("append", (_KEY, _VALUE[:, :, :3]), ValueError, "value (3, 2, 3, 3) 4 rows key"),
    "real counts": ("append", (_KEY, _VALUE, [1.0, 2, 3]), TypeError, "counts float64 integers"),
    "number of counts": ("append", (_KEY, _VALUE, [1, 2]), ValueError, "counts (2,) (3,)"),
    "count too large": ("append", (_KEY, _VALUE, [1, 5, 2]), ValueError, "counts 5 0 to 4"),
    "negative count": ("append", (_KEY, _VALUE, -1), ValueError, "counts -1 0 to 4"),
    "negative length": ("truncate", ([1, -1, 2],), ValueError, "lengths -1 0 to 9"),
    "longer than any": ("truncate", (10,), ValueError, "lengths 10 0 to 9"),
    "longer than its own": ("truncate", ([3, 8, 6],), ValueError, "lengths 8 sequence 1 at most 7"),
    "real length": ("truncate", (1.0,), TypeError, "lengths float64 integers"),
    "number of lengths": ("truncate", ([1, 1],), ValueError, "lengths (2,) (3,)"),
    "index too large": ("reorder", ([0, 3, 1],), ValueError, "indices 3 0 to 2"),
    "negative index": ("reorder", ([0, -1],), ValueError, "indices -1 0 to 2"),
    "one index": ("reorder", (1,), ValueError, "indices () one axis"),
    "matrix of indices": ("reorder", ([[0, 1, 2]],), ValueError, "indices (1, 3) one axis"),
    "real indices": ("reorder", ([0.0, 1.0],), TypeError, "indices float64 integers"),
    "bool indices": ("reorder", ([True, False, True],), TypeError, "indices bool integers"),
    "query dtype": ("attend", (_QUERY.astype("f8"),), TypeError, "query float64 float32 cache"),
    "query width": ("attend", (_o(3, 4, 1, 6),), ValueError, "query (3, 4, 1, 6) (3, heads, queries, 5)"),
    "query batch": ("attend", (_o(1, 4, 1, 5),), ValueError, "query (1, 4, 1, 5) (3, heads, queries, 5)"),
    "query rank": ("attend", (_o(4, 1, 5),), ValueError, "query (4, 1, 5) (3, heads, queries, 5)"),
    "query heads": ("attend", (_o(3, 3, 1, 5),), ValueError, "query 3 multiple 2"),
    "mask": ("attend", (_QUERY, _o(4, 10)), ValueError, "attn_mask (4, 10) (3, 4, 4, 9)"),
}  # fmt: skip

KEYWORD_ERRORS = {
    "counts of attend": ({"counts": [4, 4, 5]}, ValueError, "counts 5 0 to 4"),
    "kind of counts of attend": ({"counts": "end"}, TypeError, "counts integers"),
    "out": ({"out": _o(3, 4, 4, 5)}, ValueError, "out (3, 4, 4, 5) (3, 4, 4, 3)"),
    "window": ({"window": (-1, 0)}, ValueError, "window (-1, 0)"),
    "precision": ({"precision": "low"}, ValueError, "precision 'low' 'highest'"),
    "threads": ({"num_threads": 0}, ValueError, "num_threads 0 at least 1"),
}


@pytest.mark.parametrize("case", [*CALL_ERRORS, *KEYWORD_ERRORS])
def test_error_names_its_reason_and_changes_nothing(case):
    if case in CALL_ERRORS:
        method, arguments, error, words = CALL_ERRORS[case]
        keywords = {}
    else:
        method, arguments = "attend", (_QUERY,)
        keywords, error, words = KEYWORD_ERRORS[case]
    cache, sequences = _filled([9, 7, 6])
    shown = repr(cache)
    with pytest.raises(error) as raised:
        getattr(cache, method)(*arguments, **keywords)
    message = str(raised.value)
    assert [word for word in words.split() if word not in message] == [], message
    assert repr(cache) == shown
    _assert_holds(cache, sequences)


@pytest.mark.parametrize("which", [1, 2])
@pytest.mark.parametrize("call", ["append", "reorder in place", "reorder to more"])
def test_out_of_memory_changes_nothing(call, which, monkeypatch):
    cache, sequences = _filled([9, 7, 6])
    shown = repr(cache)
    empty, asked = cache_module.empty, []

    def fail(*arguments):
        asked.append(arguments)
        if len(asked) == which:
            raise MemoryError
        return empty(*arguments)

    def run():
        if call == "append":
            cache.append(_KEY, _VALUE)
        else:
            cache.reorder([2, 0, 1] if call == "reorder in place" else [0, 1, 2, 0])

    with monkeypatch.context() as patch:
        patch.setattr(cache_module, "empty", fail)
        with pytest.raises(MemoryError):
            run()
    assert repr(cache) == shown
    _assert_holds(cache, sequences)
    run()
    assert repr(cache) != shown
