"""The way from the tests to bench/, which is not installed, and what they share."""

import importlib.util
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # for the next line, which takes it off again
from bench import cases


def run_python(*arguments, cwd=ROOT, **environment):
    """Run Python in `cwd` with these arguments; return the finished process."""
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=cwd, env=os.environ | environment, capture_output=True, text=True, check=False,
    )  # fmt: skip


HAS_ML_DTYPES = importlib.util.find_spec("ml_dtypes") is not None
DTYPES = [
    pytest.param(
        name,
        marks=pytest.mark.skipif(
            name == "bfloat16" and not HAS_ML_DTYPES, reason="ml_dtypes is not installed"
        ),
    )
    for name in cases.DTYPES
]


def small(case):
    """The same problem with few queries and keys."""
    n_query, n_key = min(case.n_query, 21), min(case.n_key, 24)
    return replace(case, n_batch=min(case.n_batch, 2), n_query=n_query, n_key=n_key)


SMALL = [
    *map(small, cases.CASES.values()),
    cases.Case("causal_square", 2, 4, 4, 24, 24, 8, is_causal=True),
    cases.Case("causal_bool", 2, 4, 2, 30, 24, 8, is_causal=True, mask="key_padding"),
    cases.Case("causal_float", 2, 4, 2, 20, 24, 8, is_causal=True, mask="float"),
]
