"""What head_statistics() costs beside attention() of the same shape, in time and in memory.

    python -m bench.head_statistics --length 4096 --threads 2

Time: the shortest of each in alternating turns, and the median of three such ratios. Memory: the
rise during one call on one head, in a process of its own as in ``bench/memory.py``; the size of
the matrix of weights, which is never made, is printed beside it.
"""

import argparse
import subprocess
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median

import numpy as np

import mha_fast

from .cases import Case, Inputs, make_inputs
from .machine import describe
from .measure import N_RATIO, Effort, shortest_of_both
from .memory import MIB, resident_now, resident_peak

_ROOT = Path(__file__).resolve().parent.parent

# A single call of the default length takes long enough; a turn is two of them at least.
_EFFORT = Effort(rounds=3, turn_seconds=0.1)
_CALLS = [(is_causal, received) for is_causal in (False, True) for received in (False, True)]


@dataclass(frozen=True)
class Cost:
    """Shortest times of both, and what the statistics take for each second of attention."""

    attention_seconds: float
    statistics_seconds: float
    ratios: tuple[float, ...]


def cost(inputs: Inputs, is_causal: bool, received: bool, threads: int, effort: Effort) -> Cost:
    """Let the two take turns on the same query and key."""
    options = {"is_causal": is_causal, "num_threads": threads}
    attend = partial(mha_fast.attention, inputs.query, inputs.key, inputs.value, **options)
    measure = partial(
        mha_fast.head_statistics, inputs.query, inputs.key, received=received, **options
    )
    pairs = [shortest_of_both(attend, measure, effort) for _ in range(N_RATIO)]
    attention_seconds, statistics_seconds = (min(times) for times in zip(*pairs, strict=True))
    return Cost(attention_seconds, statistics_seconds, tuple(ours / base for base, ours in pairs))


def extra_bytes(length: int, is_causal: bool, received: bool, threads: int) -> int:
    """Make one call on one head; return how far memory rose above query and key.

    The record that it returns counts, unlike the output in ``bench.memory``.
    """
    rng = np.random.default_rng(0)
    query, key = (rng.standard_normal((length, 64), dtype=np.float32) for _ in range(2))
    before = resident_now()
    mha_fast.head_statistics(
        query, key, is_causal=is_causal, received=received, num_threads=threads
    )
    return resident_peak() - before


def _extra_bytes_of_new_process(*arguments):
    code = f"from bench.head_statistics import extra_bytes; print(extra_bytes(*{arguments}))"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=_ROOT, stdout=subprocess.PIPE, text=True, check=True)
    return int(done.stdout)


def _print_times(length, threads):
    case = Case("statistics", 1, 8, 8, length, length, 64)
    inputs = make_inputs(case)
    print(f"({case.shape}) {case.dtype}, {threads} thread(s)")
    print("causal  received  attention ms  head_statistics ms  ratio (range)")
    for is_causal, received in _CALLS:
        measured = cost(inputs, is_causal, received, threads, _EFFORT)
        low, high = min(measured.ratios), max(measured.ratios)
        print(
            f"{'yes' if is_causal else 'no':6}  {'yes' if received else 'no':8}  "
            f"{measured.attention_seconds * 1e3:<12.4g}  "
            f"{measured.statistics_seconds * 1e3:<18.4g}  "
            f"{median(measured.ratios):.2f} ({low:.2f} to {high:.2f})",
            flush=True,
        )


def _print_memory(length, threads):
    matrix = length * length * np.dtype(np.float32).itemsize
    print(f"one head of {length} queries and keys; the weights would be {matrix / MIB:.0f} MiB")
    print("causal  received  MiB above query and key")
    for is_causal, received in _CALLS:
        extra = _extra_bytes_of_new_process(length, is_causal, received, threads)
        print(
            f"{'yes' if is_causal else 'no':6}  {'yes' if received else 'no':8}  {extra / MIB:.1f}",
            flush=True,
        )


def _parse(arguments):
    parser = argparse.ArgumentParser(
        prog="python -m bench.head_statistics",
        description="Time and memory of head_statistics() beside attention().",
    )
    parser.add_argument("--length", type=int, default=4096, help="queries and keys to time")
    parser.add_argument(
        "--memory-length", type=int, default=65536, help="queries and keys to weigh; 0: do not"
    )
    parser.add_argument("--threads", type=int, default=mha_fast.get_num_threads())
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    """Run the command."""
    options = _parse(arguments)
    about = describe()
    print(f"mha_fast {about['mha_fast']} ({about['isa']}); {about['cpu']}, {about['n_cpu']} CPUs")
    print()
    _print_times(options.length, options.threads)
    if options.memory_length:
        print()
        _print_memory(options.memory_length, options.threads)


if __name__ == "__main__":
    main()
