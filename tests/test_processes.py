"""Processes that fork, that may have few threads, few CPUs or a quota, and that others share."""

import os
import re
import subprocess
import sys

import numpy as np
import pytest
from _support import run_python

import mha_fast
from mha_fast import _core, _cpus

NEEDS_LINUX = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="Linux only")
NEEDS_TEAM = pytest.mark.skipif(
    not _core.has_openmp() or len(os.sched_getaffinity(0)) < 2,
    reason="needs OpenMP and two CPUs",
)

# A call that a team takes, and its answer on one thread.
CALL = '''
import os, sys
import numpy as np
import mha_fast
from mha_fast import _core
x = np.random.default_rng(0).standard_normal((4, 500, 64), dtype=np.float32)
one = mha_fast.attention(x, x, x, num_threads=1).tobytes()
def n_task():
    return len(os.listdir("/proc/self/task"))
def settled(most):
    """How many threads there are, once those have ended that no team needs."""
    import time
    for _ in range(500):
        if n_task() <= most:
            break
        time.sleep(0.01)
    return n_task()
def right(num_threads):
    return mha_fast.attention(x, x, x, num_threads=num_threads).tobytes() == one
'''


def run_checked(code, folder, **environment):
    """Run it; a process that was killed or that raised shows what it had to say."""
    process = run_python(code, folder, **environment)
    assert process.returncode == 0, (process.returncode, process.stderr)
    return process.stdout


# ---- fork, spawn, forkserver --------------------------------------------------------------------

IN_A_CHILD = """
pid = os.fork()
if pid == 0:
    numbers = mha_fast.get_num_threads(), _core.is_forked()
    before = n_task()
    ok = right(2) and right(None)
    mha_fast.set_num_threads(4)
    ok = ok and numbers == (1, True) and mha_fast.get_num_threads() == 1 and n_task() == before
    os._exit(0 if ok else 3)
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), mha_fast.get_num_threads(), right(2))
"""


@NEEDS_LINUX
@NEEDS_TEAM
@pytest.mark.parametrize("used", ["used", "unused"])
def test_child_of_a_fork_works_on_one_thread_and_says_so(used, tmp_path):
    first_use = "right(2)\n" if used == "used" else ""
    printed = run_checked(
        CALL + "mha_fast.set_num_threads(2)\n" + first_use + IN_A_CHILD,
        tmp_path,
        PYTHONWARNINGS="ignore::DeprecationWarning",
    )
    assert printed == "0 2 True\n"


FOREIGN_TEAM = """
import ctypes
path = next(path for path in mha_fast._cpus.openmp_runtimes())
runtime = ctypes.CDLL(path)
work = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: None)
# What a compiler makes of another library's parallel region, on the runtime that we share.
runtime.GOMP_parallel(work, None, 2, 0)
"""


@NEEDS_LINUX
@NEEDS_TEAM
def test_child_of_a_fork_after_the_team_of_another_library(tmp_path):
    """The runtime waits for ever in a child; whose team it was, only the runtime knows."""
    if not any("libgomp" in path for path in _cpus.openmp_runtimes()):
        pytest.skip("the build does not use GCC's runtime")
    code = CALL.replace("one = mha_fast.attention(x, x, x, num_threads=1).tobytes()", FOREIGN_TEAM)
    child = """
pid = os.fork()
if pid == 0:
    import signal
    signal.alarm(60)  # a guard against hanging, not a limit of time
    mha_fast.attention(x, x, x, num_threads=2)
    os._exit(0)
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""
    printed = run_checked(code + child, tmp_path, PYTHONWARNINGS="ignore::DeprecationWarning")
    assert printed == "0\n"


MULTIPROCESSING = """
import multiprocessing, sys
import numpy as np
import mha_fast

def in_worker(seed):
    x = np.random.default_rng(seed).standard_normal((4, 500, 64), dtype=np.float32)
    return mha_fast.get_num_threads(), mha_fast.attention(x, x, x, num_threads=2).tobytes()

if __name__ == "__main__":
    in_worker(0)  # the parent has a team
    context = multiprocessing.get_context(sys.argv[1])
    if sys.argv[1] == "forkserver":
        context.set_forkserver_preload(["numpy"])
    with context.Pool(2) as pool:
        results = pool.map(in_worker, range(4))
    same = [result[1] == in_worker(seed)[1] for seed, result in enumerate(results)]
    print(*same, *sorted({n for n, _ in results}))
"""


@NEEDS_LINUX
@NEEDS_TEAM
@pytest.mark.parametrize(("method", "n_thread"), [("fork", 1), ("spawn", 3), ("forkserver", 3)])
def test_pool_of_processes(method, n_thread, tmp_path):
    program = tmp_path / "program.py"
    program.write_text(MULTIPROCESSING)
    process = subprocess.run(
        [sys.executable, "-W", "ignore::DeprecationWarning", program, method],
        env=os.environ | {"OMP_NUM_THREADS": "3"},
        capture_output=True, text=True, check=False, cwd=tmp_path,
    )  # fmt: skip
    assert process.stdout == f"True True True True {n_thread}\n", process.stderr


# ---- threads that cannot be made ----------------------------------------------------------------

FEW_THREADS = """
import resource
def limit_memory(more):
    size = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + more, size + more))
