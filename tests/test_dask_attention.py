"""`mha_fast.dask.attention`: chunks along every axis, joined to the result of one call."""

import itertools
import pickle

import numpy as np
import pytest
from _support import assert_close, assert_same_bits, expected, normal_inputs

import mha_fast

dask = pytest.importorskip("dask")
da = pytest.importorskip("dask.array")

import mha_fast.dask
from mha_fast.integrations.dask import _graph, _grid, _tasks, _threads
from mha_fast.integrations.dask._visible import visible_chunks

SCHEDULERS = ("synchronous", "threads", "processes")
CHUNKS = {"batch": 1, "heads": 3, "queries": 16, "keys": 60}

# Each changes the result; together with n_head=4, n_kv_head=2, n_query=37, n_key=150, batch=(2,).
OPTIONS = {
    "plain": {},
    "causal": {"is_causal": True},
    "causal at the end": {"is_causal": True, "query_offset": "end"},
    "offsets of sequences": {"is_causal": True, "query_offset": np.array([100, -5])},
    "window": {"window": (10, 25), "query_offset": 40},
    "lengths": {"kv_lengths": np.array([150, 61])},
    "lengths at the end": {
        "kv_lengths": np.array([150, 61]), "is_causal": True, "query_offset": "end",
    },
    "scale": {"scale": -0.7},
    "softcap": {"softcap": 1.5},
    "slopes": {"alibi_slopes": np.array([0.5, 0.25, 0.1, 0.0]), "query_offset": 20},
    "slopes of sequences": {"alibi_slopes": np.arange(8.0).reshape(2, 4) / 8},
    "sinks": {"sinks": np.array([0.0, 5.0, -3.0, 2.0])},
    "gates": {"head_mask": np.array([1.0, 0.0, -2.0, 0.5])},
    "gates of sequences": {"head_mask": np.arange(8.0).reshape(2, 4)},
}  # fmt: skip


def inputs(dtype=np.float32, **sizes):
    return normal_inputs(dtype, **sizes)


def chunked(x, *sizes):
    return da.from_array(x, chunks=sizes)


def assert_joined(results, query, key, value, attn_mask=None, **options):
    """Compare (out, lse) with the formula, as a call that is not cut is compared."""
    out, lse = dask.compute(*results, scheduler="synchronous")
    right = expected(query, key, value, attn_mask, **options)
    assert (out.dtype, lse.dtype) == (query.dtype, query.dtype)
    assert_close(out, right.out, right.out_limit)
    assert_close(lse, right.lse, right.lse_limit)


# ---- the result ---------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_result_is_that_of_one_call(options, dtype):
    query, key, value = inputs(dtype)
    results = mha_fast.dask.attention(query, key, value, chunks=CHUNKS, return_lse=True, **options)
    assert results[0].numblocks == (2, 3, 3, 1)
    assert_joined(results, query, key, value, **options)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_every_option_may_be_a_dask_array(options):
    query, key, value = inputs()
    lazy = {
        name: da.from_array(x, chunks=1) if isinstance(x, np.ndarray) else x
        for name, x in options.items()
    }
    results = mha_fast.dask.attention(query, key, value, chunks=CHUNKS, return_lse=True, **lazy)
    assert_joined(results, query, key, value, **options)


@pytest.mark.parametrize("is_bool", [True, False], ids=["bool", "float"])
@pytest.mark.parametrize("lazy", [True, False], ids=["dask", "NumPy"])
@pytest.mark.parametrize(
    "shape",
    [(2, 4, 37, 150), (37, 150), (4, 1, 150), (2, 1, 37, 1), (150,), (), (2, 1, 1, 150)],
    ids=str,
)
def test_masks_follow_the_chunks(shape, lazy, is_bool):
    query, key, value = inputs()
    rng = np.random.default_rng(1)
    mask = rng.random(shape) < 0.6 if is_bool else rng.standard_normal(shape)
    given = da.from_array(np.array(mask), chunks=40) if lazy else mask
    results = mha_fast.dask.attention(query, key, value, given, chunks=CHUNKS, return_lse=True)
    assert_joined(results, query, key, value, np.asarray(mask))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_16_bit_results_are_rounded_once(dtype):
    """As near to the formula as a rounding of it; parts in 16 bits would be twice as far."""
    dtype = pytest.importorskip("ml_dtypes").bfloat16 if dtype == "bfloat16" else np.float16
    query, key, value = (x.astype(dtype) for x in inputs(n_key=640))
    wide = [x.astype(np.float64) for x in (query, key, value)]
    right, right_lse = mha_fast.attention(*wide, return_lse=True)

    lazy = mha_fast.dask.attention(query, key, value, chunks={"keys": 20}, return_lse=True)
    out, lse = dask.compute(*lazy, scheduler="synchronous")

    assert out.dtype == dtype and lse.dtype == np.float32
    misses = (out != right.astype(dtype)).mean()
    assert misses < 0.02  # where the formula lies between two numbers of the dtype
    np.testing.assert_allclose(lse, right_lse, rtol=0, atol=16 * np.finfo(np.float32).eps)


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_schedulers_give_the_same_bits(scheduler):
    query, key, value = inputs(np.float32, n_query=100, n_key=700)
    results = mha_fast.dask.attention(
        query, key, value, chunks=CHUNKS | {"keys": 50}, return_lse=True, is_causal=True,
        query_offset="end",
    )  # fmt: skip
    found = dask.compute(*results, scheduler=scheduler)
    for x, same in zip(found, dask.compute(*results, scheduler="synchronous"), strict=True):
        assert_same_bits(x, same)


