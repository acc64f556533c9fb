"""Random calls for as long as wanted, with an eye on memory, threads and results.

    python tests/soak.py --minutes 60

The fuzzer's calls, judged as it judges them, in this process and now and then from several Python
threads at once, in forked children, and interrupted by signals. Once a minute it prints the resident memory, the
threads and the open files. Exit status 1: a finding, or memory that grew by more than 16 MiB
between the first quarter and the last.
"""

import argparse
import gc
import os
import signal
import sys
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parent.parent
sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != ROOT]

import numpy as np
from _fuzz_cases import draw_case
from _fuzz_checks import Report, check, reduced
from _support import ISAS

import mha_fast

MOST_GROWTH = 16 << 20
PAGE = os.sysconf("SC_PAGESIZE")


class Interrupted(Exception):
    """What the signal's handler raises."""


def main(arguments=None):
    """Run the command; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGALRM, _interrupt)
    print(f"mha_fast {mha_fast.__version__}, seed {options.seed}, {', '.join(ISAS)}", flush=True)
    seconds = 60 * options.minutes
    start = time.monotonic()
    sample_interval = min(60, seconds / 16)
    samples, n_case, report = [], 0, Report()
    while (passed := time.monotonic() - start) < seconds:
        for _ in range(100):
            if not _case_passes(options.seed, n_case, report):
                return 1
            n_case += 1
        _other_ways(n_case)
        if passed >= sample_interval * len(samples):
            gc.collect()
            samples.append(_resident())
            print(
                f"{passed / 60:6.1f} min, {n_case} cases: {samples[-1] / 2**20:.1f} MiB, "
                f"{_count('task')} threads, {_count('fd')} files",
                flush=True,
            )
    quarter = max(len(samples) // 4, 1)
    growth = median(samples[-quarter:]) - median(samples[quarter : 2 * quarter] or samples)
    print(f"{n_case} cases; memory grew by {growth / 2**20:.1f} MiB after the first quarter")
    return int(growth > MOST_GROWTH)


def _case_passes(seed, number, report):
    case = draw_case(seed, number, ISAS)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            check(case, report)
    except Exception as error:  # noqa: BLE001 - any exception is a finding
        print(f"FINDING: seed {seed}, case {number}: {error!r}\n{reduced(case).describe()}")
        return False
    return True


def _other_ways(seed):
    """Threads at once, a forked child, and a call stopped in the middle."""
    x = np.random.default_rng(seed).standard_normal((4, 300, 32), dtype=np.float32)
    right = mha_fast.attention(x, x, x, num_threads=1).tobytes()

    def same(num_threads):
        return mha_fast.attention(x, x, x, num_threads=num_threads).tobytes() == right

    with ThreadPoolExecutor(3) as pool:
        if not all(pool.map(same, (1, 2, 3))):
            raise AssertionError("threads at once: another result")
    if (pid := os.fork()) == 0:
        os._exit(0 if same(2) else 1)
    if os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) != 0:
        raise AssertionError("a forked child: another result")
    long = np.ones((1, 20_000, 64), np.float32)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.02)
        mha_fast.attention(long, long, long)
    except Interrupted:
        pass
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    if not same(2):
        raise AssertionError("after an interrupted call: another result")


def _interrupt(*_):
    raise Interrupted


def _resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE


def _count(what):
    return len(os.listdir(f"/proc/self/{what}"))


if __name__ == "__main__":
    sys.exit(main())
