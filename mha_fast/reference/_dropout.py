"""Which weights dropout keeps: Philox, a generator that turns numbers into random numbers."""

import math
import operator

import numpy as np

from .._typing import Array

_MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
_KEY_STEPS = 0x9E3779B9, 0xBB67AE85
_N_ROUND = 10
_WORD = np.uint64(0xFFFFFFFF)


def dropout_mask(seed: int, shape: tuple[int, ...], p: float) -> Array:
    """Which attention weights dropout keeps.

    Whether a weight is kept follows from the seed and from the weight's own place alone, so it
    does not depend on what else is in the call, nor on the order of the work.

    Parameters
    ----------
    seed : int
        From 0 to ``2**64 - 1``.
    shape : (..., n_head, n_query, n_key)
        Two sizes are one head. Batch entries count in C order.
    p : float
        Share of the weights that is dropped, ``0 <= p < 1``.

    Returns
    -------
    bool array of that shape
        True where the weight is kept; it is then divided by ``1 - p``.

    Notes
    -----
    The weight of batch entry ``b``, head ``h``, query ``i`` and key ``j`` takes output word
    ``j % 4`` of Philox 4x32-10 (Salmon et al. 2011, section 3) with the key ``(seed % 2**32,
    seed // 2**32)`` and the counter ``(j // 4, i, b * n_head + h, 0)``, low words first. It is
    kept if the word is at least ``floor(p * 2**32)``.

    A weight that is dropped is an ordinary weight of 0, not an excluded key: NaN in its value
    still reaches the output.
    """
    return _kept(seed, shape, p, first_entry=0)


def dropout_factor(
    seed: int | None, shape: tuple[int, ...], p: float, first_entry: int = 0
) -> Array:
    """What dropout multiplies each weight by: 0 or ``1 / (1 - p)``.

    `first_entry` is the place of the first batch entry among all of the call.
    """
    if seed is None:
        raise ValueError("dropout_seed is None; expected an integer, since dropout_p is not 0")
    return np.where(_kept(seed, shape, p, first_entry), 1 / (1 - p), 0.0)


def _kept(seed: int, shape: tuple[int, ...], p: float, first_entry: int) -> Array:
    seed = operator.index(seed)
    if not 0 <= p < 1:
        raise ValueError(f"the share to drop is {p}; expected 0 <= p < 1")
    if not 0 <= seed < 2**64:
        raise ValueError(f"the seed is {seed}; expected 0 to 2**64 - 1")
    if len(shape) < 2:
        raise ValueError(f"shape is {shape}; expected (..., n_head, n_query, n_key)")
    *heads, n_query, n_key = shape
    first_head = first_entry * (heads[-1] if heads else 1)
    places = np.meshgrid(
        first_head + np.arange(math.prod(heads)),
        np.arange(n_query),
        np.arange(-(-n_key // 4)),
        indexing="ij",
    )
    head, query, four_keys = (x.astype(np.uint64) for x in places)
    words = philox((four_keys, query, head, np.zeros_like(head)), (seed % 2**32, seed // 2**32))
    n_padded = 4 * four_keys.shape[-1]
    return words.reshape(*heads, n_query, n_padded)[..., :n_key] >= int(p * 2**32)


def philox(counter: tuple[Array, ...], key: tuple[int, int]) -> Array:
    """Four random words of 32 bits for each counter: Philox 4x32-10.

    Parameters
    ----------
    counter : four uint64 arrays of one shape
        Words of 32 bits, low word first.
    key : two ints of 32 bits

    Returns
    -------
    uint64 array, (..., 4)
        Words of 32 bits.

    References
    ----------
    Salmon, Moraes, Dror and Shaw 2011, section 3.3: multiplications whose high and low halves
    are mixed with the other words and a round key. Its words are uint64 here, to hold products.
    """
    x0, x1, x2, x3 = (word & _WORD for word in counter)
    multipliers = tuple(np.uint64(m) for m in _MULTIPLIERS)
    for r in range(_N_ROUND):
        key0, key1 = (
            np.uint64((k + r * step) % 2**32) for k, step in zip(key, _KEY_STEPS, strict=True)
        )
        first, second = x0 * multipliers[0], x2 * multipliers[1]
        x0, x1 = (second >> np.uint64(32)) ^ x1 ^ key0, second & _WORD
        x2, x3 = (first >> np.uint64(32)) ^ x3 ^ key1, first & _WORD
    return np.stack([x0, x1, x2, x3], axis=-1)
