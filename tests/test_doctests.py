"""The examples in the docstrings."""

import doctest
import importlib
import pkgutil

import pytest

import mha_fast
import mha_fast.integrations

# Importing these needs the package of that name.
BRIDGES = {module.name for module in pkgutil.iter_modules(mha_fast.integrations.__path__)}
# What their examples use besides.
NEEDS = {"integrations.torch._heads": {"transformers"}}
MODULES = sorted(
    module.name.removeprefix("mha_fast.")
    for module in pkgutil.walk_packages(mha_fast.__path__, "mha_fast.")
    if not module.name.endswith(".__main__")
)


def test_the_modules_with_examples_are_found():
    expected = {"_attention", "_core", "cache._contiguous", "layer._multi_head", "cost"}
    assert expected | {"heads._gates", "integrations.onnx", "show.minilm"} <= set(MODULES)


@pytest.mark.parametrize("name", MODULES)
def test_examples_of_a_module(name):
    for package in BRIDGES & set(name.split(".")) | NEEDS.get(name, set()):
        pytest.importorskip(package)
    module = importlib.import_module(f"mha_fast.{name}")
    result = doctest.testmod(module)
    assert result.failed == 0
