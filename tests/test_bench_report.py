"""The results page says what was measured, part by part, and nothing else."""

import json
import re
from dataclasses import replace

import pytest
from _bench import run_python

from bench import page, report, rst, scaling, scaling_view, store
from bench.measure import Measurement

MACHINE = {"cpu": "some", "n_cpu": 2, "isa": "avx2", "mha_fast": "1", "numpy": "2", "python": "3"}


def row(case="tiny", ratios=(2.0, 3.0, 4.0), num_threads=1, **others):
    return Measurement(
        case, "1, 2, 3", "float32", num_threads, ours_seconds=1e-3, peer_seconds=2e-3,
        ratios=ratios, ours_error=1e-7, peer_error=2e-7, gflops=50.0, fma_peak=100.0,
        gbytes=1.0, read_peak=10.0, **others,
    )  # fmt: skip


def part(*rows, peer="torch", version="2.13", **others):
    said = {"dtype": "float32", "precision": "highest", "quick": False, "commands": ["do it"]}
    about = {"machine": MACHINE, "peer": version}
    return store.Part(about=about, date="2026-01-02", peer=peer, rows=list(rows), **(said | others))


def refused(case, reason):
    return Measurement(case, "1, 2, 3", "float32", 1, refused=reason)


def test_part_is_read_as_it_was_written(tmp_path):
    written = part(row(), row("odd", way="one of two"), refused("decode", "no such operation"))
    store.add_part(written, tmp_path)
    (read,) = store.read_parts(tmp_path)
    by_case = {r.case: r for r in read.rows}
    assert (by_case["tiny"].ratio, by_case["tiny"].gflops) == (3.0, 50.0)
    assert by_case["odd"].way == "one of two"
    assert by_case["decode"].refused == "no such operation"
    assert replace(read, rows=[]) == replace(written, rows=[])


def test_numbers_are_kept_as_far_as_they_mean_something(tmp_path):
    store.add_part(part(row(ratios=(1.23456789, 2.0, 3.0))), tmp_path)
    assert store.read_parts(tmp_path)[0].rows[0].ratios[0] == 1.2346


def test_later_run_replaces_the_cases_it_measured(tmp_path):
    store.add_part(part(row("odd"), row("tiny"), commands=["all"]), tmp_path)
    store.add_part(part(row("tiny", ratios=(9.0, 9.0, 9.0)), commands=["tiny"]), tmp_path)
    (read,) = store.read_parts(tmp_path)
    assert {r.case: r.ratio for r in read.rows} == {"odd": 3.0, "tiny": 9.0}
    assert read.commands == ["all", "tiny"]


def test_rows_stand_in_the_order_of_the_cases(tmp_path):
    store.add_part(part(row("tiny"), row("decode", num_threads=2), row("decode")), tmp_path)
    places = [(r.case, r.num_threads) for r in store.read_parts(tmp_path)[0].rows]
    assert places == [("decode", 1), ("decode", 2), ("tiny", 1)]


def test_run_with_another_version_drops_what_it_did_not_measure(tmp_path):
    store.add_part(part(row("odd"), commands=["old"]), tmp_path)
    store.add_part(part(row("tiny"), version="2.14"), tmp_path)
    (read,) = store.read_parts(tmp_path)
    assert ([r.case for r in read.rows], read.commands) == (["tiny"], ["do it"])


def test_precision_high_is_a_part_of_its_own(tmp_path):
    store.add_part(part(row()), tmp_path)
    store.add_part(part(row(precision="high"), precision="high"), tmp_path)
    text = page.render(store.read_parts(tmp_path), None)
    assert "Ratios in float32\n--" in text and 'Ratios in float32, precision="high"\n--' in text


def test_page_counts_what_is_slower_and_names_it():
    rows = [
        row("odd", (1.5,) * 3),
        row("tiny", (0.5,) * 3, num_threads=2),
        row("decode", (1.01,) * 3),
    ]
    text = page.render([part(*rows)], None)
    assert "Of 3 ratios, ``mha_fast`` is faster in 1, equal within 5% in 1, and slower in 1" in text
    assert "``tiny`` against torch on 2 threads (0.50)." in text
    assert "**0.50**" in text and "1.01 (tie)" in text


def test_page_gives_every_refusal_once_with_its_reason():
    both = part(row("odd"), refused("tiny", "why not"), refused("decode", "why not"))
    none = part(refused("odd", "never"), refused("tiny", "never"), peer="other")
    text = page.render([both, none], None)
    assert text.count("- Not timed against torch: ``tiny``, ``decode`` (why not).") == 1
    assert "- Not timed against other: everything (never)." in text
    assert "other, 1 thread" not in text


def test_page_warns_of_quick_runs():
    assert "quick runs" not in page.render([part(row())], None)
    assert "quick runs" in page.render([part(row(), quick=True)], None)


def test_page_names_machine_versions_dates_and_commands():
    text = page.render([part(row()), part(row(), peer="other", commands=["do that"])], None)
    assert "- some, 2 CPUs; mha_fast 1 (avx2), NumPy 2, Python 3\n" in text
    assert "against torch 2.13, other 2.13" in text and "- 2026-01-02\n" in text
    assert "    do it\n    do that\n" in text


