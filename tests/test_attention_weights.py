"""attention_weights(): the probabilities, all of them or those of some queries and heads."""

import functools
import itertools
import sys

import numpy as np
import pytest
from _dtypes import (
    ALL_DTYPES,
    DTYPES_16,
    assert_near,
    assert_rounded_once,
    expected_widened,
    half_ulp,
    widened,
)
from _options import N_BATCH, N_HEAD, OPTIONS, SCORE_ERRORS, arguments_of, zeros
from _support import DTYPES, assert_same_bits, normal_inputs, run_python, weight_rounding

import mha_fast
from mha_fast import reference

INF, NAN = np.inf, np.nan
# One query takes a path of its own in attention(), and the second crosses a split of keys there.
SIZES = {"tiles": {"n_query": 37, "n_key": 150}, "one query": {"n_query": 1, "n_key": 520}}


def _query_and_key(dtype, **sizes):
    return normal_inputs(dtype, **SIZES["tiles"] | sizes)[:2]


def _right(query, key, attn_mask=None, **options):
    """The output of attention over the identity as values: the weights, and their limits."""
    one = np.eye(key.shape[-2], dtype=key.dtype)
    value = np.broadcast_to(one, (*key.shape[:-2], *one.shape))
    return expected_widened(query, key, value, attn_mask, **options)


@functools.cache
def _case(names, dtype, size):
    """Inputs, options and the right answer; kept, since every instruction set asks for them."""
    sizes = SIZES[size]
    query, key = _query_and_key(dtype, batch=(N_BATCH,), n_head=N_HEAD, **sizes)
    options = arguments_of(names, np.float64 if dtype == np.float64 else np.float32, **sizes)
    return query, key, options, _right(query, key, **options)


# ---- options ------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", ALL_DTYPES)
@pytest.mark.parametrize("names", [(), *zip(OPTIONS)], ids=" + ".join)
def test_option_alone(names, dtype, size, isa):
    query, key, options, right = _case(names, dtype, size)
    weights, lse = mha_fast.attention_weights(query, key, **options, return_lse=True)
    assert_rounded_once((weights, lse), right, dtype)
    assert (weights[right.out == 0] == 0).all()  # what is excluded has no weight at all
    assert_same_bits(mha_fast.attention_weights(query, key, **options), weights)


def _pairs():
    for pair in itertools.combinations(OPTIONS, 2):
        if arguments_of(pair, np.float32, 2, 3) is not None:
            yield pair


@pytest.mark.parametrize("pair", list(_pairs()), ids=" + ".join)
def test_pair_of_options(pair, isa):
    query, key, options, right = _case(pair, np.float32, "tiles")
    result = mha_fast.attention_weights(query, key, **options, return_lse=True)
    assert_rounded_once(result, right, np.float32)
    assert (result[0][right.out == 0] == 0).all()


@pytest.mark.parametrize("dtype", ALL_DTYPES)
def test_all_options_together(dtype, isa):
    names = ("float mask", "causal", "window", "offset per sequence", "lengths", "scale",
             "softcap", "alibi", "sinks", "head mask")  # fmt: skip
    query, key, options, right = _case(names, dtype, "tiles")
    result = mha_fast.attention_weights(query, key, **options, return_lse=True)
    assert_rounded_once(result, right, dtype)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("names", [(), *zip(OPTIONS)], ids=" + ".join)
def test_reference_agrees_with_attention_over_the_identity(names, size):
    query, key, options, right = _case(names, np.float64, size)
    options = {name: x for name, x in options.items() if name != "num_threads"}
    weights, lse = reference.attention_weights(query, key, **options, return_lse=True)
    assert_near(weights, right.out.astype(np.float64), 1e-14)
    assert_near(lse, right.lse.astype(np.float64), 1e-13)
    np.testing.assert_array_equal(reference.attention_weights(query, key, **options), weights)


