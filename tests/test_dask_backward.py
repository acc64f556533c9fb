"""`mha_fast.dask.attention_backward`: gradients of chunks, added up."""

import numpy as np
import pytest
from _support import assert_same_bits, normal_inputs
from fuzz_dask import main

import mha_fast
from mha_fast import reference

dask = pytest.importorskip("dask")
da = pytest.importorskip("dask.array")

import mha_fast.dask
from mha_fast.integrations.dask import _tasks

CHUNKS = {"batch": 1, "heads": 3, "queries": 10, "keys": 40}
QKV = ("query", "key", "value")

# name -> options, what is wanted
CASES = {
    "plain": ({}, QKV),
    "causal at the end": (
        {"is_causal": True, "query_offset": "end", "kv_lengths": np.array([150, 61])}, QKV,
    ),
    "more keys than are seen": ({"is_causal": True}, QKV),
    "mask": ({"attn_mask": np.linspace(-1, 1, 150).reshape(1, 1, 150)}, (*QKV, "attn_mask")),
    "softcap, window": ({"softcap": 2.0, "window": (10, 20), "query_offset": -10}, QKV),
    "sinks": ({"sinks": np.arange(4.0), "window": (0, 0), "query_offset": -20}, (*QKV, "sinks")),
    "slopes": ({"alibi_slopes": np.arange(4.0) / 4, "query_offset": 30}, ("alibi_slopes", "key")),
    "slopes of sequences": ({"alibi_slopes": np.arange(8.0).reshape(2, 4)}, ("alibi_slopes",)),
    "gates": ({"head_mask": np.array([0.0, 1.0, -2.0, 0.5])}, ("head_mask", "value", "query")),
}  # fmt: skip


def forward(dtype=np.float64, **options):
    query, key, value = normal_inputs(dtype)
    out, lse = mha_fast.attention(query, key, value, return_lse=True, **options)
    grad_out, _, _ = normal_inputs(dtype, head_width=12, seed=1)
    grad_lse = np.linspace(-1, 1, lse.size).reshape(lse.shape).astype(lse.dtype)
    arrays = {"query": query, "key": key, "value": value, "out": out, "lse": lse}
    return arrays | {"grad_out": grad_out, "grad_lse": grad_lse}


@pytest.mark.parametrize("options, wanted", CASES.values(), ids=CASES)
def test_gradients_are_those_of_the_reference(options, wanted):
    arrays = forward(**options)
    right = reference.attention_backward(**arrays, wanted=wanted, **options)

    lazy = mha_fast.dask.attention_backward(**arrays, wanted=wanted, chunks=CHUNKS, **options)
    found = dask.compute(*lazy, scheduler="synchronous")

    for name, grad, x in zip(wanted, found, right, strict=True):
        assert grad.dtype == np.float64 and grad.shape == x.shape, name
        unit = 1 + np.abs(x).max()
        np.testing.assert_allclose(grad, x, rtol=0, atol=256 * np.finfo(float).eps * unit)


def test_forward_and_backward_without_an_array_in_memory():
    query, key, value = (da.from_array(x, chunks=(1, 2, 20, -1)) for x in normal_inputs(np.float64))
    out, lse = mha_fast.dask.attention(query, key, value, is_causal=True, return_lse=True)
    grads = mha_fast.dask.attention_backward(
        da.ones_like(out), query, key, value, out, lse, is_causal=True
    )
    assert [grad.chunks[2] for grad in grads] == [x.chunks[2] for x in (query, key, value)]
    whole = [x.compute() for x in (query, key, value)]
    results = mha_fast.attention(*whole, is_causal=True, return_lse=True)
    right = reference.attention_backward(np.ones(out.shape), *whole, *results, is_causal=True)
    for grad, x in zip(dask.compute(*grads), right, strict=True):
        np.testing.assert_allclose(grad, x, rtol=0, atol=1e-13)


@pytest.mark.parametrize("scheduler", ["threads", "processes"])
def test_schedulers_give_the_same_bits(scheduler):
    lazy = mha_fast.dask.attention_backward(**forward(np.float32), chunks=CHUNKS)
    found = dask.compute(*lazy, scheduler=scheduler)
    for grad, same in zip(found, dask.compute(*lazy, scheduler="synchronous"), strict=True):
        assert_same_bits(grad, same)


