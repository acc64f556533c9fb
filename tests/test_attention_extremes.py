"""Numbers at the ends of their range, and what a row may not notice of others."""

import sys

import numpy as np
import pytest
from _dtypes import ALL_DTYPES, BFLOAT16, NEEDS_BFLOAT16
from _support import SIZES_OF_PATH, assert_same_bits, normal_inputs, run_python

import mha_fast
from mha_fast import reference

NAN = np.nan
PATHS = [
    pytest.param(sizes, id=name)
    for name, sizes in (SIZES_OF_PATH | {"long": {"n_query": 64, "n_key": 700}}).items()
]


def _expected_lse(query, key, **options):
    return reference.attention(
        *(x.astype(np.float64) for x in (query, key, key)), return_lse=True, **options
    )[1]


# ---- short scores -------------------------------------------------------------------------------


@NEEDS_BFLOAT16
@pytest.mark.parametrize("n_query", [63, 64])
@pytest.mark.parametrize(
    ("small", "large", "scale"),
    [(2.5e-23, 1e18, 5e3), (2e-38, 1e38, 5e3), (3e-30, 3e30, 1.0)],
)
def test_norms_that_leave_the_range_bound_no_score(isa, n_query, small, large, scale):
    query = np.full((1, n_query, 256), small, BFLOAT16)
    key = np.full((1, 64, 256), large, BFLOAT16)
    key[0, 1:] *= BFLOAT16(-1)
    _, lse = mha_fast.attention(query, key, key, scale=scale, return_lse=True)
    right = _expected_lse(query, key, scale=scale)
    np.testing.assert_allclose(lse, right, rtol=2**-7, atol=2**-7)


# ---- NaN ----------------------------------------------------------------------------------------

PAYLOADS = {
    np.float16: (0x7FFF, 0xFFFF, 0x7C01),
    np.float32: (0x7FFFFFFF, 0xFFFFFFFF, 0x7FFF8000, 0x7F800001),
    np.float64: (0x7FFFFFFFFFFFFFFF, 0xFFFFFFFFFFFFFFFF, 0x7FFFFFFFE0000000),
}


@pytest.mark.parametrize("dtype", ALL_DTYPES)
@pytest.mark.parametrize("sizes", PATHS)
@pytest.mark.parametrize("mask_dtype", PAYLOADS)
def test_nan_of_any_bits_in_a_mask_is_not_swallowed(isa, dtype, sizes, mask_dtype):
    query, key, value = (x.astype(dtype) for x in normal_inputs(np.float32, **sizes))
    mask = np.zeros((sizes["n_query"], sizes["n_key"]), mask_dtype)
    bits = mask.view(f"u{mask.itemsize}")
    for column, payload in enumerate(PAYLOADS[mask_dtype]):
        bits[1, 3 * column] = payload
        out = mha_fast.attention(query, key, value, mask)
        assert np.isnan(out[..., 1, :].astype(np.float32)).all()
        assert np.isfinite(np.delete(out.astype(np.float32), 1, axis=-2)).all()
        bits[1, 3 * column] = 0
    shared = np.zeros(sizes["n_key"], mask_dtype)
    shared.view(f"u{mask.itemsize}")[5] = PAYLOADS[mask_dtype][0]
    assert np.isnan(mha_fast.attention(query, key, value, shared).astype(np.float32)).all()


@pytest.mark.parametrize("dtype", ALL_DTYPES)
@pytest.mark.parametrize("sizes", PATHS)
def test_nan_of_any_bits_in_a_slope_is_not_swallowed(isa, dtype, sizes):
    query, key, value = (x.astype(dtype) for x in normal_inputs(np.float32, **sizes))
    slopes = np.zeros(query.shape[-3])
    for payload in PAYLOADS[np.float64]:
        slopes.view(np.uint64)[1] = payload
        out = mha_fast.attention(query, key, value, alibi_slopes=slopes).astype(np.float32)
        assert np.isnan(out[:, 1, 1:]).all()
        assert np.isfinite(np.delete(out, 1, axis=1)).all()


