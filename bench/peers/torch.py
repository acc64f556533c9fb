"""PyTorch: ``torch.nn.functional.scaled_dot_product_attention`` on the CPU."""

from contextlib import contextmanager
from functools import partial

import torch
from torch.nn.functional import scaled_dot_product_attention

from . import Unsupported


def version() -> str:
    """Return the version of PyTorch."""
    return torch.__version__


@contextmanager
def session(num_threads: int):
    """Set the threads, and record nothing for a backward pass."""
    torch.set_num_threads(num_threads)
    with torch.inference_mode():
        yield


def prepare(case, inputs):
    """Return a call that computes `case` once."""
    if case.is_causal and case.mask is not None:
        raise Unsupported("torch takes a mask or is_causal, not both")
    query, key, value = (torch.from_numpy(array) for array in inputs[:3])
    return partial(
        scaled_dot_product_attention,
        query,
        key,
        value,
        attn_mask=None if inputs.attn_mask is None else torch.from_numpy(inputs.attn_mask),
        is_causal=case.is_causal,
        enable_gqa=case.n_head != case.n_kv_head,
    )


def to_numpy(result):
    """Return `result` as a NumPy array."""
    return result.numpy()
