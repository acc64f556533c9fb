"""attention_backward(): the gradients over dask arrays, a sum of those of every pair of chunks."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import dask.array as da
import numpy as np
from dask.highlevelgraph import HighLevelGraph
from dask.task_spec import TaskRef

from ..._typing import Window
from . import _tasks
from ._graph import Tasks, options_of, visible
from ._grid import HEADS, QUERIES, Axis
from ._operands import Operand, check_backward, problem


def attention_backward(
    grad_out: Any,
    query: Any,
    key: Any,
    value: Any,
    out: Any,
    lse: Any,
    attn_mask: Any = None,
    *,
    grad_lse: Any = None,
    wanted: Sequence[str] = ("query", "key", "value"),
    is_causal: bool = False,
    window: Window | None = None,
    query_offset: Any = 0,
    kv_lengths: Any = None,
    scale: float | None = None,
    softcap: float | None = None,
    alibi_slopes: Any = None,
    sinks: Any = None,
    head_mask: Any = None,
    precision: str = "highest",
    num_threads: int | None = None,
    chunks: Mapping[str, Any] | None = None,
) -> tuple[Any, ...]:
    """Gradients of `mha_fast.dask.attention`, lazily and chunk by chunk.

    Each task is one call of `mha_fast.attention_backward` on a chunk of queries and a chunk of
    keys, with the output and log-sum-exp of the whole call; its results are added up over the key
    chunks for the queries, and over the query chunks for keys and values.

    Parameters
    ----------
    grad_out : dask or NumPy array, (..., n_head, n_query, value_width)
    query, key, value, attn_mask
        What `mha_fast.dask.attention` got.
    out : dask or NumPy array, (..., n_head, n_query, value_width)
        What it returned.
    lse : dask or NumPy array, (..., n_head, n_query)
        What it returned with ``return_lse=True``.
    grad_lse : dask or NumPy array, (..., n_head, n_query), optional
    wanted : sequence of str
        As in `mha_fast.attention_backward`.
    is_causal, window, query_offset, kv_lengths, scale, softcap, alibi_slopes, sinks, head_mask
        As `mha_fast.dask.attention` got them.
    precision, num_threads, chunks
        As in `mha_fast.dask.attention`.

    Returns
    -------
    tuple of dask arrays
        In the order of `wanted`, each of the shape and dtype of its argument and in the chunks of
        the call.

    Raises
    ------
    TypeError, ValueError
        As `mha_fast.attention_backward` and `mha_fast.dask.attention`, when the graph is made.

    Notes
    -----
    Sums are taken four at a time, in trees that depend on the chunks alone: the result is the same
    to the bit for any scheduler and any number of workers. 16-bit arrays are widened to float32 in
    the task and their gradients rounded once, after the last sum.

    Examples
    --------
    >>> import dask.array as da
    >>> import mha_fast.dask
    >>> x = da.random.default_rng(0).standard_normal((8, 1000, 64), chunks=(4, 250, 64))
    >>> out, lse = mha_fast.dask.attention(x, x, x, return_lse=True)
    >>> grads = mha_fast.dask.attention_backward(da.ones_like(out), x, x, x, out, lse)
    >>> [grad.chunks[1] for grad in grads]
    [(250, 250, 250, 250), (250, 250, 250, 250), (250, 250, 250, 250)]
    """
    arrays = {
        "query": query,
        "key": key,
        "value": value,
        "attn_mask": attn_mask,
        "grad_out": grad_out,
        "out": out,
        "lse": lse,
        "grad_lse": grad_lse,
        "query_offset": query_offset,
        "kv_lengths": kv_lengths,
        "alibi_slopes": alibi_slopes,
        "sinks": sinks,
        "head_mask": head_mask,
    }
    options = {
        "is_causal": is_causal,
        "window": window,
        "scale": scale,
        "softcap": softcap,
        "precision": precision,
        "num_threads": num_threads,
    }
    call = problem(arrays, options, chunks, check_backward(wanted))
    return _Gradients(call, options_of(call, return_lse=True), names=tuple(wanted)).arrays()


@dataclass
class _Gradients(Tasks):
    """The tasks of the backward pass."""

    names: tuple[str, ...] = ()
    # Of each argument, for each of its chunks: what has to be added up, in order.
    parts: dict[str, dict[tuple[int, ...], list[TaskRef]]] = field(default_factory=dict)

    def arrays(self) -> tuple[Any, ...]:
        """Make all tasks; return a dask array for each name."""
        self.token = f"{self.token}-{'-'.join(self.names)}"
        self.parts = {name: {} for name in self.names}
        grid = self.problem.grid
        for batch in grid.batch_chunks():
            seen = visible(self.problem, batch)
            for head in range(grid.n(HEADS)):
                for query in range(grid.n(QUERIES)):
                    at = (*batch, head, query)
                    for key in np.flatnonzero(seen[query]).tolist():
                        self._add_pair(at, key)
                    if "sinks" in self.names:
                        self._add_sinks(at)
        return tuple(self._sums(name) for name in self.names)

    def _add_pair(self, at: tuple[int, ...], key: int) -> None:
        """Add the kernel call on a pair of chunks. Sinks are not its business."""
        names = tuple(name for name in self.names if name != "sinks")
        index = self.index(at, key)
        place = self.problem.grid.place(at[:-2], at[-2], at[-1], key)
        numbers = self.numbers(index, "alibi_slopes", "head_mask")
        if names:
            self._add_call((*at, key), index, place, names, numbers)

    def _add_sinks(self, at: tuple[int, ...]) -> None:
        """Add the gradient of sinks, which needs the rows of the whole result and no key."""
        index = self.index(at, 0)
        place = self.problem.grid.place(at[:-2], at[-2], at[-1], 0)
        self._add_call((*at, -1), index, place, ("sinks",), self.numbers(index, "sinks"))

    def _add_call(
        self,
        at: tuple[int, ...],
        index: Mapping[Axis, int],
        place: Any,
        names: tuple[str, ...],
        numbers: Mapping[str, Any],
    ) -> None:
        operands = ("grad_out", "query", "key", "value", "out", "lse", "attn_mask")
        arguments = [self.chunk(name, index) for name in operands]
        more = {name: self.chunk(name, index) for name in ("query_offset", "kv_lengths")}
        if "grad_lse" in self.problem.operands:
            more["grad_lse"] = self.chunk("grad_lse", index)
        pair = self.add(
            (f"attention-backward-part-{self.token}", *at),
            _tasks.differentiate, self.options, place, names, *arguments, **more, **numbers,
        )  # fmt: skip
        for i, name in enumerate(names):
            chunk = self.problem.operands[name].place(self.problem.grid, index)
            one = self.add(
                (f"attention-backward-{name}-part-{self.token}", *at), _tasks.pick, pair, i
            )
            self.parts[name].setdefault(chunk, []).append(one)

    def _sums(self, name: str) -> Any:
        """Add the sums of one argument's gradient; return it as an array."""
        operand = self.problem.operands[name]
        layer = f"attention-backward-{name}-{self.token}"
        chunks = operand.chunks(self.problem.grid)
        dtype = _dtype_of_gradient(operand)
        outer = Tasks(self.problem, self.options)
        outer.token = self.token
        for at in np.ndindex(*(len(sizes) for sizes in chunks)):
            parts = self.parts[name].get(at, [])
            if parts:
                parts = outer.add_levels(f"attention-backward-{name}-sum", at, parts, _tasks.add)
                outer.add((layer, *at), _tasks.rounded, dtype, *parts)
            else:
                shape = tuple(sizes[i] for sizes, i in zip(chunks, at, strict=True))
                outer.add((layer, *at), np.zeros, shape, dtype)
        below = f"attention-backward-part-{self.token}"
        graph = HighLevelGraph.from_collections(below, self.tasks, dependencies=self.inputs())
        graph = HighLevelGraph(
            {**graph.layers, layer: outer.tasks}, {**graph.dependencies, layer: {below}}
        )
        array = da.Array(graph, layer, chunks, meta=np.empty((0,) * len(chunks), dtype))
        return array[0] if self.problem.one_head and name in ("query", "key", "value") else array


def _dtype_of_gradient(operand: Operand) -> np.dtype[Any]:
    """Return the dtype of the argument; float64 for numbers that are no floats."""
    dtype = np.dtype(operand.array.dtype).newbyteorder("=")
    return dtype if dtype.kind not in "iub" else np.dtype(np.float64)
