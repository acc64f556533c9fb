"""Peak memory of a call in a fresh process: nothing of the size of the score matrix."""

import sys

import numpy as np
import pytest
from _support import run_python

import mha_fast

pytestmark = pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="reads /proc, which only Linux has"
)

# peak() is the most memory of the process so far, in MiB.
START = """
import numpy as np
import mha_fast

def peak():
    with open("/proc/self/status") as status:
        line = next(line for line in status if line.startswith("VmHWM"))
    return int(line.split()[1]) / 1024
"""

# The peak counts memory of the process, the kernel's included; Python's own tracing would not
# see that. Inputs and output are touched before the first reading.
PEAK = """
n = {n}
rng = np.random.default_rng(0)
query, key, value = (rng.standard_normal((n, 64), dtype=np.float32) for _ in range(3))
out = np.full((n, 64), np.nan, np.float32)
mha_fast.attention(query[:300], key[:300], value[:300])  # thread stacks and the like
before = peak()
mha_fast.attention({arguments}, out=out)
print(peak() - before, np.isfinite(out).all())
"""

# The score matrix of 16384 x 16384 in float32 has 1024 MiB.
CALLS = {
    "causal": "query, key, value, is_causal=True",
    "stride 0 bool mask": "query, key, value, np.broadcast_to(rng.random(n) < 0.5, (n, n))",
    "stride 0 float mask": "query, key, value, np.broadcast_to(rng.random((n, 1)), (n, n)), "
    "window=(2000, 0)",
    "other options": "query, key, value, window=(1000, 500), softcap=5.0, alibi_slopes=[0.1], "
    "kv_lengths=n - 5, sinks=[0.5]",
    "one operand to copy": "query, key.repeat(2, axis=1)[:, ::2], value, window=(1000, 0)",
    "out over the query": "(out.__setitem__(..., 0), out)[1], key, value, window=(1000, 0)",
}


@pytest.mark.parametrize("call", CALLS)
def test_peak_stays_under_32_mib(call, tmp_path):
    code = PEAK.format(n=16384, arguments=CALLS[call])
    process = run_python(START + code, tmp_path)
    above, finite = process.stdout.split()
    assert float(above) < 32, process.stderr
    assert finite == "True"


FEW_QUERIES = """
rng = np.random.default_rng(0)
query = rng.standard_normal((64, 8, 64), dtype=np.float32)
key, value = (np.broadcast_to(rng.standard_normal((1, 64), dtype=np.float32), (64, 1 << 20, 64))
              for _ in range(2))
few = mha_fast.attention(query[:1, :, :], key[:1, :2000], value[:1, :2000])  # stacks and the like
before = peak()
for options in ({"window": (127, 0)}, {"window": (5, 3), "query_offset": "end"},
                {"kv_lengths": 700}, {"is_causal": True}):
    mha_fast.attention(query, key, value, **options)
print(peak() - before)
"""


def test_few_queries_take_memory_for_the_keys_they_see(tmp_path):
    """A partial result for each 512 of a million keys would take 300 MiB here."""
    process = run_python(START + FEW_QUERIES, tmp_path)
    assert float(process.stdout) < 16, process.stderr


NO_ROWS = """
n_batch = 1_000_000_000
query, key = (np.broadcast_to(np.ones((2, n, 4), np.float32), (n_batch, 2, n, 4)) for n in (0, 3))
before = peak()
for options in ({"kv_lengths": 2}, {"kv_lengths": [2], "query_offset": "end"}, {"query_offset": 1},
                {"alibi_slopes": [1, 2]}, {"head_mask": [1, 2]}):
    out = mha_fast.attention(query, key, key, **options)
    assert out.shape == (n_batch, 2, 0, 4)
print(peak() - before)
"""


def test_a_result_without_rows_takes_no_memory_for_its_batch_entries(tmp_path):
    process = run_python(START + NO_ROWS, tmp_path)
    assert float(process.stdout) < 16, process.stderr


@pytest.mark.parametrize("call", ["attention", "attention_weights", "head_statistics"])
def test_a_result_too_large_to_address_is_a_memory_error(call):
    one, many = np.ones((1, 1, 1, 1), np.float32), np.zeros((1, 1, 1, 1 << 20), np.float32)
    query = np.broadcast_to(one, (1 << 30, 1 << 28, 1, 1))  # 2**58 rows
    key, value = (one, many) if call == "attention" else (many.swapaxes(-1, -2), one)
    arguments = (query, key, value) if call == "attention" else (query, key)
    with pytest.raises(MemoryError, match="shape"):
        getattr(mha_fast, call)(*arguments)


OUT_OF_MEMORY = """
import resource
import numpy as np
import mha_fast

def virtual_memory():
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[0]) * resource.getpagesize()

x = np.ones((9, 500_000), np.float32)  # one tile of queries this wide takes over 30 MB
out = np.zeros_like(x)
unlimited = resource.getrlimit(resource.RLIMIT_AS)
narrow = x[:, :64]
mha_fast.attention(narrow, narrow, narrow)  # starts the threads
failed = 0
for _ in range(20):
    out[...] = 7
    resource.setrlimit(resource.RLIMIT_AS, (virtual_memory() + 4_000_000, unlimited[1]))
    try:
        mha_fast.attention(x, x, x, out=out)
    except MemoryError:
        failed += 1
    finally:
        resource.setrlimit(resource.RLIMIT_AS, unlimited)
    if failed == 1:
        settled = virtual_memory()
leaked = virtual_memory() - settled
untouched = (out == 7).all()
mha_fast.attention(x, x, x, out=out)
print(failed, leaked < 4_000_000, untouched, (out == 1).all())
"""


def test_out_of_memory_is_an_error_that_leaks_nothing(tmp_path):
    process = run_python(OUT_OF_MEMORY, tmp_path)
    assert process.stdout == "20 True True True\n", process.stderr


LEAK = """
import numpy as np
import mha_fast

def resident():
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * 4096

x = np.random.default_rng(0).standard_normal((4, 400, 64), dtype=np.float32)
def calls(number):
    for _ in range(number):
        mha_fast.attention(x, x[..., ::-1], x.astype(">f4"), x[:, :, :1], is_causal=True)
        mha_fast.attention(x[:, :1], x, x, return_lse=True, kv_lengths=77)
        try:
            mha_fast.attention(x, x[:3], x)
        except ValueError:
            pass
calls(20)
before = resident()
calls(200)
print((resident() - before) / 2**20)
"""


def test_repeated_calls_do_not_grow_the_process(tmp_path):
    process = run_python(LEAK, tmp_path)
    assert float(process.stdout) < 8, process.stderr
