"""Checks of single arguments: each returns the argument in plain form, or raises naming it."""

import math
import operator
import sys
from importlib import import_module
from typing import Any

import numpy as np
import numpy.typing as npt

from ._typing import Array

# Wider than any array; a position plus or minus it still fits int64. Also in src/_core.pyx.
UNBOUNDED = 1 << 61
FLOAT_NAMES = ("float16", "bfloat16", "float32", "float64")
# Of the arithmetic: the largest number, and the smallest one that is normal.
LIMITS: dict[type[np.floating[Any]], tuple[float, float]] = {
    dtype: (float(np.finfo(dtype).max), float(np.finfo(dtype).tiny))
    for dtype in (np.float32, np.float64)
}
FLOATS = "float32, float64, float16 or bfloat16"
BUFFER_DTYPES = frozenset(map(np.dtype, (np.bool_, np.float16, np.float32, np.float64)))


# ---- numbers ----------------------------------------------------------------------------------


def index(name: str, number: Any, expected: str) -> int:
    """Return an int, from anything that is one."""
    try:
        return operator.index(number)
    except TypeError:
        raise TypeError(f"{name} is {number!r}; expected {expected}") from None


def positive_int(name: str, number: Any) -> int:
    """Return an int of at least 1."""
    result = index(name, number, "an int of at least 1")
    if not 1 <= result < 1 << 31:
        raise ValueError(f"{name} is {result}; expected an int of at least 1")
    return result


def size(name: str, number: Any) -> int:
    """Return an int of at least 0."""
    result = index(name, number, "an int of at least 0")
    if result < 0:
        raise ValueError(f"{name} is {result}; expected an int of at least 0")
    return result


def float_dtype(dtype: Any) -> np.dtype[Any]:
    """Return one of the accepted dtypes, in native byte order."""
    if isinstance(dtype, str) and dtype == "bfloat16":
        return bfloat16("dtype is 'bfloat16'")
    try:
        result = np.dtype(dtype).newbyteorder("=")
    except TypeError:
        result = np.dtype(object)
    if dtype is None or result.name not in FLOAT_NAMES:  # None is float64 to NumPy
        names = f"{', '.join(FLOAT_NAMES[:-1])} or {FLOAT_NAMES[-1]}"
        raise TypeError(f"dtype is {dtype!r}; expected {names}")
    return result


def flag(name: str, value: Any) -> bool:
    """Return a bool, not just anything that is true."""
    if value is True or value is False:
        return value
    if not isinstance(value, (np.bool_, int)):
        raise TypeError(f"{name} is {value!r}; expected True or False")
    return bool(value)


def number(name: str, value: Any) -> float:
    """Return a float."""
    if isinstance(value, str):
        raise TypeError(f"{name} is {value!r}; expected a number")
    try:
        return float(value)
    except (TypeError, ValueError):
        raise TypeError(f"{name} is {value!r}; expected a number") from None


def default_scale(head_width: int) -> float:
    """Return 1 / sqrt(head_width), and 1 for an empty dot product."""
    return 1.0 / math.sqrt(head_width) if head_width else 1.0


def share(name: str, value: Any) -> float:
    """Return a float from 0 to below 1."""
    result = number(name, value)
    if not 0 <= result < 1:
        raise ValueError(f"{name} is {result}; expected a number of at least 0 and below 1")
    return result


def seed(name: str, value: Any) -> int:
    """Return an int of 64 bits."""
    result = index(name, value, "an int of 64 bits")
    if not 0 <= result < 1 << 64:
        raise ValueError(f"{name} is {result}; expected an int from 0 to 2**64 - 1")
    return result


def finite(name: str, value: Any) -> float:
    """Return a finite float."""
    result = number(name, value)
    if not math.isfinite(result):
        raise ValueError(f"{name} is {result}; expected a finite number")
    return result


def finite_above_0(name: str, value: Any) -> float:
    """Return a finite float above 0."""
    result = number(name, value)
    if not (result > 0 and math.isfinite(result)):
        raise ValueError(f"{name} is {result}; expected a finite number above 0")
    return result


