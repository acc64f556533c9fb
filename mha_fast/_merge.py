"""merge_attention(): one result from partial results over disjoint sets of keys."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from . import _checks
from ._typing import Array, ArrayLike

# What the parts are weighed and added in; the result is rounded back once.
_SUM_DTYPES = {
    "float16": np.float32,
    "bfloat16": np.float32,
    "float32": np.float32,
    "float64": np.float64,
}
_LSE_DTYPES = (np.dtype(np.float32), np.dtype(np.float64))


def merge_attention(
    outs: ArrayLike | Sequence[ArrayLike], lses: ArrayLike | Sequence[ArrayLike]
) -> tuple[Array, Array]:
    """Join the results of attention over disjoint sets of keys into that over all of them.

    Parameters
    ----------
    outs : sequence of arrays, or one array with the parts on its first axis
        The output of each part, (..., n_query, value_width), or (n_token, n_head, value_width)
        for packed sequences. All of one shape and one dtype: float16, bfloat16, float32 or
        float64.
    lses : sequence of arrays, or one array with the parts on its first axis
        The log-sum-exp of each part, as `return_lse` gives it: the shape of its output without
        the last axis. All float32 or all float64.

    Returns
    -------
    out : array, shape and dtype of one part
        0 where no part has a key.
    lse : array, shape and dtype of the log-sum-exp of one part
        -inf where no part has a key.

    Raises
    ------
    TypeError
        `outs` or `lses` is no sequence, or an array in it has a dtype that is not accepted.
    ValueError
        There is no part, the numbers of parts differ, or the shapes do.

    Notes
    -----
    With ``out_p`` and ``lse_p`` of part ``p``, row by row::

        lse = log(sum_p exp(lse_p))
        out = sum_p exp(lse_p - lse) * out_p

    evaluated around the largest ``lse_p``, so that no size of it overflows. The order of the
    parts matters to the rounding only.

    A part whose log-sum-exp is -inf has no key and adds nothing, even if its output holds NaN.
    NaN or Inf in any other part propagates, also where the weight of the part rounds to 0.

    float16 and bfloat16 parts are added in float32 and rounded once.

    A sink must be given to one of the parts only; each part that has it counts it. Gates
    (`head_mask`) are the same in all parts, or set to the merged output.

    Time and memory are those of a few passes over the outputs.

    References
    ----------
    Online softmax: Milakov and Gimelshein 2018, section 3.1. Joining parts of the keys: Dao et
    al. 2023 (flash decoding).

    Examples
    --------
    >>> import numpy as np, mha_fast
    >>> rng = np.random.default_rng(0)
    >>> query, key, value = rng.standard_normal((3, 8, 100, 64))
    >>> left = mha_fast.attention(query, key[:, :60], value[:, :60], return_lse=True)
    >>> right = mha_fast.attention(query, key[:, 60:], value[:, 60:], return_lse=True)
    >>> out, lse = mha_fast.merge_attention(*zip(left, right))
    >>> np.allclose(out, mha_fast.attention(query, key, value))
    True
    """
    out_parts, lse_parts = _check(outs, lses)
    stacked = np.stack(lse_parts)
    empty = stacked == -np.inf
    sum_dtype = _SUM_DTYPES[out_parts[0].dtype.name]
    with np.errstate(all="ignore"):  # NaN, Inf and weights that round to 0 are ordinary here
        # In the wider of the two dtypes, so that the shares add up to 1 in that of the sum.
        shares, lse = _shares(stacked.astype(np.promote_types(stacked.dtype, sum_dtype)))
        out = _weighted_sum(out_parts, shares.astype(sum_dtype), empty)
    return out.astype(out_parts[0].dtype, copy=False), lse.astype(stacked.dtype)


def _shares(lses: Array) -> tuple[Array, Array]:
    """Share of each part in each row, and the log-sum-exp of all parts."""
    peak = lses.max(axis=0)
    # At the peak the distance is 0, also where it is -inf or inf, which have no difference.
    weights = np.exp(np.where(lses == peak, lses.dtype.type(0), lses - peak))
    total = weights.sum(axis=0)
    return weights / total, peak + np.log(total)


def _weighted_sum(outs: list[Array], shares: Array, empty: Array) -> Array:
    total: Array | None = None
    for out, share, no_key in zip(outs, shares, empty, strict=True):
        part = out * share[..., None]
        np.copyto(part, 0, where=no_key[..., None])  # 0 * nan is nan
        total = part if total is None else np.add(total, part, out=total)
    assert total is not None  # one part at least
    return total


# ---- checks -----------------------------------------------------------------------------------


def _check(outs: Any, lses: Any) -> tuple[list[Array], list[Array]]:
    out_parts, lse_parts = _parts("outs", outs), _parts("lses", lses)
    if not out_parts:
        raise ValueError("outs has no part; expected at least one")
    if len(lse_parts) != len(out_parts):
        raise ValueError(
            f"lses has {len(lse_parts)} parts; expected {len(out_parts)} to match outs"
        )
    first = out_parts[0]
    if first.dtype.name not in _SUM_DTYPES:
        expected = "float16, bfloat16, float32 or float64"
        raise TypeError(f"outs[0] has dtype {first.dtype}; expected {expected}")
    if first.ndim == 0:
        raise ValueError("outs[0] has shape (); expected (..., rows, width)")
    if lse_parts[0].dtype not in _LSE_DTYPES:
        raise TypeError(f"lses[0] has dtype {lse_parts[0].dtype}; expected float32 or float64")
    _check_alike("outs", out_parts, first.shape, "like outs[0]")
    _check_alike("lses", lse_parts, first.shape[:-1], "to match outs[0]")
    return out_parts, lse_parts


def _parts(name: str, parts: Any) -> list[Array]:
    if hasattr(parts, "__array__"):
        whole = _checks.array(name, parts)
        if whole.ndim == 0:
            raise TypeError(f"{name} has shape (); expected the parts on its first axis")
        return list(whole)
    if isinstance(parts, str) or not isinstance(parts, Sequence):
        raise TypeError(
            f"{name} is of type {type(parts).__name__}; expected a sequence of arrays, or one "
            "array with the parts on its first axis"
        )
    return [_checks.array(f"{name}[{i}]", part) for i, part in enumerate(parts)]


def _check_alike(name: str, parts: list[Array], shape: tuple[int, ...], like: str) -> None:
    """Name the first part whose dtype is not that of part 0, or whose shape is not `shape`."""
    for i, part in enumerate(parts):
        if part.dtype != parts[0].dtype:
            raise TypeError(
                f"{name}[{i}] has dtype {part.dtype}; expected {parts[0].dtype} like {name}[0]"
            )
        if part.shape != shape:
            raise ValueError(f"{name}[{i}] has shape {part.shape}; expected {shape} {like}")
