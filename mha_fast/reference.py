"""The formulas of the library in plain NumPy: slow, short, and the judge of everything else.

Nothing here is shared with the compiled kernel or with its argument checks, so that a mistake
there cannot hide here too. Every array of scores is written out in full.

    attention         every option of ``mha_fast.attention``, in float64
    attention_varlen  the same, sequence by sequence
    attention_weights  the weights of one call, gated like its output
    head_statistics   what ``mha_fast.head_statistics`` measures, from those weights
    naive_attention   the usual five lines in the dtype of the input; baseline of the benchmarks
    masked_scores     the scores before the softmax, and which keys each query may see
    softmax           weights and log-sum-exp of those scores

Sizes are written ``n_head, n_kv_head, n_query, n_key, head_width, value_width``; ``...`` stands
for any number of batch axes.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from ._statistics_record import HeadStatistics
from ._typing import Array, ArrayLike, Window

__all__ = [
    "attention",
    "attention_varlen",
    "attention_weights",
    "head_statistics",
    "masked_scores",
    "naive_attention",
    "softmax",
]


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

    Notes
    -----
    Time and memory grow with ``n_query * n_key``; when visible values hold NaN or Inf, memory
    also with ``value_width``.

    References
    ----------
    Scaled dot products: Vaswani et al. 2017, section 3.2.1. Heads in groups: Ainslie et al. 2023,
    section 2.2. Windows: Beltagy et al. 2020, section 3.1. ALiBi: Press et al. 2022, section 3.
    Capped scores: Gemma Team 2024, section 2. Sinks: Xiao et al. 2024, section 3.2, in the form
    of one learned logit per head. Head gates: Michel et al. 2019, section 2.3.
    """
    result, lse = _attention_in(
        np.float64, query, key, value, attn_mask, is_causal=is_causal, window=window,
        query_offset=query_offset, kv_lengths=kv_lengths, scale=scale, softcap=softcap,
        alibi_slopes=alibi_slopes, sinks=sinks, head_mask=head_mask,
    )  # fmt: skip
    if out is not None:
        np.copyto(out, result, casting="unsafe")
        result = out
    return (result, lse) if return_lse else result


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
) -> Any:
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
    boundaries = np.stack([cu_seqlens_q, cu_seqlens_k]).astype(np.int64)
    n_sequence, n_head = boundaries.shape[1] - 1, query.shape[1]
    result = np.zeros((*query.shape[:2], value.shape[2]))
    lse = np.zeros(query.shape[:2])
    for s in range(n_sequence):
        rows, keys = (slice(*cu[s : s + 2]) for cu in boundaries)
        own = dict(options)
        own["query_offset"] = (
            query_offset
            if isinstance(query_offset, str)
            else np.broadcast_to(query_offset, n_sequence)[s]
        )
        for name, number in (("alibi_slopes", alibi_slopes), ("head_mask", head_mask)):
            if number is not None:
                own[name] = np.broadcast_to(number, (n_sequence, n_head))[s]
        heads = (x.swapaxes(0, 1) for x in (query[rows], key[keys], value[keys]))
        part, part_lse = attention(*heads, return_lse=True, **own)
        result[rows], lse[rows] = part.swapaxes(0, 1), part_lse.T
    return (result, lse) if return_lse else result


def attention_weights(
    query: ArrayLike,
    key: ArrayLike,
    attn_mask: ArrayLike | None = None,
    *,
    queries: Any = None,
    heads: Any = None,
    sinks: ArrayLike | None = None,
    head_mask: ArrayLike | None = None,
    return_lse: bool = False,
    num_threads: int | None = None,
    **options: Any,
) -> Any:
    """Weights that `attention` multiplies the values by, in float64.

    Parameters
    ----------
    query, key, attn_mask, sinks, head_mask
        As in `attention`.
    queries, heads : int, slice, or list or array of ints or bools, optional
        Which rows of the result to return.
    num_threads
        Accepted for the sake of an equal signature, and ignored.
    **options
        The other options of `attention` that have to do with scores.

    Returns
    -------
    weights : float64 array, (..., n_head, n_query, n_key)
        Times the gates; 0 for excluded keys.
    lse : float64 array, (..., n_head, n_query)
        Only with `return_lse`.
    """
    query, key = np.asarray(query, np.float64), np.asarray(key, np.float64)
    one_head = query.ndim == 2
    query, key, _ = _with_all_heads(query, key, key)
    with np.errstate(all="ignore"):
        scores, _ = masked_scores(query, key, attn_mask, **options)
        weights, lse = softmax(scores, sinks)
        if head_mask is not None:
            gate = np.asarray(head_mask, np.float64)[..., None, None]
            weights = np.where(gate == 0, 0.0, gate * weights)
    weights = np.where(scores == -np.inf, 0.0, weights)
    for axis, picked in ((-2, queries), (-3, heads)):
        if picked is not None:
            places = np.atleast_1d(np.arange(weights.shape[axis])[picked])
            weights, lse = weights.take(places, axis), lse.take(places, axis + 1)
    if one_head:
        weights, lse = weights[0], lse[0]
    return (weights, lse) if return_lse else weights