def within_range(
    name: str, value: Any, dtype: Any, *, times: float = 1, above_0: bool = False
) -> None:
    """Refuse finite numbers that, `times` as large, the dtype of the arithmetic would make infinite.

    With `above_0` also those that it would make 0, or hold with few bits.
    """
    if dtype is np.float64 and times == 1 and not above_0:
        return
    # The scale of a small call is asked about here: no need to look closer at most of them.
    if type(value) is float and times == 1 and 2.0**-100 <= abs(value) <= 2.0**100:
        return
    largest, tiny = LIMITS[dtype]
    most, least = largest / times, tiny if above_0 else 0.0
    for number in np.abs(np.asarray(value, np.float64)).flat:
        if not (least <= number <= most) and math.isfinite(number):
            low = f"{least:.3g} to " if above_0 else "at most "
            raise ValueError(
                f"{name} is {number:.6g} in magnitude; expected {low}{most:.3g}, "
                f"since the arithmetic is in {np.dtype(dtype).name}"
            )


def high_is_enough(precision: Any) -> bool:
    """Accept the two words; return whether it is the lower one."""
    if precision not in ("highest", "high"):
        raise ValueError(f"precision is {precision!r}; expected 'highest' or 'high'")
    return bool(precision == "high")


def window_bounds(window: Any) -> tuple[int, int]:
    """Return (left, right), UNBOUNDED for each that is None."""
    expected = "a pair (left, right) of ints or None"
    if isinstance(window, str) or not hasattr(window, "__len__"):
        raise TypeError(f"window is {window!r}; expected {expected}")
    if len(window) != 2:
        raise ValueError(f"window is {window!r}; expected {expected}")
    left, right = window
    return _window_bound(window, left), _window_bound(window, right)


def _window_bound(window: Any, bound: Any) -> int:
    if bound is None:
        return UNBOUNDED
    result = index("window", bound, "bounds that are ints or None")
    if result < 0:
        raise ValueError(
            f"window is {window!r}; expected bounds of at least 0, or None for no bound"
        )
    return min(result, UNBOUNDED)


# ---- arrays -----------------------------------------------------------------------------------


def array(name: str, x: Any) -> Array:
    """Return a plain array of native byte order."""
    if type(x) is not np.ndarray:
        x = _converted(name, x)
    if not x.dtype.isnative:
        x = copied(x, x.dtype.newbyteorder("="))
    return x


def none(name: str) -> TypeError:
    """The error of an array that is not there."""
    return TypeError(f"{name} is None; expected an array")


def _converted(name: str, x: Any) -> Array:
    """Return as a plain array what is none, if nothing is lost by it."""
    if x is None:
        raise none(name)
    if isinstance(x, np.ma.MaskedArray):
        raise TypeError(
            f"{name} is a masked array, whose mask would be lost; expected a plain array"
        )
    torch = sys.modules.get("torch")  # who has a tensor has imported it
    if torch is not None and isinstance(x, torch.Tensor):
        return _from_tensor(name, x, torch)
    try:
        return np.asarray(x)
    except ValueError as error:
        raise ValueError(f"{name} is no array: {error}") from None


def _from_tensor(name: str, x: Any, torch: Any) -> Array:
    """See a torch tensor as an array, without a copy."""
    if x.requires_grad:
        raise TypeError(
            f"{name} is a torch tensor that requires grad, and its gradient would be lost; "
            f"pass {name}.detach()"
        )
    if x.device.type != "cpu":
        raise TypeError(f"{name} is a torch tensor on {x.device}; pass {name}.cpu()")
    try:
        if x.dtype == torch.bfloat16:
            return (
                x.view(torch.int16).numpy().view(bfloat16(f"{name} is a torch tensor of bfloat16"))
            )
        return x.numpy()
    except (RuntimeError, TypeError) as error:  # sparse, quantised, conjugated...
        if isinstance(error, TypeError) and name in str(error):
            raise
        raise TypeError(f"{name} is a torch tensor that NumPy cannot see: {error}") from None


