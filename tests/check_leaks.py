"""Shows that calls leave no memory behind; only under AddressSanitizer, run by ``.ci/sanitize``.

AddressSanitizer knows the bytes that are allocated, to the byte, Python's own included (with
PYTHONMALLOC=malloc). The same calls over and over must not add to them: successful ones of every
entry point, and ones that fail in the checks or for want of memory.
"""

import ctypes
import gc
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != ROOT]

import numpy as np
from _fuzz_cases import draw_case
from _fuzz_checks import call
from _support import ISAS

import mha_fast

# A leak shows in every window of rounds; caches of NumPy and the interpreter that fill up do not.
N_WINDOW, N_ROUND = 3, 20
# What the smallest leak in every round would come to in a window.
LIMIT = 16 * N_ROUND

libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p


def main():
    """Return the exit status."""
    allocated_bytes = getattr(libc, "__sanitizer_get_current_allocated_bytes", None)
    if allocated_bytes is None:
        sys.exit("needs AddressSanitizer: run .ci/sanitize")
    allocated_bytes.restype = ctypes.c_size_t
    if _growth(allocated_bytes, lambda: libc.malloc(16)) < LIMIT:
        sys.exit("16 bytes a round went unnoticed: this check is blind")
    cases = [draw_case(0, number, ISAS) for number in range(200)]
    growth = {
        "calls": _growth(allocated_bytes, lambda: [call(case) for case in cases]),
        "wrong arguments": _growth(allocated_bytes, _wrong_arguments),
        "no memory": _growth(allocated_bytes, _no_memory),
    }
    for name, n_byte in growth.items():
        print(f"leaks, {name}: {n_byte} bytes in {N_ROUND} rounds (limit {LIMIT})")
    return int(max(growth.values()) >= LIMIT)


def _growth(allocated_bytes, round_of_calls):
    """Least growth of what is allocated over a window of rounds, once all is warm."""
    growths = []
    for _ in range(3):
        round_of_calls()
    for _ in range(N_WINDOW):
        gc.collect()
        before = allocated_bytes()
        for _ in range(N_ROUND):
            round_of_calls()
        gc.collect()
        growths.append(allocated_bytes() - before)
    return min(growths)


def _wrong_arguments():
    x = np.ones((2, 40, 8), np.float32)
    for options in ({"attn_mask": x[:, :3]}, {"kv_lengths": 41}, {"window": (1, -1)},
                    {"sinks": [1]}, {"out": x[:, 1:]}):  # fmt: skip
        try:
            mha_fast.attention(x, x, x, **options)
        except ValueError:
            continue
        raise AssertionError(f"no error with {options}")


def _no_memory():
    """Rows so wide that a tile of them passes the limit that .ci/sanitize sets."""
    x = np.ones((9, 2_000_000), np.float32)
    for operand in (x, x[:1]):
        try:
            mha_fast.attention(operand, x, x)
        except MemoryError:
            continue
        raise AssertionError("there was memory")


if __name__ == "__main__":
    sys.exit(main())
