"""attention_varlen(): each packed sequence to the bit as in a call of its own, and every error."""

import functools
import itertools

import numpy as np
import pytest
from _dtypes import ALL_DTYPES, assert_rounded_once, expected_widened
from _support import assert_same_bits, run_python, weight_rounding

import mha_fast
from mha_fast import reference

N_HEAD, N_KV_HEAD, HEAD_WIDTH, VALUE_WIDTH = 4, 2, 20, 12
OPERANDS = ("query", "key", "value")

# Rows of query and key of each sequence. Up to 4 queries of this group of 2 take the path of few
# rows; the longest sequences cross row tiles, blocks of keys and splits of keys. "both" is what
# most tests use: small enough not to wake a second thread.
LENGTHS = {
    "row tiles": [(37, 150), (64, 64), (90, 30), (270, 65)],
    "few rows": [(1, 600), (1, 3), (2, 513), (4, 64), (1, 1030)],
    "both": [(1, 40), (30, 40), (3, 520), (0, 9), (135, 70), (2, 0), (5, 5)],
    "empty ones among others": [(0, 3), (1, 0), (0, 0), (12, 5), (30, 0), (0, 70), (0, 0)],
    "one long and many short": [(3, 4)] * 9 + [(280, 280)] + [(1, 1)] * 9,
    "one": [(37, 150)],
    "only empty ones": [(0, 0), (0, 0)],
    "none": [],
}

# name: what it passes, from (rng, number of sequences)
OPTIONS = {
    "causal": lambda *_: {"is_causal": True},
    "window": lambda *_: {"window": (20, 3)},
    "left window": lambda *_: {"window": (2, None)},
    "offset": lambda *_: {"query_offset": 11},
    "negative offset": lambda *_: {"query_offset": -3},
    "offset per sequence": lambda rng, n: {"query_offset": rng.integers(-3, 60, n)},
    "offset at the end": lambda *_: {"query_offset": "end"},
    "scale": lambda *_: {"scale": -0.4},
    "softcap": lambda *_: {"softcap": 1.5},
    "alibi": lambda rng, n: {"alibi_slopes": rng.random(N_HEAD, np.float32)},
    "alibi per sequence": lambda rng, n: {"alibi_slopes": rng.random((n, N_HEAD), np.float32)},
    "sinks": lambda rng, n: {"sinks": rng.standard_normal(N_HEAD, np.float32)},
    "head mask": lambda *_: {"head_mask": np.array([1.0, 0.0, -0.5, 2.0])},
    "head mask per sequence": lambda rng, n: {"head_mask": rng.random((n, N_HEAD), np.float32)},
}


def _packed(dtype, lengths, *, n_head=N_HEAD, n_kv_head=N_KV_HEAD, value_width=VALUE_WIDTH):
    """Arguments of attention_varlen: standard normal rows, and the boundaries."""
    rng = np.random.default_rng(0)
    cu_q, cu_k = np.cumsum([(0, 0), *lengths], axis=0).T
    shapes = {
        "query": (cu_q[-1], n_head, HEAD_WIDTH),
        "key": (cu_k[-1], n_kv_head, HEAD_WIDTH),
        "value": (cu_k[-1], n_kv_head, value_width),
    }
    rows = {name: rng.standard_normal(shape).astype(dtype) for name, shape in shapes.items()}
    return rows | {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k}


def _together(names, n_sequence):
    """What the named options pass; None where two set the same argument."""
    together = {}
    for name in names:
        arguments = OPTIONS[name](np.random.default_rng(list(OPTIONS).index(name)), n_sequence)
        if together.keys() & arguments.keys():
            return None
        together |= arguments
    return together


def _one_by_one(packed, options):
    """For each sequence its rows of the output, and the arguments of a call of `attention`."""
    cu_q, cu_k = packed["cu_seqlens_q"], packed["cu_seqlens_k"]
    for s in range(len(cu_q) - 1):
        rows, keys = slice(cu_q[s], cu_q[s + 1]), slice(cu_k[s], cu_k[s + 1])
        own = {
            name: x[s] if np.ndim(x) == 2 or (name == "query_offset" and np.ndim(x)) else x
            for name, x in options.items()
        }
        parts = (packed["query"][rows], packed["key"][keys], packed["value"][keys])
        yield rows, [x.swapaxes(0, 1) for x in parts], own


