"""The three functions over the compiled loop: checks before it, the caller's shape after it."""

from __future__ import annotations

from typing import Literal, Unpack, overload

import numpy as np

from . import _arguments, _checks, _core
from ._options import (
    ATTENTION,
    VARLEN,
    WEIGHTS,
    AttentionOptions,
    VarlenOptions,
    WeightsOptions,
)
from ._typing import Array, ArrayLike, Index
from .config import threads_asked_for


@overload
def attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    attn_mask: ArrayLike | None = ...,
    *,
    return_lse: Literal[False] = ...,
    **options: Unpack[AttentionOptions],
) -> Array: ...


@overload
def attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    attn_mask: ArrayLike | None = ...,
    *,
    return_lse: Literal[True],
    **options: Unpack[AttentionOptions],
) -> tuple[Array, Array]: ...


@overload
def attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    attn_mask: ArrayLike | None = ...,
    *,
    return_lse: bool,
    **options: Unpack[AttentionOptions],
) -> Array | tuple[Array, Array]: ...


@ATTENTION.shown
def attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    attn_mask: ArrayLike | None = None,
    *,
    return_lse: bool = False,
    **options: Unpack[AttentionOptions],
) -> Array | tuple[Array, Array]:
    """Multi-head attention, ``softmax(scale * query @ key.T) @ value`` for every head.

    The product, the softmax and the second product run block by block; no array of
    ``n_query * n_key`` is ever made, with no option.

    Parameters
    ----------
    query : array, (..., n_head, n_query, head_width)
        float32, float64, float16 or bfloat16 (``ml_dtypes.bfloat16``), any strides.
        (n_head, n_query, head_width) has no batch, and (n_query, head_width) is one head.
    key : array, (..., n_kv_head, n_key, head_width)
        Same dtype. `n_head` must be a multiple of `n_kv_head`; query head ``h`` reads key/value
        head ``h // (n_head // n_kv_head)``. Batch axes broadcast without a copy.
    value : array, (..., n_kv_head, n_key, value_width)
        Same dtype. `head_width` and `value_width` may differ and may be any size, also 0.
    attn_mask : array, optional
        Broadcastable to (..., n_head, n_query, n_key); read through its strides. Bool: True lets
        the key through. Float of any width: added to the scaled score; -inf excludes the key,
        every finite number is an ordinary addend.
    is_causal : bool
        A query at position p does not see the keys behind p. See `query_offset`.
    window : (left, right), optional
        A query at position p sees keys ``p - left`` to ``p + right``, both included. None on
        either side is no bound.
    query_offset : int, int array broadcastable to the batch axes, or "end"
        Position of query 0 on the axis of the keys. 0 starts both together; "end" puts the last
        query on the last valid key, as in decoding with a cache::

            is_causal, 2 queries, 4 keys     query_offset=0     query_offset="end"
                                             1 0 0 0            1 1 1 0
                                             1 1 0 0            1 1 1 1

    kv_lengths : int array broadcastable to the batch axes, optional
        Number of valid keys, 0 to n_key. The rows behind it are never read.
    scale : float, optional
        Default ``1 / sqrt(head_width)``. Any finite number.
    softcap : float, optional
        Above 0: scaled scores become ``softcap * tanh(score / softcap)``, before any mask.
    alibi_slopes : array, (n_head,) or (..., n_head), optional
        ``slope * abs(p - j)`` is subtracted from the score of a query at p and key j.
    sinks : array, (n_head,), optional
        One more logit per head that takes weight but has no value.
    head_mask : array, (n_head,) or (..., n_head), optional
        Gate on the output of each head. A gate of 0 gives exactly 0 whatever the head holds.
    dropout_p : float
        From 0 to below 1: this share of the weights is dropped, after the softmax, and the others
        are divided by ``1 - dropout_p``. `lse` is that without dropout.
    dropout_seed : int of 64 bits, optional
        Needed where `dropout_p` is above 0. Which weights are dropped follows from the seed and the
        place of each: see `reference.dropout_mask`. `attention_backward` wants the same seed.
    return_lse : bool
        Also return the log-sum-exp of each query's scores.
    precision : {"highest", "high"}
        "high" allows float32 products a relative error of about 2**-16 where that is faster: in
        long calls on a CPU with a matrix unit (AMX). Everywhere else both give the same.
    out : array, (..., n_head, n_query, value_width), optional
        Receives the result. Exact shape and dtype, any strides; may overlap the inputs.
    num_threads : int, optional
        At most this many threads; default `get_num_threads()`. Small calls take one. The result
        is the same to the bit.

    Returns
    -------
    out : array, (..., n_head, n_query, value_width)
        0 where a query has no key left.
    lse : array, (..., n_head, n_query)
        With `return_lse`: natural log-sum-exp of the scores that are left (and of the sink);
        -inf where there is none. float64 for float64, otherwise float32.

    Raises
    ------
    TypeError
        A dtype or kind of argument that is not accepted.
    ValueError
        A shape or a value that does not fit. Nothing has been written by then.
    MemoryError
        No memory for the result or the workspace.

    Notes
    -----
    An excluded key has no influence, even if its key or value row holds NaN or Inf. What is not
    excluded propagates. A key whose score is -inf by arithmetic has weight 0.

    16-bit inputs are widened to float32 tile by tile, computed in float32 and rounded once at the
    end; a float mask keeps its own dtype until then. Long calls without dropout use the matrix unit
    of a CPU that has one: float32 and float16 as sums of products of bfloat16 parts, with no larger an error;
    bfloat16 with weights rounded to bfloat16, so that `lse` is within 2**-9.

    An operand whose last axis is not contiguous, that is not aligned or of foreign byte order is
    copied; every other one is read where it lies.

    Time is ``n_head * n_query * n_key * (head_width + value_width)`` multiply-adds over the
    visible key blocks; memory is a few hundred KiB per thread, up to
    2 MiB where the matrix unit is used. With up to 8 query rows per
    key/value head (decoding), keys are split into pieces of 512 whose results are joined in
    order.

    References
    ----------
    Scaled dot products: Vaswani et al. 2017, section 3.2.1. Online softmax: Milakov and
    Gimelshein 2018. Blocks: Dao et al. 2022, section 3.1. Split keys: Dao et al. 2023 (flash
    decoding). Grouped heads: Ainslie et al. 2023. ALiBi: Press et al. 2022, section 3. Sinks: Xiao
    et al. 2024. Gates: Michel et al. 2019, section 2.3.

    Examples
    --------
    >>> import numpy as np, mha_fast
    >>> x = np.random.default_rng(0).standard_normal((2, 8, 100, 64), dtype=np.float32)
    >>> mha_fast.attention(x, x, x, is_causal=True).shape
    (2, 8, 100, 64)
    """
    return _compute(_arguments.check(query, key, value, attn_mask, return_lse, ATTENTION, options))


