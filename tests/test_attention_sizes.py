"""Sizes around the edges of every tile, block and split of the kernel.

A tile has 4 to 64 queries in a vector group and 256 in all, a block 64 keys, a split of the
path for few rows 512 keys; features come in vectors of 2 to 16. Each axis is walked past those
numbers by one in both directions, while the others stay small and odd.
"""

import numpy as np
import pytest
from _support import DTYPES, assert_attention_correct, normal_inputs

FEATURES = (0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 13, 15, 16, 17, 24, 31, 32, 33, 48, 63, 64, 65, 80,
            96, 127, 128, 129, 256, 257)  # fmt: skip
QUERIES = (1, 2, 3, 4, 5, 7, 8, 9, 11, 12, 13, 15, 16, 17, 23, 24, 25, 31, 32, 33, 47, 48, 49, 63,
           64, 65, 95, 96, 97, 127, 128, 129, 255, 256, 257, 513)  # fmt: skip
KEYS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 13, 63, 64, 65, 127, 128, 129, 191, 192, 193, 257)
SPLITS = (511, 512, 513, 575, 577, 1023, 1024, 1025, 1537)
SMALL = {"batch": (1,), "n_head": 2, "n_kv_head": 1, "head_width": 5, "value_width": 7}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n_query", QUERIES)
def test_number_of_queries(n_query, dtype, isa):
    inputs = normal_inputs(dtype, **SMALL | {"n_query": n_query, "n_key": 67})
    assert_attention_correct(*inputs)
    assert_attention_correct(*inputs, is_causal=True, query_offset="end")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n_key", KEYS + SPLITS)
@pytest.mark.parametrize("n_query", [1, 2, 19])
def test_number_of_keys(n_query, n_key, dtype, isa):
    inputs = normal_inputs(dtype, **SMALL | {"n_query": n_query, "n_key": n_key})
    assert_attention_correct(*inputs)
    assert_attention_correct(*inputs, window=(n_key // 3, 1), query_offset=n_key // 2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_width", FEATURES)
@pytest.mark.parametrize("n_query", [1, 9])
def test_head_width(n_query, head_width, dtype, isa):
    sizes = SMALL | {"n_query": n_query, "n_key": 70, "head_width": head_width}
    assert_attention_correct(*normal_inputs(dtype, **sizes))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value_width", FEATURES)
@pytest.mark.parametrize("n_query", [1, 9])
def test_value_width(n_query, value_width, dtype, isa):
    sizes = SMALL | {"n_query": n_query, "n_key": 70, "value_width": value_width}
    assert_attention_correct(*normal_inputs(dtype, **sizes))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 7, 8, 9, 16, 17])
@pytest.mark.parametrize("n_query", [1, 2, 4, 15, 31])
def test_group_of_heads(n_query, group, dtype, isa):
    sizes = SMALL | {"n_head": 2 * group, "n_kv_head": 2, "n_query": n_query, "n_key": 66}
    inputs = normal_inputs(dtype, **sizes)
    assert_attention_correct(*inputs)
    assert_attention_correct(*inputs, is_causal=True, query_offset=20, sinks=np.arange(2 * group))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n_key", [63, 64, 65, 128, 129])
@pytest.mark.parametrize("n_query", [7, 16, 17, 64, 65, 97, 257])
def test_causal_edge_against_tile_edges(n_query, n_key, dtype, isa):
    inputs = normal_inputs(dtype, **SMALL | {"n_query": n_query, "n_key": n_key})
    assert_attention_correct(*inputs, is_causal=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n_query", [1, 8, 40])
@pytest.mark.parametrize("length", [0, 1, 63, 64, 65, 128, 129, 511, 512, 513, 600])
def test_length_against_block_edges(length, n_query, dtype, isa):
    inputs = normal_inputs(dtype, **SMALL | {"n_query": n_query, "n_key": 600})
    assert_attention_correct(*inputs, kv_lengths=np.array([length]))


@pytest.mark.parametrize("dtype", DTYPES)
def test_wide_heads(dtype, isa):
    sizes = SMALL | {"n_query": 20, "n_key": 70, "head_width": 1031, "value_width": 1033}
    assert_attention_correct(*normal_inputs(dtype, **sizes))


@pytest.mark.parametrize("dtype", DTYPES)
def test_many_small_sequences(dtype, isa):
    sizes = SMALL | {"batch": (11, 13), "n_query": 3, "n_key": 5}
    assert_attention_correct(*normal_inputs(dtype, **sizes))
