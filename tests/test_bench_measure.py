"""Two contenders are timed as the benchmarks claim, whatever the peer."""

import importlib.util
import sys
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from _bench import DTYPES, ROOT, SMALL, cases, run_python

import mha_fast
from bench import accuracy, compare, machine, measure, peers


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


def test_call_longer_than_its_turn_is_made_once(clock):
    assert measure.shortest_of_turn(clock.call("x", 2.0), 0.25) == 2.0
    assert clock.log == ["x"]


def test_contenders_take_turns(clock):
    effort = measure.Effort(rounds=2, turn_seconds=0.0)
    ours, peer = clock.call("ours", 0.1), clock.call("peer", 0.3)
    assert measure.shortest_of_both(ours, peer, effort) == (0.1, pytest.approx(0.3))
    assert clock.log == (["ours"] * 3 + ["peer"] * 3) * 2


def fake_peer(prepare):
    return SimpleNamespace(
        prepare=lambda *problem: peers.Prepared(prepare(*problem), np.asarray, "its way")
    )


def measured_against(peer, case=cases.CASES["tiny"]):
    return measure.measure_case(case, peer, 1, measure.Effort(1, 0.0))


def test_ratio_above_one_means_that_mha_fast_is_faster(clock, monkeypatch):
    case = cases.CASES["tiny"]
    right = mha_fast.attention(*cases.make_inputs(case))
    ours = SimpleNamespace(attention=lambda *a, **k: clock.call("ours", 1.0, right)())
    monkeypatch.setattr(measure, "mha_fast", ours)
    measured = measured_against(fake_peer(lambda *_: clock.call("peer", 3.0, right)))
    assert measured.ratios == (3.0,) * measure.N_RATIO and measured.ratio == 3.0
    assert (measured.ours_seconds, measured.peer_seconds) == (1.0, 3.0)
    assert measured.gflops == case.n_flop / 1e9
    assert measured.way == "its way"
    assert measured.gbytes == case.n_bytes / 1e9


def test_wrong_result_of_the_peer_is_not_timed(clock):
    zeros = np.zeros((1, 12, 16, 64), np.float32)
    measured = measured_against(fake_peer(lambda *_: clock.call("peer", 1.0, zeros)))
    assert measured.wrong and "the peer is wrong: error" in measured.refused
    assert clock.log == ["peer"] and measured.ratios == ()


def test_wrong_result_of_mha_fast_is_not_timed(clock, monkeypatch):
    zeros = np.zeros((1, 12, 16, 64), np.float32)
    monkeypatch.setattr(measure, "mha_fast", SimpleNamespace(attention=lambda *a, **k: zeros))
    measured = measured_against(fake_peer(lambda *_: clock.call("peer", 1.0)))
    assert measured.wrong and "mha_fast is wrong: error" in measured.refused
    assert clock.log == []


def test_case_that_the_peer_cannot_compute_is_named_with_the_reason():
    def prepare(case, inputs, num_threads):
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


def test_matrix_peak_is_none_where_cpu_or_kernel_have_none(monkeypatch):
    monkeypatch.setattr(machine, "_core", SimpleNamespace())
    assert machine.matrix_meter(1) is None
    monkeypatch.setattr(machine, "_core", SimpleNamespace(measure_matrix_peak=lambda n: None))
    assert machine.matrix_meter(1) is None


@pytest.mark.parametrize(
    ("dtype", "precision", "share"),
    [
        ("bfloat16", "highest", "25%"),
        ("float32", "highest", "25% (6x: 150%)"),
        ("float32", "high", "25% (3x: 75%)"),
        ("float16", "highest", "25% (6x: 150%)"),
        ("float64", "highest", "–"),
    ],
)
def test_share_of_the_matrix_unit_names_its_products(monkeypatch, dtype, precision, share):
    if dtype == "bfloat16":
        pytest.importorskip("ml_dtypes")
    case = replace(cases.CASES["tiny"], dtype=dtype)
    peaks = iter([1.0, 2.0, 3.0] * 100)
    core = SimpleNamespace(
        measure_matrix_peak=lambda n: next(peaks) * n, measure_fma_peak=lambda n: 1.0
    )
    monkeypatch.setattr(machine, "_core", core)
    peer, effort = peers.load("numpy"), measure.Effort(1, 0.0)
    measured = measure.measure_case(case, peer, 2, effort, precision)
    assert measured.precision == precision
    assert measured.matrix_peak == (None if share == "–" else 6.0)
    assert compare.of_matrix_unit(replace(measured, gflops=1.5)) == share


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


