"""The arrays of a layer: how they lie, and the products with them."""

import math
from itertools import groupby
from typing import Any

import numpy as np

from .._typing import Array
from ._sizes import KEY, QUERY, VALUE, LayerSizes
from ._weights import Tensors

# Rows of a 16-bit matrix that are widened at a time: few enough to stay in the processor's cache
# until the product has read them, enough to keep the product efficient.
_WIDENED_ROWS = 256


class Parameters:
    """Weights and biases of a layer, not yet written.

    Matrices lie as (out, in). W_Q, W_K and W_V lie one behind the other where the widths of their
    inputs are equal, so that one product serves an input that is all three.
    """

    def __init__(
        self, sizes: LayerSizes, dtype: np.dtype[Any], *, bias: bool, out_bias: bool
    ) -> None:
        self.sizes = sizes
        self.dtype = dtype
        self.stacks = tuple(
            np.empty((sum(sizes.in_rows[i] for i in members), sizes.in_dims[members[0]]), dtype)
            for members in sizes.stacks
        )
        self.in_bias = np.zeros(sum(sizes.in_rows), dtype) if bias else None
        self.out_weight = np.empty((sizes.embed_dim, sizes.joined_width), dtype)
        self.out_bias = np.zeros(sizes.embed_dim, dtype) if out_bias else None

    def arrays(self) -> list[Array]:
        """All that is there."""
        some = (*self.stacks, self.in_bias, self.out_weight, self.out_bias)
        return [x for x in some if x is not None]

    # ---- parts of the stacks, as views ----------------------------------------------------------

    def weight(self, first: int, stop: int | None = None) -> Array:
        """One matrix, or neighbours up to `stop` in the same stack, as (out, in)."""
        rows = self.sizes.in_rows
        number = next(i for i, members in enumerate(self.sizes.stacks) if first in members)
        start = sum(rows[self.sizes.stacks[number][0] : first])
        end = start + sum(rows[first : first + 1 if stop is None else stop])
        return self.stacks[number][start:end]

    def bias(self, first: int, stop: int | None = None) -> Array | None:
        """The bias of the same matrices."""
        if self.in_bias is None:
            return None
        rows = self.sizes.in_rows
        return self.in_bias[sum(rows[:first]) : sum(rows[: first + 1 if stop is None else stop])]

    def weight_per_head(self, which: int) -> Array:
        """One matrix as (heads, in, width)."""
        n_head, width = self.sizes.in_heads[which]
        return self.weight(which).reshape(n_head, width, self.sizes.in_dims[which]).swapaxes(1, 2)

    def bias_per_head(self, which: int) -> Array | None:
        """One bias as (heads, width)."""
        bias = self.bias(which)
        return None if bias is None else bias.reshape(self.sizes.in_heads[which])

    def out_weight_per_head(self) -> Array:
        """W_O as (heads, value width, out)."""
        sizes = self.sizes
        shape = (sizes.embed_dim, sizes.n_head, sizes.value_width)
        return self.out_weight.reshape(shape).transpose(1, 2, 0)

    # ---- from and to single tensors -------------------------------------------------------------

    def tensors(self) -> Tensors:
        """Views of the matrices and biases, one by one."""
        biases = [self.bias(i) for i in (QUERY, KEY, VALUE)]
        return Tensors(
            [self.weight(i) for i in (QUERY, KEY, VALUE)],
            self.out_weight,
            None if self.in_bias is None else [x for x in biases if x is not None],
            self.out_bias,
        )

    def write(self, tensors: Tensors) -> None:
        """Copy all tensors in; they have the sizes of these parameters but for the biases."""
        mine = self.tensors()
        named = [
            *zip(("W_Q", "W_K", "W_V"), mine.weights, tensors.weights, strict=True),
            ("W_O", mine.out_weight, tensors.out_weight),
        ]
        if mine.biases is not None and tensors.biases is not None:
            named += zip(("b_Q", "b_K", "b_V"), mine.biases, tensors.biases, strict=True)
        if mine.out_bias is not None and tensors.out_bias is not None:
            named.append(("b_O", mine.out_bias, tensors.out_bias))
        for name, target, source in named:
            if source.shape != target.shape:
                raise ValueError(f"{name} has shape {source.shape}; expected {target.shape}")
            target[...] = source

    # ---- products -------------------------------------------------------------------------------

    def project(self, *inputs: Array, first: int = QUERY) -> list[Array]:
        """Heads (..., heads, tokens, width) of each input, the first of which is for `first`.

        Neighbours that are one and the same array go through one product.
        """
        heads = []
        for _, same in groupby(enumerate(inputs, first), key=lambda pair: id(pair[1])):
            run = list(same)
            start, stop, tokens = run[0][0], run[-1][0] + 1, run[0][1]
            flat = _linear(tokens, self.weight(start, stop), self.bias(start, stop))
            ends = np.cumsum(self.sizes.in_rows[start:stop])[:-1]
            parts = zip(np.split(flat, ends, axis=-1), self.sizes.in_heads[start:stop], strict=True)
            heads += [x.reshape(*x.shape[:-1], *split).swapaxes(-3, -2) for x, split in parts]
        return heads

    def output(self, joined: Array, out: Array | None) -> Array:
        """Project what is gathered, (..., tokens, heads, value width)."""
        side_by_side = joined.reshape(*joined.shape[:-2], self.sizes.joined_width)
        return _linear(side_by_side, self.out_weight, self.out_bias, out)


def _linear(x: Array, weight: Array, bias: Array | None, out: Array | None = None) -> Array:
    """``x @ weight.T + bias`` over the last axis, rounded once where the dtype has 16 bits."""
    # All tokens of a batch in one product: NumPy would make one for each sequence.
    rows = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    shape = (*x.shape[:-1], len(weight))
    dtype = np.dtype(np.float32) if x.dtype.itemsize == 2 else x.dtype
    if out is not None and out.dtype == dtype and out.flags.c_contiguous:
        result = out.reshape(len(rows), len(weight))
    else:
        result = np.empty((len(rows), len(weight)), dtype)
    _multiply(rows, weight, result)
    if bias is not None:
        result += bias.astype(dtype, copy=False)
    if out is None:
        return result.astype(x.dtype, copy=False).reshape(shape)
    if not np.may_share_memory(result, out):
        np.copyto(out, result.reshape(shape), casting="unsafe")
    return out


def _multiply(rows: Array, weight: Array, out: Array) -> None:
    """``rows @ weight.T`` in the dtype of `out`."""
    if rows.dtype == out.dtype:
        np.matmul(rows, weight.T, out=out)
        return
    rows = rows.astype(out.dtype)
    for start in range(0, len(weight), _WIDENED_ROWS):
        strip = slice(start, start + _WIDENED_ROWS)
        np.matmul(rows, weight[strip].astype(out.dtype).T, out=out[:, strip])
