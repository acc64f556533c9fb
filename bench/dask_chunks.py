"""Attention in chunks over dask against one call on the same cores, and what a task costs.

python -m bench.dask_chunks --ratio          one call over chunks, alternating
python -m bench.dask_chunks --overhead       seconds per task that are not arithmetic
python -m bench.dask_chunks --workers 2      time and bytes received, beside what the plan says
"""

import argparse
import time
from functools import partial
from statistics import median

import dask
import dask.array as da
import numpy as np

import mha_fast
import mha_fast.dask

from .measure import N_RATIO, Effort, shortest_of_both

_EFFORT = Effort(rounds=2, turn_seconds=0.1)


def operands(length, width=64):
    """Query, key and value of one head."""
    rng = np.random.default_rng(0)
    return tuple(rng.standard_normal((3, 1, length, width), dtype=np.float32))


def ratios(length, chunk):
    """Time of one call over the time in chunks, on as many cores."""
    arrays = operands(length)
    sizes = {"queries": chunk, "keys": chunk}
    out = mha_fast.dask.attention(*arrays, chunks=sizes)
    in_chunks = partial(out.compute, scheduler="threads")
    whole = partial(mha_fast.attention, *arrays)
    pairs = [shortest_of_both(whole, in_chunks, _EFFORT) for _ in range(N_RATIO)]
    return [one / chunks for one, chunks in pairs]


def overhead(scheduler, n_chunk=40):
    """Seconds to make the graph, and to run it with hardly any arithmetic, per task."""
    x = da.zeros((1, n_chunk, 1), chunks=(1, 1, 1), dtype=np.float32).persist(scheduler="threads")
    start = time.perf_counter()
    out = mha_fast.dask.attention(x, x, x)
    graph = dict(out.__dask_graph__())
    made = time.perf_counter()
    out.compute(scheduler=scheduler)
    end = time.perf_counter()
    return (made - start) / len(graph), (end - made) / len(graph), len(graph)


def main(arguments=None):
    """Run the command."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.dask_chunks", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--length", type=int, default=16384)
    parser.add_argument("--chunk", type=int, default=4096)
    parser.add_argument("--ratio", action="store_true")
    parser.add_argument("--overhead", action="store_true")
    options = parser.parse_args(arguments)
    if options.ratio:
        found = ratios(options.length, options.chunk)
        shown = ", ".join(f"{ratio:.2f}" for ratio in found)
        print(f"one call / in chunks of {options.chunk}: {median(found):.2f} (of {shown})")
    if options.overhead:
        for scheduler in ("synchronous", "threads"):
            made, run, n_task = overhead(scheduler)
            print(
                f"{scheduler}: {n_task} tasks, {made * 1e6:.0f} us each to make, "
                f"{run * 1e6:.0f} us to run"
            )


if __name__ == "__main__":
    with dask.config.set(scheduler="threads"):
        main()
