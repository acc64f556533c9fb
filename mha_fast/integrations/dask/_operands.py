"""From the arguments of a call to arrays that are cut alike: checks, bounds, chunks."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeAlias

import dask
import dask.array as da
import numpy as np
from dask.base import tokenize
from dask.task_spec import TaskRef

from ... import _arguments, _checks, _gradients
from ..._options import ATTENTION, BACKWARD, Options
from ..._typing import Array
from . import _grid
from ._grid import HEADS, KEYS, KV_HEADS, QUERIES, Axis, Bounds, Grid


@dataclass(frozen=True)
class Operand:
    """An array of a call and the axis that each of its dimensions is."""

    array: Any  # dask array, or a small NumPy array whose pieces lie in the tasks themselves
    axes: tuple[Axis, ...]

    def place(self, grid: Grid, index: Mapping[Axis, int]) -> tuple[int, ...]:
        """Return which chunk it is that a task with this index reads."""
        shape = zip(self.axes, self.array.shape, strict=True)
        return tuple(
            index[axis] if axis is not None and n == grid.bounds[axis][-1] else 0
            for axis, n in shape
        )

    def chunks(self, grid: Grid) -> tuple[tuple[int, ...], ...]:
        """Return the sizes of all chunks, as dask writes them."""
        shape = zip(self.axes, self.array.shape, strict=True)
        return tuple(
            grid.sizes(axis) if axis is not None and n == grid.bounds[axis][-1] else (n,)
            for axis, n in shape
        )

    def chunk(self, grid: Grid, index: Mapping[Axis, int]) -> Any:
        """Return the chunk at an index: a reference to a task, or the numbers."""
        if isinstance(self.array, da.Array):
            where = [
                index.get(axis, 0) if n > 1 else 0
                for axis, n in zip(self.axes, self.array.numblocks, strict=True)
            ]
            return TaskRef((self.array.name, *where))
        cut = [
            slice(*grid.span(axis, index[axis])) if axis in index and n > 1 else slice(None)
            for axis, n in zip(self.axes, self.array.shape, strict=True)
        ]
        return np.array(self.array[tuple(cut)])


def chunk_of(operand: Operand | None, grid: Grid, index: Mapping[Axis, int]) -> Any:
    """Return the chunk of an operand that may be absent."""
    return None if operand is None else operand.chunk(grid, index)


@dataclass(frozen=True)
class Problem:
    """A checked call: everything that the graph is made of."""

    grid: Grid
    operands: Mapping[str, Operand]
    checked: _arguments.Call  # the options in plain form, checked on arrays without elements
    one_head: bool
    offset_at_end: bool  # positions follow from lengths that are not known yet

    @property
    def value_width(self) -> int:
        """Width of the output."""
        return int(self.checked.out_shape[-1])

    @property
    def token(self) -> str:
        """A name that says what is computed: the same call has the same one."""
        checked = self.checked
        arrays = sorted((name, x.array, x.axes) for name, x in self.operands.items())
        grid = sorted((str(axis), bounds) for axis, bounds in self.grid.bounds.items())
        options = (checked.scale, checked.softcap, checked.window, checked.high)
        return tokenize(arrays, grid, options, self.offset_at_end, self.one_head)

    def known(self, name: str, batch: Mapping[Axis, int]) -> Array | None:
        """Return the numbers of an option for the batch entries of a task, if they are known."""
        operand = self.operands.get(name)
        if operand is None or isinstance(operand.array, da.Array):
            return None
        spans = [self.grid.span(axis, batch[axis]) for axis in range(self.grid.n_batch_axis)]
        shape = [stop - start for start, stop in spans]
        return np.broadcast_to(operand.chunk(self.grid, batch), shape).reshape(-1)


# The options that are small arrays, with the number of axes behind the batch axes.
_PER_ENTRY = ("query_offset", "kv_lengths")
_PER_HEAD = ("alibi_slopes", "sinks", "head_mask")


# What has one row for each query of the whole call.
_PER_QUERY = ("grad_out", "out", "lse", "grad_lse")

# Checks arrays of the right kinds without elements, and options; gives the options in plain form.
Check: TypeAlias = Callable[[Mapping[str, Any], Mapping[str, Any]], _arguments.Call]


def problem(
    arrays: Mapping[str, Any], options: Mapping[str, Any], chunks: Any, check: Check
) -> Problem:
    """Check the arguments of a call and cut its arrays alike."""
    known: dict[str, Any] = {
        name: None if x is None else _array(name, x) for name, x in arrays.items()
    }
    checked = check({name: _stand_in(x) for name, x in known.items()}, options)
    one_head = known["query"].ndim == 2
    if one_head:
        for name in ("query", "key", "value", *_PER_QUERY):
            if known.get(name) is not None:
                known[name] = known[name][None]
    shapes = _shapes(known, checked)
    grid = _cut(known, shapes, _grid.check_chunks(chunks), checked)
    operands = {
        name: Operand(_aligned(name, known[name], axes, grid), axes)
        for name, axes in shapes.items()
    }
    lengths = known["kv_lengths"]
    unknown_end = checked.ends_together and isinstance(lengths, da.Array)
    if checked.ends_together and not unknown_end:
        last = np.asarray(checked.key.shape[-2] if lengths is None else lengths, np.int64)
        offset = last - checked.query.shape[-2]
        operands["query_offset"] = Operand(offset, shapes.get("kv_lengths", ()))
    return Problem(grid, operands, checked, one_head, unknown_end)


# ---- checks -----------------------------------------------------------------------------------


def _array(name: str, x: Any) -> Any:
    """Return a dask array as it is, anything else as a NumPy array; words stay words."""
    if isinstance(x, str):
        return x
    if isinstance(x, da.Array):
        if any(math.isnan(size) for sizes in x.chunks for size in sizes):
            raise ValueError(
                f"{name} has chunks of unknown size; call its compute_chunk_sizes() first"
            )
        if type(x._meta) is not np.ndarray:
            raise TypeError(
                f"{name} has chunks of type {type(x._meta).__name__}; expected NumPy arrays"
            )
        return x
    if dask.is_dask_collection(x):
        raise TypeError(
            f"{name} is of type {type(x).__name__}; expected a dask array or a NumPy array "
            "(of an xarray object, pass .data)"
        )
    return _checks.array(name, x)


def check_attention(arrays: Mapping[str, Any], options: Mapping[str, Any]) -> _arguments.Call:
    """Ask the checks of `mha_fast.attention`."""
    return _checked(arrays, options, ATTENTION)


def check_backward(wanted: Any) -> Check:
    """Return what asks the checks of `mha_fast.attention_backward`."""

    def check(arrays: Mapping[str, Any], options: Mapping[str, Any]) -> _arguments.Call:
        call = _checked(arrays, options, BACKWARD)
        _gradients._wanted(wanted, dict(arrays))
        results = (arrays[name] for name in ("grad_out", "out", "lse", "grad_lse"))
        _gradients._forward_results(call, *results)
        return call

    return check


def _checked(arrays: Mapping[str, Any], options: Mapping[str, Any], of: Options) -> _arguments.Call:
    given = {name: arrays[name] for name in (*_PER_ENTRY, *_PER_HEAD)}
    return _arguments.check(
        arrays["query"],
        arrays["key"],
        arrays["value"],
        arrays["attn_mask"],
        False,
        of,
        {**options, **given},
    )


def _stand_in(x: Any) -> Any:
    """Return an array of the same shape and dtype in which every element is one zero.

    Small NumPy arrays stand for themselves, since their numbers are checked, too.
    """
    if x is None or isinstance(x, str) or (isinstance(x, np.ndarray) and x.ndim < 2):
        return x
    if isinstance(x, np.ndarray) and x.dtype.kind in "iu":
        return x
    return np.broadcast_to(np.zeros((), x.dtype), x.shape)


# ---- axes and bounds --------------------------------------------------------------------------


def _shapes(arrays: Mapping[str, Any], checked: _arguments.Call) -> dict[str, tuple[Axis, ...]]:
    """Return which axis each dimension of each array is."""
    n_batch = len(checked.batch_shape)
    whole: dict[str, tuple[Axis, ...]] = {
        "query": (HEADS, QUERIES, None),
        "key": (KV_HEADS, KEYS, None),
        "value": (KV_HEADS, KEYS, None),
        "attn_mask": (HEADS, QUERIES, KEYS),
        "grad_out": (HEADS, QUERIES, None),
        "out": (HEADS, QUERIES, None),
        "lse": (HEADS, QUERIES),
        "grad_lse": (HEADS, QUERIES),
        **dict.fromkeys(_PER_ENTRY, ()),
        **dict.fromkeys(_PER_HEAD, (HEADS,)),
    }
    shapes = {}
    for name, own in whole.items():
        x = arrays.get(name)
        if x is None or isinstance(x, str):
            continue
        axes = (*range(n_batch), *own)
        shapes[name] = axes[len(axes) - x.ndim :]
    return shapes


def _cut(
    arrays: Mapping[str, Any],
    shapes: Mapping[str, tuple[Axis, ...]],
    chunks: Mapping[str, Any],
    checked: _arguments.Call,
) -> Grid:
    """Choose the bounds of every axis: as given, else as the arrays have them, else by size."""
    n_head, n_query, head_width = checked.query.shape[-3:]
    n_kv_head, n_key = checked.key.shape[-3:-1]
    width = head_width + checked.out_shape[-1]
    group = n_head // n_kv_head if n_kv_head else 0
    cut_by = {name: x for name, x in arrays.items() if isinstance(x, da.Array)}

    def bounds(axis: Axis, n: int, otherwise: int) -> Bounds:
        given = _grid.given_bounds(chunks, "batch" if isinstance(axis, int) else str(axis), n)
        if given is not None:
            return given
        cuts = _cuts(axis, n, cut_by, shapes)
        return _grid.union(cuts) if cuts else _grid.regular(n, otherwise)

    row_bytes = width * checked.dtype.itemsize
    queries = bounds(QUERIES, n_query, _grid.automatic_rows(n_query, row_bytes))
    keys = bounds(KEYS, n_key, _grid.automatic_rows(n_key, row_bytes))
    work = width * _largest(queries) * _largest(keys)
    heads = bounds(HEADS, n_head, _grid.automatic_heads(n_head, group, work))
    kv_heads = _grid.union([(0, n_kv_head), *_cuts(KV_HEADS, n_kv_head, cut_by, shapes)])
    heads, kv_heads = _grid.head_bounds(heads, kv_heads, group)
    all_bounds: dict[Axis, Bounds] = {
        QUERIES: queries,
        KEYS: keys,
        HEADS: heads,
        KV_HEADS: kv_heads,
    }
    work *= _largest(heads)
    for axis in reversed(range(len(checked.batch_shape))):
        n = checked.batch_shape[axis]
        all_bounds[axis] = bounds(axis, n, _grid.automatic_share(n, work))
        work *= _largest(all_bounds[axis])
    return Grid(all_bounds, len(checked.batch_shape), group)


def _cuts(
    axis: Axis, n: int, arrays: Mapping[str, Any], shapes: Mapping[str, tuple[Axis, ...]]
) -> list[Bounds]:
    """Return the bounds that dask arrays already have along an axis."""
    return [
        _grid.bounds_of(x.chunks[shapes[name].index(axis)])
        for name, x in arrays.items()
        if axis in shapes[name] and x.shape[shapes[name].index(axis)] == n
    ]


def _largest(bounds: Sequence[int]) -> int:
    return max(stop - start for start, stop in pairwise(bounds))


def _aligned(name: str, x: Any, axes: tuple[Axis, ...], grid: Grid) -> Any:
    """Return an array whose chunks are those of the grid."""
    if not isinstance(x, da.Array) and name in (*_PER_ENTRY, *_PER_HEAD):
        return x
    sizes = tuple(
        (n,) if axis is None or n != grid.bounds[axis][-1] else grid.sizes(axis)
        for axis, n in zip(axes, x.shape, strict=True)
    )
    return x.rechunk(sizes) if isinstance(x, da.Array) else da.from_array(x, chunks=sizes)
