"""How often a head's largest weight falls where an annotator points."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from .. import _checks
from .._typing import Array, ArrayLike
from ._tables import grid

__all__ = ["RelationAccuracy", "relation_accuracy"]


@dataclass(frozen=True, eq=False, repr=False)
class RelationAccuracy:
    """Hits and misses of each head on the pairs of one relation.

    Those of several sequences add up: ``sum(accuracies[1:], start=accuracies[0])``. Prints as a
    table of percentages.

    Attributes
    ----------
    hits : int64 array, (..., n_head)
        For how many pairs the head's largest weight was on a right key.
    offset_hits : dict of int to int
        The same for guessing the key at a fixed offset from the query.
    n_pair : int
    """

    hits: Array
    offset_hits: dict[int, int]
    n_pair: int

    @property
    def accuracy(self) -> Array:
        """Share of hits, (..., n_head); NaN without any pair."""
        return self.hits / self.n_pair if self.n_pair else np.full(self.hits.shape, np.nan)

    @property
    def best_offset(self) -> int | None:
        """The offset that guesses best, the nearest of several; None when none were tried."""
        order = sorted(self.offset_hits, key=lambda d: (-self.offset_hits[d], abs(d), d))
        return order[0] if order else None

    @property
    def baseline(self) -> float:
        """Share of hits of `best_offset`: what a head must beat to know more than distances."""
        if self.best_offset is None or not self.n_pair:
            return float("nan")
        return self.offset_hits[self.best_offset] / self.n_pair

    def __add__(self, other: RelationAccuracy) -> RelationAccuracy:
        """Hits on the pairs of both."""
        if not isinstance(other, RelationAccuracy):
            return NotImplemented
        if (
            self.hits.shape != other.hits.shape
            or self.offset_hits.keys() != other.offset_hits.keys()
        ):
            raise ValueError("the two were measured on different heads or with different offsets")
        offset_hits = {d: n + other.offset_hits[d] for d, n in self.offset_hits.items()}
        return RelationAccuracy(self.hits + other.hits, offset_hits, self.n_pair + other.n_pair)

    def __repr__(self) -> str:
        """Percentages, and the guess to compare them with."""
        table = grid(np.atleast_1d(self.accuracy), lambda share: f"{100 * share:.0f}")
        text = f"{table}\n% of {self.n_pair} pairs"
        if self.best_offset is not None:
            text += f"; always offset {self.best_offset:+d}: {100 * self.baseline:.0f} %"
        return text


def relation_accuracy(
    top_key: ArrayLike,
    pairs: Iterable[tuple[int, int | Sequence[int]]],
    *,
    baseline_offsets: Iterable[int] = range(-10, 11),
) -> RelationAccuracy:
    """Count how often each head's largest weight falls on the right key.

    Parameters
    ----------
    top_key : int array, (..., n_head, n_query)
        Of `head_statistics`, for one sequence; leading axes may be layers. To leave separators out
        of the choice, exclude them by `attn_mask` when measuring: the order of the other keys
        stays.
    pairs : iterable of (query, key) or (query, keys)
        The annotation: from which token, to which token, or to any of which.
    baseline_offsets : iterable of int
        Distances to guess by, for comparison.

    Returns
    -------
    RelationAccuracy

    Raises
    ------
    ValueError
        A query that `top_key` does not have, or a key below 0.

    References
    ----------
    Clark et al. 2019, What Does BERT Look At?, section 4.2; the baseline of fixed offsets too.
    """
    top_key = _checks.array("top_key", top_key)
    n_query = top_key.shape[-1]
    hits = np.zeros(top_key.shape[:-1], np.int64)
    offset_hits = dict.fromkeys(baseline_offsets, 0)
    n_pair = 0
    for query, keys in pairs:
        right = [keys] if isinstance(keys, int | np.integer) else list(keys)
        if not 0 <= query < n_query:
            raise ValueError(f"pairs has query {query}; expected 0 to {n_query - 1}")
        if any(key < 0 for key in right):
            raise ValueError(f"pairs has key {min(right)}; expected 0 or more")
        hits += np.isin(top_key[..., query], right)
        for offset in offset_hits:
            offset_hits[offset] += query + offset in right
        n_pair += 1
    return RelationAccuracy(hits, offset_hits, n_pair)