def head_statistics(
    query: ArrayLike,
    key: ArrayLike,
    attn_mask: ArrayLike | None = None,
    *,
    offsets: Sequence[int] = (-1, 0, 1),
    key_sets: Sequence[ArrayLike] | Array | None = None,
    ignore_keys: ArrayLike | None = None,
    received: bool = False,
    is_causal: bool = False,
    window: Window | None = None,
    query_offset: ArrayLike | str = 0,
    kv_lengths: ArrayLike | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    alibi_slopes: ArrayLike | None = None,
    sinks: ArrayLike | None = None,
    num_threads: int | None = None,
) -> HeadStatistics:
    """What ``mha_fast.head_statistics`` measures, in float64.

    Parameters
    ----------
    query, key, attn_mask
        As in `attention`.
    offsets : sequence of int
        Places relative to the query's own position.
    key_sets : sequence, optional
        Each set of keys as a bool array broadcastable to (..., n_key), or as a list of key
        numbers. A bool array (n_set, n_key) is such a sequence.
    ignore_keys : bool array or list of key numbers, optional
        Keys that `confidence` leaves out.
    received : bool
        Whether to sum the weights that each key receives.
    is_causal, window, query_offset, kv_lengths, scale, softcap, alibi_slopes, sinks
        As in `attention`.
    num_threads
        Accepted for the sake of an equal signature, and ignored.

    Returns
    -------
    HeadStatistics
        Its docstring has the formulas.
    """
    query, key = np.asarray(query, np.float64), np.asarray(key, np.float64)
    one_head = query.ndim == 2
    query, key, _ = _with_all_heads(query, key, key)
    with np.errstate(all="ignore"):
        scores, _ = masked_scores(
            query, key, attn_mask, is_causal=is_causal, window=window, query_offset=query_offset,
            kv_lengths=kv_lengths, scale=scale, softcap=softcap, alibi_slopes=alibi_slopes,
        )  # fmt: skip
        weights = np.where(scores == -np.inf, 0.0, softmax(scores, sinks)[0])

    position = _positions(query.shape[-2], key.shape[-2], query_offset, kv_lengths)
    batch = (*scores.shape[:-3], key.shape[-2])
    sets = [] if key_sets is None else [_members(keys, batch) for keys in key_sets]
    shown = weights if ignore_keys is None else np.where(_members(ignore_keys, batch), 0.0, weights)
    fields = _measures(scores, weights, shown, position, offsets, sets)
    if one_head:
        fields = {name: array[0] for name, array in fields.items()}
    if key_sets is None:
        fields["key_mass"] = None
    if not received:
        fields["received"] = None
    return HeadStatistics(offsets=tuple(int(d) for d in offsets), **fields)