def _case(lengths, dtype, names):
    """Arguments, options, and per sequence its rows and the right answer, for the set in use."""
    return _case_within(lengths, dtype, names, weight_rounding(dtype))


@functools.cache  # most instruction sets ask for the same
def _case_within(lengths, dtype, names, _rounding):
    packed = _packed(dtype, LENGTHS[lengths])
    options = _together(names, len(LENGTHS[lengths]))
    one_by_one = _one_by_one(packed, options)
    right = [(rows, expected_widened(*inputs, **own)) for rows, inputs, own in one_by_one]
    return packed, options, right


def _assert_correct(lengths, dtype, names=()):
    """Each sequence as the reference says, and to the bit as alone."""
    packed, options, right = _case(lengths, dtype, names)
    out, lse = mha_fast.attention_varlen(**packed, **options, return_lse=True)
    n_row = len(packed["query"])
    assert out.shape == (n_row, N_HEAD, VALUE_WIDTH)
    assert lse.shape == (n_row, N_HEAD)
    for rows, one in right:
        result = out[rows].swapaxes(0, 1), lse[rows].T
        assert_rounded_once(result, one, dtype)
    _assert_bits_of_single_calls(packed, options, out, lse)


def _assert_bits_of_single_calls(packed, options, out, lse):
    for rows, inputs, own in _one_by_one(packed, options):
        alone, alone_lse = mha_fast.attention(*inputs, **own, return_lse=True)
        assert_same_bits(out[rows].swapaxes(0, 1), alone)
        assert_same_bits(lse[rows].T, alone_lse)


# ---- sequences and options ----------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ALL_DTYPES)
@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("names", [(), ("causal", "offset at the end")], ids=" + ".join)
def test_sequences_of_any_length(names, lengths, dtype, isa):
    _assert_correct(lengths, dtype, names)


@pytest.mark.parametrize("dtype", ALL_DTYPES)
@pytest.mark.parametrize("name", OPTIONS)
def test_option_alone(name, dtype, isa):
    _assert_correct("both", dtype, (name,))


def _compatible_pairs():
    for pair in itertools.combinations(OPTIONS, 2):
        if _together(pair, 3) is not None:
            yield pair


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("pair", list(_compatible_pairs()), ids=" + ".join)
def test_pair_of_options(pair, dtype, isa):
    _assert_correct("both", dtype, pair)


@pytest.mark.parametrize("dtype", ALL_DTYPES)
def test_all_options_together(dtype, isa):
    names = ("causal", "window", "offset per sequence", "scale", "softcap", "alibi per sequence",
             "sinks", "head mask per sequence")  # fmt: skip
    _assert_correct("both", dtype, names)


@pytest.mark.parametrize(
    ("names", "lengths"),
    [*(((), lengths) for lengths in LENGTHS), *(((name,), "both") for name in OPTIONS)],
)
def test_reference_takes_one_sequence_at_a_time(names, lengths):
    """`right` comes from single calls in longer numbers; the public reference says the same."""
    packed, options, right = _case(lengths, np.float64, names)
    out, lse = reference.attention_varlen(**packed, **options, return_lse=True)
    for rows, one in right:
        formula = out[rows].swapaxes(0, 1), lse[rows].T
        np.testing.assert_allclose(formula[0], one.out.astype(np.float64), rtol=0, atol=1e-13)
        np.testing.assert_allclose(formula[1], one.lse.astype(np.float64), rtol=1e-13, atol=1e-13)
    np.testing.assert_array_equal(reference.attention_varlen(**packed, **options), out)


