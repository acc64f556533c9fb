"""Ranks, batches that broadcast, grouped heads, and axes of size 0."""

import numpy as np
import pytest
from _support import DTYPES, assert_attention_correct, assert_same_bits, normal_inputs

import mha_fast


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n_query", [2, 37])
def test_rank_2_is_one_head(n_query, dtype, isa):
    query, key, value = normal_inputs(dtype, n_head=1, n_kv_head=1, batch=(1,), n_query=n_query)
    whole, whole_lse = mha_fast.attention(query, key, value, return_lse=True)
    out, lse = mha_fast.attention(query[0, 0], key[0, 0], value[0, 0], return_lse=True)
    assert out.shape == (n_query, 12)
    assert lse.shape == (n_query,)
    assert_same_bits(out, whole[0, 0])
    assert_same_bits(lse, whole_lse[0, 0])


@pytest.mark.parametrize("batch", [(), (3,), (2, 3), (1, 2, 1, 2)])
def test_rank_3_and_more(batch, isa):
    out, lse = assert_attention_correct(*normal_inputs(np.float32, batch=batch))
    assert out.shape == (*batch, 4, 37, 12)
    assert lse.shape == (*batch, 4, 37)


def test_options_of_a_rank_2_call(isa):
    query, key, value = (x[0, 0] for x in normal_inputs(np.float64))
    mask = np.random.default_rng(1).standard_normal((37, 150))
    assert_attention_correct(query, key, value, mask, kv_lengths=90, query_offset="end",
                             window=(60, 2), sinks=[0.5], alibi_slopes=[0.01])  # fmt: skip


@pytest.mark.parametrize(
    ("query_batch", "key_batch", "value_batch"),
    [
        ((3,), (1,), (1,)),
        ((1,), (3,), (3,)),
        ((), (3,), (3,)),
        ((3,), (), ()),
        ((2, 1), (3,), (1, 3)),
        ((1,), (1,), (4,)),
        ((2, 1, 2), (3, 1), ()),
    ],
)
@pytest.mark.parametrize("n_query", [2, 37])
def test_batches_broadcast(query_batch, key_batch, value_batch, n_query, isa):
    query, _, _ = normal_inputs(np.float32, batch=query_batch, n_query=n_query)
    _, key, _ = normal_inputs(np.float32, batch=key_batch, seed=1)
    _, _, value = normal_inputs(np.float32, batch=value_batch, seed=2)
    assert_attention_correct(query, key, value, is_causal=True)


def test_per_sequence_options_broadcast_over_the_batch(isa):
    inputs = normal_inputs(np.float32, batch=(2, 3))
    assert_attention_correct(*inputs, kv_lengths=np.array([[40], [150]]), is_causal=True)
    assert_attention_correct(*inputs, kv_lengths=np.array([5, 150, 0]), query_offset="end",
                             is_causal=True)  # fmt: skip
    assert_attention_correct(*inputs, query_offset=np.array([[5, 10, 0], [1, 2, 3]]),
                             window=(9, 0))  # fmt: skip


@pytest.mark.parametrize("n_query", [1, 3, 37])
@pytest.mark.parametrize("n_kv_head", [1, 2, 3, 6])
def test_grouped_heads_equal_repeated_heads(n_kv_head, n_query, isa):
    query, key, value = normal_inputs(np.float64, n_head=6, n_kv_head=n_kv_head, n_query=n_query)
    grouped = mha_fast.attention(query, key, value)
    key, value = (np.repeat(x, 6 // n_kv_head, axis=1) for x in (key, value))
    np.testing.assert_allclose(grouped, mha_fast.attention(query, key, value), rtol=0, atol=1e-14)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("sizes", "shape"),
    [
        ({"n_query": 0}, (2, 4, 0, 12)),
        ({"batch": (0,)}, (0, 4, 37, 12)),
        ({"batch": (2, 0, 3)}, (2, 0, 3, 4, 37, 12)),
        ({"n_head": 0, "n_kv_head": 0}, (2, 0, 37, 12)),
        ({"n_head": 0, "n_kv_head": 3}, (2, 0, 37, 12)),
        ({"value_width": 0}, (2, 4, 37, 0)),
        ({"value_width": 0, "head_width": 0}, (2, 4, 37, 0)),
        ({"n_query": 0, "n_key": 0}, (2, 4, 0, 12)),
    ],
)
def test_empty_result(sizes, shape, dtype, isa):
    out, lse = mha_fast.attention(*normal_inputs(dtype, **sizes), return_lse=True)
    assert out.shape == shape
    assert out.dtype == dtype
    assert lse.shape == shape[:-1]


@pytest.mark.parametrize("dtype", DTYPES)
def test_lse_without_any_value_feature(dtype, isa):
    assert_attention_correct(*normal_inputs(dtype, value_width=0))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n_query", [1, 37])
@pytest.mark.parametrize("sinks", [None, [0.5, -1.0, 0.0, 3.0]])
def test_no_keys_at_all(sinks, n_query, dtype, isa):
    inputs = normal_inputs(dtype, n_query=n_query, n_key=0)
    out, lse = mha_fast.attention(*inputs, sinks=sinks, return_lse=True)
    assert_same_bits(out, np.zeros((2, 4, n_query, 12), dtype))
    right = np.reshape(-np.inf if sinks is None else sinks, (-1, 1))
    np.testing.assert_array_equal(lse, np.broadcast_to(right, lse.shape).astype(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n_query", [1, 37])
@pytest.mark.parametrize("scale", [None, 0.0, 3.0])
def test_empty_dot_product_is_zero(scale, n_query, dtype, isa):
    inputs = normal_inputs(dtype, head_width=0, n_query=n_query)
    out, lse = mha_fast.attention(*inputs, scale=scale, return_lse=True)
    mean = inputs[2].astype(np.float64).mean(axis=-2, keepdims=True).repeat(2, axis=1)
    np.testing.assert_allclose(out, np.broadcast_to(mean, out.shape), rtol=0, atol=1e-6)
    np.testing.assert_allclose(lse, np.log(150), rtol=1e-6)


def test_result_is_a_new_contiguous_array(isa):
    query, key, value = normal_inputs(np.float32)
    out = mha_fast.attention(query.swapaxes(0, 1).copy().swapaxes(0, 1), key, value)
    assert type(out) is np.ndarray
    assert out.flags.c_contiguous
    assert out.flags.owndata or out.base.flags.owndata