def _measures(
    scores: Array,
    weights: Array,
    shown: Array,
    position: Array,
    offsets: Sequence[int],
    sets: list[Array],
) -> dict[str, Any]:
    """Every field of HeadStatistics; `shown` are the weights that `confidence` may look at."""
    key = np.arange(scores.shape[-1])
    has_key = (scores != -np.inf).any(axis=-1)
    is_nan = np.isnan(weights).any(axis=-1)
    # argmax fails on an empty axis, so one more key stands in front that is never the largest
    top_key = np.insert(scores, 0, -np.inf, axis=-1).argmax(axis=-1) - 1
    top_key = np.where(has_key & ~is_nan, top_key, -1)
    surprise = 0.0 - np.log(np.where(weights == 0, 1.0, weights))  # +0, not -0, for one key

    def mean(per_query: Array) -> Array:
        with np.errstate(invalid="ignore"):  # a head without any query with a key: 0 / 0
            counted = np.where(has_key, np.where(is_nan, np.nan, per_query), 0.0)
            return counted.sum(axis=-1) / has_key.sum(axis=-1)

    def means(per_query: list[Array]) -> Array:
        """Along a last axis, which may be empty."""
        nothing = np.empty((*scores.shape[:-2], 0))
        return np.concatenate([nothing, *(mean(x)[..., None] for x in per_query)], axis=-1)

    def mass(keys: Array) -> Array:
        return np.where(keys, weights, 0.0).sum(axis=-1)

    return {
        "entropy": mean((weights * surprise).sum(axis=-1)),
        "confidence": mean(shown.max(axis=-1, initial=0.0)),
        "mean_distance": mean((weights * np.abs(key - position)).sum(axis=-1)),
        "offset_mass": means([mass(key == position + d) for d in offsets]),
        "offset_argmax": means([top_key == position[..., 0] + d for d in offsets]),
        "key_mass": means([mass(keys) for keys in sets]),
        "top_key": top_key,
        "received": weights.sum(axis=-2),
    }


def _members(keys: ArrayLike, shape: tuple[int, ...]) -> Array:
    """Which keys a set holds, from a bool array or key numbers, ready to meet the weights."""
    keys = np.asarray(keys)
    if keys.dtype != np.bool_:
        numbers, keys = keys.astype(np.int64), np.zeros(shape[-1], np.bool_)
        keys[numbers] = True
    return np.broadcast_to(keys, shape)[..., None, None, :]


def _attention_in(
    dtype: type[np.floating[Any]],
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    attn_mask: ArrayLike | None = None,
    *,
    sinks: ArrayLike | None = None,
    head_mask: ArrayLike | None = None,
    **score_options: Any,
) -> tuple[Array, Array]:
    """The same formula with every step in `dtype`: what rounding alone does to it."""
    query, key, value = (np.asarray(x, dtype) for x in (query, key, value))
    one_head = query.ndim == key.ndim == value.ndim == 2
    query, key, value = _with_all_heads(query, key, value)
    with np.errstate(all="ignore"):  # NaN, Inf and overflow are ordinary results here
        scores, visible = masked_scores(query, key, attn_mask, **score_options)
        weights, lse = softmax(scores, sinks)
        result = _weighted_values(weights, value, visible)
        if head_mask is not None:
            gate = np.asarray(head_mask, dtype)[..., None, None]
            result = np.where(gate == 0, dtype(0), gate * result)
        nothing = ~visible.any(axis=-1) | (lse == -np.inf)  # no key, or none of any weight
        result = np.where(nothing[..., None], dtype(0), result)
    return (result[0], lse[0]) if one_head else (result, lse)


def masked_scores(
    query: Array,
    key: Array,
    attn_mask: ArrayLike | None = None,
    *,
    is_causal: bool = False,
    window: Window | None = None,
    query_offset: ArrayLike | str = 0,
    kv_lengths: ArrayLike | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    alibi_slopes: ArrayLike | None = None,
) -> tuple[Array, Array]:
    """Scores of all pairs of query and key, and which of them count.

    `query` and `key` have the same head and batch axes here; the options are those of
    `attention`. Every step stays in the dtype of `query`.

    Returns
    -------
    scores : array, (..., n_head, n_query, n_key)
        -inf where the key is excluded.
    visible : bool array of the same shape
    """
    dtype, n_query, n_key, head_width = query.dtype, query.shape[-2], key.shape[-2], key.shape[-1]
    lengths = _per_sequence(n_key if kv_lengths is None else kv_lengths)
    position = _positions(n_query, n_key, query_offset, kv_lengths)
    distance = np.arange(n_key) - position  # positive: the key comes after the query

    if scale is None:
        scale = 1 / math.sqrt(head_width) if head_width else 1.0
    scores = (query @ np.swapaxes(key, -1, -2)) * dtype.type(scale)
    if softcap is not None:
        softcap = dtype.type(softcap)
        scores = softcap * np.tanh(scores / softcap)
    if alibi_slopes is not None:
        slopes = np.asarray(alibi_slopes, dtype)[..., None, None]
        scores = scores - slopes * np.abs(distance).astype(dtype)

    visible = np.arange(n_key) < lengths
    if attn_mask is not None:
        attn_mask = np.asarray(attn_mask)
        if attn_mask.dtype == np.bool_:
            visible = visible & attn_mask
        else:
            visible = visible & (attn_mask != -np.inf)
            scores = scores + attn_mask.astype(dtype)
    if is_causal:
        visible = visible & (distance <= 0)
    left, right = (None, None) if window is None else window
    if left is not None:
        visible = visible & (distance >= -left)
    if right is not None:
        visible = visible & (distance <= right)
    visible = np.broadcast_to(visible, scores.shape)
    return np.where(visible, scores, dtype.type(-np.inf)), visible


