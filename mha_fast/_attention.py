"""attention(): checks above, the compiled loop below."""

from typing import Any

import numpy as np

from . import _arguments, _core
from ._typing import Array, ArrayLike, Window
from .config import get_num_threads


def attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    attn_mask: ArrayLike | None = None,
    *,
    is_causal: bool = False,
    window: Window | None = None,
    query_offset: ArrayLike | str = 0,
    kv_lengths: ArrayLike | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    alibi_slopes: ArrayLike | None = None,
    sinks: ArrayLike | None = None,
    head_mask: ArrayLike | None = None,
    return_lse: bool = False,
    precision: str = "highest",
    out: Array | None = None,
    num_threads: int | None = None,
) -> Any:
    """Multi-head attention, ``softmax(scale * query @ key.T) @ value`` for every head.

    The product, the softmax and the second product run block by block; no array of
    ``n_query * n_key`` is ever made, with no option.

    Parameters
    ----------
    query : array, (..., n_head, n_query, head_width)
        float32 or float64, any strides. (n_head, n_query, head_width) has no batch, and
        (n_query, head_width) is one head.
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
    return_lse : bool
        Also return the log-sum-exp of each query's scores.
    precision : {"highest", "high"}
        "high" allows float32 products a relative error of about 2**-16 where a faster unit
        exists. No instruction set of this version has one, so both give the same.
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
        -inf where there is none. float32 for float32, float64 for float64.

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

    An operand whose last axis is not contiguous, that is not aligned or of foreign byte order is
    copied; every other one is read where it lies.

    Time is ``n_head * n_query * n_key * (head_width + value_width)`` multiply-adds over the
    visible key blocks; memory is a few hundred KiB per thread. With up to 8 query rows per
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
    call = _arguments.check(
        query,
        key,
        value,
        attn_mask,
        is_causal=is_causal,
        window=window,
        query_offset=query_offset,
        kv_lengths=kv_lengths,
        scale=scale,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        sinks=sinks,
        head_mask=head_mask,
        return_lse=return_lse,
        precision=precision,
        out=out,
        num_threads=num_threads,
    )
    result = out
    if call.one_head and out is not None:
        result = out[None]
    if result is None or not _writable_in_place(result, call):
        result = np.empty(call.out_shape, call.query.dtype)
    lse = np.empty(call.lse_shape, call.query.dtype) if return_lse else None

    _run(call, result, lse)

    if call.one_head:
        result = result[0]
        lse = None if lse is None else lse[0]
    if out is not None:
        if not np.may_share_memory(result, out):
            np.copyto(out, result)
        result = out
    return result if lse is None else (result, lse)


def _writable_in_place(out: Array, call: _arguments.Call) -> bool:
    """Whether the kernel can write `out` itself: whole rows, no element twice, no input read."""
    rows = out.flags.aligned and (out.shape[-1] <= 1 or out.strides[-1] == out.itemsize)
    twice = any(n > 1 and s == 0 for n, s in zip(out.shape, out.strides, strict=True))
    operands = (call.query, call.key, call.value, call.mask)
    numbers = (call.kv_lengths, call.query_offset, call.alibi_slopes, call.sinks, call.head_mask)
    shared = any(x is not None and np.may_share_memory(out, x) for x in operands + numbers)
    return rows and not twice and not shared


def _run(call: _arguments.Call, out: Array, lse: Array | None) -> None:
    if out.size == 0 and (lse is None or lse.size == 0):
        return
    _core.attend(
        call.query,
        call.key,
        call.value,
        out,
        lse,
        call.mask,
        call.mask_type,
        call.kv_lengths,
        call.query_offset,
        *call.window,
        call.scale,
        call.softcap,
        call.alibi_slopes,
        call.sinks,
        call.head_mask,
        call.batch_shape,
        call.n_thread or get_num_threads(),
    )
