"""mha_fast for JAX, on the CPU: `jax.nn.dot_product_attention` on these kernels.

The kernels are called back from the compiled program (`jax.pure_callback`). A foreign function of
XLA would save some tens of microseconds per call, but has to be compiled against JAX.
"""

from functools import partial
from typing import Any

import numpy as np

from .. import attention, attention_backward
from .._typing import Array

try:
    import jax
    import jax.numpy as jnp
except ModuleNotFoundError as error:
    raise ImportError(
        'mha_fast.jax needs JAX; install it with: pip install "mha_fast[jax]"'
    ) from error

__all__ = ["dot_product_attention"]


def dot_product_attention(
    query: Any,
    key: Any,
    value: Any,
    bias: Any = None,
    mask: Any = None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    query_seq_lengths: Any = None,
    key_value_seq_lengths: Any = None,
    local_window_size: int | tuple[int, int] | None = None,
    return_residual: bool = False,
) -> Any:
    """`jax.nn.dot_product_attention` on the kernels of mha_fast.

    Works under `jax.jit`, `jax.vmap` and `jax.grad` (reverse mode, with respect to query, key,
    value and bias).

    Parameters
    ----------
    query : array, (batch, T, heads, width) or (T, heads, width)
        float32, float64, float16 or bfloat16.
    key, value : array, (batch, S, key/value heads, width) or (S, key/value heads, width)
        The number of query heads is a multiple of theirs. The width of value may differ.
    bias : array, optional
        Four axes, broadcastable to (batch, heads, T, S); added to the scaled scores.
    mask : bool array, optional
        The same shape; True lets the key through.
    scale : float, optional
        Default ``1 / sqrt(width)``.
    is_causal : bool
        Query i sees the keys 0 … i.
    query_seq_lengths, key_value_seq_lengths : int array, (batch,), optional
        Number of valid queries and keys of each sequence.
    local_window_size : int or (left, right), optional
        Query i sees the keys ``i - left`` to ``i + right``.
    return_residual : bool
        Also return the log-sum-exp of each query.

    Returns
    -------
    out : array, shape of query, with the width of value
    residual : array, (batch, T, heads) or (T, heads)
        With `return_residual`; float32, or float64 for float64.

    Raises
    ------
    TypeError, ValueError
        A dtype or shape that does not fit.

    Notes
    -----
    Where the meaning differs from JAX's function: a query that sees no key gives 0 and a residual
    of ``-inf`` here (JAX: some mean of the values), and so does a query behind its sequence's
    length; the residual has a gradient; what is hidden has no influence even if it is NaN; there is no `implementation` to
    choose. 16-bit inputs are computed in float32.

    Examples
    --------
    >>> import jax, mha_fast.jax
    >>> x = jax.random.normal(jax.random.key(0), (2, 100, 8, 64))  # (batch, T, heads, width)
    >>> jax.jit(lambda x: mha_fast.jax.dot_product_attention(x, x, x, is_causal=True))(x).shape
    (2, 100, 8, 64)
    """
    query, key, value = (jnp.asarray(x) for x in (query, key, value))
    _check(query, key, value)
    one = query.ndim == 3
    if one:
        query, key, value = query[None], key[None], value[None]
    n_batch, n_query = query.shape[:2]
    added = _joined(bias, mask, (n_batch, query.shape[2], n_query, key.shape[1]))
    lengths = None
    if key_value_seq_lengths is not None:
        lengths = _lengths("key_value_seq_lengths", key_value_seq_lengths, n_batch)
    window = local_window_size
    if isinstance(window, int):
        window = (window, window)
    options = (None if scale is None else float(scale), bool(is_causal), window)
    out, lse = _attend(query, key, value, added, lengths, options)
    if query_seq_lengths is not None:
        valid = (
            jnp.arange(n_query) < _lengths("query_seq_lengths", query_seq_lengths, n_batch)[:, None]
        )
        out = jnp.where(valid[:, :, None, None], out, 0)
        lse = jnp.where(valid[:, :, None], lse, -jnp.inf)
    if one:
        out, lse = out[0], lse[0]
    return (out, lse) if return_residual else out


def _check(query: Any, key: Any, value: Any) -> None:
    for name, x in (("query", query), ("key", key), ("value", value)):
        if x.ndim not in (3, 4) or x.ndim != query.ndim:
            raise ValueError(
                f"{name} has shape {x.shape}; expected (batch, rows, heads, width) or (rows, heads, "
                f"width), alike for all, with query of shape {query.shape}"
            )
        if x.dtype != query.dtype or not jnp.issubdtype(x.dtype, jnp.floating):
            raise TypeError(f"{name} has dtype {x.dtype}; expected one floating dtype for all")
    if query.ndim == 4 and not len(query) == len(key) == len(value):
        raise ValueError(
            f"key has shape {key.shape} and value {value.shape}; expected {len(query)} batch "
            "entries to match query"
        )
    if key.shape[-1] != query.shape[-1]:
        raise ValueError(f"key has shape {key.shape}; expected width {query.shape[-1]} as of query")
    if key.shape[:-1] != value.shape[:-1]:
        raise ValueError(
            f"value has shape {value.shape}; expected {key.shape[:-1]} before the width"
        )
    if query.shape[-2] % max(key.shape[-2], 1):
        raise ValueError(
            f"query has {query.shape[-2]} heads; expected a multiple of the {key.shape[-2]} of key"
        )