def softmax(scores: Array, sinks: ArrayLike | None = None) -> tuple[Array, Array]:
    """Weights over the last axis, and log-sum-exp of the scores with the sink of each head.

    Parameters
    ----------
    scores : array, (..., n_head, n_query, n_key)
        A score of -inf has weight 0; a row of nothing else has no weight at all.
    sinks : array, (n_head,), optional

    Returns
    -------
    weights : array like `scores`
    lse : array, (..., n_head, n_query)
    """
    sink = scores.dtype.type(-np.inf)
    if sinks is not None:
        sink = np.asarray(sinks, scores.dtype)[..., None, None]
    peak = np.maximum(scores.max(axis=-1, keepdims=True, initial=-np.inf), sink)
    peak = np.where(peak == -np.inf, scores.dtype.type(0), peak)  # -inf - -inf would be NaN
    weights = np.exp(scores - peak)
    total = weights.sum(axis=-1, keepdims=True) + np.exp(sink - peak)
    lse = peak + np.log(total)
    return weights / np.where(total == 0, scores.dtype.type(1), total), lse[..., 0]


def naive_attention(
    query: Array,
    key: Array,
    value: Array,
    attn_mask: ArrayLike | None = None,
    is_causal: bool = False,
) -> Array:
    """The usual five lines, in the dtype of the input: the baseline of the benchmarks.

    Parameters
    ----------
    query, key, value, attn_mask, is_causal
        As in `attention`, rank 3 or more.

    Returns
    -------
    array, (..., n_head, n_query, value_width), of the dtype of `query`
        NaN where a query has no key.

    References
    ----------
    Vaswani et al. 2017, section 3.2.1.
    """
    query, key, value = _with_all_heads(query, key, value)
    scores = query @ key.swapaxes(-1, -2) * (1 / math.sqrt(query.shape[-1]))
    if attn_mask is not None:
        attn_mask = np.asarray(attn_mask)
        if attn_mask.dtype == np.bool_:
            attn_mask = np.where(attn_mask, scores.dtype.type(0), scores.dtype.type(-np.inf))
        scores = scores + attn_mask.astype(scores.dtype, copy=False)
    if is_causal:
        scores = np.where(np.tri(*scores.shape[-2:], dtype=np.bool_), scores, -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return (weights / weights.sum(axis=-1, keepdims=True)) @ value


def _positions(
    n_query: int, n_key: int, query_offset: ArrayLike | str, kv_lengths: ArrayLike | None
) -> Array:
    """Position of each query on the axis of the keys, ready to meet the scores."""
    if isinstance(query_offset, str):
        offset = _per_sequence(n_key if kv_lengths is None else kv_lengths) - n_query
    else:
        offset = _per_sequence(query_offset)
    return offset + np.arange(n_query)[:, None]


def _per_sequence(number: ArrayLike) -> Array:
    """One number per sequence, ready to meet (..., n_head, n_query, n_key)."""
    return np.asarray(number, np.int64)[..., None, None, None]


def _with_all_heads(query: Array, key: Array, value: Array) -> tuple[Array, ...]:
    """Bring the three to equal batch and head axes; each key/value head is repeated in place."""
    query, key, value = (x[None] if x.ndim == 2 else x for x in (query, key, value))
    group = query.shape[-3] // max(key.shape[-3], 1)
    key, value = (np.repeat(x, group, axis=-3) for x in (key, value))
    batch = np.broadcast_shapes(*(x.shape[:-3] for x in (query, key, value)))
    return tuple(np.broadcast_to(x, batch + x.shape[-3:]) for x in (query, key, value))


def _weighted_values(weights: Array, value: Array, visible: Array) -> Array:
    """``weights @ value`` in which an excluded key adds nothing, not even ``0 * nan``."""
    if np.isfinite(value).all():
        return weights @ value
    products = weights[..., None] * value[..., None, :, :]
    return np.where(visible[..., None], products, weights.dtype.type(0)).sum(axis=-2)
