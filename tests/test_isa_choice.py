"""Which instruction set is chosen, how to force one, and that nothing runs before the choice."""

import platform
import re
import shutil
import subprocess
import sys

import numpy as np
import pytest
from _support import ISAS, normal_inputs, run_python, using_isa

import mha_fast
from mha_fast import _core

KNOWN_ISAS = ("baseline", "neon", "avx2", "avx512", "amx")  # slowest first
NAME = "MHA_FAST_ISA"
CHOSEN = "import mha_fast._core as core; print(core.isa())"


def test_names_are_known_and_available_ones_are_built():
    assert set(_core.built_isas()) <= set(KNOWN_ISAS)
    assert set(_core.available_isas()) <= set(_core.built_isas())
    assert _core.isa() in _core.available_isas()


@pytest.mark.parametrize("name", KNOWN_ISAS)
def test_instruction_set_is_covered_by_this_run(name):
    """Says, by being skipped, which instruction sets the other tests could not look at."""
    if name not in _core.built_isas():
        pytest.skip(f"{name} is not compiled into this build")
    if name not in _core.available_isas():
        pytest.skip(f"{name} does not run on this machine")
    with using_isa(name):
        assert _core.isa() == name


def test_fastest_is_the_default(tmp_path):
    process = run_python(CHOSEN, tmp_path, **{NAME: ""})
    fastest = max(_core.available_isas(), key=KNOWN_ISAS.index)
    assert process.stdout.strip() == fastest, process.stderr


@pytest.mark.parametrize("name", KNOWN_ISAS)
def test_environment_variable_forces_one(name, tmp_path):
    process = run_python(CHOSEN, tmp_path, **{NAME: name})
    if name in _core.available_isas():
        assert process.stdout.strip() == name, process.stderr
    else:
        _assert_import_error(process, name)


@pytest.mark.parametrize("name", ["avx3", "AVX2", "sse", "avx2 ", "fast"])
def test_unknown_name_is_an_error_at_import(name, tmp_path):
    _assert_import_error(run_python(CHOSEN, tmp_path, **{NAME: name}), name)


def _assert_import_error(process, name):
    """The last line of the traceback names the variable, its value and the choices."""
    assert process.returncode != 0
    message = process.stderr.strip().rsplit("\n", 1)[-1]
    assert message.startswith("ImportError: ")
    for word in (NAME, name, *_core.available_isas()):
        assert word in message


@pytest.mark.parametrize("name", ["avx3", "", "AVX2"])
def test_switching_to_an_unknown_name_changes_nothing(name):
    before = _core.isa()
    with pytest.raises(ValueError, match=re.escape(repr(name))):
        _core.use_isa(name)
    assert _core.isa() == before


PERMISSION = """
import ctypes, sys
libc = ctypes.CDLL(None)
def has_permission():
    mask = ctypes.c_uint64()
    assert libc.syscall(158, 0x1022, ctypes.byref(mask)) == 0  # arch_prctl(ARCH_GET_XCOMP_PERM)
    return bool(mask.value >> 18 & 1)
class Stack(ctypes.Structure):
    _fields_ = [("sp", ctypes.c_void_p), ("flags", ctypes.c_int), ("size", ctypes.c_size_t)]
memory = ctypes.create_string_buffer(8192)
def small_signal_stack():
    stack = Stack(ctypes.addressof(memory), 0, len(memory))
    return libc.sigaltstack(ctypes.byref(stack), None) == 0
import numpy as np, mha_fast
x = np.ones((1, 300, 64), np.float32)
mha_fast.attention(x[:, :40], x[:, :40], x[:, :40])
seen = [has_permission()]
if "long" in sys.argv:
    mha_fast.attention(x, x, x)
    seen.append(has_permission())
print(*seen, small_signal_stack())
"""


@pytest.mark.skipif(
    not sys.platform.startswith("linux") or platform.machine() != "x86_64",
    reason="only Linux on x86-64 gives permission for the matrix unit",
)
@pytest.mark.parametrize("name", ["", "baseline", "avx2", "avx512"])
def test_matrix_unit_is_not_asked_for_before_a_call_uses_it(name, tmp_path):
    if name and name not in _core.available_isas():
        pytest.skip(f"{name} does not run on this machine")
    code = PERMISSION.replace('"long" in sys.argv', str(bool(name)))
    process = run_python(code, tmp_path, **{NAME: name})
    if "AssertionError" in process.stderr:
        pytest.skip("this Linux knows no such permission")
    expected = "False False True\n" if name else "False True\n"
    assert process.stdout == expected, process.stderr


