"""examples/long_sequence_dask.py, run in small."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("distributed")

EXAMPLE = Path(__file__).parents[1] / "examples" / "long_sequence_dask.py"


def test_keys_and_values_beyond_the_memory_limit(tmp_path):
    sizes = ("--heads", "96", "--tokens", "8192", "--memory-limit", "350 MiB")
    run = subprocess.run(
        [sys.executable, str(EXAMPLE), *sizes, "--folder", str(tmp_path)],
        cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    assert "keys and values: 384.00 MiB on disk" in run.stdout
    assert "100% Completed" in run.stdout
    assert "keys and values do not fit a worker, and no worker went beyond its limit" in run.stdout
    assert float(re.search(r"largest error of 5 rows: (\S+)", run.stdout)[1]) < 1e-6


def test_files_are_read_and_written_in_place(tmp_path):
    spec = importlib.util.spec_from_file_location("long_sequence_dask", EXAMPLE)
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    files = example.write_inputs(tmp_path, 2, 10)
    assert files["key"].shape == (2, 10, example.WIDTH)
    files["out"][1, 2:4] = files["key"][0, :2]
    assert (files["out"][1, 2:4] == files["key"][0, :2]).all()
    assert not files["out"][0].any()
