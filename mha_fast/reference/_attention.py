"""The forward pass: of padded batches, and of packed sequences."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal, Unpack, overload

import numpy as np

from .._typing import Array, ArrayLike, Window
from ._dropout import dropout_factor
from ._scores import masked_scores, softmax, weighted_rows, with_all_heads

if TYPE_CHECKING:  # for their types alone: nothing of the checks is used here
    from .._options import AttentionOptions


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
    dropout_p: float = 0.0,
    dropout_seed: int | None = None,
    return_lse: bool = False,
    precision: str = "highest",
    out: Array | None = None,
    num_threads: int | None = None,
) -> Array | tuple[Array, Array]:
    """Multi-head attention in float64, with every option of ``mha_fast.attention``.

    Parameters
    ----------
    query : array, (..., n_head, n_query, head_width)
        Rank 2 is one head without a batch. Any float dtype; computed in float64.
    key : array, (..., n_kv_head, n_key, head_width)
        Query head ``h`` reads key head ``h // (n_head // n_kv_head)``.
    value : array, (..., n_kv_head, n_key, value_width)
    attn_mask : array, optional
        Broadcastable to (..., n_head, n_query, n_key). Bool: True lets the key through.
        Float: added to the score; -inf excludes the key.
    is_causal : bool
        Exclude the keys behind the position of the query.
    window : (left, right), optional
        Keep the keys from ``position - left`` to ``position + right``, both included; None is
        no bound.
    query_offset : int, int array (...) or "end"
        Position of query 0 on the axis of the keys. "end": the last query is at the last key.
    kv_lengths : int array, broadcastable to (...), optional
        How many leading keys are real.
    scale : float, optional
        Factor of the dot product, ``1 / sqrt(head_width)`` when not given.
    softcap : float, optional
        Bound of the scaled scores, ``softcap * tanh(score / softcap)``.
    alibi_slopes : array, (n_head,) or (..., n_head), optional
        Penalty per position between query and key.
    sinks : array, (n_head,), optional
        One logit per head that takes weight and has no value.
    head_mask : array, (n_head,) or (..., n_head), optional
        Factor of the output of each head; a gate of 0 gives exactly 0.
    dropout_p : float
        Share of the weights that becomes 0, after the softmax; the others are divided by
        ``1 - dropout_p``.
    dropout_seed : int, 0 to ``2**64 - 1``
        Required where `dropout_p` is not 0. `dropout_mask` says which weights are kept.
    return_lse : bool
        Return the log-sum-exp of the scores as well.
    out : array, optional
        Receives the result, cast to its dtype.
    precision, num_threads
        Accepted for the sake of an equal signature, and ignored.

    Returns
    -------
    out : float64 array, (..., n_head, n_query, value_width)
        0 where a query has no key.
    lse : float64 array, (..., n_head, n_query)
        Only with `return_lse`. Natural logarithm; -inf where a query has neither key nor sink.
        Without dropout.

    Notes
    -----
    Time and memory grow with ``n_query * n_key``; when visible values hold NaN or Inf, memory
    also with ``value_width``.

    References
    ----------
    Scaled dot products: Vaswani et al. 2017, section 3.2.1. Heads in groups: Ainslie et al. 2023,
    section 2.2. Windows: Beltagy et al. 2020, section 3.1. ALiBi: Press et al. 2022, section 3.
    Capped scores: Gemma Team 2024, section 2. Sinks: Xiao et al. 2024, section 3.2, in the form
    of one learned logit per head. Head gates: Michel et al. 2019, section 2.3. Dropout of
    weights: Srivastava et al. 2014, divided in training instead of multiplied in use.
    """
    result, lse = _attention_in(
        np.float64, query, key, value, attn_mask, is_causal=is_causal, window=window,
        query_offset=query_offset, kv_lengths=kv_lengths, scale=scale, softcap=softcap,
        alibi_slopes=alibi_slopes, sinks=sinks, head_mask=head_mask, dropout_p=dropout_p,
        dropout_seed=dropout_seed,
    )  # fmt: skip
    if out is not None:
        np.copyto(out, result, casting="unsafe")
        result = out
    return (result, lse) if return_lse else result


@overload
def attention_varlen(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    cu_seqlens_q: ArrayLike,
    cu_seqlens_k: ArrayLike,
    *,
    query_offset: ArrayLike | str = ...,
    alibi_slopes: ArrayLike | None = ...,
    head_mask: ArrayLike | None = ...,
    return_lse: Literal[False] = ...,
    **options: Any,
) -> Array: ...


@overload
def attention_varlen(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    cu_seqlens_q: ArrayLike,
    cu_seqlens_k: ArrayLike,
    *,
    query_offset: ArrayLike | str = ...,
    alibi_slopes: ArrayLike | None = ...,
    head_mask: ArrayLike | None = ...,
    return_lse: Literal[True],
    **options: Any,
) -> tuple[Array, Array]: ...


@overload
def attention_varlen(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    cu_seqlens_q: ArrayLike,
    cu_seqlens_k: ArrayLike,
    *,
    query_offset: ArrayLike | str = ...,
    alibi_slopes: ArrayLike | None = ...,
    head_mask: ArrayLike | None = ...,
    return_lse: bool,
    **options: Any,
) -> Array | tuple[Array, Array]: ...


def attention_varlen(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    cu_seqlens_q: ArrayLike,
    cu_seqlens_k: ArrayLike,
    *,
    query_offset: ArrayLike | str = 0,
    alibi_slopes: ArrayLike | None = None,
    head_mask: ArrayLike | None = None,
    return_lse: bool = False,
    **options: Any,
) -> Array | tuple[Array, Array]:
    """One call of `attention` for each packed sequence, in float64.

    Parameters
    ----------
    query, key, value : array, (rows of all sequences, heads, width)
    cu_seqlens_q, cu_seqlens_k : int array, (n_sequence + 1,)
        Sequence s is rows ``cu[s]`` to ``cu[s + 1] - 1``.
    query_offset, alibi_slopes, head_mask
        As in `attention`, with the sequences as the batch.
    **options
        The other options of `attention`.

    Returns
    -------
    out : float64 array, (n_row_q, n_head, value_width)
    lse : float64 array, (n_row_q, n_head)
        Only with `return_lse`.
    """
    query, key, value = (np.asarray(x, np.float64) for x in (query, key, value))
    result = np.zeros((*query.shape[:2], value.shape[2]))
    lse = np.zeros(query.shape[:2])
    batched = {
        "query_offset": query_offset, "alibi_slopes": alibi_slopes, "head_mask": head_mask,
    }  # fmt: skip
    for ignored in ("precision", "num_threads"):
        options.pop(ignored, None)
    for s, rows, keys, own in sequences(cu_seqlens_q, cu_seqlens_k, batched):
        q, k, v = (x.swapaxes(0, 1) for x in (query[rows], key[keys], value[keys]))
        part, part_lse = _attention_in(np.float64, q, k, v, first_entry=s, **own, **options)
        result[rows], lse[rows] = part.swapaxes(0, 1), part_lse.T
    return (result, lse) if return_lse else result


def sequences(
    cu_seqlens_q: ArrayLike, cu_seqlens_k: ArrayLike, batched: dict[str, Any]
) -> Iterator[tuple[int, slice, slice, dict[str, Any]]]:
    """For each packed sequence: its number, its rows, its keys, and its own options.

    `batched` are options that may have one entry per sequence.
    """
    starts_q, starts_k = (np.asarray(cu, np.int64) for cu in (cu_seqlens_q, cu_seqlens_k))
    n_sequence = len(starts_q) - 1
    n_own_axes = {"query_offset": 0, "alibi_slopes": 1, "head_mask": 1}
    for s in range(n_sequence):
        own = {}
        for name, option in batched.items():
            if option is not None and not isinstance(option, str):
                option = np.asarray(option)
                if option.ndim > n_own_axes[name]:
                    option = option[s if len(option) > 1 else 0]
            own[name] = option
        yield s, slice(*starts_q[s : s + 2]), slice(*starts_k[s : s + 2]), own


def _attention_in(
    dtype: type[np.floating[Any]],
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    attn_mask: ArrayLike | None = None,
    *,
    sinks: ArrayLike | None = None,
    head_mask: ArrayLike | None = None,
    dropout_p: float = 0.0,
    dropout_seed: int | None = None,
    first_entry: int = 0,
    **score_options: Any,
) -> tuple[Array, Array]:
    """The same formula with every step in `dtype`: what rounding alone does to it.

    `first_entry` is the place in the batch that dropout counts from.
    """
    query, key, value = (np.asarray(x, dtype) for x in (query, key, value))
    one_head = query.ndim == key.ndim == value.ndim == 2
    query, key, value = with_all_heads(query, key, value)
    with np.errstate(all="ignore"):  # NaN, Inf and overflow are ordinary results here
        scores, visible = masked_scores(query, key, attn_mask, **score_options)
        weights, lse = softmax(scores, sinks)
        if dropout_p:
            factor = dropout_factor(dropout_seed, weights.shape, dropout_p, first_entry)
            weights = weights * factor.astype(dtype)
        result = weighted_rows(weights, value, visible)
        if head_mask is not None:
            gate = np.asarray(head_mask, dtype)[..., None, None]
            result = np.where(gate == 0, dtype(0), gate * result)
        nothing = ~visible.any(axis=-1) | (lse == -np.inf)  # no key, or none of any weight
        result = np.where(nothing[..., None], dtype(0), result)
    return (result[0], lse[0]) if one_head else (result, lse)