@pytest.mark.skipif("amx" not in _core.available_isas(), reason="this CPU has no matrix unit")
@pytest.mark.skipif(_core.emulates_matrix_unit(), reason="nobody is asked for an emulated unit")
def test_matrix_unit_is_asked_for_by_the_call_that_uses_it(tmp_path):
    process = run_python(PERMISSION.replace('"long" in sys.argv', "True"), tmp_path, **{NAME: ""})
    assert process.stdout.startswith("False True"), process.stderr


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("n_query", [1, 100])
def test_every_instruction_set_computes_with_code_of_its_own(n_query, dtype):
    """Different vectors round differently: equal bits everywhere would mean one shared table."""
    inputs = normal_inputs(dtype, n_query=n_query, n_key=1000, head_width=64, value_width=64)
    results = []
    for name in ISAS:
        if name == "amx":
            continue  # short calls of its own are those of AVX-512
        with using_isa(name):
            results.append(mha_fast.attention(*inputs))
    if len(results) < 2:
        pytest.skip("this machine runs only one of the instruction sets")
    for result in results[1:]:
        np.testing.assert_allclose(result, results[0], rtol=0, atol=50 * np.finfo(dtype).eps)
    assert len({result.tobytes() for result in results}) > 1


# ---- what the compiled file contains ------------------------------------------------------------

WIDE = re.compile(r"%[yz]mm|%k[0-7]\b")
WIDEST = re.compile(r"%zmm|%k[0-7]\b")
# Encodings that came with AVX, FMA and BMI; without them a CPU stops at the first one.
NEWER = re.compile(r"^(v(?!err|erw)\w+|mulx|rorx|s[ah][lr]x|andn|bextr|bls\w+|pdep|pext)\b")


@pytest.fixture(scope="module")
def functions():
    """Disassembly of the extension: name of the function -> its instructions."""
    if platform.machine().lower() not in ("x86_64", "amd64"):
        pytest.skip("the instruction sets to tell apart exist only on x86-64")
    if shutil.which("objdump") is None:
        pytest.skip("objdump (binutils) is not installed")
    command = ["objdump", "-d", "--no-show-raw-insn", _core.__file__]
    listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = {}
    for line in listing.splitlines():
        if heading := re.match(r"^[0-9a-f]+ <(.+)>:$", line):
            instructions = found.setdefault(heading[1], [])
        elif instruction := re.match(r"^ +[0-9a-f]+:\t(.+)$", line):
            instructions.append(instruction[1])
    if not any("mha_" in name for name in found):
        pytest.skip("the extension was stripped of the names of its functions")
    return found


def _offending(functions, belongs, pattern):
    return {
        name: instruction
        for name, instructions in functions.items()
        if belongs(name)
        for instruction in instructions
        if pattern.search(instruction)
    }


def test_code_outside_the_instruction_sets_runs_on_any_cpu(functions):
    def outside(name):
        return not re.search("mha_avx2|mha_avx512|mha_amx", name)

    assert not _offending(functions, outside, WIDE)
    assert not _offending(functions, outside, NEWER)


def test_avx2_code_has_nothing_of_avx512(functions):
    assert not _offending(functions, lambda name: "mha_avx2" in name, WIDEST)


@pytest.mark.parametrize(
    ("name", "pattern"), [("mha_avx2", "%ymm"), ("mha_avx512", "%zmm"), ("mha_amx", "%tmm")]
)
def test_disassembly_sees_the_wide_code(name, pattern, functions):
    """Guards the two tests above: they would pass as well if nothing had been recognised."""
    if name.removeprefix("mha_") not in _core.built_isas():
        pytest.skip(f"{name} is not compiled into this build")
    if name == "mha_amx" and _core.emulates_matrix_unit():
        pattern = "%zmm"
    found = _offending(functions, lambda function: name in function, re.compile(pattern))
    assert len(found) > 5
