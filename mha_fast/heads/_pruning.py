"""Which heads a network can do without."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from .. import _checks
from .._typing import Array, ArrayLike
from ._tables import grid, head_name

__all__ = [
    "Ablation",
    "PruningPath",
    "ablate_heads",
    "head_importance",
    "prune_greedily",
    "prune_in_order",
]

Score: TypeAlias = Callable[[Array], float]
Place: TypeAlias = tuple[int, ...]


def head_importance(out: ArrayLike, grad_out: ArrayLike, *, normalize: bool = False) -> Array:
    """How much the loss would change with the gate of each head, to first order.

    ``mean_b |sum_{i,c} out[b, h, i, c] * grad_out[b, h, i, c]|``, which is the mean magnitude of
    the derivative of each sequence's loss by the gate of head h, at gate 1.

    Parameters
    ----------
    out : array, (..., n_head, n_query, value_width)
        What `attention` returned, before heads are mixed.
    grad_out : array like `out`
        Gradient of the loss with respect to it, the loss being a sum over sequences.
    normalize : bool
        Divide by the root of the sum of squares over the heads, so that layers can be compared.

    Returns
    -------
    float64 array, (n_head,)
        NaN for an empty batch.

    Raises
    ------
    ValueError
        Shapes that differ, or fewer than three axes.

    References
    ----------
    Michel et al. 2019, Are Sixteen Heads Really Better than One?, section 4.1.
    """
    out, grad_out = _checks.reals("out", out), _checks.reals("grad_out", grad_out)
    out, grad_out = out.astype(np.float64, copy=False), grad_out.astype(np.float64, copy=False)
    if out.shape != grad_out.shape or out.ndim < 3:
        raise ValueError(
            f"out and grad_out have shapes {out.shape} and {grad_out.shape};"
            " expected the same (..., n_head, n_query, value_width)"
        )
    n_head = out.shape[-3]
    by_gate = np.einsum("...ic,...ic->...", out, grad_out)
    n_sequence = math.prod(out.shape[:-3])
    total = np.abs(by_gate.reshape(n_sequence, n_head)).sum(axis=0)
    importance = total / n_sequence if n_sequence else np.full(n_head, np.nan)
    if normalize:
        norm = np.linalg.norm(importance)
        importance = importance / norm if norm else importance
    return importance


@dataclass(frozen=True, eq=False, repr=False)
class Ablation:
    """What a score loses with each head. Prints as a table of the losses.

    Attributes
    ----------
    baseline : float
        The score with all heads.
    scores : float64 array, (n_head,) or (n_layer, n_head)
        The score without that head; with `all_but_one`, without the others of its layer.
    all_but_one : bool
    """

    baseline: float
    scores: Array
    all_but_one: bool

    @property
    def loss(self) -> Array:
        """``baseline - scores``: above 0 where the network does worse than with all heads."""
        return self.baseline - self.scores

    def __repr__(self) -> str:
        """Losses per head."""
        table = grid(self.loss, lambda number: f"{number:.3g}")
        kept = "with this head alone in its layer" if self.all_but_one else "without this head"
        return f"{table}\nloss of score {kept}; {self.baseline:.6g} with all"


def ablate_heads(score: Score, shape: int | Place, *, all_but_one: bool = False) -> Ablation:
    """Measure the network with each head switched off in turn.

    Parameters
    ----------
    score : callable
        Takes gates, float64 of the given shape, 1 for a head that works and 0 for one that does
        not, and returns a number that is larger when the network does better. A validation
        accuracy, or the likeness of an output to that of the whole network.
    shape : int or tuple of int
        ``n_head`` for one layer, or ``(n_layer, n_head)``.
    all_but_one : bool
        Switch off the other heads of the layer instead of the head itself.

    Returns
    -------
    Ablation
        `score` was called once for each head, and once with all of them.

    Raises
    ------
    ValueError
        A score that is NaN.

    References
    ----------
    Michel et al. 2019, Are Sixteen Heads Really Better than One?, sections 3.2 and 3.3.
    """
    everything = np.ones(shape)
    baseline = _checked(score, everything.copy())
    scores = np.empty(everything.shape)
    for place in np.ndindex(everything.shape):
        gates = everything.copy()
        if all_but_one:
            gates[place[:-1]] = 0.0
        gates[place] = 1.0 if all_but_one else 0.0
        scores[place] = _checked(score, gates)
    return Ablation(baseline, scores, all_but_one)


@dataclass(frozen=True, eq=False, repr=False)
class PruningPath:
    """Heads in the order of their removal, and what each step cost. Prints as a table.

    Attributes
    ----------
    shape : tuple of int
        Of the gates.
    baseline : float
        The score with all heads.
    removed : tuple of tuple of int
        Place of each head in the gates, first removed first.
    scores : float64 array, (n_removed,)
        The score after each removal.
    """

    shape: Place
    baseline: float
    removed: tuple[Place, ...]
    scores: Array

    def head_mask(self, n_removed: int | None = None) -> Array:
        """The gates after so many removals, all of them when not given.

        Parameters
        ----------
        n_removed : int, optional

        Returns
        -------
        float64 array of `shape`

        Raises
        ------
        ValueError
            More removals than there were, or fewer than none.
        """
        if n_removed is None:
            n_removed = len(self.removed)
        if not 0 <= n_removed <= len(self.removed):
            raise ValueError(f"n_removed is {n_removed}; expected 0 to {len(self.removed)}")
        gates = np.ones(self.shape)
        for place in self.removed[:n_removed]:
            gates[place] = 0.0
        return gates

    def __repr__(self) -> str:
        """One line per removal."""
        lines = ["left  score       removed", f"{math.prod(self.shape):4}  {self.baseline:<10.6g}"]
        for left, place, score in self._steps():
            lines.append(f"{left:4}  {score:<10.6g}  {head_name(place)}")
        return "\n".join(line.rstrip() for line in lines)

    def _steps(self) -> Iterator[tuple[int, Place, float]]:
        left = math.prod(self.shape)
        for place, score in zip(self.removed, self.scores, strict=True):
            left -= 1
            yield left, place, score


def prune_greedily(
    score: Score, shape: int | Place, *, n_remove: int | None = None, min_score: float = -math.inf
) -> PruningPath:
    """Remove the head without which the score is best, again and again.

    Parameters
    ----------
    score, shape
        As in `ablate_heads`.
    n_remove : int, optional
        How many heads to remove at most; all of them when not given.
    min_score : float
        Stop before the score falls below this.

    Returns
    -------
    PruningPath
        Of heads that are equally dispensable, the first goes first.

    Raises
    ------
    ValueError
        A score that is NaN; a number of heads that there are not.

    Notes
    -----
    `score` is called once for each head that is left at each step: n (n + 1) / 2 times to the end,
    where `prune_in_order` after `ablate_heads` takes 2 n calls, and misses what heads do for each
    other.
    """
    gates = np.ones(shape)
    n_remove = _number_to_remove(n_remove, gates.size)
    baseline = _checked(score, gates.copy())
    removed: list[Place] = []
    scores: list[float] = []
    while len(removed) < n_remove:
        without = {place: _score_without(score, gates, place) for place in _left(gates)}
        place = max(without, key=lambda place: without[place])
        if without[place] < min_score:
            break
        gates[place] = 0.0
        removed.append(place)
        scores.append(without[place])
    return PruningPath(gates.shape, baseline, tuple(removed), np.array(scores))


def prune_in_order(
    score: Score,
    importance: ArrayLike,
    *,
    n_remove: int | None = None,
    min_score: float = -math.inf,
) -> PruningPath:
    """Remove heads from the least important to the most.

    Parameters
    ----------
    score
        As in `ablate_heads`.
    importance : array, (n_head,) or (n_layer, n_head)
        From `head_importance`, from the loss of an `Ablation`, or anything else.
    n_remove, min_score
        As in `prune_greedily`.

    Returns
    -------
    PruningPath
        `score` was called once for each removal, and once with all heads.

    Raises
    ------
    ValueError
        A score or an importance that is NaN; a number of heads that there are not.

    References
    ----------
    Michel et al. 2019, Are Sixteen Heads Really Better than One?, section 4.
    """
    importance = _checks.reals("importance", importance).astype(np.float64)
    if np.isnan(importance).any():
        raise ValueError("importance has NaN; expected a number for each head")
    n_remove = _number_to_remove(n_remove, importance.size)
    gates = np.ones(importance.shape)
    baseline = _checked(score, gates.copy())
    removed: list[Place] = []
    scores: list[float] = []
    for place in sorted(_left(gates), key=lambda place: importance[place])[:n_remove]:
        without = _score_without(score, gates, place)
        if without < min_score:
            break
        gates[place] = 0.0
        removed.append(place)
        scores.append(without)
    return PruningPath(gates.shape, baseline, tuple(removed), np.array(scores))


def _left(gates: Array) -> list[Place]:
    """Places of the heads that still work."""
    return [place for place in np.ndindex(gates.shape) if gates[place]]


def _score_without(score: Score, gates: Array, place: Place) -> float:
    gates = gates.copy()  # the caller's function may keep or change what it is given
    gates[place] = 0.0
    return _checked(score, gates)


def _checked(score: Score, gates: Array) -> float:
    number = float(score(gates))
    if math.isnan(number):
        raise ValueError("score returned NaN; expected a number that can be compared")
    return number


def _number_to_remove(n_remove: int | None, n_head: int) -> int:
    if n_remove is None:
        return n_head
    if not 0 <= n_remove <= n_head:
        raise ValueError(f"n_remove is {n_remove}; expected 0 to {n_head}")
    return n_remove