# ---- what a row does not see --------------------------------------------------------------------


@NEEDS_BFLOAT16
def test_a_large_key_changes_only_rows_that_see_it(isa):
    """In 16 bits too, where the choice of arithmetic could be made for a whole tile of rows."""
    query, key, value = (
        x.astype(BFLOAT16)
        for x in normal_inputs(np.float32, batch=(), n_head=1, n_kv_head=1, n_query=64,
                               n_key=1024, head_width=64, value_width=64)
    )  # fmt: skip
    options = {"window": (40, None), "query_offset": 100, "return_lse": True}
    out, lse = mha_fast.attention(query, key, value, **options)
    changed = key.copy()
    changed[0, 60] = query[0, 0] * BFLOAT16(8)
    other_out, other_lse = mha_fast.attention(query, changed, value, **options)
    assert other_lse[0, 0] != lse[0, 0]
    assert_same_bits(other_lse[0, 1:].copy(), lse[0, 1:].copy())
    assert_same_bits(other_out[0, 1:].copy(), out[0, 1:].copy())


# ---- small weights ------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_weights_below_the_smallest_normal_number_are_zero(isa, dtype):
    """Arithmetic with subnormal numbers takes many times as long on most CPUs."""
    exponents = np.linspace(0.5, 1.0, 41) * 1.05 * np.log(float(np.finfo(dtype).tiny))
    query, key = np.zeros((1, 9, 4), dtype), np.zeros((1, len(exponents) + 1, 4), dtype)
    mask = np.append(0, exponents).astype(dtype)
    weights = mha_fast.attention_weights(query, key, mask)[0]
    tiny = np.finfo(dtype).tiny
    assert not ((weights > 0) & (weights < tiny)).any()
    right = np.exp(mask.astype(np.longdouble))
    clear = np.abs(right / tiny - 1) > 0.01
    np.testing.assert_allclose(
        weights[:, clear],
        np.where(right < tiny, 0, right)[None, clear] * np.ones((9, 1)),
        rtol=1e-4,
    )


# ---- rows behind a length -----------------------------------------------------------------------

BEHIND = """
import ctypes, mmap
import numpy as np, mha_fast
try:
    import ml_dtypes
except ImportError:
    ml_dtypes = None
PAGE, libc = mmap.PAGESIZE, ctypes.CDLL(None)
def ends_at_page(rows, n_more):
    '''The rows of a head, and as many behind them as nobody may touch.'''
    room = (rows.nbytes + PAGE - 1) // PAGE * PAGE
    locked = (n_more * rows[0].nbytes + PAGE - 1) // PAGE * PAGE
    memory = mmap.mmap(-1, room + locked)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    assert libc.mprotect(ctypes.c_void_p(address + room), locked, 0) == 0
    whole = np.frombuffer(memory, rows.dtype, (len(rows) + n_more) * rows.shape[1], room - rows.nbytes)
    whole = whole.reshape(-1, rows.shape[1])
    whole[: len(rows)] = rows
    return whole[None]
mha_fast._core.use_matrix_from({rows})
rng = np.random.default_rng(0)
types = [np.float32, np.float64, np.float16] + ([ml_dtypes.bfloat16] if ml_dtypes else [])
for dtype in types:
    for length in (1, 3, 70, 513, 600):
        for n_query in (1, 3, 70):
            query = rng.standard_normal((1, n_query, 8)).astype(dtype)
            rows = rng.standard_normal((length, 8)).astype(dtype)
            key = ends_at_page(rows, 700)
            value = ends_at_page(rows, 700)
            kept = dict(kv_lengths=length)
            for options in (dict(), dict(is_causal=True, query_offset="end"), dict(window=(9, 9))):
                mha_fast.attention(query, key, value, **kept, **options)
                mha_fast.attention_weights(query, key, **kept, **options)
                mha_fast.head_statistics(query, key, received=True, **kept, **options)
print("untouched")
"""


