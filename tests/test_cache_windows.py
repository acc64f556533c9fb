"""KVCache: tokens dropped from the front, copies of their own, and what is saved of it."""

import copy
import pickle

import numpy as np
import pytest
from _dtypes import DTYPES_16
from _support import assert_same_bits

import mha_fast
from mha_fast import KVCache, MultiHeadAttention

DTYPES = [np.float32, np.float64, *DTYPES_16]


def numbered(n_batch, first, n_token, dtype=np.float32):
    """Keys of normal numbers and values that tell which token they belong to."""
    rng = np.random.default_rng(first)
    key = rng.standard_normal((n_batch, 2, n_token, 4))
    value = np.broadcast_to(np.arange(first, first + n_token)[:, None], (n_batch, 2, n_token, 3))
    return key.astype(dtype), value.astype(dtype)


def filled(lengths, dtype=np.float32, capacity=0):
    cache = KVCache(len(lengths), 2, 4, 3, dtype=dtype, capacity=capacity)
    cache.append(*numbered(len(lengths), 0, max(lengths), dtype), counts=lengths)
    return cache


def kept(cache):
    """Number of each token that is in the cache, by sequence."""
    return [
        x[0, :n, 0].astype(int).tolist() for x, n in zip(cache.values, cache.lengths, strict=True)
    ]


# ---- dropping -----------------------------------------------------------------------------------


@pytest.mark.parametrize("counts", [0, 1, 3, [0, 2, 3], [5, 0, 3], [5, 9, 3], [1, 9, 0]])
def test_the_oldest_tokens_go(counts):
    lengths = [5, 9, 3]
    cache = filled(lengths)
    keys = cache.keys.copy()

    cache.drop_oldest(counts)

    gone = np.broadcast_to(counts, 3)
    assert kept(cache) == [list(range(g, n)) for g, n in zip(gone, lengths, strict=True)]
    np.testing.assert_array_equal(cache.dropped, gone)
    for i, (g, n) in enumerate(zip(gone, lengths, strict=True)):
        assert_same_bits(cache.keys[i, :, : n - g], keys[i, :, g:n])


@pytest.mark.parametrize("rows", [1, 1 << 20])
def test_much_moves_through_a_buffer_of_any_size(rows, monkeypatch):
    monkeypatch.setattr("mha_fast.cache._contiguous._BUFFER_BYTES", rows)
    cache = filled([40, 37, 11])

    cache.drop_oldest([1, 30, 4])

    assert kept(cache) == [list(range(1, 40)), list(range(30, 37)), list(range(4, 11))]


@pytest.mark.parametrize("dtype", DTYPES)
def test_decoding_with_a_window_is_that_over_all_tokens(dtype):
    window, bounded, whole = 7, KVCache(2, 2, 4, 3, dtype=dtype), KVCache(2, 2, 4, 3, dtype=dtype)
    slopes = np.array([0.1, 0.2, 0.3, 0.4])
    for step in range(200):
        key, value = numbered(2, step, 1, dtype)
        query = np.concatenate([key, key], axis=1)
        outs = []
        for cache in (bounded, whole):
            cache.append(key, value)
            outs.append(cache.attend(query, window=(window, 0), alibi_slopes=slopes))
        bounded.drop_oldest(np.maximum(bounded.lengths - window, 0))
        np.testing.assert_allclose(
            *(x.astype(np.float64) for x in outs), rtol=32 * float(np.finfo(np.float32).eps)
            if np.dtype(dtype).itemsize > 2 else 2.0**-7,
        )  # fmt: skip

    assert bounded.capacity <= 4 * (window + 1) < whole.capacity
    np.testing.assert_array_equal(bounded.dropped + bounded.lengths, whole.lengths)


def test_sequences_that_drop_unlike_numbers_stay_bounded_too():
    rng = np.random.default_rng(0)
    cache, oldest, newest = KVCache(3, 2, 4, 3), np.zeros(3, int), np.zeros(3, int)
    for _ in range(300):
        counts = rng.integers(0, 3, 3)
        tokens = [numbered(1, int(n), 2) for n in newest]
        cache.append(*(np.concatenate(x) for x in zip(*tokens, strict=True)), counts=counts)
        newest += counts
        gone = rng.integers(0, np.minimum(cache.lengths, 3) + 1)
        gone = np.maximum(gone, cache.lengths - 12)
        cache.drop_oldest(gone)
        oldest += gone
        assert kept(cache) == [list(range(a, b)) for a, b in zip(oldest, newest, strict=True)]
    assert cache.capacity <= 4 * 14


