"""What is usually written."""

from __future__ import annotations

import math

import numpy as np

from .._typing import Array, ArrayLike
from ._scores import with_all_heads


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
    query, key, value = with_all_heads(query, key, value)
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