@pytest.mark.parametrize(
    "kv_chunks, query_heads, expected_heads",
    [
        ((2, 2), 12, ((6, 6), (2, 2))),
        ((4,), 4, ((3, 1, 2, 2, 1, 3), (1, 1, 1, 1))),
        ((4,), 2, ((2, 1, 1, 2, 2, 1, 1, 2), (1, 1, 1, 1))),
        ((1, 3), 12, ((3, 9), (1, 3))),
        ((4,), 6, ((6, 6), (2, 2))),
    ],
)
def test_grouped_heads_are_cut_with_their_keys(kv_chunks, query_heads, expected_heads):
    query, key, value = inputs(n_head=12, n_kv_head=4)
    key_chunks = (2, kv_chunks, 150, 20)
    results = mha_fast.dask.attention(
        query, chunked(key, *key_chunks), value, chunks={"heads": query_heads}, return_lse=True
    )
    grid = _grid.head_bounds(_grid.regular(12, query_heads), _grid.bounds_of(kv_chunks), 3)
    assert tuple(tuple(np.diff(bounds)) for bounds in grid) == expected_heads
    assert results[0].chunks[1] == expected_heads[0]
    assert_joined(results, query, key, value)


def test_one_head_without_axes():
    query, key, value = (x[0, 0] for x in inputs())
    results = mha_fast.dask.attention(
        chunked(query, 10, 20), key, chunked(value, 50, 12), return_lse=True, is_causal=True
    )
    assert (results[0].shape, results[1].shape) == ((37, 12), (37,))
    assert_joined(results, query, key, value, is_causal=True)


def test_batch_axes_broadcast():
    query, key, value = inputs(batch=(3, 2))
    query, value = query[:, :1], value[:1]
    results = mha_fast.dask.attention(
        query, chunked(key, 2, 1, 2, 70, 20), value, return_lse=True,
        kv_lengths=np.array([[150], [20], [0]]), query_offset=np.array([3, 90]), is_causal=True,
    )  # fmt: skip
    assert results[0].chunks[:2] == ((2, 1), (1, 1))
    whole = mha_fast.attention(
        query, key, value, return_lse=True,
        kv_lengths=np.array([[150], [20], [0]]), query_offset=np.array([3, 90]), is_causal=True,
    )  # fmt: skip
    for x, one in zip(dask.compute(*results), whole, strict=True):
        np.testing.assert_allclose(x, one, rtol=0, atol=2e-6)


def test_excluded_rows_may_hold_anything():
    query, key, value = inputs()
    spoilt = [x.copy() for x in (key, value)]
    for x in spoilt:
        x[0, :, 100:], x[1, :, 7:] = np.nan, np.inf
    options = {"kv_lengths": np.array([100, 7])}
    results = mha_fast.dask.attention(query, *spoilt, chunks=CHUNKS, return_lse=True, **options)
    assert_joined(results, query, key, value, **options)


