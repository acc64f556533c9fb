"""The Python examples of the README run as they stand, one after the other."""

import re
from pathlib import Path

import numpy as np
import pytest

import mha_fast

README = Path(__file__).resolve().parent.parent / "README.md"
BLOCKS = re.findall(
    r"^```python\n(.*?)^```", README.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
)


def test_examples_run():
    assert len(BLOCKS) > 8
    names = {}
    for block in BLOCKS:
        if "mha_fast.onnx" in block:
            pytest.importorskip("onnx", reason="the ONNX example needs onnx")
        exec(compile(block, str(README), "exec"), names)  # noqa: S102
    whole, lse = mha_fast.attention(
        names["query"], names["key"], names["value"], return_lse=True
    )  # what the parts were joined to
    np.testing.assert_allclose(names["out"], whole, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(names["lse"], lse, rtol=1e-6)


def test_quick_start_has_two_blocks():
    section = README.read_text(encoding="utf-8").split("## Quick start")[1].split("\n## ")[0]
    blocks = re.findall(r"^```\n(.*?)^```", section, re.MULTILINE | re.DOTALL)
    assert [block.splitlines()[0].split()[:2] for block in blocks] == [["pip", "install"]] * 2
    assert "mha-fast demo" in blocks[0] and "pytest" in blocks[1]
