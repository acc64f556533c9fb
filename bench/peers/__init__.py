"""The libraries to compare with, one file each; a process loads at most one of them.

A second thread pool in the process spins while the first one works and spoils its times, so the
peers never meet.

A file ``bench/peers/<name>.py`` imports its library and offers

``version() -> str``
    For the heading of the table.
``session(num_threads)``
    A context manager in which everything of this peer runs: sets its thread count and whatever
    makes it fastest (no gradients, for example).
``prepare(case, inputs) -> call``
    All that need not be timed: conversion without a copy, compilation. ``call()`` computes
    ``case`` once and returns the library's own array. Raises `Unsupported` with the reason when
    the library has no such operation.
``to_numpy(result) -> numpy.ndarray``
    The result of ``call()`` for the check against float64.
"""

import importlib
import pkgutil


class Unsupported(Exception):
    """The peer has no way to compute this case."""


class MissingLibrary(Exception):
    """The library behind a peer is not installed."""


def names() -> list[str]:
    """Return the name of every peer there is a file for."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__))


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
