"""Every function over scores takes the options of the one table, and lets none of them slip."""

import inspect
import re

import numpy as np
import pytest

import mha_fast
from mha_fast import reference
from mha_fast._options import (
    ATTENTION,
    BACKWARD,
    CACHED,
    LAYER,
    LAYER_STATISTICS,
    LAYER_WEIGHTS,
    OPTIONS,
    STATISTICS,
    VARLEN,
    VARLEN_BACKWARD,
    WEIGHTS,
)

DEFAULTS = {option.name: option.default for option in OPTIONS}
NAMES = tuple(DEFAULTS)
_QKV = "query key value"
_PACKED = f"{_QKV} cu_seqlens_q cu_seqlens_k"
_BACK = "grad_out out lse grad_lse wanted"
_DROPOUT = "dropout_p dropout_seed"
_MEASURED = "query key offsets key_sets ignore_keys received"

# Of each function: what it takes beside the options, and which options it has no use for.
FUNCTIONS = {
    "attention": (mha_fast.attention, _QKV, ""),
    "attention_varlen": (mha_fast.attention_varlen, _PACKED, "attn_mask kv_lengths"),
    "attention_backward": (
        mha_fast.attention_backward,
        f"{_BACK} {_QKV}",
        "return_lse",
    ),
    "attention_varlen_backward": (
        mha_fast.attention_varlen_backward,
        f"{_BACK} {_PACKED}",
        "attn_mask kv_lengths return_lse",
    ),
    "attention_weights": (
        mha_fast.attention_weights,
        "query key queries heads",
        f"precision out {_DROPOUT}",
    ),
    "head_statistics": (
        mha_fast.head_statistics,
        _MEASURED,
        f"head_mask return_lse precision out {_DROPOUT}",
    ),
    "KVCache.attend": (
        mha_fast.KVCache.attend,
        "self query counts",
        f"query_offset kv_lengths {_DROPOUT}",
    ),
    "MultiHeadAttention": (
        mha_fast.MultiHeadAttention.__call__,
        "self query key value cache counts",
        _DROPOUT,
    ),
    "MultiHeadAttention.attention_weights": (
        mha_fast.MultiHeadAttention.attention_weights,
        "self query key queries heads",
        f"precision out {_DROPOUT}",
    ),
    "MultiHeadAttention.head_statistics": (
        mha_fast.MultiHeadAttention.head_statistics,
        f"self {_MEASURED}",
        f"head_mask return_lse precision out {_DROPOUT}",
    ),
    "reference.attention": (reference.attention, _QKV, ""),
    "reference.head_statistics": (
        reference.head_statistics,
        _MEASURED,
        f"head_mask return_lse precision out {_DROPOUT}",
    ),
}
# Where the tokens are, the cache knows better.
OTHER_DEFAULTS = {("KVCache.attend", "is_causal"): True, ("MultiHeadAttention", "is_causal"): None}
TYPED = {
    "attention": ATTENTION,
    "attention_varlen": VARLEN,
    "attention_backward": BACKWARD,
    "attention_varlen_backward": VARLEN_BACKWARD,
    "attention_weights": WEIGHTS,
    "head_statistics": STATISTICS,
    "KVCache.attend": CACHED,
    "MultiHeadAttention": LAYER,
    "MultiHeadAttention.attention_weights": LAYER_WEIGHTS,
    "MultiHeadAttention.head_statistics": LAYER_STATISTICS,
}
TAKEN = [
    (function, name)
    for function, (_, own, unused) in FUNCTIONS.items()
    for name in NAMES
    if name not in unused.split() and name not in own.split()
]


def parameters(function):
    return inspect.signature(FUNCTIONS[function][0]).parameters


@pytest.mark.parametrize("function", FUNCTIONS)
def test_a_signature_has_every_option_of_the_table_but_those_without_use(function):
    _, own, unused = FUNCTIONS[function]

    expected = (set(NAMES) - set(unused.split())) | set(own.split())

    assert set(unused.split()) <= set(NAMES)
    if function.startswith("reference."):  # where an option may be tried before the kernel has it
        assert set(parameters(function)) >= expected
    else:
        assert set(parameters(function)) == expected


