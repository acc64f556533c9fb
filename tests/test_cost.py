"""Counts of parameters, multiply-adds and bytes; the variance of a scaled score."""

import dataclasses

import numpy as np
import pytest

from mha_fast import KVCache, attention
from mha_fast.cost import Part, chunk_cost, layer_cost, score_variance
from mha_fast.layer import MultiHeadAttention

# ---- known figures ----------------------------------------------------------------------------


@pytest.mark.parametrize("num_heads", [1, 2, 8, 512])
def test_heads_share_out_the_parameters_of_one(num_heads):
    d = 512
    without = layer_cost(d, num_heads, bias=False, output_projection=False)
    assert without.parameters == 3 * d**2
    assert without.output_projection == Part()
    assert layer_cost(d, num_heads, bias=False).parameters == 4 * d**2
    assert layer_cost(d, num_heads).parameters == 4 * d**2 + 4 * d
    assert layer_cost(d, num_heads, output_projection=False).parameters == 3 * d**2 + 3 * d


@pytest.mark.parametrize("num_heads", [1, 8])
def test_heads_share_out_the_multiply_adds_of_one(num_heads):
    cost = layer_cost(512, num_heads, n_query=100)
    assert cost.scores.multiply_adds == 5_120_000
    assert cost.values.multiply_adds == 5_120_000
    assert cost.query_projection.multiply_adds == 100 * 512 * 512


def test_layer_of_bert_base():
    cost = layer_cost(768, 12, bias=False)
    assert cost.parameters == 2_359_296
    assert cost.head_width == 64


def test_four_heads_in_four_features_have_width_and_scale_one():
    cost = layer_cost(4, 4)
    assert (cost.head_width, cost.scale) == (1, 1.0)
    assert layer_cost(4, 1).scale == 0.5


# ---- against what is counted ------------------------------------------------------------------

SIZES = {
    "plain": {},
    "grouped": {"num_kv_heads": 2},
    "all widths": {"head_width": 5, "value_width": 7, "kdim": 10, "vdim": 14, "num_kv_heads": 2},
    "no bias": {"bias": False, "value_width": 5},
}


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_parameters_are_those_of_the_layer(sizes, dtype):
    layer, cost = (
        MultiHeadAttention(12, 4, **sizes, dtype=dtype),
        layer_cost(12, 4, **sizes, dtype=dtype),
    )
    assert cost.parameters == layer.n_parameter
    assert cost.total.parameter_bytes == layer.nbytes


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_work_and_results_are_those_of_loops_over_every_number(sizes):
    """Counted element by element from the shapes of the arrays that a layer makes."""
    layer = MultiHeadAttention(12, 4, **sizes)
    query = np.zeros((3, 9, 12), np.float32)
    keys = np.zeros((3, 13, layer.kdim), np.float32), np.zeros((3, 13, layer.vdim), np.float32)
    heads = (layer.project_query(query), *layer.project_key_value(*keys))
    cost = layer_cost(12, 4, 9, 13, n_batch=3, **sizes)
    parts = (cost.query_projection, cost.key_projection, cost.value_projection)
    for part, made, width_in in zip(parts, heads, (12, layer.kdim, layer.vdim), strict=True):
        assert part.multiply_adds == made.size * width_in
        assert part.result_bytes == made.nbytes
    scores = 3 * 4 * 9 * 13
    assert cost.scores == Part(0, scores * layer.head_width, 0, 4 * scores)
    assert cost.values.multiply_adds == scores * layer.value_width
    gathered = 3 * 9 * 4 * layer.value_width
    assert cost.values.result_bytes == 4 * gathered
    assert cost.output_projection.multiply_adds == gathered * 12
    assert cost.output_projection.result_bytes == query.nbytes


@pytest.mark.parametrize("dtype", [np.float16, np.float64])
def test_cache_is_as_large_as_a_full_one(dtype):
    cost = layer_cost(12, 4, 1, 13, n_batch=3, num_kv_heads=2, value_width=5, dtype=dtype)
    assert cost.cache.result_bytes == KVCache(3, 2, 3, 5, dtype=dtype, capacity=13).nbytes


def test_cached_tokens_are_not_projected_again():
    whole, step = layer_cost(12, 4, 1, 100), layer_cost(12, 4, 1, n_cached=99)
    assert step.key_projection.multiply_adds == step.value_projection.multiply_adds == 12 * 12
    assert whole.key_projection.multiply_adds == 100 * 12 * 12
    assert (step.scores, step.values, step.cache) == (whole.scores, whole.values, whole.cache)
    assert step.parameters == whole.parameters


# ---- the record -------------------------------------------------------------------------------


def test_total_is_the_sum_of_all_parts_but_the_cache():
    cost = layer_cost(12, 4, 9, 13, kdim=10)
    parts = [getattr(cost, field.name) for field in dataclasses.fields(cost)]
    parts = [x for x in parts if isinstance(x, Part) and x is not cost.cache]
    assert len(parts) == 6
    for field in dataclasses.fields(Part):
        assert getattr(cost.total, field.name) == sum(getattr(x, field.name) for x in parts)
    assert cost.multiply_adds == cost.total.multiply_adds
    assert cost.projections.parameters == cost.parameters
    assert cost.projections.multiply_adds < cost.multiply_adds


def test_record_cannot_be_changed():
    cost = layer_cost(12, 4)
    with pytest.raises(dataclasses.FrozenInstanceError):
        cost.head_width = 5
    with pytest.raises(dataclasses.FrozenInstanceError):
        cost.scores.parameters = 5


