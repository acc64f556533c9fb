"""Plain NumPy: the five lines everybody writes, in the dtype of the inputs.

BLAS has nothing for 16 bits, and NumPy's own loops for them are a hundred times slower; so the
five lines then compute in float32, conversions included.
"""

from contextlib import nullcontext
from functools import partial

import numpy as np

from mha_fast.reference import naive_attention

from . import Prepared, Unsupported

LARGEST_SCORES = 2_000_000_000  # bytes; two or three such arrays are alive at a time


def version() -> str:
    """Return the version of NumPy."""
    return np.__version__


def session(num_threads: int):
    """Do nothing: the threads of BLAS are set by the environment of the process."""
    return nullcontext()


def prepare(case, inputs, num_threads: int) -> Prepared:
    """Return the call that computes `case` once."""
    n_bytes = case.n_score * max(inputs.query.itemsize, 4)
    if n_bytes > LARGEST_SCORES:
        raise Unsupported(f"the array of scores would take {n_bytes / 1e9:.1f} GB")
    attend = _attend_16_bit if inputs.query.itemsize == 2 else naive_attention
    return Prepared(partial(attend, *inputs, is_causal=case.is_causal), np.asarray)


def _attend_16_bit(query, key, value, attn_mask, is_causal):
    widened = (array.astype(np.float32) for array in (query, key, value))
    return naive_attention(*widened, attn_mask, is_causal=is_causal).astype(query.dtype)