@pytest.mark.parametrize("dtype", DTYPES)
def test_relative_error_of_small_weights(dtype, isa):
    """Each weight is exp(score - lse): its error is that of the exponent, whatever its size."""
    query, key = _query_and_key(dtype)
    query *= 5
    weights = mha_fast.attention_weights(query, key)
    right = reference.attention_weights(query, key)
    smallest = np.finfo(dtype).tiny
    assert (right < 1e-12).any()
    size = np.abs(query @ key.repeat(2, axis=1).swapaxes(-1, -2)).max() / np.sqrt(20)
    limit = 8 * np.finfo(dtype).eps * size * right + smallest
    assert (np.abs(weights - right) <= limit).all()


# ---- what a weight is ---------------------------------------------------------------------------


def _sums(weights):
    """Sum of each row, and how far rounding each weight to its dtype may have moved it."""
    wide = weights.astype(np.float64)
    moved = half_ulp(wide, weights.dtype).sum(axis=-1) if weights.dtype.itemsize == 2 else 0
    return wide.sum(axis=-1), moved + 200 * np.finfo(widened(weights[..., :0]).dtype).eps


@pytest.mark.parametrize("dtype", ALL_DTYPES)
@pytest.mark.parametrize(
    "names", [(), ("causal",), ("bool mask",), ("alibi", "lengths")], ids=" + ".join
)
def test_rows_sum_to_1(names, dtype, isa):
    query, key, options, right = _case(names, dtype, "tiles")
    sums, moved = _sums(mha_fast.attention_weights(query, key, **options))
    has_key = right.lse > -INF
    assert (np.abs(sums - has_key) <= moved).all()


@pytest.mark.parametrize("dtype", ALL_DTYPES)
def test_rows_sum_to_1_less_the_share_of_the_sink(dtype, isa):
    query, key = _query_and_key(dtype)
    sinks = np.array([-INF, 0, 4, 100])
    weights, lse = mha_fast.attention_weights(query, key, sinks=sinks, return_lse=True)
    sums, moved = _sums(weights)
    right = 1 - np.exp(sinks[:, None] - lse.astype(np.float64))
    assert (np.abs(sums - right) <= moved + 1e-6).all()


@pytest.mark.parametrize("dtype", ALL_DTYPES)
@pytest.mark.parametrize("name", OPTIONS)
def test_weights_times_values_are_the_output(name, dtype, isa):
    query, key, options, _ = _case((name,), dtype, "tiles")
    value = normal_inputs(dtype, **SIZES["tiles"], seed=1)[2]
    weights, lse = mha_fast.attention_weights(query, key, **options, return_lse=True)
    out, right_lse = mha_fast.attention(query, key, value, **options, return_lse=True)
    every_value = value.astype(np.float64).repeat(2, axis=1)
    wide, size = weights.astype(np.float64), np.abs(every_value)
    # Both have the error of float32 arithmetic, and each weight of 16 bits that of its rounding.
    limit = expected_widened(query, key, value, **options).out_limit
    limit = limit + 64 * np.finfo(lse.dtype).eps * (np.abs(wide) @ size)
    if dtype not in DTYPES:
        limit = limit + half_ulp(wide, dtype) @ size
    assert_near(out, wide @ every_value, limit)
    np.testing.assert_allclose(lse, right_lse, rtol=1e-6, atol=1e-6 + weight_rounding(dtype))


@pytest.mark.parametrize("dtype", ALL_DTYPES)
def test_equal_scores_get_equal_weights_rounded_once(dtype, isa):
    arithmetic = np.float64 if dtype == np.float64 else np.float32
    for n_key in (1, 2, 3, 5, 7, 64, 65, 100, 131, 1000):
        query, key = np.zeros((2, 4), dtype), np.zeros((n_key, 4), dtype)
        right = (arithmetic(1) / arithmetic(n_key)).astype(dtype)
        assert_same_bits(mha_fast.attention_weights(query, key), np.full((2, n_key), right, dtype))


@pytest.mark.parametrize("dtype", DTYPES_16)
def test_small_weights_down_to_subnormal_ones(dtype, isa):
    """The exponential may stop at the smallest normal float32, far below those of float16."""
    scores = np.concatenate([[0], -np.linspace(1, 100, 400)]).astype(np.float32)
    query, key = np.zeros((9, 4), dtype), np.zeros((401, 4), dtype)
    weights = mha_fast.attention_weights(query, key, scores)
    right = np.exp(scores.astype(np.float64))
    right = np.broadcast_to(right / right.sum(), (9, 401))
    assert_near(weights, right, 1e-5 * right + np.finfo(np.float32).tiny)