@overload
def attention_varlen(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    cu_seqlens_q: ArrayLike,
    cu_seqlens_k: ArrayLike,
    *,
    return_lse: Literal[False] = ...,
    **options: Unpack[VarlenOptions],
) -> Array: ...


@overload
def attention_varlen(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    cu_seqlens_q: ArrayLike,
    cu_seqlens_k: ArrayLike,
    *,
    return_lse: Literal[True],
    **options: Unpack[VarlenOptions],
) -> tuple[Array, Array]: ...


@overload
def attention_varlen(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    cu_seqlens_q: ArrayLike,
    cu_seqlens_k: ArrayLike,
    *,
    return_lse: bool,
    **options: Unpack[VarlenOptions],
) -> Array | tuple[Array, Array]: ...


@VARLEN.shown
def attention_varlen(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    cu_seqlens_q: ArrayLike,
    cu_seqlens_k: ArrayLike,
    *,
    return_lse: bool = False,
    **options: Unpack[VarlenOptions],
) -> Array | tuple[Array, Array]:
    """Attention over sequences of any lengths, packed one after the other without padding.

    Each sequence attends to itself only, as in a call of `attention` of its own, to the bit. All
    of them share one parallel region, the most work first.

    Parameters
    ----------
    query : array, (n_row_q, n_head, head_width)
        The rows of all sequences. float32, float64, float16 or bfloat16.
    key : array, (n_row_k, n_kv_head, head_width)
    value : array, (n_row_k, n_kv_head, value_width)
    cu_seqlens_q, cu_seqlens_k : int array, (n_sequence + 1,)
        Boundaries: sequence s is rows ``cu[s]`` to ``cu[s + 1] - 1``. They rise from 0 to the
        number of rows; sequences of length 0 are allowed on either side.
    query_offset : int, int array (n_sequence,), or "end"
        Position of each sequence's query 0 among its own keys.
    alibi_slopes, head_mask : array, (n_head,) or (n_sequence, n_head), optional
    is_causal, window, scale, softcap, sinks, return_lse, precision, num_threads
        As in `attention`.
    dropout_p, dropout_seed
        As in `attention`; sequences count as batch entries.
    out : array, (n_row_q, n_head, value_width), optional

    Returns
    -------
    out : array, (n_row_q, n_head, value_width)
    lse : array, (n_row_q, n_head)
        With `return_lse`.

    Raises
    ------
    TypeError, ValueError, MemoryError
        As `attention`; also for boundaries that do not fit each other or the rows.

    References
    ----------
    Names and layout of the boundaries: ``flash_attn_varlen_func`` of flash-attention.

    Examples
    --------
    >>> import numpy as np, mha_fast
    >>> x = np.random.default_rng(0).standard_normal((12, 8, 64), dtype=np.float32)
    >>> mha_fast.attention_varlen(x, x, x, [0, 5, 5, 12], [0, 5, 5, 12]).shape
    (12, 8, 64)
    """
    call = _arguments.check_packed(
        query, key, value, cu_seqlens_q, cu_seqlens_k, return_lse, VARLEN, options
    )
    return _compute(call)


