"""The backward pass: gradients of padded batches, and of packed sequences."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from .._typing import Array, ArrayLike, Window
from ._attention import _attention_in, sequences
from ._dropout import dropout_factor
from ._scores import (
    masked_scores,
    positions,
    score_scale,
    softmax,
    weighted_rows,
    with_all_heads,
)


def attention_backward(
    grad_out: ArrayLike,
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    out: ArrayLike | None,
    lse: ArrayLike | None,
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
    grad_lse: ArrayLike | None = None,
    wanted: Sequence[str] = ("query", "key", "value"),
    precision: str = "highest",
    num_threads: int | None = None,
) -> tuple[Array, ...]:
    """Gradients of `attention` in float64.

    Parameters
    ----------
    grad_out : array, (..., n_head, n_query, value_width)
        Gradient of a number with respect to the output of `attention`.
    query, key, value, attn_mask
        What `attention` got.
    out, lse : array or None
        What `attention` returned. Both None: they are computed here. Where the call is one part of
        a larger one, over some of its keys, these are the output and lse of the larger one, and
        the gradients are those of the larger one.
    is_causal, window, query_offset, kv_lengths, scale, softcap, alibi_slopes, sinks, head_mask, \
dropout_p, dropout_seed
        As in `attention`.
    grad_lse : array, (..., n_head, n_query), optional
        Gradient of the same number with respect to the lse.
    wanted : sequence of str
        Names of the arguments whose gradients to return: "query", "key", "value", "attn_mask" (of
        floats), "sinks", "alibi_slopes", "head_mask".
    precision, num_threads
        Accepted for the sake of an equal signature, and ignored.

    Returns
    -------
    tuple of float64 arrays
        In the order of `wanted`, each with the shape of its argument: summed over the axes that
        were broadcast, and over the query heads that share a key head. What an excluded pair of
        query and key would add is 0, whatever the numbers there.

    Raises
    ------
    ValueError
        For a name in `wanted` that is not one of these, or whose argument was not given.

    Notes
    -----
    With the scores s, the weights ``P = exp(s - lse)`` (but see `_weights`) and the kept share Z of dropout, the output
    of query i is ``gate * sum_j Z_ij P_ij v_j``, and

        grad P_ij = gate * Z_ij * (grad_out_i . v_j)
        grad s_ij = P_ij * (grad P_ij - grad_out_i . out_i + grad_lse_i)
        grad v_j  = gate * sum_i Z_ij P_ij grad_out_i

    The rest is the chain rule of the score: ``1 / cosh(x)**2`` for a capped one, and then the
    product of query and key, the penalty of ALiBi, the mask. A sink is a key without a value. The
    term ``grad_out_i . out_i`` equals ``sum_j P_ij grad P_ij``, as in Dao et al. 2022, appendix B.2.
    """
    return _attention_backward_in(
        np.float64, grad_out, query, key, value, out, lse, attn_mask, is_causal=is_causal,
        window=window, query_offset=query_offset, kv_lengths=kv_lengths, scale=scale,
        softcap=softcap, alibi_slopes=alibi_slopes, sinks=sinks, head_mask=head_mask,
        dropout_p=dropout_p, dropout_seed=dropout_seed, grad_lse=grad_lse, wanted=wanted,
    )  # fmt: skip


def attention_varlen_backward(
    grad_out: ArrayLike,
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    out: ArrayLike | None,
    lse: ArrayLike | None,
    cu_seqlens_q: ArrayLike,
    cu_seqlens_k: ArrayLike,
    *,
    query_offset: ArrayLike | str = 0,
    alibi_slopes: ArrayLike | None = None,
    head_mask: ArrayLike | None = None,
    grad_lse: ArrayLike | None = None,
    wanted: Sequence[str] = ("query", "key", "value"),
    **options: Any,
) -> tuple[Array, ...]:
    """Gradients of `attention_varlen` in float64: those of `attention`, sequence by sequence.

    Parameters
    ----------
    grad_out : array, (n_row_q, n_head, value_width)
    query, key, value, cu_seqlens_q, cu_seqlens_k
        What `attention_varlen` got.
    out, lse : array, (n_row_q, n_head, value_width) and (n_row_q, n_head)
        What `attention_varlen` returned; both None: they are computed here.
    query_offset, alibi_slopes, head_mask
        As in `attention_varlen`.
    grad_lse : array, (n_row_q, n_head), optional
    wanted : sequence of str
        As in `attention_backward`, without "attn_mask".
    **options
        The other options of `attention_backward`.

    Returns
    -------
    tuple of float64 arrays
        In the order of `wanted`, each with the shape of its argument.
    """
    arguments = {
        "query": query, "key": key, "value": value, "sinks": options.get("sinks"),
        "alibi_slopes": alibi_slopes, "head_mask": head_mask,
    }  # fmt: skip
    arrays: dict[str, Any] = {
        name: None if x is None else np.asarray(x, np.float64) for name, x in arguments.items()
    }
    _check_wanted(wanted, arrays)
    for ignored in ("precision", "num_threads"):
        options.pop(ignored, None)
    total = {name: np.zeros_like(arrays[name]) for name in wanted}
    batched = {
        "query_offset": query_offset, "alibi_slopes": alibi_slopes, "head_mask": head_mask,
    }  # fmt: skip
    of_rows = [
        None if x is None else np.asarray(x, np.float64) for x in (grad_out, out, lse, grad_lse)
    ]
    for s, rows, keys, own in sequences(cu_seqlens_q, cu_seqlens_k, batched):
        q, k, v = (
            np.swapaxes(arrays[name][part], 0, 1)
            for name, part in (("query", rows), ("key", keys), ("value", keys))
        )
        do, o, own_lse, dlse = (None if x is None else x[rows].swapaxes(0, 1) for x in of_rows)
        parts = _attention_backward_in(
            np.float64, do, q, k, v, o, own_lse, grad_lse=dlse, wanted=wanted, first_entry=s,
            **own, **options,
        )  # fmt: skip
        for name, part in zip(wanted, parts, strict=True):
            if name in ("query", "key", "value"):
                total[name][rows if name == "query" else keys] += part.swapaxes(0, 1)
            elif total[name].ndim > part.ndim:  # one entry per sequence, or one for all of them
                total[name][s if len(total[name]) > 1 else 0] += part
            else:
                total[name] += part
    return tuple(total[name] for name in wanted)


def _attention_backward_in(
    dtype: type[np.floating[Any]],
    grad_out: Any,
    query: Any,
    key: Any,
    value: Any,
    out: Any,
    lse: Any,
    attn_mask: ArrayLike | None = None,
    *,
    sinks: ArrayLike | None = None,
    head_mask: ArrayLike | None = None,
    alibi_slopes: ArrayLike | None = None,
    dropout_p: float = 0.0,
    dropout_seed: int | None = None,
    first_entry: int = 0,
    grad_lse: ArrayLike | None = None,
    wanted: Sequence[str] = ("query", "key", "value"),
    **score_options: Any,
) -> tuple[Array, ...]:
    """The same formulas with every step in `dtype`: what rounding alone does to them."""
    arguments: dict[str, Any] = {
        "query": query, "key": key, "value": value, "attn_mask": attn_mask, "sinks": sinks,
        "alibi_slopes": alibi_slopes, "head_mask": head_mask,
    }  # fmt: skip
    _check_wanted(wanted, arguments)
    query, key, value = (np.asarray(x, dtype) for x in (query, key, value))
    if out is None or lse is None:
        out, lse = _attention_in(
            dtype, query, key, value, attn_mask, sinks=sinks, head_mask=head_mask,
            alibi_slopes=alibi_slopes, dropout_p=dropout_p, dropout_seed=dropout_seed,
            first_entry=first_entry, **score_options,
        )  # fmt: skip
    lse_eps = float(np.finfo(np.result_type(lse, np.float32)).eps)
    one_head = query.ndim == key.ndim == value.ndim == 2
    n_kv_head = 1 if one_head else key.shape[-3]
    q, k, v = with_all_heads(query, key, value)
    do, o, own_lse, dlse = (
        None if x is None else np.asarray(x, dtype)[(None,) if one_head else ()]
        for x in (grad_out, out, lse, grad_lse)
    )
    with np.errstate(all="ignore"):  # NaN, Inf and overflow are ordinary results here
        scores, visible = masked_scores(q, k, attn_mask, alibi_slopes=alibi_slopes, **score_options)
        factor = None
        if dropout_p:
            factor = dropout_factor(dropout_seed, scores.shape, dropout_p, first_entry)
            factor = factor.astype(dtype)
        grad_scores, counts, found = _through_softmax(
            scores, visible, v, do, o, own_lse, lse_eps, dlse, sinks, head_mask, factor
        )
        found |= _through_scores(grad_scores, counts, q, k, **score_options)
        for name in ("key", "value"):
            found[name] = _sum_group(found[name], n_kv_head)
        return tuple(_sum_to(found[name], np.shape(arguments[name])) for name in wanted)


def _through_softmax(
    scores: Array,
    visible: Array,
    value: Array,
    grad_out: Any,
    out: Any,
    lse: Any,
    lse_eps: float,
    grad_lse: Any,
    sinks: ArrayLike | None,
    head_mask: ArrayLike | None,
    factor: Array | None,
) -> tuple[Array, Array, dict[str, Array]]:
    """From the output back to the scores.

    Returns
    -------
    grad_scores : array like `scores`
    counts : bool array like `scores`
        Which pairs take part in the gradients of the scores. The others leave no trace.
    found : dict
        Gradients of value (per query head), sinks and head_mask.
    """
    dtype = scores.dtype
    zero = dtype.type(0)
    gate = np.ones((1, 1, 1), dtype)
    if head_mask is not None:
        gate = np.asarray(head_mask, dtype)[..., None, None]
    is_open = gate != 0  # through a gate of 0 flows nothing, not even NaN
    has_key = (visible.any(axis=-1) & (lse != -np.inf))[..., None]
    seen = visible & has_key
    weights, sink_weight = _weights(scores, sinks, lse, lse_eps)
    weights = np.where(seen, weights, zero)
    kept = weights if factor is None else weights * factor
    grad_kept = grad_out @ np.swapaxes(value, -1, -2)  # by the gated output, without its gate

    grad_weights = gate * grad_kept if factor is None else gate * grad_kept * factor
    mean = np.where(has_key & is_open, (grad_out * out).sum(axis=-1, keepdims=True), zero)
    by_lse = zero if grad_lse is None else grad_lse[..., None]
    counts = seen & (is_open | (grad_lse is not None))
    pull = np.where(is_open, grad_weights - mean, zero) + by_lse
    grad_scores = np.where(counts, weights * pull, zero)

    to_value = seen & is_open
    gated = np.where(to_value, gate * kept, zero)
    found = {
        "value": weighted_rows(np.swapaxes(gated, -1, -2), grad_out, np.swapaxes(to_value, -1, -2)),
        "head_mask": np.where(seen, kept * grad_kept, zero).sum(axis=(-2, -1)),
    }
    if sinks is not None:
        sink = np.asarray(sinks, dtype)[..., None, None]
        has_output = has_key & is_open & (grad_out.shape[-1] > 0)
        flows = (sink != -np.inf) & (has_output | (grad_lse is not None))
        found["sinks"] = np.where(flows, sink_weight * (by_lse - mean), zero).sum(axis=(-2, -1))
    return grad_scores, counts, found


def _weights(
    scores: Array, sinks: ArrayLike | None, lse: Array, lse_eps: float
) -> tuple[Array, Array]:
    """``exp(scores - lse)`` and that of the sink, without what is lost where lse is large.

    Beside a logit of -1e30 the logarithm of the number of keys has no place left in lse, and the
    weights would not sum to 1. So they come from a softmax of their own, times the share that the
    scores here have in those of a larger call, if lse is of one.
    """
    sink = scores.dtype.type(-np.inf) if sinks is None else np.asarray(sinks, scores.dtype)
    column = np.broadcast_to(sink[..., None, None], (*scores.shape[:-1], 1))
    weights, own_lse = softmax(np.concatenate([scores, column], axis=-1))
    is_own = np.abs(own_lse - lse) <= 4 * lse_eps * np.abs(lse)
    share = np.where(is_own, scores.dtype.type(1), np.exp(own_lse - lse))[..., None]
    return share * weights[..., :-1], share * weights[..., -1:]


def _through_scores(
    grad_scores: Array,
    counts: Array,
    query: Array,
    key: Array,
    *,
    query_offset: ArrayLike | str = 0,
    kv_lengths: ArrayLike | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    **visibility: Any,
) -> dict[str, Array]:
    """From the scores back to query, key (per query head), mask and slopes."""
    dtype = query.dtype
    position = positions(query.shape[-2], key.shape[-2], query_offset, kv_lengths)
    distance = np.abs(np.arange(key.shape[-2]) - position).astype(dtype)
    found = {"attn_mask": grad_scores, "alibi_slopes": -(grad_scores * distance).sum((-2, -1))}

    factor = dtype.type(score_scale(scale, query.shape[-1]))
    if softcap is not None:
        capped = (query @ np.swapaxes(key, -1, -2)) * factor / dtype.type(softcap)
        grad_scores = np.where(counts, grad_scores / np.cosh(capped) ** 2, dtype.type(0))
    found["query"] = factor * weighted_rows(grad_scores, key, counts)
    found["key"] = factor * weighted_rows(
        np.swapaxes(grad_scores, -1, -2), query, np.swapaxes(counts, -1, -2)
    )
    return found


def _check_wanted(wanted: Sequence[str], arguments: dict[str, Any]) -> None:
    for name in wanted:
        if name not in arguments:
            raise ValueError(f"wanted names {name!r}; expected some of {', '.join(arguments)}")
        if arguments[name] is None:
            raise ValueError(f"wanted names {name!r}, which was not given")
        if name == "attn_mask" and np.asarray(arguments[name]).dtype == np.bool_:
            raise ValueError("wanted names 'attn_mask', which is bool and has no gradient")


def _sum_group(grad: Array, n_kv_head: int) -> Array:
    """Sum the query heads that read the same key head."""
    *batch, n_head, n_row, width = grad.shape
    group = n_head // max(n_kv_head, 1)
    return grad.reshape(*batch, n_kv_head, group, n_row, width).sum(axis=-3)


def _sum_to(grad: Array, shape: tuple[int, ...]) -> Array:
    """Sum over the axes that broadcasting `shape` made or lengthened."""
    new = grad.ndim - len(shape)
    grad = grad.sum(axis=tuple(range(new)))
    longer = tuple(i for i, n in enumerate(shape) if n == 1 and grad.shape[i] != 1)
    return grad.sum(axis=longer, keepdims=True)
