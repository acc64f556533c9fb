"""Benchmarks: regression runs, the table against a peer, and the memory of one call.

    cases                   the named problems, their inputs, arithmetic and traffic
    accuracy                sampled float64 rows that a result must match before it is timed
    machine                 what the numbers were measured on, and what that machine could do
    test_bench_attention    pytest-benchmark runs beside the NumPy baseline
    guard                   compares two such runs by their ratios to that baseline
    compare, measure        the table against one peer; the process that does its timing
    peers                   one file per library to compare with
    memory                  peak memory of one call
    report, page, store     many such tables, the page made of them, and what is kept for it
    scaling, scaling_view   time and memory against length, and how they are shown
    rst                     headings and tables of that page
    cache                   what a token costs as a KVCache grows
    pruned_heads            time that heads save which are switched off
    head_statistics         time and memory of head_statistics() beside attention()
    fit_polynomials         not a benchmark: derives the constants of the kernel's exponential

``bench/README.md`` says how to run them and how to believe them.
"""

import sys
from importlib.machinery import EXTENSION_SUFFIXES, PathFinder
from pathlib import Path

_ROOT = Path(__file__).resolve().parent.parent


def _is_root(entry):
    return isinstance(entry, str) and Path(entry).resolve() == _ROOT


def _uncover_installed_package():
    # `python -m` and pytest put the repository root on sys.path, where the source folder
    # mha_fast/ has the name of the installed package but no compiled core. Without the root the
    # import finds the installed one. The root stays when there is none, so that the source
    # folder can say what is missing; an editable install answers before sys.path is asked.
    if any((_ROOT / "mha_fast" / f"_core{suffix}").exists() for suffix in EXTENSION_SUFFIXES):
        return
    elsewhere = [entry for entry in sys.path if not _is_root(entry)]
    if PathFinder.find_spec("mha_fast", elsewhere) is not None:
        sys.path[:] = elsewhere


_uncover_installed_package()
