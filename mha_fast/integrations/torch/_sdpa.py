"""torch's scaled_dot_product_attention on the kernels of mha_fast."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.nn import functional

from ... import attention as attention_of_arrays
from ._arrays import DTYPES, as_array
from ._attention import empty_result, is_traced, runs_directly, through_operator
from ._operator import n_thread

_PLAIN = (torch.Tensor, torch.nn.Parameter)

# The one to fall back on, also while `replaced_sdpa` stands in its place.
torch_sdpa = functional.scaled_dot_product_attention


def scaled_dot_product_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """`torch.nn.functional.scaled_dot_product_attention`, computed by mha_fast where it can be.

    Parameters
    ----------
    query : Tensor, (..., n_head, n_query, head_width)
    key : Tensor, (..., n_kv_head, n_key, head_width)
    value : Tensor, (..., n_kv_head, n_key, value_width)
    attn_mask : Tensor, optional
        Broadcastable to (..., n_query, n_key): bool (True lets the key through), or of float32 or
        the dtype of query, added to the scores. It may require grad.
    dropout_p : float
        Share of the weights that are dropped, as ``torch.manual_seed`` decides.
    is_causal : bool
        Query i sees the keys 0 … i: the upper left triangle, also with unequal lengths.
    scale : float, optional
        Default ``1 / sqrt(head_width)``.
    enable_gqa : bool
        Let groups of query heads share a key/value head.

    Returns
    -------
    Tensor, (..., n_head, n_query, value_width)

    Notes
    -----
    Dense tensors on the CPU in float32, float64, float16 and bfloat16 are read and written where
    they lie. Everything else goes to torch's own function, and so do calls that it would refuse,
    so that its message is seen: other devices, dtypes and layouts, nested tensors, subclasses with
    their own ``__torch_function__``, key and value with different numbers of heads, forward-mode
    derivatives and `torch.func.grad`.

    A mask and `is_causal` together mean both; some of torch's paths refuse that. Where torch multiplies what a mask hides by 0, so that NaN or Inf in a hidden value reaches the
    output, here it has no influence. A query that sees no key gives 0 in both. A mask of ``-inf``
    excludes; one of ``finfo.min`` is a low, ordinary number. Gradients of gradients need torch's
    own function. In 16 bits the arithmetic is that of `mha_fast.attention`, and so is the reach of
    dropout: the weights that are dropped are not those that torch would drop under the same seed.

    Examples
    --------
    >>> import torch, mha_fast.torch
    >>> x = torch.randn(2, 8, 100, 64, dtype=torch.bfloat16)
    >>> mha_fast.torch.scaled_dot_product_attention(x, x, x, is_causal=True).shape
    torch.Size([2, 8, 100, 64])
    """
    if torch.is_autocast_enabled("cpu") and query.is_cpu:
        with torch.autocast("cpu", enabled=False):
            return scaled_dot_product_attention(
                _cast(query),
                _cast(key),
                _cast(value),
                None if attn_mask is None else _cast(attn_mask),
                dropout_p,
                is_causal,
                scale,
                enable_gqa,
            )
    if not _is_ours(query, key, value, attn_mask, dropout_p, enable_gqa):
        return torch_sdpa(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    if query.dim() > 2 and query.shape[-3] == 1 != key.shape[-3]:
        query = query.expand(*query.shape[:-3], key.shape[-3], *query.shape[-2:])
    tensors = query, key, value, attn_mask
    if dropout_p or not runs_directly(tensors):
        options = (is_causal, None, None, False, scale, None, dropout_p)
        out, _ = through_operator((*tensors, None, None, None, None, None), options)
        return out
    out = empty_result(query, key, value)
    attention_of_arrays(
        as_array(query),
        as_array(key),
        as_array(value),
        None if attn_mask is None else as_array(attn_mask),
        is_causal=is_causal,
        scale=scale,
        out=as_array(out),
        num_threads=n_thread(),
    )
    return out


@contextmanager
def replaced_sdpa() -> Iterator[None]:
    """Let every call of ``torch.nn.functional.scaled_dot_product_attention`` come here.

    It holds for the whole process, for code that looks the function up in its module when it calls
    it: torch's own layers and most models do. ``torch.nn.MultiheadAttention`` and
    ``torch.nn.TransformerEncoderLayer`` take a path of their own in inference, which
    `MultiheadAttention.from_module` replaces.

    Examples
    --------
    >>> import torch, mha_fast.torch
    >>> x = torch.randn(2, 8, 100, 64)
    >>> with mha_fast.torch.replaced_sdpa():
    ...     out = torch.nn.functional.scaled_dot_product_attention(x, x, x)
    """
    before = functional.scaled_dot_product_attention
    functional.scaled_dot_product_attention = scaled_dot_product_attention
    try:
        yield
    finally:
        functional.scaled_dot_product_attention = before


# ---- what is ours -----------------------------------------------------------------------------


def _is_ours(
    query: Any, key: Any, value: Any, mask: Any, dropout_p: float, enable_gqa: bool
) -> bool:
    """Whether we compute this call. What torch would refuse is not ours: it says why."""
    if not (
        _is_dense(query) and (key is query or _is_dense(key)) and (value is key or _is_dense(value))
    ):
        return False
    dtype, rank = query.dtype, query.dim()
    if (
        dtype not in DTYPES
        or not dtype == key.dtype == value.dtype
        or rank < 2
        or not rank == key.dim() == value.dim()
        or not 0 <= dropout_p < 1
        or _has_tangents(query, key, value, mask)
        or _in_functional_gradient()
    ):
        return False
    shapes = query.shape, key.shape, value.shape
    alike = shapes[0] == shapes[1] == shapes[2]  # nothing to ask then
    return (alike or _shapes_fit(*shapes, enable_gqa)) and (
        mask is None or _mask_fits(mask, dtype, *shapes)
    )


def _is_dense(x: Any) -> bool:
    """Whether a tensor is dense memory on the CPU, or stands for some in a trace."""
    if type(x) not in _PLAIN and not is_traced(x):
        return False
    return bool(x.is_cpu and x.layout is torch.strided and not x.is_nested)


def _has_tangents(*tensors: Any) -> bool:
    """Whether forward-mode derivatives are wanted."""
    return forward_ad._current_level >= 0 and any(
        x is not None and forward_ad.unpack_dual(x).tangent is not None for x in tensors
    )


def _in_functional_gradient() -> bool:
    """Whether `torch.func.grad` or one of its kind looks on, which registered operators refuse."""
    if torch.compiler.is_compiling() or torch._C._functorch.peek_interpreter_stack() is None:
        return False
    levels = torch._C._functorch.get_interpreter_stack()
    return any(level.key() != torch._C._functorch.TransformType.Vmap for level in levels)


def _shapes_fit(query: Any, key: Any, value: Any, enable_gqa: bool) -> bool:
    if query[-1] != key[-1] or key[-2] != value[-2]:
        return False
    if query[:-2] == key[:-2] == value[:-2]:
        return True
    heads, kv_heads = query[-3], key[-3]
    if kv_heads != value[-3]:
        return False
    if heads != kv_heads:
        if enable_gqa:
            if kv_heads == 0 or heads % kv_heads:
                return False
        elif 1 not in (heads, kv_heads):
            return False
    return all(
        _broadcast(sizes) is not None
        for sizes in zip(query[:-3], key[:-3], value[:-3], strict=True)
    )


def _broadcast(sizes: Iterable[int]) -> int | None:
    """The size that some sizes of one axis broadcast to."""
    result = 1
    for size in sizes:
        if size != 1:
            if result not in (1, size):
                return None
            result = size
    return result


def _mask_fits(mask: Any, dtype: torch.dtype, query: Any, key: Any, value: Any) -> bool:
    if not _is_dense(mask) or mask.dtype not in (torch.bool, torch.float32, dtype):
        return False
    if not 2 <= mask.dim() <= len(query):
        return False
    axes = zip(query[:-3], key[:-3], value[:-3], strict=True)
    whole = [*map(_broadcast, axes), max(query[-3:-2] + key[-3:-2]), query[-2], key[-2]][
        -len(query) :
    ]
    return all(
        n in (1, size) for n, size in zip(reversed(mask.shape), reversed(whole), strict=False)
    )


def _cast(x: torch.Tensor) -> torch.Tensor:
    """What autocast does to an operand of torch's function."""
    if not x.is_floating_point() or x.dtype == torch.float64:
        return x
    return x.to(torch.get_autocast_dtype("cpu"))
