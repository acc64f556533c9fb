"""Strides, alignment, byte order, read-only buffers, huge offsets, and out=.

Whatever way an operand lies in memory, the bits of the result are those of the compact call.
"""

import numpy as np
import pytest
from _support import DTYPES, SIZES_OF_PATH, assert_same_bits, normal_inputs
from numpy.lib.stride_tricks import as_strided

import mha_fast

OPERANDS = ("query", "key", "value")


def _transposed_heads(x):
    return np.ascontiguousarray(x.swapaxes(-3, -2)).swapaxes(-3, -2)


def _inside_something_larger(x):
    larger = np.full([n + 3 for n in x.shape], np.nan, x.dtype)
    inside = larger[tuple(slice(1, 1 + n) for n in x.shape)]
    inside[...] = x
    return inside


def _every_second(x, axis):
    doubled = np.full([2 * n if i == axis % x.ndim else n for i, n in enumerate(x.shape)], np.nan)
    where = [slice(None)] * x.ndim
    where[axis] = slice(None, None, 2)
    doubled = doubled.astype(x.dtype)
    doubled[tuple(where)] = x
    return doubled[tuple(where)]


def _unaligned(x):
    room = np.empty(x.nbytes + 1, np.uint8)
    shifted = room[1:].view(x.dtype).reshape(x.shape)
    shifted[...] = x
    assert not shifted.flags.aligned
    return shifted


def _read_only(x):
    x = x.copy()
    x.flags.writeable = False
    return x


LAYOUTS = {
    "heads and rows swapped": _transposed_heads,
    "inside a larger array": _inside_something_larger,
    "every second sequence": lambda x: _every_second(x, 0),
    "every second head": lambda x: _every_second(x, 1),
    "every second row": lambda x: _every_second(x, 2),
    "every second feature": lambda x: _every_second(x, 3),
    "rows backwards": lambda x: x[..., ::-1, :].copy()[..., ::-1, :],
    "heads backwards": lambda x: x[:, ::-1].copy()[:, ::-1],
    "features backwards": lambda x: x[..., ::-1].copy()[..., ::-1],
    "all backwards": lambda x: x[::-1, ::-1, ::-1, ::-1].copy()[::-1, ::-1, ::-1, ::-1],
    "features before rows": lambda x: x.swapaxes(-1, -2).copy().swapaxes(-1, -2),
    "Fortran order": np.asfortranarray,
    "unaligned": _unaligned,
    "read-only": _read_only,
    "other byte order": lambda x: x.astype(x.dtype.newbyteorder()),
    "subclass": lambda x: x.view(np.recarray),
}