@overload
def attention_weights(
    query: ArrayLike,
    key: ArrayLike,
    attn_mask: ArrayLike | None = ...,
    *,
    queries: Index | None = ...,
    heads: Index | None = ...,
    return_lse: Literal[False] = ...,
    **options: Unpack[WeightsOptions],
) -> Array: ...


@overload
def attention_weights(
    query: ArrayLike,
    key: ArrayLike,
    attn_mask: ArrayLike | None = ...,
    *,
    queries: Index | None = ...,
    heads: Index | None = ...,
    return_lse: Literal[True],
    **options: Unpack[WeightsOptions],
) -> tuple[Array, Array]: ...


@overload
def attention_weights(
    query: ArrayLike,
    key: ArrayLike,
    attn_mask: ArrayLike | None = ...,
    *,
    queries: Index | None = ...,
    heads: Index | None = ...,
    return_lse: bool,
    **options: Unpack[WeightsOptions],
) -> Array | tuple[Array, Array]: ...


@WEIGHTS.shown
def attention_weights(
    query: ArrayLike,
    key: ArrayLike,
    attn_mask: ArrayLike | None = None,
    *,
    queries: Index | None = None,
    heads: Index | None = None,
    return_lse: bool = False,
    **options: Unpack[WeightsOptions],
) -> Array | tuple[Array, Array]:
    """Weights that `attention` gives to the values, as an array.

    ``attention_weights(query, key, …) @ value`` is ``attention(query, key, value, …)``. This is
    the one function whose result has n_query x n_key elements per head; nothing else of that size
    is made.

    Parameters
    ----------
    query, key, attn_mask
        As in `attention`; masks and numbers per head are those of the whole call, whatever is picked.
    queries, heads : int, slice, or list or array of ints or bools, optional
        Which queries and heads to compute, all when not given. The others cost nothing. An axis
        stays, also for an int.
    is_causal, window, query_offset, kv_lengths, scale, softcap, alibi_slopes, sinks
        As in `attention`. With a sink the weights of a row sum to less than 1.
    head_mask
        As in `attention`: the weights of a head are multiplied by its gate.
    return_lse, num_threads
        As in `attention`.

    Returns
    -------
    weights : array, (..., n_head, n_query, n_key)
        Of the dtype of query. 0 for excluded keys; a query with no key left has a row of 0.
    lse : array, (..., n_head, n_query)
        With `return_lse`.

    Raises
    ------
    TypeError, ValueError, MemoryError
        As `attention`; also for `queries` or `heads` that point outside.

    Notes
    -----
    The scores are computed twice, first for the sums, then for the weights, so that also 16-bit
    weights are rounded only once.
    """
    call = _arguments.check(query, key, None, attn_mask, return_lse, WEIGHTS, options, queries)
    if call.one_head and heads is not None:
        raise ValueError(
            f"heads is {heads!r}; expected none with a query of 2 axes, which has no axis of heads"
        )
    if heads is None:
        return _compute(call)
    return _weights_of_heads(call, _checks.chosen("heads", heads, call.query.shape[-3]))


