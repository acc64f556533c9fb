"""When small calls go alone because the machine is busy: src/threads.c by itself."""

import ctypes
import os
import shutil
import subprocess
from pathlib import Path

import pytest
from _support import run_python

SOURCE = Path(__file__).resolve().parent.parent / "src"
COMPILER = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")

IN_TIME, LATE = 100_000, 300_000  # nanoseconds
SHORT, LONG = 1e-3, 5e-3  # seconds on one thread


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    """The compiled file; each test works in a process, or in a thread of its own."""
    if COMPILER is None or not (SOURCE / "threads.c").exists() or os.name == "nt":
        pytest.skip("needs the sources and a C compiler")
    path = tmp_path_factory.mktemp("native") / "threads.so"
    command = [COMPILER, "-shared", "-fPIC", "-O1", "-fopenmp", SOURCE / "threads.c", "-o", path]
    built = subprocess.run(command, capture_output=True, text=True, check=False)
    if built.returncode:
        pytest.skip(f"{COMPILER} has no OpenMP: {built.stderr}")
    return path


@pytest.fixture
def policy(library):
    """Fresh state: a team's history belongs to the calling thread, so the tests take turns."""
    loaded = ctypes.CDLL(str(library))
    loaded.mha_threads_for.argtypes = (ctypes.c_int, ctypes.c_double)
    loaded.mha_team_met.argtypes = (ctypes.c_int, ctypes.c_int64)
    while loaded.mha_threads_for(2, SHORT) == 1:
        pass
    loaded.mha_team_met(2, IN_TIME)
    return loaded


def n_alone(policy):
    """How many short calls go alone from now on."""
    count = 0
    while policy.mha_threads_for(2, SHORT) == 1:
        count += 1
    return count


def test_teams_in_time_are_called_again(policy):
    for _ in range(100):
        assert policy.mha_threads_for(2, SHORT) == 2
        policy.mha_team_met(2, IN_TIME)


def test_late_teams_are_called_ever_less_often(policy):
    counts = []
    for _ in range(10):
        policy.mha_team_met(2, LATE)
        counts.append(n_alone(policy))
    assert counts == [8, 16, 32, 64, 128, 256, 512, 1024, 1024, 1024]
    policy.mha_team_met(2, IN_TIME)
    assert n_alone(policy) == 0
    policy.mha_team_met(2, LATE)
    assert n_alone(policy) == 8


def test_long_calls_take_a_team_all_the_same(policy):
    policy.mha_team_met(2, LATE)
    assert policy.mha_threads_for(2, LONG) == 2
    assert n_alone(policy) == 8
    policy.mha_team_met(2, LATE)
    policy.mha_team_met(2, IN_TIME)  # a long call found the machine idle
    assert policy.mha_threads_for(2, SHORT) == 2


def test_one_thread_where_one_is_wanted(policy):
    assert policy.mha_threads_for(1, LONG) == 1
    assert policy.mha_threads_for(10**9, LONG) == max(64, 4 * len(os.sched_getaffinity(0)))


HELD_BY_THE_CALLER = """
import ctypes
from concurrent.futures import ThreadPoolExecutor
policy = ctypes.CDLL({path!r})
policy.mha_threads_for.argtypes = (ctypes.c_int, ctypes.c_double)
policy.mha_team_met(2, 300_000)
with ThreadPoolExecutor(1) as pool:
    print(policy.mha_threads_for(2, 1e-3), pool.submit(policy.mha_threads_for, 2, 1e-3).result())
"""


def test_each_caller_has_its_own_history(library, tmp_path):
    process = run_python(HELD_BY_THE_CALLER.format(path=str(library)), tmp_path)
    assert process.stdout == "1 2\n", process.stderr