def test_table_is_as_wide_as_its_cells():
    lines = rst.table(["a", "long title"], [["longer", "b"]]).splitlines()
    rule = "======  =========="
    assert lines == [rule, "a       long title", rule, "longer  b", rule]


def test_page_in_the_documentation_is_what_was_kept(tmp_path):
    page.write(store.RESULTS, tmp_path / "page.rst")
    assert (tmp_path / "page.rst").read_text() == page.PAGE.read_text()


def test_kept_results_are_no_quick_runs():
    assert [part.name for part in store.read_parts(store.RESULTS) if part.quick] == []


def test_report_measures_keeps_and_writes(tmp_path):
    command = (
        *("-m", "bench.report", "--quick", "--peer", "numpy", "--threads", "1"),
        *("--results", tmp_path / "kept", "--page", tmp_path / "page.rst"),
    )
    for dtype in ("float64", "float16"):
        done = run_python(*command, "--dtype", dtype, "--cases", "tiny")
        assert (done.returncode, done.stderr) == (0, "")
    names = [part.name for part in store.read_parts(tmp_path / "kept")]
    assert names == ["numpy_float16", "numpy_float64"]
    text = (tmp_path / "page.rst").read_text()
    assert "Ratios in float16" in text and "Ratios in float64" in text
    assert "python -m bench.report --peer numpy --dtype float64 --threads 1" in text


def test_command_on_the_page_is_the_one_that_was_run():
    said = "--peer torch --dtype float32 --precision high --threads 1,2 --cases odd,tiny --rounds 2"
    options = report._parse([*said.split(), "--quick"])
    options.peer, options.dtype = "torch", "float32"
    assert report.command(options) == f"python -m bench.report {said} --quick"


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--peer", "abacus"], "no 'abacus'; there are"),
        (["--dtype", "int8"], "no 'int8'; there are float32, "),
        (["--precision", "high", "--dtype", "float16"], "precision high is one of float32"),
    ],
)
def test_report_refuses_what_it_does_not_know(arguments, complaint, capsys):
    with pytest.raises(SystemExit, match="2"):
        report._parse(arguments)
    assert complaint in capsys.readouterr().err


def test_scaling_measures_keeps_draws_and_writes(tmp_path):
    pytest.importorskip("matplotlib")
    done = run_python(
        *("-m", "bench.scaling", "--quick", "--peer", "numpy", "--threads", "1"),
        *("--results", tmp_path, "--picture", tmp_path / "a.png", "--page", tmp_path / "page.rst"),
    )
    assert (done.returncode, done.stderr) == (0, "")
    kept = json.loads((tmp_path / store.SCALING).read_text())
    found = {(p["contender"], p["length"], p["is_causal"], p["window"]) for p in kept["points"]}
    pairs = {
        (who, length, is_causal, None)
        for who in ("mha_fast", "numpy")
        for length in (64, 128)
        for is_causal in (False, True)
    }
    assert found == pairs | {("mha_fast", length, False, 1024) for length in (64, 128)}
    assert all(p["seconds"] > 0 for p in kept["points"])
    assert all((p["extra_bytes"] is None) == (p["window"] is not None) for p in kept["points"])
    assert (tmp_path / "a.png").stat().st_size > 1000
    assert "Time and memory against length" in (tmp_path / "page.rst").read_text()


def scaled(*points, **others):
    names = ("contender", "length", "is_causal", "window", "seconds", "extra_bytes")
    said = {"about": {"machine": MACHINE}, "date": "2026-01-02", "num_threads": 2, "quick": False}
    kept = {"commands": ["scale"], "causal_share": 0.5, **said, **others}
    return kept | {"points": [dict(zip(names, point, strict=True)) for point in points]}


def test_scaling_table_counts_per_pair_and_the_window_per_query():
    kept = scaled(
        ("numpy", 1000, False, None, 5e-3, 3 << 20),
        ("mha_fast", 1000, False, None, 1e-3, 1 << 20),
        ("mha_fast", 1000, True, None, 5e-4, 1 << 19),
        ("mha_fast", 1000, False, 1024, 2e-3, None),
    )
    text = scaling_view.section(kept)
    titles, values = (
        re.split(r"  +", line.strip())
        for line in text.splitlines()
        if re.match(r"length, ns|1,000 .*2e\+03", line)
    )
    assert titles[1:] == ["mha_fast", "mha_fast, causal", "mha_fast, window", "numpy"]
    assert values[1:] == ["1", "0.5", "2e+03", "5"]
    assert re.search(r"^1,000 +1\.0 +0\.5 +3\.0$", text, re.MULTILINE)


def test_later_scaling_keeps_the_other_lengths_of_the_same_machine():
    old = scaled(("mha_fast", 1, False, None, 1.0, 1), ("mha_fast", 2, False, None, 2.0, 2))
    new = scaled(("mha_fast", 2, False, None, 9.0, 9), commands=["again"])
    both = scaling.merged(old, new)
    assert [point["seconds"] for point in both["points"]] == [1.0, 9.0]
    assert both["commands"] == ["scale", "again"]
    assert scaling.merged(old, new | {"num_threads": 1})["points"] == new["points"]
    assert scaling.merged(None, new) == new
