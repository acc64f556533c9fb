"""head_statistics(): what the heads look at, measured without the matrix of weights."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Unpack

import numpy as np

from . import _arguments, _checks, _core
from ._options import LARGEST_OFFSET, STATISTICS, StatisticsOptions
from ._statistics_record import HeadStatistics
from ._typing import Array, ArrayLike
from .config import threads_asked_for

__all__ = ["HeadStatistics", "head_statistics"]

# Columns of a row of measurements, as in src/contract/statistics.h.
ENTROPY, CONFIDENCE, DISTANCE, TOP_KEY, MAXIMUM, FACTOR, N_FIXED = range(7)


@dataclass(slots=True)
class Measured:
    """What a call measures beside the fixed columns."""

    offsets: Array  # int64, (n_offset,)
    key_sets: Array | None  # uint8, (n_batch, n_set, n_key)
    ignored: Array | None  # uint8, (n_batch, n_key)
    received: Array | None  # float64, (n_batch, n_head, n_key), zeros to be added to


@STATISTICS.shown
def head_statistics(
    query: ArrayLike,
    key: ArrayLike,
    attn_mask: ArrayLike | None = None,
    *,
    offsets: Sequence[int] = (-1, 0, 1),
    key_sets: Sequence[ArrayLike] | Array | None = None,
    ignore_keys: ArrayLike | None = None,
    received: bool = False,
    **options: Unpack[StatisticsOptions],
) -> HeadStatistics:
    """Measure what each head attends to, in one pass over the scores.

    The measurements are taken beside the online softmax, block by block: no array of
    ``n_query * n_key`` is made, and the cost is that of the scores, not of the weights.

    Parameters
    ----------
    query : array, (..., n_head, n_query, head_width)
        As in `attention`; also of two axes, for one head.
    key : array, (..., n_kv_head, n_key, head_width)
    attn_mask : array, optional
        As in `attention`.
    offsets : sequence of int
        For each offset d the weight on the key at ``p_i + d`` is measured, with ``p_i`` the
        position of query i. (-1, 0, 1) are the previous token, the own one and the next.
    key_sets : sequence, optional
        Sets of keys whose share of the weight is wanted: each a bool array broadcastable to
        (..., n_key), or a list of key numbers. A bool array (n_set, n_key) is such a sequence.
    ignore_keys : bool array broadcastable to (..., n_key), or list of key numbers, optional
        Keys that `confidence` leaves out, such as the end of a sentence.
    received : bool
        Also sum the weights that each key receives. Needs a second pass over the scores.
    is_causal, window, query_offset, kv_lengths, scale, softcap, alibi_slopes, sinks, num_threads
        As in `attention`.

    Returns
    -------
    HeadStatistics
        Its docstring has the formulas and their sources. float64, whatever the inputs are; sums
        are kept in float32 (float64 for float64) within the pass.

    Raises
    ------
    TypeError, ValueError, MemoryError
        As `attention`; also for sets that do not fit the keys.

    Notes
    -----
    Memory is a row of measurements per query and head, about 50 bytes and 8 more for each offset
    and set.

    References
    ----------
    Entropy, masses and relations: Clark et al. 2019. Confidence and positional heads: Voita et
    al. 2019. Received weight: Zhang et al. 2023 (heavy hitters).

    Examples
    --------
    >>> import numpy as np, mha_fast
    >>> x = np.random.default_rng(0).standard_normal((2, 8, 100, 64), dtype=np.float32)
    >>> statistics = mha_fast.head_statistics(x, x, is_causal=True)
    >>> statistics.entropy.shape, statistics.offset_mass.shape, statistics.top_key.shape
    ((2, 8), (2, 8, 3), (2, 8, 100))
    """
    wants_received = _checks.flag("received", received)
    call = _arguments.check(query, key, None, attn_mask, False, STATISTICS, options)
    n_query = call.lse_shape[-1]
    n_key = call.key.shape[-2]
    keys = (*call.batch_shape, n_key)
    sums = np.zeros((*call.lse_shape[:-1], n_key)) if wants_received else None
    what = Measured(
        _offsets(offsets),
        _key_sets(key_sets, keys),
        None if ignore_keys is None else _members("ignore_keys", ignore_keys, keys),
        sums,
    )
    n_set = 0 if what.key_sets is None else what.key_sets.shape[1]
    rows = _checks.empty((*call.lse_shape, N_FIXED + len(what.offsets) + n_set), np.float64)
    if rows.size:
        call.statistics = what
        _core.attend(call, rows, None, call.n_thread or threads_asked_for())
    position = np.arange(n_query)
    if call.query_offset is not None and call.has_rows:
        position = position + call.query_offset[..., None, None]
    return _record(rows, position, what, call.one_head)


def _record(rows: Array, position: Array, what: Measured, one_head: bool) -> HeadStatistics:
    """Take means over the queries that have a key."""
    n_offset = len(what.offsets)
    top_key = rows[..., TOP_KEY].astype(np.int64)
    has_key = (rows[..., MAXIMUM] != -np.inf) | np.isnan(rows[..., FACTOR])
    n_row = has_key.sum(axis=-1)

    def mean(numbers: Array) -> Array:
        total = np.where(has_key, numbers, 0).sum(axis=-1)
        return np.divide(total, n_row, out=np.full(total.shape, np.nan), where=n_row > 0)

    masses = [mean(rows[..., column]) for column in range(N_FIXED, rows.shape[-1])]
    # A query with NaN among its scores has no top key, and -1 is no key that an offset could hit.
    unknown = np.where(np.isnan(rows[..., FACTOR]), np.nan, 0.0)
    hits = [mean((top_key == position + d) + unknown) for d in what.offsets]
    whole = n_row.shape
    fields: dict[str, Any] = {
        "entropy": mean(rows[..., ENTROPY]),
        "confidence": mean(rows[..., CONFIDENCE]),
        "mean_distance": mean(rows[..., DISTANCE]),
        "offset_mass": _last_axis(masses[:n_offset], whole),
        "offset_argmax": _last_axis(hits, whole),
        "key_mass": None if what.key_sets is None else _last_axis(masses[n_offset:], whole),
        "top_key": top_key,
        "received": what.received,
    }
    if one_head:
        fields = {name: None if x is None else x[0] for name, x in fields.items()}
    return HeadStatistics(**fields, offsets=tuple(int(d) for d in what.offsets))


def _last_axis(parts: list[Array], shape: tuple[int, ...]) -> Array:
    return np.stack(parts, axis=-1) if parts else np.empty((*shape, 0))


def _offsets(offsets: Any) -> Array:
    array = _checks.array("offsets", offsets)
    if array.ndim != 1:
        raise ValueError(f"offsets has shape {array.shape}; expected (offsets,)")
    return _checks.integers("offsets", array, array.shape, -LARGEST_OFFSET, LARGEST_OFFSET)


def _key_sets(key_sets: Any, keys: tuple[int, ...]) -> Array | None:
    """Return the sets as (n_batch, n_set, n_key) of 0 and 1."""
    if key_sets is None:
        return None
    if not isinstance(key_sets, (Sequence, np.ndarray)) or isinstance(key_sets, str):
        raise TypeError(f"key_sets is of type {type(key_sets).__name__}; expected a sequence")
    sets = [_members(f"key_sets[{i}]", one, keys) for i, one in enumerate(key_sets)]
    if not sets:
        return np.empty((math.prod(keys[:-1]), 0, keys[-1]), np.uint8)
    return np.stack(sets, axis=1)


def _members(name: str, which: Any, keys: tuple[int, ...]) -> Array:
    """Return (n_batch, n_key) of 0 and 1 from a bool array or a list of key numbers."""
    if which is None:
        raise TypeError(f"{name} is None; expected a bool array, or ints or bools that pick keys")
    array = _checks.array(name, which)
    if array.ndim == 0 and array.dtype.kind in "iub":
        raise ValueError(f"{name} is {which!r}; expected a bool array or a list of key numbers")
    if array.dtype == np.bool_:
        members = _checks.broadcast(name, array, keys, np.uint8)
    else:
        members = np.zeros(keys, np.uint8)
        chosen = _checks.chosen(name, array, keys[-1])
        members[..., chosen] = 1
    return members.reshape(math.prod(keys[:-1]), keys[-1])
