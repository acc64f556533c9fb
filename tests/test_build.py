"""The build says what it needs of a compiler, before it compiles anything."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def configured(folder, *, extra_flags="", refused=""):
    """Configure with a compiler that is GCC but for what it claims or refuses; return the output."""
    gcc = {name: shutil.which(name) for name in ("gcc", "g++", "cmake", "ninja")}
    if None in gcc.values() or not (ROOT / "CMakeLists.txt").exists():
        pytest.skip("needs the sources, GCC, CMake and Ninja")
    for name in ("gcc", "g++"):
        wrapper = folder / name
        refusal = f'for a in "$@"; do [ "$a" != "{refused}" ] || exit 1; done\n' if refused else ""
        wrapper.write_text(f'#!/bin/sh\n{refusal}exec {gcc[name]} {extra_flags} "$@"\n')
        wrapper.chmod(0o755)
    command = [
        gcc["cmake"], "-G", "Ninja", "-S", ROOT, "-B", folder / "build",
        f"-DPython_EXECUTABLE={sys.executable}", f"-DCMAKE_C_COMPILER={folder}/gcc",
        f"-DCMAKE_CXX_COMPILER={folder}/g++", "-DSKBUILD_SABI_COMPONENT=Development.SABIModule",
    ]  # fmt: skip
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    return process.returncode, " ".join((process.stdout + process.stderr).split())


def test_old_compiler_is_refused_by_name(tmp_path):
    status, printed = configured(tmp_path, extra_flags="-U__GNUC__ -D__GNUC__=11")
    assert status != 0
    assert "needs GNU 12 or newer; the C compiler here is version 11." in printed


def test_instruction_sets_of_the_build_are_named(tmp_path):
    status, printed = configured(tmp_path)
    assert status == 0, printed
    assert "Instruction sets: " in printed


@pytest.mark.parametrize(
    ("flag", "words"),
    [
        ("-mavx512f", "refuses the flags of AVX2 or AVX-512"),
        ("-mamx-tile", "lacks the matrix unit"),
    ],
)
def test_compiler_that_lacks_an_instruction_set_does_not_lose_it_silently(flag, words, tmp_path):
    if not shutil.which("gcc") or "x86_64" not in subprocess.run(
        ["gcc", "-dumpmachine"], capture_output=True, text=True, check=True
    ).stdout:  # fmt: skip
        pytest.skip("these instruction sets are those of x86-64")
    status, printed = configured(tmp_path, refused=flag)
    assert words in printed
    assert (status != 0) == (flag == "-mavx512f")


def test_what_is_compiled_once_stays_where_the_next_installation_finds_it():
    if not (ROOT / "CMakeLists.txt").exists():
        pytest.skip("needs the sources")
    text = (ROOT / "CMakeLists.txt").read_text(encoding="utf-8")

    # scikit-build-core clears the top of the build for each new environment to build in.
    assert "add_subdirectory(src)" in text
    assert not re.search(r"^\s*(python_)?add_(library|executable)\(", text, re.MULTILINE)
