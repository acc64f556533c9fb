"""The guard finds what became slower, and only that."""

import json
import re

import pytest
from _bench import cases, run_python

from bench import guard


def write_report(path, seconds, isa="avx2"):
    """Write what pytest-benchmark would: `seconds` maps a case to [(numpy, mha_fast), ...]."""
    benchmarks = [
        {
            "extra_info": {"case": case, "repeat": repeat, "contender": contender},
            "stats": {"min": shortest, "mean": 1e9},
        }
        for case, repeats in seconds.items()
        for repeat, pair in enumerate(repeats)
        for contender, shortest in zip(("numpy", "mha_fast"), pair, strict=False)
    ]
    setting = {"cpu": "some", "isa": isa, "num_threads": 2, "numpy": "2.0.0"}
    path.write_text(json.dumps({"machine_info": {"mha_fast": setting}, "benchmarks": benchmarks}))
    return path


@pytest.fixture
def before(tmp_path):
    return write_report(tmp_path / "before.json", {"a": [(6.0, 2.0)], "b": [(1.0, 0.5)]})


def guard_status(*arguments):
    return guard.main([str(argument) for argument in arguments])


def word_of(case, printed):
    """The last word of the table's line for `case`."""
    return re.search(rf"^{case} .* (\w+)$", printed, re.MULTILINE)[1]


def test_guard_passes_when_the_whole_machine_is_slower(tmp_path, before, capsys):
    now = write_report(tmp_path / "now.json", {"a": [(18.0, 6.0)], "b": [(3.0, 1.5)]})
    assert guard_status(before, now) == 0
    printed = capsys.readouterr().out
    assert (word_of("a", printed), word_of("b", printed)) == ("ok", "ok")


def test_guard_finds_the_case_that_fell(tmp_path, before, capsys):
    now = write_report(tmp_path / "now.json", {"a": [(6.0, 3.0)], "b": [(1.0, 0.5)]})
    assert guard_status(before, now) == 1
    printed = capsys.readouterr().out
    assert (word_of("a", printed), word_of("b", printed)) == ("FELL", "ok")
    assert "3.00x" in printed and "2.00x" in printed and "-33%" in printed


def test_guard_passes_when_a_case_became_faster(tmp_path, before, capsys):
    now = write_report(tmp_path / "now.json", {"a": [(6.0, 0.5)], "b": [(1.0, 0.5)]})
    assert guard_status(before, now) == 0
    assert "+300%" in capsys.readouterr().out


@pytest.mark.parametrize(("tolerance", "status"), [("0.3", 0), ("0.21", 0), ("0.19", 1), ("0", 1)])
def test_guard_tolerance_is_a_share_of_the_old_ratio(tmp_path, before, tolerance, status):
    now = write_report(tmp_path / "now.json", {"a": [(6.0, 2.5)], "b": [(1.0, 0.5)]})  # -20 %
    assert guard_status(before, now, "--tolerance", tolerance) == status


def test_guard_tolerance_must_be_a_share(before, capsys):
    with pytest.raises(SystemExit, match="2"):
        guard_status(before, before, "--tolerance", "1.5")
    assert "1.5 is not in" in capsys.readouterr().err


def test_guard_fails_when_a_case_is_missing(tmp_path, before, capsys):
    now = write_report(tmp_path / "now.json", {"a": [(6.0, 2.0)]})
    assert guard_status(before, now) == 1
    assert word_of("b", capsys.readouterr().out) == "MISSING"


def test_guard_names_a_case_that_the_baseline_does_not_know(tmp_path, before, capsys):
    new = {"a": [(6.0, 2.0)], "b": [(1.0, 0.5)], "c": [(1.0, 1.0)]}
    assert guard_status(before, write_report(tmp_path / "now.json", new)) == 0
    assert re.search(r"^c .* new, not compared$", capsys.readouterr().out, re.MULTILINE)


@pytest.mark.parametrize(
    ("repeats", "status"),
    [([(6.0, 2.0), (6.0, 2.4), (6.0, 2.0)], 0), ([(6.0, 2.4), (6.0, 2.0), (6.0, 2.4)], 1)],
)
def test_guard_takes_the_median_of_the_repeats(tmp_path, before, repeats, status):
    now = write_report(tmp_path / "now.json", {"a": repeats, "b": [(1.0, 0.5)]})
    assert guard_status(before, now, "--tolerance", "0.1") == status


def test_guard_does_not_judge_what_a_busy_machine_measured(tmp_path, before, capsys):
    """Whether the median fell or not; what was measured in peace is still judged."""
    for repeats in ([(6.0, 2.0), (6.0, 6.0), (6.0, 2.0)], [(6.0, 6.0), (6.0, 2.0), (6.0, 6.0)]):
        now = write_report(tmp_path / "now.json", {"a": repeats, "b": [(1.0, 0.5)]})
        assert guard_status(before, now) == 3
        assert re.search(
            r"^a .* not judged, the machine was busy$", capsys.readouterr().out, re.MULTILINE
        )
        assert guard_status(before, now, "--spread", "0.99") in (0, 1)
        fell = write_report(tmp_path / "fell.json", {"a": repeats, "b": [(1.0, 0.9)]})
        assert guard_status(before, fell) == 1


