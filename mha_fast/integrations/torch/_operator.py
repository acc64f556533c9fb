"""The operators ``mha_fast::attention`` and ``mha_fast::attention_backward`` of torch's registry.

schema      what the compiler, export and the dispatcher know about them
CPU         the kernels of mha_fast on the memory of the tensors
fake        sizes, dtypes and strides of the results, without computing
autograd    the second operator is the gradient of the first
vmap        another batch axis
"""

from collections.abc import Callable
from typing import Any

import torch

from ... import attention, attention_backward, get_num_threads
from ..._typing import Array
from ._arrays import as_array, as_array_or_none, as_tensor, empty_like_query

_OPERANDS = """Tensor query, Tensor key, Tensor value, Tensor? attn_mask, Tensor? sinks,
    Tensor? alibi_slopes, Tensor? head_mask, Tensor? kv_lengths, Tensor? query_offset,
    Tensor? dropout_seed"""
_OPTIONS = """bool is_causal, SymInt? window_left, SymInt? window_right, bool at_end,
    float? scale, float? softcap, float dropout_p"""
N_OPERAND, N_OPTION = 10, 7
# Operands that have a gradient, by their place.
DIFFERENTIABLE = ("query", "key", "value", "attn_mask", "sinks", "alibi_slopes", "head_mask")

Tensors = tuple[torch.Tensor, ...]


def arguments(operands: Any, options: Any) -> tuple[list[Array], dict[str, Any]]:
    """Return query, key and value, and the keyword arguments of `mha_fast.attention`."""
    query, key, value, mask, sinks, slopes, gates, lengths, offset, seed = operands
    is_causal, left, right, at_end, scale, softcap, dropout_p = options
    keywords: dict[str, Any] = {"is_causal": is_causal, "scale": scale}
    if mask is not None:
        keywords["attn_mask"] = as_array(mask)
    if sinks is not None:
        keywords["sinks"] = as_array(sinks)
    if slopes is not None:
        keywords["alibi_slopes"] = as_array(slopes)
    if gates is not None:
        keywords["head_mask"] = as_array(gates)
    if lengths is not None:
        keywords["kv_lengths"] = as_array(lengths)
    if at_end:
        keywords["query_offset"] = "end"
    elif offset is not None:
        keywords["query_offset"] = as_array(offset)
    if left is not None or right is not None:
        keywords["window"] = left, right
    if softcap is not None:
        keywords["softcap"] = softcap
    if dropout_p:
        keywords["dropout_p"] = dropout_p
        keywords["dropout_seed"] = int(seed)
    return [as_array(query), as_array(key), as_array(value)], keywords


def n_thread() -> int:
    """No more threads than torch uses, whose setting its users expect to hold for every call."""
    return min(get_num_threads(), torch.get_num_threads())


# ---- the two operators ------------------------------------------------------------------------

_library = torch.library.Library("mha_fast", "DEF")
_library.define(f"attention({_OPERANDS}, {_OPTIONS}) -> (Tensor out, Tensor lse)")
_library.define(
    f"attention_backward(Tensor? grad_out, Tensor? grad_lse, {_OPERANDS}, {_OPTIONS}, "
    "Tensor out, Tensor lse, str[] wanted) -> Tensor[]"
)


def _batch_shape(query: Any, key: Any, value: Any) -> Any:
    return torch.broadcast_shapes(query.shape[:-3], key.shape[:-3], value.shape[:-3])


