"""Two contenders are timed as the benchmarks claim, whatever the peer."""

import importlib.util
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from _bench import ROOT, SMALL, cases, run_python

import mha_fast
from bench import accuracy, machine, measure, peers


class Clock:
    """Time that passes only in the calls that are timed."""

    def __init__(self):
        self.now = 0.0
        self.log = []

    def perf_counter(self):
        return self.now

    def call(self, who, seconds, result=None):
        """Return a call of `who` that takes `seconds`."""

        def passing():
            self.log.append(who)
            self.now += seconds
            return result

        return passing


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(measure, "time", clock)
    return clock


def test_turn_lasts_as_long_as_asked_and_two_calls_at_least(clock):
    assert measure.shortest_of_turn(clock.call("x", 0.25), 1.0) == 0.25
    assert len(clock.log) == 1 + 4  # the first one is not timed
    assert measure.shortest_of_turn(clock.call("x", 0.25), 0.0) == 0.25
    assert len(clock.log) == 5 + 1 + 2


def test_contenders_take_turns(clock):
    effort = measure.Effort(rounds=2, turn_seconds=0.0)
    ours, peer = clock.call("ours", 1.0), clock.call("peer", 3.0)
    assert measure.shortest_of_both(ours, peer, effort) == (1.0, 3.0)
    assert clock.log == (["ours"] * 3 + ["peer"] * 3) * 2


def fake_peer(prepare):
    return SimpleNamespace(prepare=prepare, to_numpy=lambda result: result)


def measured_against(peer, case=cases.CASES["tiny"]):
    return measure.measure_case(case, peer, 1, measure.Effort(1, 0.0))


def test_ratio_above_one_means_that_mha_fast_is_faster(clock, monkeypatch):
    case = cases.CASES["tiny"]
    right = mha_fast.attention(*cases.make_inputs(case))
    ours = SimpleNamespace(attention=lambda *a, **k: clock.call("ours", 1.0, right)())
    monkeypatch.setattr(measure, "mha_fast", ours)
    measured = measured_against(fake_peer(lambda case, inputs: clock.call("peer", 3.0, right)))
    assert measured.ratios == (3.0,) * measure.N_RATIO and measured.ratio == 3.0
    assert (measured.ours_seconds, measured.peer_seconds) == (1.0, 3.0)
    assert measured.gflops == case.n_flop / 1e9
    assert measured.gbytes == case.n_bytes / 1e9


def test_wrong_result_of_the_peer_is_not_timed(clock):
    zeros = np.zeros((1, 12, 16, 64), np.float32)
    measured = measured_against(fake_peer(lambda case, inputs: clock.call("peer", 1.0, zeros)))
    assert measured.wrong and "the peer is wrong: error" in measured.refused
    assert clock.log == ["peer"] and measured.ratios == ()


def test_wrong_result_of_mha_fast_is_not_timed(clock, monkeypatch):
    zeros = np.zeros((1, 12, 16, 64), np.float32)
    monkeypatch.setattr(measure, "mha_fast", SimpleNamespace(attention=lambda *a, **k: zeros))
    measured = measured_against(fake_peer(lambda case, inputs: clock.call("peer", 1.0)))
    assert measured.wrong and "mha_fast is wrong: error" in measured.refused
    assert clock.log == []


def test_case_that_the_peer_cannot_compute_is_named_with_the_reason():
    def prepare(case, inputs):
        raise peers.Unsupported("no such operation")

    measured = measured_against(fake_peer(prepare))
    assert (measured.refused, measured.wrong) == ("no such operation", False)


@pytest.mark.parametrize(("dtype", "peak"), [("float32", 200.0), ("float64", 100.0)])
def test_fma_peak_is_that_of_the_dtype(monkeypatch, dtype, peak):
    monkeypatch.setattr(machine, "_core", SimpleNamespace(measure_fma_peak=lambda n: 100.0 * n))
    assert machine.fma_meter(2, dtype)() == peak


def test_fma_peak_is_none_where_the_kernel_has_no_measurement(monkeypatch):
    monkeypatch.setattr(machine, "_core", SimpleNamespace())
    assert machine.fma_meter(1, "float32") is None


@pytest.mark.parametrize("n_bytes", [1, 40_000_004])
def test_read_meter_reads_every_byte_once(monkeypatch, n_bytes):
    clock = iter([0.0, 1.0])
    monkeypatch.setattr(machine, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    dots = []
    monkeypatch.setattr(machine.np, "dot", lambda a, b: dots.append((a, b)))
    read = machine.ReadMeter(3, n_bytes)() * 1e9  # in one second of the clock
    assert read == sum(a.nbytes + b.nbytes for a, b in dots)
    assert read == pytest.approx(max(n_bytes, 32 << 20), abs=8)


def test_peak_is_the_highest_of_a_turn(clock):
    speeds = iter([1.0, 3.0, 2.0, 9.0])

    def measure_peak():
        clock.now += 0.5
        return next(speeds)

    assert measure.highest_of_turn(measure_peak, 1.0) == 3.0  # 9 comes after the end


def refused_by(name):
    """Check every kind of case of one peer against float64; return what it cannot compute."""
    peer = peers.load(name)
    refused = []
    with peer.session(1):
        for case in SMALL:
            inputs = cases.make_inputs(case)
            try:
                result = peer.to_numpy(peer.prepare(case, inputs)())
            except peers.Unsupported:
                refused.append(case.name)
            else:
                accuracy.expected_rows(case, inputs).error_of(result)
    return refused


def test_numpy_peer_computes_every_case():
    assert refused_by("numpy") == []


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")
def test_torch_peer_computes_every_case_but_causal_with_a_mask():
    # In a process of its own, as always: two thread pools in one would disturb the other tests.
    script = "import test_bench_measure; print(*test_bench_measure.refused_by('torch'))"
    done = run_python("-c", script, cwd=ROOT / "tests")
    assert (done.stdout.split(), done.stderr) == (["causal_bool", "causal_float"], "")


def test_peer_without_its_library_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.delitem(sys.modules, "bench.peers.torch", raising=False)
    with pytest.raises(peers.MissingLibrary, match="peer torch cannot be loaded.*torch"):
        peers.load("torch")