def test_guard_falls_in_small_steps_do_not_add_up_unseen(tmp_path):
    """From 3 to 2.4 to 1.9: each step is within the tolerance, the second is not of the best."""
    recorded = tmp_path / "baseline.json"
    for step, (ours, status) in enumerate([(2.0, 0), (2.5, 0), (3.15, 1)]):
        run = write_report(tmp_path / f"{step}.json", {"a": [(6.0, ours)], "b": [(1.0, 0.5)]})
        if step:
            assert guard_status(recorded, run) == status
        assert guard_status("--record", run, "--output", recorded) == 0
        assert json.loads(recorded.read_text())["ratios"] == {"a": 3.0, "b": 2.0}
    assert guard_status("--record", run, "--output", recorded, "--anew") == 0
    assert json.loads(recorded.read_text())["ratios"] == {"a": 1.905, "b": 2.0}


def test_guard_does_not_mix_the_best_of_two_machines(tmp_path, before, capsys):
    recorded = tmp_path / "baseline.json"
    assert guard_status("--record", before, "--output", recorded) == 0
    other = write_report(tmp_path / "other.json", {"a": [(6.0, 1.0)]}, isa="avx512")
    content = recorded.read_text()
    assert guard_status("--record", other, "--output", recorded) == 2
    assert "--anew" in capsys.readouterr().err
    assert recorded.read_text() == content


def test_guard_says_when_the_runs_were_not_made_alike(tmp_path, before, capsys):
    same = {"a": [(6.0, 2.0)], "b": [(1.0, 0.5)]}
    guard_status(before, write_report(tmp_path / "now.json", same, isa="avx512"))
    assert "isa was avx2 in the baseline and is avx512 now" in capsys.readouterr().out
    guard_status(before, before)
    assert "note:" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (None, "cannot be read"),
        ("", "is not JSON"),
        ("{}", "is neither a report"),
        ("[]", "is neither a report"),
        ("3", "is neither a report"),
        ('{"benchmarks": [{"stats": {"min": 1}}]}', "is neither a report"),
        ('{"benchmarks": [], "machine_info": {"mha_fast": {}}}', "holds no timings"),
        ('{"ratios": {}, "machine": {}}', "holds no timings"),
        ('{"ratios": {"a": NaN}, "machine": {}}', "the ratio of a is nan"),
        ('{"ratios": {"a": "3"}, "machine": {}}', "the ratio of a is '3'"),
    ],
)
@pytest.mark.parametrize("side", ["baseline", "new"])
def test_guard_names_a_bad_file_and_what_is_wrong(tmp_path, before, capsys, content, reason, side):
    bad = tmp_path / "bad.json"
    if content is not None:
        bad.write_text(content)
    assert guard_status(*((bad, before) if side == "baseline" else (before, bad))) == 2
    captured = capsys.readouterr()
    assert f"{bad}: {reason}" in captured.err
    assert captured.out == ""


@pytest.mark.parametrize(
    ("pair", "reason"),
    [
        ((6.0,), "has no timing of mha_fast beside the other one in a"),
        ((6.0, 0.0), "the time of mha_fast in a is 0.0"),
        ((float("nan"), 2.0), "the time of numpy in a is nan"),
    ],
)
def test_guard_refuses_times_that_give_no_ratio(tmp_path, before, capsys, pair, reason):
    assert guard_status(before, write_report(tmp_path / "bad.json", {"a": [pair]})) == 2
    assert reason in capsys.readouterr().err


def test_guard_records_a_baseline_that_it_accepts(tmp_path, before):
    recorded = tmp_path / "baseline.json"
    assert guard_status("--record", before, "--output", recorded) == 0
    content = json.loads(recorded.read_text())
    assert content["ratios"] == {"a": 3.0, "b": 2.0}
    assert content["machine"]["isa"] == "avx2"
    assert set(content) == {"ratios", "machine"}
    slower = write_report(tmp_path / "slower.json", {"a": [(6.0, 4.0)], "b": [(1.0, 0.5)]})
    assert (guard_status(recorded, before), guard_status(recorded, slower)) == (0, 1)


def test_guard_exit_status_reaches_the_shell(tmp_path, before):
    slower = write_report(tmp_path / "slower.json", {"a": [(6.0, 4.0)], "b": [(1.0, 0.5)]})
    assert run_python("-m", "bench.guard", before, before).returncode == 0
    assert run_python("-m", "bench.guard", before, slower).returncode == 1
    assert run_python("-m", "bench.guard").returncode == 2


def test_guard_shipped_baseline_knows_every_guarded_case(capsys):
    assert list(guard.read_run(guard.RECORDED).ratios) == cases.GUARDED
    assert guard_status(guard.RECORDED) == 0  # against itself, as the default
