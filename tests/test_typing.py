"""What type checkers and `help` make of the public functions."""

import inspect
import os
import pydoc
import site
import subprocess
import sys
from pathlib import Path
from typing import Any, get_type_hints

import pytest

import mha_fast
from mha_fast import cost, heads, minilm, reference

RIGHT = """
from typing import Any, assert_type

import numpy as np
import numpy.typing as npt

import mha_fast
from mha_fast import reference
from mha_fast.heads import classify_heads, head_importance

Array = npt.NDArray[Any]
x = np.ones((2, 8, 5, 64), np.float32)
options = {"is_causal": True}
assert_type(mha_fast.attention(x, x, x), Array)
assert_type(mha_fast.attention(x, x, x, return_lse=False, window=(3, None)), Array)
assert_type(mha_fast.attention(x, x, x, None, return_lse=True), tuple[Array, Array])
rows = x[0].swapaxes(0, 1)
assert_type(mha_fast.attention_varlen(rows, rows, rows, [0, 5], [0, 5], sinks=np.ones(8)), Array)
assert_type(mha_fast.attention_weights(x, x, heads=[0, 1], queries=slice(2)), Array)
assert_type(mha_fast.attention_weights(x, x, return_lse=True), tuple[Array, Array])
assert_type(reference.attention(x, x, x, softcap=2.0, return_lse=True), tuple[Array, Array])
assert_type(mha_fast.merge_attention([x], [x[..., 0]]), tuple[Array, Array])
seen = mha_fast.head_statistics(x, x, query_offset="end", kv_lengths=[3, 5], received=True)
assert_type(seen, mha_fast.HeadStatistics)
assert_type(classify_heads(seen).broad, Array)
assert_type(head_importance(x, x), Array)
cache = mha_fast.KVCache(2, 8, 64, dtype=np.float32)
cache.append(x, x)
assert_type(cache.attend(x, precision="high"), Array)
assert_type(cache.attend(x, return_lse=True), tuple[Array, Array])
layer = mha_fast.MultiHeadAttention(512, 8, init="zeros", seed=np.random.default_rng(0))
tokens = np.ones((2, 5, 512), np.float32)
assert_type(layer(tokens, is_causal=True, alibi_slopes=np.ones(8)), Array)
assert_type(layer(tokens, return_lse=True), tuple[Array, Array])
assert_type(layer.prune_heads([0]), mha_fast.MultiHeadAttention)
assert_type(layer.state_dict("bert"), dict[str, Array])
assert_type(mha_fast.cost.layer_cost(512, 8).total.parameters, int)
assert_type(mha_fast.get_num_threads(), int)
assert_type(mha_fast.__version__, str)
"""
# Each line is an error of a kind that a checker has to find.
WRONG = {
    "mha_fast.attention(x, x, x, causal=True)": "call-overload",
    'mha_fast.attention(x, x, x, precision="low")': "call-overload",
    'mha_fast.attention(x, x, x, query_offset="end", softcap="big")': "call-overload",
    "mha_fast.attention_varlen(x, x, x, [0], [0], kv_lengths=[1])": "call-overload",
    "mha_fast.head_statistics(x, x, head_mask=[1.0])": "call-arg",
    "mha_fast.KVCache(1, 1, 1).attend(x, query_offset=1)": "call-overload",
    'mha_fast.MultiHeadAttention(8, 2, init="xavier")': "arg-type",
    'mha_fast.MultiHeadAttention(8, 2).state_dict("gpt")': "arg-type",
    "mha_fast.MultiHeadAttention(8, 2)(x, is_casual=True)": "call-overload",
    "mha_fast.atention(x, x, x)": "attr-defined",
}


def check(text, folder):
    """What a strict mypy says of a user's file."""
    pytest.importorskip("mypy", reason="the types are checked by mypy")
    file = folder / "user.py"
    file.write_text(text, encoding="utf-8")
    # An editable install hides the package behind an import hook, which mypy does not ask; where it
    # looks anyway it does not want to be told.
    folder_of_package = Path(mha_fast.__file__).parents[1]
    environment = dict(os.environ)
    if folder_of_package not in map(Path, site.getsitepackages()):
        environment["MYPYPATH"] = str(folder_of_package)
    command = [sys.executable, "-m", "mypy", "--strict", "--no-error-summary", "--config-file="]
    return subprocess.run(
        [*command, f"--cache-dir={folder / 'cache'}", str(file)],
        cwd=folder, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip


def test_a_strict_checker_accepts_right_code_and_refuses_wrong_code(tmp_path):
    head = "import numpy as np\nimport mha_fast\nx = np.ones((2, 8, 5, 64))\n"

    right = check(RIGHT, tmp_path)
    assert (right.returncode, right.stdout, right.stderr) == (0, "", "")

    found = check(head + "\n".join(WRONG), tmp_path).stdout
    for number, (line, code) in enumerate(WRONG.items(), 1 + head.count("\n")):
        errors = [error for error in found.splitlines() if f"user.py:{number}: error:" in error]
        assert errors and errors[-1].endswith(f"[{code}]"), (line, errors)


def public_callables():
    for module in (mha_fast, cost, heads, minilm, reference):
        for name in module.__all__:
            value = getattr(module, name)
            if inspect.isfunction(value):
                yield f"{module.__name__}.{name}", value
            elif inspect.isclass(value):
                for key, member in inspect.getmembers(value):
                    if inspect.isroutine(member) and (not key.startswith("_") or key == "__call__"):
                        yield f"{module.__name__}.{name}.{key}", member


CALLABLES = dict(public_callables())


@pytest.mark.parametrize("name", [x for x in CALLABLES if x.startswith("mha_fast.")])
def test_no_public_function_takes_or_returns_just_anything(name):
    function = CALLABLES[name]
    if not hasattr(function, "__annotations__"):
        return  # of a class of NumPy or Python
    hints = get_type_hints(function)

    plain = {key for key, hint in hints.items() if hint is Any}
    assert plain <= {"options", "score_options"}  # passed on as they are
    assert "return" in hints


@pytest.mark.parametrize("name", CALLABLES)
def test_help_begins_with_a_signature_that_can_be_read(name):
    text = pydoc.render_doc(CALLABLES[name], renderer=pydoc.plaintext)
    signature = text.split("\n\n")[1].splitlines()[0]

    assert len(signature) < 800  # with its types spelt out it would be thousands
    assert not any(
        word in signature for word in ("_NestedSequence", "ForwardRef", "Unpack", "**options: U")
    )
    if name == "mha_fast.attention":
        assert signature.startswith(
            "attention(query, key, value, attn_mask=None, *, is_causal=False, window=None,"
        )
