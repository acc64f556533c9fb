"""Arrays in awkward places: other strides, steps, offsets and byte orders of the same numbers."""

from typing import NamedTuple

import numpy as np

GUARD = 0xFF  # a run of these bytes is NaN in every float dtype


class Placed(NamedTuple):
    """An array, and all the memory that lies around its elements."""

    view: np.ndarray
    memory: np.ndarray


def compact(x):
    """Place `x` in C order and nothing else."""
    copy = np.array(x, order="C")
    return Placed(copy, copy)


def awkward(rng, x, *, writable=False):
    """Place `x` in a larger piece of memory with random order of axes, steps and padding.

    Axes of stride 0 stay so. Where the array is only read, it may also be read-only or of foreign
    byte order.
    """
    dtype = x.dtype
    if not writable and dtype.kind == "f" and dtype.isbuiltin == 1 and rng.random() < 0.05:
        dtype = dtype.newbyteorder()
    stored = (
        x if writable else x[tuple(slice(1 if n > 1 and s == 0 else None) for n, s in _axes(x))]
    )
    steps = rng.choice([1, 1, 1, 1, 1, -1], x.ndim)
    if x.ndim and rng.random() < 0.4:
        steps[rng.integers(x.ndim)] *= 2
    before, behind = rng.integers(0, 3, (2, x.ndim)) * (rng.random(x.ndim) < 0.3)
    order = rng.permutation(x.ndim) if rng.random() < 0.5 else np.arange(x.ndim)
    room = np.array(stored.shape, int) * np.abs(steps) + before + behind
    n_byte = int(room.prod()) * dtype.itemsize
    shift = int(rng.integers(dtype.itemsize)) if rng.random() < 0.1 else 0

    memory = np.full(n_byte + 32, GUARD, np.uint8)
    whole = memory[16 + shift :][:n_byte].view(dtype).reshape(room[order])
    inside = whole.transpose(np.argsort(order))
    for axis in range(x.ndim):
        first, n = int(before[axis]), stored.shape[axis] * abs(int(steps[axis]))
        part = inside[(slice(None),) * axis + (slice(first, first + n),)]
        inside = part[(slice(None),) * axis + (slice(None, None, int(steps[axis])),)]
    inside[...] = stored
    view = np.broadcast_to(inside, x.shape) if inside.shape != x.shape else inside
    if not writable and rng.random() < 0.2:
        view.flags.writeable = False
    return Placed(view, memory)


def _axes(x):
    return zip(x.shape, x.strides, strict=True)
