"""PyTorch: ``torch.nn.functional.scaled_dot_product_attention`` on the CPU."""

from contextlib import contextmanager
from functools import partial

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

from . import (
    Prepared,
    Unsupported,
    as_rows_of_one_head,
    can_share_rows,
    fastest,
    from_rows_of_one_head,
)


def version() -> str:
    """Return the version of PyTorch."""
    return torch.__version__


@contextmanager
def session(num_threads: int):
    """Set the threads, and record nothing for a backward pass."""
    torch.set_num_threads(num_threads)
    with torch.inference_mode():
        yield


def prepare(case, inputs, num_threads: int) -> Prepared:
    """Return the fastest call that computes `case` once."""
    if case.is_causal and case.mask is not None:
        raise Unsupported("torch takes a mask or is_causal, not both")
    query, key, value, attn_mask = (_tensor(array) for array in inputs)
    call = partial(
        scaled_dot_product_attention,
        key=key,
        value=value,
        attn_mask=attn_mask,
        is_causal=case.is_causal,
    )
    to_numpy = partial(_array, dtype=inputs.query.dtype)
    if case.n_head == case.n_kv_head:
        return Prepared(partial(call, query), to_numpy)
    ways = [Prepared(partial(call, query, enable_gqa=True), to_numpy, "enable_gqa")]
    if can_share_rows(case):
        _, shared = as_rows_of_one_head(case, inputs)
        ways.append(
            Prepared(
                partial(call, _tensor(shared.query)),
                lambda result: from_rows_of_one_head(case, to_numpy(result)),
                "group as rows",
            )
        )
    return fastest(ways)


def _tensor(array):
    if array is None:
        return None
    if array.dtype.name == "bfloat16":  # not a type that torch knows from NumPy
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def _array(tensor, dtype):
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(dtype)
    return tensor.numpy()
