"""mha_fast as an attention of the package transformers: ``attn_implementation="mha_fast"``.

A model asks two functions, both registered here under that name. One makes the mask of a forward
pass, the other computes the attention of each layer:

    visible_keys        for causal models, windows and padded batches a row of five numbers per
                        sequence instead of an array of queries x keys
    attention_forward   reads such rows, or any mask that a model or its user made
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import (
    bidirectional_mask_function,
    causal_mask_function,
    prepare_padding_mask,
    sdpa_mask,
)

from .._typing import Window
from .torch._arrays import DTYPES
from .torch._attention import attention
from .torch._heads import watched

__all__ = ["NAME", "attention_forward", "register_transformers", "visible_keys"]

NAME = "mha_fast"
# Columns of a row of visible keys: the first key, the end of the keys, the position of query 0,
# and the bounds of the window, where -1 is no bound.
FIRST, END, OFFSET, LEFT, RIGHT = range(5)


def register_transformers() -> None:
    """Make ``attn_implementation="mha_fast"`` known to the package transformers.

    Afterwards ``AutoModel.from_pretrained(…, attn_implementation="mha_fast")`` and
    ``model.set_attn_implementation("mha_fast")`` work, for every model that goes through
    transformers' attention interface. Needs ``pip install "mha_fast[transformers]"``.

    Notes
    -----
    Windows, caps, sinks, position biases, grouped heads and caches of every kind are the kernel's
    own. Causal models and padded batches (one run of valid tokens per sequence, on either side)
    get no mask of queries x keys; other patterns, and models under ``torch.compile``, get that of
    "sdpa". On other devices "sdpa" computes.

    Queries that see no key, as the padding of a batch, give 0 where "eager" gives a mean of
    values. Nothing depends on them.
    """
    AttentionInterface.register(NAME, attention_forward)
    AttentionMaskInterface.register(NAME, visible_keys)


# ---- the mask ---------------------------------------------------------------------------------


def visible_keys(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: torch.Tensor | None = None,
    device: Any = "cpu",
    **others: Any,
) -> torch.Tensor | None:
    """Return which keys are visible: (batch, 1, 1, 5) int64, or the mask of "sdpa" where that is not enough."""
    if not _looked_on(attention_mask, q_offset, device):
        window = _window_of(mask_function)
        runs = _runs(batch_size, kv_length, kv_offset, attention_mask)
        if window is not None and runs is not None:
            left, right = (-1 if bound is None else bound for bound in window)
            rows = np.empty((batch_size, 5), np.int64)
            rows[:, FIRST], rows[:, END] = runs
            rows[:, OFFSET:] = int(q_offset) - kv_offset, left, right
            # Four axes mean a finished mask to transformers, which hands it on as it is.
            return torch.from_numpy(rows[:, None, None])
    return sdpa_mask(
        batch_size,
        q_length,
        kv_length,
        q_offset,
        kv_offset,
        mask_function,
        attention_mask,
        device=device,
        **others,
    )


def _looked_on(attention_mask: torch.Tensor | None, q_offset: Any, device: Any) -> bool:
    """Whether numbers must not be read, because a compiler traces them or they lie elsewhere."""
    return (
        torch.compiler.is_compiling()
        or torch.jit.is_tracing()
        or torch._C._len_torch_dispatch_stack() > 0
        or torch.device(device).type != "cpu"
        or any(isinstance(x, torch.Tensor) and not x.is_cpu for x in (attention_mask, q_offset))
    )


def _window_of(mask_function: Callable[..., Any]) -> Window | None:
    """Return the window that a mask function of transformers stands for; None for any other."""
    if mask_function is causal_mask_function:
        return None, 0
    if mask_function is bidirectional_mask_function:
        return None, None
    parts = _closure(mask_function).get("mask_functions", ())
    if mask_function.__qualname__ != "and_masks.<locals>.and_mask" or len(parts) != 2:
        return None
    overlay, base = parts
    size = _closure(overlay).get("sliding_window", 0)
    kind = overlay.__qualname__.split(".")[0]
    if kind == "sliding_window_overlay" and base is causal_mask_function:
        return size - 1, 0
    if kind == "sliding_window_bidirectional_overlay" and base is bidirectional_mask_function:
        return size, size
    return None


def _closure(function: Any) -> dict[str, Any]:
    """What an inner function has from the outer one."""
    cells = function.__closure__ or ()
    return dict(
        zip(function.__code__.co_freevars, (cell.cell_contents for cell in cells), strict=True)
    )


def _runs(
    batch_size: int, kv_length: int, kv_offset: int, attention_mask: torch.Tensor | None
) -> tuple[Any, Any] | None:
    """First and end of the valid keys of each sequence; None where they are not one run."""
    if attention_mask is None:
        return 0, kv_length
    whole = prepare_padding_mask(attention_mask, kv_length, kv_offset)
    valid = whole[:, kv_offset : kv_offset + kv_length].numpy().astype(bool, copy=False)
    count = valid.sum(axis=1)
    first = valid.argmax(axis=1) if kv_length else count
    if len(valid) not in (1, batch_size):
        return None
    places = np.arange(kv_length)
    run = (places >= first[:, None]) & (places < (first + count)[:, None])
    return (first, first + count) if np.array_equal(run, valid) else None


# ---- the attention ----------------------------------------------------------------------------


def attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    position_bias: torch.Tensor | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of one layer, (batch, queries, heads, width), and no weights."""
    if not query.is_cpu or query.dtype not in DTYPES:
        return sdpa_attention_forward(
            module,
            query,
            key,
            value,
            attention_mask,
            dropout,
            scaling,
            is_causal,
            position_bias,
            softcap=softcap,
            s_aux=s_aux,
            **others,
        )
    options: dict[str, Any] = {"scale": scaling, "softcap": softcap, "sinks": s_aux}
    if attention_mask is None:
        if is_causal is None:
            is_causal = getattr(module, "is_causal", True)
        # Position 0 is that of query 0 also where a static cache has room for more keys.
        options["is_causal"] = bool(is_causal) and query.shape[2] > 1
        options["attn_mask"] = _of_keys(position_bias, key)
    elif attention_mask.dtype == torch.int64:
        options |= _of_rows(attention_mask, position_bias, query, key)
    else:
        options["attn_mask"] = _joined(_of_keys(attention_mask, key), _of_keys(position_bias, key))
    watcher = watched()
    if watcher is not None:
        watcher.see(module, query, key, options, attention_mask)
    out = attention(query, key, value, dropout_p=dropout, **options)
    return out.transpose(1, 2).contiguous(), None