def test_record_prints_as_a_table():
    lines = str(layer_cost(512, 8, n_query=100, bias=False)).splitlines()
    assert len({len(line) for line in lines}) == 1
    names = [line[:17].strip() for line in lines]
    assert names == ["", "query projection", "key projection", "value projection", "scores",
                     "values", "output projection", "total", "cache"]  # fmt: skip
    assert lines[4].split() == ["scores", "0", "5,120,000", "0", "320,000"]
    assert lines[7].split()[:2] == ["total", "1,048,576"]


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"num_heads": 5}, ValueError, "embed_dim is 12"),
        ({"n_query": -1}, ValueError, "n_query is -1"),
        ({"n_key": 2.0}, TypeError, "n_key is 2.0"),
        ({"n_batch": -1}, ValueError, "n_batch is -1"),
        ({"n_cached": 5, "n_key": 4}, ValueError, "n_cached is 5; expected at most n_key, 4"),
        ({"bias": 0.5}, TypeError, "bias is 0.5"),
        ({"output_projection": "W_O"}, TypeError, "output_projection is 'W_O'"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(arguments, error, message):
    with pytest.raises(error, match=message):
        layer_cost(**({"embed_dim": 12, "num_heads": 4} | arguments))


# ---- variance ---------------------------------------------------------------------------------


@pytest.mark.parametrize("sigma", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("head_width", [1, 2, 64, 512])
def test_variance_of_a_scaled_score_does_not_depend_on_the_width(head_width, sigma):
    n_sample = 40_000
    variance = score_variance(head_width, sigma=sigma, n_sample=n_sample, seed=1)
    standard_error = sigma**4 * np.sqrt((2 + 6 / head_width) / n_sample)
    assert abs(variance - sigma**4) <= 4 * standard_error


def test_variance_has_the_spread_that_is_promised():
    """Over many seeds; 40 variances know their own spread to about a ninth."""
    for head_width in (1, 16):
        found = [score_variance(head_width, n_sample=2000, seed=seed) for seed in range(40)]
        promised = np.sqrt((2 + 6 / head_width) / 2000)
        assert 0.6 * promised < np.std(found) < 1.4 * promised


def test_variance_is_that_of_the_samples_whatever_the_blocks(monkeypatch):
    def variance():
        return score_variance(7, n_sample=1000, seed=3)

    whole = variance()
    rng = np.random.default_rng(3)
    q, k = rng.normal(0, 1, (2, 1000, 7))
    np.testing.assert_allclose(whole, np.var((q * k).sum(axis=1) / np.sqrt(7), ddof=1), rtol=1e-12)
    monkeypatch.setattr("mha_fast.cost._BLOCK_BYTES", 2 * 7 * 8 * 300)  # the last block is smaller
    assert abs(variance() - 1) <= 5 * np.sqrt((2 + 6 / 7) / 1000)
    assert variance() != whole


def test_seed_decides_the_samples():
    assert score_variance(3, n_sample=100, seed=1) == score_variance(3, n_sample=100, seed=1)
    assert score_variance(3, n_sample=100, seed=1) != score_variance(3, n_sample=100, seed=2)
    assert score_variance(3, sigma=0, n_sample=100) == 0


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"head_width": 0}, ValueError, "head_width is 0"),
        ({"n_sample": 1}, ValueError, "n_sample is 1; expected at least 2"),
        ({"sigma": -1.0}, ValueError, "sigma is -1.0"),
        ({"sigma": np.nan}, ValueError, "sigma is nan"),
        ({"sigma": "1"}, TypeError, "sigma is '1'"),
    ],
)
def test_samples_that_cannot_be_drawn_are_refused(arguments, error, message):
    with pytest.raises(error, match=message):
        score_variance(**({"head_width": 4} | arguments))


# ---- chunks -------------------------------------------------------------------------------------


def test_chunk_cost_counts_what_the_arrays_hold():
    rng = np.random.default_rng(0)
    query = rng.standard_normal((2, 6, 7, 5)).astype(np.float16)
    key, value = (rng.standard_normal((2, 3, 11, n)).astype(np.float16) for n in (5, 4))
    out, lse = attention(query, key, value, return_lse=True)

    found = chunk_cost(7, 11, 5, 4, n_head=6, n_kv_head=3, n_batch=2, dtype=np.float16)

    assert found.query_bytes == query.nbytes
    assert found.key_bytes == key.nbytes
    assert found.value_bytes == value.nbytes
    assert found.input_bytes == query.nbytes + key.nbytes + value.nbytes
    assert found.out_bytes == out.nbytes
    assert found.part_bytes == out.astype(np.float32).nbytes + lse.nbytes
    assert found.multiply_adds == 2 * 6 * 7 * 11 * (5 + 4)
    assert chunk_cost(3, 2, 4, dtype=np.float64).part_bytes == 3 * (4 + 1) * 8


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"n_query": -1}, ValueError, "n_query is -1"),
        ({"n_key": 1.5}, TypeError, "n_key is 1.5"),
        ({"n_head": 5, "n_kv_head": 2}, ValueError, "n_head is 5; expected a multiple"),
        ({"dtype": np.int32}, TypeError, "dtype is"),
    ],
)
def test_chunk_cost_refuses_sizes_that_do_not_fit(change, error, message):
    with pytest.raises(error, match=message):
        chunk_cost(**({"n_query": 1, "n_key": 1, "head_width": 1} | change))
