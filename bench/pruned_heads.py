"""What switching heads off saves: the time of a call with some gates at 0, against all heads open.

    python -m bench.pruned_heads --length 2048 --threads 2

The shortest of each in alternating turns, and the median of three such ratios.
"""

import argparse
from functools import partial
from statistics import median

import numpy as np

import mha_fast

from .cases import Case, make_inputs
from .measure import N_RATIO, Effort, shortest_of_both

_EFFORT = Effort(rounds=3, turn_seconds=0.1)


def ratios(n_open: int, length: int, threads: int) -> list[float]:
    """Time with `n_open` of 8 heads open over the time with all of them."""
    inputs = make_inputs(Case("pruned", 1, 8, 8, length, length, 64))
    gates = (np.arange(8) < n_open).astype(np.float32)
    call = partial(mha_fast.attention, inputs.query, inputs.key, inputs.value, num_threads=threads)
    pairs = (
        shortest_of_both(call, partial(call, head_mask=gates), _EFFORT) for _ in range(N_RATIO)
    )
    return [pruned / whole for whole, pruned in pairs]


def main(arguments: list[str] | None = None) -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.pruned_heads", description="Time of a call with heads switched off."
    )
    parser.add_argument("--length", type=int, default=2048, help="queries and keys")
    parser.add_argument("--threads", type=int, default=mha_fast.get_num_threads())
    options = parser.parse_args(arguments)
    print("heads open of 8  time over that of all (range)")
    for n_open in (6, 4, 2, 1):
        found = ratios(n_open, options.length, options.threads)
        print(
            f"{n_open:<15}  {median(found):.2f} ({min(found):.2f} to {max(found):.2f})", flush=True
        )


if __name__ == "__main__":
    main()