@pytest.mark.parametrize("name", OPTIONS)
def test_result_does_not_depend_on_what_is_returned_beside_it(name, isa):
    packed, options, _ = _case("both", np.float32, (name,))
    out, _ = mha_fast.attention_varlen(**packed, **options, return_lse=True)
    given = np.empty_like(out)
    assert_same_bits(mha_fast.attention_varlen(**packed, **options), out)
    assert mha_fast.attention_varlen(**packed, **options, out=given) is given
    assert_same_bits(given, out)
    # 2^-16 per product, see the test of `attention` with this precision
    high = mha_fast.attention_varlen(**packed, **options, precision="high")
    np.testing.assert_allclose(high, out, rtol=0, atol=100 * 2.0**-16)


def test_grouped_heads_with_empty_sequences_and_read_only_boundaries(isa):
    packed = _packed(np.float32, [(1, 3), (0, 0), (1, 5)], n_head=9, n_kv_head=3)
    boundaries = {"cu_seqlens_q": [0, 1, 1, 2], "cu_seqlens_k": [0, 3, 3, 8]}
    for name, right in boundaries.items():
        np.testing.assert_array_equal(packed[name], right)
        packed[name].flags.writeable = False
    out, lse = mha_fast.attention_varlen(**packed, return_lse=True)
    for name, right in boundaries.items():
        np.testing.assert_array_equal(packed[name], right)
    right, right_lse = reference.attention_varlen(**packed, return_lse=True)
    np.testing.assert_allclose(out, right, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(lse, right_lse, rtol=1e-5)
    _assert_bits_of_single_calls(packed, {}, out, lse)


@pytest.mark.parametrize(("n_head", "n_kv_head"), [(1, 1), (4, 4), (6, 1), (9, 3), (16, 1)])
def test_groups_of_any_size(n_head, n_kv_head, isa):
    """16 queries' heads of one key head are never few rows, 4 of 4 often are."""
    packed = _packed(np.float32, LENGTHS["both"], n_head=n_head, n_kv_head=n_kv_head)
    options = {"is_causal": True, "query_offset": "end"}
    result = mha_fast.attention_varlen(**packed, **options, return_lse=True)
    _assert_bits_of_single_calls(packed, options, *result)


ZEROS = {  # heads, key heads, head width, value width
    "heads": (0, 0, 4, 3),
    "heads over some of key": (0, 2, 4, 3),
    "head width": (4, 2, 0, 3),
    "value width": (4, 2, 4, 0),
}


@pytest.mark.parametrize("case", ZEROS)
def test_axis_of_length_0(case, isa):
    n_head, n_kv_head, head_width, value_width = ZEROS[case]
    packed = {
        "query": np.ones((12, n_head, head_width), np.float32),
        "key": np.ones((7, n_kv_head, head_width), np.float32),
        "value": np.ones((7, n_kv_head, value_width), np.float32),
        "cu_seqlens_q": [0, 1, 12],
        "cu_seqlens_k": [0, 3, 7],
    }
    out, lse = mha_fast.attention_varlen(**packed, return_lse=True)
    assert out.shape == (12, n_head, value_width)
    np.testing.assert_array_equal(out, np.ones_like(out))
    right = np.log([3.0, 4.0]) + (2.0 if head_width else 0.0)  # 4 products of 1, over sqrt(4)
    right = np.repeat(right, [1, 11])[:, None]
    np.testing.assert_allclose(lse, np.broadcast_to(right, (12, n_head)), rtol=1e-6)


@pytest.mark.parametrize("operand", OPERANDS)
@pytest.mark.parametrize("lengths", ["row tiles", "few rows", "both"])
def test_nan_of_one_sequence_stays_in_it(lengths, operand, isa):
    packed = _packed(np.float32, LENGTHS[lengths])
    right, right_lse = mha_fast.attention_varlen(**packed, return_lse=True)
    boundary = packed["cu_seqlens_q" if operand == "query" else "cu_seqlens_k"]
    packed[operand][boundary[1] : boundary[2]] = np.nan
    out, lse = mha_fast.attention_varlen(**packed, return_lse=True)
    own = np.zeros(len(out), bool)
    own[slice(*packed["cu_seqlens_q"][1:3])] = True
    assert np.isnan(out[own]).all()
    assert_same_bits(out[~own], right[~own])
    assert_same_bits(lse[~own], right_lse[~own])


# ---- boundaries ---------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [list, tuple, np.int16, np.int32, np.int64, np.uint64, ">i4"])
def test_boundaries_of_any_integer_kind(kind):
    packed = _packed(np.float32, LENGTHS["both"])
    right = mha_fast.attention_varlen(**packed)
    for name in ("cu_seqlens_q", "cu_seqlens_k"):
        numbers = packed[name].tolist()
        packed[name] = kind(numbers) if kind in (list, tuple) else np.array(numbers, kind)
    assert_same_bits(mha_fast.attention_varlen(**packed), right)


@pytest.mark.parametrize("step", [2, -1])
def test_boundaries_of_any_stride(step):
    packed = _packed(np.float32, LENGTHS["both"])
    right = mha_fast.attention_varlen(**packed)
    for name in ("cu_seqlens_q", "cu_seqlens_k"):
        wide = np.empty(2 * len(packed[name]), np.int64)
        strided = wide[::step][: len(packed[name])]
        strided[...] = packed[name]
        packed[name] = strided
    assert_same_bits(mha_fast.attention_varlen(**packed), right)


# ---- layouts ------------------------------------------------------------------------------------


def _unaligned(x):
    shifted = np.empty(x.nbytes + 1, np.uint8)[1:].view(x.dtype).reshape(x.shape)
    shifted[...] = x
    assert not shifted.flags.aligned
    return shifted


def _inside_nan(x):
    larger = np.full([n + 3 for n in x.shape], np.nan, x.dtype)
    inside = larger[tuple(slice(1, 1 + n) for n in x.shape)]
    inside[...] = x
    return inside


def _read_only(x):
    x = x.copy()
    x.flags.writeable = False
    return x


LAYOUTS = {
    "heads before rows": lambda x: x.swapaxes(0, 1).copy().swapaxes(0, 1),
    "features before rows": lambda x: x.swapaxes(0, 2).copy().swapaxes(0, 2),
    "inside a larger array": _inside_nan,
    "every second row": lambda x: x.repeat(2, axis=0)[::2],
    "every second head": lambda x: x.repeat(2, axis=1)[:, ::2],
    "every second feature": lambda x: x.repeat(2, axis=2)[..., ::2],
    "all backwards": lambda x: x[::-1, ::-1, ::-1].copy()[::-1, ::-1, ::-1],
    "unaligned": _unaligned,
    "read-only": _read_only,
}


@pytest.mark.parametrize("dtype", ALL_DTYPES)
@pytest.mark.parametrize("operand", OPERANDS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layout_of_one_operand(layout, operand, dtype, isa):
    packed, _, _ = _case("both", dtype, ())
    changed = LAYOUTS[layout](packed[operand])
    before = changed.tobytes()
    out = mha_fast.attention_varlen(**packed | {operand: changed})
    assert_same_bits(out, mha_fast.attention_varlen(**packed))
    assert changed.tobytes() == before


@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("operand", OPERANDS)
def test_axis_of_stride_0(operand, axis, isa):
    packed, _, _ = _case("both", np.float32, ())
    x = packed[operand]
    repeated = np.broadcast_to(x.take([0], axis=axis), x.shape)
    right = mha_fast.attention_varlen(**packed | {operand: repeated.copy()})
    assert_same_bits(mha_fast.attention_varlen(**packed | {operand: repeated}), right)


def test_query_key_and_value_in_one_array(isa):
    rng = np.random.default_rng(0)
    together = rng.standard_normal((100, 3, 4, 20), dtype=np.float32)
    cu = [0, 3, 50, 100]
    parts = [together[:, i] for i in range(3)]
    right = mha_fast.attention_varlen(*(x.copy() for x in parts), cu, cu)
    assert_same_bits(mha_fast.attention_varlen(*parts, cu, cu), right)


@pytest.mark.parametrize("dtype", ALL_DTYPES)
@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "read-only"])
def test_out_of_any_layout(layout, dtype, isa):
    packed, _, _ = _case("both", dtype, ())
    right, right_lse = mha_fast.attention_varlen(**packed, return_lse=True)
    out = LAYOUTS[layout](np.zeros_like(right))
    returned, lse = mha_fast.attention_varlen(**packed, out=out, return_lse=True)
    assert returned is out
    assert_same_bits(out, right)
    assert_same_bits(lse, right_lse)
    if layout == "inside a larger array":
        assert np.isnan(out.base).sum() == out.base.size - out.size