# ---- excluded keys, rows without a key, NaN -----------------------------------------------------


@pytest.mark.parametrize("dtype", ALL_DTYPES)
@pytest.mark.parametrize("junk", [NAN, INF, -INF])
@pytest.mark.parametrize("way", ["lengths", "bool mask", "float mask", "window"])
def test_excluded_key_has_weight_0_whatever_it_holds(way, junk, dtype, isa):
    query, key = _query_and_key(dtype)
    seen = np.arange(150) < 120
    options = {
        "lengths": {"kv_lengths": 120},
        "bool mask": {"attn_mask": seen},
        "float mask": {"attn_mask": np.where(seen, 0, -INF)},
        "window": {"window": (None, 119), "query_offset": -36},
    }[way]
    right, right_lse = mha_fast.attention_weights(query, key, **options, return_lse=True)
    key[..., 120:, :] = junk
    weights, lse = mha_fast.attention_weights(query, key, **options, return_lse=True)
    assert_same_bits(weights, right)
    assert_same_bits(lse, right_lse)
    assert not weights[..., 120:].any()


@pytest.mark.parametrize("dtype", ALL_DTYPES)
@pytest.mark.parametrize("way", ["bool mask", "float mask", "length", "no keys", "window"])
def test_row_with_no_key_is_0(way, dtype, isa):
    query, key = _query_and_key(dtype, n_key=0 if way == "no keys" else 150)
    options = {
        "bool mask": {"attn_mask": np.zeros((37, 150), bool)},
        "float mask": {"attn_mask": np.full(150, -INF, np.float32)},
        "length": {"kv_lengths": [0, 0]},
        "no keys": {},
        "window": {"window": (0, 5), "query_offset": 150},
    }[way]
    weights, lse = mha_fast.attention_weights(query, key, **options, return_lse=True)
    assert_same_bits(weights, np.zeros((2, 4, 37, key.shape[-2]), dtype))
    np.testing.assert_array_equal(lse, np.full((2, 4, 37), -INF))
    sinks = np.array([0.0, 1.0, -2.0, NAN])
    weights, lse = mha_fast.attention_weights(query, key, **options, sinks=sinks, return_lse=True)
    assert_same_bits(weights, np.zeros((2, 4, 37, key.shape[-2]), dtype))
    np.testing.assert_array_equal(lse, np.broadcast_to(sinks[:, None], lse.shape))


@pytest.mark.parametrize("dtype", ALL_DTYPES)
@pytest.mark.parametrize("junk", [NAN, INF, -INF])
@pytest.mark.parametrize("operand", ["query", "key"])
@pytest.mark.parametrize("names", [(), ("causal",), ("bool mask",), ("head mask",)], ids=" + ".join)
def test_visible_nan_and_inf_reach_the_rows_that_see_them(names, operand, junk, dtype, isa):
    query, key, options, _ = _case(names, dtype, "tiles")
    query, key = query.copy(), key.copy()
    {"query": query, "key": key}[operand][0, 1, 30, 3] = junk
    result = mha_fast.attention_weights(query, key, **options, return_lse=True)
    right = reference.attention_weights(query, key, **options, return_lse=True)
    for one, formula in zip(result, right, strict=True):
        one = one.astype(np.float64)
        assert np.isnan(formula).any() or names == ("head mask",)
        np.testing.assert_array_equal(np.isnan(one), np.isnan(formula))
        np.testing.assert_array_equal(one[np.isinf(formula)], formula[np.isinf(formula)])
        rest = np.isfinite(formula)
        assert rest.any()
        np.testing.assert_allclose(one[rest], formula[rest], rtol=0.01, atol=1e-6)
        assert (result[0][right[0] == 0] == 0).all()


