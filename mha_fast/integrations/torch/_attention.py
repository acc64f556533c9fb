"""attention() of tensors: all options of `mha_fast.attention`, with gradients."""

from typing import Any

import torch

from ... import attention as attention_of_arrays
from ..._typing import Window
from ._arrays import DTYPES, as_array, empty_like_query
from ._operator import arguments, n_thread

# What stands for a tensor while a compiler looks on; every other subclass is somebody's own.
_TRACED = ("FakeTensor", "FunctionalTensor")
_FLOATS = ("query", "key", "value")
_PLAIN = (torch.Tensor, torch.nn.Parameter)


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    *,
    is_causal: bool = False,
    window: Window | None = None,
    query_offset: int | str | torch.Tensor = 0,
    kv_lengths: torch.Tensor | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    alibi_slopes: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    head_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    return_lse: bool = False,
) -> Any:
    """`mha_fast.attention` of tensors on the CPU, read and written where they lie.

    Differentiable with respect to query, key, value, attn_mask, sinks, alibi_slopes and head_mask;
    one operator to ``torch.compile``, ``torch.export`` and ``torch.func.vmap``.

    Parameters
    ----------
    query : Tensor, (..., n_head, n_query, head_width)
        float32, float64, float16 or bfloat16.
    key, value : Tensor, (..., n_kv_head, n_key, width)
    attn_mask, is_causal, window, scale, softcap, alibi_slopes, sinks, head_mask
        As in `mha_fast.attention`, as tensors.
    query_offset : int, int Tensor or "end"
    kv_lengths : int Tensor
    dropout_p : float
        Share of the weights that are dropped. Which ones follows ``torch.manual_seed``.
    return_lse : bool

    Returns
    -------
    out : Tensor, (..., n_head, n_query, value_width)
        Its axes lie in memory as those of `query` do.
    lse : Tensor, (..., n_head, n_query)
        With `return_lse`.

    Raises
    ------
    TypeError, ValueError
        As `mha_fast.attention`; TypeError also for tensors that are not dense ones on the CPU.
    NotImplementedError
        For a second gradient.

    Notes
    -----
    At most ``min(mha_fast.get_num_threads(), torch.get_num_threads())`` threads are used.
    """
    for name, x in {
        "query": query,
        "key": key,
        "value": value,
        "attn_mask": attn_mask,
        "sinks": sinks,
        "alibi_slopes": alibi_slopes,
        "head_mask": head_mask,
        "kv_lengths": kv_lengths,
    }.items():
        if x is not None or name in _FLOATS:
            _check(name, x)
    offset, at_end = _offset(query_offset)
    left, right = (None, None) if window is None else window
    operands = (query, key, value, attn_mask, sinks, alibi_slopes, head_mask, kv_lengths, offset)
    options = (is_causal, left, right, at_end, scale, softcap, dropout_p)
    if not return_lse and runs_directly(operands):
        seed = drawn_seed() if dropout_p else None
        arrays, keywords = arguments((*operands, seed), options)
        out = empty_result(query, key, value)
        attention_of_arrays(*arrays, **keywords, out=as_array(out), num_threads=n_thread())
        return out
    out, lse = through_operator(operands, options)
    return (out, lse) if return_lse else out


def through_operator(operands: Any, options: Any) -> Any:
    """Call ``mha_fast::attention``, whose last operand is drawn here."""
    seed = drawn_seed() if options[-1] else None
    return torch.ops.mha_fast.attention(*operands, seed, *options)


def drawn_seed() -> torch.Tensor:
    """A seed from torch's own generator."""
    return torch.randint(2**63 - 1, (), dtype=torch.int64, device="cpu")


def empty_result(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Memory for the result of one call."""
    if query.shape == key.shape == value.shape:
        return torch.empty_like(query)  # the same layout, sooner
    if query.shape[:-3] != key.shape[:-3] or query.shape[:-3] != value.shape[:-3]:
        batch = torch.broadcast_shapes(query.shape[:-3], key.shape[:-3], value.shape[:-3])
        query = query.expand(*batch, *query.shape[-3:])
    return empty_like_query(query, value)


def runs_directly(operands: Any) -> bool:
    """Whether nobody looks on (autograd, a compiler, a transform), so that plain memory will do."""
    if (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack()
        or torch._C._functorch.peek_interpreter_stack() is not None
        or torch.jit.is_tracing()
    ):
        return False
    wants_grad = torch.is_grad_enabled()
    return not any(
        x is not None and (type(x) not in _PLAIN or (wants_grad and x.requires_grad))
        for x in operands
    )


def is_traced(x: object) -> bool:
    """Whether `x` stands for a tensor in a trace."""
    return isinstance(x, torch.Tensor) and type(x).__name__ in _TRACED


def _offset(query_offset: Any) -> tuple[torch.Tensor | None, bool]:
    """Return the position of query 0 as a tensor, None for 0; and whether the last one is meant."""
    if isinstance(query_offset, str):
        if query_offset != "end":
            raise ValueError(
                f"query_offset is {query_offset!r}; expected an int, a tensor or 'end'"
            )
        return None, True
    if isinstance(query_offset, torch.Tensor):
        return query_offset, False
    return (torch.tensor(query_offset) if query_offset else None), False


def _check(name: str, x: Any) -> None:
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{name} is of type {type(x).__name__}; expected a tensor")
    if not (x.is_cpu and x.layout is torch.strided) or x.is_nested:
        raise TypeError(
            f"{name} is a tensor of layout {x.layout} on {x.device}; expected a dense one on the CPU"
        )
    if name in _FLOATS and x.dtype not in DTYPES:
        raise TypeError(
            f"{name} has dtype {x.dtype}; expected one of {', '.join(map(str, DTYPES))}"
        )
