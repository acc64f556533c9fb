"""What the heads of a layer look at: the functions over scores, from tokens instead of heads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, Unpack, overload

import numpy as np

from .._attention import attention_weights
from .._options import LAYER_STATISTICS, LAYER_WEIGHTS, StatisticsOptions, WeightsOptions
from .._statistics import HeadStatistics, head_statistics
from .._typing import Array, ArrayLike, Index
from . import _inputs
from ._inputs import Position
from ._parameters import Parameters
from ._sizes import KEY, QUERY


class HeadViews:
    """The part of `MultiHeadAttention` that looks into its heads."""

    position: Position | None
    _parameters: Parameters

    @overload
    def attention_weights(
        self,
        query: ArrayLike,
        key: ArrayLike | None = ...,
        attn_mask: ArrayLike | None = ...,
        *,
        queries: Index | None = ...,
        heads: Index | None = ...,
        return_lse: Literal[False] = ...,
        **options: Unpack[WeightsOptions],
    ) -> Array: ...

    @overload
    def attention_weights(
        self,
        query: ArrayLike,
        key: ArrayLike | None = ...,
        attn_mask: ArrayLike | None = ...,
        *,
        queries: Index | None = ...,
        heads: Index | None = ...,
        return_lse: Literal[True],
        **options: Unpack[WeightsOptions],
    ) -> tuple[Array, Array]: ...

    @overload
    def attention_weights(
        self,
        query: ArrayLike,
        key: ArrayLike | None = ...,
        attn_mask: ArrayLike | None = ...,
        *,
        queries: Index | None = ...,
        heads: Index | None = ...,
        return_lse: bool,
        **options: Unpack[WeightsOptions],
    ) -> Array | tuple[Array, Array]: ...

    @LAYER_WEIGHTS.shown
    def attention_weights(
        self,
        query: ArrayLike,
        key: ArrayLike | None = None,
        attn_mask: ArrayLike | None = None,
        *,
        queries: Index | None = None,
        heads: Index | None = None,
        return_lse: bool = False,
        **options: Unpack[WeightsOptions],
    ) -> Array | tuple[Array, Array]:
        """Weights with which the layer gathers, as an array: what torch calls `need_weights`.

        Parameters
        ----------
        query : array, (..., n_query, embed_dim)
            Tokens that attend, as in a call of the layer.
        key : array, (..., n_key, kdim), optional
            Tokens that are attended to; default `query`.
        attn_mask, is_causal, window, query_offset, kv_lengths, scale, softcap, alibi_slopes, sinks
            As in a call of the layer.
        head_mask, queries, heads, return_lse, num_threads
            As in `mha_fast.attention_weights`. torch's average over the heads is ``.mean(axis=-3)``.

        Returns
        -------
        weights : array, (..., num_heads, n_query, n_key)
        lse : array, (..., num_heads, n_query)
            With `return_lse`.

        Raises
        ------
        TypeError, ValueError, MemoryError
            As a call of the layer, and `mha_fast.attention_weights`.
        """
        LAYER_WEIGHTS.check_names(options)
        query_heads, key_heads = self._scored(query, key, options)
        return attention_weights(
            query_heads,
            key_heads,
            attn_mask,
            queries=queries,
            heads=heads,
            return_lse=return_lse,
            **options,
        )

    @LAYER_STATISTICS.shown
    def head_statistics(
        self,
        query: ArrayLike,
        key: ArrayLike | None = None,
        attn_mask: ArrayLike | None = None,
        *,
        offsets: Sequence[int] = (-1, 0, 1),
        key_sets: Sequence[ArrayLike] | Array | None = None,
        ignore_keys: ArrayLike | None = None,
        received: bool = False,
        **options: Unpack[StatisticsOptions],
    ) -> HeadStatistics:
        """Measure what each head of the layer attends to, without an array of weights.

        Parameters
        ----------
        query, key, attn_mask
            As in `attention_weights`.
        offsets, key_sets, ignore_keys, received
            As in `mha_fast.head_statistics`.
        is_causal, window, query_offset, kv_lengths, scale, softcap, alibi_slopes, sinks, num_threads
            As in a call of the layer.

        Returns
        -------
        HeadStatistics

        Raises
        ------
        TypeError, ValueError, MemoryError
            As a call of the layer, and `mha_fast.head_statistics`.
        """
        LAYER_STATISTICS.check_names(options)
        query_heads, key_heads = self._scored(query, key, options)
        return head_statistics(
            query_heads,
            key_heads,
            attn_mask,
            offsets=offsets,
            key_sets=key_sets,
            ignore_keys=ignore_keys,
            received=received,
            **options,
        )

    def _scored(
        self, query: ArrayLike, key: ArrayLike | None, options: Mapping[str, Any]
    ) -> tuple[Array, Array]:
        """Query and key heads, where `position` puts them."""
        sizes, dtype = self._parameters.sizes, self._parameters.dtype
        queries = _inputs.tokens(sizes, dtype, "query", query, QUERY)
        keys = _inputs.tokens(sizes, dtype, "key", queries if key is None else key, KEY)
        heads = self._parameters.project(queries, keys)
        if self.position is None:
            return heads[QUERY], heads[KEY]
        n_query, n_key = queries.shape[-2], keys.shape[-2]
        offset, lengths = options.get("query_offset", 0), options.get("kv_lengths")
        first = _inputs.first_position(offset, lengths, n_query, n_key)
        places = _inputs.positions_from(first, n_query), np.arange(n_key)
        return (
            _inputs.in_position(self.position, heads[QUERY], places[0]),
            _inputs.in_position(self.position, heads[KEY], places[1]),
        )
