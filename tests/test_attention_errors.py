"""Every error of the contract: its type, and a message with argument, expectation and finding."""

import numpy as np
import pytest
from _support import normal_inputs

import mha_fast

N_QUERY, N_KEY, HEAD_WIDTH, VALUE_WIDTH = 5, 17, 6, 3
OUT_SHAPE = (2, 4, N_QUERY, VALUE_WIDTH)


def _array(shape, dtype=np.float32):
    return np.zeros(shape, dtype)


def _valid():
    query, key, value = normal_inputs(
        np.float32, n_query=N_QUERY, n_key=N_KEY, head_width=HEAD_WIDTH, value_width=VALUE_WIDTH
    )
    return {"query": query, "key": key, "value": value}


# id: (wrong arguments, error, words that the message has to contain)
ERRORS = {
    # operands
    "integer query": ({"query": _array((2, 4, 5, 6), np.int64)}, TypeError, "query int64"),
    "complex key": ({"key": _array((2, 2, 17, 6), np.complex64)}, TypeError, "key complex64"),
    "bool value": ({"value": _array((2, 2, 17, 3), np.bool_)}, TypeError, "value bool"),
    "object query": ({"query": _array((2, 4, 5, 6), object)}, TypeError, "query object"),
    "text as query": ({"query": "abc"}, TypeError, "query"),
    "no key": ({"key": None}, TypeError, "key"),
    "wider key": (
        {"key": _array((2, 2, 17, 6), np.float64)},
        TypeError,
        "key float64 float32",
    ),
    "wider value": (
        {"value": _array((2, 2, 17, 3), np.float64)},
        TypeError,
        "value float64 float32",
    ),
    "long double": (
        dict.fromkeys(("query", "key", "value"), _array((2, 2, 17, 6), np.longdouble)),
        TypeError,
        "query " + np.dtype(np.longdouble).name,
    ),
    "masked array": (
        {"key": np.ma.masked_array(_array((2, 2, 17, 6)), False)},
        TypeError,
        "key masked array",
    ),
    "one head against several": (
        {"query": _array((5, 6))},
        ValueError,
        "key (2, 2, 17, 6) (5, 6)",
    ),
    "query of rank 1": ({"query": _array(6)}, ValueError, "query (6,)"),
    "key of rank 0": ({"key": _array(())}, ValueError, "key ()"),
    "value of rank 1": ({"value": _array(3)}, ValueError, "value (3,)"),
    "head width": ({"key": _array((2, 2, 17, 7))}, ValueError, "key (2, 2, 17, 7) 6 query"),
    "number of keys": ({"value": _array((2, 2, 16, 3))}, ValueError, "value (2, 2, 16, 3) 17 key"),
    "heads of value": ({"value": _array((2, 4, 17, 3))}, ValueError, "value (2, 4, 17, 3) 2 key"),
    "heads not a multiple": (
        {"key": _array((2, 3, 17, 6)), "value": _array((2, 3, 17, 3))},
        ValueError,
        "key 3 4",
    ),
    "more key heads": (
        {"key": _array((2, 8, 17, 6)), "value": _array((2, 8, 17, 3))},
        ValueError,
        "key 8 4",
    ),
    "no key heads": (
        {"key": _array((2, 0, 17, 6)), "value": _array((2, 0, 17, 3))},
        ValueError,
        "key 0 4",
    ),
    "batch of key": (
        {"key": _array((3, 2, 17, 6)), "value": _array((3, 2, 17, 3))},
        ValueError,
        "key (3, 2, 17, 6) (2, 4, 5, 6)",
    ),
    "batch of value": (
        {"value": _array((3, 2, 17, 3))},
        ValueError,
        "value (3, 2, 17, 3) (2, 4, 5, 6)",
    ),
    # mask
    "integer mask": ({"attn_mask": _array((5, 17), np.int8)}, TypeError, "attn_mask int8"),
    "complex mask": (
        {"attn_mask": _array((5, 17), np.complex128)},
        TypeError,
        "attn_mask complex128",
    ),
    "object mask": ({"attn_mask": _array((5, 17), object)}, TypeError, "attn_mask object"),
    "mask too long": ({"attn_mask": _array((5, 20))}, ValueError, "attn_mask 20 17"),
    "mask too short": ({"attn_mask": _array((5, 16), bool)}, ValueError, "attn_mask 16 17"),
    "mask rows": ({"attn_mask": _array((4, 17))}, ValueError, "attn_mask (4, 17) (2, 4, 5, 17)"),
    "mask heads": ({"attn_mask": _array((2, 1, 17))}, ValueError, "attn_mask (2, 1, 17)"),
    "mask batch": ({"attn_mask": _array((3, 1, 1, 17))}, ValueError, "attn_mask (3, 1, 1, 17)"),
    "mask of rank 5": (
        {"attn_mask": _array((2, 1, 1, 1, 17))},
        ValueError,
        "attn_mask (2, 1, 1, 1, 17)",
    ),
    "empty mask": ({"attn_mask": _array((5, 0))}, ValueError, "attn_mask (5, 0)"),
    # window
    "window as a number": ({"window": 3}, TypeError, "window 3"),
    "window of three": ({"window": (1, 2, 3)}, ValueError, "window (1, 2, 3)"),
    "window of one": ({"window": (1,)}, ValueError, "window (1,)"),
    "negative left": ({"window": (-1, 0)}, ValueError, "window -1"),
    "negative right": ({"window": (None, -2)}, ValueError, "window -2"),
    "fraction in window": ({"window": (1.5, 0)}, TypeError, "window 1.5"),
    "text in window": ({"window": ("a", 0)}, TypeError, "window 'a'"),
    # positions and lengths
    "fraction as offset": ({"query_offset": 1.5}, TypeError, "query_offset float"),
    "other word as offset": ({"query_offset": "start"}, ValueError, "query_offset start end"),
    "no offset": ({"query_offset": None}, TypeError, "query_offset"),
    "float offsets": ({"query_offset": _array(2)}, TypeError, "query_offset float32"),
    "number of offsets": ({"query_offset": [1, 2, 3]}, ValueError, "query_offset (3,) (2,)"),
    "offset per head": ({"query_offset": [[1], [2]]}, ValueError, "query_offset (2, 1) (2,)"),
    "float lengths": ({"kv_lengths": _array(2)}, TypeError, "kv_lengths float32"),
    "bool lengths": ({"kv_lengths": [True, False]}, TypeError, "kv_lengths bool"),
    "number of lengths": ({"kv_lengths": [1, 2, 3]}, ValueError, "kv_lengths (3,) (2,)"),
    "length past the keys": ({"kv_lengths": [3, 18]}, ValueError, "kv_lengths 18 17"),
    "negative length": ({"kv_lengths": [-1, 3]}, ValueError, "kv_lengths -1 17"),
    "length past 64 bits": (
        {"kv_lengths": np.array([3, 2**64 - 1], np.uint64)},
        ValueError,
        f"kv_lengths {2**64 - 1}",
    ),
    # numbers
    "scale nan": ({"scale": np.nan}, ValueError, "scale nan"),
    "scale inf": ({"scale": -np.inf}, ValueError, "scale -inf"),
    "scale text": ({"scale": "1"}, TypeError, "scale"),
    "scale array": ({"scale": _array(2)}, TypeError, "scale"),
    "scale complex": ({"scale": 1j}, TypeError, "scale"),
    "softcap zero": ({"softcap": 0.0}, ValueError, "softcap 0"),
    "softcap negative": ({"softcap": -2.0}, ValueError, "softcap -2"),
    "softcap nan": ({"softcap": np.nan}, ValueError, "softcap nan"),
    "softcap text": ({"softcap": "soft"}, TypeError, "softcap"),
    # per head
    "number of slopes": ({"alibi_slopes": _array(3)}, ValueError, "alibi_slopes (3,) 4"),
    "slopes of a wrong batch": (
        {"alibi_slopes": _array((3, 4))},
        ValueError,
        "alibi_slopes (3, 4) (2, 4)",
    ),
    "complex slopes": ({"alibi_slopes": _array(4, complex)}, TypeError, "alibi_slopes complex128"),
    "number of sinks": ({"sinks": _array(5)}, ValueError, "sinks (5,) (4,)"),
    "sinks per sequence": ({"sinks": _array((2, 4))}, ValueError, "sinks (2, 4) (4,)"),
    "text as sinks": ({"sinks": ["a"] * 4}, TypeError, "sinks"),
    "number of gates": ({"head_mask": _array(2)}, ValueError, "head_mask (2,) 4"),
    "gates of a wrong batch": ({"head_mask": _array((5, 4))}, ValueError, "head_mask (5, 4)"),
    "object gates": ({"head_mask": _array(4, object)}, TypeError, "head_mask object"),
    # how it is computed
    "text as a flag": ({"is_causal": "no"}, TypeError, "is_causal no"),
    "array as a flag": ({"is_causal": _array(2)}, TypeError, "is_causal"),
    "text as return_lse": ({"return_lse": "yes"}, TypeError, "return_lse yes"),
    "precision": ({"precision": "medium"}, ValueError, "precision medium highest high"),
    "precision as a number": ({"precision": 2}, (TypeError, ValueError), "precision 2"),
    "no threads": ({"num_threads": 0}, ValueError, "num_threads 0"),
    "negative threads": ({"num_threads": -3}, ValueError, "num_threads -3"),
    "half a thread": ({"num_threads": 0.5}, TypeError, "num_threads"),
}