"""


@NEEDS_LINUX
@NEEDS_TEAM
@pytest.mark.parametrize("mib", [6, 12, 30])
def test_no_memory_for_threads(mib, tmp_path):
    """Each thread takes 8 MiB of addresses (the stack); the runtime would end the process."""
    code = CALL + FEW_THREADS + f"limit_memory({mib} << 20)\n"
    code += "print(right(16), right(16), n_task() - 1 <= 15)"
    assert run_checked(code, tmp_path, OPENBLAS_NUM_THREADS="1") == "True True True\n"


@NEEDS_LINUX
@NEEDS_TEAM
def test_threads_of_an_unusual_stack(tmp_path):
    """One thread of 64 MiB fits, two do not."""
    code = CALL + FEW_THREADS + "limit_memory(100 << 20)\nprint(right(3), right(3), n_task())"
    printed = run_checked(code, tmp_path, OPENBLAS_NUM_THREADS="1", OMP_STACKSIZE="64M")
    assert printed == "True True 2\n"


@NEEDS_LINUX
@NEEDS_TEAM
@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="needs root")
def test_no_more_processes_for_the_user(tmp_path):
    """RLIMIT_NPROC counts threads, but not those of root."""
    code = CALL + FEW_THREADS + "resource.setrlimit(resource.RLIMIT_NPROC, (1, 1))\n"
    code += "os.setuid(54321)\nprint(right(3), right(3), n_task())"
    assert run_checked(code, tmp_path, OPENBLAS_NUM_THREADS="1") == "True True 1\n"


@NEEDS_LINUX
@NEEDS_TEAM
def test_numbers_of_threads_in_turn_leave_no_thread_behind(tmp_path):
    code = (
        CALL
        + """
for n in (2, 5, 3, 1, 7, 2) * 20:
    assert right(n)
import resource
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for n in (2, 5, 3, 1, 7, 2) * 200:
    assert right(n)
grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak
print(settled(7) <= 7, grown < 2048)  # KiB
"""
    )
    assert run_checked(code, tmp_path, OPENBLAS_NUM_THREADS="1") == "True True\n"


# ---- how many by default ------------------------------------------------------------------------

NUMBER = "import mha_fast; print(mha_fast.get_num_threads())"


@NEEDS_LINUX
@NEEDS_TEAM
def test_default_follows_the_environment_and_the_affinity(tmp_path):
    n_cpu = len(os.sched_getaffinity(0))
    assert int(run_checked(NUMBER, tmp_path, OMP_NUM_THREADS="")) <= n_cpu
    assert run_checked(NUMBER, tmp_path, OMP_NUM_THREADS="5") == "5\n"
    one = min(os.sched_getaffinity(0))
    for code in (
        f"import os; os.sched_setaffinity(0, {{{one}}}); {NUMBER}",
        f"import os, mha_fast; os.sched_setaffinity(0, {{{one}}}); {NUMBER}",
    ):
        assert run_checked(code, tmp_path, OMP_NUM_THREADS="") == "1\n"


@NEEDS_LINUX
@NEEDS_TEAM
def test_default_takes_no_more_threads_than_it_says(tmp_path):
    code = CALL + "right(None), right(None)\nprint(n_task(), mha_fast.get_num_threads())"
    printed = run_checked(code, tmp_path, OPENBLAS_NUM_THREADS="1", OMP_NUM_THREADS="3")
    assert printed == "3 3\n"


@pytest.mark.parametrize(
    ("lines", "files", "expected"),
    [
        ("0::/a/b\n", {"a/b/cpu.max": "150000 100000", "a/cpu.max": "max 100000"}, 2),
        ("0::/a/b\n", {"a/b/cpu.max": "max 100000", "a/cpu.max": "50000 100000"}, 1),
        ("0::/gone\n", {"cpu.max": "300000 100000"}, 3),
        ("0::/\n", {}, None),
        ("0::/\n", {"cpu.max": "max 100000"}, None),
        ("1:name=systemd:/\n0::/a\n", {"unified/a/cpu.max": "200000 100000"}, 2),
        (
            "3:cpuset:/\n2:cpu,cpuacct:/a\n",
            {"cpu/a/cpu.cfs_quota_us": "250000", "cpu/a/cpu.cfs_period_us": "100000"},
            3,
        ),
        (
            "2:cpu:/a\n",
            {"cpu/a/cpu.cfs_quota_us": "-1", "cpu/a/cpu.cfs_period_us": "100000"},
            None,
        ),
        ("2:cpuset:/a\n", {"cpuset/a/cpu.cfs_quota_us": "1"}, None),
        ("", {}, None),
    ],
)
def test_quota_of_control_groups(lines, files, expected, tmp_path):
    proc = tmp_path / "proc"
    proc.write_text(lines)
    for name, text in files.items():
        file = tmp_path / "cgroup" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text + "\n")
    assert _cpus.cpu_quota(str(proc), str(tmp_path / "cgroup")) == expected


@NEEDS_LINUX
@NEEDS_TEAM
def test_quota_bounds_the_default_and_nothing_else(tmp_path):
    code = """
