"""Causal attention over files whose keys and values do not fit the memory of a worker.

    pip install "mha_fast[dask]"
    python examples/long_sequence_dask.py
    python examples/long_sequence_dask.py --heads 32 --tokens 65536 --memory-limit "600 MiB"

Queries, keys, values and the result are files that NumPy can map (.npy). Two worker processes read
chunks of them, attend, join and write; each is restarted by dask if it takes more than its limit.
Dask shows its progress; at the end stand the peak memory of each worker and a check of some rows.
"""

import argparse
import math
import resource
import tempfile
from pathlib import Path

import dask.array as da
import numpy as np
from dask.utils import format_bytes, parse_bytes
from distributed import Client, LocalCluster, progress

import mha_fast.dask

WIDTH = 64
CHUNKS = {"heads": 1, "queries": 4096, "keys": 4096}
N_CHECKED = 5  # rows whose result is compared


class NpyFile:
    """An array in a file: a task gets the path, and reads or writes what it needs.

    A memory map itself would be sent to the workers as a copy of what is in the file.
    """

    def __init__(self, path):
        self.path = str(path)
        mapped = np.load(self.path, mmap_mode="r")
        self.shape, self.dtype, self.ndim = mapped.shape, mapped.dtype, mapped.ndim

    def __getitem__(self, where):
        return np.array(np.load(self.path, mmap_mode="r")[where])

    def __setitem__(self, where, numbers):
        np.load(self.path, mmap_mode="r+")[where] = numbers


def write_inputs(folder, n_head, n_token):
    """Write normal numbers, a head at a time; return the files of query, key, value and result."""
    rng = np.random.default_rng(0)
    shape = (n_head, n_token, WIDTH)
    for name in ("query", "key", "value", "out"):
        file = np.lib.format.open_memmap(folder / f"{name}.npy", "w+", np.float32, shape)
        if name != "out":
            for head in file:
                head[...] = rng.standard_normal(head.shape, dtype=np.float32)
        file.flush()
    return {name: NpyFile(folder / f"{name}.npy") for name in ("query", "key", "value", "out")}


def attend(files, client):
    """Compute the result into its file, with dask's progress bar."""
    sizes = (CHUNKS["heads"], CHUNKS["keys"], WIDTH)
    query, key, value = (
        da.from_array(files[name], chunks=sizes, name=f"{name}-file")
        for name in ("query", "key", "value")
    )
    out = mha_fast.dask.attention(query, key, value, is_causal=True)
    stored = client.compute(da.store(out, files["out"], lock=False, compute=False))
    progress(stored, notebook=False)
    print()
    stored.result()
    return len(out.__dask_graph__())


def peak_memory():
    """Most memory that this process has had, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def largest_error(files):
    """Compare a few rows of the last head with the formula in float64."""
    head, n_token = files["query"].shape[0] - 1, files["query"].shape[1]
    error = 0.0
    for row in np.linspace(0, n_token - 1, N_CHECKED).astype(int):
        key, value = (files[name][head, : row + 1].astype(np.float64) for name in ("key", "value"))
        logits = key @ files["query"][head, row].astype(np.float64) / math.sqrt(WIDTH)
        weights = np.exp(logits - logits.max())
        right = weights @ value / weights.sum()
        error = max(error, float(np.abs(files["out"][head, row] - right).max()))
    return error


def main(arguments=None):
    """Run the example."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--heads", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--memory-limit", default="400 MiB", help="of each worker")
    parser.add_argument("--folder", type=Path, help="for the files; default a temporary one")
    options = parser.parse_args(arguments)
    cluster = LocalCluster(
        n_workers=options.workers,
        threads_per_worker=1,
        memory_limit=options.memory_limit,
        dashboard_address=None,
    )
    with (
        cluster,
        Client(cluster) as client,
        tempfile.TemporaryDirectory(dir=options.folder) as folder,
    ):
        files = write_inputs(Path(folder), options.heads, options.tokens)
        n_byte = 2 * 4 * math.prod(files["key"].shape)
        print(f"keys and values: {format_bytes(n_byte)} on disk")
        print(f"memory limit of each of {options.workers} workers: {options.memory_limit}")
        before = max(client.run(peak_memory).values())
        n_task = attend(files, client)
        peaks = client.run(peak_memory)
        print(f"{n_task:,} tasks")
        print(f"peak memory of a worker: {format_bytes(max(peaks.values()))}", end="")
        print(f", {format_bytes(before)} of it before the first task")
        print(f"largest error of {N_CHECKED} rows: {largest_error(files):.1e}")
        if n_byte > parse_bytes(options.memory_limit) > max(peaks.values()):
            print("keys and values do not fit a worker, and no worker went beyond its limit")


if __name__ == "__main__":
    main()
