"""From the arguments of the public functions to one plain record that the compiled core takes.

`check`, `check_packed` and `check_weights` look at everything before any work starts. In the record
every operand has a head axis and a contiguous last axis, lengths and offsets are int64 per batch
entry, slopes and gates float64 per batch entry and head.
"""

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from . import _checks
from ._typing import Array

# As mha_storage in src/contract/problem.h. bfloat16 is known by its name, since the package that
# brings it may not be installed.
BOOL, FLOAT16, BFLOAT16, FLOAT32, FLOAT64 = range(1, 6)
ELEMENTS = {
    np.dtype(np.float32): FLOAT32,
    np.dtype(np.float64): FLOAT64,
    np.dtype(np.float16): FLOAT16,
}
MASK_TYPES = {
    "bool": BOOL, "float16": FLOAT16, "bfloat16": BFLOAT16, "float32": FLOAT32, "float64": FLOAT64,
}  # fmt: skip
FLOATS = "float32, float64, float16 or bfloat16"
LARGEST_OFFSET = 1 << 60


@dataclass
class Call:
    """One checked call. What is None has no effect; what is not given is not even stored."""

    query: Array
    key: Array
    value: Array | None  # None: the weights are asked for
    element: int
    dtype: np.dtype[Any]
    batch_shape: tuple[int, ...]
    n_batch: int
    lse_shape: tuple[int, ...]
    out_shape: tuple[int, ...]
    one_head: bool
    scale: float = field(default=1.0, init=False)
    softcap: float = field(default=0.0, init=False)
    window: tuple[int, int] = field(default=(_checks.UNBOUNDED, _checks.UNBOUNDED), init=False)
    query_offset: Array | None = field(default=None, init=False)
    kv_lengths: Array | None = field(default=None, init=False)
    alibi_slopes: Array | None = field(default=None, init=False)
    sinks: Array | None = field(default=None, init=False)
    head_mask: Array | None = field(default=None, init=False)
    n_thread: int | None = field(default=None, init=False)
    mask: Array | None = field(default=None, init=False)
    mask_type: int = field(default=0, init=False)
    queries: Array | None = field(default=None, init=False)
    q_lengths: Array | None = field(default=None, init=False)
    cu_seqlens_q: Array | None = field(default=None, init=False)
    cu_seqlens_k: Array | None = field(default=None, init=False)
    statistics: Any = field(default=None, init=False)  # what to measure, instead of weights
    high: bool = field(default=False, init=False)  # precision "high" is enough

    @property
    def lse_dtype(self) -> type[np.floating[Any]]:
        """Of the log-sum-exp: the dtype that the sums are kept in."""
        return np.float64 if self.element == FLOAT64 else np.float32


def check(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any,
    is_causal: Any,
    window: Any,
    query_offset: Any,
    kv_lengths: Any,
    scale: Any,
    softcap: Any,
    alibi_slopes: Any,
    sinks: Any,
    head_mask: Any,
    num_threads: Any,
    queries: Any = None,
) -> Call:
    """Check the arguments of `attention`, or of `attention_weights` where `value` is None."""
    query, key, value, element = _operands(query, key, value)
    dtype, one_head = query.dtype, query.ndim == 2
    if one_head:
        query, key, value = query[None], key[None], None if value is None else value[None]
    shape, key_shape = query.shape, key.shape
    n_query, head_width = shape[-2:]
    n_key = key_shape[-2]
    if value is None:
        value_shape, out_width = key_shape, n_key
    else:
        value_shape = value.shape
        out_width = value_shape[-1]
    batch_shape = shape[:-3]
    if not (shape == key_shape == value_shape):  # nothing to ask where all are alike
        batch_shape = _batch_shape(shape, key_shape, value_shape, value is not None)
        _check_sizes(shape, key_shape, value_shape, value is not None)
    per_head = (*batch_shape, shape[-3])
    lse_shape = (*per_head, n_query)
    call = Call(
        _checks.readable(query),
        _checks.readable(key),
        None if value is None else _checks.readable(value),
        element,
        dtype,
        batch_shape,
        math.prod(batch_shape),
        lse_shape,
        (*lse_shape, out_width),
        one_head,
    )
    if attn_mask is not None:
        call.mask, call.mask_type = _mask(attn_mask, (*lse_shape, n_key))
    if kv_lengths is not None:
        call.kv_lengths = _checks.integers("kv_lengths", kv_lengths, batch_shape, 0, n_key)
    if queries is not None:
        call.queries = rows = _checks.chosen("queries", queries, n_query)
        call.lse_shape = (*per_head, len(rows))
        call.out_shape = (*call.lse_shape, out_width)
    call.scale = _checks.scale_factor(scale, head_width)
    _set_options(
        call,
        per_head,
        n_query,
        n_key if call.kv_lengths is None else call.kv_lengths,
        is_causal,
        window,
        query_offset,
        softcap,
        alibi_slopes,
        sinks,
        head_mask,
        num_threads,
    )
    return call


