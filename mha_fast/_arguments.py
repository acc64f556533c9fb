"""Every check of the arguments and every message about them.

`check` looks at everything before any work starts and returns one plain record whose operands the
compiled core can take as they are: a head axis on each, the last axis contiguous, lengths and
offsets as int64 per batch entry, slopes and gates as float64 per batch entry and head.
"""

import math
import operator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ._typing import Array

# As mha_mask_type in src/kernels.h.
MASK_TYPES = {"bool": 1, "float16": 2, "bfloat16": 3, "float32": 4, "float64": 5}
DTYPES = (np.dtype(np.float32), np.dtype(np.float64))
# Wider than any array; a position plus or minus it still fits int64.
UNBOUNDED = 1 << 61
LARGEST_OFFSET = 1 << 60


@dataclass(slots=True)
class Call:
    """One checked call. The numbers that are None have no effect."""

    query: Array
    key: Array
    value: Array
    batch_shape: tuple[int, ...]
    mask: Array | None
    mask_type: int
    kv_lengths: Array | None
    query_offset: Array | None
    window: tuple[int, int]
    scale: float
    softcap: float
    alibi_slopes: Array | None
    sinks: Array | None
    head_mask: Array | None
    n_thread: int | None
    one_head: bool
    out: Array | None

    @property
    def out_shape(self) -> tuple[int, ...]:
        """(..., n_head, n_query, value_width)."""
        return (*self.batch_shape, *self.query.shape[-3:-1], self.value.shape[-1])

    @property
    def lse_shape(self) -> tuple[int, ...]:
        """(..., n_head, n_query)."""
        return (*self.batch_shape, *self.query.shape[-3:-1])


def check(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    *,
    is_causal: Any = False,
    window: Any = None,
    query_offset: Any = 0,
    kv_lengths: Any = None,
    scale: Any = None,
    softcap: Any = None,
    alibi_slopes: Any = None,
    sinks: Any = None,
    head_mask: Any = None,
    return_lse: Any = False,
    precision: Any = "highest",
    out: Any = None,
    num_threads: Any = None,
) -> Call:
    """Check the arguments of `attention` and normalise them."""
    query, key, value = _operands(query, key, value)
    one_head = query.ndim == 2
    batch_shape = _batch_shape(query, key, value)
    if one_head:
        query, key, value = query[None], key[None], value[None]
    _check_sizes(query, key, value)
    n_head, n_query, head_width = query.shape[-3:]
    n_key = key.shape[-2]

    mask, mask_type = None, 0
    if attn_mask is not None:
        mask, mask_type = _mask(attn_mask, (*batch_shape, n_head, n_query, n_key))
    lengths = None if kv_lengths is None else _lengths(kv_lengths, batch_shape, n_key)
    offset = _offset(query_offset, batch_shape, n_query, n_key, lengths)
    left, right = _window(window)
    if _flag("is_causal", is_causal):
        right = 0
    _flag("return_lse", return_lse)
    if precision not in ("highest", "high"):
        raise ValueError(f"precision is {precision!r}; expected 'highest' or 'high'")
    per_head = (*batch_shape, n_head)
    return Call(
        query=_readable(query),
        key=_readable(key),
        value=_readable(value),
        batch_shape=batch_shape,
        mask=mask,
        mask_type=mask_type,
        kv_lengths=lengths,
        query_offset=offset,
        window=(left, right),
        scale=_scale(scale, head_width),
        softcap=_softcap(softcap),
        alibi_slopes=_per_head("alibi_slopes", alibi_slopes, per_head),
        sinks=_sinks(sinks, n_head),
        head_mask=_per_head("head_mask", head_mask, per_head),
        n_thread=None if num_threads is None else positive_int("num_threads", num_threads),
        one_head=one_head,
        out=None if out is None else _out(out, query, value, batch_shape, one_head),
    )


def positive_int(name: str, number: Any) -> int:
    """Return `number` as an int of at least 1."""
    result = _index(name, number, "an int of at least 1")
    if not 1 <= result < 1 << 31:
        raise ValueError(f"{name} is {result}; expected an int of at least 1")
    return result


# ---- query, key, value ------------------------------------------------------------------------


def _operands(query: Any, key: Any, value: Any) -> tuple[Array, Array, Array]:
    arrays = (_array("query", query), _array("key", key), _array("value", value))
    dtype, n_axis = arrays[0].dtype, arrays[0].ndim
    # Asked in one expression first: this is on the path of every small call.
    plain = dtype in DTYPES and dtype == arrays[1].dtype == arrays[2].dtype
    if not (plain and n_axis >= 3 and arrays[1].ndim >= 3 and arrays[2].ndim >= 3):
        _check_kinds(*arrays)
    return arrays