import os, mha_fast
from mha_fast import _core
_core.limit_default_threads(1)
print(mha_fast.get_num_threads())
mha_fast.set_num_threads(2)
print(mha_fast.get_num_threads())
"""
    assert run_checked(code, tmp_path, OMP_NUM_THREADS="") == "1\n2\n"
    assert run_checked(code, tmp_path, OMP_NUM_THREADS="3") == "3\n2\n"


CGROUP = "/sys/fs/cgroup/cpu"


@NEEDS_LINUX
@NEEDS_TEAM
def test_real_control_group_with_a_quota(tmp_path):
    """Makes one, where this is allowed, and starts a process in it."""
    folder = f"{CGROUP}/mha_fast_test_{os.getpid()}"
    try:
        os.mkdir(folder)
        with open(f"{folder}/cpu.cfs_quota_us", "w") as file:
            file.write("100000")
    except OSError as error:
        pytest.skip(f"no control group can be made here: {error}")
    try:
        code = f"""
with open("{folder}/cgroup.procs", "w") as file:
    file.write("0")
import mha_fast
print(mha_fast.get_num_threads())
"""
        assert run_checked(code, tmp_path, OMP_NUM_THREADS="") == "1\n"
    finally:
        os.rmdir(folder)


def test_threadpoolctl_sees_and_limits_us():
    threadpoolctl = pytest.importorskip("threadpoolctl")
    if not _core.has_openmp():
        pytest.skip("built without OpenMP")
    loaded = set(_cpus.openmp_runtimes())
    seen = {
        pool["filepath"] for pool in threadpoolctl.threadpool_info() if pool["user_api"] == "openmp"
    }
    assert loaded <= seen
    before = mha_fast.get_num_threads()
    with threadpoolctl.threadpool_limits(1, user_api="openmp"):
        assert mha_fast.get_num_threads() == 1
    assert mha_fast.get_num_threads() == before


BOUND = """
import os
import sklearn.cluster
bound = os.sched_getaffinity(0)
import numpy as np, mha_fast
print(mha_fast.get_num_threads(), os.sched_getaffinity(0) == bound)
x = np.ones((8, 1000, 64), np.float32)
mha_fast.attention(x, x, x)
cpus = set()
for task in os.listdir("/proc/self/task"):
    cpus |= os.sched_getaffinity(int(task))
print(len(bound), len(cpus))
"""


@NEEDS_LINUX
@NEEDS_TEAM
def test_bound_threads_of_another_runtime_leave_us_the_cpus(tmp_path):
    pytest.importorskip("sklearn")
    everything = sorted(os.sched_getaffinity(0))
    environment = {"OMP_PROC_BIND": "TRUE", "OMP_NUM_THREADS": "", "OPENBLAS_NUM_THREADS": "1"}
    printed = run_checked(BOUND, tmp_path, **environment)
    n, bound, n_bound, n_cpu = re.fullmatch(r"(\d+) (\w+)\n(\d+) (\d+)\n", printed).groups()
    assert (int(n), bound) == (len(everything), "True")
    assert int(n_bound) == 1 < int(n_cpu)
    # What the process was given from outside still holds.
    narrow = f"import os; os.sched_setaffinity(0, {{{everything[0]}}})\n" + BOUND
    assert run_checked(narrow, tmp_path, **environment) == "1 True\n1 1\n"


# ---- many Python threads ------------------------------------------------------------------------

MANY = """
from concurrent.futures import ThreadPoolExecutor
mha_fast.set_num_threads(2)
with ThreadPoolExecutor(4) as pool:
    assert all(pool.map(lambda _: right(None), range(40)))
    print(n_task())
"""


@NEEDS_LINUX
@NEEDS_TEAM
def test_threads_of_many_callers_stay_at_their_limit(tmp_path):
    """The main thread's team, and four callers with one more thread each."""
    printed = run_checked(CALL + MANY, tmp_path, OPENBLAS_NUM_THREADS="1")
    assert int(printed) <= 1 + 4 * 2
    assert (
        int(run_checked(CALL + MANY.replace("s(2)", "s(1)"), tmp_path, OPENBLAS_NUM_THREADS="1"))
        == 5
    )


def test_results_are_not_shared_between_callers():
    """Two calls that run at once take different workspaces."""
    from concurrent.futures import ThreadPoolExecutor

    x = np.random.default_rng(0).standard_normal((8, 2, 200, 16), dtype=np.float32)
    right = [mha_fast.attention(y, y, y, num_threads=1).tobytes() for y in x]
    with ThreadPoolExecutor(8) as pool:
        for _ in range(20):
            got = pool.map(lambda y: mha_fast.attention(y, y, y, num_threads=2).tobytes(), x)
            assert list(got) == right
