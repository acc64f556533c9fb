"""What comes into a layer: checks of tokens, caches and results, and where the tokens stand."""

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np

from .. import _checks
from .._options import LARGEST_OFFSET as LARGEST
from .._typing import Array, ArrayLike
from ..cache import KVCache
from ._sizes import KEY, QUERY, VALUE, LayerSizes

Position: TypeAlias = Callable[[Array, Array], Array]


# ---- tokens -----------------------------------------------------------------------------------


def of_attention(
    sizes: LayerSizes, dtype: np.dtype[Any], query: Any, key: Any, value: Any
) -> tuple[Array, Array, Array]:
    """Query, key and value of a call; what is given once stays one array."""
    queries = tokens(sizes, dtype, "query", query, QUERY)
    return (queries, *of_keys(sizes, dtype, queries if key is None else key, value))


def of_keys(sizes: LayerSizes, dtype: np.dtype[Any], key: Any, value: Any) -> tuple[Array, Array]:
    """Key and value of a call."""
    keys = tokens(sizes, dtype, "key", key, KEY)
    values = tokens(sizes, dtype, "value", keys if value is None else value, VALUE)
    if values.shape[-2] != keys.shape[-2]:
        raise ValueError(
            f"value has shape {values.shape}; expected {keys.shape[-2]} tokens to match key"
        )
    return keys, values


def of_cached_call(
    sizes: LayerSizes,
    dtype: np.dtype[Any],
    cache: Any,
    query: Any,
    given: dict[str, bool],
) -> tuple[Array, Array, Array]:
    """The same of a call with a cache, which excludes the arguments that are `given`."""
    if not isinstance(cache, KVCache):
        raise TypeError(f"cache is of type {type(cache).__name__}; expected a KVCache")
    for name, is_given in given.items():
        if is_given:
            raise ValueError(f"{name} is given together with cache; expected only one of them")
    inputs = of_attention(sizes, dtype, query, None, None)
    n_batch, shape = len(cache.lengths), inputs[QUERY].shape
    if len(shape) != 3 or shape[0] != n_batch:
        raise ValueError(
            f"query has shape {shape}; expected ({n_batch}, tokens, {sizes.embed_dim}) for the "
            f"{n_batch} sequences of the cache"
        )
    return inputs


def tokens(sizes: LayerSizes, dtype: np.dtype[Any], name: str, x: Any, which: int) -> Array:
    """One array of tokens."""
    array = of_dtype(dtype, name, x)
    width = sizes.in_dims[which]
    if array.ndim < 2 or array.shape[-1] != width:
        raise ValueError(f"{name} has shape {array.shape}; expected (..., tokens, {width})")
    return array


def of_dtype(dtype: np.dtype[Any], name: str, x: Any) -> Array:
    """Return an array that has the dtype of the layer."""
    array = _checks.array(name, x)
    if array.dtype != dtype:
        raise TypeError(f"{name} has dtype {array.dtype}; expected {dtype} like the layer")
    return array


def batch_shape(inputs: tuple[Array, ...]) -> tuple[int, ...]:
    """Return the batch axes of the result."""
    try:
        return np.broadcast_shapes(*(x.shape[:-2] for x in inputs))
    except ValueError:
        query, key, value = (x.shape for x in inputs)
        raise ValueError(
            f"key has shape {key} and value {value}; expected batch axes (all but the last two) "
            f"that broadcast with those of query, {query}"
        ) from None


# ---- positions --------------------------------------------------------------------------------


def first_position(query_offset: Any, kv_lengths: Any, n_query: int, n_key: int) -> Array:
    """Position of query 0, in the shape in which it was given."""
    if isinstance(query_offset, str) and query_offset == "end":
        lengths = n_key if kv_lengths is None else kv_lengths
        return _checks.integers("kv_lengths", lengths, np.shape(lengths), 0, n_key) - n_query
    shape = np.shape(query_offset)
    return _checks.integers("query_offset", query_offset, shape, -LARGEST, LARGEST)


def positions_from(first: Array, n_token: int) -> Array:
    """Positions (..., 1, n_token) of tokens that follow each other."""
    return first[..., None, None] + np.arange(n_token)


def in_position(position: Position | None, heads: Array, positions: ArrayLike | None) -> Array:
    """Let `position`, if there is one, work on heads; positions are 0, 1, 2 … where not given."""
    if position is None:
        if positions is not None:
            raise ValueError("positions is given; expected none, as the layer has no position")
        return heads
    if positions is None:
        positions = np.arange(heads.shape[-2])
    shape = np.shape(positions)
    positions = _checks.integers("positions", positions, shape, -LARGEST, LARGEST)
    try:
        expected = np.broadcast_shapes(heads.shape, (*shape, 1))
    except ValueError:
        raise ValueError(
            f"positions has shape {shape}; expected one that broadcasts to {heads.shape[:-1]}"
        ) from None
    result = position(heads, positions)
    if not isinstance(result, np.ndarray) or result.dtype != heads.dtype:
        came = getattr(result, "dtype", type(result).__name__)
        raise TypeError(f"position returned {came}; expected an array of {heads.dtype}")
    if result.shape != expected:
        raise ValueError(f"position returned shape {result.shape}; expected {expected}")
    return result