@pytest.mark.parametrize("dtype", ALL_DTYPES)
@pytest.mark.parametrize("shift", [-1, 0, 1, 5])
@pytest.mark.parametrize("operand", OPERANDS)
def test_out_over_an_input(operand, shift, dtype, isa):
    lengths = [(1, 1), (70, 70), (3, 3)]
    packed = _packed(dtype, lengths, n_kv_head=N_HEAD, value_width=HEAD_WIDTH)
    right = mha_fast.attention_varlen(**packed)
    room = np.zeros(right.size + 16, dtype)
    shared = room[8 : 8 + right.size].reshape(right.shape)
    shared[...] = packed[operand]
    out = room[8 + shift : 8 + shift + right.size].reshape(right.shape)
    mha_fast.attention_varlen(**packed | {operand: shared}, out=out)
    assert_same_bits(out, right)


def test_out_over_the_numbers_per_sequence(isa):
    """Gates, slopes and boundaries in the memory of `out` are read before it is written."""
    packed = _packed(np.float64, [(9, 9)] * 5, n_kv_head=N_HEAD, value_width=4)
    gates = np.random.default_rng(1).random((5, N_HEAD))
    right = mha_fast.attention_varlen(**packed, head_mask=gates, alibi_slopes=gates)
    out = np.zeros((45, N_HEAD, 4))
    shared = out.reshape(-1)[:20].reshape(5, N_HEAD)
    shared[...] = gates
    mha_fast.attention_varlen(**packed, head_mask=shared, alibi_slopes=shared, out=out)
    assert_same_bits(out, right)
    boundaries = out.reshape(-1)[-6:].view(np.int64)
    boundaries[...] = packed["cu_seqlens_q"]
    changed = packed | {"cu_seqlens_q": boundaries, "cu_seqlens_k": boundaries}
    mha_fast.attention_varlen(**changed, out=out)
    assert_same_bits(out, mha_fast.attention_varlen(**packed))


