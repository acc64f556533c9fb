"""``mha-fast`` and ``python -m mha_fast``: what they print, and how they end."""

import os
import re
import subprocess
import sys
import sysconfig
from pathlib import Path

import numpy as np
import pytest

import mha_fast
from mha_fast.show import demo as worked

MODULE = [sys.executable, "-m", "mha_fast"]
SCRIPT = [str(Path(sysconfig.get_path("scripts")) / "mha-fast")]

# By hand: softmax of [2, 2, 0.5] for the one head; of [4, 2, 0] and [0, 2, 1] over the root of 2
# for the two.
WORKED_EXAMPLE = {
    1: ([[0.450, 0.450, 0.100]], [0.450, 0.450, 0.100, 0]),
    2: ([[0.768, 0.187, 0.045], [0.140, 0.576, 0.284]], [0.768, 0.187, 0.284, 0]),
}
WORKED_LINES = (
    "0.450 0.450 0.100 [0.450, 0.450, 0.100, 0.000]",
    "0.768 0.187 0.045 [0.768, 0.187]",
    "0.140 0.576 0.284 [0.284, 0.000]",
    "joined [0.768, 0.187, 0.284, 0.000]",
)


@pytest.fixture
def run(tmp_path):
    """Run a command where the source tree cannot be in the way."""

    def run_outside_the_repository(*command):
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)

    return run_outside_the_repository


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("n_head", WORKED_EXAMPLE)
def test_worked_example_gives_the_numbers_found_by_hand(n_head, dtype):
    weights, output = worked.attend_with_heads(n_head, dtype)
    expected_weights, expected_output = WORKED_EXAMPLE[n_head]

    assert weights.dtype == output.dtype == dtype
    np.testing.assert_allclose(weights, expected_weights, rtol=0, atol=5e-4)
    np.testing.assert_allclose(output.reshape(-1), expected_output, rtol=0, atol=5e-4)
    np.testing.assert_allclose(weights.sum(axis=-1), 1, rtol=4 * np.finfo(dtype).eps)


@pytest.mark.parametrize("command", [MODULE, SCRIPT], ids=["module", "script"])
def test_demo_prints_the_worked_example_in_both_dtypes(run, command):
    demo = run(*command, "demo", "--size", "100")

    assert (demo.returncode, demo.stderr) == (0, "")
    text = " ".join(demo.stdout.split())
    _, in_float32, in_float64 = re.split("float(?:32|64) Kohli his century output", text)
    for part in (in_float32, in_float64):
        assert all(line in part for line in WORKED_LINES)


def test_demo_measures_time_and_error_of_both(run):
    demo = run(*MODULE, "demo", "--size", "300")

    assert "8 heads, 300 queries and keys" in demo.stdout
    for label in ("every key", "causal"):
        line = next(line for line in demo.stdout.splitlines() if line.startswith(label))
        numbers = re.findall(r"\d+\.\d+(?:e-\d+)?", line)
        numpy_time, time, numpy_error, error, speed_up = map(float, numbers)
        assert numpy_time > 0 and time > 0 and speed_up > 0
        # float32 against float64: never equal, and never further off than a few roundings.
        assert 1e-9 < error < 2e-6 and 1e-9 < numpy_error < 2e-6


@pytest.mark.parametrize("is_causal", [False, True])
def test_demo_error_column_shows_a_wrong_result(monkeypatch, is_causal):
    # Five-line NumPy stands in for the kernel, with one head spoilt by a thousandth.
    def spoilt(query, key, value, is_causal):
        result = mha_fast.reference.naive_attention(query, key, value, is_causal=is_causal)
        result[:, 3] += np.float32(1e-3)
        return result

    monkeypatch.setattr(worked, "attention", spoilt)
    arrays = np.random.default_rng(0).standard_normal((3, 1, 8, 40, 16), dtype=np.float32)

    _, (numpy_error, error) = worked.measure(*arrays, is_causal)

    assert numpy_error < 2e-6
    assert error == pytest.approx(1e-3, rel=1e-2)


@pytest.mark.parametrize("size", ["1", "2"])
def test_demo_runs_at_the_smallest_sizes(run, size):
    demo = run(*MODULE, "demo", "--size", size)

    assert (demo.returncode, demo.stderr) == (0, "")


@pytest.mark.parametrize("command", [MODULE, SCRIPT], ids=["module", "script"])
def test_info_prints_what_show_config_prints(run, command, capsys):
    info = run(*command, "info")
    mha_fast.show_config()

    assert (info.returncode, info.stderr) == (0, "")
    assert info.stdout.splitlines()[0] == capsys.readouterr().out.splitlines()[0]
    assert mha_fast.__version__ in info.stdout
    for word in ("instruction set", "threads", "openmp"):
        assert word in info.stdout.lower()


def test_version_option_prints_the_version(run):
    version = run(*MODULE, "--version")

    assert (version.returncode, version.stdout) == (0, f"mha_fast {mha_fast.__version__}\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "required: command"),
        (["dance"], "invalid choice: 'dance'"),
        (["info", "more"], "unrecognized arguments: more"),
        (["demo", "--size"], "--size: expected one argument"),
        (["demo", "--size", "0"], "from 1 to 8192, got '0'"),
        (["demo", "--size", "8193"], "from 1 to 8192, got '8193'"),
        (["demo", "--size", "big"], "from 1 to 8192, got 'big'"),
    ],
)
def test_usage_error_ends_with_code_2_and_says_why(run, arguments, message):
    mistake = run(*MODULE, *arguments)

    assert (mistake.returncode, mistake.stdout) == (2, "")
    assert mistake.stderr.startswith("usage: mha-fast")
    assert message in mistake.stderr
    assert "Traceback" not in mistake.stderr


@pytest.mark.skipif(os.name == "nt", reason="Windows reports a closed pipe as another error")
@pytest.mark.parametrize("arguments", [["info"], ["demo", "--size", "8"], ["--help"]])
def test_reader_that_went_away_is_no_error(tmp_path, arguments):
    read_end, write_end = os.pipe()
    os.close(read_end)
    command = subprocess.Popen(
        [*MODULE, *arguments], cwd=tmp_path, stdout=write_end, stderr=subprocess.PIPE, text=True
    )
    os.close(write_end)
    _, complaint = command.communicate()

    assert (command.returncode, complaint) == (0, "")
