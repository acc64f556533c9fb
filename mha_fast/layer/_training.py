"""The backward pass of a layer: what a call keeps for it, and the gradients."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from .. import _checks
from .._gradients import attention_backward
from .._typing import Array
from ._inputs import Position
from ._parameters import Parameters
from ._sizes import KEY, QUERY, VALUE

if TYPE_CHECKING:
    from ._multi_head import MultiHeadAttention

INPUTS = ("query", "key", "value")
OPTIONS_WITH_GRADIENT = ("attn_mask", "sinks", "alibi_slopes", "head_mask")


@dataclass(frozen=True, eq=False, repr=False)
class Activations:
    """What one call of `MultiHeadAttention.forward_saving` keeps for `backward`.

    Attributes
    ----------
    query : array, (..., num_heads, n_query, head_width)
        Query heads as `attention` got them, after `position`.
    key : array, (..., num_kv_heads, n_key, head_width)
        Key heads, likewise.
    value : array, (..., num_kv_heads, n_key, value_width)
    out : array, (..., num_heads, n_query, value_width)
        What `attention` returned, gates included, before W_O.
    lse : array, (..., num_heads, n_query)

    Notes
    -----
    The tokens and the options of the call are kept too, and none of it is copied: what is written
    to them before `backward` changes the gradients.
    """

    query: Array
    key: Array
    value: Array
    out: Array
    lse: Array
    _tokens: tuple[Array, ...]
    _names: tuple[str, ...]  # which argument served as query, key and value
    _positions: tuple[Array, Array] | None  # of queries and keys
    _options: dict[str, Any]

    @property
    def differentiable(self) -> tuple[str, ...]:
        """Names of the tokens and options that have a gradient."""
        options = []
        for name in OPTIONS_WITH_GRADIENT:
            given = self._options.get(name)
            if given is not None and np.asarray(given).dtype != np.bool_:
                options.append(name)
        return (*dict.fromkeys(self._names), *options)


def names_of_inputs(has_key: bool, has_value: bool) -> tuple[str, str, str]:
    """The argument that serves as query, as key and as value, where some are left out."""
    key = "key" if has_key else "query"
    return "query", key, "value" if has_value else key


def backward(
    layer: "MultiHeadAttention",
    grad_out: Any,
    saved: Activations,
    grad_lse: Any,
    wanted: Sequence[str] | None,
) -> dict[str, Array]:
    """See `MultiHeadAttention.backward`."""
    if not isinstance(saved, Activations):
        raise TypeError(f"saved is of type {type(saved).__name__}; expected Activations")
    sizes = (layer.num_heads, layer.num_kv_heads, layer.head_width, layer.value_width)
    theirs = (
        saved.query.shape[-3],
        *saved.value.shape[-3:-2],
        saved.query.shape[-1],
        saved.value.shape[-1],
    )
    if theirs != sizes:
        raise ValueError(
            f"saved has (num_heads, num_kv_heads, head_width, value_width) = {theirs}; expected "
            f"{sizes}, those of the layer"
        )
    parameters = layer._parameters
    names = _chosen_names(wanted, list(layer.parameters()), saved)
    joined = saved.out.swapaxes(-3, -2)
    shape = (*joined.shape[:-2], layer.embed_dim)
    grad = _gradient("grad_out", grad_out, shape, layer.dtype)

    grad_joined, found = _of_output(parameters, grad, joined)
    from_heads = [name for name in OPTIONS_WITH_GRADIENT if name in names]
    from_tokens = set(names) - set(from_heads) - found.keys()
    if from_tokens:
        from_heads += INPUTS
    if from_heads:
        heads = saved.query, saved.key, saved.value
        by_name = dict(
            zip(
                from_heads,
                attention_backward(
                    grad_joined.swapaxes(-3, -2), *heads, saved.out, saved.lse, **saved._options,
                    grad_lse=grad_lse, wanted=from_heads,
                ),
                strict=True,
            )
        )  # fmt: skip
        if from_tokens:
            found |= _of_inputs(layer, [by_name.pop(name) for name in INPUTS], saved)
        found |= by_name
    return {name: found[name] for name in names}


def _chosen_names(
    wanted: Sequence[str] | None, named: Sequence[str], saved: Activations
) -> list[str]:
    """Check the names of gradients; not given, they are those of all parameters and tokens."""
    if wanted is None:
        return [*named, *(name for name in saved.differentiable if name in INPUTS)]
    possible = (*named, *saved.differentiable)
    if isinstance(wanted, str):
        raise TypeError(f"wanted is {wanted!r}; expected a sequence of names")
    for name in wanted:
        if name not in possible:
            raise ValueError(f"wanted names {name!r}; expected some of {', '.join(possible)}")
    return list(wanted)


def _gradient(name: str, grad: Any, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """Check one of the gradients to begin with."""
    array = _checks.array(name, grad)
    if array.dtype != dtype:
        raise TypeError(f"{name} has dtype {array.dtype}; expected {dtype}")
    if array.shape != shape:
        raise ValueError(f"{name} has shape {array.shape}; expected {shape}")
    return array


def _out_of_position(position: Position, grad: Array, positions: Array) -> Array:
    """The gradient of heads, from that of heads in position."""
    own = getattr(position, "backward", None)
    if own is not None:
        return np.asarray(own(grad, positions), grad.dtype)
    before = position(grad, -positions)
    _check_rotation(position, before, grad, positions)
    return before


def _check_rotation(position: Position, before: Array, after: Array, positions: Array) -> None:
    """Refuse a position whose negative does not undo it, or that changes lengths."""
    # Roots of the rounding error, that of bfloat16 for all of 16 bits.
    tolerance = math.sqrt(2.0**-8 if after.itemsize == 2 else np.finfo(after.dtype).eps)
    lost = np.abs(position(before, positions) - after).max(initial=0)
    length, length_before = (np.square(x, dtype=np.float64).sum() for x in (after, before))
    is_lost = lost > tolerance * np.abs(after).max(initial=0)
    if is_lost or abs(length_before - length) > tolerance * length:
        raise ValueError(
            "position is no rotation that the negative positions take back, so its gradient is not "
            "known; expected one, or an object with a method backward(grad, positions)"
        )


# ---- products ---------------------------------------------------------------------------------


def _of_output(
    parameters: Parameters, grad: Array, joined: Array
) -> tuple[Array, dict[str, Array]]:
    """Back through W_O: gradients of what is gathered, (..., n_query, heads, width), and of W_O."""
    sizes, dtype = parameters.sizes, parameters.dtype
    rows, side_by_side = _rows(grad), _rows(joined.reshape(*joined.shape[:-2], sizes.joined_width))
    shape = (sizes.embed_dim, sizes.n_head, sizes.value_width)
    found = {"W_O": (rows.T @ side_by_side).astype(dtype).reshape(shape).transpose(1, 2, 0)}
    if parameters.out_bias is not None:
        found["b_O"] = _sum_of(rows).astype(dtype)
    grad_joined = (rows @ _wide(parameters.out_weight)).astype(dtype, copy=False)
    return grad_joined.reshape(joined.shape), found


def _of_inputs(
    layer: "MultiHeadAttention", grads: list[Array], saved: Activations
) -> dict[str, Array]:
    """Back through W_Q, W_K and W_V: gradients of the matrices, their biases, and the tokens."""
    if layer.position is not None and saved._positions is not None:
        for which, positions in zip((QUERY, KEY), saved._positions, strict=True):
            grads[which] = _out_of_position(layer.position, grads[which], positions)
    found: dict[str, Array] = {}
    for name in dict.fromkeys(saved._names):
        members = [which for which in (QUERY, KEY, VALUE) if saved._names[which] == name]
        own = {which: grads[which] for which in members}
        found |= _of_one_input(layer._parameters, own, saved._tokens[members[0]], name)
    return found


def _of_one_input(
    parameters: Parameters, grads: dict[int, Array], tokens: Array, name: str
) -> dict[str, Array]:
    """The same of one argument, whatever it served as, in one product each."""
    sizes, dtype = parameters.sizes, parameters.dtype
    first, stop = min(grads), max(grads) + 1
    ends = np.cumsum([0, *sizes.in_rows[first:stop]])
    flat = np.empty((*tokens.shape[:-1], ends[-1]), dtype)
    for start, end, (which, grad) in zip(ends[:-1], ends[1:], grads.items(), strict=True):
        part = flat[..., start:end]
        n_head, width = sizes.in_heads[which]
        per_head = part.reshape(*part.shape[:-1], n_head, width)
        per_head[...] = _sum_to(grad.swapaxes(-3, -2), per_head.shape)
    rows = _rows(flat)
    by_matrix = (rows.T @ _rows(tokens)).astype(dtype, copy=False)
    by_bias = _sum_of(rows).astype(dtype)
    by_input = rows @ _wide(parameters.weight(first, stop))
    found: dict[str, Array] = {name: by_input.astype(dtype, copy=False).reshape(tokens.shape)}
    for start, end, which in zip(ends[:-1], ends[1:], grads, strict=True):
        n_head, width = sizes.in_heads[which]
        letter = "QKV"[which]
        matrix = by_matrix[start:end].reshape(n_head, width, sizes.in_dims[which])
        found[f"W_{letter}"] = matrix.swapaxes(1, 2)
        if parameters.in_bias is not None:
            found[f"b_{letter}"] = by_bias[start:end].reshape(n_head, width)
    return found


def _rows(x: Array) -> Array:
    """All tokens of a batch, one after the other, wide enough to multiply."""
    return _wide(x).reshape(math.prod(x.shape[:-1]), x.shape[-1])


def _wide(x: Array) -> Array:
    """16-bit numbers as float32, in which they are multiplied."""
    return x.astype(np.float32) if x.dtype.itemsize == 2 else x


def _sum_of(rows: Array) -> Array:
    """Sum over the rows, by a product: NumPy's own sum would add them one after the other."""
    return np.ones(len(rows), rows.dtype) @ rows


def _sum_to(grad: Array, shape: tuple[int, ...]) -> Array:
    """Sum over batch axes that `position` made or lengthened by one position per sequence."""
    grad = grad.sum(axis=tuple(range(grad.ndim - len(shape))))
    longer = tuple(i for i, n in enumerate(shape) if n != grad.shape[i])
    return grad.sum(axis=longer, keepdims=True) if longer else grad