def test_dropping_goes_with_every_other_change():
    cache = filled([6, 8])
    cache.drop_oldest([2, 3])
    cache.reorder([1, 0])
    assert kept(cache) == [[3, 4, 5, 6, 7], [2, 3, 4, 5]]
    np.testing.assert_array_equal(cache.dropped, [3, 2])
    cache.truncate([2, 4])
    assert kept(cache) == [[3, 4], [2, 3, 4, 5]]
    cache.reorder([1, 0, 1])
    assert kept(cache) == [[2, 3, 4, 5], [3, 4], [2, 3, 4, 5]]
    cache.truncate([4, 0, 1])
    np.testing.assert_array_equal(cache.dropped, [2, 0, 2])
    cache.drop_oldest([4, 0, 1])
    cache.append(*numbered(3, 0, 2))
    assert kept(cache) == [[0, 1]] * 3


@pytest.mark.parametrize(
    ("counts", "error", "message"),
    [
        (-1, ValueError, "counts holds -1 to -1; expected 0 to 5"),
        (6, ValueError, "counts holds 6 to 6; expected 0 to 5"),
        ([1, 4], ValueError, "counts holds 4 for sequence 1; expected at most 3"),
        (1.5, TypeError, "counts has dtype float64; expected integers"),
        ([1, 1, 1], ValueError, r"counts has shape \(3,\)"),
    ],
)
def test_wrong_counts_change_nothing(counts, error, message):
    cache = filled([5, 3])
    with pytest.raises(error, match=message):
        cache.drop_oldest(counts)
    assert kept(cache) == [[0, 1, 2, 3, 4], [0, 1, 2]]
    np.testing.assert_array_equal(cache.dropped, 0)


def test_a_failure_for_want_of_memory_changes_nothing(monkeypatch):
    cache = filled([5, 3])

    def fail(shape, dtype):
        raise MemoryError

    monkeypatch.setattr("mha_fast.cache._contiguous.empty", fail)
    with pytest.raises(MemoryError):
        cache.drop_oldest([1, 3])
    assert kept(cache) == [[0, 1, 2, 3, 4], [0, 1, 2]]


def test_a_layer_goes_on_counting_positions():
    seen = []

    def position(heads, positions):
        seen.append(positions.copy())
        return heads

    layer = MultiHeadAttention(8, 2, position=position, seed=0)
    cache = layer.new_cache(2)
    token = np.ones((2, 1, 8), np.float32)
    for _ in range(6):
        layer(token, cache=cache)
        cache.drop_oldest(np.maximum(cache.lengths - 3, 0))

    assert [int(x.reshape(2, -1)[0, 0]) for x in seen[::2]] == list(range(6))


# ---- copies -------------------------------------------------------------------------------------

COPIES = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda cache: pickle.loads(pickle.dumps(cache)),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("way", COPIES)
def test_a_copy_is_a_cache_of_its_own(way, dtype):
    cache = filled([5, 3], dtype, capacity=20)
    cache.drop_oldest([1, 0])
    other = COPIES[way](cache)
    assert repr(other) == repr(cache) and other.capacity == 20 and type(other) is KVCache
    assert_same_bits(other.values[1, :, :3], cache.values[1, :, :3])

    cache.append(*numbered(2, 10, 1, dtype))
    other.append(*numbered(2, 20, 1, dtype))
    other.drop_oldest(1)

    assert kept(cache) == [[1, 2, 3, 4, 10], [0, 1, 2, 10]]
    assert kept(other) == [[2, 3, 4, 20], [1, 2, 20]]
    np.testing.assert_array_equal(cache.dropped, [1, 0])
    np.testing.assert_array_equal(other.dropped, [2, 1])


def test_what_is_saved_is_what_is_kept():
    cache = filled([5, 3], capacity=100_000)
    cache._value[:, :, 5:] = 77  # memory behind the ends, which is nobody's business

    saved = pickle.dumps(cache)

    assert len(saved) < 5000
    assert np.float32(77).tobytes() * 3 not in saved


# ---- names --------------------------------------------------------------------------------------


def test_sizes_have_the_names_that_the_layer_gives_them():
    layer = MultiHeadAttention(24, 6, num_kv_heads=2, value_width=5)
    cache = layer.new_cache(3)

    assert cache.n_batch == 3
    for name in ("num_kv_heads", "head_width", "value_width"):
        assert getattr(cache, name) == getattr(layer, name)
        assert f"{name}={getattr(layer, name)}" in repr(cache)
    assert mha_fast.KVCache(n_batch=1, num_kv_heads=2, head_width=3).num_kv_heads == 2