def check_packed(
    query: Any,
    key: Any,
    value: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    is_causal: Any,
    window: Any,
    query_offset: Any,
    scale: Any,
    softcap: Any,
    alibi_slopes: Any,
    sinks: Any,
    head_mask: Any,
    num_threads: Any,
) -> Call:
    """Check the arguments of `attention_varlen`."""
    query, key, value, element = _operands(query, key, value, "(rows, heads, width)")
    dtype = query.dtype
    query, key, value = query.swapaxes(0, 1), key.swapaxes(0, 1), value.swapaxes(0, 1)
    _check_sizes(query.shape, key.shape, value.shape, packed=True)
    n_head, n_query, head_width = query.shape
    cu_q = _checks.boundaries("cu_seqlens_q", cu_seqlens_q, n_query, "query")
    cu_k = _checks.boundaries("cu_seqlens_k", cu_seqlens_k, key.shape[1], "key")
    if len(cu_q) != len(cu_k):
        raise ValueError(
            f"cu_seqlens_k has {len(cu_k)} boundaries; expected {len(cu_q)} like cu_seqlens_q"
        )
    n_sequence = len(cu_q) - 1
    call = Call(
        _checks.readable(query),
        _checks.readable(key),
        _checks.readable(value),
        element,
        dtype,
        (),
        n_sequence,
        (n_query, n_head),
        (n_query, n_head, value.shape[-1]),
        one_head=False,
    )
    call.cu_seqlens_q, call.cu_seqlens_k = cu_q, cu_k
    call.q_lengths, call.kv_lengths = np.diff(cu_q), np.diff(cu_k)
    call.scale = _checks.scale_factor(scale, head_width)
    _set_options(
        call,
        (n_sequence, n_head),
        call.q_lengths,
        call.kv_lengths,
        is_causal,
        window,
        query_offset,
        softcap,
        alibi_slopes,
        sinks,
        head_mask,
        num_threads,
    )
    return call


def _set_options(
    call: Call,
    per_head: tuple[int, ...],
    n_query: Any,
    n_key: Any,
    is_causal: Any,
    window: Any,
    query_offset: Any,
    softcap: Any,
    alibi_slopes: Any,
    sinks: Any,
    head_mask: Any,
    num_threads: Any,
) -> None:
    """Check what both kinds of call take; `per_head` is (batch entries..., heads)."""
    if softcap is not None:
        call.softcap = _checks.softcap_or_zero(softcap)
    if window is not None or is_causal is not False:
        call.window = _window(window, is_causal)
    if type(query_offset) is not int or query_offset != 0:
        call.query_offset = _offset(query_offset, per_head[:-1], n_query, n_key)
    if alibi_slopes is not None:
        call.alibi_slopes = _checks.per_head("alibi_slopes", alibi_slopes, per_head)
    if sinks is not None:
        call.sinks = _checks.per_head_only("sinks", sinks, per_head[-1])
    if head_mask is not None:
        call.head_mask = _checks.per_head("head_mask", head_mask, per_head)
    if num_threads is not None:
        call.n_thread = _checks.positive_int("num_threads", num_threads)


def check_out(out: Any, call: Call) -> Array:
    """Check the array that is to receive the result of a call."""
    if not isinstance(out, np.ndarray):
        raise TypeError(f"out is of type {type(out).__name__}; expected a NumPy array")
    if out.dtype != call.dtype:
        raise TypeError(f"out has dtype {out.dtype}; expected {call.dtype} like query")
    expected = call.out_shape[1:] if call.one_head else call.out_shape
    if out.shape != expected:
        raise ValueError(f"out has shape {out.shape}; expected {expected}")
    if not out.flags.writeable:
        raise ValueError("out is read-only; expected a writeable array")
    return out


# ---- query, key, value ------------------------------------------------------------------------


def _operands(
    query: Any, key: Any, value: Any, packed_axes: str | None = None
) -> tuple[Any, Any, Any, int]:
    third = key if value is None else value
    if (
        # Asked in one expression: this is on the path of every small call. Dtypes are singletons.
        packed_axes is None
        and type(query) is type(key) is type(third) is np.ndarray
        and query.dtype is key.dtype is third.dtype
        and query.ndim >= 3
        and key.ndim >= 3
        and third.ndim >= 3
        and query.dtype in ELEMENTS
    ):
        return query, key, value, ELEMENTS[query.dtype]
    query, key = _checks.array("query", query), _checks.array("key", key)
    value = None if value is None else _checks.array("value", value)
    element = _check_kinds(query, key, key if value is None else value, packed_axes)
    return query, key, value, element