def _check_kinds(*arrays: Array) -> None:
    """Name the first of query, key and value with a wrong dtype or number of axes, if one has."""
    first = arrays[0]
    for name, x in zip(("query", "key", "value"), arrays, strict=True):
        if x.dtype not in DTYPES:
            raise TypeError(f"{name} has dtype {x.dtype}; expected float32 or float64")
        if x.dtype != first.dtype:
            raise TypeError(f"{name} has dtype {x.dtype}; expected {first.dtype} like query")
        if x.ndim < 2 or (x.ndim == 2) != (first.ndim == 2):
            raise ValueError(
                f"{name} has shape {x.shape}; expected at least (heads, rows, width), or "
                f"(rows, width) for all three, with query of shape {first.shape}"
            )


def _array(name: str, x: Any) -> Array:
    """Return `x` as a plain array of native byte order."""
    if type(x) is not np.ndarray:
        if isinstance(x, np.ma.MaskedArray):
            raise TypeError(
                f"{name} is a masked array, whose mask would be lost; expected a plain array"
            )
        x = np.asarray(x)
    if not x.dtype.isnative:
        x = _copied(x, x.dtype.newbyteorder("="))
    return x


def _batch_shape(query: Array, key: Array, value: Array) -> tuple[int, ...]:
    shape = query.shape[:-3]
    if key.shape[:-3] == shape and value.shape[:-3] == shape:
        return shape
    try:
        return np.broadcast_shapes(shape, key.shape[:-3], value.shape[:-3])
    except ValueError:
        raise ValueError(
            f"key has shape {key.shape} and value {value.shape}; expected batch axes (all but the "
            f"last three) that broadcast with those of query, {query.shape}"
        ) from None


def _check_sizes(query: Array, key: Array, value: Array) -> None:
    n_head, n_kv_head = query.shape[-3], key.shape[-3]
    if key.shape[-1] != query.shape[-1]:
        raise ValueError(
            f"key has shape {key.shape}; expected head width {query.shape[-1]} to match query"
        )
    if value.shape[-3] != n_kv_head:
        raise ValueError(f"value has shape {value.shape}; expected {n_kv_head} heads to match key")
    if value.shape[-2] != key.shape[-2]:
        raise ValueError(
            f"value has shape {value.shape}; expected {key.shape[-2]} rows to match key"
        )
    if n_head % n_kv_head if n_kv_head else n_head:
        raise ValueError(
            f"query has {n_head} heads; expected a multiple of the {n_kv_head} heads of key"
        )


def _readable(x: Array) -> Array:
    """Return `x`, or a copy where the kernel cannot read it in place."""
    if x.flags.aligned and (x.shape[-1] <= 1 or x.strides[-1] == x.itemsize):
        return x
    return _copied(x, x.dtype)


def _copied(x: Array, dtype: np.dtype[Any]) -> Array:
    """Copy to C order, without writing out axes that are broadcast (stride 0), but the last."""
    outer = zip(x.shape[:-1], x.strides, strict=False)
    stored = x[tuple(slice(1 if n > 1 and s == 0 else None) for n, s in outer)]
    copy = np.empty(stored.shape, dtype)
    np.copyto(copy, stored)
    return np.broadcast_to(copy, x.shape)


# ---- what may be seen -------------------------------------------------------------------------


def _mask(attn_mask: Any, shape: tuple[int, ...]) -> tuple[Array, int]:
    mask = _array("attn_mask", attn_mask)
    if mask.dtype.name not in MASK_TYPES:
        raise TypeError(
            f"attn_mask has dtype {mask.dtype}; expected bool, float16, bfloat16, float32 or "
            "float64"
        )
    own = mask.shape
    fits = len(own) <= len(shape) and all(
        n in (1, whole) for n, whole in zip(own[::-1], shape[::-1], strict=False)
    )
    if not fits:
        raise ValueError(
            f"attn_mask has shape {own}; expected one that broadcasts to {shape} "
            "(batch axes, heads, queries, keys)"
        )
    if mask.dtype.name == "bfloat16":  # not NumPy's own, so no buffer can be had of it
        return mask.view(np.uint16), MASK_TYPES["bfloat16"]
    return mask, MASK_TYPES[mask.dtype.name]


def _integers(name: str, x: Any, batch_shape: tuple[int, ...], low: int, high: int) -> Array:
    """Return `x` as int64, one number per batch entry."""
    array = _array(name, x)
    if array.dtype.kind not in "iu" and array.size:
        raise TypeError(f"{name} has dtype {array.dtype}; expected integers")
    if array.size and not (low <= int(array.min()) and int(array.max()) <= high):
        raise ValueError(
            f"{name} holds {int(array.min())} to {int(array.max())}; expected {low} to {high}"
        )
    return _broadcast(name, array, batch_shape, np.int64)