def _joined(bias: Any, mask: Any, scores: tuple[int, ...]) -> Any:
    """One mask of what both say: bool, or numbers to be added."""
    if mask is not None:
        mask = jnp.asarray(mask)
        if mask.dtype != bool:
            raise TypeError(f"mask has dtype {mask.dtype}; expected bool (use bias for numbers)")
    for name, x in (("bias", bias), ("mask", mask)):
        shape = () if x is None else jnp.shape(x)
        if x is not None and not (
            len(shape) == 4 and all(n in (1, m) for n, m in zip(shape, scores, strict=True))
        ):
            raise ValueError(
                f"{name} has shape {shape}; expected four axes that broadcast to {scores}"
            )
    if bias is None:
        return mask
    return jnp.asarray(bias) if mask is None else jnp.where(mask, bias, -jnp.inf)


def _lengths(name: str, lengths: Any, n_batch: int) -> Any:
    lengths = jnp.asarray(lengths)
    if lengths.shape != (n_batch,) or not jnp.issubdtype(lengths.dtype, jnp.integer):
        raise ValueError(
            f"{name} has shape {lengths.shape} and dtype {lengths.dtype}; expected ({n_batch},) ints"
        )
    return lengths


# ---- the call back ----------------------------------------------------------------------------

Options = tuple[float | None, bool, tuple[int, int] | None]


@partial(jax.custom_vjp, nondiff_argnums=(5,))
def _attend(
    query: Any, key: Any, value: Any, added: Any, lengths: Any, options: Options
) -> tuple[Any, Any]:
    out = jax.ShapeDtypeStruct((*query.shape[:-1], value.shape[-1]), query.dtype)
    lse_dtype = jnp.float64 if query.dtype == jnp.float64 else jnp.float32
    lse = jax.ShapeDtypeStruct(query.shape[:-1], lse_dtype)
    return jax.pure_callback(
        partial(_forward, options), (out, lse), query, key, value, added, lengths,
        vmap_method="broadcast_all",
    )  # fmt: skip


def _attend_forward(
    query: Any, key: Any, value: Any, added: Any, lengths: Any, options: Options
) -> tuple[Any, Any]:
    results = _attend(query, key, value, added, lengths, options)
    return results, (query, key, value, added, lengths, *results)


def _attend_backward(options: Options, saved: Any, grads: Any) -> tuple[Any, ...]:
    query, key, value, added, *_ = saved
    has_bias = added is not None and jnp.issubdtype(added.dtype, jnp.floating)
    wanted = (query, key, value, added) if has_bias else (query, key, value)
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in wanted]
    found = jax.pure_callback(
        partial(_backward, options), shapes, *saved, *grads, vmap_method="broadcast_all"
    )
    return (*found, None) if has_bias else (*found, None, None)


_attend.defvjp(_attend_forward, _attend_backward)


def _arguments(options: Options, added: Any, lengths: Any) -> dict[str, Any]:
    scale, is_causal, window = options
    return {
        "attn_mask": None if added is None else np.asarray(added),
        "kv_lengths": None if lengths is None else np.asarray(lengths),
        "scale": scale,
        "is_causal": is_causal,
        "window": window,
    }


def _heads_first(x: Any) -> Array:
    """The same memory as (…, heads, rows, width)."""
    array: Array = np.asarray(x).swapaxes(-3, -2)
    return array


def _forward(
    options: Options, query: Any, key: Any, value: Any, added: Any, lengths: Any
) -> tuple[Array, Array]:
    heads = [_heads_first(x) for x in (query, key, value)]
    out = np.empty((*query.shape[:-1], value.shape[-1]), heads[0].dtype)
    _, lse = attention(
        *heads, **_arguments(options, added, lengths), out=out.swapaxes(-3, -2), return_lse=True
    )
    return out, np.ascontiguousarray(lse.swapaxes(-2, -1))


def _backward(
    options: Options,
    query: Any,
    key: Any,
    value: Any,
    added: Any,
    lengths: Any,
    out: Any,
    lse: Any,
    grad_out: Any,
    grad_lse: Any,
) -> list[Array]:
    q, k, v, o, grad = (_heads_first(x) for x in (query, key, value, out, grad_out))
    wanted = ["query", "key", "value"]
    if added is not None and np.asarray(added).dtype != np.bool_:
        wanted.append("attn_mask")
    found = attention_backward(
        grad,
        q,
        k,
        v,
        o,
        np.asarray(lse).swapaxes(-2, -1),
        **_arguments(options, added, lengths),
        grad_lse=np.asarray(grad_lse).swapaxes(-2, -1),
        wanted=wanted,
    )
    return [np.ascontiguousarray(x.swapaxes(-3, -2)) for x in found[:3]] + list(found[3:])
