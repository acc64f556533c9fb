"""The package as a whole: names that stand for what lives in a room of its own."""

import importlib

import pytest

import mha_fast

# Documented names of modules, and where the module is.
ALIASES = {
    "minilm": "show.minilm",
    "onnx": "integrations.onnx",
    "pictures": "show.pictures",
}


@pytest.mark.parametrize("name", ALIASES)
def test_the_short_name_of_a_module_has_all_that_is_public_in_it(name):
    if name == "onnx":
        pytest.importorskip("onnx", reason="mha_fast.onnx needs onnx")
    short = importlib.import_module(f"mha_fast.{name}")
    module = importlib.import_module(f"mha_fast.{ALIASES[name]}")

    assert short.__all__ == module.__all__
    assert all(getattr(short, public) is getattr(module, public) for public in module.__all__)


@pytest.mark.parametrize("room", ["cache", "heads", "layer"])
def test_a_room_shows_its_public_names(room):
    module = importlib.import_module(f"mha_fast.{room}")

    assert module.__all__
    assert all(
        getattr(module, name).__module__.startswith(f"mha_fast.{room}.") for name in module.__all__
    )
    assert getattr(mha_fast, room) is module
