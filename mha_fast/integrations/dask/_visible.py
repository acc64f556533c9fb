"""Which chunks of keys the queries of a chunk can see: the others make no task."""

import numpy as np

from ..._typing import Array
from ._grid import Bounds


def visible_chunks(
    queries: Bounds,
    keys: Bounds,
    window: tuple[int, int],
    offsets: Array | None,
    lengths: Array | None,
) -> Array:
    """Return for chunks of queries and keys whether any query sees any key.

    Parameters
    ----------
    queries, keys : tuple of int
        Where chunks begin and end.
    window : (left, right)
        The causal limit included. A query at p sees keys ``p - left`` to ``p + right``.
    offsets : int64 array (n_entry,), or None
        Position of query 0 in each of the batch entries that share a task. None: not known yet,
        so that nothing is excluded by position.
    lengths : int64 array (n_entry,), or None
        Valid keys of each entry; None where all are valid, or not known yet.

    Returns
    -------
    bool array, (chunks of queries, chunks of keys)
    """
    starts, stops = (np.array(x, np.int64) for x in (queries[:-1], queries[1:]))
    key_starts, key_stops = (np.array(x, np.int64) for x in (keys[:-1], keys[1:]))
    seen = np.zeros((len(starts), len(key_starts)), bool)
    for offset, length in _entries(offsets, lengths):
        last = key_stops if length is None else np.minimum(key_stops, length)
        one = np.broadcast_to((last > key_starts) & (starts < stops)[:, None], seen.shape)
        if offset is not None:
            # Every position sees a range of keys; those of neighbours overlap or touch.
            first_seen = starts + (offset - window[0])
            last_seen = stops + (offset - 1 + window[1])
            one = one & (key_starts <= last_seen[:, None]) & (last - 1 >= first_seen[:, None])
        seen |= one
    return seen


def _entries(offsets: Array | None, lengths: Array | None) -> set[tuple[int | None, int | None]]:
    """Return the different pairs (offset, length) among the entries."""
    n = max(0 if x is None else len(x) for x in (offsets, lengths))
    if not n and offsets is None and lengths is None:
        return {(None, None)}
    columns = ([None] * n if x is None else x.tolist() for x in (offsets, lengths))
    return set(zip(*columns, strict=True))
