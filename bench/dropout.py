"""What dropout costs: the time of a call with it over that of the same call without.

    python -m bench.dropout --length 2048 --threads 2

The shortest of each in alternating turns, and the median of three such ratios. A call with dropout
runs on the vector units; on a CPU with a matrix unit hold it against MHA_FAST_ISA=avx512.
"""

import argparse
from functools import partial
from statistics import median

import mha_fast

from .backward import call_ours, make_problem
from .cases import Case
from .measure import N_RATIO, Effort, shortest_of_both

_EFFORT = Effort(rounds=3, turn_seconds=0.1)
_DROPOUT = {"dropout_p": 0.1, "dropout_seed": 0}


def ratios(call: partial) -> list[float]:
    """Times with dropout over times without."""
    pairs = (shortest_of_both(call, partial(call, **_DROPOUT), _EFFORT) for _ in range(N_RATIO))
    return [dropped / plain for plain, dropped in pairs]


def main(arguments: list[str] | None = None) -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.dropout", description="Time of a call with dropout."
    )
    parser.add_argument("--length", type=int, default=2048, help="queries and keys")
    parser.add_argument("--threads", type=int, default=mha_fast.get_num_threads())
    options = parser.parse_args(arguments)
    case = Case("dropout", 1, 8, 8, options.length, options.length, 64)
    problem = make_problem(case, "float32", options.threads)
    forward = partial(
        mha_fast.attention, problem.query, problem.key, problem.value, num_threads=options.threads
    )
    print(f"({case.shape}) float32, {options.threads} thread(s): time over that without dropout")
    for name, call in (("forward", forward), ("backward", call_ours(problem, options.threads))):
        found = ratios(call)
        print(f"{name:<8}  {median(found):.2f} ({min(found):.2f} to {max(found):.2f})", flush=True)


if __name__ == "__main__":
    main()