def test_gate_of_0_silences_nan(isa):
    query, key = _query_and_key(np.float32)
    query[:, 1], query[:, 2] = NAN, NAN
    weights = mha_fast.attention_weights(query, key, head_mask=[1.0, 0.0, 2.0, -1.0])
    assert not weights[:, 1].any()
    assert np.isnan(weights[:, 2]).all()
    full = mha_fast.attention_weights(query, key)
    np.testing.assert_array_equal(weights[:, 3], -full[:, 3])


# ---- picking queries and heads ------------------------------------------------------------------


def _every_third(n):
    return np.arange(n) % 3 == 1


# name: an index, from the length of the axis
PICKS = {
    "int": lambda n: n - 1,
    "negative int": lambda n: -2,
    "NumPy int": lambda n: np.uint8(1),
    "array of rank 0": lambda n: np.array(2),
    "slice": lambda n: slice(1, -1, 2),
    "slice backwards": lambda n: slice(None, None, -1),
    "slice past the end": lambda n: slice(n - 1, n + 50),
    "empty slice": lambda n: slice(2, 2),
    "list": lambda n: [n - 1, 0, 2],
    "negative list": lambda n: [-1, 0, -n],
    "repeated": lambda n: [1, 1, 3, 1, 0, 0],
    "empty list": lambda n: [],
    "empty array": lambda n: np.array([], np.int32),
    "array": lambda n: np.array([3, 1], np.uint64),
    "foreign byte order": lambda n: np.array([3, 1], ">i2"),
    "array backwards": lambda n: np.arange(n)[::-2],
    "bools": lambda n: _every_third(n),
    "list of bools": lambda n: _every_third(n).tolist(),
    "no bool": lambda n: np.zeros(n, bool),
}


def _picked(pick, n):
    return np.atleast_1d(np.arange(n)[PICKS[pick](n)])


@pytest.mark.parametrize("return_lse", [True, False])
@pytest.mark.parametrize("axis", ["queries", "heads"])
@pytest.mark.parametrize("pick", PICKS)
def test_pick_of_every_kind(pick, axis, return_lse, isa):
    query, key, options, _ = _case(("bool mask", "alibi"), np.float32, "tiles")
    whole = mha_fast.attention_weights(query, key, **options, return_lse=True)
    n, at = (37, 2) if axis == "queries" else (N_HEAD, 1)
    right = [x.take(_picked(pick, n), axis=at) for x in whole]
    options = options | {axis: PICKS[pick](n)}
    result = mha_fast.attention_weights(query, key, **options, return_lse=return_lse)
    if return_lse:
        assert_same_bits(result[1], right[1])
    assert_same_bits(result[0] if return_lse else result, right[0])


@pytest.mark.parametrize("dtype", ALL_DTYPES)
@pytest.mark.parametrize("name", OPTIONS)
def test_picked_queries_and_heads_keep_their_options(name, dtype, isa):
    query, key, options, _ = _case((name,), dtype, "tiles")
    whole, whole_lse = mha_fast.attention_weights(query, key, **options, return_lse=True)
    queries, heads = [36, 0, 5, 5], [3, 0, 1]
    weights, lse = mha_fast.attention_weights(
        query, key, **options, queries=queries, heads=heads, return_lse=True
    )
    assert_same_bits(weights, whole[:, heads][:, :, queries])
    assert_same_bits(lse, whole_lse[:, heads][:, :, queries])


@pytest.mark.parametrize("kind", ["bool", "float"])
@pytest.mark.parametrize("full", list(itertools.product([True, False], repeat=4)), ids=str)
def test_mask_of_every_broadcast_shape_with_picks(full, kind, isa):
    query, key = _query_and_key(np.float32)
    rng = np.random.default_rng(0)
    own = [n if whole else 1 for n, whole in zip((2, 4, 37, 150), full, strict=True)]
    mask = rng.random(own) < 0.7 if kind == "bool" else rng.standard_normal(own, np.float32)
    whole = np.broadcast_to(mask, (2, 4, 37, 150))
    right = mha_fast.attention_weights(query, key, whole.copy())
    picks = {"queries": [36, 0, 5], "heads": [2, 0]}
    forms = [mask, whole, np.asfortranarray(mask)]
    while forms[-1].ndim and forms[-1].shape[0] == 1:
        forms.append(forms[-1][0])
    for form in forms:
        assert_same_bits(mha_fast.attention_weights(query, key, form), right)
        some = mha_fast.attention_weights(query, key, form, **picks)
        assert_same_bits(some, right[:, [2, 0]][:, :, [36, 0, 5]])