# ---- threads ------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ALL_DTYPES)
@pytest.mark.parametrize("lengths", ["both", "one long and many short", "few rows"])
def test_same_bits_for_any_number_of_threads(lengths, dtype, isa):
    packed, _, _ = _case(lengths, dtype, ())
    options = {"is_causal": True, "query_offset": "end", "return_lse": True}
    right = mha_fast.attention_varlen(**packed, **options, num_threads=1)
    for num_threads in (2, 3, 7, None):
        result = mha_fast.attention_varlen(**packed, **options, num_threads=num_threads)
        for one, same in zip(result, right, strict=True):
            assert_same_bits(one, same)


def test_order_of_the_sequences_does_not_matter(isa):
    packed, _, _ = _case("both", np.float32, ())
    out = mha_fast.attention_varlen(**packed)
    parts = [inputs for _, inputs, _ in _one_by_one(packed, {})][::-1]
    backwards = {
        name: np.concatenate([inputs[i].swapaxes(0, 1) for inputs in parts])
        for i, name in enumerate(OPERANDS)
    }
    cu_q, cu_k = np.cumsum([(0, 0), *LENGTHS["both"][::-1]], axis=0).T
    turned = mha_fast.attention_varlen(**backwards, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k)
    cu = packed["cu_seqlens_q"]
    spans = list(itertools.pairwise(cu))
    assert_same_bits(turned, np.concatenate([out[a:b] for a, b in spans[::-1]]))


# ---- errors -------------------------------------------------------------------------------------


def _array(shape, dtype=np.float32):
    return np.zeros(shape, dtype)


