"""Values near the largest number of their type: their mean is in range even where their sum is not."""

import numpy as np
import pytest
from _dtypes import BFLOAT16, NEEDS_BFLOAT16
from _support import assert_same_bits, normal_inputs

import mha_fast
from mha_fast import reference

LARGE = {
    np.float32: (1e38, 1e-5),
    np.float64: (1e308, 1e-12),
    BFLOAT16: (1e38, 1e-2),
}
DTYPES = [
    np.float32,
    np.float64,
    pytest.param(BFLOAT16, marks=NEEDS_BFLOAT16, id="bfloat16"),
]
# few rows; one that fills some tiles and leaves a rest; enough for a matrix unit
N_QUERY, N_KEY = (1, 8, 20, 131, 300), (4, 70, 1300)


def _equal_rows(dtype, n_query, n_key):
    """Every query sees all keys alike; the values are large but for the first feature."""
    query, key = (np.zeros((2, n, 64), dtype) for n in (n_query, n_key))
    value = np.full((2, n_key, 33), LARGE[dtype][0], dtype)
    value[..., 0] = 1
    return query, key, value


@pytest.mark.parametrize("n_key", N_KEY)
@pytest.mark.parametrize("n_query", N_QUERY)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_mean_of_large_values_is_finite(dtype, n_query, n_key, isa):
    inputs = _equal_rows(dtype, n_query, n_key)
    for options in ({}, {"is_causal": True}, {"sinks": [1.0, 2.0]}, {"head_mask": [1.0, 0.5]}):
        out = mha_fast.attention(*inputs, **options).astype(np.float64)
        right = reference.attention(*inputs, **options)
        np.testing.assert_allclose(out, right, rtol=LARGE[dtype][1])


@pytest.mark.parametrize("n_query", [3, 20, 300])
def test_other_rows_keep_their_bits(n_query, isa):
    """Rows whose sums are in range do not notice that others are not."""
    query, key, value = normal_inputs(
        np.float32, batch=(), n_head=2, n_kv_head=2, n_query=n_query, n_key=300
    )
    mask = np.ones((n_query, 300), bool)
    mask[1:, :4] = False  # only query 0 sees keys 0 to 3
    alone = mha_fast.attention(query, key, value, mask)
    value[:, :4] = 3e38
    out = mha_fast.attention(query, key, value, mask)
    assert_same_bits(out[:, 1:], alone[:, 1:])
    np.testing.assert_allclose(
        out[:, 0], reference.attention(query, key, value, mask)[:, 0], rtol=1e-5
    )


@pytest.mark.parametrize("n_query", [3, 20, 300])
@pytest.mark.parametrize("visible", [np.inf, np.nan])
def test_what_is_not_finite_still_shows(visible, n_query, isa):
    query, key, value = normal_inputs(
        np.float32, batch=(), n_head=1, n_kv_head=1, n_query=n_query, n_key=100
    )
    value[0, 5, 3] = visible
    with np.errstate(invalid="ignore"):
        right = reference.attention(query, key, value)
    out = mha_fast.attention(query, key, value)
    np.testing.assert_array_equal(np.isfinite(out), np.isfinite(right))
    np.testing.assert_allclose(out, right, rtol=1e-4, atol=1e-5)
