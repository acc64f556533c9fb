"""A short run of fuzz_dask.py, and proof that it sees what goes wrong."""

import pytest

pytest.importorskip("dask.array")

import dataclasses

import numpy as np
from fuzz_dask import main

from mha_fast.integrations.dask import _tasks

N_CASE = 60


def test_random_calls_and_chunks(capsys):
    status = main(["--cases", str(N_CASE)])
    assert status == 0, capsys.readouterr().out


def _positions_of_the_whole_call(options, place, *arguments, **numbers):
    return options, place._replace(queries=(0, 0)), *arguments


def _keys_from_0(options, place, dtype, query, key, *arguments):
    keys = (0, place.keys[1] - place.keys[0])
    return options, place._replace(keys=keys), dtype, query, key, *arguments


def _another_scale(options, *arguments):
    return dataclasses.replace(options, scale=options.scale * (1 + 1e-3)), *arguments


@pytest.mark.parametrize(
    "fault", [_positions_of_the_whole_call, _keys_from_0, _another_scale], ids=lambda f: f.__name__
)
def test_fault_in_the_tasks_is_found(fault, monkeypatch, capsys):
    right = _tasks.attend
    monkeypatch.setattr(
        _tasks, "attend", lambda *arguments, **numbers: right(*fault(*arguments), **numbers)
    )
    assert main(["--cases", "200"]) == 1
    assert "FINDING: seed 0, case " in capsys.readouterr().out


@pytest.mark.parametrize("forgotten", ["sinks", "head_mask", "a part"])
def test_fault_in_the_join_is_found(forgotten, monkeypatch, capsys):
    right = _tasks.joined

    def faulty(options, place, sinks, head_mask, *parts):
        sinks = None if forgotten == "sinks" else sinks
        head_mask = None if forgotten == "head_mask" else head_mask
        return right(options, place, sinks, head_mask, *parts[forgotten == "a part" :])

    monkeypatch.setattr(_tasks, "joined", faulty)
    assert main(["--cases", "300"]) == 1
    assert "FINDING" in capsys.readouterr().out


def test_gates_are_multiplied_once(monkeypatch, capsys):
    right = _tasks.attend

    def faulty(options, place, dtype, *arguments, **numbers):
        out, lse = right(options, place, dtype, *arguments, **numbers)
        gates = numbers.get("head_mask")
        if gates is not None:
            out = (out * np.asarray(gates)[..., None, None]).astype(out.dtype)
        return out, lse

    monkeypatch.setattr(_tasks, "attend", faulty)
    assert main(["--cases", "300"]) == 1
    assert "FINDING" in capsys.readouterr().out