# The valid call has 12 rows of query in 2 sequences, 17 of key, 4 heads over 2.
# id: (wrong arguments, error, words that the message has to contain)
ERRORS = {
    # operands
    "integer query": ({"query": _array((12, 4, 6), np.int64)}, TypeError, "query int64"),
    "wider key": ({"key": _array((17, 2, 6), np.float64)}, TypeError, "key float64 float32"),
    "narrower value": ({"value": _array((17, 2, 3), np.float16)}, TypeError, "value float16"),
    "masked array": (
        {"key": np.ma.masked_array(_array((17, 2, 6)), False)},
        TypeError,
        "key masked array",
    ),
    "query of rank 4": (
        {"query": _array((1, 12, 4, 6))},
        ValueError,
        "query (1, 12, 4, 6) (rows, heads, width)",
    ),
    "all of rank 2": (
        dict.fromkeys(OPERANDS, _array((12, 6))),
        ValueError,
        "query (12, 6) (rows, heads, width)",
    ),
    "key of rank 2": ({"key": _array((17, 6))}, ValueError, "key (17, 6) (rows, heads, width)"),
    "value of rank 4": ({"value": _array((1, 17, 2, 3))}, ValueError, "value (1, 17, 2, 3)"),
    "head width": ({"key": _array((17, 2, 7))}, ValueError, "key (17, 2, 7) 6 query"),
    "rows of value": ({"value": _array((16, 2, 3))}, ValueError, "value (16, 2, 3) 17 key"),
    "heads of value": ({"value": _array((17, 4, 3))}, ValueError, "value (17, 4, 3) 2 key"),
    "heads not a multiple": (
        {"key": _array((17, 3, 6)), "value": _array((17, 3, 3))},
        ValueError,
        "query 4 3 key",
    ),
    "no key heads": (
        {"key": _array((17, 0, 6)), "value": _array((17, 0, 3))},
        ValueError,
        "query 4 0 key",
    ),
    # boundaries
    "float boundaries": ({"cu_seqlens_q": [0.0, 5.0, 12.0]}, TypeError, "cu_seqlens_q float64 int"),
    "bool boundaries": ({"cu_seqlens_k": [False, True]}, TypeError, "cu_seqlens_k bool int"),
    "no boundaries": ({"cu_seqlens_q": None}, TypeError, "cu_seqlens_q int"),
    "text as boundaries": ({"cu_seqlens_k": "abc"}, TypeError, "cu_seqlens_k int"),
    "boundaries of rank 0": ({"cu_seqlens_q": 12}, ValueError, "cu_seqlens_q () sequences + 1"),
    "boundaries of rank 2": (
        {"cu_seqlens_k": [[0, 5, 17]]},
        ValueError,
        "cu_seqlens_k (1, 3) sequences + 1",
    ),
    "empty boundaries": (
        {"cu_seqlens_q": np.array([], int)},
        ValueError,
        "cu_seqlens_q (0,) sequences + 1",
    ),
    "not from 0": ({"cu_seqlens_q": [1, 5, 12]}, ValueError, "cu_seqlens_q 1 5 12 from 0"),
    "negative": ({"cu_seqlens_k": [0, -5, 17]}, ValueError, "cu_seqlens_k -5 rise"),
    "falling": ({"cu_seqlens_k": [0, 18, 17]}, ValueError, "cu_seqlens_k 18 17 rise"),
    "rows behind the last": ({"cu_seqlens_q": [0, 5, 11]}, ValueError, "cu_seqlens_q 11 12 query"),
    "past the last row": ({"cu_seqlens_k": [0, 5, 18]}, ValueError, "cu_seqlens_k 18 17 key"),
    "no sequence but rows": (
        {"cu_seqlens_q": [0], "cu_seqlens_k": [0]},
        ValueError,
        "cu_seqlens_q 0 12 query",
    ),
    "different numbers": ({"cu_seqlens_k": [0, 5, 9, 17]}, ValueError, "cu_seqlens_k 4 3"),
    # options
    "window": ({"window": (-1, 0)}, ValueError, "window -1"),
    "window as a number": ({"window": 3}, TypeError, "window 3"),
    "word as offset": ({"query_offset": "start"}, ValueError, "query_offset start end"),
    "float offset": ({"query_offset": 1.5}, TypeError, "query_offset float64 int"),
    "number of offsets": ({"query_offset": [1, 2, 3]}, ValueError, "query_offset (3,) (2,)"),
    "scale": ({"scale": np.inf}, ValueError, "scale inf finite"),
    "softcap": ({"softcap": 0.0}, ValueError, "softcap 0.0"),
    "number of slopes": ({"alibi_slopes": _array(3)}, ValueError, "alibi_slopes (3,) (4,)"),
    "slopes of a wrong batch": (
        {"alibi_slopes": _array((3, 4))},
        ValueError,
        "alibi_slopes (3, 4) (2, 4)",
    ),
    "number of sinks": ({"sinks": _array(5)}, ValueError, "sinks (5,) (4,)"),
    "sinks per sequence": ({"sinks": _array((2, 4))}, ValueError, "sinks (2, 4) (4,)"),
    "number of gates": ({"head_mask": _array((2, 2))}, ValueError, "head_mask (2, 2) (4,)"),
    "text as gates": ({"head_mask": ["a"] * 4}, TypeError, "head_mask real"),
    "causal as text": ({"is_causal": "yes"}, TypeError, "is_causal 'yes' True False"),
    "lse as text": ({"return_lse": "no"}, TypeError, "return_lse 'no' True False"),
    "precision": ({"precision": "low"}, ValueError, "precision 'low' highest high"),
    "no thread": ({"num_threads": 0}, ValueError, "num_threads 0"),
    "half a thread": ({"num_threads": 0.5}, TypeError, "num_threads 0.5"),
    # out
    "out of heads first": ({"out": _array((4, 12, 3))}, ValueError, "out (4, 12, 3) (12, 4, 3)"),
    "out of key's width": ({"out": _array((12, 4, 6))}, ValueError, "out (12, 4, 6) (12, 4, 3)"),
    "out of another dtype": (
        {"out": _array((12, 4, 3), np.float64)},
        TypeError,
        "out float64 float32",
    ),
    "out as a list": ({"out": [1.0]}, TypeError, "out list array"),
    "read-only out": (
        {"out": _read_only(_array((12, 4, 3)))},
        ValueError,
        "out read-only writeable",
    ),
}


