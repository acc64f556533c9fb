"""The layer: projections around attention, and their gradients."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, overload

import numpy as np

from .._typing import Array, ArrayLike
from ._attention import _attention_in
from ._backward import _attention_backward_in, _sum_to
from ._scores import positions

_INPUTS = ("query", "key", "value")


@overload
def multi_head_attention(
    parameters: Mapping[str, ArrayLike],
    query: ArrayLike,
    key: ArrayLike | None = ...,
    value: ArrayLike | None = ...,
    attn_mask: ArrayLike | None = ...,
    *,
    position: Callable[[Array, Array], Array] | None = ...,
    return_lse: Literal[False] = ...,
    **options: Any,
) -> Array: ...


@overload
def multi_head_attention(
    parameters: Mapping[str, ArrayLike],
    query: ArrayLike,
    key: ArrayLike | None = ...,
    value: ArrayLike | None = ...,
    attn_mask: ArrayLike | None = ...,
    *,
    position: Callable[[Array, Array], Array] | None = ...,
    return_lse: Literal[True],
    **options: Any,
) -> tuple[Array, Array]: ...


@overload
def multi_head_attention(
    parameters: Mapping[str, ArrayLike],
    query: ArrayLike,
    key: ArrayLike | None = ...,
    value: ArrayLike | None = ...,
    attn_mask: ArrayLike | None = ...,
    *,
    position: Callable[[Array, Array], Array] | None = ...,
    return_lse: bool,
    **options: Any,
) -> Array | tuple[Array, Array]: ...


def multi_head_attention(
    parameters: Mapping[str, ArrayLike],
    query: ArrayLike,
    key: ArrayLike | None = None,
    value: ArrayLike | None = None,
    attn_mask: ArrayLike | None = None,
    *,
    position: Callable[[Array, Array], Array] | None = None,
    return_lse: bool = False,
    **options: Any,
) -> Array | tuple[Array, Array]:
    """The layer ``mha_fast.MultiHeadAttention`` in float64.

    Parameters
    ----------
    parameters : mapping of str to array
        ``W_Q``, ``W_K``, ``W_V``, (heads, in, width), ``W_O``, (heads, value width, out), and, if
        there are any, ``b_Q``, ``b_K``, ``b_V``, (heads, width), and ``b_O``, (out,).
    query : array, (..., n_query, in)
    key, value : array, (..., n_key, in), optional
        Default `query` and `key`.
    attn_mask, return_lse, **options
        As in `attention`.
    position : callable, optional
        As in ``mha_fast.MultiHeadAttention``.

    Returns
    -------
    out : float64 array, (..., n_query, out)
    lse : float64 array, (..., n_head, n_query)
        Only with `return_lse`.

    References
    ----------
    Vaswani et al. 2017, section 3.2.2.
    """
    call = _Call(np.float64, parameters, query, key, value, attn_mask, position, options)
    projected = np.einsum("...htw,hwd->...td", call.out, call.parameters["W_O"])
    projected += call.parameters.get("b_O", 0.0)
    return (projected, call.lse) if return_lse else projected


def multi_head_attention_backward(
    grad_out: ArrayLike,
    parameters: Mapping[str, ArrayLike],
    query: ArrayLike,
    key: ArrayLike | None = None,
    value: ArrayLike | None = None,
    attn_mask: ArrayLike | None = None,
    *,
    grad_lse: ArrayLike | None = None,
    position: Callable[[Array, Array], Array] | None = None,
    wanted: Sequence[str] = (),
    **options: Any,
) -> dict[str, Array]:
    """Gradients of `multi_head_attention` in float64.

    Parameters
    ----------
    grad_out : array, (..., n_query, out)
        Gradient of a number with respect to the output.
    parameters, query, key, value, attn_mask, **options
        What `multi_head_attention` got.
    grad_lse : array, (..., n_head, n_query), optional
        Gradient of the same number with respect to the lse.
    position : callable, optional
        A rotation: the negative positions take it back.
    wanted : sequence of str
        Options of which to return the gradients as well, as in `attention_backward`.

    Returns
    -------
    dict of str to float64 array
        By name: of all parameters, of the inputs that were given, and of what is `wanted`. What
        served as several inputs has the sum of their gradients.

    Notes
    -----
    With ``Y = X W + b`` per head, and the gradient G of Y::

        grad W = X^T G      grad b = sum of the rows of G      grad X = G W^T
    """
    return _layer_backward_in(
        np.float64, grad_out, parameters, query, key, value, attn_mask, grad_lse=grad_lse,
        position=position, wanted=wanted, **options,
    )  # fmt: skip


class _Call:
    """Heads, output and lse of one forward pass in `dtype`."""

    def __init__(
        self,
        dtype: type[np.floating[Any]],
        parameters: Mapping[str, ArrayLike],
        query: ArrayLike,
        key: ArrayLike | None,
        value: ArrayLike | None,
        attn_mask: ArrayLike | None,
        position: Callable[[Array, Array], Array] | None,
        options: dict[str, Any],
    ) -> None:
        self.parameters = {name: np.asarray(x, dtype) for name, x in parameters.items()}
        key_name = "query" if key is None else "key"
        self.names = ("query", key_name, key_name if value is None else "value")
        given = {"query": query, "key": key, "value": value}
        self.tokens = [np.asarray(given[name], dtype) for name in self.names]
        self.heads = []
        for letter, tokens in zip("QKV", self.tokens, strict=True):
            heads = np.einsum("...td,hdw->...htw", tokens, self.parameters[f"W_{letter}"])
            if f"b_{letter}" in self.parameters:
                heads = heads + self.parameters[f"b_{letter}"][:, None]
            self.heads.append(heads)
        n_query, n_key = self.tokens[0].shape[-2], self.tokens[1].shape[-2]
        offset, lengths = options.get("query_offset", 0), options.get("kv_lengths")
        self.positions = positions(n_query, n_key, offset, lengths)[..., 0], np.arange(n_key)
        if position is not None:
            for i in (0, 1):
                self.heads[i] = position(self.heads[i], self.positions[i])
        q, k, v = self.heads
        self.out, self.lse = _attention_in(dtype, q, k, v, attn_mask, **options)


def _layer_backward_in(
    dtype: type[np.floating[Any]],
    grad_out: ArrayLike,
    parameters: Mapping[str, ArrayLike],
    query: ArrayLike,
    key: ArrayLike | None = None,
    value: ArrayLike | None = None,
    attn_mask: ArrayLike | None = None,
    *,
    grad_lse: ArrayLike | None = None,
    position: Callable[[Array, Array], Array] | None = None,
    wanted: Sequence[str] = (),
    **options: Any,
) -> dict[str, Array]:
    """The same formulas with every step in `dtype`."""
    call = _Call(dtype, parameters, query, key, value, attn_mask, position, options)
    grad = np.asarray(grad_out, dtype)
    batched, out = _flat_batch(grad, 2), _flat_batch(call.out, 3)
    found = {"W_O": np.einsum("bhtw,btd->hwd", out, batched)}
    if "b_O" in call.parameters:
        found["b_O"] = batched.sum(axis=(0, 1))
    grad_heads = np.einsum("...td,hwd->...htw", grad, call.parameters["W_O"])
    q, k, v = call.heads
    grads = _attention_backward_in(
        dtype, grad_heads, q, k, v, call.out, call.lse, attn_mask, grad_lse=grad_lse,
        wanted=(*_INPUTS, *wanted), **options,
    )  # fmt: skip
    found |= dict(zip(wanted, grads[3:], strict=True))
    for i, (letter, name) in enumerate(zip("QKV", call.names, strict=True)):
        tokens, weights = call.tokens[i], call.parameters[f"W_{letter}"]
        of_heads = grads[i]
        if position is not None and i < 2:
            of_heads = position(of_heads, -call.positions[i])
        of_heads = _sum_to(of_heads, (*tokens.shape[:-2], *of_heads.shape[-3:]))
        rows, of_rows = _flat_batch(tokens, 2), _flat_batch(of_heads, 3)
        found[f"W_{letter}"] = np.einsum("btd,bhtw->hdw", rows, of_rows)
        if f"b_{letter}" in call.parameters:
            found[f"b_{letter}"] = of_rows.sum(axis=(0, 2))
        of_tokens = np.einsum("...htw,hdw->...td", of_heads, weights)
        found[name] = found[name] + of_tokens if name in found else of_tokens
    return found


def _flat_batch(x: Array, n_own: int) -> Array:
    """One batch axis before the last `n_own` axes."""
    return x.reshape(math.prod(x.shape[:-n_own]), *x.shape[-n_own:])
