"""No byte outside the operands is read or written.

Every array lies against a page that may not be touched, before its first byte or behind its last:
one step too far ends the process. So each test runs in a process of its own.
"""

import sys

import pytest
from _support import ISAS, run_python

pytestmark = pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="calls mprotect, as Linux names it"
)

GUARDED = """
import ctypes, itertools, mmap
import numpy as np
import mha_fast
mha_fast._core.use_matrix_from({rows})

PAGE = mmap.PAGESIZE
libc = ctypes.CDLL(None, use_errno=True)
kept = []

def guarded(x, at_end):
    '''A copy of x between two pages that may not be touched, against one of them.'''
    room = (x.nbytes + PAGE - 1) // PAGE * PAGE
    memory = mmap.mmap(-1, room + 2 * PAGE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    for page in (address, address + PAGE + room):
        if libc.mprotect(ctypes.c_void_p(page), PAGE, 0):
            raise OSError(ctypes.get_errno(), "mprotect")
    kept.append(memory)
    start = PAGE + (room - x.nbytes if at_end else 0)
    copy = np.frombuffer(memory, x.dtype, x.size, start).reshape(x.shape)
    copy[...] = x
    return copy

rng = np.random.default_rng(0)
sizes = itertools.product({dtypes}, (1, 3, 20, 67), (1, 5, 64, 130), (1, 7, 16, 33), (1, 6, 17, 32))
for dtype, n_query, n_key, head_width, value_width in sizes:
    at_end = (n_query + n_key + head_width + value_width) % 3 > 0
    arrays = [rng.standard_normal(shape).astype(dtype) for shape in
              ((2, n_query, head_width), (1, n_key, head_width), (1, n_key, value_width),
               (2, n_query, value_width))]
    query, key, value, out = (guarded(x, at_end) for x in arrays)
    mask = guarded(rng.random((2, n_query, n_key)) < 0.8, at_end)
    bias = guarded(rng.standard_normal((n_query, n_key)).astype(np.float16), at_end)
    for options in ({{}}, {{"attn_mask": mask}}, {{"attn_mask": bias}}, {{"is_causal": True}},
                    {{"kv_lengths": n_key // 2}}):
        right = mha_fast.attention(*arrays[:3], **options)
        mha_fast.attention(query, key, value, out=out, **options)
        assert out.tobytes() == right.tobytes()
    value[..., -1] = np.nan
    mha_fast.attention(query, key, value, mask, out=out)
print("untouched")

if {touch}:
    ctypes.string_at(query.ctypes.data + query.nbytes + PAGE)
"""


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("isa", ISAS)
def test_pages_around_the_operands_are_not_touched(isa, dtype, tmp_path):
    isa, _, all_sizes = isa.partition(", ")
    code = GUARDED.format(dtypes=(dtype,), touch=False, rows=0 if all_sizes else -1)
    process = run_python(code, tmp_path, MHA_FAST_ISA=isa)
    assert process.returncode == 0, process.stderr
    assert process.stdout == "untouched\n"


# Keys and values of which only the valid rows are memory at all, as in a mapped file that ends there.
BEHIND = (
    GUARDED.split("rng = ")[0]
    + """
rng = np.random.default_rng(0)
for n_query, length, n_key in itertools.product((1, 20, 70), (1, 63, 130, 520), (700,)):
    query, key, value = (rng.standard_normal((1, n, 33)).astype("{dtype}") for n in (n_query, length, length))
    ending = [guarded(x, True) for x in (key, value)]
    longer = [np.lib.stride_tricks.as_strided(x, (1, n_key, 33)) for x in ending]
    right = mha_fast.attention(query, key, value)
    assert np.array_equal(mha_fast.attention(query, *longer, kv_lengths=length), right)
    weights = mha_fast.attention_weights(query, longer[0], kv_lengths=length)
    assert np.array_equal(weights[..., :length], mha_fast.attention_weights(query, key))
    seen = mha_fast.head_statistics(query, longer[0], received=True, kv_lengths=length)
    alone = mha_fast.head_statistics(query, key, received=True)
    assert np.array_equal(seen.received[..., :length], alone.received)
    assert not seen.received[..., length:].any()
print("untouched")
"""
)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("isa", ISAS)
def test_rows_behind_the_length_are_not_touched(isa, dtype, tmp_path):
    isa, _, all_sizes = isa.partition(", ")
    code = BEHIND.format(dtype=dtype, rows=0 if all_sizes else -1)
    process = run_python(code, tmp_path, MHA_FAST_ISA=isa)
    assert process.returncode == 0, process.stderr
    assert process.stdout == "untouched\n"


def test_touching_such_a_page_ends_the_process(tmp_path):
    """Guards the test above."""
    process = run_python(GUARDED.format(dtypes=("float32",), touch=True, rows=-1), tmp_path)
    assert process.stdout == "untouched\n"
    assert process.returncode < 0
