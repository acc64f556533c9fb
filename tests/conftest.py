"""What every test file shares through pytest: the import path, instruction sets, hypothesis."""

import os
import sys
import zlib
from collections import Counter, defaultdict
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

TESTS = Path(__file__).resolve().parent

# `python -m pytest` puts the current folder first. In a checkout that folder holds the bare
# sources of mha_fast, without a compiled core, and they would hide the installed package.
sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != TESTS.parent]
# The tests import what they share from _support.py, whatever pytest's import mode.
sys.path.insert(0, str(TESTS))

from _support import ISAS, using_isa

# Derandomized by default, so that the suite says the same on every machine and every day;
# HYPOTHESIS_PROFILE=explore goes looking for new inputs.
_SHARED = {"deadline": None, "suppress_health_check": [HealthCheck.function_scoped_fixture]}
settings.register_profile("repeatable", max_examples=60, derandomize=True, **_SHARED)
settings.register_profile("explore", max_examples=2000, **_SHARED)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))


# The instruction sets that cannot run here are reported once, by test_isa_choice.py, instead of
# once per test. Not "amx" itself: calls of these sizes would run the code of AVX-512 again.
@pytest.fixture(params=[name for name in ISAS if name != "amx"])
def isa(request):
    """Name of an instruction set; the kernel uses it until the test ends."""
    with using_isa(request.param):
        yield request.param


# ---- which cases run ----------------------------------------------------------------------------

# What one instruction set computes is checked function by function in test_kernels.py. Whole calls
# are there for the loop, which is the same code on all of them. So of a test with many cases each
# case runs on one instruction set, and the cases are spread over them; --every-isa runs all.
MANY = 12
# Files whose promise is about bits or memory: there each case runs on every instruction set.
ON_EVERY_ISA = ("test_attention_bounds", "test_attention_nonfinite", "test_attention_threads")
# What -m smoke takes of each file: the first case of so many tests.
SMOKE = 5


def pytest_addoption(parser):
    parser.addoption(
        "--every-isa", action="store_true", help="run every case on every instruction set"
    )


def pytest_collection_modifyitems(config, items):
    """Spread large tests over the instruction sets, and mark the smoke run."""
    if not config.getoption("--every-isa"):
        dropped = _cases_for_other_isas(items)
        config.hook.pytest_deselected(items=[item for item in items if item in dropped])
        items[:] = [item for item in items if item not in dropped]
    tests = defaultdict(dict)
    for item in items:
        tests[item.path].setdefault(getattr(item, "originalname", item.name), item)
    for first in tests.values():
        step = max(len(first) // SMOKE, 1)
        for item in list(first.values())[::step][:SMOKE]:
            item.add_marker("smoke")


def _cases_for_other_isas(items):
    """The cases to leave out: each number of a test's cases has one instruction set to run on."""
    cases, places = Counter(), {}
    for item in items:
        isa = item.callspec.params.get("isa") if hasattr(item, "callspec") else None
        if isa is None or item.path.stem in ON_EVERY_ISA:
            continue
        test = (item.path, item.originalname)
        places[item] = (test, isa, cases[test, isa])
        cases[test, isa] += 1
    dropped = set()
    for item, (test, isa, number) in places.items():
        isas = [name for name in ISAS if cases[test, name]]
        turn = zlib.crc32(f"{test[1]} {number}".encode()) % len(isas)
        if cases[test, isa] >= MANY and isas[turn] != isa:
            dropped.add(item)
    return dropped