def test_16_bit_gradients_are_rounded_once():
    """With 16-bit parts, a sum of 37 of them would be off by several roundings."""
    arrays = {name: x.astype(np.float32) for name, x in forward().items()}
    short = {name: x.astype(np.float16) for name, x in arrays.items()}
    short |= {name: arrays[name] for name in ("lse", "grad_lse")}
    wide = {name: x.astype(np.float64) for name, x in short.items()}
    right = mha_fast.attention_backward(**wide)

    lazy = mha_fast.dask.attention_backward(**short, chunks={"queries": 1, "keys": 8})
    for grad, x in zip(dask.compute(*lazy, scheduler="synchronous"), right, strict=True):
        assert grad.dtype == np.float16
        assert (grad != x.astype(np.float16)).mean() < 0.02


def test_keys_without_a_query_and_queries_without_a_key_have_gradient_0():
    arrays = forward(is_causal=True, query_offset=-20)
    for name in ("key", "value"):
        arrays[name][:, :, 17:] = np.nan  # what no query sees
    grads = mha_fast.dask.attention_backward(
        **arrays, chunks=CHUNKS, is_causal=True, query_offset=-20
    )
    query, key, value = dask.compute(*grads)
    assert (query[:, :, :20] == 0).all() and np.isfinite(query).all()
    assert (key[:, :, 17:] == 0).all() and (value[:, :, 17:] == 0).all()
    assert np.isfinite(key).all() and key[:, :, :17].any()


def test_hidden_pairs_make_no_task():
    x = da.zeros((1, 400, 8), chunks=(1, 100, 8), dtype=np.float32)
    lse = da.zeros((1, 400), chunks=(1, 100), dtype=np.float32)
    grads = mha_fast.dask.attention_backward(x, x, x, x, x, lse, is_causal=True)
    graph = dict(grads[0].__dask_graph__()).values()
    calls = [t for t in graph if getattr(t, "func", None) is _tasks.differentiate]
    assert len(calls) == 4 + 3 + 2 + 1


def test_one_head_without_axes():
    arrays = {name: x[0, 0] for name, x in forward().items()}
    grads = dask.compute(*mha_fast.dask.attention_backward(**arrays, chunks=CHUNKS))
    for grad, x in zip(grads, mha_fast.attention_backward(**arrays), strict=True):
        np.testing.assert_allclose(grad, x, rtol=0, atol=1e-13)


@pytest.mark.parametrize(
    "change, error, message",
    [
        ({"lse": np.zeros((2, 4, 37), np.float32)}, TypeError, "lse has dtype float32"),
        ({"grad_out": np.zeros((2, 4, 37, 3))}, ValueError, "grad_out has shape"),
        ({"wanted": ("query", "weights")}, ValueError, "wanted holds 'weights'"),
        ({"wanted": ("sinks",)}, ValueError, "wanted holds 'sinks', an argument that was not"),
        ({"scale": np.nan}, ValueError, "scale is nan"),
    ],
)
def test_wrong_arguments_are_named(change, error, message):
    with pytest.raises(error, match=message):
        mha_fast.dask.attention_backward(**(forward() | change))


def test_failure_in_a_task_names_the_chunk():
    lengths = da.from_array(np.array([10, 1000]), chunks=1)  # cannot be checked before
    grads = mha_fast.dask.attention_backward(**forward(), kv_lengths=lengths, chunks=CHUNKS)
    with pytest.raises(ValueError, match="kv_lengths holds 1000 to 1000") as caught:
        grads[0].compute(scheduler="synchronous")
    (note,) = caught.value.__notes__
    assert note.startswith("in attention_backward of the chunk with batch axis 0 1:2, heads ")


def test_random_calls_and_chunks(capsys):
    status = main(["--cases", "60", "--backward"])
    assert status == 0, capsys.readouterr().out


@pytest.mark.parametrize("fault", ["a part", "positions"])
def test_fault_is_found(fault, monkeypatch, capsys):
    if fault == "a part":
        right = _tasks.add
        monkeypatch.setattr(_tasks, "add", lambda *parts: right(*parts[:-1], parts[0]))
    else:
        right = _tasks._positions
        monkeypatch.setattr(
            _tasks, "_positions", lambda options, place, *rest: right(
                options, place._replace(queries=(0, 0)), *rest
            ),
        )  # fmt: skip
    assert main(["--cases", "150", "--backward"]) == 1
    assert "FINDING: seed 0, case " in capsys.readouterr().out
