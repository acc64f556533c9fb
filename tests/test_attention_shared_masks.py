"""Heads that share a mask: it is read once for several of them, and no bit may tell."""

import numpy as np
import pytest
from _dtypes import ALL_DTYPES, BFLOAT16, NEEDS_BFLOAT16
from _support import assert_same_bits, normal_inputs

import mha_fast

# Several sub-tiles of every instruction set, with one that is not full, and key blocks with a tail.
SIZES = {"n_query": 150, "n_key": 330}

# kv heads for 6 query heads: with 4 pairs in a task there are a full and a smaller one
KV_HEADS = (6, 3, 1)

KINDS = (np.bool_, np.float16, pytest.param(BFLOAT16, marks=NEEDS_BFLOAT16), np.float32, np.float64)

OPTIONS = {
    "plain": {},
    "causal": {"is_causal": True, "query_offset": 180},
    "window": {"window": (70, 9), "query_offset": 100},
    "lengths": {"kv_lengths": np.array([329, 100])},
    "softcap": {"softcap": 1.5},
    "alibi": {"alibi_slopes": np.linspace(0.1, 0.6, 6)},
    "heads switched off": {"head_mask": np.array([1.0, 0.0, 0.0, 2.0, 1.0, 0.0])},
    "scale": {"scale": -0.4},
}


def _inputs(dtype, n_kv_head=6):
    return normal_inputs(dtype, n_head=6, n_kv_head=n_kv_head, **SIZES)


def _mask(kind, shape=(SIZES["n_query"], SIZES["n_key"])):
    """Random numbers, a hole of whole key blocks that is not the same for all rows, a visible block."""
    rng = np.random.default_rng(0)
    visible = rng.random(shape) < 0.7
    visible[..., :90, 60:200] = False
    visible[..., 256:320] = True
    if kind == np.bool_:
        return visible
    return np.where(visible, rng.standard_normal(shape), -np.inf).astype(kind)


def _unaligned(x):
    """The same numbers, one byte beside where their type belongs."""
    there = np.zeros(x.nbytes + 1, np.uint8)[1:].view(x.dtype).reshape(x.shape)
    there[...] = x
    return there


def _every_second(x):
    larger = np.zeros((*x.shape[:-1], 2 * x.shape[-1]), x.dtype)
    larger[..., ::2] = x
    return larger[..., ::2]


LAYOUTS = {
    "contiguous": np.ascontiguousarray,
    "unaligned": _unaligned,
    "gaps between keys": _every_second,
    "backwards": lambda x: x[..., ::-1, ::-1].copy()[..., ::-1, ::-1],
    "keys first": lambda x: x.swapaxes(-1, -2).copy().swapaxes(-1, -2),
}


def _assert_same(inputs, one, other, **options):
    results = [mha_fast.attention(*inputs, m, return_lse=True, **options) for m in (one, other)]
    for x, y in zip(*results, strict=True):
        assert_same_bits(x, y)


@pytest.mark.parametrize("n_kv_head", KV_HEADS)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", KINDS)
def test_shared_mask_has_the_bits_of_a_copy_per_head(kind, layout, dtype, n_kv_head, isa):
    mask = _mask(kind)
    copies = np.broadcast_to(mask, (2, 6, *mask.shape)).copy()
    _assert_same(_inputs(dtype, n_kv_head), LAYOUTS[layout](mask), copies)


@pytest.mark.parametrize("dtype", ALL_DTYPES)
@pytest.mark.parametrize("kind", [np.bool_, np.float32])
@pytest.mark.parametrize("option", OPTIONS)
def test_shared_mask_beside_another_option(option, kind, dtype, isa):
    mask = _mask(kind)
    copies = np.broadcast_to(mask, (2, 6, *mask.shape)).copy()
    _assert_same(_inputs(dtype), mask, copies, **OPTIONS[option])


@pytest.mark.parametrize("dtype", ALL_DTYPES)
@pytest.mark.parametrize("kind", [np.bool_, np.float32])
def test_shared_mask_for_any_number_of_threads(kind, dtype, isa):
    inputs = _inputs(dtype)
    right = mha_fast.attention(*inputs, _mask(kind), num_threads=1)
    for n_thread in (2, 3, 7):
        assert_same_bits(mha_fast.attention(*inputs, _mask(kind), num_threads=n_thread), right)


@pytest.mark.parametrize("n_kv_head", KV_HEADS)
@pytest.mark.parametrize("kind", [np.bool_, np.float32])
def test_heads_with_masks_of_their_own(kind, n_kv_head, isa):
    """Each group as if it were alone: a mask is not taken for that of the heads before."""
    query, key, value = _inputs(np.float32, n_kv_head)
    mask = _mask(kind, (6, SIZES["n_query"], SIZES["n_key"]))
    out = mha_fast.attention(query, key, value, mask)
    group = 6 // n_kv_head
    for i in range(n_kv_head):
        heads = slice(i * group, (i + 1) * group)
        own = (query[:, heads], key[:, i, None], value[:, i, None])
        assert_same_bits(out[:, heads], mha_fast.attention(*own, mask[heads]))


@pytest.mark.parametrize("kind", [np.bool_, np.float32])
def test_sequences_with_masks_of_their_own(kind, isa):
    inputs = _inputs(np.float32)
    mask = _mask(kind, (2, 1, SIZES["n_query"], SIZES["n_key"]))
    out = mha_fast.attention(*inputs, mask)
    for b in range(2):
        assert_same_bits(out[b], mha_fast.attention(*(x[b] for x in inputs), mask[b]))


@pytest.mark.parametrize("dtype", ALL_DTYPES)
@pytest.mark.parametrize("as_float", [False, True])
@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_skipped_blocks_are_not_looked_at(poison, as_float, dtype, isa):
    """Blocks on a diagonal: what the other queries see in a block does not reach those that do not."""
    query, key, value = _inputs(dtype)
    mask = np.arange(SIZES["n_query"])[:, None] // 48 == np.arange(SIZES["n_key"]) // 96
    given = np.where(mask, 0.0, -np.inf).astype(np.float32) if as_float else mask
    right = mha_fast.attention(query, key, value, given)
    hidden = ~mask.any(axis=0)
    key[..., hidden, :] = value[..., hidden, :] = poison
    assert_same_bits(mha_fast.attention(query, key, value, given), right)
    value[..., 96:192, :] = poison
    out = mha_fast.attention(query, key, value, given)
    others = np.arange(SIZES["n_query"]) // 48 != 1
    assert_same_bits(out[..., others, :], right[..., others, :])
    assert not np.isfinite(out[..., ~others, :].astype(np.float32)).any()


@pytest.mark.parametrize("kind", [np.bool_, np.float32])
def test_weights_and_statistics_under_a_shared_mask(kind, isa):
    query, key, _ = _inputs(np.float32)
    mask = _mask(kind)
    copies = np.broadcast_to(mask, (2, 6, *mask.shape)).copy()
    weights = [mha_fast.attention_weights(query, key, m) for m in (mask, copies)]
    assert_same_bits(*weights)
    measured = [mha_fast.head_statistics(query, key, m) for m in (mask, copies)]
    np.testing.assert_array_equal(measured[0].entropy, measured[1].entropy)