@pytest.mark.parametrize("function", [reference.attention_varlen, reference.attention_weights])
def test_these_formulas_pass_on_whatever_option_there_is(function):
    last = list(inspect.signature(function).parameters.values())[-1]

    assert last.kind is inspect.Parameter.VAR_KEYWORD


@pytest.mark.parametrize(("function", "name"), TAKEN)
def test_an_option_has_the_default_of_the_table(function, name):
    expected = OTHER_DEFAULTS.get((function, name), DEFAULTS[name])
    found = parameters(function)[name].default

    assert found == expected and type(found) is type(expected)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_options_are_keywords_in_the_order_of_the_table(function):
    own = FUNCTIONS[function][1].split()  # a backward pass takes what the forward pass wrote to out
    mine = [name for name in parameters(function) if name in NAMES and name not in own]

    assert mine == [name for name in NAMES if name in mine]
    kinds = {parameters(function)[name].kind for name in mine if name != "attn_mask"}
    assert kinds == {inspect.Parameter.KEYWORD_ONLY}


@pytest.mark.parametrize(("function", "name"), TAKEN)
def test_an_option_is_documented(function, name):
    text = inspect.getdoc(FUNCTIONS[function][0])
    section = text.split("\nParameters\n")[1].split("\nReturns\n")[0]
    headings = [line for line in section.splitlines() if line and not line.startswith(" ")]

    assert any(name in re.split(r", | : ", heading) for heading in headings), headings


@pytest.mark.parametrize("function", TYPED)
def test_type_checkers_see_every_option(function):
    taken = [name for name in NAMES if (function, name) in TAKEN]
    written = [name for name in inspect.unwrap(FUNCTIONS[function][0]).__code__.co_varnames]
    unpacked = [option.name for option in TYPED[function].options]

    assert set(unpacked) | (set(written) & set(NAMES)) >= set(taken)
    assert set(unpacked) <= set(taken)


def call(function, **options):
    """The function on small valid arguments."""
    x = np.ones((2, 4, 3, 8), np.float32)
    if function == "KVCache.attend":
        cache = mha_fast.KVCache(2, 4, 8)
        cache.append(x, x)
        return cache.attend(x, **options)
    if function.startswith("MultiHeadAttention"):
        layer, tokens = mha_fast.MultiHeadAttention(32, 4, seed=0), np.ones((2, 3, 32), np.float32)
        return FUNCTIONS[function][0](layer, tokens, **options)
    if "varlen" in function:
        rows, ends = x.reshape(-1, 4, 8), [0, 2, 6]
        arrays = [rows] * 5 + [rows[..., 0]] if "backward" in function else [rows] * 3
        return FUNCTIONS[function][0](*arrays, ends, ends, **options)
    if function == "attention_backward":
        return mha_fast.attention_backward(*[x] * 5, x[..., 0], **options)
    arrays = [x] * (3 if function == "attention" else 2)
    return FUNCTIONS[function][0](*arrays, **options)


class Unfit:
    """What no option accepts."""

    def __repr__(self):
        return "<unfit>"


@pytest.mark.parametrize(("function", "name"), [x for x in TAKEN if "reference" not in x[0]])
def test_an_option_reaches_the_check_of_its_name(function, name):
    call(function)
    with pytest.raises((TypeError, ValueError), match=rf"^{name} (is|has) "):
        call(function, **{name: Unfit()})


@pytest.mark.parametrize("function", TYPED)
def test_what_is_no_option_is_refused(function):
    unused = FUNCTIONS[function][2].split()
    for name in ("no_such_option", *unused):
        with pytest.raises(TypeError, match=f"unexpected keyword argument '{name}'"):
            call(function, **{name: None})
