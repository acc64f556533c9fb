"""What ``mha-fast demo`` shows: an example small enough to follow by hand, then a real size."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from time import perf_counter
from timeit import repeat
from typing import Any

import numpy as np
import numpy.typing as npt

from .. import attention, get_num_threads, reference
from .._typing import Array

# Three words of a sentence on cricket. Features 0 and 1 of each vector tell who is meant, features
# 2 and 3 what is spoken of. "his" is the word that looks around.
TOKENS = ("Kohli", "his", "century")
QUERY_OF_HIS = [[1, 2, 0, 1]]
KEYS = [[2, 1, 0, 0], [0, 1, 0, 2], [0, 0, 2, 1]]
VALUES = [[1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0]]

N_HEAD, HEAD_WIDTH = 8, 64  # of the run of real size: the layer of Vaswani et al. 2017, 3.2.2
N_CHECKED = 64  # queries per head compared with float64: a fair sample, and soon computed

# Three calls in a row, because the threads of NumPy's BLAS go on spinning for a while after a call
# and spoil the first one that follows. No new round starts once the budget is spent.
N_ROUND, CALLS_PER_ROUND, BUDGET_SECONDS = 3, 3, 5


def run(size: int) -> None:
    """Print the worked example, and a run with `size` queries and keys.

    Parameters
    ----------
    size : int
        Length of the sequence of the second part.
    """
    print_worked_example()
    print()
    print_real_size(size)


# ---------------------------------------------------------------- the example to follow by hand


def attend_with_heads(n_head: int, dtype: npt.DTypeLike) -> tuple[Array, Array]:
    """Let "his" attend to the three words, with the four features dealt out to `n_head` heads.

    Parameters
    ----------
    n_head : int
        1, 2 or 4.
    dtype : dtype
        float32 or float64.

    Returns
    -------
    weights : array, (n_head, 3)
        How much each head takes from each word.
    output : array, (n_head, 4 // n_head)
        What it takes; the rows one after the other are the output of the whole.
    """
    query, key, value = (
        np.array(features, dtype).reshape(-1, n_head, 4 // n_head).swapaxes(0, 1)
        for features in (QUERY_OF_HIS, KEYS, VALUES)
    )
    # The identity as values: each weight then comes out in a place of its own.
    one_place_per_word = np.broadcast_to(np.eye(len(TOKENS), dtype=dtype), (n_head, 3, 3))
    weights = attention(query, key, one_place_per_word)
    return weights[:, 0], attention(query, key, value)[:, 0]


def print_worked_example() -> None:
    """Print weights and outputs of one head and of two, in both dtypes."""
    print('Worked example: which words does "his" draw on?')
    for dtype in (np.float32, np.float64):
        print()
        print(f"{np.dtype(dtype).name:<23}" + "".join(f"{t:>9}" for t in TOKENS) + "   output")
        weights, output = attend_with_heads(1, dtype)
        print_head("one head of width 4", weights[0], output[0])
        weights, output = attend_with_heads(2, dtype)
        print_head("two heads of width 2: A", weights[0], output[0])
        print_head("                      B", weights[1], output[1])
        print_head("         A and B joined", (), output.reshape(-1))
    print()
    print(
        "The one head cannot decide between the name and the pronoun itself. Of the two heads,\n"
        "A settles on the name, and B is free to notice the century."
    )


def print_head(label: str, weights: Iterable[float], output: Iterable[float]) -> None:
    """Print one line of the worked example."""
    shown = "".join(f"{weight:9.3f}" for weight in weights)
    print(f"{label:<23}{shown:<27}   [{', '.join(f'{number:.3f}' for number in output)}]")


# ---------------------------------------------------------------- the run of real size


def print_real_size(size: int) -> None:
    """Print time and error of NumPy and of mha_fast on random float32 data."""
    shape = (1, N_HEAD, size, HEAD_WIDTH)
    query, key, value = np.random.default_rng(0).standard_normal((3, *shape), dtype=np.float32)
    print(f"Real size: {N_HEAD} heads, {size} queries and keys, head width {HEAD_WIDTH}, float32")
    print()
    print("                   time of                largest error of")
    print("                NumPy     mha_fast       NumPy    mha_fast   speed-up")
    for label, is_causal in (("every key", False), ("causal", True)):
        seconds, errors = measure(query, key, value, is_causal)
        print(
            f"{label:<9}{seconds[0] * 1e3:9.2f} ms {seconds[1] * 1e3:9.2f} ms"
            f"{errors[0]:12.1e}{errors[1]:12.1e}{seconds[0] / seconds[1]:9.1f} x"
        )
    n_call, n_checked = N_ROUND * CALLS_PER_ROUND, min(N_CHECKED, size)
    print()
    print(
        f"Time: the shortest of up to {n_call} calls, in turns; mha_fast on {get_num_threads()}"
        " threads, NumPy as its BLAS is set.\n"
        f"Error: against float64, on {n_checked} queries of each head."
    )


def measure(
    query: Array, key: Array, value: Array, is_causal: bool
) -> tuple[list[float], list[float]]:
    """Seconds and largest errors, of NumPy and of mha_fast, on the same arrays."""
    contenders = [
        partial(function, query, key, value, is_causal=is_causal)
        for function in (reference.naive_attention, attention)
    ]
    checked, expected = exact_rows(query, key, value, is_causal)
    errors = [np.abs(call()[..., checked, :] - expected).max() for call in contenders]
    return shortest_times(contenders), errors


def exact_rows(query: Array, key: Array, value: Array, is_causal: bool) -> tuple[Array, Array]:
    """Some queries, spread evenly, and what they give in float64."""
    n_query, n_key = query.shape[-2], key.shape[-2]
    checked = np.linspace(0, n_query - 1, min(N_CHECKED, n_query)).astype(int)
    # As a mask, since these rows do not follow one another; nor does it rely on the option shown.
    visible = np.arange(n_key) <= checked[:, None] if is_causal else None
    return checked, reference.attention(query[..., checked, :], key, value, visible)


def shortest_times(contenders: Sequence[Callable[[], Any]]) -> list[float]:
    """Least seconds of one call of each, in turns so that all meet the same busy machine."""
    seconds = [float("inf")] * len(contenders)
    end = perf_counter() + BUDGET_SECONDS
    for number_of_round in range(N_ROUND):
        if number_of_round and perf_counter() > end:
            break
        for number, contender in enumerate(contenders):
            best_of_turn = min(repeat(contender, number=1, repeat=CALLS_PER_ROUND))
            seconds[number] = min(seconds[number], best_of_turn)
    return seconds
