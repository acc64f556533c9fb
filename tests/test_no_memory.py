"""Every allocation of a call may fail: MemoryError, nothing written or left behind, and the next call works."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from _support import run_python

import mha_fast
from mha_fast import _core

COMPILER = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
NEEDS_LINUX = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="Linux only")

# Fails allocation 1, 2, 3, ... of a call until one succeeds without having met its failure.
EVERY_ALLOCATION = """
import ctypes
import gc
import numpy as np
import mha_fast

memory = ctypes.CDLL(None)
memory.fail_at.argtypes = (ctypes.c_long, ctypes.c_char_p)
memory.failed.restype = ctypes.c_long
gc.disable()
rng = np.random.default_rng(0)
query, key, value = rng.standard_normal((3, 2, 4, 40, 16), dtype=np.float32)
long_key = rng.standard_normal((2, 4, 1200, 16), dtype=np.float32)
mask = rng.standard_normal((40, 40))
rows = rng.standard_normal((50, 4, 16), dtype=np.float32)
boundaries = np.array([0, 20, 50])
lengths = np.array([7, 40])
calls = {{
    "attention": lambda: mha_fast.attention(query, key, value, return_lse=True)[0],
    "options": lambda: mha_fast.attention(
        query, key, value, mask, is_causal=True, kv_lengths=lengths, sinks=np.zeros(4),
        alibi_slopes=np.ones(4), head_mask=np.ones(4), softcap=3.0, scale=0.3,
        query_offset="end",
    ),
    "decode": lambda: mha_fast.attention(query[:, :, :1], long_key, long_key),
    "out": lambda: mha_fast.attention(query, key, value, out=np.empty_like(query)),
    "varlen": lambda: mha_fast.attention_varlen(rows, rows, rows, boundaries, boundaries),
    "weights": lambda: mha_fast.attention_weights(query, key, queries=[0, 5]),
    "statistics": lambda: mha_fast.head_statistics(query, key, received=True).received,
    "num_threads": lambda: mha_fast.attention(long_key, long_key, long_key, num_threads=2),
}}
call = calls[{name!r}]
right = call().tobytes()
n_error = n = 0
while True:
    n += 1
    memory.fail_at(n, {word!r})
    try:
        out = call()
    except MemoryError:
        out = None
        n_error += 1
    except SystemError as error:
        if "ufunc" not in str(error):  # NumPy's functions forget to say MemoryError
            raise
        out = None
    met = memory.failed()
    memory.fail_at(0, None)
    if out is not None and out.tobytes() != right:
        raise SystemExit(f"allocation {{n}} failed and the result is wrong")
    if call().tobytes() != right:
        raise SystemExit(f"after a failure of allocation {{n}} the next call is wrong")
    if not met:
        break
print(n - 1, n_error)
"""

NAMES = (
    "attention", "options", "decode", "out", "varlen", "weights", "statistics", "num_threads",
)  # fmt: skip
# NumPy ends the process, or raises SystemError, where some of its own allocations fail.
NUMPY_SURVIVES = ("attention", "options", "decode", "out", "varlen", "num_threads")


@pytest.fixture(scope="module")
def failing_memory(tmp_path_factory):
    """A library that lets allocations fail, for LD_PRELOAD."""
    if COMPILER is None or not sys.platform.startswith("linux"):
        pytest.skip("needs Linux and a C compiler")
    if "LD_PRELOAD" in os.environ:
        pytest.skip("another library stands before the memory functions")
    path = tmp_path_factory.mktemp("native") / "failing_memory.so"
    source = Path(__file__).with_name("_failing_memory.c")
    command = [COMPILER, "-shared", "-fPIC", "-O1", "-fno-builtin", source, "-o", path, "-ldl"]
    subprocess.run(command, check=True)
    return path


@pytest.mark.parametrize("name", NAMES)
def test_any_allocation_of_the_core_may_fail(name, failing_memory, tmp_path):
    n_allocation, n_error = _run_failing(name, b"_core", failing_memory, tmp_path)
    assert n_allocation == n_error >= 1


@pytest.mark.parametrize("name", NUMPY_SURVIVES)
def test_any_allocation_of_anyone_may_fail(name, failing_memory, tmp_path):
    n_allocation, n_error = _run_failing(name, None, failing_memory, tmp_path)
    # NumPy and the interpreter do without some of them (a cache, a larger block than needed).
    assert n_allocation >= n_error >= 1


def _run_failing(name, word, library, folder):
    """Allocations that were made to fail, and how many of them became MemoryError."""
    code = EVERY_ALLOCATION.format(name=name, word=word)
    process = run_python(code, folder, LD_PRELOAD=str(library))
    assert process.returncode == 0, process.stderr
    return tuple(map(int, process.stdout.split()))


HARD_LIMIT = """
import resource
import numpy as np
import mha_fast
x = np.random.default_rng(0).standard_normal((4, 300, 64), dtype=np.float32)
right = mha_fast.attention(x, x, x, num_threads=2).tobytes()
wide = np.ones((1, 40, 1_000_000), np.float32)
wide_out = np.full_like(wide, np.nan)
def used():
    return int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
before = used()
resource.setrlimit(resource.RLIMIT_AS, (before + (20 << 20), resource.RLIM_INFINITY))
n_error = 0
for _ in range(50):
    try:
        mha_fast.attention(wide, wide, wide, out=wide_out)
    except MemoryError:
        n_error += 1
    assert mha_fast.attention(x, x, x, num_threads=2).tobytes() == right
grown = used() - before
resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
print(n_error, np.isnan(wide_out).all(), grown < 4 << 20)
mha_fast.attention(wide[:, :3], wide, wide, out=wide_out[:, :3])
print((wide_out[:, :3] == 1).all())
"""


@NEEDS_LINUX
def test_limit_on_the_address_space(tmp_path):
    """The workspace of rows a million wide does not fit; that of ordinary calls does."""
    process = run_python(HARD_LIMIT, tmp_path, OPENBLAS_NUM_THREADS="1")
    assert process.stdout == "50 True True\nTrue\n", process.stderr


def test_error_says_what_there_was_no_memory_for():
    if sys.maxsize < 2**62:
        pytest.skip("needs 64-bit addresses")
    row = np.ones((1, 1, 1), np.float32)
    many = np.broadcast_to(row, (2**40, 1, 1, 1))
    with pytest.raises(MemoryError):
        mha_fast.attention(many, row, row)


def test_memory_is_kept_for_the_next_call_and_no_more_than_that():
    """Two calls at once have a workspace each; one of the two is kept."""
    from concurrent.futures import ThreadPoolExecutor

    x = np.random.default_rng(0).standard_normal((2, 300, 64), dtype=np.float32)
    right = mha_fast.attention(x, x, x, num_threads=1).tobytes()
    with ThreadPoolExecutor(4) as pool:
        for got in pool.map(lambda _: mha_fast.attention(x, x, x, num_threads=1), range(200)):
            assert got.tobytes() == right
    assert _core.isa() in _core.available_isas()
