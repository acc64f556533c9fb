"""Looking into the heads of a layer from its tokens, and the rotary embedding."""

import math
from functools import partial

import numpy as np
import pytest
from _dtypes import DTYPES_16
from _support import assert_same_bits

import mha_fast
from mha_fast import MultiHeadAttention, apply_rotary

F32, F64 = np.float32, np.float64
TOKENS = np.random.default_rng(0).standard_normal((2, 9, 24))
MEMORY = np.random.default_rng(1).standard_normal((2, 13, 10))

# name: (arguments of the layer, whether it attends to other tokens, options)
CASES = {
    "self": ({}, False, {"is_causal": True}),
    "grouped, other tokens": (
        {"num_kv_heads": 2, "kdim": 10, "vdim": 10},
        True,
        {"window": (3, 4)},
    ),
    "padded": ({}, False, {"kv_lengths": [9, 4]}),
    "rotary": ({"position": apply_rotary}, False, {"query_offset": "end", "kv_lengths": [9, 5]}),
    "rotary, other tokens": (
        {"position": partial(apply_rotary, interleaved=True), "kdim": 10, "vdim": 10},
        True,
        {"query_offset": [2, 5], "softcap": 3.0, "alibi_slopes": np.ones(4)},
    ),
    "masked": ({}, False, {"attn_mask": np.tri(9, dtype=bool), "sinks": np.zeros(4)}),
}


@pytest.fixture(params=CASES)
def case(request):
    sizes, has_memory, options = CASES[request.param]
    layer = MultiHeadAttention(24, 4, dtype=F64, seed=0, **sizes)
    return layer, (TOKENS, MEMORY) if has_memory else (TOKENS,), options


