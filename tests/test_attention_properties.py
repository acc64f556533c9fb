"""Random shapes with random options, and laws that hold whatever the formula's details."""

import numpy as np
import pytest
from _support import DTYPES, assert_attention_correct, assert_same_bits, normal_inputs
from hypothesis import given
from hypothesis import strategies as st

import mha_fast


@st.composite
def calls(draw):
    """Inputs and options of one call that keeps the contract."""
    group, n_kv_head = draw(st.integers(1, 5)), draw(st.integers(1, 3))
    batch = tuple(draw(st.lists(st.integers(1, 3), max_size=2)))
    sizes = {
        "batch": batch,
        "n_head": group * n_kv_head,
        "n_kv_head": n_kv_head,
        "n_query": draw(st.one_of(st.integers(1, 9), st.integers(1, 150))),
        "n_key": draw(st.one_of(st.integers(0, 9), st.integers(0, 150), st.integers(500, 530))),
        "head_width": draw(st.integers(0, 40)),
        "value_width": draw(st.integers(1, 40)),
    }
    seed = draw(st.integers(0, 2**32 - 1))
    inputs = normal_inputs(draw(st.sampled_from(DTYPES)), **sizes, seed=seed)
    query, key, value = _one_broadcast_batch(draw, inputs)
    options = _options(draw, np.random.default_rng(seed), **sizes)
    return (query, key, value), options


def _one_broadcast_batch(draw, inputs):
    """Perhaps take one operand's first sequence for all; at least one keeps the full batch."""
    inputs = list(inputs)
    if inputs[0].ndim > 3 and draw(st.booleans()):
        which = draw(st.integers(0, 2))
        inputs[which] = inputs[which][:1]
    return inputs


def _options(draw, rng, *, batch, n_head, n_query, n_key, **_):
    bound = st.one_of(st.none(), st.integers(0, 200))
    offset = st.integers(-20, n_key + 20)
    choices = {
        "attn_mask": st.sampled_from(["bool", "float"]),
        "is_causal": st.booleans(),
        "window": st.tuples(bound, bound),
        "query_offset": st.one_of(st.just("end"), st.just("each"), offset),
        "kv_lengths": st.sampled_from(["each", "one"]),
        "scale": st.floats(-2, 2, width=32),
        "softcap": st.floats(0.5, 50, width=32),
        "alibi_slopes": st.sampled_from([(n_head,), (*batch, n_head)]),
        "sinks": st.just((n_head,)),
        "head_mask": st.sampled_from([(n_head,), (*batch, n_head)]),
        "num_threads": st.integers(1, 3),
    }
    names = draw(st.lists(st.sampled_from(sorted(choices)), unique=True))
    options = {name: draw(choices[name]) for name in names}
    for name in {"alibi_slopes", "sinks", "head_mask"} & options.keys():
        options[name] = rng.standard_normal(options[name])
    if "alibi_slopes" in options:
        options["alibi_slopes"] *= (
            0.05  # keeps logits small: test_attention_accuracy.py has large ones
        )
    if options.get("query_offset") == "each":
        options["query_offset"] = rng.integers(-20, n_key + 20, batch)
    if "kv_lengths" in options:
        shape = batch if options["kv_lengths"] == "each" else ()
        options["kv_lengths"] = rng.integers(0, n_key + 1, shape)
    if "attn_mask" in options:
        full = (*batch, n_head, n_query, n_key)
        kept = [n if draw(st.booleans()) else 1 for n in full]
        mask = rng.random(kept) < draw(st.sampled_from([0.02, 0.5, 0.98]))
        if options["attn_mask"] == "float":
            mask = np.where(mask, rng.standard_normal(kept), -np.inf)
        options["attn_mask"] = mask
    return options


@given(call=calls())
def test_any_call_agrees_with_the_reference(call, isa):
    inputs, options = call
    assert_attention_correct(*inputs, **options)


