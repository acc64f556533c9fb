"""Scores before the softmax, the softmax, and sums that pass over what is excluded."""

from __future__ import annotations

import math

import numpy as np

from .._typing import Array, ArrayLike, Window


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
    lengths = per_sequence(n_key if kv_lengths is None else kv_lengths)
    position = positions(n_query, n_key, query_offset, kv_lengths)
    distance = np.arange(n_key) - position  # positive: the key comes after the query

    scores = (query @ np.swapaxes(key, -1, -2)) * dtype.type(score_scale(scale, head_width))
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


def score_scale(scale: float | None, head_width: int) -> float:
    """Factor of the dot products."""
    if scale is None:
        return 1 / math.sqrt(head_width) if head_width else 1.0
    return scale


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


def weighted_rows(weights: Array, value: Array, visible: Array) -> Array:
    """``weights @ value`` in which an excluded key adds nothing, not even ``0 * nan``."""
    if np.isfinite(value).all():
        return weights @ value
    products = weights[..., None] * value[..., None, :, :]
    return np.where(visible[..., None], products, weights.dtype.type(0)).sum(axis=-2)


def with_all_heads(query: Array, key: Array, value: Array) -> tuple[Array, ...]:
    """Bring the three to equal batch and head axes; each key/value head is repeated in place."""
    query, key, value = (x[None] if x.ndim == 2 else x for x in (query, key, value))
    group = query.shape[-3] // max(key.shape[-3], 1)
    key, value = (np.repeat(x, group, axis=-3) for x in (key, value))
    batch = np.broadcast_shapes(*(x.shape[:-3] for x in (query, key, value)))
    return tuple(np.broadcast_to(x, batch + x.shape[-3:]) for x in (query, key, value))


def positions(
    n_query: int, n_key: int, query_offset: ArrayLike | str, kv_lengths: ArrayLike | None
) -> Array:
    """Position of each query on the axis of the keys, ready to meet the scores."""
    if isinstance(query_offset, str):
        offset = per_sequence(n_key if kv_lengths is None else kv_lengths) - n_query
    else:
        offset = per_sequence(query_offset)
    return offset + np.arange(n_query)[:, None]


def per_sequence(number: ArrayLike) -> Array:
    """One number per sequence, ready to meet (..., n_head, n_query, n_key)."""
    return np.asarray(number, np.int64)[..., None, None, None]