def _of_keys(mask: torch.Tensor | None, key: torch.Tensor) -> torch.Tensor | None:
    """The part of a mask that belongs to the keys there are: that of a static cache is longer."""
    n_key = key.shape[2]
    return mask if mask is None or mask.shape[-1] <= n_key else mask[..., :n_key]


def _joined(mask: torch.Tensor | None, bias: torch.Tensor | None) -> torch.Tensor | None:
    """One mask that does what both do."""
    if mask is None or bias is None:
        return bias if mask is None else mask
    return torch.where(mask, bias, -torch.inf) if mask.dtype == torch.bool else mask + bias


def _of_rows(
    rows: torch.Tensor, bias: torch.Tensor | None, query: torch.Tensor, key: torch.Tensor
) -> dict[str, Any]:
    """Options of `attention` for rows of visible keys."""
    numbers, n_key = rows.numpy()[:, 0, 0], key.shape[2]
    end = numbers[:, END].clip(max=n_key)
    offset, left, right = numbers[0, OFFSET:].tolist()
    options: dict[str, Any] = {"attn_mask": _of_keys(bias, key)}
    if right == 0:
        options["is_causal"], right = True, -1
    if left >= 0 or right >= 0:
        options["window"] = (left if left >= 0 else None, right if right >= 0 else None)
    if offset and offset == n_key - query.shape[2] and (end == n_key).all():
        options["query_offset"] = "end"
    elif offset:
        options["query_offset"] = offset
    if (end < n_key).any():
        options["kv_lengths"] = torch.from_numpy(end)
    first = numbers[:, FIRST]
    if first.any():
        after = torch.from_numpy(np.arange(n_key) >= first[:, None])[:, None, None]
        options["attn_mask"] = _joined(after, options["attn_mask"])
    return options
