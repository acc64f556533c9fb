"""apply_rotary(): positions as rotations of pairs of features."""

from __future__ import annotations

import numpy as np

from .. import _checks
from .._options import LARGEST_OFFSET
from .._typing import Array, ArrayLike


def apply_rotary(
    heads: ArrayLike,
    positions: ArrayLike | None = None,
    *,
    base: float = 10000.0,
    width: int | None = None,
    interleaved: bool = False,
) -> Array:
    """Turn pairs of features by angles that grow with the position: the rotary embedding.

    Pair i of a token at position p is turned by ``p * base ** (-2 * i / width)``, so that the
    product of a query and a key depends on the distance of their positions only.

    Parameters
    ----------
    heads : array, (..., n_token, head_width)
        Query or key heads. float32, float64, float16 or bfloat16.
    positions : int array broadcastable to (..., n_token), optional
        Position of each token; 0, 1, 2 and on when not given. With a position of its own for each
        sequence, (n_batch, 1, n_token) meets (n_batch, n_head, n_token, head_width).
    base : float
        Above 0. 10000 in [1]_; models for long texts have larger ones.
    width : int, optional
        How many features, the first ones, are turned; even. The others stay as they are (GPT-NeoX,
        GPT-J, Phi). Default: all.
    interleaved : bool
        Which features are a pair. False: i and ``i + width // 2``, as the weights of LLaMA and
        GPT-NeoX in Transformers expect. True: ``2 * i`` and ``2 * i + 1``, as in [1]_, GPT-J and the
        weights of LLaMA as Meta publishes them.

    Returns
    -------
    array, (..., n_token, head_width)
        A new one, of the dtype of `heads`. 16-bit types are turned in float32 and rounded once.

    Raises
    ------
    TypeError
        A dtype that is not accepted, or positions that are no integers.
    ValueError
        A width that is odd or too large, positions that do not broadcast, or a base that is not
        above 0.

    References
    ----------
    .. [1] J. Su et al.: RoFormer: Enhanced Transformer with Rotary Position Embedding. 2021,
       section 3.2.2, equations 15 and 34.

    Examples
    --------
    As `position` of a layer; ``functools.partial`` sets other options:

    >>> import numpy as np, mha_fast
    >>> layer = mha_fast.MultiHeadAttention(64, 4, position=mha_fast.apply_rotary, seed=0)
    >>> layer(np.ones((2, 10, 64), np.float32), is_causal=True).shape
    (2, 10, 64)
    """
    x = _checks.array("heads", heads)
    if x.dtype.name not in _checks.FLOAT_NAMES:
        raise TypeError(f"heads has dtype {x.dtype}; expected {_checks.FLOATS}")
    if x.ndim < 2:
        raise ValueError(f"heads has shape {x.shape}; expected (..., tokens, head width)")
    n_turned = _width(width, x.shape[-1])
    flag = _checks.flag("interleaved", interleaved)
    places = _positions(positions, x.shape)
    base = _checks.finite_above_0("base", base)
    pairs = np.arange(n_turned // 2)
    # In float64 until here: at position 1e6 the angle of float32 would be off by 0.03.
    angle = places[..., None] * base ** (-2 * pairs / max(n_turned, 1))
    dtype = np.float64 if x.dtype == np.float64 else np.float32
    cos, sin = np.cos(angle).astype(dtype), np.sin(angle).astype(dtype)
    if flag:
        first, second = slice(0, n_turned, 2), slice(1, n_turned, 2)
    else:
        first, second = slice(0, n_turned // 2), slice(n_turned // 2, n_turned)
    a: Array = x[..., first].astype(dtype, copy=False)
    b: Array = x[..., second].astype(dtype, copy=False)
    result: Array = np.array(np.broadcast_to(x, np.broadcast_shapes(x.shape, (*places.shape, 1))))
    result[..., first], result[..., second] = a * cos - b * sin, b * cos + a * sin
    return result


def _width(width: int | None, head_width: int) -> int:
    n_turned = head_width if width is None else _checks.size("width", width)
    if n_turned % 2 or n_turned > head_width:
        raise ValueError(
            f"width is {n_turned}; expected an even number of at most {head_width}, the head width"
        )
    return n_turned


def _positions(positions: ArrayLike | None, shape: tuple[int, ...]) -> Array:
    if positions is None:
        return np.arange(shape[-2])
    own = np.shape(positions)
    try:
        np.broadcast_shapes(shape[:-1], own)
    except ValueError:
        raise ValueError(
            f"positions has shape {own}; expected one that broadcasts to {shape[:-1]}"
        ) from None
    return _checks.integers("positions", positions, own, -LARGEST_OFFSET, LARGEST_OFFSET)
