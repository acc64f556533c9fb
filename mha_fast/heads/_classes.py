"""Which heads do one of the few simple things that many trained heads turn out to do."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .._statistics_record import HeadStatistics
from .._typing import Array
from ._tables import grid

__all__ = ["HeadClasses", "classify_heads"]

# From the least telling to the most: a head of several classes is shown as the last of them.
_LETTERS = (("broad", "b"), ("positional", "o"), ("next", "n"), ("previous", "p"), ("no_op", "0"))
_MEANINGS = "p previous token, n next token, o other offset, b broad, 0 no-op, . none of these"


@dataclass(frozen=True, eq=False, repr=False)
class HeadClasses:
    """Which class each head is in; a head may be in several, or in none.

    Prints as a table with one letter per head.

    Attributes
    ----------
    positional : bool array, (n_head,) or (n_layer, n_head)
        The largest weight is nearly always at the same offset from the query.
    offset : int64 array like `positional`
        The offset where it is most often, of those that were measured; of several, the first.
    previous, next : bool array like `positional`, or None
        Most of the weight is on the token before, or after. None when its offset was not measured.
    broad : bool array like `positional`
        The weight is spread over many keys.
    no_op : bool array like `positional`, or None
        Most of the weight goes to keys that carry nothing. None without such a set of keys.
    """

    positional: Array
    offset: Array
    previous: Array | None
    next: Array | None
    broad: Array
    no_op: Array | None

    def __repr__(self) -> str:
        """One letter per head, and what the letters mean."""
        letters = np.full(self.positional.shape, ".")
        for name, letter in _LETTERS:
            members = getattr(self, name)
            if members is not None:
                letters[members] = letter
        return f"{grid(letters, str)}\n{_MEANINGS}"


def classify_heads(
    statistics: HeadStatistics | Sequence[HeadStatistics],
    *,
    no_op_set: int = 0,
    positional_share: float = 0.9,
    neighbour_mass: float = 0.5,
    no_op_mass: float = 0.5,
    broad_entropy: float = math.log(10),
) -> HeadClasses:
    """Sort heads into classes by what `head_statistics` measured of them.

    Parameters
    ----------
    statistics : HeadStatistics, or a sequence with one for each layer
        Sequences of a batch are averaged, each counting the same; those that are NaN for a head
        are left out. Layers need the same number of heads and the same offsets.
    no_op_set : int
        Which set of `key_mass` holds the keys that carry nothing of their own: separators, or the
        first token, on which many decoders park their weight [3]_.
    positional_share : float
        A head is positional from this share of queries on, whose largest weight is at one and the
        same offset [1]_.
    neighbour_mass : float
        A head looks at the previous (next) token when more than this share of its weight does
        [2]_, section 3.1.
    no_op_mass : float
        A head is a no-op when more than this share of its weight is on `no_op_set` [2]_, section
        3.2. There, weight on separators was found to change next to nothing in the output.
    broad_entropy : float
        A head is broad from this mean entropy on, in nats. The heads called broad in [2]_, section
        3.3, give a tenth of their weight at most to any key; no such head has less entropy than
        ln 10. Of no use where queries see few keys: over n of them, entropy is at most ln n.

    Returns
    -------
    HeadClasses

    Raises
    ------
    ValueError
        No layers; layers that do not fit each other; a set that was not measured.

    References
    ----------
    .. [1] Voita et al. 2019, Analyzing Multi-Head Self-Attention, section 5.1.
    .. [2] Clark et al. 2019, What Does BERT Look At?
    .. [3] Xiao et al. 2024, Efficient Streaming Language Models with Attention Sinks, section 3.1.
    """
    one_layer = isinstance(statistics, HeadStatistics)
    layers = [statistics] if isinstance(statistics, HeadStatistics) else list(statistics)
    _check(layers, no_op_set)
    offsets = layers[0].offsets

    def measured(name: str, n_axis: int) -> Array:
        """The field, one row per layer, the batch averaged away."""
        rows = [_mean_of_batch(getattr(layer, name), n_axis) for layer in layers]
        return rows[0] if one_layer else np.stack(rows)

    mass, share = measured("offset_mass", 2), measured("offset_argmax", 2)
    no_op = None
    if layers[0].key_mass is not None:
        no_op = measured("key_mass", 2)[..., no_op_set] > no_op_mass

    def looks_at(offset: int) -> Array | None:
        return mass[..., offsets.index(offset)] > neighbour_mass if offset in offsets else None

    places = np.array(offsets, np.int64)
    return HeadClasses(
        positional=np.any(share >= positional_share, axis=-1),
        offset=places[share.argmax(axis=-1)] if offsets else np.zeros(share.shape[:-1], np.int64),
        previous=looks_at(-1),
        next=looks_at(1),
        broad=measured("entropy", 1) >= broad_entropy,
        no_op=no_op,
    )


def _check(layers: list[HeadStatistics], no_op_set: int) -> None:
    """Raise where the layers do not make one table."""
    if not layers:
        raise ValueError("statistics is empty; expected one HeadStatistics per layer")
    kinds = {
        (layer.top_key.shape[-2:-1], layer.offsets, layer.key_mass is None) for layer in layers
    }
    if len(kinds) > 1:
        raise ValueError(
            "statistics has layers that differ in their number of heads, in their offsets, or in"
            " whether sets of keys were measured; expected the same of all"
        )
    for layer in layers:
        n_set = no_op_set + 1 if layer.key_mass is None else layer.key_mass.shape[-1]
        if not 0 <= no_op_set < n_set:
            raise ValueError(f"no_op_set is {no_op_set}; expected one of the {n_set} sets measured")


def _mean_of_batch(field: Array, n_axis: int) -> Array:
    """Mean over all but the last `n_axis` axes, without the NaN of sequences without a query."""
    field = field if np.ndim(field) >= n_axis else np.asarray(field)[None]  # a head without an axis
    batch = tuple(range(field.ndim - n_axis))
    known = ~np.isnan(field)
    with np.errstate(invalid="ignore"):  # NaN where no sequence has a number
        return np.where(known, field, 0.0).sum(axis=batch) / known.sum(axis=batch)