def test_weights_times_values_are_what_the_layer_gathers(case):
    layer, tokens, options = case
    expected, expected_lse = layer(*tokens, return_lse=True, **options)

    weights, lse = layer.attention_weights(*tokens, return_lse=True, **options)

    assert weights.shape == (2, 4, 9, tokens[-1].shape[1])
    _, value = layer.project_key_value(tokens[-1])
    value = np.repeat(value, 4 // layer.num_kv_heads, axis=1)
    np.testing.assert_allclose(layer.project_output(weights @ value), expected, rtol=0, atol=1e-13)
    np.testing.assert_allclose(lse, expected_lse, rtol=0, atol=1e-13)


def test_statistics_are_those_of_the_weights(case):
    layer, tokens, options = case
    weights = layer.attention_weights(*tokens, **options)

    seen = layer.head_statistics(*tokens, key_sets=[[0, 2]], received=True, **options)

    np.testing.assert_allclose(seen.received, weights.sum(axis=-2), rtol=0, atol=1e-12)
    np.testing.assert_allclose(
        seen.key_mass[..., 0], weights[..., [0, 2]].sum(axis=-1).mean(axis=-1), rtol=0, atol=1e-12
    )


def test_weights_of_some_queries_and_heads(case):
    layer, tokens, options = case
    whole = layer.attention_weights(*tokens, **options)

    some = layer.attention_weights(*tokens, queries=[0, 8], heads=2, **options)

    assert_same_bits(some, whole[:, 2:3, [0, 8]])


@pytest.mark.parametrize("method", ["attention_weights", "head_statistics"])
def test_tokens_that_do_not_fit_are_refused(method):
    layer = MultiHeadAttention(24, 4, dtype=F64, seed=0)
    look = getattr(layer, method)

    with pytest.raises(ValueError, match="query has shape"):
        look(TOKENS[..., :5])
    with pytest.raises(ValueError, match="key has shape"):
        look(TOKENS, MEMORY)
    with pytest.raises(TypeError, match="query has dtype float32; expected float64 like the layer"):
        look(TOKENS.astype(F32))
    with pytest.raises(
        TypeError, match=rf"{method}\(\) got an unexpected keyword argument 'causal'"
    ):
        look(TOKENS, causal=True)


# ---- the rotary embedding -----------------------------------------------------------------------


def turned(heads, positions, base, width, interleaved):
    """The same by complex numbers, pair by pair, in float64."""
    result = np.array(heads, F64)
    for i in range(width // 2):
        first, second = (2 * i, 2 * i + 1) if interleaved else (i, i + width // 2)
        angle = np.asarray(positions, F64) * base ** (-2 * i / width)
        pair = (result[..., first] + 1j * result[..., second]) * np.exp(1j * angle)
        result[..., first], result[..., second] = pair.real, pair.imag
    return result


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("head_width", "width"), [(8, None), (8, 4), (9, 6), (2, 2), (8, 0)])
@pytest.mark.parametrize("dtype", [F32, F64, *DTYPES_16])
def test_pairs_are_turned(dtype, head_width, width, interleaved):
    heads = np.random.default_rng(0).standard_normal((2, 3, 5, head_width)).astype(dtype)
    positions = np.array([[[0, 1, 7, 900, 4]], [[1000, 3, 2, 2, -6]]])
    options = {"base": 500.0, "width": width, "interleaved": interleaved}

    found = apply_rotary(heads, positions, **options)

    assert found.dtype == dtype and found.shape == heads.shape
    exact = turned(heads, positions, 500.0, head_width if width is None else width, interleaved)
    rounding = {2: 2.0**-8, 4: 4 * np.finfo(F32).eps, 8: 1e-12}[np.dtype(dtype).itemsize]
    np.testing.assert_allclose(found.astype(F64), exact, rtol=rounding, atol=rounding)


def test_features_beyond_the_width_keep_their_bits():
    heads = np.random.default_rng(0).standard_normal((5, 9)).astype(F32)

    assert_same_bits(apply_rotary(heads, width=4)[:, 4:], heads[:, 4:])
    assert not np.array_equal(apply_rotary(heads, width=4)[1:, :4], heads[1:, :4])


def test_scores_depend_on_distances_only():
    query, key = np.random.default_rng(0).standard_normal((2, 6, 16))
    scores = [
        apply_rotary(query, np.arange(6) + shift) @ apply_rotary(key, np.arange(6) + shift).T
        for shift in (0, 12345)
    ]

    np.testing.assert_allclose(scores[1], scores[0], rtol=0, atol=1e-10)


def test_positions_follow_each_other_when_not_given_and_make_new_axes():
    heads = np.random.default_rng(0).standard_normal((5, 8))

    assert_same_bits(apply_rotary(heads), apply_rotary(heads, range(5)))
    positions = np.arange(10).reshape(2, 5)
    both = apply_rotary(heads, positions)
    assert both.shape == (2, 5, 8)
    for i in range(2):
        assert_same_bits(both[i], apply_rotary(heads, positions[i]))


def test_angles_far_out_are_those_of_float64():
    heads, position = np.ones((1, 2), F32), 10_000_019

    found = apply_rotary(heads, [position])

    right = math.cos(position) - math.sin(position), math.cos(position) + math.sin(position)
    np.testing.assert_allclose(found[0], right, rtol=0, atol=4 * np.finfo(F32).eps)


def test_the_input_stays_as_it_is_and_may_be_read_only():
    heads = np.random.default_rng(0).standard_normal((2, 5, 8))
    heads.flags.writeable = False
    before = heads.copy()

    assert apply_rotary(heads).flags.writeable
    assert_same_bits(heads, before)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"heads": np.ones((3, 8), int)}, TypeError, "heads has dtype int64; expected float32"),
        ({"heads": np.ones(8)}, ValueError, r"heads has shape \(8,\); expected \(\.\.\., tokens"),
        ({"width": 3}, ValueError, "width is 3; expected an even number of at most 8"),
        ({"width": 10}, ValueError, "width is 10; expected an even number of at most 8"),
        ({"width": -2}, ValueError, "width is -2; expected an int of at least 0"),
        ({"heads": np.ones((3, 7))}, ValueError, "width is 7; expected an even number"),
        ({"base": 0}, ValueError, "base is 0.0; expected a finite number above 0"),
        ({"positions": [0, 1]}, ValueError, r"positions has shape \(2,\); expected .* \(3,\)"),
        ({"positions": [0.0, 1, 2]}, TypeError, "positions has dtype float64; expected integers"),
        ({"interleaved": "yes"}, TypeError, "interleaved is 'yes'; expected True or False"),
    ],
)
def test_wrong_arguments_are_named(arguments, error, message):
    with pytest.raises(error, match=message):
        apply_rotary(**{"heads": np.ones((3, 8))} | arguments)


def test_a_layer_with_it_decodes_as_it_reads():
    layer = MultiHeadAttention(24, 4, dtype=F64, seed=0, position=apply_rotary)
    whole = layer(TOKENS, is_causal=True)
    cache = layer.new_cache(2)

    parts = [layer(TOKENS[:, i : i + 1], cache=cache) for i in range(9)]

    np.testing.assert_allclose(np.concatenate(parts, axis=1), whole, rtol=0, atol=1e-13)
    assert mha_fast.layer.apply_rotary is apply_rotary
