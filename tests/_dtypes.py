"""All four dtypes, bfloat16 where ml_dtypes brings it, and what one rounding to 16 bits may do."""

import numpy as np
import pytest
from _support import DTYPES, assert_close, expected, largest, weight_rounding

try:
    from ml_dtypes import bfloat16 as BFLOAT16
except ImportError:
    BFLOAT16 = None

NEEDS_BFLOAT16 = pytest.mark.skipif(BFLOAT16 is None, reason="ml_dtypes is not installed")
DTYPES_16 = (np.float16, pytest.param(BFLOAT16, marks=NEEDS_BFLOAT16, id="bfloat16"))
ALL_DTYPES = (*DTYPES, *DTYPES_16)

# Bits of the significand with the hidden one, and exponent of the smallest subnormal number.
_PRECISION = {"float16": (11, -24), "bfloat16": (8, -133)}


def widened(x):
    """`x` in the dtype of its arithmetic: float32 for 16 bits."""
    return x.astype(np.float32) if x.dtype.itemsize == 2 else x


def half_ulp(x, dtype):
    """Largest error of rounding a number of the size of `x` to a 16-bit dtype once."""
    n_bit, smallest = _PRECISION[np.dtype(dtype).name]
    exponent = np.frexp(x)[1]
    return np.ldexp(0.5, np.maximum(exponent - n_bit, smallest))


def expected_widened(query, key, value, attn_mask=None, **options):
    """`expected`, with 16-bit inputs in float32 arithmetic."""
    right = expected(*map(widened, (query, key, value)), attn_mask, **options)
    error = weight_rounding(query.dtype)
    gates = options.get("head_mask")
    size = largest(value) * (1.0 if gates is None else max(1.0, largest(gates)))
    # A weight and the sum that it is divided by are off by this much, each to its side.
    return right._replace(
        out_limit=right.out_limit + 2 * error * size, lse_limit=right.lse_limit + error
    )


def assert_rounded_once(result, right, dtype):
    """Check (out, lse): twice the error of the same arithmetic in NumPy, and one rounding of out.

    `right` is from `expected_widened`. The bound is below twice the error of float32 arithmetic
    rounded at the end, because the rounding itself is counted once. lse is not rounded at all.
    """
    out, lse = result
    assert out.dtype == dtype
    assert lse.dtype == (np.float64 if dtype == np.float64 else np.float32)
    assert_near(out, right.out, right.out_limit)
    assert_close(lse, right.lse, right.lse_limit)


def assert_near(out, right, limit):
    """Within `limit` (a number or an array) of `right`, and for 16 bits one rounding from that."""
    assert out.shape == right.shape
    wide, finite = out.astype(right.dtype), np.isfinite(right)
    np.testing.assert_array_equal(np.isfinite(wide), finite)
    np.testing.assert_array_equal(wide[~finite], right[~finite])
    error, size = np.abs(wide[finite] - right[finite]), np.abs(right[finite])
    limit = np.broadcast_to(limit, right.shape)[finite]
    if out.dtype.itemsize == 2:
        limit = limit + half_ulp(size + limit, out.dtype)
    worst = np.argmax(error - limit) if error.size else None
    assert worst is None or error[worst] <= limit[worst]


def assert_same_numbers(a, b):
    """Two 16-bit arrays hold equal numbers, and NaN in the same places."""
    assert a.dtype == b.dtype
    np.testing.assert_array_equal(a.astype(np.float32), b.astype(np.float32))
