"""What newcomers pass, and what they are told: guessed names, odd operands, masked arrays."""

import sys

import numpy as np
import pytest

import mha_fast
from mha_fast import heads, pictures
from mha_fast.heads import HardConcrete

X = np.ones((2, 4, 5, 8), np.float32)
PACKED = (X[0], X[0], X[0], [0, 4], [0, 4])
TOKENS = np.ones((2, 5, 32), np.float32)

# A name from elsewhere: what the message has to offer.
GUESSED = {
    "causal": "use is_causal",
    "is_casual": "use is_causal",
    "mask": "use attn_mask",
    "attention_mask": "use attn_mask",
    "key_padding_mask": "use kv_lengths",
    "window_size": "use window",
    "softmax_scale": "use scale",
    "scales": "use scale",
    "logits_soft_cap": "use softcap",
    "num_kv_heads": "use the shapes of query and key",
    "enable_gqa": "use the shapes of query and key",
    "need_weights": "use attention_weights",
    "dropout": "use dropout_p",
    "return_softmax_lse": "use return_lse",
    "n_threads": "use num_threads",
    "something_else": "expected query, key, value",
}


@pytest.mark.parametrize("name", GUESSED)
def test_a_guessed_name_gets_the_right_one(name):
    with pytest.raises(TypeError) as error:
        mha_fast.attention(X, X, X, **{name: 1})

    message = str(error.value)
    assert message.startswith(f"attention() got an unexpected keyword argument '{name}'")
    assert GUESSED[name] in message


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: mha_fast.attention_varlen(*PACKED, causal=True), "is_causal"),
        (lambda: mha_fast.attention_weights(X, X, softmax_scale=1.0), "use scale"),
        (lambda: mha_fast.head_statistics(X, X, mask=None), "use attn_mask"),
        (lambda: mha_fast.KVCache(2, 4, 8).attend(X, causal=True), "use is_causal"),
        (lambda: mha_fast.MultiHeadAttention(32, 4)(TOKENS, causal=True), "use is_causal"),
        (
            lambda: mha_fast.MultiHeadAttention(32, 4)(TOKENS, need_weights=True),
            "use the method attention_weights()",
        ),
    ],
    ids=["varlen", "weights", "statistics", "cache", "layer", "weights of the layer"],
)
def test_every_function_gives_hints(call, words):
    with pytest.raises(TypeError, match="unexpected keyword argument") as error:
        call()
    assert words in str(error.value)


def test_a_name_that_the_function_has_no_use_for_is_not_offered():
    with pytest.raises(TypeError, match="'cache_seqlens'") as error:
        mha_fast.attention_varlen(*PACKED, cache_seqlens=[1])
    assert "kv_lengths" not in str(error.value)


# ---- operands -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["query", "key", "value"])
@pytest.mark.parametrize("function", [mha_fast.attention, mha_fast.attention_weights])
def test_an_operand_that_is_none_or_has_too_few_axes_is_named(function, name):
    arguments = dict.fromkeys(("query", "key", "value"), X)
    if function is mha_fast.attention_weights:
        if name == "value":
            return
        del arguments["value"]

    with pytest.raises(TypeError, match=f"^{name} is None; expected an array$"):
        function(**arguments | {name: None})
    for few in (np.float32(1), X[0, 0, 0]):
        shape = str(np.shape(few)).replace("(", r"\(").replace(")", r"\)")
        expected = rf"^{name} has shape {shape}; expected \(\.\.\., heads, rows, width\), or \(rows"
        with pytest.raises(ValueError, match=expected):
            function(**arguments | {name: few})


