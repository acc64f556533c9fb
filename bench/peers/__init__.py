"""The libraries to compare with, one file each; a process loads at most one of them.

A second thread pool in the process spins while the first one works and spoils its times, so the
peers never meet.

A file ``bench/peers/<name>.py``, named as its library is imported, offers

``version() -> str``
    For the heading of the table.
``session(num_threads)``
    A context manager in which everything of this peer runs: sets its thread count and whatever
    makes it fastest (no gradients, for example).
``prepare(case, inputs, num_threads) -> Prepared``
    All that need not be timed: conversion, the layout that the library likes best, compilation.
    Raises `Unsupported` with the reason when the library has no such operation.
"""

import argparse
import importlib
import importlib.util
import math
import pkgutil
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from bench.cases import Case, Inputs

# Enough to tell ways apart that differ by a tenth, and a small part of the measurement.
_TRIAL_CALLS = 3
_TRIAL_SECONDS = 0.03


class Unsupported(Exception):
    """The peer has no way to compute this case."""


class MissingLibrary(Exception):
    """The library behind a peer is not installed."""


@dataclass(frozen=True)
class Prepared:
    """One way of a peer to compute a case."""

    call: Callable[[], Any]  # computes the case once; returns the library's own array
    to_numpy: Callable[[Any], np.ndarray]  # what that array holds, for the check against float64
    way: str = ""  # which of the library's ways this is, where it has several


def names() -> list[str]:
    """Return the name of every peer there is a file for."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__))


def installed() -> list[str]:
    """Return the names of the peers whose library is there, without loading any of them."""
    return [name for name in names() if importlib.util.find_spec(name) is not None]


def list_of(known: Collection[str]) -> Callable[[str], list[str]]:
    """Return the type of a command's option that lists some of `known`, with commas between."""

    def parse(text):
        chosen = text.split(",")
        for name in chosen:
            if name not in known:
                raise argparse.ArgumentTypeError(f"no {name!r}; there are {', '.join(known)}")
        return chosen

    return parse


def load(name: str):
    """Import one peer.

    Raises
    ------
    MissingLibrary
        The peer is known, its library cannot be imported.
    """
    try:
        return importlib.import_module(f"{__name__}.{name}")
    except ImportError as error:
        raise MissingLibrary(f"peer {name} cannot be loaded: {error}") from error


def fastest(ways: list[Prepared]) -> Prepared:
    """Return the way whose call is the shortest in a short trial."""
    return ways[0] if len(ways) == 1 else min(ways, key=_trial_seconds)


def _trial_seconds(way):
    way.call()  # the first call may compile or allocate
    shortest = math.inf
    n_call = 0
    end = time.perf_counter() + _TRIAL_SECONDS
    while n_call < _TRIAL_CALLS or time.perf_counter() < end:
        start = time.perf_counter()
        way.call()
        shortest = min(shortest, time.perf_counter() - start)
        n_call += 1
    return shortest


def can_share_rows(case: Case) -> bool:
    """Say whether the query heads of a group may be taken for rows of one head.

    They read the same keys and values, so that this is the same problem, and a mere reshape of
    query and output, unless a query's row decides what it may see.
    """
    return case.n_head != case.n_kv_head and not case.is_causal and case.mask != "float"


def as_rows_of_one_head(case: Case, inputs: Inputs) -> tuple[Case, Inputs]:
    """Return the same problem with the query heads of each group behind each other as rows."""
    n_query = case.n_query * (case.n_head // case.n_kv_head)
    query = inputs.query.reshape(case.n_batch, case.n_kv_head, n_query, case.head_width)
    return replace(case, n_head=case.n_kv_head, n_query=n_query), inputs._replace(query=query)


def from_rows_of_one_head(case: Case, out: np.ndarray) -> np.ndarray:
    """Undo `as_rows_of_one_head` in an output."""
    return out.reshape(case.n_batch, case.n_head, case.n_query, case.head_width)
