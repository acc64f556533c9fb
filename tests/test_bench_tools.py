"""The commands of the benchmarks, run as a user would from the root of the repository."""

import importlib.machinery
import json
import re
import shutil
from pathlib import Path

import pytest
from _bench import ROOT, run_python

import mha_fast
from bench import guard
from mha_fast import _core

PYTEST_BENCH = ("-m", "pytest", "-p", "no:cacheprovider", "-q", "bench")


@pytest.mark.parametrize("threads", ["1", "1,2"])
def test_compare_prints_a_row_per_case_and_thread_count(threads):
    done = run_python("-m", "bench.compare", "--peer", "numpy", "--quick", "--threads", threads)
    assert (done.returncode, done.stderr) == (0, "")
    rows = re.findall(
        r"^(\w+) +[\d, ]+ +float32 +(\d) .* \d+\.\d\d \(.* to .*\).* \d\.\de-\d+ / \d\.\de-\d+$",
        done.stdout, re.MULTILINE,
    )  # fmt: skip
    assert rows == [(name, n) for n in threads.split(",") for name in ("odd", "tiny")]
    assert f"mha_fast {mha_fast.__version__} ({_core.isa()}) against numpy" in done.stdout
    assert "too short to quote" in done.stdout


def test_compare_markdown_is_a_table_of_equal_rows():
    done = run_python(
        *("-m", "bench.compare", "--peer", "numpy", "--quick", "--threads", "1"),
        *("--markdown", "--cases", "tiny", "--dtype", "float64"),
    )
    assert (done.returncode, done.stderr) == (0, "")
    table = [line for line in done.stdout.splitlines() if line.startswith("|")]
    assert len(table) == 3
    assert len({line.count("|") for line in table}) == 1
    assert "| tiny |" in table[2] and "| float64 |" in table[2]


@pytest.mark.parametrize(
    ("option", "value", "complaint"),
    [
        ("--peer", "abacus", "invalid choice: 'abacus'"),
        ("--cases", "tiny,huge", "no case 'huge'; there are prefill_512_e64, "),
        ("--threads", "0", "0 is less than 1"),
        ("--rounds", "0", "0 is less than 1"),
        ("--dtype", "int8", "invalid choice: 'int8'"),
    ],
)
def test_compare_refuses_what_it_does_not_know(option, value, complaint):
    done = run_python("-m", "bench.compare", "--quick", option, value)
    assert (done.returncode, done.stdout) == (2, "")
    assert complaint in done.stderr


def mib_of(contender):
    done = run_python("-m", "bench.memory", "--length", "2048", "--contender", contender)
    assert done.stderr == ""
    return float(re.match(rf"{contender}: ([\d.]+) MiB above inputs and output", done.stdout)[1])


def test_memory_prints_the_number_alone():
    done = run_python("-m", "bench.memory", "--length", "64", "--bytes")
    assert done.stderr == "" and int(done.stdout) < 1 << 20


def test_memory_refuses_what_would_not_fit():
    done = run_python("-m", "bench.memory", "--length", "30000", "--contender", "numpy")
    assert (done.returncode, done.stdout) == (1, "")
    assert "would take 3.6 GB" in done.stderr


def test_compare_refuses_high_precision_of_other_dtypes():
    done = run_python("-m", "bench.compare", "--precision", "high", "--dtype", "float16")
    assert done.returncode == 2 and "precision high is one of float32" in done.stderr


def test_compare_names_precision_high():
    done = run_python(
        *("-m", "bench.compare", "--peer", "numpy", "--quick", "--threads", "1"),
        *("--cases", "tiny", "--precision", "high"),
    )
    assert done.returncode == 0 and re.search(r"^tiny .* float32, high ", done.stdout, re.MULTILINE)


def test_memory_sees_the_scores_that_numpy_writes_and_mha_fast_does_not():
    scores_mib = 2048 * 2048 * 4 / 2**20
    assert mib_of("numpy") >= scores_mib
    assert mib_of("mha_fast") < scores_mib


def test_head_statistics_prints_times_and_memory():
    report = run_python(
        *("-m", "bench.head_statistics", "--length", "64", "--memory-length", "256")
    ).stdout
    assert report.count(" to ") == 4  # a range for causal or not, with and without `received`
    assert "one head of 256 queries and keys" in report


