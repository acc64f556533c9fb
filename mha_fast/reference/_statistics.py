"""What each head looks at."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from .._statistics_record import HeadStatistics
from .._typing import Array, ArrayLike, Window
from ._scores import masked_scores, positions, softmax, with_all_heads


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
    query, key, _ = with_all_heads(query, key, key)
    with np.errstate(all="ignore"):
        scores, _ = masked_scores(
            query, key, attn_mask, is_causal=is_causal, window=window, query_offset=query_offset,
            kv_lengths=kv_lengths, scale=scale, softcap=softcap, alibi_slopes=alibi_slopes,
        )  # fmt: skip
        weights = np.where(scores == -np.inf, 0.0, softmax(scores, sinks)[0])

    position = positions(query.shape[-2], key.shape[-2], query_offset, kv_lengths)
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