def _results(query: Any, key: Any, value: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Memory for the result and the log-sum-exp."""
    rows = query.shape
    if query.dim() > 3:
        batch = _batch_shape(query, key, value)
        if batch != query.shape[:-3]:
            query = query.expand(*batch, *query.shape[-3:])
        rows = query.shape
    lse_dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    out = empty_like_query(query, value)
    return out, query.new_empty(rows[:-1], dtype=lse_dtype)


def _attention_cpu(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
    operands, options = args[:N_OPERAND], args[N_OPERAND:]
    out, lse = _results(*operands[:3])
    arrays, keywords = arguments(operands, options)
    _, sums = attention(
        *arrays, **keywords, out=as_array(out), return_lse=True, num_threads=n_thread()
    )
    lse.copy_(as_tensor(sums))
    return out, lse


def _attention_fake(query: Any, key: Any, value: Any, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return _results(query, key, value)


def _attention_backward_cpu(
    grad_out: torch.Tensor | None, grad_lse: torch.Tensor | None, *args: Any
) -> list[torch.Tensor]:
    operands, options = args[:N_OPERAND], args[N_OPERAND : N_OPERAND + N_OPTION]
    out, lse, wanted = args[N_OPERAND + N_OPTION :]
    (query, key, value), keywords = arguments(operands, options)
    if grad_out is None:
        grad_out = out.new_zeros(()).expand(out.shape)
    gradients = attention_backward(
        as_array(grad_out),
        query,
        key,
        value,
        as_array(out),
        as_array(lse),
        **keywords,
        grad_lse=as_array_or_none(grad_lse),
        wanted=tuple(wanted),
        num_threads=n_thread(),
    )
    return [as_tensor(x) for x in gradients]


def _attention_backward_fake(grad_out: Any, grad_lse: Any, *args: Any) -> list[torch.Tensor]:
    given = dict(zip(DIFFERENTIABLE, args, strict=False))
    return [given[name].new_empty(given[name].shape) for name in args[-1]]


# ---- autograd ---------------------------------------------------------------------------------


def _save(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*inputs[:N_OPERAND], *output)
    ctx.options = inputs[N_OPERAND:]
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad_out: Any, grad_lse: Any) -> tuple[Any, ...]:
    *operands, out, lse = ctx.saved_tensors
    needed = ctx.needs_input_grad[: len(DIFFERENTIABLE)]
    wanted = [name for name, need in zip(DIFFERENTIABLE, needed, strict=True) if need]
    nothing: list[Any] = [None] * (N_OPERAND + N_OPTION)
    if grad_out is None and grad_lse is None:
        return tuple(nothing)
    gradients = iter(
        torch.ops.mha_fast.attention_backward(
            grad_out, grad_lse, *operands, *ctx.options, out, lse, wanted
        )
    )
    found = [next(gradients) if need else None for need in needed]
    return (*found, *nothing[len(found) :])


def _no_second_gradient(ctx: Any, *grads: Any) -> Any:
    raise NotImplementedError(
        "mha_fast has no gradient of its gradient; for create_graph=True use torch's function "
        "with sdpa_kernel(SDPBackend.MATH)"
    )


# ---- vmap -------------------------------------------------------------------------------------


def _with_axis(x: Any, dim: int | None, rank: int) -> Any:
    """Move the new axis to the front, or add one of length 1; `rank` is without it."""
    if x is None:
        return None
    x = x.unsqueeze(0) if dim is None else x.movedim(dim, 0)
    while x.dim() < rank + 1:
        x = x.unsqueeze(1)
    return x


def _attention_vmap(info: Any, in_dims: Any, *args: Any) -> Any:
    if any(dim is not None for dim in in_dims[4:N_OPERAND]):
        return _one_by_one(torch.ops.mha_fast.attention, info, in_dims, args)
    logical = args[0].dim() - (in_dims[0] is not None)
    rank = max(logical, 3)
    moved = [_with_axis(x, d, rank) for x, d in zip(args[:4], in_dims, strict=False)]
    out, lse = torch.ops.mha_fast.attention(*moved, *args[4:])
    if logical == 2:
        out, lse = out.squeeze(1), lse.squeeze(1)
    return (out, lse), (0, 0)


def _attention_backward_vmap(info: Any, in_dims: Any, *args: Any) -> Any:
    return _one_by_one(torch.ops.mha_fast.attention_backward, info, in_dims, args)


def _one_by_one(operator: Callable[..., Any], info: Any, in_dims: Any, args: Any) -> Any:
    """Run each entry of the new axis by itself."""
    results = [
        operator(
            *(
                x.select(d, i) if isinstance(x, torch.Tensor) and d is not None else x
                for x, d in zip(args, in_dims, strict=True)
            )
        )
        for i in range(info.batch_size)
    ]
    joined = [torch.stack(parts) for parts in zip(*results, strict=True)]
    if isinstance(results[0], tuple):
        return tuple(joined), (0,) * len(joined)
    return joined, [0] * len(joined)


def _register() -> None:
    for name, cpu, fake, vmap in (
        ("attention", _attention_cpu, _attention_fake, _attention_vmap),
        (
            "attention_backward",
            _attention_backward_cpu,
            _attention_backward_fake,
            _attention_backward_vmap,
        ),
    ):
        _library.impl(name, cpu, "CPU")
        torch.library.register_fake(f"mha_fast::{name}", fake, lib=_library)
        torch.library.register_vmap(f"mha_fast::{name}", vmap, lib=_library)
    torch.library.register_autograd(
        "mha_fast::attention", _backward, setup_context=_save, lib=_library
    )
    torch.library.register_autograd(
        "mha_fast::attention_backward", _no_second_gradient, lib=_library
    )


_register()