@pytest.mark.parametrize("sinks", [None, np.array([1.0, np.nan, 0.0, 2.0])])
def test_queries_without_a_key(sinks):
    """Some see no chunk, some a chunk but no key of it; NaN in a sink or a gate changes nothing."""
    query, key, value = inputs()
    gates = np.array([1.0, 1.0, np.nan, 1.0])
    out, lse = dask.compute(
        *mha_fast.dask.attention(
            query, key, value, chunks=CHUNKS, return_lse=True, sinks=sinks, head_mask=gates,
            is_causal=True, query_offset=-20,
        )
    )  # fmt: skip
    assert (out[:, :, :20] == 0).all()
    unseen = np.full(4, -np.inf, np.float32) if sinks is None else sinks
    assert_close(lse[:, :, :20], np.broadcast_to(unseen[:, None], (2, 4, 20)), 0)


# ---- the graph ----------------------------------------------------------------------------------


def kernel_calls(x):
    """Places of the kernel calls in a graph."""
    tasks = (task for task in dict(x.__dask_graph__()).values() if hasattr(task, "func"))
    return [task.args[1] for task in tasks if task.func in (_tasks.attend, _tasks.whole)]


def pairs(x):
    return sorted({(place.queries[0], place.keys[0]) for place in kernel_calls(x)})


def test_hidden_chunks_make_no_task():
    x = da.zeros((1, 400, 8), chunks=(1, 100, 8), dtype=np.float32)
    causal = mha_fast.dask.attention(x, x, x, is_causal=True)
    assert pairs(causal) == [(i, j) for i in range(0, 400, 100) for j in range(0, i + 1, 100)]
    band = mha_fast.dask.attention(x, x, x, window=(1, 1))
    assert len(pairs(band)) == 10
    short = mha_fast.dask.attention(x, x, x, kv_lengths=101)
    assert pairs(short) == [(i, j) for i in range(0, 400, 100) for j in (0, 100)]
    unknown = mha_fast.dask.attention(x, x, x, kv_lengths=da.full((), 101, chunks=()))
    assert len(pairs(unknown)) == 16
    assert pairs(mha_fast.dask.attention(x, x, x, kv_lengths=0)) == []


def test_visible_chunks_are_those_of_the_mask():
    rng = np.random.default_rng(0)
    for _ in range(300):
        queries, keys = (
            _grid.bounds_of(rng.integers(0, 6, rng.integers(1, 5)).tolist()) for _ in range(2)
        )
        n_query, n_key = queries[-1], keys[-1]
        offsets = rng.integers(-8, 12, 2)
        lengths = rng.integers(0, n_key + 1, 2)
        window = tuple(rng.choice([0, 1, 3, 1 << 61], 2).tolist())
        position = offsets[:, None, None] + np.arange(n_query)[:, None]
        key = np.arange(n_key)
        mask = (key >= position - window[0]) & (key <= position + window[1])
        mask = (mask & (key < lengths[:, None, None])).any(axis=0)
        right = [
            [mask[i:k, j:m].any() for j, m in itertools.pairwise(keys)]
            for i, k in itertools.pairwise(queries)
        ]
        found = visible_chunks(queries, keys, window, offsets, lengths)
        np.testing.assert_array_equal(found, right)


def test_nothing_is_computed_before_it_is_asked_for():
    def fail(*_):
        raise AssertionError("computed")

    x = da.map_blocks(
        fail, chunks=((1,), (10, 10), (8,)), dtype=np.float32, meta=np.empty((0,) * 3)
    )
    x = x.astype(np.float32)
    out, lse = mha_fast.dask.attention(x, x, x, return_lse=True, is_causal=True)
    assert (out.dtype, lse.dtype, out.shape, lse.shape) == ("f4", "f4", (1, 20, 8), (1, 20))
    assert type(out._meta) is np.ndarray and out._meta.shape == (0, 0, 0)


def test_the_same_call_has_the_same_names():
    x = da.zeros((2, 40, 8), chunks=(1, 10, 8), dtype=np.float32)
    first, again = (mha_fast.dask.attention(x, x, x, sinks=[1.0, 2.0]) for _ in range(2))
    other = mha_fast.dask.attention(x, x, x, sinks=[1.0, 3.0])
    assert first.name == again.name != other.name


def test_a_tree_joins_many_chunks():
    x = np.random.default_rng(0).standard_normal((1, 600, 8))
    results = mha_fast.dask.attention(x, x, x, chunks={"keys": 10, "queries": -1}, return_lse=True)
    tasks = [t for t in dict(results[0].__dask_graph__()).values() if hasattr(t, "func")]
    joins = [t for t in tasks if t.func in (_tasks.join, _tasks.joined)]
    assert len(joins) == 15 + 4 + 1  # of 60 parts, four at a time; the last three of a level alone
    n_part = [len(t.dependencies) for t in joins]
    assert max(n_part) == _graph.JOINED_AT_ONCE
    assert_joined(results, x, x, x)


