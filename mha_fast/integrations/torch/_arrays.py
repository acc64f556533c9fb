"""Tensors as arrays and back, on the same memory."""

from typing import Any

import ml_dtypes
import numpy as np
import torch

from ..._typing import Array

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
DTYPES = {
    torch.float32: np.dtype(np.float32),
    torch.float64: np.dtype(np.float64),
    torch.float16: np.dtype(np.float16),
    torch.bfloat16: BFLOAT16,
}


def as_array(x: torch.Tensor) -> Array:
    """Return the memory of a tensor on the CPU as an array; also of one that requires grad."""
    if x.requires_grad:
        x = x.detach()
    if x.is_neg():  # a view that stands for its negative, as the imaginary part of a conjugate
        x = x.resolve_neg()
    if x.dtype is torch.bfloat16:
        bits: Array = x.view(torch.int16).numpy()
        return bits.view(BFLOAT16)
    array: Array = x.numpy()
    return array


def as_array_or_none(x: torch.Tensor | None) -> Array | None:
    """The same, where there is a tensor."""
    return None if x is None else as_array(x)


def as_tensor(x: Array) -> torch.Tensor:
    """Return the memory of an array as a tensor, in C order."""
    x = np.ascontiguousarray(x)
    if x.dtype == BFLOAT16:
        return torch.from_numpy(x.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(x)


def empty_like_query(query: Any, value: Any) -> torch.Tensor:
    """Return memory for the result, its axes in the order in which those of query lie.

    So the heads of a projection, (batch, rows, heads, width) seen with the axis of the heads first,
    come out as they went in, and the next projection reads them without a copy. torch's function
    does the same.
    """
    *outer, n_query, _ = query.shape
    width = value.shape[-1]
    if outer and query.stride(-3) < query.stride(-2):
        memory = query.new_empty((*outer[:-1], n_query, outer[-1], width))
        return memory.transpose(-3, -2)
    return query.new_empty((*outer, n_query, width))