def test_cache_prints_a_cost_per_length():
    report = run_python("-m", "bench.cache", "--lengths", "10", "300").stdout
    assert [line.split()[0] for line in report.splitlines()[1:]] == ["10", "300"]


def test_pruned_heads_prints_a_ratio_per_number_of_heads():
    report = run_python("-m", "bench.pruned_heads", "--length", "64").stdout
    assert [line.split()[0] for line in report.splitlines()[1:]] == ["6", "4", "2", "1"]


def test_dropout_reports_both_directions():
    report = run_python("-m", "bench.dropout", "--length", "64").stdout
    assert [line.split()[0] for line in report.splitlines()[1:]] == ["forward", "backward"]


def test_memory_of_the_backward_pass():
    done = run_python("-m", "bench.memory", "--length", "2048", "--backward", "--causal")
    assert "above inputs and gradients" in done.stdout


def test_backward_compares_with_torch():
    pytest.importorskip("torch", reason="compares with torch")
    done = run_python("-m", "bench.backward", "--cases", "prefill_512_e64", "--dtype", "float16")
    assert "1, 8, 512, 512, 64" in done.stdout, done.stderr


@pytest.mark.parametrize("flags", [[], ["-P"]], ids=["python -m pytest", "pytest"])
def test_benchmarks_run_without_timing(flags):
    done = run_python(*(*flags, *PYTEST_BENCH, "--benchmark-disable", "-k", "tiny or odd"))
    assert (done.returncode, done.stderr) == (0, "")
    assert "12 passed" in done.stdout  # two cases, two contenders, three turns


def test_benchmark_report_is_what_the_guard_reads(tmp_path):
    report = tmp_path / "report.json"
    done = run_python(
        *(*PYTEST_BENCH, "-k", "tiny"),
        *(f"--benchmark-json={report}", "--benchmark-max-time=0", "--benchmark-min-rounds=1"),
    )
    assert done.returncode == 0, done.stdout
    run = guard.read_run(report)
    assert list(run.ratios) == ["tiny"]
    assert run.machine["isa"] == _core.isa()
    timings = json.loads(report.read_text())["benchmarks"]
    turns = [timing["extra_info"]["contender"] for timing in timings]
    assert turns == ["mha_fast", "numpy"] * 3
    assert all(timing["extra_info"]["GFLOP/s"] > 0 for timing in timings)


@pytest.fixture
def checkout(tmp_path):
    """A repository with bench/ and a bare mha_fast/, and a folder where mha_fast is installed."""
    for folder in ("repository/bench", "repository/mha_fast", "site/mha_fast"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "__init__.py").touch()
    shutil.copy(ROOT / "bench" / "__init__.py", tmp_path / "repository" / "bench")
    return tmp_path


def imported_from(checkout, path, prepare=""):
    """Where `import mha_fast` leads after `import bench` in the repository."""
    script = f"{prepare}\nimport bench, mha_fast; print(mha_fast.__file__)"
    # -S: without the site-packages in which the real mha_fast is installed.
    done = run_python("-S", "-c", script, cwd=checkout / "repository", PYTHONPATH=path)
    assert done.stderr == ""
    return Path(done.stdout.strip()).parent.resolve()


def test_bench_finds_the_installed_package_beside_the_source_folder(checkout):
    assert imported_from(checkout, str(checkout / "site")) == checkout / "site" / "mha_fast"


def test_bench_leaves_the_source_folder_when_nothing_is_installed(checkout):
    assert imported_from(checkout, "") == checkout / "repository" / "mha_fast"


def test_bench_leaves_a_source_folder_with_a_compiled_core(checkout):
    suffix = importlib.machinery.EXTENSION_SUFFIXES[0]
    (checkout / "repository" / "mha_fast" / f"_core{suffix}").touch()
    site = str(checkout / "site")
    assert imported_from(checkout, site) == checkout / "repository" / "mha_fast"


def test_bench_leaves_an_editable_install_alone(checkout):
    hook = """
import sys
from importlib.machinery import PathFinder
class Editable:
    def find_spec(name, path=None, target=None):
        if name == "mha_fast":
            return PathFinder.find_spec(name, ["../editable"])
sys.meta_path.insert(0, Editable)
"""
    shutil.copytree(checkout / "site", checkout / "editable")
    found = imported_from(checkout, str(checkout / "site"), hook)
    assert found == checkout / "editable" / "mha_fast"