def test_no_task_reads_more_than_its_chunks():
    n, sizes = 64, (1, 16, 8)
    x = da.zeros((1, n, 8), chunks=sizes, dtype=np.float32)
    for task in dict(mha_fast.dask.attention(x, x, x).__dask_graph__()).values():
        if getattr(task, "func", None) is _tasks.attend:
            assert len(task.dependencies) <= 3
            assert len(pickle.dumps(task)) < 4000  # and no array hides in it


# ---- sizes that nobody gave ---------------------------------------------------------------------


def test_small_arrays_stay_whole():
    out = mha_fast.dask.attention(*inputs())
    assert out.npartitions == 1 and len(kernel_calls(out)) == 1


def test_automatic_sizes():
    def lazy(*shape):
        return np.broadcast_to(np.float32(0), shape)

    x = lazy(1, 4, 3 * 4096, 64)
    assert mha_fast.dask.attention(x, x, x).chunks == ((1,), (1,) * 4, (4096,) * 3, (64,))
    many = lazy(8, 12, 128, 64)
    assert mha_fast.dask.attention(many, many, many).npartitions == 1
    batch = lazy(4096, 12, 128, 64)
    assert 4 <= mha_fast.dask.attention(batch, batch, batch).npartitions <= 64
    assert _grid.automatic_rows(10_000_000, 512) == 156_672
    with dask.config.set({"array.chunk-size": "4 MiB"}):
        assert _grid.automatic_rows(10_000_000, 512) == 8192


def test_axes_of_numpy_arrays_follow_those_of_dask_arrays():
    query, key, value = inputs()
    out = mha_fast.dask.attention(query, chunked(key, 1, 1, 50, 20), value)
    assert out.chunks == ((1, 1), (2, 2), (37,), (12,))
    assert len(kernel_calls(out)) == 2 * 2 * 3


# ---- without elements ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "sizes", [{"n_query": 0}, {"n_key": 0}, {"batch": (0,)}, {"n_head": 0, "n_kv_head": 0},
              {"head_width": 0}, {"value_width": 0}], ids=str,
)  # fmt: skip
def test_axes_of_size_0(sizes):
    query, key, value = inputs(**sizes)
    lazy = (da.from_array(x, chunks=-1) for x in (query, key, value))
    out, lse = dask.compute(*mha_fast.dask.attention(*lazy, return_lse=True))
    whole = mha_fast.attention(query, key, value, return_lse=True)
    for x, one in zip((out, lse), whole, strict=True):
        assert_same_bits(x, one)


def test_functions_of_dask_find_the_meta_themselves():
    """Dask calls a function on arrays of size 0 to learn what it returns."""
    query, key, value = (da.from_array(x, chunks=(1, 2, -1, -1)) for x in inputs(n_head=2))
    whole = mha_fast.attention(*(x.compute() for x in (query, key, value)))
    mapped = da.map_blocks(mha_fast.attention, query, key, value, chunks=(1, 2, 37, 12))
    blocks = da.blockwise(
        mha_fast.attention, "bhqv", query, "bhqe", key, "bhke", value, "bhkv", concatenate=True
    )
    for x in (mapped, blocks):
        assert x.dtype == np.float32 and type(x._meta) is np.ndarray
    assert_same_bits(mapped.compute(), whole)
    empty = mha_fast.dask.attention(*(np.empty((0,) * 4, np.float32) for _ in range(3)))
    assert empty.compute().shape == (0, 0, 0, 0)


def test_xarray_apply_ufunc():
    xarray = pytest.importorskip("xarray")
    query, key, value = inputs(n_head=2)
    names = (("batch", "head", "query", "width"), ("batch", "head", "key", "width"),
             ("batch", "head", "key", "value_width"))  # fmt: skip
    arrays = [
        xarray.DataArray(x, dims=dims).chunk({dims[2]: 20})
        for x, dims in zip((query, key, value), names, strict=True)
    ]
    out = xarray.apply_ufunc(
        mha_fast.dask.attention, *arrays, dask="allowed", kwargs={"is_causal": True},
        input_core_dims=[dims[1:] for dims in names],
        output_core_dims=[("head", "query", "value_width")],
    )  # fmt: skip
    assert out.dims == ("batch", "head", "query", "value_width")
    assert out.chunks[2] == (20, 17)
    right = expected(query, key, value, is_causal=True)
    assert_close(out.to_numpy(), right.out, right.out_limit)
    with pytest.raises(TypeError, match="query is of type DataArray.*pass .data"):
        mha_fast.dask.attention(*arrays)