def bfloat16(what: str) -> np.dtype[Any]:
    """Return the dtype, which another package has."""
    try:
        return np.dtype(import_module("ml_dtypes").bfloat16)
    except ModuleNotFoundError:
        raise TypeError(
            f"{what}, which NumPy has from the package ml_dtypes: pip install ml_dtypes"
        ) from None


def readable(x: Array) -> Array:
    """Return `x`, or a copy where the kernel cannot read its rows in place."""
    flags = x.flags
    # `carray` is what nearly all are: contiguous, aligned and writeable.
    if not (flags.carray or (flags.aligned and (flags.c_contiguous or has_whole_rows(x)))):
        x = copied(x, x.dtype)
    return x if x.dtype in BUFFER_DTYPES else bits(x)


def has_whole_rows(x: Array) -> bool:
    """Whether the elements along the last axis are neighbours."""
    return x.shape[-1] <= 1 or x.strides[-1] == x.itemsize


def bits(x: Array) -> Array:
    """Return `x` as something the buffer protocol knows: bfloat16 as its 16 bits."""
    return x if x.dtype in BUFFER_DTYPES else x.view(np.uint16)


def copied(x: Array, dtype: np.dtype[Any]) -> Array:
    """Copy to C order, without writing out axes that are broadcast (stride 0), but the last."""
    outer = zip(x.shape[:-1], x.strides, strict=False)
    stored = x[tuple(slice(1 if n > 1 and s == 0 else None) for n, s in outer)]
    copy = np.empty(stored.shape, dtype)
    np.copyto(copy, stored)
    return np.broadcast_to(copy, x.shape)


def result(name: str, x: Any, shape: tuple[int, ...], dtype: np.dtype[Any], like: str) -> Array:
    """Return the array, if it can receive a result of this shape and dtype."""
    if type(x) is not np.ndarray:  # to ask for numpy.ma is to import it
        if isinstance(x, np.ma.MaskedArray):
            raise TypeError(
                f"{name} is a masked array, whose mask would be kept; expected a plain array"
            )
        if not isinstance(x, np.ndarray):
            raise TypeError(f"{name} is of type {type(x).__name__}; expected a NumPy array")
    if x.dtype != dtype:
        raise TypeError(f"{name} has dtype {x.dtype}; expected {dtype} like {like}")
    if x.shape != shape:
        raise ValueError(f"{name} has shape {x.shape}; expected {shape}")
    if not x.flags.writeable:
        raise ValueError(f"{name} is read-only; expected a writeable array")
    return x


def filled(shape: tuple[int, ...], number: int) -> Array:
    """Return an array of one int64 number; `np.full` takes four times as long."""
    result = np.empty(shape, np.int64)
    result.fill(number)
    return result


def integers(
    name: str, x: Any, shape: tuple[int, ...], low: int, high: int, wanted: bool = True
) -> Array:
    """Return int64 numbers between low and high, broadcast to `shape`."""
    if type(x) is int and wanted and low <= x <= high:
        return filled(shape, x)
    numbers = array(name, x)
    if numbers.dtype.kind not in "iu" and numbers.size:
        raise TypeError(f"{name} has dtype {numbers.dtype}; expected integers")
    if numbers.size and not (low <= int(numbers.min()) and int(numbers.max()) <= high):
        raise ValueError(
            f"{name} holds {int(numbers.min())} to {int(numbers.max())}; expected {low} to {high}"
        )
    return broadcast(name, numbers, shape, np.int64, wanted)


def broadcast(
    name: str, x: Array, shape: tuple[int, ...], dtype: npt.DTypeLike, wanted: bool = True
) -> Array:
    """Return `x` as a contiguous array of the shape.

    It is only checked, and nothing of that size is made, where the numbers are not `wanted`: a
    result without rows may have any number of batch entries.
    """
    try:
        view = np.broadcast_to(x, shape)
    except ValueError:
        raise ValueError(
            f"{name} has shape {x.shape}; expected one that broadcasts to {shape}"
        ) from None
    # a copy, since a contiguous array need not be an aligned one
    return np.array(view, dtype, order="C") if wanted else np.empty(0, dtype)


