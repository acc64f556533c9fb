"""The package as a whole: its names, what an import of it costs, and a checkout without a core."""

import importlib
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import numpy as np
import pytest

import mha_fast
from mha_fast import _source_tree

ROOT = Path(__file__).parents[1]

# Documented names of modules, and where the module is.
ALIASES = {
    "minilm": "show.minilm",
    "onnx": "integrations.onnx",
    "pictures": "show.pictures",
}


@pytest.fixture
def run_elsewhere(tmp_path):
    """What a script prints, run where the source tree cannot be in the way."""

    def run(script):
        command = [sys.executable, "-c", script]
        return subprocess.run(
            command, cwd=tmp_path, capture_output=True, text=True, check=True
        ).stdout

    return run


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


# ---- what an import costs -----------------------------------------------------------------------

# On the path of a call, or what it takes to get there.
AT_ONCE = {"_arguments", "_attention", "_checks", "_core", "_cpus", "_options", "_typing", "config"}
# All else that an import may bring in beside NumPy.
SMALL = {"copy", "dataclasses", "numpy.typing", "numpy._typing._add_docstring"}
LISTED = """
import sys
import numpy
before = set(sys.modules)
import mha_fast
print(*sorted(set(sys.modules) - before))
"""


def test_an_import_brings_in_what_a_call_needs_and_no_more(run_elsewhere):
    found = set(run_elsewhere(LISTED).split())

    ours = {name for name in found if name.split(".")[0] == "mha_fast"}
    assert ours == {"mha_fast"} | {f"mha_fast.{name}" for name in AT_ONCE}
    # Cython and Jython (for which the copy module looks) have no file of their own.
    others = {name for name in found - ours if not name.startswith(("_", "cython_runtime", "org"))}
    assert others - SMALL - {"importlib._abc", "importlib.util"} == set()


def test_names_that_come_later_are_there_from_the_start():
    assert set(mha_fast.__all__) <= set(dir(mha_fast))
    assert "__version__" in dir(mha_fast)
    for name in mha_fast.__all__:
        assert getattr(mha_fast, name) is not None
    with pytest.raises(AttributeError, match="module 'mha_fast' has no attribute 'atention'"):
        mha_fast.atention  # noqa: B018


def test_the_version_is_that_of_the_project_file():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]

    assert mha_fast.__version__ == project["version"]


# ---- in a checkout, whose folder has no compiled core -------------------------------------------


@pytest.fixture
def tree(tmp_path):
    """A checkout, and a folder in which its package is installed."""
    package = Path(mha_fast.__file__).parent
    for place in ("tree", "site"):
        shutil.copytree(
            package, tmp_path / place / "mha_fast", ignore=shutil.ignore_patterns("*.so")
        )
    (tmp_path / "tree" / "CMakeLists.txt").touch()
    shutil.copy(mha_fast._core.__file__, tmp_path / "site" / "mha_fast")
    return tmp_path


def import_in_the_tree(tmp_path):
    """Python in the checkout, with the installed package where Python looks last."""
    places = [tmp_path / "site", Path(np.__file__).parents[1]]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, places))}
    command = "import mha_fast, numpy as np; print(mha_fast.attention(*np.ones((3, 1, 1, 1))))"
    return subprocess.run(
        [sys.executable, "-S", "-c", command],
        cwd=tmp_path / "tree", env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip


def test_a_checkout_runs_on_the_installed_core(tree):
    done = import_in_the_tree(tree)

    assert (done.returncode, done.stdout, done.stderr) == (0, "[[[1.]]]\n", "")


def test_a_checkout_that_differs_from_what_is_installed_says_so(tree):
    with (tree / "tree" / "mha_fast" / "layer" / "_sizes.py").open("a") as file:
        file.write("\n# changed\n")

    done = import_in_the_tree(tree)

    assert done.returncode == 1
    message = done.stderr.splitlines()[-1]
    assert "_sizes.py is not the file that is installed in" in message
    assert "pip install ." in message and "pip install -e ." in message


def test_a_checkout_with_nothing_installed_says_how_to(tree, monkeypatch):
    monkeypatch.setattr(sys, "path", [str(tree / "tree"), str(tree)])

    with pytest.raises(ImportError, match=r"compiled core is not in it.*pip install \."):
        _source_tree.with_core([str(tree / "tree" / "mha_fast")], ImportError("no core"))


def test_a_broken_installation_is_not_taken_for_a_checkout(tree):
    broken = ImportError("the core is broken")

    with pytest.raises(ImportError, match="the core is broken"):
        _source_tree.with_core([str(tree / "site" / "mha_fast")], broken)