# ---- errors -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change, error, message",
    [
        ({"key": np.zeros((2, 2, 150, 7), np.float32)}, ValueError, "key has shape"),
        ({"value": np.zeros((2, 2, 150, 7))}, TypeError, "value has dtype float64"),
        ({"attn_mask": np.ones((3, 150), bool)}, ValueError, "attn_mask has shape"),
        ({"kv_lengths": 151}, ValueError, "kv_lengths holds 151 to 151"),
        ({"scale": np.inf}, ValueError, "scale is inf"),
        ({"sinks": [1.0, 2.0]}, ValueError, "sinks has shape"),
        ({"return_lse": "yes"}, TypeError, "return_lse is 'yes'"),
        ({"num_threads": 0}, ValueError, "num_threads is 0"),
        ({"query_offset": "start"}, ValueError, "query_offset is 'start'"),
        ({"out": np.zeros(3)}, TypeError, "out"),
        ({"chunks": 5}, TypeError, "chunks is 5; expected a dict"),
        ({"chunks": {"rows": 5}}, ValueError, "chunks has the name 'rows'"),
        ({"chunks": {"keys": 0}}, ValueError, r"chunks\['keys'\] is 0"),
        ({"chunks": {"keys": 2.5}}, TypeError, r"chunks\['keys'\] is 2.5"),
        ({"chunks": {"keys": (100, 20)}}, ValueError, "sums to 120; expected 150"),
        ({"query": da.zeros((2, 4, 37, 20), dtype=np.int64)}, TypeError, "query has dtype int64"),
    ],
)  # fmt: skip
def test_wrong_arguments_are_named_before_anything_is_computed(change, error, message):
    query, key, value = inputs()
    arguments = {"query": query, "key": key, "value": value} | change
    with pytest.raises(error, match=message):
        mha_fast.dask.attention(**arguments)


def test_chunks_of_unknown_size_are_an_error():
    query, key, value = inputs()
    lazy = da.from_array(key, chunks=50)
    unknown = lazy[:, :, lazy[0, 0, :, 0] > -9]
    with pytest.raises(ValueError, match="key has chunks of unknown size.*compute_chunk_sizes"):
        mha_fast.dask.attention(query, unknown, value)


def test_chunks_that_are_no_numpy_arrays_are_an_error():
    query, key, value = inputs()
    masked = da.ma.masked_greater(da.from_array(key), 1)
    with pytest.raises(TypeError, match="key has chunks of type MaskedArray"):
        mha_fast.dask.attention(query, masked, value)


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_failure_in_a_task_names_the_chunk(scheduler):
    query, key, value = inputs()
    lengths = da.from_array(np.array([10, 1000]), chunks=1)  # cannot be checked before
    out = mha_fast.dask.attention(query, key, value, kv_lengths=lengths, chunks=CHUNKS)
    with pytest.raises(ValueError, match="kv_lengths holds 1000 to 1000; expected 0 to 150") as e:
        out.compute(scheduler=scheduler)
    (note,) = e.value.__notes__
    assert note.startswith("in attention of the chunk with batch axis 0 1:2, heads ")
    assert "queries " in note and "keys " in note


# ---- threads ------------------------------------------------------------------------------------


@pytest.mark.parametrize("n_worker", [1, 2, 3])
def test_threads_and_tasks_share_the_cores(n_worker, monkeypatch):
    monkeypatch.setattr(_threads, "CPU_COUNT", 7)
    asked = dask.delayed(_threads.threads_per_task, pure=False)()
    with dask.config.set(scheduler="threads", num_workers=n_worker):
        assert asked.compute() == 7 // n_worker
    assert asked.compute(scheduler="synchronous") == 7


def test_threads_can_be_given(monkeypatch):
    used = []

    def attention(*args, num_threads, **options):
        used.append(num_threads)
        return right(*args, num_threads=num_threads, **options)

    right = _tasks.attention
    monkeypatch.setattr(_tasks, "attention", attention)
    out = mha_fast.dask.attention(*inputs(), chunks=CHUNKS, num_threads=3)
    out.compute(scheduler="synchronous")
    assert set(used) == {3}
