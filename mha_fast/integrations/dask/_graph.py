"""The graph of attention: a task for every visible pair of chunks, and a tree that joins them."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import dask.array as da
import numpy as np
from dask.highlevelgraph import HighLevelGraph
from dask.task_spec import Task, TaskRef

from ... import _checks
from . import _tasks
from ._grid import HEADS, KEYS, KV_HEADS, QUERIES, Axis
from ._operands import Problem, chunk_of
from ._visible import visible_chunks

# Parts that one task joins. More of them make a task hold more, fewer make more tasks.
JOINED_AT_ONCE = 4


def attention_graph(problem: Problem, return_lse: bool) -> Any:
    """Return the output, or the output and the log-sum-exp, as dask arrays."""
    graph = _Graph(problem, options_of(problem, return_lse))
    for batch in problem.grid.batch_chunks():
        seen = visible(problem, batch)
        for head in range(problem.grid.n(HEADS)):
            for query in range(problem.grid.n(QUERIES)):
                graph.add_queries(batch, head, query, np.flatnonzero(seen[query]).tolist())
    return graph.arrays()


def options_of(problem: Problem, return_lse: bool) -> _tasks.Options:
    """Return the options that all tasks share."""
    checked = problem.checked
    left, right = (None if x >= _checks.UNBOUNDED else x for x in checked.window)
    return _tasks.Options(
        dtype=checked.dtype,
        n_query=problem.grid.bounds[QUERIES][-1],
        n_key=problem.grid.bounds[KEYS][-1],
        window=(left, right),
        scale=checked.scale,
        softcap=checked.softcap or None,
        precision="high" if checked.high else "highest",
        num_threads=checked.n_thread,
        offset_at_end=problem.offset_at_end,
        return_lse=return_lse,
    )


def visible(problem: Problem, batch: tuple[int, ...]) -> Any:
    """Return which chunks of keys each chunk of queries sees, for the entries of a batch chunk."""
    at: dict[Axis, int] = dict(enumerate(batch))
    bounds, window = problem.grid.bounds, problem.checked.window
    offsets, lengths = (problem.known(name, at) for name in ("query_offset", "kv_lengths"))
    return visible_chunks(bounds[QUERIES], bounds[KEYS], window, offsets, lengths)


@dataclass
class Tasks:
    """Tasks of one call, their names and arguments."""

    problem: Problem
    options: _tasks.Options
    tasks: dict[Any, Task] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.token = self.problem.token

    def add(self, key: tuple[Any, ...], function: Any, *arguments: Any, **named: Any) -> TaskRef:
        """Add a task; return a reference to its result."""
        self.tasks[key] = Task(key, function, *arguments, **named)
        return TaskRef(key)

    def add_levels(
        self, name: str, at: tuple[int, ...], parts: list[TaskRef], function: Any, *arguments: Any
    ) -> list[TaskRef]:
        """Join parts, level by level, until what is left can be joined at once."""
        level = 0
        while len(parts) > JOINED_AT_ONCE:
            groups = [parts[i : i + JOINED_AT_ONCE] for i in range(0, len(parts), JOINED_AT_ONCE)]
            parts = [
                group[0]
                if len(group) == 1
                else self.add((f"{name}-{self.token}", *at, level, i), function, *arguments, *group)
                for i, group in enumerate(groups)
            ]
            level += 1
        return parts

    def index(self, at: tuple[int, ...], key: int) -> dict[Axis, int]:
        """Return the chunk along every axis, of queries and a chunk of keys."""
        *batch, head, query = at
        index: dict[Axis, int] = dict(enumerate(batch))
        kv_head = self.problem.grid.kv_head_chunk(head)
        return index | {HEADS: head, KV_HEADS: kv_head, QUERIES: query, KEYS: key}

    def chunk(self, name: str, index: Mapping[Axis, int]) -> Any:
        """Return the chunk of an operand, None where it is absent."""
        return chunk_of(self.problem.operands.get(name), self.problem.grid, index)

    def numbers(self, index: Mapping[Axis, int], *names: str) -> dict[str, Any]:
        """Return the numbers per head that are given."""
        return {name: self.chunk(name, index) for name in names if name in self.problem.operands}

    def inputs(self) -> list[Any]:
        """Return the dask arrays that the tasks read."""
        arrays = (x.array for x in self.problem.operands.values())
        return [x for x in arrays if isinstance(x, da.Array)]


@dataclass
class _Graph(Tasks):
    """The tasks of attention."""

    def add_queries(self, batch: tuple[int, ...], head: int, query: int, keys: list[int]) -> None:
        """Add all that a chunk of queries of a chunk of heads needs."""
        at = (*batch, head, query)
        place = self.problem.grid.place(batch, head, query, None)
        index = self.index(at, keys[0] if keys else 0)
        name = self._name_of_result("both", at) if self.options.return_lse else self._out(at)
        if not keys:
            spans = (*place.batch, place.heads, place.queries)
            shape = (*(stop - start for start, stop in spans), self.problem.value_width)
            self.add(name, _tasks.unseeing, self.options, shape, self.chunk("sinks", index))
        elif len(keys) == 1:
            numbers = self.numbers(index, "alibi_slopes", "sinks", "head_mask")
            self.add(name, _tasks.whole, self.options, *self._arguments(at, index), **numbers)
        else:
            parts = [self._add_part(at, key) for key in keys]
            parts = self.add_levels("attention-join", at, parts, _tasks.join, place)
            sinks, gates = (self.chunk(name, index) for name in ("sinks", "head_mask"))
            self.add(name, _tasks.joined, self.options, place, sinks, gates, *parts)

    def _add_part(self, at: tuple[int, ...], key: int) -> TaskRef:
        """Add the kernel call on one chunk of keys, without what is counted once for all keys."""
        index = self.index(at, key)
        numbers = self.numbers(index, "alibi_slopes")
        place, *operands = self._arguments(at, index)
        dtype = self.options.sum_dtype
        name = (f"attention-part-{self.token}", *at, key)
        return self.add(name, _tasks.attend, self.options, place, dtype, *operands, **numbers)

    def _arguments(self, at: tuple[int, ...], index: Mapping[Axis, int]) -> list[Any]:
        """Return the arguments of a kernel call, from its place on."""
        names = ("query", "key", "value", "attn_mask", "query_offset", "kv_lengths")
        place = self.problem.grid.place(at[:-2], at[-2], at[-1], index[KEYS])
        return [place, *(self.chunk(name, index) for name in names)]

    def _name_of_result(self, what: str, at: tuple[int, ...]) -> tuple[Any, ...]:
        return (f"attention-{what}-{self.token}", *at)

    def _out(self, at: tuple[int, ...]) -> tuple[Any, ...]:
        return (*self._name_of_result("out", at), 0)

    # ---- from tasks to arrays

    def arrays(self) -> Any:
        """Return the results as dask arrays."""
        what = "both" if self.options.return_lse else "out"
        layer = f"attention-{what}-{self.token}"
        graph = HighLevelGraph.from_collections(layer, self.tasks, dependencies=self.inputs())
        axes = (*range(self.problem.grid.n_batch_axis), HEADS, QUERIES)
        sizes = tuple(self.problem.grid.sizes(axis) for axis in axes)
        shapes = {"out": ((*sizes, (self.problem.value_width,)), self.options.dtype)}
        if not self.options.return_lse:
            return self._array(graph, "out", *shapes["out"])
        shapes["lse"] = sizes, self.options.sum_dtype
        picks = {
            "out": {self._out(at): (at, 0) for at in self._places()},
            "lse": {self._name_of_result("lse", at): (at, 1) for at in self._places()},
        }
        return tuple(
            self._array(self._with_picks(graph, layer, what, picks[what]), what, *shapes[what])
            for what in ("out", "lse")
        )

    def _with_picks(
        self, graph: HighLevelGraph, layer: str, what: str, picks: Mapping[Any, Any]
    ) -> HighLevelGraph:
        """Return the graph with a layer that takes one array of each pair."""
        name = f"attention-{what}-{self.token}"
        tasks = {
            key: Task(key, _tasks.pick, TaskRef((layer, *at)), which)
            for key, (at, which) in picks.items()
        }
        layers = {**graph.layers, name: tasks}
        return HighLevelGraph(layers, {**graph.dependencies, name: {layer}})

    def _places(self) -> Iterator[tuple[int, ...]]:
        grid = self.problem.grid
        for batch in grid.batch_chunks():
            for head in range(grid.n(HEADS)):
                for query in range(grid.n(QUERIES)):
                    yield (*batch, head, query)

    def _array(self, graph: HighLevelGraph, what: str, chunks: Any, dtype: Any) -> da.Array:
        meta = np.empty((0,) * len(chunks), dtype)
        array = da.Array(graph, f"attention-{what}-{self.token}", chunks, meta=meta)
        return array[0] if self.problem.one_head else array
