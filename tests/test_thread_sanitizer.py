"""What calls share, under ThreadSanitizer: the kept workspace, the choice of tables, the flags.

The parallel loop itself is not run under it: GCC's OpenMP runtime is not instrumented, so that
every one of its barriers would be taken for missing. Tasks write to rows of their own, which
`test_attention_threads.py` checks by their bits.
"""

import platform
import shutil
import subprocess
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parent.parent / "src"
HERE = Path(__file__).resolve().parent


def _built(folder, *flags):
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None or platform.system() != "Linux" or not (SOURCE / "memory.c").exists():
        pytest.skip("needs the sources and GCC on Linux")
    program = folder / "shared_state"
    command = [
        compiler, "-std=gnu11", "-O1", "-g", "-fopenmp", "-fsanitize=thread", *flags,
        f"-I{SOURCE}", HERE / "_shared_state.c", SOURCE / "memory.c", SOURCE / "threads.c",
        "-o", program,
    ]  # fmt: skip
    built = subprocess.run(command, capture_output=True, text=True, check=False)
    if built.returncode:
        pytest.skip(f"no ThreadSanitizer here: {built.stderr.splitlines()[0]}")
    return program


def _run(program):
    # Newer kernels place memory more randomly than older sanitizers can bear.
    without = ["setarch", "-R"] if shutil.which("setarch") else []
    return subprocess.run([*without, program], capture_output=True, text=True, check=False)


def test_shared_state_has_no_data_races(tmp_path):
    process = _run(_built(tmp_path))
    if "FATAL: ThreadSanitizer" in process.stderr:
        pytest.skip(f"ThreadSanitizer cannot run here: {process.stderr.splitlines()[0]}")
    assert (process.returncode, process.stdout) == (0, "ok\n"), process.stderr


def test_sanitizer_sees_a_race_where_there_is_one(tmp_path):
    """Guards the test above: the same program with atomics that are none."""
    plain = "-D__atomic_exchange_n(p,v,o)=({void*x_=*(p);*(p)=(v);x_;})"
    process = _run(_built(tmp_path, plain))
    if "FATAL: ThreadSanitizer" in process.stderr:
        pytest.skip("ThreadSanitizer cannot run here")
    assert process.returncode != 0
    assert "data race" in process.stderr or "ThreadSanitizer" in process.stderr
