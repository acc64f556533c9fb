"""From the arguments of the public functions to one plain record that the compiled core takes.

`check`, `check_packed` and `check_weights` look at everything before any work starts. In the record
every operand has a head axis and a contiguous last axis, lengths and offsets are int64 per batch
entry, slopes and gates float64 per batch entry and head.
"""

import math
from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from . import _checks
from ._options import Options, read_attn_mask, read_return_lse
from ._typing import Array

# As mha_storage in src/contract/problem.h. bfloat16 is known by its name, since the package that
# brings it may not be installed.
FLOAT16, BFLOAT16, FLOAT32, FLOAT64 = range(2, 6)
ELEMENTS = {
    np.dtype(np.float32): FLOAT32,
    np.dtype(np.float64): FLOAT64,
    np.dtype(np.float16): FLOAT16,
}


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
    per_head: tuple[int, ...]  # (batch entries..., heads): what numbers per head broadcast to
    lse_shape: tuple[int, ...]
    out_shape: tuple[int, ...]
    one_head: bool
    scale: float
    softcap: float = field(default=0.0, init=False)
    window: tuple[int, int] = field(default=(_checks.UNBOUNDED, _checks.UNBOUNDED), init=False)
    is_causal: bool = field(default=False, init=False)  # already in the window
    query_offset: Array | None = field(default=None, init=False)
    ends_together: bool = field(default=False, init=False)  # query_offset is "end"
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
    dropout_p: float = field(default=0.0, init=False)
    dropout_seed: int | None = field(default=None, init=False)
    high: bool = field(default=False, init=False)  # precision "high" is enough
    return_lse: bool = field(default=False, init=False)
    out: Array | None = field(default=None, init=False)  # receives the result

    def of_head(self, head: int) -> "Call":
        """The same call for one query head alone."""
        group = self.query.shape[-3] // max(self.key.shape[-3], 1)
        only, kv_only = slice(head, head + 1), slice(head // group, head // group + 1)
        one = copy(self)
        one.query, one.key = self.query[..., only, :, :], self.key[..., kv_only, :, :]
        if self.mask is not None and self.mask.ndim >= 3 and self.mask.shape[-3] > 1:
            one.mask = self.mask[..., only, :, :]
        for name in ("alibi_slopes", "sinks", "head_mask"):
            numbers = getattr(self, name)
            if numbers is not None:
                setattr(one, name, np.ascontiguousarray(numbers[..., only]))
        return one

    @property
    def has_rows(self) -> bool:
        """Whether there is a row to compute, and so a use for numbers per batch entry and head."""
        return 0 not in self.lse_shape

    @property
    def lse_dtype(self) -> type[np.floating[Any]]:
        """Of the log-sum-exp: the dtype that the sums are kept in."""
        return np.float64 if self.element == FLOAT64 else np.float32


def check(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any,
    return_lse: Any,
    options: Options,
    given: Mapping[str, Any],
    queries: Any = None,
) -> Call:
    """Check the arguments of `attention`, or of `attention_weights` where `value` is None.

    `options` are those that the function takes, and `given` those that its caller gave.
    """
    query, key, value, element = _operands(query, key, value)
    dtype, one_head = query.dtype, query.ndim == 2
    if one_head:
        query, key, value = query[None], key[None], None if value is None else value[None]
    shape, key_shape = query.shape, key.shape
    n_query, head_width = shape[-2:]
    if value is None:
        if options.has_value:
            raise _checks.none("value")
        value_shape, out_width = key_shape, key_shape[-2]
    else:
        value_shape = value.shape
        out_width = value_shape[-1]
    batch_shape = shape[:-3]
    if not (shape == key_shape == value_shape):  # nothing to ask where all are alike
        batch_shape = _batch_shape(shape, key_shape, value_shape, value is not None)
        _check_sizes(shape, key_shape, value_shape, value is not None)
    per_head = (*batch_shape, shape[-3])
    lse_shape = (*per_head, n_query)
    if queries is not None:
        queries = _checks.chosen("queries", queries, n_query)
        lse_shape = (*per_head, len(queries))
    call = Call(
        _checks.readable(query),
        _checks.readable(key),
        None if value is None else _checks.readable(value),
        element,
        dtype,
        batch_shape,
        math.prod(batch_shape),
        per_head,
        lse_shape,
        (*lse_shape, out_width),
        one_head,
        _checks.default_scale(head_width),
    )
    if queries is not None:
        call.queries = queries
    if attn_mask is not None:
        read_attn_mask(call, attn_mask)
    if return_lse is not False:
        read_return_lse(call, return_lse)
    if given:
        options.read(call, given)
    return call


def check_packed(
    query: Any,
    key: Any,
    value: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    return_lse: Any,
    options: Options,
    given: Mapping[str, Any],
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
        (n_sequence, n_head),
        (n_query, n_head),
        (n_query, n_head, value.shape[-1]),
        False,
        _checks.default_scale(head_width),
    )
    call.cu_seqlens_q, call.cu_seqlens_k = cu_q, cu_k
    call.q_lengths, call.kv_lengths = np.diff(cu_q), np.diff(cu_k)
    read_return_lse(call, return_lse)
    options.read(call, given)
    return call


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
                raise TypeError(f"{name} has dtype {x.dtype}; expected {_checks.FLOATS}")
            ELEMENTS[x.dtype] = BFLOAT16  # known from now on: to ask for a name takes long
        if x.dtype != query.dtype:
            raise TypeError(f"{name} has dtype {x.dtype}; expected {query.dtype} like query")
        if packed_axes and x.ndim != 3:
            raise ValueError(f"{name} has shape {x.shape}; expected {packed_axes}")
        if x.ndim < 2:
            raise ValueError(
                f"{name} has shape {x.shape}; expected (..., heads, rows, width), or "
                "(rows, width) for one head"
            )
        if (x.ndim == 2) != (query.ndim == 2):
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
