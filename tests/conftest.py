"""What every test file shares through pytest: the import path, instruction sets, hypothesis."""

import os
import sys
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
# once per test.
@pytest.fixture(params=ISAS)
def isa(request):
    """Name of an instruction set; the kernel uses it until the test ends."""
    with using_isa(request.param):
        yield request.param
