"""The way from the tests to bench/, which is not installed, and what they share."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # for the next line, which takes it off again
from bench import cases


def run_python(*arguments, cwd=ROOT, **environment):
    """Run Python in `cwd` with these arguments; return the finished process."""
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=cwd, env=os.environ | environment, capture_output=True, text=True, check=False,
    )  # fmt: skip


def small(case):
    """The same problem with few queries and keys."""
    n_query, n_key = min(case.n_query, 21), min(case.n_key, 24)
    return replace(case, n_batch=min(case.n_batch, 2), n_query=n_query, n_key=n_key)


SMALL = [
    *map(small, cases.CASES.values()),
    cases.Case("causal_bool", 2, 4, 2, 30, 24, 8, is_causal=True, mask="key_padding"),
    cases.Case("causal_float", 2, 4, 2, 20, 24, 8, is_causal=True, mask="float"),
]
