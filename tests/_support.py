"""Shared by the tests: inputs, the right answer, and how far from it a result may be."""

import contextlib
import os
import subprocess
import sys
from typing import NamedTuple

import numpy as np

import mha_fast
from mha_fast import _core, reference

DTYPES = (np.float32, np.float64)

# A result is judged against the formula in a wider dtype than its own.
WIDER = {np.float32: np.float64, np.float64: np.longdouble}

# The matrix unit is for long calls. With this behind the name of its instruction set it takes all
# that are not for the path of few rows, so that small tests go through it too.
_ALL_SIZES = ", all sizes"

# Every way that arithmetic can be done on this machine, as `using_isa` takes it.
ISAS = tuple(
    name + sizes
    for name in _core.available_isas()
    for sizes in (("", _ALL_SIZES) if name == "amx" else ("",))
)

# Options that change how a result is computed or handed over, but not its value.
_NOT_IN_THE_FORMULA = {"return_lse", "out", "num_threads", "precision"}

# One shape for each way through the kernel. Both cross several blocks of keys; the second has
# few enough rows for the path of decoding, and more keys than one of its splits.
SIZES_OF_PATH = {
    "tiles": {"n_query": 37, "n_key": 150},
    "few rows": {"n_query": 2, "n_key": 600},
}


def normal_inputs(
    dtype, *, batch=(2,), n_head=4, n_kv_head=2, n_query=37, n_key=150, head_width=20,
    value_width=12, seed=0,
):  # fmt: skip
    """Standard normal query, key and value of the given sizes."""
    rng = np.random.default_rng(seed)
    shapes = (
        (*batch, n_head, n_query, head_width),
        (*batch, n_kv_head, n_key, head_width),
        (*batch, n_kv_head, n_key, value_width),
    )
    return tuple(rng.standard_normal(shape).astype(dtype) for shape in shapes)


class Expected(NamedTuple):
    """The right output and lse, and the largest error that each may show."""

    out: np.ndarray
    lse: np.ndarray
    out_limit: float
    lse_limit: float


def expected(query, key, value, attn_mask=None, **options):
    """The formula in a wider dtype, with limits taken from the formula in the dtype itself.

    The limit is twice the error of the same formula in the same precision. A few units in the
    last place are added, because on small inputs that error is 0 by luck.
    """
    formula = {name: x for name, x in options.items() if name not in _NOT_IN_THE_FORMULA}
    dtype = query.dtype.type
    out, lse = reference._attention_in(WIDER[dtype], query, key, value, attn_mask, **formula)
    same = reference._attention_in(dtype, query, key, value, attn_mask, **formula)
    ulp = 4 * np.finfo(dtype).eps
    gates = options.get("head_mask")
    out_unit = largest(value) * (1.0 if gates is None else max(1.0, largest(gates)))
    return Expected(
        out,
        lse,
        2 * _distance(same[0], out) + ulp * out_unit,
        2 * _distance(same[1], lse) + ulp * max(1.0, largest(lse)),
    )


def assert_as_expected(result, expected, dtype):
    """Check a pair (out, lse) for shape, dtype, places of NaN and Inf, and size of the error."""
    out, lse = result
    assert out.dtype == dtype
    assert lse.dtype == dtype
    assert_close(out, expected.out, expected.out_limit)
    assert_close(lse, expected.lse, expected.lse_limit)


def assert_attention_correct(query, key, value, attn_mask=None, **options):
    """Run the kernel and compare output and lse with the reference."""
    result = mha_fast.attention(query, key, value, attn_mask, return_lse=True, **options)
    right = expected(query, key, value, attn_mask, **options)
    assert_as_expected(result, right, query.dtype)
    return result


def assert_rms_error_small(query, key, value, attn_mask=None, **options):
    """The rms error over a large sample is at most twice that of the same formula.

    Stricter than `assert_attention_correct`, and sharper where logits are large: the largest
    error is then that of one row with two keys in a tie, and a matter of luck.
    """
    out, lse = mha_fast.attention(query, key, value, attn_mask, return_lse=True, **options)
    dtype = query.dtype.type
    right = reference._attention_in(WIDER[dtype], query, key, value, attn_mask, **options)
    same = reference._attention_in(dtype, query, key, value, attn_mask, **options)
    half_ulp = np.finfo(dtype).eps / 2
    assert _rms(out - right[0]) <= 2 * _rms(same[0] - right[0]) + half_ulp * _rms(right[0])
    assert _rms(lse - right[1]) <= 2 * _rms(same[1] - right[1]) + half_ulp * _rms(right[1])


def assert_close(result, right, limit):
    """Same shape, same NaN and Inf in the same places, and elsewhere no error above `limit`."""
    assert result.shape == right.shape
    finite = np.isfinite(right)
    np.testing.assert_array_equal(np.isfinite(result), finite)
    np.testing.assert_array_equal(result[~finite], right[~finite].astype(result.dtype))
    error = np.abs(result[finite].astype(right.dtype) - right[finite])
    assert error.size == 0 or error.max() <= limit


def assert_same_bits(result, right):
    """Equal to the last bit, the sign of zeros and the payload of NaN included."""
    assert result.dtype == right.dtype
    if result.tobytes() != right.tobytes():
        np.testing.assert_array_equal(result, right)  # shows where, unless only a sign differs
        raise AssertionError("equal numbers, different bits")


@contextlib.contextmanager
def using_isa(name):
    """Let the kernel use the named instruction set, and put the one before back."""
    before = _core.isa()
    _core.use_isa(name.removesuffix(_ALL_SIZES))
    rows_before = _core.use_matrix_from(0 if name.endswith(_ALL_SIZES) else -1)
    try:
        yield
    finally:
        _core.use_isa(before)
        _core.use_matrix_from(rows_before)


def weight_rounding(dtype):
    """Largest relative error that weights have on top of that of their arithmetic.

    The matrix unit multiplies weights as bfloat16 numbers where the values are such numbers.
    """
    return 2.0**-9 if _core.isa() == "amx" and np.dtype(dtype).name == "bfloat16" else 0.0


def run_python(code, folder, **environment):
    """Run `code` in a new interpreter, away from the sources; return the finished process."""
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=folder,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
    )


def _rms(x):
    """Root of the mean square."""
    return np.sqrt(np.mean(np.square(x)))


def _distance(a, b):
    """Largest finite difference of two arrays."""
    with np.errstate(invalid="ignore"):  # inf - inf
        return largest(a - b)


def largest(x):
    """Largest finite magnitude in `x`, 0 where there is none."""
    magnitude = np.abs(np.asarray(x))
    return magnitude[np.isfinite(magnitude)].max(initial=0)