@given(call=calls(), order=st.permutations(range(3)))
def test_any_call_is_the_same_when_its_operands_lie_differently(call, order):
    inputs, options = call
    right = mha_fast.attention(*inputs, **options)
    axes = (-3 + np.array(order)).tolist()
    moved = [np.moveaxis(np.moveaxis(x, [-3, -2, -1], axes).copy(), axes, [-3, -2, -1])
             for x in inputs]  # fmt: skip
    assert_same_bits(mha_fast.attention(*moved, **options), right)


SHAPES = {"tiles": (37, 150), "few rows": (2, 600)}


@pytest.fixture(params=SHAPES)
def inputs(request):
    n_query, n_key = SHAPES[request.param]
    return normal_inputs(np.float64, n_query=n_query, n_key=n_key)


def test_order_of_the_keys_does_not_matter(inputs, isa):
    query, key, value = inputs
    order = np.random.default_rng(0).permutation(key.shape[-2])
    mask = np.random.default_rng(1).standard_normal((query.shape[-2], key.shape[-2]))
    right = mha_fast.attention(query, key, value, mask)
    out = mha_fast.attention(query, key[..., order, :], value[..., order, :], mask[:, order])
    np.testing.assert_allclose(out, right, rtol=0, atol=1e-14)


def test_constant_values_come_back(inputs, isa):
    query, key, value = inputs
    value[...] = np.arange(12) - 3.5
    out = mha_fast.attention(query, key, value, softcap=2.0, window=(50, 50))
    reached = mha_fast.attention(query, key, np.ones_like(value), window=(50, 50)) > 0
    np.testing.assert_allclose(out, np.where(reached, np.arange(12) - 3.5, 0), atol=1e-13)


def test_output_is_linear_in_the_values(inputs, isa):
    query, key, value = inputs
    other = value[..., ::-1].copy()
    sum_of_both = mha_fast.attention(query, key, value) + mha_fast.attention(query, key, other)
    out = mha_fast.attention(query, key, value + other)
    np.testing.assert_allclose(out, sum_of_both, rtol=0, atol=1e-14)


def test_parts_of_the_keys_join_by_their_lse(inputs, isa):
    query, key, value = inputs
    whole, whole_lse = mha_fast.attention(query, key, value, return_lse=True)
    parts = [slice(0, 70), slice(70, 71), slice(71, None)]
    outs, lses = zip(
        *(mha_fast.attention(query, key[..., p, :], value[..., p, :], return_lse=True)
          for p in parts),
        strict=True,
    )  # fmt: skip
    lse = np.logaddexp.reduce(lses)
    out = sum(np.exp(part_lse - lse)[..., None] * part for part_lse, part in
              zip(lses, outs, strict=True))  # fmt: skip
    np.testing.assert_allclose(lse, whole_lse, rtol=0, atol=1e-13)
    np.testing.assert_allclose(out, whole, rtol=0, atol=1e-13)


def test_one_key_returns_its_value(isa):
    query, key, value = normal_inputs(np.float64, n_key=1)
    out, lse = mha_fast.attention(query, key, value, return_lse=True)
    assert_same_bits(out, np.broadcast_to(value.repeat(2, axis=1), out.shape))
    score = (query @ key.repeat(2, axis=1).swapaxes(-1, -2))[..., 0] / np.sqrt(20)
    np.testing.assert_allclose(lse, score, rtol=1e-13, atol=1e-14)


def test_sink_is_a_key_of_value_zero(inputs, isa):
    query, key, value = inputs
    sinks = np.array([0.5, -1.0, 2.0, 0.0])
    out, lse = mha_fast.attention(query, key, value, sinks=sinks, return_lse=True)
    key, value = (np.pad(x, [(0, 0), (0, 0), (0, 1), (0, 0)]) for x in (key, value))
    mask = np.zeros((4, 1, key.shape[-2]))
    mask[:, 0, -1] = sinks
    right, right_lse = mha_fast.attention(query, key, value, mask, return_lse=True)
    np.testing.assert_allclose(out, right, rtol=0, atol=1e-14)
    np.testing.assert_allclose(lse, right_lse, rtol=0, atol=1e-14)