def refused_by(name, dtype):
    """Check every kind of case of one peer against float64; return what it cannot compute."""
    peer = peers.load(name)
    refused = []
    with peer.session(1):
        for case in SMALL:
            case = replace(case, dtype=dtype)
            inputs = cases.make_inputs(case)
            try:
                prepared = peer.prepare(case, inputs, 1)
                result = prepared.to_numpy(prepared.call())
            except peers.Unsupported:
                refused.append(case.name)
            else:
                accuracy.expected_rows(case, inputs).error_of(result)
    return refused


@pytest.mark.parametrize("dtype", DTYPES)
def test_numpy_peer_computes_every_case(dtype):
    assert refused_by("numpy", dtype) == []


def test_numpy_peer_refuses_scores_that_fill_the_memory():
    case = cases.Case("", 1, 1, 1, 30000, 30000, 1)
    with pytest.raises(peers.Unsupported, match=r"would take 3\.6 GB"):
        peers.load("numpy").prepare(case, cases.make_inputs(case), 1)


MASKED_AND_CAUSAL = ["causal_bool", "causal_float"]
EVERYTHING = [case.name for case in SMALL]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("name", "refused", "refused_dtypes"),
    [
        ("torch", MASKED_AND_CAUSAL, ()),
        ("onnxruntime", [], ("float64", "bfloat16")),
        ("openvino", MASKED_AND_CAUSAL, ("float64",)),
    ],
)
def test_peer_computes_every_case_but_those_it_has_no_way_for(name, refused, refused_dtypes, dtype):
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"{name} is not installed")
    # In a process of its own, as always: two thread pools in one would disturb the other tests.
    script = f"import test_bench_measure as t; print(*t.refused_by('{name}', '{dtype}'))"
    done = run_python("-c", script, cwd=ROOT / "tests")
    assert done.returncode == 0, done.stderr
    found = done.stdout.split()
    if dtype in refused_dtypes:
        refused = EVERYTHING
    elif name == "openvino" and dtype in ("float16", "bfloat16") and found == EVERYTHING:
        pytest.skip(f"OpenVINO does not compute in {dtype} on this CPU")
    assert found == refused


def test_fastest_way_of_a_peer_is_chosen(clock, monkeypatch):
    monkeypatch.setattr(peers, "time", clock)
    ways = [peers.Prepared(clock.call(s, s), np.asarray, f"{s} s") for s in (2.0, 1.0, 3.0)]
    assert peers.fastest(ways).way == "1.0 s"
    clock.log.clear()
    assert peers.fastest(ways[:1]).way == "2.0 s" and clock.log == []


@pytest.mark.parametrize(
    "case", [c for c in SMALL if peers.can_share_rows(c)], ids=lambda c: c.name
)
def test_heads_of_a_group_are_rows_of_one_head(case):
    inputs = cases.make_inputs(case)
    same_case, same_inputs = peers.as_rows_of_one_head(case, inputs)
    sizes = (same_case.n_batch, same_case.n_head, same_case.n_query, same_case.head_width)
    assert same_inputs.query.shape == sizes and same_case.n_head == same_case.n_kv_head
    out = peers.from_rows_of_one_head(case, mha_fast.reference.attention(*same_inputs))
    right = mha_fast.reference.attention(*inputs)
    np.testing.assert_allclose(out, right, rtol=1e-12, atol=1e-14)


def test_heads_share_rows_only_where_the_row_does_not_matter():
    grouped = cases.CASES["decode_8_kv_heads"]
    assert peers.can_share_rows(grouped)
    assert peers.can_share_rows(replace(grouped, mask="key_padding"))
    assert not peers.can_share_rows(replace(grouped, mask="float"))
    assert not peers.can_share_rows(replace(grouped, is_causal=True))
    assert not peers.can_share_rows(cases.CASES["decode"])


def test_installed_peers_are_found_without_loading_them():
    script = (
        "import sys; from bench import peers; print(*peers.installed(), 'torch' in sys.modules)"
    )
    *found, loaded = run_python("-c", script).stdout.split()
    assert "numpy" in found and set(found) <= set(peers.names())
    assert loaded == "False"


def test_peer_without_its_library_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.delitem(sys.modules, "bench.peers.torch", raising=False)
    with pytest.raises(peers.MissingLibrary, match="peer torch cannot be loaded.*torch"):
        peers.load("torch")