def _broadcast(name: str, array: Array, shape: tuple[int, ...], dtype: npt.DTypeLike) -> Array:
    try:
        return np.ascontiguousarray(np.broadcast_to(array, shape), dtype)
    except ValueError:
        raise ValueError(
            f"{name} has shape {array.shape}; expected one that broadcasts to {shape}"
        ) from None


def _lengths(kv_lengths: Any, batch_shape: tuple[int, ...], n_key: int) -> Array:
    return _integers("kv_lengths", kv_lengths, batch_shape, 0, n_key)


def _offset(
    query_offset: Any,
    batch_shape: tuple[int, ...],
    n_query: int,
    n_key: int,
    lengths: Array | None,
) -> Array | None:
    """Return the position of query 0 per batch entry; None where all are 0."""
    if isinstance(query_offset, str):
        if query_offset != "end":
            raise ValueError(
                f"query_offset is {query_offset!r}; expected an int, an int array or 'end'"
            )
        if lengths is not None:
            return lengths - n_query
        query_offset = n_key - n_query
    elif type(query_offset) is int and query_offset == 0:
        return None
    return _integers("query_offset", query_offset, batch_shape, -LARGEST_OFFSET, LARGEST_OFFSET)


def _window(window: Any) -> tuple[int, int]:
    if window is None:
        return UNBOUNDED, UNBOUNDED
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
    result = _index("window", bound, "bounds that are ints or None")
    if result < 0:
        raise ValueError(
            f"window is {window!r}; expected bounds of at least 0, or None for no bound"
        )
    return min(result, UNBOUNDED)


# ---- numbers ----------------------------------------------------------------------------------


def _index(name: str, number: Any, expected: str) -> int:
    try:
        return operator.index(number)
    except TypeError:
        raise TypeError(f"{name} is {number!r}; expected {expected}") from None


def _flag(name: str, flag: Any) -> bool:
    if not isinstance(flag, (bool, np.bool_, int)):
        raise TypeError(f"{name} is {flag!r}; expected True or False")
    return bool(flag)


def _number(name: str, number: Any) -> float:
    if isinstance(number, str):
        raise TypeError(f"{name} is {number!r}; expected a number")
    try:
        return float(number)
    except (TypeError, ValueError):
        raise TypeError(f"{name} is {number!r}; expected a number") from None


def _scale(scale: Any, head_width: int) -> float:
    if scale is None:
        return 1.0 / math.sqrt(head_width) if head_width else 1.0
    result = _number("scale", scale)
    if not math.isfinite(result):
        raise ValueError(f"scale is {result}; expected a finite number")
    return result


def _softcap(softcap: Any) -> float:
    """Return the cap, 0 for none."""
    if softcap is None:
        return 0.0
    result = _number("softcap", softcap)
    if not (result > 0 and math.isfinite(result)):
        raise ValueError(f"softcap is {result}; expected a finite number above 0")
    return result


def _reals(name: str, x: Any) -> Array:
    array = _array(name, x)
    if array.dtype.kind not in "fiub" and array.dtype.name != "bfloat16":
        raise TypeError(f"{name} has dtype {array.dtype}; expected real numbers")
    return array


def _per_head(name: str, x: Any, shape: tuple[int, ...]) -> Array | None:
    if x is None:
        return None
    array = _reals(name, x)
    if array.ndim == 0 or array.shape[-1] != shape[-1]:
        raise ValueError(
            f"{name} has shape {array.shape}; expected ({shape[-1]},), one per head, or {shape}"
        )
    return _broadcast(name, array, shape, np.float64)


def _sinks(sinks: Any, n_head: int) -> Array | None:
    if sinks is None:
        return None
    array = _reals("sinks", sinks)
    if array.shape != (n_head,):
        raise ValueError(f"sinks has shape {array.shape}; expected ({n_head},), one per head")
    return np.ascontiguousarray(array, np.float64)


# ---- out --------------------------------------------------------------------------------------


def _out(
    out: Any, query: Array, value: Array, batch_shape: tuple[int, ...], one_head: bool
) -> Array:
    if not isinstance(out, np.ndarray):
        raise TypeError(f"out is of type {type(out).__name__}; expected a NumPy array")
    if out.dtype != query.dtype:
        raise TypeError(f"out has dtype {out.dtype}; expected {query.dtype} like query")
    expected = (*batch_shape, *query.shape[-3:-1], value.shape[-1])
    if one_head:
        expected = expected[1:]
    if out.shape != expected:
        raise ValueError(f"out has shape {out.shape}; expected {expected}")
    if not out.flags.writeable:
        raise ValueError("out is read-only; expected a writeable array")
    return out