def _assert_message_has(message, words):
    """All words are there, in any order; brackets group a shape."""
    for word in words.replace(", ", ",_").split(" "):
        assert word.replace(",_", ", ") in message, message


@pytest.mark.parametrize("case", ERRORS)
def test_error_names_argument_expectation_and_finding(case):
    wrong, error, words = ERRORS[case]
    out = np.full(OUT_SHAPE, 7, np.float32)
    arguments = _valid() | {"out": out} | wrong
    with pytest.raises(error) as caught:
        mha_fast.attention(**arguments)
    assert type(caught.value) in (error if isinstance(error, tuple) else (error,))
    _assert_message_has(str(caught.value), words)
    assert (out == 7).all()


@pytest.mark.parametrize(
    ("out", "error", "words"),
    [
        (_array((2, 4, 5, 4)), ValueError, "out (2, 4, 5, 4) (2, 4, 5, 3)"),
        (_array((4, 5, 3)), ValueError, "out (4, 5, 3) (2, 4, 5, 3)"),
        (_array((1, 2, 4, 5, 3)), ValueError, "out (1, 2, 4, 5, 3) (2, 4, 5, 3)"),
        (_array(OUT_SHAPE, np.float64), TypeError, "out float64 float32"),
        (_array(OUT_SHAPE, np.int32), TypeError, "out int32 float32"),
        ([[0.0]], TypeError, "out list"),
        (np.broadcast_to(np.float32(0), OUT_SHAPE), ValueError, "out"),
    ],
    ids=["width", "rank below", "rank above", "wider", "integer", "list", "read-only"],
)
def test_out_that_does_not_fit(out, error, words):
    with pytest.raises(error) as caught:
        mha_fast.attention(**_valid(), out=out)
    assert type(caught.value) is error
    _assert_message_has(str(caught.value), words)


