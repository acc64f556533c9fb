"""Time and bytes of attention on worker processes of this machine, beside what the plan says.

    python bench/dask_workers.py

A script and not a module of the package: worker processes import the file they were started from.
"""

import argparse
import time

import dask.array as da
import numpy as np
from dask_plan import Plan, dask, ring, tree
from distributed import Client, LocalCluster, wait

import mha_fast.dask
from mha_fast.cost import chunk_cost

WIDTH, N_RUN = 64, 3


def measure(n_worker, length, chunk):
    """Return the shortest seconds of some runs, and bytes and bandwidth of what workers received.

    One core each. The operands lie in the memory of the workers; the result stays there.
    """
    rng = np.random.default_rng(0)
    arrays = [
        da.from_array(x, chunks=(1, chunk, -1))
        for x in rng.standard_normal((3, 1, length, WIDTH), dtype=np.float32)
    ]
    cluster = LocalCluster(n_workers=n_worker, threads_per_worker=1, dashboard_address=None)
    with cluster, Client(cluster) as client:
        arrays = client.persist(arrays)
        wait(arrays)
        runs = []
        for scale in range(
            1, N_RUN + 1
        ):  # another scale is another call: nothing is found in a cache
            out = mha_fast.dask.attention(*arrays, scale=scale / 8, num_threads=1)
            seen = sum(len(log) for log in _logs(client))
            start = time.perf_counter()
            done = out.persist()
            wait(done)
            seconds = time.perf_counter() - start
            entries = sorted((e for log in _logs(client) for e in log), key=lambda e: e["start"])
            runs.append((seconds, entries[seen:]))
            del done, out
        seconds, entries = min(runs, key=lambda run: run[0])
        n_byte = sum(entry["total"] for entry in entries)
        return seconds, n_byte, n_byte / max(sum(entry["duration"] for entry in entries), 1e-9)


def _logs(client):
    return client.run(lambda dask_worker: list(dask_worker.transfer_incoming_log)).values()


def main():
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--length", type=int, default=32768)
    parser.add_argument("--chunk", type=int, default=4096)
    options = parser.parse_args()
    cost = chunk_cost(options.chunk, options.chunk, WIDTH)
    work = cost.multiply_adds * (options.length // options.chunk) ** 2
    rate = bandwidth = 0.0
    for n_worker in (1, 2):
        seconds, n_byte, bandwidth = measure(n_worker, options.length, options.chunk)
        rate = rate or work / seconds / 1e9
        print(f"{n_worker} worker(s): {seconds:.2f} s, {n_byte / 1e6:.1f} MB received by all")
    plan = Plan(
        2,
        options.length,
        gmadds=rate,
        gbytes=bandwidth / 1e9,
        width=WIDTH,
        chunk=options.chunk,
        is_causal=False,
    )
    print(f"plan for 2, at {rate:.0f} billion multiply-adds and {plan.gbytes:.2f} GB a second:")
    for order in (ring, tree, dask):
        outcome = order(plan)
        received = 2 * outcome.bytes_in / 1e6
        print(f"  {order.__name__}: {outcome.seconds:.2f} s, {received:.1f} MB received by both")


if __name__ == "__main__":
    main()
