"""Dropout: which weights are kept, on every path, and that both directions agree."""

import numpy as np
import pytest
from _backward import assert_gradients_correct
from _dtypes import DTYPES_16
from _support import DTYPES, assert_attention_correct, assert_same_bits, normal_inputs

import mha_fast
from mha_fast import reference

SEED = 0xFEDCBA9876543210
# Both paths; keys that cross blocks, splits and the generator's groups of four.
SHAPES = {
    "tiles": {"n_query": 70, "n_key": 150},
    "few rows": {"n_query": 2, "n_key": 1100},
    "one query": {"n_query": 1, "n_key": 3},
}


@pytest.mark.parametrize("dtype", [*DTYPES, *DTYPES_16])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_weights_kept_are_those_of_the_mask(shape, dtype, isa):
    """With the identity as values the output is the matrix of weights."""
    query, key, _ = normal_inputs(dtype, **SHAPES[shape])
    n_key = key.shape[-2]
    value = np.broadcast_to(np.eye(n_key, dtype=dtype), (2, 2, n_key, n_key))
    options = {"dropout_p": 0.3, "dropout_seed": SEED}

    kept = mha_fast.attention(query, key, value, **options) != 0

    present = mha_fast.attention(query, key, value) != 0  # float16 may lose the smallest
    mask = reference.dropout_mask(SEED, kept.shape, 0.3)
    np.testing.assert_array_equal(kept[present], mask[present])
    assert not kept[~present].any()
    assert 0.65 < mask.mean() < 0.75 or n_key == 3


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    "options",
    [{}, {"is_causal": True, "query_offset": "end"}, {"window": (37, 3), "query_offset": 51},
     {"kv_lengths": [3, 2], "sinks": [0.5, 1.0, -1.0, 0.0], "head_mask": [1, 0, 0.5, 2]}],
    ids=str,
)  # fmt: skip
def test_output_and_lse_are_those_of_the_formula(shape, dtype, options, isa):
    inputs = normal_inputs(dtype, **SHAPES[shape])
    assert_attention_correct(*inputs, dropout_p=0.6, dropout_seed=SEED, **options)


@pytest.mark.parametrize("shape", SHAPES)
def test_lse_is_that_without_dropout(shape, isa):
    inputs = normal_inputs(np.float32, **SHAPES[shape])
    _, right = mha_fast.attention(*inputs, return_lse=True)
    _, lse = mha_fast.attention(*inputs, return_lse=True, dropout_p=0.5, dropout_seed=1)
    if isa.startswith("amx"):  # the matrix unit does not compute with dropout
        np.testing.assert_allclose(lse, right, rtol=0, atol=2e-6)
    else:
        assert_same_bits(lse, right)


def test_nothing_is_dropped_where_p_is_0(isa):
    inputs = normal_inputs(np.float32)
    right = mha_fast.attention(*inputs)
    assert_same_bits(mha_fast.attention(*inputs, dropout_p=0.0), right)
    assert_same_bits(mha_fast.attention(*inputs, dropout_p=0.0, dropout_seed=3), right)
    assert_same_bits(mha_fast.attention(*inputs, dropout_p=1e-12, dropout_seed=3), right)


@pytest.mark.parametrize("n_query", [2, 300])
def test_same_bits_for_any_number_of_threads(n_query, isa):
    inputs = normal_inputs(np.float32, n_query=n_query, n_key=1300)
    options = {"dropout_p": 0.4, "dropout_seed": SEED}
    right = mha_fast.attention(*inputs, num_threads=1, **options)
    for num_threads in (2, 3, 7):
        out = mha_fast.attention(*inputs, num_threads=num_threads, **options)
        assert_same_bits(out, right)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_the_backward_pass_drops_the_same_weights(shape, dtype, isa):
    """The factor of the weights kept is there in both directions."""
    call = dict(zip(("query", "key", "value"), normal_inputs(dtype, **SHAPES[shape]), strict=True))
    call |= {"dropout_p": 0.35, "dropout_seed": 2**63, "head_mask": np.array([1.0, 0.5, 2.0, 1.0])}
    assert_gradients_correct(call)


def test_packed_sequences_count_as_batch_entries(isa):
    rng = np.random.default_rng(0)
    cu_q, cu_k = [0, 70, 70, 72, 100], [0, 150, 160, 760, 770]
    query, key, value = (rng.standard_normal((n, 4, 8)) for n in (100, 770, 770))
    options = {"dropout_p": 0.5, "dropout_seed": SEED}
    out, lse = mha_fast.attention_varlen(query, key, value, cu_q, cu_k, return_lse=True, **options)
    right = reference.attention_varlen(query, key, value, cu_q, cu_k, **options)
    np.testing.assert_allclose(out, right, rtol=0, atol=1e-13)

    call = (np.ones_like(out), query, key, value, out, lse, cu_q, cu_k)
    found = mha_fast.attention_varlen_backward(*call, **options)
    for grad, right_grad in zip(
        found, reference.attention_varlen_backward(*call, **options), strict=True
    ):
        np.testing.assert_allclose(grad, right_grad, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"dropout_p": 0.5}, ValueError, "dropout_seed is None"),
        ({"dropout_p": -0.1, "dropout_seed": 0}, ValueError, "dropout_p is -0.1"),
        ({"dropout_p": 1, "dropout_seed": 0}, ValueError, "dropout_p is 1.0"),
        ({"dropout_p": np.nan, "dropout_seed": 0}, ValueError, "dropout_p is nan"),
        ({"dropout_p": "half", "dropout_seed": 0}, TypeError, "dropout_p is 'half'"),
        (
            {"dropout_p": 0.5, "dropout_seed": 2**64},
            ValueError,
            "dropout_seed is 18446744073709551616",
        ),
        ({"dropout_p": 0.5, "dropout_seed": -1}, ValueError, "dropout_seed is -1"),
        ({"dropout_p": 0.5, "dropout_seed": 0.5}, TypeError, "dropout_seed is 0.5"),
    ],
    ids=str,
)
def test_wrong_arguments(options, error, words):
    inputs = normal_inputs(np.float32)
    with pytest.raises(error, match=f"^{words}; expected"):
        mha_fast.attention(*inputs, **options)
