"""Plain NumPy: the five lines everybody writes, in the dtype of the inputs."""

from contextlib import nullcontext
from functools import partial

import numpy as np

from mha_fast.reference import naive_attention


def version() -> str:
    """Return the version of NumPy."""
    return np.__version__


def session(num_threads: int):
    """Do nothing: the threads of BLAS are set by the environment of the process."""
    return nullcontext()


def prepare(case, inputs):
    """Return a call that computes `case` once."""
    return partial(naive_attention, *inputs, is_causal=case.is_causal)


def to_numpy(result):
    """Return `result`, which is a NumPy array already."""
    return result