@pytest.mark.parametrize("n_picked", [1, 63, 64, 65, 257])
def test_number_of_picked_queries_at_the_edges_of_tiles(n_picked, isa):
    query, key = _query_and_key(np.float32, batch=(), n_query=400, n_head=1, n_kv_head=1)
    options = {"is_causal": True, "query_offset": "end"}
    whole = mha_fast.attention_weights(query, key, **options)
    queries = np.random.default_rng(0).integers(0, 400, n_picked)
    weights = mha_fast.attention_weights(query, key, **options, queries=queries)
    assert_same_bits(weights, whole[:, queries])


# ---- shapes and layouts -------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ALL_DTYPES)
@pytest.mark.parametrize(("n_head", "n_kv_head"), [(1, 1), (4, 4), (6, 1), (9, 3)])
def test_groups_of_heads(n_head, n_kv_head, dtype, isa):
    query, key = _query_and_key(dtype, n_head=n_head, n_kv_head=n_kv_head)
    weights, lse = mha_fast.attention_weights(query, key, return_lse=True)
    assert_rounded_once((weights, lse), _right(query, key), dtype)
    heads = [n_head - 1, 0, n_head // 2]
    assert_same_bits(mha_fast.attention_weights(query, key, heads=heads), weights[:, heads])


def test_one_head_without_an_axis_of_heads(isa):
    query, key = (x[0, 0] for x in _query_and_key(np.float32))
    weights, lse = mha_fast.attention_weights(query, key, return_lse=True)
    assert weights.shape == (37, 150)
    assert lse.shape == (37,)
    assert_rounded_once((weights, lse), _right(query, key), np.float32)
    mask = np.random.default_rng(0).random((37, 150)) < 0.5
    options = {"sinks": [1.0], "alibi_slopes": [0.1], "head_mask": [0.5]}
    whole = mha_fast.attention_weights(query, key, mask, **options)
    some, some_lse = mha_fast.attention_weights(
        query, key, mask, **options, queries=[5, -1], return_lse=True
    )
    assert_same_bits(some, whole[[5, -1]])
    assert some_lse.shape == (2,)


@pytest.mark.parametrize(
    ("of_query", "of_key"),
    [((3, 2), (2,)), ((1,), (5,)), ((3, 1), (1, 2)), ((), (2, 2)), ((2,), ())],
)
def test_batch_axes_that_broadcast(of_query, of_key, isa):
    rng = np.random.default_rng(0)
    query = rng.standard_normal((*of_query, 4, 9, 8), dtype=np.float32)
    key = rng.standard_normal((*of_key, 2, 70, 8), dtype=np.float32)
    batch = np.broadcast_shapes(of_query, of_key)
    lengths = np.broadcast_to(rng.integers(0, 71, batch[-1]), batch)
    result = mha_fast.attention_weights(query, key, kv_lengths=lengths, return_lse=True)
    assert result[0].shape == (*batch, 4, 9, 70)
    right = reference.attention_weights(query, key, kv_lengths=lengths, return_lse=True)
    np.testing.assert_allclose(result[0], right[0], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(result[1], right[1], rtol=1e-5)
    some = mha_fast.attention_weights(query, key, kv_lengths=lengths, queries=[8, 1], heads=[3, 2])
    assert_same_bits(some, result[0][..., [3, 2], :, :][..., [8, 1], :])


ZEROS = {  # shapes of query and key
    "queries": ((2, 0, 4), (2, 5, 4)),
    "keys": ((2, 3, 4), (2, 0, 4)),
    "batch": ((0, 2, 3, 4), (0, 2, 5, 4)),
    "heads": ((0, 3, 4), (0, 5, 4)),
    "head width": ((2, 3, 0), (2, 5, 0)),
}


@pytest.mark.parametrize("dtype", ALL_DTYPES)
@pytest.mark.parametrize("case", ZEROS)
def test_axis_of_length_0(case, dtype, isa):
    query, key = (np.ones(shape, dtype) for shape in ZEROS[case])
    weights, lse = mha_fast.attention_weights(query, key, return_lse=True)
    right, right_lse = reference.attention_weights(query, key, return_lse=True)
    np.testing.assert_array_equal(weights, right.astype(dtype))
    np.testing.assert_allclose(lse, right_lse, rtol=1e-6)
    for axis in ("queries", "heads"):
        none = mha_fast.attention_weights(query, key, **{axis: []})
        at = -2 if axis == "queries" else -3
        assert none.shape == right.take([], axis=at).shape


LAYOUTS = {
    "heads and rows swapped": lambda x: x.swapaxes(-3, -2).copy().swapaxes(-3, -2),
    "features before rows": lambda x: x.swapaxes(-1, -2).copy().swapaxes(-1, -2),
    "every second row": lambda x: x.repeat(2, axis=2)[:, :, ::2],
    "every second feature": lambda x: x.repeat(2, axis=3)[..., ::2],
    "all backwards": lambda x: x[::-1, ::-1, ::-1, ::-1].copy()[::-1, ::-1, ::-1, ::-1],
    "read-only": lambda x: np.frombuffer(x.tobytes(), x.dtype).reshape(x.shape),
}


@pytest.mark.parametrize("dtype", ALL_DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layout_of_query_and_key(layout, dtype, isa):
    query, key = _query_and_key(dtype)
    picks = {"queries": [5, 36], "heads": [3]}
    for one, options in itertools.product((query, key), ({}, picks)):
        right = mha_fast.attention_weights(query, key, **options)
        changed = [LAYOUTS[layout](x) if x is one else x for x in (query, key)]
        assert_same_bits(mha_fast.attention_weights(*changed, **options), right)


# ---- threads and memory -------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ALL_DTYPES)
@pytest.mark.parametrize("picks", [{}, {"queries": slice(100, None), "heads": [3, 1, 0]}], ids=str)
def test_same_bits_for_any_number_of_threads(picks, dtype, isa):
    query, key = _query_and_key(dtype, n_query=300, n_key=300)
    options = {"is_causal": True, "return_lse": True} | picks
    right = mha_fast.attention_weights(query, key, **options, num_threads=1)
    for num_threads in (2, 3, 7, None):
        result = mha_fast.attention_weights(query, key, **options, num_threads=num_threads)
        for one, same in zip(result, right, strict=True):
            assert_same_bits(one, same)


def test_same_bits_alone_and_inside_a_batch(isa):
    query, key = _query_and_key(np.float32, batch=(3,))
    weights = mha_fast.attention_weights(query, key, kv_lengths=[150, 0, 70])
    for b, length in enumerate((150, 0, 70)):
        alone = mha_fast.attention_weights(query[b], key[b], kv_lengths=length)
        assert_same_bits(weights[b], alone)


# Peak memory of the process: Python's own tracing would not see what the kernel takes.
PEAK = """
import numpy as np
import mha_fast

def peak():
    with open("/proc/self/status") as status:
        line = next(line for line in status if line.startswith("VmHWM"))
    return int(line.split()[1]) / 1024

n, n_head = {sizes}
rng = np.random.default_rng(0)
query, key = (rng.standard_normal((n_head, n, 16), dtype=np.float32) for _ in range(2))
mha_fast.attention_weights(query[:, :300], key[:, :300])  # thread stacks and the like
before = peak()
weights = mha_fast.attention_weights(query, key, {arguments})
print(peak() - before, weights.nbytes / 2**20, np.isfinite(weights).all())
"""

# All weights would be 1526 MiB in the first two, 977 MiB in the others.
CALLS = {
    "queries": ("20_000, 1", "queries=[5]"),
    "queries with a mask": (
        "20_000, 1",
        "np.broadcast_to(rng.random(n) < 0.5, (n, n)), queries=slice(0, n, 1000)",
    ),
    "heads": ("2000, 64", "heads=[1, 63]"),
    "heads and queries": ("2000, 64", "heads=slice(0, 64, 2), queries=[-1]"),
}


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc, only Linux has it")
@pytest.mark.parametrize("call", CALLS)
def test_only_what_is_asked_for_takes_memory(call, tmp_path):
    sizes, arguments = CALLS[call]
    process = run_python(PEAK.format(sizes=sizes, arguments=arguments), tmp_path)
    above, result, finite = process.stdout.split()
    assert float(above) < float(result) + 16, process.stderr
    assert float(result) < 40
    assert finite == "True"


def test_weights_larger_than_any_memory_are_an_error():
    """2**48 of them; query and key are one number each, read with stride 0."""
    many = np.broadcast_to(np.float32(1), (1 << 24, 1))
    with pytest.raises(MemoryError):
        mha_fast.attention_weights(many, many)
    one = mha_fast.attention_weights(many, many, queries=[-1])
    np.testing.assert_allclose(one[:, ::100_000], 2.0**-24, rtol=1e-6)


# ---- errors -------------------------------------------------------------------------------------


# The valid call has a batch of 2, 4 heads over 2, 5 queries and 17 keys of width 6.
# id: (wrong arguments, error, words that the message has to contain)
ERRORS = {
    **SCORE_ERRORS,
    "integer query": ({"query": zeros((2, 4, 5, 6), np.int64)}, TypeError, "query int64"),
    "mask of the picked queries alone": (
        {"attn_mask": zeros((2, 17)), "queries": [0, 1]},
        ValueError,
        "attn_mask (2, 17) (2, 4, 5, 17)",
    ),
    "sinks of the picked heads alone": (
        {"sinks": zeros(1), "heads": [2]},
        ValueError,
        "sinks (1,) (4,)",
    ),
    "number of gates": ({"head_mask": zeros((3, 4))}, ValueError, "head_mask (3, 4) (2, 4)"),
    "lse as text": ({"return_lse": "no"}, TypeError, "return_lse 'no' True False"),
    # picks
    "query past the end": ({"queries": 5}, ValueError, "queries 5"),
    "query before the start": ({"queries": [0, -6]}, ValueError, "queries -6 5"),
    "head past the end": ({"heads": [0, 4]}, ValueError, "heads 4"),
    "head before the start": ({"heads": -5}, ValueError, "heads -5 4"),
    "number of bools": ({"queries": [True] * 4}, ValueError, "queries 5 4"),
    "bools of the heads": ({"heads": np.ones(5, bool)}, ValueError, "heads 4 5"),
    "one bool": ({"queries": True}, TypeError, "queries True"),
    "one bool for the heads": ({"heads": np.True_}, TypeError, "heads True"),
    "fraction": ({"queries": 1.5}, TypeError, "queries float64 int slice"),
    "fractions": ({"heads": zeros(2)}, TypeError, "heads float32 int slice"),
    "text": ({"queries": "all"}, TypeError, "queries int slice"),
    "two axes of queries": ({"queries": [[0, 1]]}, ValueError, "queries 2 one axis"),
    "two axes of heads": ({"heads": [[0]]}, ValueError, "heads 2 one axis"),
    "heads where there is no such axis": (
        {"query": zeros((5, 6)), "key": zeros((17, 6)), "heads": [0]},
        ValueError,
        "heads [0] none 2",
    ),
}


@pytest.mark.parametrize("case", ERRORS)
def test_error_names_argument_expectation_and_finding(case):
    wrong, error, words = ERRORS[case]
    valid = {"query": zeros((2, 4, 5, 6)), "key": zeros((2, 2, 17, 6))}
    with pytest.raises(error) as raised:
        mha_fast.attention_weights(**valid | wrong)
    message = str(raised.value)
    assert message.startswith(words.split()[0] + " "), message
    assert [word for word in words.split() if word not in message] == [], message
    assert "value" not in message  # there is none here


@pytest.mark.parametrize("argument", ["value", "out", "precision"])
def test_arguments_that_make_no_sense_here_are_not_taken(argument):
    with pytest.raises(TypeError, match=argument):
        mha_fast.attention_weights(zeros((5, 6)), zeros((5, 6)), **{argument: None})