def _valid():
    shapes = {"query": (12, 4, 6), "key": (17, 2, 6), "value": (17, 2, 3)}
    rows = {name: np.ones(shape, np.float32) for name, shape in shapes.items()}
    return rows | {"cu_seqlens_q": [0, 5, 12], "cu_seqlens_k": [0, 5, 17]}


@pytest.mark.parametrize("case", ERRORS)
def test_error_names_argument_expectation_and_finding(case):
    wrong, error, words = ERRORS[case]
    out = np.full((12, 4, 3), 7, np.float32)
    with pytest.raises(error) as raised:
        mha_fast.attention_varlen(**_valid() | {"out": out} | wrong)
    message = str(raised.value)
    name = words.split()[0]
    assert message.startswith(name + " "), message
    assert [word for word in words.split() if word not in message] == [], message
    assert (out == 7).all()


@pytest.mark.parametrize("option", ["attn_mask", "kv_lengths"])
def test_options_that_make_no_sense_here_are_not_taken(option):
    with pytest.raises(TypeError, match=option):
        mha_fast.attention_varlen(**_valid(), **{option: [1, 1]})


WRAPPING = """
import numpy as np
import mha_fast
x = np.ones((12, 4, 8), np.float32)
most = 2**63
try:
    mha_fast.attention_varlen(x, x, x, np.array([0, most - 1, -most, -1, 12]), [0, 3, 6, 9, 12])
except ValueError as error:
    print(str(error).split()[0])
"""


def test_boundaries_whose_differences_wrap_around_are_an_error(tmp_path):
    """Each is 1 or more above the one before, modulo 2**64; taken for lengths they would crash."""
    process = run_python(WRAPPING, tmp_path)
    assert process.stdout == "cu_seqlens_q\n", process.stderr
