"""What the numbers were measured on, and what that machine could do at that moment."""

import os
import platform
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np

import mha_fast
from mha_fast import _core

from .cases import dtype_of

# Large enough to come from beyond the private caches. A larger case is read at its own size, so
# that a big shared cache helps the case and the measurement alike.
_LEAST_STREAM_BYTES = 32 << 20


def describe() -> dict[str, str | int | None]:
    """Name everything that a ratio between two contenders depends on."""
    return {
        "cpu": _cpu_name(),
        "n_cpu": os.cpu_count(),
        "isa": _core.isa(),
        "num_threads": mha_fast.get_num_threads(),
        "mha_fast": mha_fast.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
    }


def _cpu_name():
    try:
        with open("/proc/cpuinfo") as lines:
            for line in lines:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        pass  # not Linux
    return platform.processor() or platform.machine()


def fma_meter(num_threads: int, dtype: str) -> Callable[[], float] | None:
    """Return a call that measures how fast `num_threads` threads multiply and add in registers.

    It returns GFLOP/s. None where the kernel cannot measure it. The kernel measures float32;
    float64 is half of that, since a register holds half as many numbers.
    """
    measure = getattr(_core, "measure_fma_peak", None)
    if measure is None:
        return None
    share = 4 / max(dtype_of(dtype).itemsize, 4)
    return lambda: measure(num_threads) * share


# How many bfloat16 products of the matrix unit one product of such numbers takes, as chosen in
# src/kernels/amx.cpp: a float32 is the sum of three bfloat16 numbers, and the smallest of the nine
# products of these parts are left out.
_MATRIX_PRODUCTS = {
    ("bfloat16", "highest"): 1,
    ("bfloat16", "high"): 1,
    ("float16", "highest"): 6,
    ("float16", "high"): 6,
    ("float32", "highest"): 6,
    ("float32", "high"): 3,
}


def matrix_products(dtype: str, precision: str) -> int | None:
    """Return what one product costs on a matrix unit of bfloat16, None where it has no use."""
    return _MATRIX_PRODUCTS.get((dtype, precision))


def matrix_meter(num_threads: int) -> Callable[[], float] | None:
    """Return a call that measures the matrix unit: GFLOP/s of bfloat16 multiply-adds.

    None where the CPU has no such unit or the kernel cannot measure it.
    """
    measure = getattr(_core, "measure_matrix_peak", None)
    if measure is None or measure(num_threads) is None:
        return None
    return partial(measure, num_threads)


class ReadMeter:
    """Measures how fast some threads together read `n_bytes` from one end to the other."""

    def __init__(self, num_threads: int, n_bytes: int):
        n_bytes = max(n_bytes, _LEAST_STREAM_BYTES)
        halves = np.ones((2, n_bytes // 8), np.float32)
        self._n_bytes = halves.nbytes
        self._parts = np.array_split(halves, num_threads, axis=1)
        self._pool = ThreadPoolExecutor(num_threads)

    def __call__(self) -> float:
        """Read everything once; return GB/s."""
        start = time.perf_counter()
        # A dot product is the fastest reader in NumPy: two streams, like keys and values, none of
        # it written, and no interpreter lock.
        list(self._pool.map(lambda part: np.dot(part[0], part[1]), self._parts))
        return self._n_bytes / (time.perf_counter() - start) / 1e9