def empty(shape: tuple[int, ...], dtype: npt.DTypeLike) -> Array:
    """Return a new array; MemoryError also where no address could count its bytes."""
    try:
        return np.empty(shape, dtype)
    except (ValueError, OverflowError):
        raise MemoryError(
            f"no memory for an array of shape {shape} and dtype {np.dtype(dtype)}"
        ) from None


def reals(name: str, x: Any) -> Array:
    """Return an array of any real dtype."""
    result = array(name, x)
    if result.dtype.kind not in "fiub" and result.dtype.name != "bfloat16":
        raise TypeError(f"{name} has dtype {result.dtype}; expected real numbers")
    return result


def per_head(name: str, x: Any, shape: tuple[int, ...], wanted: bool = True) -> Array:
    """Return float64 numbers per batch entry and head; `shape` ends with the number of heads."""
    numbers = reals(name, x)
    if numbers.ndim == 0 or numbers.shape[-1] != shape[-1]:
        raise ValueError(
            f"{name} has shape {numbers.shape}; expected ({shape[-1]},), one per head, or {shape}"
        )
    return broadcast(name, numbers, shape, np.float64, wanted)


def per_head_only(name: str, x: Any, n_head: int) -> Array:
    """Return float64 numbers, exactly one per head."""
    numbers = reals(name, x)
    if numbers.shape != (n_head,):
        raise ValueError(f"{name} has shape {numbers.shape}; expected ({n_head},), one per head")
    return np.array(numbers, np.float64)


def chosen(name: str, which: Any, n: int) -> Array:
    """Return the numbers that an index (int, slice, list or array) picks from 0 ... n - 1."""
    expected = "an int, a slice, or ints or bools"
    if which is None:
        raise TypeError(f"{name} is None; expected {expected}")
    if isinstance(which, slice):
        try:
            return np.arange(*which.indices(n), dtype=np.int64)
        except (TypeError, ValueError) as error:
            raise type(error)(f"{name} is {which!r}; expected {expected} ({error})") from None
    picked = array(name, which)
    if picked.ndim == 0 and picked.dtype.kind not in "iu":
        raise TypeError(f"{name} is {which!r} of dtype {picked.dtype}; expected {expected}")
    if picked.size and picked.dtype.kind not in "iub":
        raise TypeError(f"{name} has dtype {picked.dtype}; expected {expected}")
    if picked.ndim > 1:
        raise ValueError(f"{name} has {picked.ndim} axes; expected an int, a slice or one axis")
    if picked.dtype.kind == "b":
        if len(picked) != n:
            raise ValueError(f"{name} has {len(picked)} bools; expected {n}, or an index into {n}")
        return np.flatnonzero(picked).astype(np.int64)
    if picked.size and not (-n <= int(picked.min()) and int(picked.max()) < n):
        raise ValueError(
            f"{name} holds {int(picked.min())} to {int(picked.max())}; expected an index into {n}"
        )
    numbers = np.atleast_1d(picked).astype(np.int64)
    return np.where(numbers < 0, numbers + n, numbers)


def boundaries(name: str, x: Any, n_row: int, rows_of: str) -> Array:
    """Return the n + 1 boundaries of n packed sequences as int64."""
    if x is None:
        raise TypeError(f"{name} is None; expected integers, (sequences + 1,)")
    result = array(name, x)
    if result.dtype.kind not in "iu":
        raise TypeError(f"{name} has dtype {result.dtype}; expected integers")
    if result.ndim != 1 or result.size == 0:
        raise ValueError(f"{name} has shape {result.shape}; expected (sequences + 1,)")
    # Neighbours are compared, not subtracted: a difference can wrap around.
    if result[0] != 0 or (result[1:] < result[:-1]).any():
        raise ValueError(f"{name} is {result}; expected boundaries that rise from 0")
    if result[-1] != n_row:
        raise ValueError(f"{name} ends at {result[-1]}; expected {n_row}, the rows of {rows_of}")
    return np.array(result, np.int64)
