"""The chunks of a call: where each axis is cut, and which array has which axis."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple, TypeAlias

import dask
from dask.utils import parse_bytes

from ... import _checks

# An axis of a call: a batch axis by its number, the others by name. None is never cut.
Axis: TypeAlias = int | str | None
Bounds: TypeAlias = tuple[int, ...]  # where chunks begin, and where the last one ends

HEADS, KV_HEADS, QUERIES, KEYS = "heads", "kv_heads", "queries", "keys"
# What callers may name in `chunks`. "batch" is all batch axes.
CHUNK_NAMES = ("batch", HEADS, QUERIES, KEYS)

# Rows of an automatic chunk: below the lower number the scheduler's share of a task is felt; more
# chunks than the higher number along one axis make graphs of too many pairs.
LEAST_ROWS, MOST_ROW_CHUNKS = 4096, 64
ROW_UNIT = 512  # a multiple of the kernels' blocks of rows and keys
# Multiply-adds of a task, up to which heads and batch entries share one: about 20 ms of a core.
TASK_MULTIPLY_ADDS = 1 << 31


class Place(NamedTuple):
    """Where a task stands in the whole call; what messages name."""

    batch: tuple[tuple[int, int], ...]
    heads: tuple[int, int]
    queries: tuple[int, int]
    keys: tuple[int, int]

    def __str__(self) -> str:
        parts = [f"batch axis {i} {_range(b)}" for i, b in enumerate(self.batch)]
        parts += [f"{name} {_range(getattr(self, name))}" for name in (HEADS, QUERIES, KEYS)]
        return ", ".join(parts)


def _range(bounds: tuple[int, int]) -> str:
    return f"{bounds[0]}:{bounds[1]}"


@dataclass(frozen=True)
class Grid:
    """Bounds of every axis of a call."""

    bounds: Mapping[Axis, Bounds]
    n_batch_axis: int
    group: int  # query heads of a key/value head

    def n(self, axis: Axis) -> int:
        """Return the number of chunks along an axis."""
        return len(self.bounds[axis]) - 1

    def sizes(self, axis: Axis) -> tuple[int, ...]:
        """Return the sizes of the chunks along an axis, as dask writes them."""
        return tuple(stop - start for start, stop in pairwise(self.bounds[axis]))

    def span(self, axis: Axis, i: int) -> tuple[int, int]:
        """Return where a chunk begins and ends."""
        return self.bounds[axis][i], self.bounds[axis][i + 1]

    def kv_head_chunk(self, head_chunk: int) -> int:
        """Return the chunk of key/value heads that a chunk of query heads reads."""
        first = self.bounds[HEADS][head_chunk] // self.group if self.group else 0
        starts = self.bounds[KV_HEADS]
        return max(i for i in range(len(starts) - 1) if starts[i] <= first)

    def batch_chunks(self) -> Iterator[tuple[int, ...]]:
        """Go through the chunks of all batch axes."""
        counts = [self.n(axis) for axis in range(self.n_batch_axis)]
        for flat in range(math.prod(counts)):
            index = []
            for count in reversed(counts):
                flat, i = divmod(flat, count)
                index.append(i)
            yield tuple(reversed(index))

    def place(self, batch: tuple[int, ...], head: int, query: int, key: int | None) -> Place:
        """Return where a task stands; without a chunk of keys it stands for all of them."""
        keys = (0, self.bounds[KEYS][-1]) if key is None else self.span(KEYS, key)
        spans = tuple(self.span(axis, i) for axis, i in enumerate(batch))
        return Place(spans, self.span(HEADS, head), self.span(QUERIES, query), keys)


# ---- bounds -----------------------------------------------------------------------------------


def bounds_of(sizes: Iterable[int]) -> Bounds:
    """Return bounds from the sizes of chunks; chunks of size 0 are left out."""
    bounds = [0]
    for size in sizes:
        if size:
            bounds.append(bounds[-1] + size)
    return tuple(bounds) if len(bounds) > 1 else (0, 0)


def union(several: Sequence[Bounds]) -> Bounds:
    """Return the bounds that cut wherever one of several does."""
    cuts = sorted({cut for bounds in several for cut in bounds})
    return tuple(cuts) if len(cuts) > 1 else (0, 0)


def regular(n: int, size: int) -> Bounds:
    """Return the bounds of chunks of one size, the last perhaps smaller."""
    return (*range(0, n, max(size, 1)), n) if n else (0, 0)


def head_bounds(heads: Bounds, kv_heads: Bounds, group: int) -> tuple[Bounds, Bounds]:
    """Cut query heads and key/value heads so that each chunk of the first reads one of the second.

    A chunk of query heads then is either some heads of one group or a number of whole groups.
    """
    if not group:
        return heads, kv_heads
    cuts = {*heads, *(group * cut for cut in kv_heads)}
    for start, stop in pairwise(sorted(cuts)):
        up, down = -(-start // group) * group, stop // group * group
        if up <= down and (start % group or stop % group):
            cuts |= {up, down}
    kv_cuts = {*kv_heads, *(cut // group for cut in cuts), *(-(-cut // group) for cut in cuts)}
    return tuple(sorted(cuts)), tuple(sorted(kv_cuts))


def given_bounds(chunks: Any, name: str, n: int) -> Bounds | None:
    """Return the bounds that a caller gave for an axis: a size, -1 for one chunk, or all sizes."""
    given = chunks.get(name)
    if given is None:
        return None
    if isinstance(given, (tuple, list)):
        sizes = [_checks.size(f"chunks[{name!r}]", size) for size in given]
        if sum(sizes) != n:
            raise ValueError(f"chunks[{name!r}] sums to {sum(sizes)}; expected {n}")
        return bounds_of(sizes)
    size = _checks.index(f"chunks[{name!r}]", given, "an int, -1, or a tuple of sizes")
    if size == 0 or size < -1:
        raise ValueError(f"chunks[{name!r}] is {size}; expected at least 1, or -1 for one chunk")
    return regular(n, n if size == -1 else size)


def check_chunks(chunks: Any) -> Mapping[str, Any]:
    """Return the caller's `chunks` as a mapping with known names."""
    if chunks is None:
        return {}
    names = ", ".join(CHUNK_NAMES)
    if not isinstance(chunks, Mapping):
        raise TypeError(f"chunks is {chunks!r}; expected a dict with any of {names}")
    for name in chunks:
        if name not in CHUNK_NAMES:
            raise ValueError(f"chunks has the name {name!r}; expected any of {names}")
    return chunks


# ---- automatic sizes --------------------------------------------------------------------------


def automatic_rows(n: int, row_bytes: int) -> int:
    """Return how many queries or keys a chunk takes where nothing says it.

    At least 4,096, at most 64 chunks along the axis, unless one head's rows would then exceed
    dask's ``array.chunk-size``.
    """
    rows = max(LEAST_ROWS, _up(-(-n // MOST_ROW_CHUNKS), ROW_UNIT))
    most = parse_bytes(dask.config.get("array.chunk-size")) // max(row_bytes, 1)
    return max(min(rows, most // ROW_UNIT * ROW_UNIT), ROW_UNIT)


def automatic_share(n: int, work_of_one: int) -> int:
    """Return how many heads or batch entries share a task, from the multiply-adds of one."""
    return max(min(TASK_MULTIPLY_ADDS // max(work_of_one, 1), n), 1)


def automatic_heads(n_head: int, group: int, work_of_one: int) -> int:
    """Return how many query heads share a task: whole groups, where the work allows it."""
    share = automatic_share(n_head, work_of_one)
    return share // max(group, 1) * group or share


def _up(n: int, unit: int) -> int:
    return -(-n // unit) * unit