@pytest.mark.parametrize("path", SIZES_OF_PATH)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("operand", OPERANDS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layout_of_one_operand(layout, operand, dtype, path, isa):
    inputs = dict(zip(OPERANDS, normal_inputs(dtype, **SIZES_OF_PATH[path]), strict=True))
    right = mha_fast.attention(**inputs)
    changed = LAYOUTS[layout](inputs[operand])
    before = changed.tobytes()
    out = mha_fast.attention(**inputs | {operand: changed})
    assert out.dtype == dtype
    assert_same_bits(out, right)
    assert changed.tobytes() == before


@pytest.mark.parametrize("path", SIZES_OF_PATH)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layout_of_all_operands(layout, path, isa):
    inputs = normal_inputs(np.float32, **SIZES_OF_PATH[path])
    right = mha_fast.attention(*inputs, is_causal=True)
    out = mha_fast.attention(*(LAYOUTS[layout](x) for x in inputs), is_causal=True)
    assert_same_bits(out, right)


@pytest.mark.parametrize("path", SIZES_OF_PATH)
@pytest.mark.parametrize("operand", OPERANDS)
@pytest.mark.parametrize("axis", [0, 1, 2, 3])
def test_axis_of_stride_0(axis, operand, path, isa):
    inputs = dict(zip(OPERANDS, normal_inputs(np.float32, **SIZES_OF_PATH[path]), strict=True))
    x = inputs[operand]
    repeated = np.broadcast_to(x.take([0], axis=axis), x.shape)
    assert repeated.strides[axis] == 0
    right = mha_fast.attention(**inputs | {operand: repeated.copy()})
    assert_same_bits(mha_fast.attention(**inputs | {operand: repeated}), right)


@pytest.mark.parametrize("path", SIZES_OF_PATH)
def test_read_only_everything(path, isa):
    sizes = SIZES_OF_PATH[path]
    inputs = normal_inputs(np.float32, **sizes)
    rng = np.random.default_rng(0)
    options = {
        "attn_mask": rng.random((sizes["n_query"], sizes["n_key"])) < 0.8,
        "kv_lengths": np.array([20, 140]),
        "query_offset": np.array([3, 4]),
        "alibi_slopes": rng.random(4),
        "sinks": rng.random(4),
        "head_mask": rng.random(4),
    }
    right = mha_fast.attention(*inputs, **options)
    frozen = {name: _read_only(x) for name, x in options.items()}
    out = mha_fast.attention(*(_read_only(x) for x in inputs), **frozen)
    assert out.flags.writeable
    assert_same_bits(out, right)


@pytest.fixture(scope="module")
def sparse_file(tmp_path_factory):
    """Nine rows 2^28 elements apart in a file of holes: wide offsets, hardly any memory."""
    path = tmp_path_factory.mktemp("sparse") / "rows"

    def rows(x, distance=2**28):
        room = np.memmap(path, x.dtype, mode="w+", shape=((x.shape[0] - 1) * distance + 64,))
        apart = as_strided(
            np.asarray(room), x.shape, (distance * x.itemsize, x.itemsize), writeable=True
        )
        apart[...] = x
        return apart

    yield rows
    path.unlink()


@pytest.mark.parametrize("options", [{}, {"window": (0, None), "query_offset": 8}], ids=str)
@pytest.mark.parametrize("n_query", [9, 1])
@pytest.mark.parametrize("operand", OPERANDS)
def test_rows_further_apart_than_32_bits(operand, n_query, options, sparse_file, isa):
    """Nine rows are a tile, one is few; the options start at the last key."""
    inputs = normal_inputs(np.float32, batch=(), n_head=1, n_kv_head=1, n_query=9, n_key=9)
    inputs = dict(zip(OPERANDS, (x[0] for x in inputs), strict=True))
    apart = inputs | {operand: sparse_file(inputs[operand])}
    (right, right_lse), (out, lse) = (
        mha_fast.attention(**x | {"query": x["query"][-n_query:]}, **options, return_lse=True)
        for x in (inputs, apart)
    )
    assert_same_bits(out, right)
    assert_same_bits(lse, right_lse)  # the output of a row with one key is the value alone


@pytest.mark.parametrize("dtype", [np.bool_, np.float32])
def test_mask_rows_further_apart_than_32_bits(dtype, sparse_file, isa):
    inputs = normal_inputs(np.float32, batch=(), n_head=1, n_kv_head=1, n_query=9, n_key=9)
    query, key, value = (x[0] for x in inputs)
    mask = np.random.default_rng(0).standard_normal((9, 9))
    mask = (mask > 0) if dtype == np.bool_ else mask.astype(dtype)
    right = mha_fast.attention(query, key, value, mask)
    assert_same_bits(mha_fast.attention(query, key, value, sparse_file(mask)), right)


def test_out_rows_further_apart_than_32_bits(sparse_file, isa):
    inputs = normal_inputs(np.float32, batch=(), n_head=1, n_kv_head=1, n_query=9, n_key=9)
    query, key, value = (x[0] for x in inputs)
    right = mha_fast.attention(query, key, value)
    out = sparse_file(np.zeros_like(right))
    assert mha_fast.attention(query, key, value, out=out) is out
    assert_same_bits(out, right)


def test_broadcast_mask_of_more_than_2_to_the_31_elements():
    size = 46342  # size * size > 2^31
    value = np.arange(size, dtype=np.float64)[:, None]
    zeros = np.zeros((size, 1))
    keys = np.broadcast_to(np.arange(size) % 2 == 0, (size, size))
    out = mha_fast.attention(zeros, zeros, value, keys, window=(200, 0))
    last = np.arange(size)
    low = np.maximum(last - 200, 0)
    low, high = low + low % 2, last - last % 2  # first and last even key of the window
    np.testing.assert_allclose(out[:, 0], (low + high) / 2, rtol=1e-13)
    rows = np.broadcast_to(np.arange(size)[:, None] % 2 == 0, (size, size))
    out = mha_fast.attention(zeros, zeros, value, rows, window=(200, 0))
    right = np.where(last % 2 == 0, (np.maximum(last - 200, 0) + last) / 2, 0)
    np.testing.assert_allclose(out[:, 0], right, rtol=1e-13)


OUT_LAYOUTS = {
    "contiguous": lambda shape, dtype: np.full(shape, np.nan, dtype),
    "heads and rows swapped": lambda shape, dtype: _transposed_heads(np.full(shape, np.nan, dtype)),
    "every second feature": lambda shape, dtype: _every_second(np.zeros(shape, dtype), -1),
    "every second row": lambda shape, dtype: _every_second(np.zeros(shape, dtype), -2),
    "backwards": lambda shape, dtype: np.zeros(shape, dtype)[::-1, ::-1, ::-1, ::-1],
    "Fortran order": lambda shape, dtype: np.zeros(shape, dtype, order="F"),
    "unaligned": lambda shape, dtype: _unaligned(np.zeros(shape, dtype)),
}


@pytest.mark.parametrize("path", SIZES_OF_PATH)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", OUT_LAYOUTS)
def test_out_of_any_layout(layout, dtype, path, isa):
    inputs = normal_inputs(dtype, **SIZES_OF_PATH[path])
    right, right_lse = mha_fast.attention(*inputs, return_lse=True)
    out = OUT_LAYOUTS[layout](right.shape, dtype)
    surroundings = out if out.base is None else out.base
    outside = surroundings.size - out.size
    returned, lse = mha_fast.attention(*inputs, out=out, return_lse=True)
    assert returned is out
    assert_same_bits(out, right)
    assert_same_bits(lse, right_lse)
    if layout.startswith("every second"):  # the gaps were NaN and still are
        assert np.isnan(surroundings).sum() == outside


@pytest.mark.parametrize("path", SIZES_OF_PATH)
@pytest.mark.parametrize("shift", [-1, 0, 1, 5])
@pytest.mark.parametrize("operand", OPERANDS)
def test_out_over_an_input(operand, shift, path, isa):
    rows = {"tiles": 70, "few rows": 7}[path]
    inputs = normal_inputs(np.float32, n_kv_head=4, n_query=rows, n_key=rows, value_width=20)
    inputs = dict(zip(OPERANDS, inputs, strict=True))
    right = mha_fast.attention(**inputs)
    room = np.zeros(right.size + 16, np.float32)
    shared = room[8 : 8 + right.size].reshape(right.shape)
    shared[...] = inputs[operand]
    out = room[8 + shift : 8 + shift + right.size].reshape(right.shape)
    mha_fast.attention(**inputs | {operand: shared}, out=out)
    assert_same_bits(out, right)


def test_out_over_query_key_and_value_at_once(isa):
    x = normal_inputs(np.float64, n_kv_head=4, n_query=70, n_key=70, value_width=20)[0]
    right = mha_fast.attention(x.copy(), x.copy(), x.copy(), is_causal=True)
    mha_fast.attention(x, x, x, is_causal=True, out=x)
    assert_same_bits(x, right)


def test_out_over_a_transposed_query(isa):
    square = normal_inputs(np.float32, n_kv_head=4, n_query=20, n_key=20, value_width=20)
    query, key, value = square
    right = mha_fast.attention(query.swapaxes(-1, -2).copy(), key, value)
    mha_fast.attention(query.swapaxes(-1, -2), key, value, out=query)
    assert_same_bits(query, right)


def test_out_over_the_mask_and_the_numbers_per_head(isa):
    query, key, value = normal_inputs(np.float32, n_query=16, n_key=12)
    room = np.random.default_rng(0).random((2, 4, 16, 12), dtype=np.float32)
    mask, sinks = room.copy(), room[0, 0, 0, :4].copy()
    right = mha_fast.attention(query, key, value, mask, sinks=sinks, head_mask=sinks)
    heads = room[0, 0, 0, :4]
    mha_fast.attention(query, key, value, room, sinks=heads, head_mask=heads, out=room)
    assert_same_bits(room, right)


def test_out_beside_an_input_in_the_same_buffer(isa):
    query, key, value = normal_inputs(np.float32, n_kv_head=4, value_width=20)
    right = mha_fast.attention(query, key, value)
    both = np.empty((*query.shape[:-1], 2, 20), np.float32)
    both[..., 0, :] = query
    mha_fast.attention(both[..., 0, :], key, value, out=both[..., 1, :])
    assert_same_bits(both[..., 1, :], right)
    assert_same_bits(both[..., 0, :], query)