def _check_kinds(query: Array, key: Array, value: Array, packed_axes: str | None) -> int:
    """Name the first operand with a wrong dtype or number of axes; else return the element type."""
    for name, x in (("query", query), ("key", key), ("value", value)):
        if x.dtype not in ELEMENTS:
            if x.dtype.name != "bfloat16":
                raise TypeError(f"{name} has dtype {x.dtype}; expected {FLOATS}")
            ELEMENTS[x.dtype] = BFLOAT16  # known from now on: to ask for a name takes long
        if x.dtype != query.dtype:
            raise TypeError(f"{name} has dtype {x.dtype}; expected {query.dtype} like query")
        if packed_axes and x.ndim != 3:
            raise ValueError(f"{name} has shape {x.shape}; expected {packed_axes}")
        if x.ndim < 2 or (x.ndim == 2) != (query.ndim == 2):
            raise ValueError(
                f"{name} has shape {x.shape}; expected at least (heads, rows, width), or "
                f"(rows, width) for all of them, with query of shape {query.shape}"
            )
    return ELEMENTS[query.dtype]


def _batch_shape(
    query: tuple[int, ...], key: tuple[int, ...], value: tuple[int, ...], has_value: bool
) -> tuple[int, ...]:
    if query[:-3] == key[:-3] == value[:-3]:
        return query[:-3]
    try:
        return np.broadcast_shapes(query[:-3], key[:-3], value[:-3])
    except ValueError:
        and_value = f" and value {value}" if has_value else ""
        raise ValueError(
            f"key has shape {key}{and_value}; expected batch axes (all but the last three) "
            f"that broadcast with those of query, {query}"
        ) from None


def _check_sizes(
    query: tuple[int, ...],
    key: tuple[int, ...],
    value: tuple[int, ...],
    has_value: bool = True,
    packed: bool = False,
) -> None:
    n_head, _, head_width = query[-3:]
    n_kv_head, n_key, key_width = key[-3:]
    n_value_head, n_value, _ = value[-3:]
    multiple = n_head % n_kv_head == 0 if n_kv_head else n_head == 0
    if multiple and (key_width, n_value_head, n_value) == (head_width, n_kv_head, n_key):
        return

    def given(shape: tuple[int, ...]) -> tuple[int, ...]:
        return (shape[1], shape[0], shape[2]) if packed else shape  # as the caller gave it

    if key_width != head_width:
        raise ValueError(
            f"key has shape {given(key)}; expected head width {head_width} to match query"
        )
    if has_value and n_value_head != n_kv_head:
        raise ValueError(f"value has shape {given(value)}; expected {n_kv_head} heads to match key")
    if has_value and n_value != n_key:
        raise ValueError(f"value has shape {given(value)}; expected {n_key} rows to match key")
    raise ValueError(
        f"query has {n_head} heads; expected a multiple of the {n_kv_head} heads of key"
    )


# ---- what may be seen -------------------------------------------------------------------------


def _mask(attn_mask: Any, shape: tuple[int, ...]) -> tuple[Array, int]:
    mask = _checks.array("attn_mask", attn_mask)
    if mask.dtype.name not in MASK_TYPES:
        raise TypeError(f"attn_mask has dtype {mask.dtype}; expected bool, {FLOATS}")
    own = mask.shape
    fits = len(own) <= len(shape) and all(
        n in (1, whole) for n, whole in zip(own[::-1], shape[::-1], strict=False)
    )
    if not fits:
        raise ValueError(
            f"attn_mask has shape {own}; expected one that broadcasts to {shape} "
            "(batch axes, heads, queries, keys)"
        )
    return _checks.bits(mask), MASK_TYPES[mask.dtype.name]


def _window(window: Any, is_causal: Any) -> tuple[int, int]:
    left, right = _checks.window_bounds(window)
    return (left, 0) if _checks.flag("is_causal", is_causal) else (left, right)


def _offset(
    query_offset: Any, batch_shape: tuple[int, ...], n_query: Any, n_key: Any
) -> Array | None:
    """Return the position of query 0 per batch entry; None where all are 0."""
    if type(query_offset) is int and query_offset == 0:
        return None
    if query_offset is None or isinstance(query_offset, str):
        if query_offset != "end":
            error = TypeError if query_offset is None else ValueError
            raise error(f"query_offset is {query_offset!r}; expected an int, an int array or 'end'")
        at_end = n_key - n_query
        return np.full(batch_shape, at_end) if isinstance(at_end, int) else at_end
    return _checks.integers(
        "query_offset", query_offset, batch_shape, -LARGEST_OFFSET, LARGEST_OFFSET
    )
