"""The weights themselves."""

from __future__ import annotations

from typing import Any, Literal, overload

import numpy as np

from .._typing import Array, ArrayLike, Index
from ._scores import masked_scores, softmax, with_all_heads


@overload
def attention_weights(
    query: ArrayLike,
    key: ArrayLike,
    attn_mask: ArrayLike | None = ...,
    *,
    queries: Index | None = ...,
    heads: Index | None = ...,
    sinks: ArrayLike | None = ...,
    head_mask: ArrayLike | None = ...,
    return_lse: Literal[False] = ...,
    num_threads: int | None = ...,
    **options: Any,
) -> Array: ...


@overload
def attention_weights(
    query: ArrayLike,
    key: ArrayLike,
    attn_mask: ArrayLike | None = ...,
    *,
    queries: Index | None = ...,
    heads: Index | None = ...,
    sinks: ArrayLike | None = ...,
    head_mask: ArrayLike | None = ...,
    return_lse: Literal[True],
    num_threads: int | None = ...,
    **options: Any,
) -> tuple[Array, Array]: ...


@overload
def attention_weights(
    query: ArrayLike,
    key: ArrayLike,
    attn_mask: ArrayLike | None = ...,
    *,
    queries: Index | None = ...,
    heads: Index | None = ...,
    sinks: ArrayLike | None = ...,
    head_mask: ArrayLike | None = ...,
    return_lse: bool,
    num_threads: int | None = ...,
    **options: Any,
) -> Array | tuple[Array, Array]: ...


def attention_weights(
    query: ArrayLike,
    key: ArrayLike,
    attn_mask: ArrayLike | None = None,
    *,
    queries: Index | None = None,
    heads: Index | None = None,
    sinks: ArrayLike | None = None,
    head_mask: ArrayLike | None = None,
    return_lse: bool = False,
    num_threads: int | None = None,
    **options: Any,
) -> Array | tuple[Array, Array]:
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
    query, key, _ = with_all_heads(query, key, key)
    with np.errstate(all="ignore"):
        scores, _ = masked_scores(query, key, attn_mask, **options)
        weights, lse = softmax(scores, sinks)
        if head_mask is not None:
            gate = np.asarray(head_mask, np.float64)[..., None, None]
            weights = np.where(gate == 0, 0.0, gate * weights)
    weights = np.where(scores == -np.inf, 0.0, weights)
    for axis, picked in ((-2, queries), (-3, heads)):
        if picked is not None:
            index: Any = picked
            places = np.atleast_1d(np.arange(weights.shape[axis])[index])
            weights, lse = weights.take(places, axis), lse.take(places, axis + 1)
    if one_head:
        weights, lse = weights[0], lse[0]
    return (weights, lse) if return_lse else weights