def test_rows_behind_a_length_are_not_read(isa, tmp_path):
    """A mapped file may end there."""
    isa, _, all_sizes = isa.partition(", ")
    code = BEHIND.format(rows=0 if all_sizes else -1)
    process = run_python(code, tmp_path, MHA_FAST_ISA=isa)
    assert process.stdout == "untouched\n", process.stderr


# ---- long key axes ------------------------------------------------------------------------------


FEW_ROWS = """
import re, numpy as np, mha_fast
def most_memory():
    '''In KiB, of this process: what getrusage() says begins with the parent's.'''
    return int(re.search("VmHWM:[^0-9]*([0-9]+) kB", open("/proc/self/status").read())[1])
key = np.broadcast_to(np.ones(128, np.float32), (1, 1 << 22, 128))
query = np.ones((1, 8, 128), np.float32)
mha_fast.attention(query, key[:, :100], key[:, :100])
before = most_memory()
assert (mha_fast.attention(query, key, key, **{options}) == 1).all()
print(most_memory() - before)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize(
    "options",
    [{"window": (127, 0), "query_offset": "end"}, {"is_causal": True}, {"kv_lengths": 100}],
)
def test_few_rows_that_see_few_keys_need_little_memory(isa, options, tmp_path):
    code = FEW_ROWS.format(options=options)
    process = run_python(code, tmp_path, MHA_FAST_ISA=isa.partition(", ")[0])
    # Partial results for all of the keys would take 33,000.
    assert int(process.stdout) < 4096, process.stderr


# ---- options at the ends of the range -----------------------------------------------------------


@pytest.mark.parametrize("dtype", ALL_DTYPES)
@pytest.mark.parametrize(
    ("name", "number"),
    [
        ("softcap", 1e39),
        ("softcap", 1e-46),
        ("scale", 1e39),
        ("scale", -1e39),
        ("alibi_slopes", [1e39, 0, 0, 0]),
        ("alibi_slopes", [0, 0, -1e300, 0]),
        ("head_mask", [1, 1e39, 0, 0]),
    ],
)
def test_options_that_the_arithmetic_cannot_hold_are_refused(dtype, name, number):
    query, key, value = (x.astype(dtype) for x in normal_inputs(np.float32))
    options = {name: number}
    if dtype == np.float64 and np.max(np.abs(number)) < 1e100:
        assert np.isfinite(mha_fast.attention(query, key, value, **options)).all()
        return
    with pytest.raises(ValueError, match=name):
        mha_fast.attention(query, key, value, **options)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("sizes", PATHS)
@pytest.mark.parametrize("options", [{}, {"softcap": 5.0}, {"attn_mask": np.float32(1)}])
def test_a_small_scale_acts_before_large_numbers_overflow(isa, dtype, sizes, options):
    largest = 1e20 if dtype == np.float32 else 1e160
    query, key, value = normal_inputs(dtype, **sizes)
    query, key, scale = query * dtype(largest), key * dtype(largest), largest**-2
    result = mha_fast.attention(query, key, value, scale=scale, return_lse=True, **options)
    wide = [x.astype(np.longdouble) for x in (query, key, value)]
    right = reference._attention_in(np.longdouble, *wide, scale=scale, **options)
    for got, wanted in zip(result, right, strict=True):
        np.testing.assert_allclose(got, wanted, rtol=0, atol=200 * np.finfo(dtype).eps)


@pytest.mark.parametrize("sizes", PATHS)
@pytest.mark.parametrize("scale", [5e36, 8e36, 3e38, 2e-38, 1e-45, -3e38])
def test_a_scale_at_the_ends_of_the_range_acts(isa, sizes, scale):
    query, key, value = normal_inputs(np.float32, **sizes)
    factor = np.float32(2.0 ** -np.round(np.log2(abs(scale)) / 2))
    query, key = query * factor, key * factor
    out, lse = mha_fast.attention(query, key, value, scale=scale, return_lse=True)
    right = reference.attention(query, key, value, scale=scale, return_lse=True)
    np.testing.assert_allclose(out, right[0], rtol=0, atol=1e-4)
    np.testing.assert_allclose(lse, right[1], rtol=0, atol=1e-4)
