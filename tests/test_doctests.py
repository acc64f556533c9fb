"""The examples in the docstrings."""

import doctest
import importlib
import pkgutil

import pytest

import mha_fast

# Importing these needs an extra.
NEEDS = {"onnx": "onnx"}
MODULES = sorted(m.name for m in pkgutil.iter_modules(mha_fast.__path__) if m.name != "__main__")


def test_the_modules_with_examples_are_found():
    assert {"_attention", "_core", "cache", "layer", "cost"} <= set(MODULES)


@pytest.mark.parametrize("name", MODULES)
def test_examples_of_a_module(name):
    if NEEDS.get(name):
        pytest.importorskip(NEEDS[name])
    module = importlib.import_module(f"mha_fast.{name}")
    result = doctest.testmod(module)
    assert result.failed == 0