def _weights_of_heads(call: _arguments.Call, heads: Array) -> Array | tuple[Array, Array]:
    """Compute the weights of some heads, one after the other."""
    shape = call.out_shape
    weights = _checks.empty((*shape[:-3], len(heads), *shape[-2:]), call.dtype)
    lse = _checks.empty(weights.shape[:-1], call.lse_dtype) if call.return_lse else None
    for i, head in enumerate(heads):
        place = slice(i, i + 1)
        own_lse = None if lse is None else lse[..., place, :]
        _run(call.of_head(head), weights[..., place, :, :], own_lse)
    return weights if lse is None else (weights, lse)


def _compute(call: _arguments.Call) -> Array | tuple[Array, Array]:
    """Allocate what is missing, run the kernel, and give the result the caller's shape."""
    one_head, out = call.one_head, call.out
    in_place = out is not None and _writable_in_place(out, call)
    if out is not None and in_place:
        result = out[None] if one_head else out
    else:
        result = _checks.empty(call.out_shape, call.dtype)
    lse = _checks.empty(call.lse_shape, call.lse_dtype) if call.return_lse else None
    if call.cu_seqlens_q is None:
        _run(call, result, lse)
    else:
        _run(call, result.swapaxes(0, 1), None if lse is None else lse.T)
    if one_head:
        result, lse = result[0], None if lse is None else lse[0]
    if out is not None:
        if not in_place:
            np.copyto(out, result)
        result = out
    return result if lse is None else (result, lse)


def _writable_in_place(out: Array, call: _arguments.Call) -> bool:
    """Whether the kernel can write `out` itself: whole rows, no element twice, no input read.

    The numbers per batch entry and head in `call` are copies, so only these inputs are asked.
    """
    flags = out.flags
    if not (flags.aligned and (flags.c_contiguous or _is_plain_view(out))):
        return False
    inputs = (call.query, call.key, call.value, call.mask)
    return not any(x is not None and np.may_share_memory(out, x) for x in inputs)


def _is_plain_view(x: Array) -> bool:
    """Whether rows are whole and no element is there twice."""
    twice = any(n > 1 and s == 0 for n, s in zip(x.shape, x.strides, strict=True))
    return _checks.has_whole_rows(x) and not twice


def _run(call: _arguments.Call, out: Array, lse: Array | None) -> None:
    """Run the kernel, unless there is nothing to compute."""
    if out.size or (lse is not None and lse.size):
        _core.attend(call, _checks.bits(out), lse, call.n_thread or threads_asked_for())
