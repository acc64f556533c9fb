"""Every function of every table of kernels alone, against the plain formula: tests/native.

The checks are compiled once and loaded beside the installed core, so that they see the very tables
that the package uses. As a program, without Python: cmake -DMHA_FAST_BUILD_CHECKS=ON, see
CONTRIBUTING.md.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from mha_fast import _core

NATIVE = Path(__file__).resolve().parent / "native"
FLAGS = ("-std=gnu++20", "-O1", "-fPIC", "-shared", "-fvisibility=hidden", "-Wall", "-Wextra")
LINK = ("-undefined", "dynamic_lookup") if sys.platform == "darwin" else ()

# Loads the core again with its names visible to others, then the checks, which ask for them.
RUN = """
import ctypes, sys
from mha_fast import _core
ctypes.CDLL(_core.__file__, ctypes.RTLD_GLOBAL)
checks = ctypes.CDLL(sys.argv[1])
arguments = [b"check_kernels", *(text.encode() for text in sys.argv[2:])]
sys.exit(checks.run_checks(len(arguments), (ctypes.c_char_p * len(arguments))(*arguments)))
"""


@pytest.fixture(scope="module")
def checks(tmp_path_factory):
    """Path of the compiled checks."""
    if sys.platform == "win32":
        pytest.skip("the checks need memory pages as Unix has them")
    names = (os.environ.get("CXX", ""), "c++", "g++", "clang++")
    compiler = next((path for name in names if name and (path := shutil.which(name))), None)
    if compiler is None:
        pytest.skip("no C++ compiler is installed")
    if not (NATIVE.parent.parent / "src" / "contract").is_dir():
        pytest.skip("the sources of the kernels are not here")
    folder = tmp_path_factory.mktemp("checks")
    sources = sorted(path for path in NATIVE.glob("*.cpp") if path.name != "main.cpp")
    objects = [folder / f"{path.stem}.o" for path in sources]
    compiling = [
        subprocess.Popen([compiler, *FLAGS[:-1], "-c", str(path), "-o", str(target)])
        for path, target in zip(sources, objects, strict=True)
    ]
    assert [process.wait() for process in compiling] == [0] * len(sources)
    library = folder / "checks.so"
    subprocess.run([compiler, *FLAGS, *LINK, *map(str, objects), "-o", str(library)], check=True)
    return library


def _run(checks, *arguments):
    # In another process: a stray access may end it.
    command = [sys.executable, "-c", RUN, str(checks), *arguments]
    process = subprocess.run(
        command, check=False, capture_output=True, text=True, cwd=checks.parent
    )
    return process.returncode, process.stdout + process.stderr


@pytest.mark.parametrize("name", _core.available_isas())
def test_every_function_agrees_with_the_formula(checks, name):
    status, text = _run(checks, "--isa", name)
    assert status == 0, text
    calls = int(text.split(f"{name}: ")[1].split(" calls")[0])
    assert calls > 10_000, text


@pytest.mark.parametrize("name", _core.available_isas())
def test_every_planted_fault_is_found(checks, name):
    """Each function spoils what it computes, one after the other; so do stray reads and writes."""
    status, text = _run(checks, "--isa", name, "--plant")
    assert (status, text.strip()) == (0, "every planted fault was found")


def test_times_are_told(checks):
    status, text = _run(checks, "--isa", _core.available_isas()[0], "--bench", "--only", "softmax")
    assert status == 0, text
    lines = [line.split() for line in text.splitlines()]
    assert {line[2] for line in lines} == {"tile.softmax", "decode.softmax"}
    assert all(float(line[-2]) > 0 and line[-1] == "ns" for line in lines)


def test_an_unknown_instruction_set_is_not_passed_over(checks):
    status, text = _run(checks, "--isa", "abacus")
    assert status == 1
    assert "no such instruction set" in text