def test_a_ragged_list_is_named():
    with pytest.raises(ValueError, match="^key is no array: .*inhomogeneous"):
        mha_fast.attention(X[0, 0], [[1.0, 2.0], [3.0]], X[0, 0])
    with pytest.raises(ValueError, match="^attn_mask is no array: .*inhomogeneous"):
        mha_fast.attention(X, X, X, [[True], [True, False]])


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int64])
def test_a_mask_of_integers_is_told_what_to_become(dtype):
    with pytest.raises(TypeError, match=rf"{np.dtype(dtype)}; .*; use \.astype\(bool\)"):
        mha_fast.attention(X, X, X, np.ones((5, 5), dtype))
    with pytest.raises(TypeError, match="attn_mask has dtype complex128") as error:
        mha_fast.attention(X, X, X, np.ones((5, 5), complex))
    assert "astype" not in str(error.value)


# ---- bfloat16 by name ---------------------------------------------------------------------------


def test_bfloat16_by_name_asks_for_its_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)

    for make in (
        lambda: mha_fast.KVCache(1, 1, 8, dtype="bfloat16"),
        lambda: mha_fast.MultiHeadAttention(8, 2, dtype="bfloat16"),
    ):
        with pytest.raises(TypeError, match="^dtype is 'bfloat16', .* pip install ml_dtypes$"):
            make()


def test_bfloat16_by_name_is_the_dtype_of_its_package():
    ml_dtypes = pytest.importorskip("ml_dtypes", reason="bfloat16 needs ml_dtypes")

    assert mha_fast.KVCache(1, 1, 8, dtype="bfloat16").dtype == ml_dtypes.bfloat16


# ---- masked arrays ------------------------------------------------------------------------------

MASKED = np.ma.masked_array(np.ones((4, 4)), mask=np.eye(4, dtype=bool))
PUT = {
    "head_importance, out": lambda: heads.head_importance(MASKED[None], np.ones((1, 4, 4))),
    "head_importance, grad_out": lambda: heads.head_importance(np.ones((1, 4, 4)), MASKED[None]),
    "relation_accuracy, top_key": lambda: heads.relation_accuracy(MASKED.astype(int), [(0, 0)]),
    "prune_in_order, importance": lambda: heads.prune_in_order(np.sum, MASKED),
    "HardConcrete, log_alpha": lambda: HardConcrete(MASKED),
    "attention, out": lambda: mha_fast.attention(*np.ones((3, 4, 4)), out=MASKED),
    "layer, out": lambda: mha_fast.MultiHeadAttention(4, 2, dtype=np.float64)(
        np.ones((4, 4)), out=MASKED
    ),
    "attention, attn_mask": lambda: mha_fast.attention(*np.ones((3, 4, 4)), MASKED),
    "head_maps, measurements": lambda: pictures.head_maps({"a": MASKED}),
    "token_views, weights": lambda: pictures.token_views(list("abcd"), {"a": MASKED}),
    "weight_maps, weights": lambda: pictures.weight_maps({"a": MASKED}),
}


@pytest.mark.parametrize("place", PUT)
def test_a_masked_array_does_not_lose_its_mask(place):
    with pytest.raises(TypeError, match="is a masked array"):
        PUT[place]()


# ---- the rest -----------------------------------------------------------------------------------


def test_a_cache_that_never_got_a_token_does_not_attend():
    cache = mha_fast.KVCache(2, 4, 8)
    with pytest.raises(ValueError, match="never got a token; append"):
        cache.attend(X)

    cache.append(X, X, counts=[0, 0])  # a batch of nothing but padding is a batch
    np.testing.assert_array_equal(cache.attend(X, counts=[0, 0]), 0)


def test_show_config_returns_its_facts(capsys):
    facts = mha_fast.show_config()

    shown = capsys.readouterr().out
    assert facts["version"] == mha_fast.__version__
    assert facts["numpy"] == np.__version__
    assert facts["python"] == sys.version.split()[0]
    assert facts["cpu"] and facts["isa"] in facts["isas_available"]
    assert facts["num_threads"] == mha_fast.get_num_threads()
    for name in ("version", "numpy", "python", "cpu", "isa"):
        assert facts[name] in shown