def test_head_width_message_as_documented():
    query, key = np.zeros((2, 8, 5, 64), np.float32), np.zeros((2, 8, 64, 32), np.float32)
    message = r"^key has shape \(2, 8, 64, 32\); expected head width 64 to match query$"
    with pytest.raises(ValueError, match=message):
        mha_fast.attention(query, key, key)


def test_options_are_keyword_only():
    with pytest.raises(TypeError):
        mha_fast.attention(*_valid().values(), None, True)


def test_unknown_option_is_an_error():
    with pytest.raises(TypeError, match="dropout"):
        mha_fast.attention(**_valid(), dropout=0.1)


@pytest.mark.parametrize("case", ["mask too long", "length past the keys", "number of sinks"])
@pytest.mark.parametrize("sizes", [{"batch": (0,)}, {"n_query": 0}])
def test_empty_result_is_checked_as_well(case, sizes):
    wrong, error, _ = ERRORS[case]
    query, key, value = normal_inputs(np.float32, **{"n_query": N_QUERY, "n_key": N_KEY} | sizes)
    if case == "length past the keys":
        wrong = {"kv_lengths": 18}  # two lengths do not fit an empty batch
    with pytest.raises(error):
        mha_fast.attention(query, key, value, **wrong)


def test_numbers_that_look_odd_but_are_fine():
    arguments = _valid() | {"scale": np.float32(0), "softcap": 1, "window": [np.int8(2), None]}
    out = mha_fast.attention(**arguments, is_causal=np.True_, num_threads=np.int64(1), sinks=None)
    assert np.isfinite(out).all()
