"""head_statistics(): every measurement of the kernel against the reference."""

import functools
import itertools
import sys
from typing import NamedTuple

import numpy as np
import pytest
from _dtypes import ALL_DTYPES, BFLOAT16, NEEDS_BFLOAT16, half_ulp
from _options import N_BATCH, N_HEAD, OPTIONS, SCORE_ERRORS, arguments_of, zeros
from _support import DTYPES, assert_same_bits, normal_inputs, run_python

import mha_fast
from mha_fast import reference

INF, NAN = np.inf, np.nan
SIZES = {"tiles": {"n_query": 37, "n_key": 150}, "one query": {"n_query": 1, "n_key": 520}}

# Means over the queries, one number per head; then those with one more axis.
PER_HEAD = ("entropy", "confidence", "mean_distance")
MEANS = (*PER_HEAD, "offset_mass", "offset_argmax", "key_mass")
FIELDS = (*MEANS, "top_key", "received")
MEASURES = ("offsets", "key_sets", "ignore_keys", "received")

# The gates of heads are no option here: a weight does not depend on them.
SCORE_OPTIONS = [name for name in OPTIONS if not name.startswith("head mask")]

# How far a weight may be from the right one, in units of eps * (4 + size of its logit): the logit,
# its exponential, the total, the division. Means, masses and sums keep the relative error of the
# weights. Found: 0.6 at most, and 2.4 in sums of equal float64 weights, where the reference errs.
MULTIPLE = 4


def _asked_for(n_key):
    """Something of everything that can be asked for."""
    every_third = np.arange(n_key) % 3 == np.arange(N_BATCH)[:, None]
    return {
        "offsets": (0, -1, 3, -n_key - 40, n_key),
        "key_sets": [[0, n_key - 1], every_third, [], np.arange(n_key) > n_key // 2],
        "ignore_keys": every_third,
        "received": True,
    }


class Right(NamedTuple):
    """The measurements of the reference, the weights behind them, and their relative error."""

    statistics: mha_fast.HeadStatistics
    weights: np.ndarray
    position: np.ndarray
    relative: float


def _right(query, key, attn_mask=None, **arguments):
    options = {name: x for name, x in arguments.items() if name not in MEASURES}
    position = reference._scores.positions(
        query.shape[-2], key.shape[-2], options.get("query_offset", 0), options.get("kv_lengths")
    )
    with np.errstate(invalid="ignore"):
        return Right(
            reference.head_statistics(query, key, attn_mask, **arguments),
            reference.attention_weights(query, key, attn_mask, **options),
            position[..., 0] if query.ndim > 2 else position[0, :, 0],
            MULTIPLE * _eps(query.dtype) * (4 + _size_of_logits(query, key, attn_mask, **options)),
        )


def _eps(dtype):
    """Of the arithmetic: that of float32 for 16 bits."""
    return np.finfo(np.float64 if dtype == np.float64 else np.float32).eps


def _size_of_logits(query, key, attn_mask=None, sinks=None, num_threads=None, **options):
    """What rounding errors are proportional to: the logits, and the terms they are sums of."""
    query, key = (x.astype(np.float64) for x in (query, key))
    if query.ndim == 2:
        query, key = query[None], key[None]
    key = key.repeat(query.shape[-3] // max(key.shape[-3], 1), axis=-3)
    scores, _ = reference.masked_scores(query, key, attn_mask, **options)
    terms, _ = reference.masked_scores(abs(query), abs(key), scale=options.get("scale"))
    return sum(
        np.abs(x[np.isfinite(x)]).max(initial=0)
        for x in (scores, terms, np.array([0.0] if sinks is None else sinks))
    )


def _limits(right, dtype):
    """Largest error of each field. Weights below the normal numbers of a dtype may come out as 0."""
    finfo = np.finfo(np.float64 if dtype == np.float64 else np.float32)
    unseen = 1e6 * float(finfo.tiny)  # times a distance, or a logarithm
    limits = {
        name: right.relative * np.abs(getattr(right.statistics, name)) + unseen
        for name in FIELDS
        if name not in ("top_key", "offset_argmax") and getattr(right.statistics, name) is not None
    }
    # -sum P ln P is as uncertain as ln P is, where P is near 1.
    limits["entropy"] += right.relative
    return limits


def _assert_near(found, formula, limit, name):
    """No error above `limit`, an array; NaN in the same places."""
    assert found.dtype == np.float64, name
    assert found.shape == formula.shape, name
    np.testing.assert_array_equal(np.isnan(found), np.isnan(formula), err_msg=name)
    seen = ~np.isnan(formula)
    error, limit = np.abs(found - formula)[seen], limit[seen]
    worst = np.argmax(error - limit) if error.size else None
    assert worst is None or error[worst] <= limit[worst], name


def _assert_top_key(top_key, right):
    """The key has the largest weight, or one that rounding cannot tell from it."""
    formula = right.statistics.top_key
    assert top_key.dtype == np.int64
    np.testing.assert_array_equal(top_key == -1, formula == -1)
    if right.weights.shape[-1]:
        pairs = (np.maximum(x, 0)[..., None] for x in (top_key, formula))
        own, largest = (np.take_along_axis(right.weights, x, -1)[..., 0] for x in pairs)
        seen = formula >= 0
        assert (own[seen] >= (1 - 2 * right.relative) * largest[seen]).all()


def _hits(found, right):
    """`offset_argmax` by its definition, from the top keys that the kernel found."""
    hits = [found.top_key == right.position + d for d in found.offsets]
    counted = found.top_key >= 0
    with np.errstate(invalid="ignore"):
        shares = [(hit & counted).sum(axis=-1) / counted.sum(axis=-1) for hit in hits]
    return np.stack(shares, axis=-1) if shares else np.empty((*found.entropy.shape, 0))


def _assert_as(right, found, dtype):
    """Every field of `found`, where no query has NaN among its scores."""
    assert found.offsets == right.statistics.offsets
    for name, limit in _limits(right, dtype).items():
        _assert_near(getattr(found, name), getattr(right.statistics, name), limit, name)
    for name in ("key_mass", "received"):
        assert (getattr(found, name) is None) == (getattr(right.statistics, name) is None)
    _assert_top_key(found.top_key, right)
    np.testing.assert_allclose(found.offset_argmax, _hits(found, right), rtol=1e-15)


def _assert_correct(query, key, attn_mask=None, **arguments):
    found = mha_fast.head_statistics(query, key, attn_mask, **arguments)
    _assert_as(_right(query, key, attn_mask, **arguments), found, query.dtype)
    return found


def _assert_same(found, right, names=FIELDS):
    """Equal to the last bit."""
    for name in names:
        one, other = getattr(found, name), getattr(right, name)
        if other is None:
            assert one is None, name
        else:
            assert_same_bits(np.ascontiguousarray(one), np.ascontiguousarray(other))


def _query_and_key(dtype, **sizes):
    return normal_inputs(dtype, **SIZES["tiles"] | sizes)[:2]


@functools.cache
def _case(names, dtype, size):
    """Inputs, arguments and the right answer; kept, since every instruction set asks for them."""
    sizes = SIZES[size]
    query, key = _query_and_key(dtype, batch=(N_BATCH,), n_head=N_HEAD, **sizes)
    options = arguments_of(names, np.float64 if dtype == np.float64 else np.float32, **sizes)
    arguments = options | _asked_for(sizes["n_key"])
    return query, key, arguments, _right(query, key, **arguments)


# ---- options ------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", ALL_DTYPES)
@pytest.mark.parametrize("names", [(), *zip(SCORE_OPTIONS)], ids=" + ".join)
def test_option_alone(names, dtype, size, isa):
    query, key, arguments, right = _case(names, dtype, size)
    _assert_as(right, mha_fast.head_statistics(query, key, **arguments), dtype)


def _pairs():
    for pair in itertools.combinations(SCORE_OPTIONS, 2):
        if arguments_of(pair, np.float32, 2, 3) is not None:
            yield pair


@pytest.mark.parametrize("pair", list(_pairs()), ids=" + ".join)
def test_pair_of_options(pair, isa):
    query, key, arguments, right = _case(pair, np.float32, "tiles")
    _assert_as(right, mha_fast.head_statistics(query, key, **arguments), np.float32)


@pytest.mark.parametrize("dtype", ALL_DTYPES)
def test_all_options_together(dtype, isa):
    names = ("float mask", "causal", "window", "offset per sequence", "lengths", "scale",
             "softcap", "alibi", "sinks")  # fmt: skip
    query, key, arguments, right = _case(names, dtype, "tiles")
    _assert_as(right, mha_fast.head_statistics(query, key, **arguments), dtype)


@pytest.mark.parametrize("names", [(), ("causal",), ("bool mask",), ("sinks",)], ids=" + ".join)
@pytest.mark.parametrize("dtype", ALL_DTYPES)
def test_asking_for_more_does_not_change_the_rest(dtype, names, isa):
    query, key, arguments, _ = _case(names, dtype, "tiles")
    whole = mha_fast.head_statistics(query, key, **arguments)
    options = {name: x for name, x in arguments.items() if name not in MEASURES}
    plain = mha_fast.head_statistics(query, key, **options)
    assert plain.offsets == (-1, 0, 1)
    assert plain.key_mass is None and plain.received is None
    _assert_same(plain, whole, ("entropy", "mean_distance", "top_key"))
    for left_out in MEASURES:
        fewer = {name: x for name, x in arguments.items() if name != left_out}
        found = mha_fast.head_statistics(query, key, **fewer)
        of_it = {"offsets": ("offset_mass", "offset_argmax"), "key_sets": ("key_mass",),
                 "ignore_keys": ("confidence",), "received": ("received",)}[left_out]  # fmt: skip
        _assert_same(found, whole, [name for name in FIELDS if name not in of_it])


# ---- sizes --------------------------------------------------------------------------------------

QUERIES = (1, 2, 3, 4, 7, 8, 9, 11, 12, 13, 15, 16, 17, 23, 24, 25, 31, 32, 33, 47, 48, 49, 63, 64,
           65, 95, 96, 97, 127, 128, 129, 255, 256, 257, 513)  # fmt: skip
KEYS = (1, 2, 3, 7, 8, 9, 63, 64, 65, 127, 128, 129, 192, 193, 511, 512, 513, 575, 577, 1025)
WIDTHS = (0, 1, 3, 4, 7, 8, 9, 15, 16, 17, 31, 33, 64, 65, 129, 257)
SMALL = {"batch": (1,), "n_head": 2, "n_kv_head": 1, "head_width": 5}
EVERYTHING = {"key_sets": [[0, -1]], "ignore_keys": [0], "received": True, "offsets": (-1, 2)}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n_query", QUERIES)
def test_number_of_queries(n_query, dtype, isa):
    query, key = _query_and_key(dtype, **SMALL | {"n_query": n_query, "n_key": 67})
    _assert_correct(query, key, **EVERYTHING, is_causal=True, query_offset="end")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n_key", KEYS)
def test_number_of_keys(n_key, dtype, isa):
    query, key = _query_and_key(dtype, **SMALL | {"n_query": 19, "n_key": n_key})
    _assert_correct(query, key, **EVERYTHING)
    _assert_correct(query, key, **EVERYTHING, window=(n_key // 3, 1), query_offset=n_key // 2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_width", WIDTHS)
def test_head_width(head_width, dtype, isa):
    sizes = SMALL | {"n_query": 9, "n_key": 70, "head_width": head_width}
    _assert_correct(*_query_and_key(dtype, **sizes), **EVERYTHING)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n_query", [7, 17, 64, 65, 97, 257])
def test_causal_edge_against_tile_edges(n_query, dtype, isa):
    for n_key in (63, 64, 65, 128, 129):
        query, key = _query_and_key(dtype, **SMALL | {"n_query": n_query, "n_key": n_key})
        _assert_correct(query, key, **EVERYTHING, is_causal=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("length", [0, 1, 63, 64, 65, 511, 512, 513, 600])
def test_length_against_block_edges(length, dtype, isa):
    query, key = _query_and_key(dtype, **SMALL | {"n_query": 19, "n_key": 600})
    found = _assert_correct(query, key, **EVERYTHING, kv_lengths=[length])
    assert not found.received[..., length:].any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_many_queries_and_keys(dtype, isa):
    """Long sums: their error must not grow with the number of terms."""
    for n_query, n_key in ((40, 3000), (3000, 40)):
        sizes = SMALL | {"n_query": n_query, "n_key": n_key, "head_width": 2}
        _assert_correct(*_query_and_key(dtype, **sizes), **EVERYTHING)


ZEROS = {  # shapes of query and key
    "queries": ((2, 0, 4), (2, 5, 4)),
    "keys": ((2, 3, 4), (2, 0, 4)),
    "queries and keys": ((2, 0, 4), (2, 0, 4)),
    "batch": ((0, 2, 3, 4), (0, 2, 5, 4)),
    "heads": ((0, 3, 4), (0, 5, 4)),
    "head width": ((2, 3, 0), (2, 5, 0)),
}


@pytest.mark.parametrize("dtype", ALL_DTYPES)
@pytest.mark.parametrize("case", ZEROS)
def test_axis_of_length_0(case, dtype, isa):
    query, key = (np.ones(shape, dtype) for shape in ZEROS[case])
    _assert_correct(query, key, key_sets=[[]], ignore_keys=[], received=True)
    _assert_correct(query, key, key_sets=[], offsets=())


# ---- shapes -------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ALL_DTYPES)
@pytest.mark.parametrize(("n_head", "n_kv_head"), [(1, 1), (4, 4), (6, 1), (9, 3), (34, 2)])
def test_groups_of_heads(n_head, n_kv_head, dtype, isa):
    query, key = _query_and_key(dtype, n_head=n_head, n_kv_head=n_kv_head)
    slopes, sinks = np.linspace(0, 0.1, n_head), np.linspace(-1, 1, n_head)
    options = {"is_causal": True, "alibi_slopes": slopes, "sinks": sinks, "query_offset": 60}
    grouped = _assert_correct(query, key, **EVERYTHING, **options)
    repeated = key.repeat(n_head // n_kv_head, axis=1)
    _assert_same(mha_fast.head_statistics(query, repeated, **EVERYTHING, **options), grouped)


@pytest.mark.parametrize("dtype", ALL_DTYPES)
def test_ranks_2_and_3_are_parts_of_rank_4(dtype, isa):
    query, key = _query_and_key(dtype)
    mask = np.random.default_rng(0).random((37, 150)) < 0.5
    options = EVERYTHING | {
        "is_causal": True,
        "query_offset": 80,
        "ignore_keys": np.arange(150) < 9,
    }
    whole = mha_fast.head_statistics(query, key, mask, **options)
    rank_3 = mha_fast.head_statistics(query[1], key[1], mask, **options)
    rank_2 = _assert_correct(query[1, 3], key[1, 1], mask, **options)
    for name in FIELDS:
        assert_same_bits(getattr(rank_3, name), getattr(whole, name)[1])
        assert_same_bits(np.asarray(getattr(rank_2, name)), np.asarray(getattr(rank_3, name)[3]))
    assert rank_2.entropy.shape == () and rank_2.offset_mass.shape == (2,)
    assert rank_2.top_key.shape == (37,) and rank_2.received.shape == (150,)


def test_one_head_with_options_per_head(isa):
    query, key = (x[0, 0] for x in _query_and_key(np.float32))
    options = {"sinks": [1.0], "alibi_slopes": [0.1], "kv_lengths": 100, "query_offset": "end"}
    _assert_correct(query, key, **EVERYTHING, **options)


@pytest.mark.parametrize(
    ("of_query", "of_key"),
    [((3, 2), (2,)), ((1,), (5,)), ((3, 1), (1, 2)), ((), (2, 2)), ((2,), ())],
)
def test_batch_axes_that_broadcast(of_query, of_key, isa):
    rng = np.random.default_rng(0)
    query = rng.standard_normal((*of_query, 4, 9, 8), dtype=np.float32)
    key = rng.standard_normal((*of_key, 2, 70, 8), dtype=np.float32)
    batch = np.broadcast_shapes(of_query, of_key)
    arguments = {
        "kv_lengths": np.broadcast_to(rng.integers(0, 71, batch[-1]), batch),
        "query_offset": rng.integers(-5, 70, batch),
        "key_sets": [rng.random((*batch, 70)) < 0.5, rng.random((batch[-1], 1)) < 0.5, [3, 5]],
        "ignore_keys": rng.random((batch[-1], 70)) < 0.5,
        "received": True,
    }
    found = _assert_correct(query, key, **arguments)
    assert found.entropy.shape == (*batch, 4)
    assert found.key_mass.shape == (*batch, 4, 3)
    assert found.received.shape == (*batch, 4, 70)


MASK_KINDS = {
    "bool": np.bool_, "float16": np.float16, "float32": np.float32, "float64": np.float64,
    "bfloat16": pytest.param(BFLOAT16, marks=NEEDS_BFLOAT16, id="bfloat16"),
}  # fmt: skip


@pytest.mark.parametrize("kind", MASK_KINDS.values(), ids=lambda kind: np.dtype(kind).name)
def test_mask_of_every_kind_and_broadcast_shape(kind, isa):
    query, key = _query_and_key(np.float32)
    rng = np.random.default_rng(0)
    for own in itertools.product((2, 1), (4, 1), (37, 1), (150, 1)):
        if kind == np.bool_:
            mask = rng.random(own) < 0.7
        else:
            mask = np.where(rng.random(own) < 0.2, -INF, rng.standard_normal(own)).astype(kind)
        whole = np.broadcast_to(mask, (2, 4, 37, 150))
        right = _assert_correct(query, key, whole.copy(), **EVERYTHING)
        forms = [mask, whole, np.asfortranarray(mask)]
        while forms[-1].ndim and forms[-1].shape[0] == 1:
            forms.append(forms[-1][0])
        for form in forms:
            _assert_same(mha_fast.head_statistics(query, key, form, **EVERYTHING), right)


# ---- what is asked for --------------------------------------------------------------------------


def _members():
    members = np.zeros((2, 150), bool)
    members[0, [0, 64, 149]] = True
    members[1, 70:90] = True
    return members


# Each gives the sets [0, 64, 149] and 70 ... 89.
SET_FORMS = {
    "numbers": lambda: [[0, 64, 149], list(range(70, 90))],
    "numbers out of order, some twice": lambda: ([149, 0, 64, 0], [*range(89, 69, -1), 70]),
    "numbers from the end": lambda: [[0, -86, -1], range(-80, -60)],
    "arrays of numbers": lambda: [np.array([0, 64, 149], np.uint8), np.arange(70, 90, dtype=">i4")],
    "one bool array": lambda: _members(),
    "bool array backwards": lambda: _members()[:, ::-1].copy()[:, ::-1],
    "list of bool arrays": lambda: list(_members()),
    "nested lists of bools": lambda: _members().tolist(),
    "numbers and bools": lambda: ([0, 64, 149], _members()[1]),
    "with the batch": lambda: np.broadcast_to(_members()[:, None], (2, 2, 150)),
    "with a batch of one": lambda: list(_members()[:, None]),
}


@pytest.mark.parametrize("form", SET_FORMS)
def test_key_sets_in_every_form(form, isa):
    query, key = _query_and_key(np.float32)
    right = mha_fast.head_statistics(query, key, key_sets=_members(), is_causal=True)
    found = mha_fast.head_statistics(query, key, key_sets=SET_FORMS[form](), is_causal=True)
    _assert_same(found, right)


@pytest.mark.parametrize("form", SET_FORMS)
def test_ignored_keys_in_every_form(form, isa):
    query, key = _query_and_key(np.float32)
    for ignored, members in zip(SET_FORMS[form](), _members(), strict=True):
        right = mha_fast.head_statistics(query, key, ignore_keys=members)
        _assert_same(mha_fast.head_statistics(query, key, ignore_keys=ignored), right)


@pytest.mark.parametrize("dtype", ALL_DTYPES)
def test_many_sets_and_offsets(dtype, isa):
    query, key = _query_and_key(dtype)
    sets = np.random.default_rng(0).random((40, 2, 150)) < 0.3
    _assert_correct(query, key, key_sets=sets, offsets=range(-50, 160), is_causal=True)


def test_sets_and_ignored_keys_per_sequence(isa):
    query, key = _query_and_key(np.float32)
    some = np.random.default_rng(0).random((2, 150)) < [[0.3], [0.8]]
    found = _assert_correct(query, key, key_sets=[some, ~some], ignore_keys=some)
    for b in range(2):
        alone = mha_fast.head_statistics(
            query[b], key[b], key_sets=[some[b], ~some[b]], ignore_keys=some[b]
        )
        assert_same_bits(found.key_mass[b], alone.key_mass)
        assert_same_bits(found.confidence[b], alone.confidence)
    np.testing.assert_allclose(found.key_mass.sum(axis=-1), 1, rtol=64 * _eps(np.float32))


@pytest.mark.parametrize("nothing", [[], np.empty(0, np.int32), np.zeros(150, bool)], ids=repr)
def test_empty_sets(nothing, isa):
    query, key = _query_and_key(np.float32)
    right = mha_fast.head_statistics(query, key)
    found = mha_fast.head_statistics(query, key, key_sets=[nothing, [0]], ignore_keys=nothing)
    _assert_same(found, right, ("entropy", "confidence", "mean_distance", "offset_mass", "top_key"))
    assert found.key_mass.shape == (2, 4, 2)
    assert not found.key_mass[..., 0].any() and found.key_mass[..., 1].all()


@pytest.mark.parametrize("sets", [[], (), np.empty((0, 150), bool)], ids=repr)
def test_no_set_among_the_sets(sets, isa):
    query, key = _query_and_key(np.float32)
    found = mha_fast.head_statistics(query, key, key_sets=sets)
    assert found.key_mass.shape == (2, 4, 0)
    _assert_same(found, mha_fast.head_statistics(query, key), [*PER_HEAD, "offset_mass", "top_key"])


def test_query_that_sees_ignored_keys_only_has_no_confidence(isa):
    query, key = _query_and_key(np.float32)
    found = _assert_correct(query, key, window=(0, 0), ignore_keys=np.arange(150) < 20)
    np.testing.assert_allclose(found.confidence, 17 / 37)
    assert not mha_fast.head_statistics(query, key, ignore_keys=np.arange(150)).confidence.any()
    np.testing.assert_array_equal(found.top_key, np.broadcast_to(np.arange(37), (2, 4, 37)))


@pytest.mark.parametrize("first", [0, 100, -20, 149, -37, 150, 10**12, -(10**12)])
def test_offsets_that_point_anywhere(first, isa):
    query, key = _query_and_key(np.float32)
    offsets = (0, -1, 1, -63, 64, -149, 150, 2, 2, -first, 1 - first, 1 << 60, -(1 << 60))
    found = _assert_correct(query, key, offsets=offsets, query_offset=first)
    assert found.offsets == offsets
    assert all(type(d) is int for d in found.offsets)
    assert_same_bits(found.offset_mass[..., 7].copy(), found.offset_mass[..., 8].copy())
    assert not found.offset_mass[..., -2:].any() and not found.offset_argmax[..., -2:].any()


def test_offset_at_an_excluded_key_has_no_mass(isa):
    query, key = _query_and_key(np.float32)
    found = _assert_correct(query, key, is_causal=True, query_offset=5, offsets=(1, 64, 0, -5))
    assert not found.offset_mass[..., :2].any() and not found.offset_argmax[..., :2].any()
    assert found.offset_mass[..., 2:].all()


@pytest.mark.parametrize(
    "offsets",
    [[3, -2], np.array([3, -2], np.int8), np.array([3, 0, -2], ">i8")[::2], (np.uint8(3), -2)],
    ids=repr,
)
def test_offsets_in_every_form(offsets, isa):
    query, key = _query_and_key(np.float32)
    found = mha_fast.head_statistics(query, key, offsets=offsets)
    assert found.offsets == (3, -2)
    _assert_same(found, mha_fast.head_statistics(query, key, offsets=(3, -2)))


def test_no_offsets(isa):
    found = _assert_correct(*_query_and_key(np.float32), offsets=())
    assert found.offsets == ()
    assert found.offset_mass.shape == found.offset_argmax.shape == (2, 4, 0)


@pytest.mark.parametrize("dtype", ALL_DTYPES)
@pytest.mark.parametrize("names", [(), *zip(SCORE_OPTIONS)], ids=" + ".join)
def test_received_is_the_sum_over_attention_weights(names, dtype, isa):
    """The same weights: only the additions differ."""
    query, key, arguments, _ = _case(names, dtype, "tiles")
    found = mha_fast.head_statistics(query, key, **arguments)
    options = {name: x for name, x in arguments.items() if name not in MEASURES}
    weights = mha_fast.attention_weights(query, key, **options).astype(np.float64)
    limit = 16 * _eps(dtype) * weights.sum(axis=-2)
    if dtype not in DTYPES:  # each weight was rounded
        limit += half_ulp(weights, dtype).sum(axis=-2)
    _assert_near(found.received, weights.sum(axis=-2), limit, "received")


@pytest.mark.parametrize("dtype", ALL_DTYPES)
def test_received_adds_up_to_the_number_of_queries_with_a_key(dtype, isa):
    query, key = _query_and_key(dtype, n_query=300, n_key=1100)
    found = mha_fast.head_statistics(query, key, is_causal=True, query_offset=-30, received=True)
    total = found.received.sum(axis=-1)
    np.testing.assert_allclose(total, 270, rtol=64 * _eps(dtype))
    assert not found.received[..., 270:].any()


@pytest.mark.parametrize("received", [True, np.True_, 1])
def test_received_when_asked_for(received):
    query, key = _query_and_key(np.float32)
    assert mha_fast.head_statistics(query, key, received=received).received.shape == (2, 4, 150)
    assert mha_fast.head_statistics(query, key, received=not received).received is None
    assert mha_fast.head_statistics(query, key).received is None


# ---- known answers ------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ALL_DTYPES)
@pytest.mark.parametrize("way", ["equal keys", "scale 0", "no width"])
def test_equal_weights_and_the_lowest_key_of_a_tie(way, dtype, isa):
    """Ties within a block, across blocks, and where the first visible key is in the middle of one."""
    query, key = _query_and_key(dtype, n_query=110, n_key=110)
    options = {"window": (70, 1), "received": True}
    if way == "equal keys":
        key[...] = key[..., :1, :]
    elif way == "scale 0":
        options["scale"] = 0
    else:
        query, key = query[..., :0], key[..., :0]
    found = _assert_correct(query, key, **options)
    first = np.maximum(np.arange(110) - 70, 0)
    n_seen = np.minimum(np.arange(110) + 2, 110) - first
    np.testing.assert_array_equal(found.top_key, np.broadcast_to(first, (2, 4, 110)))
    limit = 16 * _eps(dtype)
    np.testing.assert_allclose(found.entropy, np.log(n_seen).mean(), rtol=limit)
    np.testing.assert_allclose(found.confidence, (1 / n_seen).mean(), rtol=limit)


@pytest.mark.parametrize("places", [(3, 9), (5, 140), (63, 64), (70, 120, 149), (0, 149)])
def test_lowest_of_the_keys_that_share_the_largest_weight(places, isa):
    query, key = np.ones((37, 4), np.float32), np.zeros((150, 4), np.float32)
    key[list(places)] = 1
    found = mha_fast.head_statistics(query, key)
    np.testing.assert_array_equal(found.top_key, np.full(37, places[0]))


@pytest.mark.parametrize("dtype", ALL_DTYPES)
def test_a_key_that_takes_all(dtype, isa):
    query, key = np.full((1, 20, 4), 8, dtype), np.zeros((1, 90, 4), dtype)
    key[0, 77] = 250  # exp(-4000) is 0 in any of the dtypes
    found = mha_fast.head_statistics(query, key, key_sets=[[77], [76]], received=True)
    assert found.entropy[0] == 0 and not np.signbit(found.entropy[0])
    assert found.confidence[0] == 1
    assert (found.top_key == 77).all()
    np.testing.assert_array_equal(found.key_mass, [[1, 0]])
    np.testing.assert_array_equal(found.received, [np.where(np.arange(90) == 77, 20.0, 0.0)])
    np.testing.assert_allclose(found.mean_distance, np.abs(77 - np.arange(20)).mean(), rtol=1e-15)


@pytest.mark.parametrize("d", [-1, 0, 1, -70])
@pytest.mark.parametrize("first", [0, 80])
def test_head_of_one_position(d, first, isa):
    n_key = 200
    query = np.eye(n_key, dtype=np.float32)[None, first : first + 100] * 100
    key = np.roll(np.eye(n_key, dtype=np.float32), d, axis=0)[None]
    found = _assert_correct(
        query, key, scale=1.0, offsets=(d, d + 1), query_offset=first, received=True
    )
    outside = sum(not 0 <= first + i + d < n_key for i in range(100))
    np.testing.assert_allclose(found.offset_argmax, [[1 - outside / 100, 0]], rtol=1e-15)
    np.testing.assert_allclose(found.offset_mass[:, 0], 1 - outside / 100, rtol=1e-6)
    np.testing.assert_allclose(found.confidence, 1, rtol=1e-6)


# ---- sinks --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ALL_DTYPES)
def test_sink_takes_its_share(dtype, isa):
    query, key = _query_and_key(dtype)
    sinks = np.array([-INF, 0.0, 4.0, 20.0])
    found = _assert_correct(query, key, sinks=sinks, key_sets=[range(150)], received=True)
    lse = mha_fast.attention_weights(query, key, sinks=sinks, return_lse=True)[1]
    left = (1 - np.exp(sinks[:, None] - lse.astype(np.float64))).mean(axis=-1)
    np.testing.assert_allclose(found.key_mass[..., 0], left, rtol=1e-5, atol=1e-6)
    assert (np.diff(found.key_mass[..., 0], axis=-1) < 0).all()
    plain = mha_fast.head_statistics(query, key)
    assert_same_bits(found.top_key, plain.top_key)
    assert_same_bits(found.entropy[:, 0], plain.entropy[:, 0])


@pytest.mark.parametrize("dtype", ALL_DTYPES)
@pytest.mark.parametrize("sink", [85.0, 200.0, 800.0, 1e30])
def test_sink_that_leaves_nothing_or_almost_nothing(sink, dtype, isa):
    """Weights too small for the dtype of the sums are 0, and so is their entropy."""
    query, key = _query_and_key(dtype)
    found = _assert_correct(query, key, sinks=np.full(4, sink), **EVERYTHING)
    for name in (*PER_HEAD, "offset_mass", "key_mass", "received"):
        assert (np.abs(getattr(found, name)) < 1e-30).all(), name
    assert (found.top_key >= 0).all()


# ---- rows without a key, excluded keys, NaN, large numbers ---------------------------------------


@pytest.mark.parametrize("dtype", ALL_DTYPES)
@pytest.mark.parametrize("way", ["bool mask", "float mask", "length", "no keys", "window"])
@pytest.mark.parametrize("sinks", [None, [0.0, 1.0, -2.0, NAN]], ids=["no sinks", "sinks"])
def test_head_without_any_key(way, sinks, dtype, isa):
    query, key = _query_and_key(dtype, n_key=0 if way == "no keys" else 150)
    options = {
        "bool mask": {"attn_mask": np.zeros((37, 150), bool)},
        "float mask": {"attn_mask": np.full(150, -INF, np.float32)},
        "length": {"kv_lengths": [0, 0]},
        "no keys": {},
        "window": {"window": (0, 5), "query_offset": 150},
    }[way]
    found = mha_fast.head_statistics(
        query, key, **options, sinks=sinks, key_sets=[[]], received=True
    )
    for name in MEANS:
        assert np.isnan(getattr(found, name)).all(), name
    np.testing.assert_array_equal(found.top_key, np.full((2, 4, 37), -1))
    np.testing.assert_array_equal(found.received, np.zeros((2, 4, key.shape[-2])))


@pytest.mark.parametrize("dtype", ALL_DTYPES)
def test_some_heads_without_any_key(dtype, isa):
    query, key = _query_and_key(dtype)
    mask = np.random.default_rng(0).random((2, 4, 37, 150)) < 0.5
    mask[0, 1] = mask[1, 2, 5:] = False
    found = _assert_correct(query, key, mask, **EVERYTHING)
    for name in MEANS:
        is_nan = np.isnan(getattr(found, name)).reshape(2, 4, -1)
        assert is_nan[0, 1].all() and is_nan.sum() == is_nan[0, 1].size, name


@pytest.mark.parametrize("dtype", ALL_DTYPES)
def test_queries_without_a_key_stay_out_of_the_means(dtype, isa):
    query, key = _query_and_key(dtype, n_query=40)
    keeps = np.arange(40) % 3 == 0
    found = _assert_correct(query, key, keeps[:, None], **EVERYTHING)
    some = mha_fast.head_statistics(query[..., keeps, :], key, **EVERYTHING)
    for name in ("entropy", "confidence", "key_mass"):
        np.testing.assert_allclose(getattr(found, name), getattr(some, name), rtol=1e-14)
    np.testing.assert_array_equal(found.top_key[..., keeps], some.top_key)
    assert (found.top_key[..., ~keeps] == -1).all()


@pytest.mark.parametrize("dtype", ALL_DTYPES)
@pytest.mark.parametrize("junk", [NAN, INF, -INF])
@pytest.mark.parametrize("way", ["lengths", "bool mask", "float mask", "window"])
def test_excluded_key_has_no_influence_whatever_it_holds(way, junk, dtype, isa):
    query, key = _query_and_key(dtype)
    seen = np.arange(150) < 120
    options = {
        "lengths": {"kv_lengths": 120},
        "bool mask": {"attn_mask": seen},
        "float mask": {"attn_mask": np.where(seen, 0, -INF)},
        "window": {"window": (None, 119), "query_offset": -36},
    }[way] | EVERYTHING  # fmt: skip
    right = mha_fast.head_statistics(query, key, **options)
    key[..., 120:, :] = junk
    _assert_same(mha_fast.head_statistics(query, key, **options), right)


@pytest.mark.parametrize("dtype", ALL_DTYPES)
@pytest.mark.parametrize("junk", [NAN, INF, -INF])
@pytest.mark.parametrize("operand", ["query", "key"])
@pytest.mark.parametrize("names", [(), ("causal",), ("bool mask",), ("sinks",)], ids=" + ".join)
def test_visible_nan_and_inf_reach_what_depends_on_them(names, operand, junk, dtype, isa):
    query, key, arguments, clean = _case(names, dtype, "tiles")
    query, key = query.copy(), key.copy()
    {"query": query, "key": key}[operand][0, 1, 30, 3] = junk
    found = mha_fast.head_statistics(query, key, **arguments)
    right = _right(query, key, **arguments)
    assert np.isnan(right.statistics.entropy).any()
    # Only what does not hold NaN has an error to speak of, and that is the one of clean inputs.
    right = right._replace(relative=clean.relative)
    for name, limit in _limits(right, dtype).items():
        _assert_near(getattr(found, name), getattr(right.statistics, name), limit, name)
    np.testing.assert_array_equal(found.top_key, right.statistics.top_key)
    np.testing.assert_array_equal(
        np.isnan(found.offset_argmax), np.isnan(right.statistics.offset_argmax)
    )


@pytest.mark.parametrize("d", [-1, -5])
def test_query_without_top_key_is_no_hit_at_position_minus_1(d, isa):
    """-1 says that there is no top key, and must not be taken for p_i + d = -1."""
    query, key = _query_and_key(np.float32)
    query[0, 2, -1 - d] = NAN
    found = mha_fast.head_statistics(query, key, offsets=(d,))
    assert np.isnan(found.offset_argmax[0, 2, 0])
    query[0, 2, -1 - d] = 0
    found = _assert_correct(query, key, np.arange(37)[:, None] != -1 - d, offsets=(d,))
    assert (found.top_key[..., -1 - d] == -1).all()


@pytest.mark.parametrize("dtype", ALL_DTYPES)
def test_score_of_minus_inf_has_no_weight(dtype, isa):
    """By arithmetic, not by a mask; where it is the only one, the query has no key."""
    query, key = np.ones((2, 20, 4), dtype), np.ones((2, 70, 4), dtype)
    key[0, 3:66] = -INF
    key[1] = -INF
    with np.errstate(invalid="ignore"):
        right = _right(query, key, **EVERYTHING)
    found = mha_fast.head_statistics(query, key, **EVERYTHING)
    _assert_as(right._replace(relative=64 * _eps(dtype)), found, dtype)
    np.testing.assert_allclose(found.entropy, [np.log(7), NAN], rtol=1e-6)
    assert (found.top_key == [[0], [-1]]).all()


@pytest.mark.parametrize("dtype", ALL_DTYPES)
def test_huge_and_very_negative_logits_are_ordinary(dtype, isa):
    large = 200.0 if dtype == np.float16 else 1e9
    query = np.full((1, 20, 1), large, dtype)
    key = np.zeros((1, 130, 1), dtype)
    key[0, :, 0] = -large
    key[0, [40, 99], 0] = -large / 2
    found = _assert_correct(query, key, **EVERYTHING)
    np.testing.assert_allclose(found.entropy, np.log(2), rtol=1e-6)
    assert (found.top_key == 40).all()
    np.testing.assert_allclose(found.received.sum(), 20, rtol=1e-6)
    found = mha_fast.head_statistics(query, -key, **EVERYTHING)
    np.testing.assert_allclose(found.entropy, np.log(128), rtol=1e-6)
    assert (found.top_key == 0).all()


@pytest.mark.parametrize("dtype", ALL_DTYPES)
def test_maximum_that_rises_with_every_block(dtype, isa):
    """What is already summed must follow each new maximum."""
    query, key = _query_and_key(dtype, n_key=400)
    _assert_correct(query, key, **EVERYTHING, attn_mask=np.linspace(0, 40, 400))
    _assert_correct(query, key, **EVERYTHING, attn_mask=np.linspace(0, 4000, 400))
    _assert_correct(query, key, **EVERYTHING, attn_mask=np.linspace(0, -300, 400))


# ---- layouts ------------------------------------------------------------------------------------

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
    right = mha_fast.head_statistics(query, key, **EVERYTHING)
    change = LAYOUTS[layout]
    for changed in ((change(query), key), (query, change(key)), (change(query), change(key))):
        _assert_same(mha_fast.head_statistics(*changed, **EVERYTHING), right)


@pytest.mark.parametrize("dtype", (*DTYPES, np.float16))
def test_foreign_byte_order(dtype, isa):
    query, key = _query_and_key(dtype)
    right = mha_fast.head_statistics(query, key, **EVERYTHING)
    foreign = (x.astype(x.dtype.newbyteorder(">")) for x in (query, key))
    _assert_same(mha_fast.head_statistics(*foreign, **EVERYTHING), right)


def test_inputs_are_not_written(isa):
    query, key, arguments, _ = _case(("float mask", "lengths"), np.float32, "tiles")
    arguments = arguments | {"key_sets": _members(), "offsets": np.array([1, 2])}
    given = {"query": query, "key": key, **arguments}
    given = {name: np.array(x) for name, x in given.items() if isinstance(x, np.ndarray)}
    for array in given.values():
        array.flags.writeable = False
    copies = {name: array.copy() for name, array in given.items()}
    mha_fast.head_statistics(**arguments | given)
    for name, array in given.items():
        assert_same_bits(array, copies[name])


# ---- reproducible -------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ALL_DTYPES)
@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"window": (90, 0)}], ids=str)
def test_same_bits_for_any_number_of_threads(options, dtype, isa):
    query, key = _query_and_key(dtype, n_query=300, n_key=1100)
    options = EVERYTHING | options | {"query_offset": "end"}
    right = mha_fast.head_statistics(query, key, **options, num_threads=1)
    for num_threads in (2, 3, 7, None, 2):
        found = mha_fast.head_statistics(query, key, **options, num_threads=num_threads)
        _assert_same(found, right)


@pytest.mark.parametrize("dtype", ALL_DTYPES)
def test_same_bits_alone_and_inside_a_batch(dtype, isa):
    query, key = _query_and_key(dtype, batch=(4,), n_query=70)
    lengths = np.array([150, 0, 70, 149])
    options = EVERYTHING | {"is_causal": True, "query_offset": "end"}
    whole = mha_fast.head_statistics(query, key, kv_lengths=lengths, **options)
    for b, length in enumerate(lengths):
        alone = mha_fast.head_statistics(
            query[b], key[b], kv_lengths=length, num_threads=1, **options
        )
        for name in FIELDS:
            assert_same_bits(getattr(whole, name)[b].copy(), getattr(alone, name))


def test_attention_is_the_same_before_and_after(isa):
    query, key, value = normal_inputs(np.float32, n_query=70)
    options = {"is_causal": True, "query_offset": "end", "return_lse": True}
    before = mha_fast.attention(query, key, value, **options)
    mha_fast.head_statistics(query, key, **EVERYTHING, sinks=[1, 2, 3, 4], softcap=2.0)
    for one, other in zip(mha_fast.attention(query, key, value, **options), before, strict=True):
        assert_same_bits(one, other)


# ---- memory -------------------------------------------------------------------------------------

# Peak memory of the process: Python's own tracing would not see what the kernel takes.
PEAK = """
import numpy as np
import mha_fast

def peak():
    with open("/proc/self/status") as status:
        line = next(line for line in status if line.startswith("VmHWM"))
    return int(line.split()[1]) / 1024

n = 8192
rng = np.random.default_rng(0)
query, key = (rng.standard_normal((n, 64), dtype=np.float32) for _ in range(2))
mha_fast.head_statistics(query[:300], key[:300], received=True)  # thread stacks and the like
before = peak()
found = mha_fast.head_statistics(query, key, {arguments})
print(peak() - before, np.isfinite(found.entropy))
"""

# All weights would be 256 MiB.
CALLS = {
    "plain": "",
    "received": "received=True, is_causal=True",
    "sets and offsets": "key_sets=rng.random((20, n)) < 0.5, ignore_keys=[0], offsets=range(-5, 5)",
    "mask": "np.broadcast_to(rng.random((n, 1)) < 0.9, (n, n)), received=True, sinks=[0.5]",
}


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc, only Linux has it")
@pytest.mark.parametrize("call", CALLS)
def test_peak_stays_under_32_mib(call, tmp_path):
    process = run_python(PEAK.format(arguments=CALLS[call]), tmp_path)
    above, finite = process.stdout.split()
    assert float(above) < 32, process.stderr
    assert finite == "True"


# ---- errors -------------------------------------------------------------------------------------


# The valid call has a batch of 2, 4 heads over 2, 5 queries and 17 keys of width 6.
# id: (wrong arguments, error, words that the message has to contain, the argument first)
ERRORS = {
    **SCORE_ERRORS,
    "integer query": ({"query": zeros((2, 4, 5, 6), np.int64)}, TypeError, "query int64 float32"),
    "number of sinks": ({"sinks": zeros(5)}, ValueError, "sinks (5,) (4,)"),
    # offsets
    "one offset": ({"offsets": 3}, ValueError, "offsets () (offsets,)"),
    "offsets of two axes": ({"offsets": [[1, 2]]}, ValueError, "offsets (1, 2) (offsets,)"),
    "fractions as offsets": ({"offsets": [0.5]}, TypeError, "offsets float64 integers"),
    "bools as offsets": ({"offsets": [True]}, TypeError, "offsets bool integers"),
    "text as offsets": ({"offsets": ["a"]}, TypeError, "offsets integers"),
    "offset out of reach": ({"offsets": [0, 1 << 61]}, ValueError, f"offsets {1 << 61} {1 << 60}"),
    "offset past 64 bits": ({"offsets": [1 << 63]}, ValueError, f"offsets {1 << 63} {1 << 60}"),
    # sets
    "sets as a number": ({"key_sets": 3}, TypeError, "key_sets int sequence"),
    "sets as text": ({"key_sets": "all"}, TypeError, "key_sets str sequence"),
    "sets as a set": ({"key_sets": {1, 2}}, TypeError, "key_sets set sequence"),
    "key past the end": ({"key_sets": [[0], [17]]}, ValueError, "key_sets[1] 17"),
    "key before the start": ({"key_sets": [[-18]]}, ValueError, "key_sets[0] -18 17"),
    "fractions as keys": ({"key_sets": [[0.5]]}, TypeError, "key_sets[0] float64 ints bools"),
    "text as keys": ({"key_sets": [["a"]]}, TypeError, "key_sets[0] ints bools"),
    "no keys": ({"key_sets": [None]}, TypeError, "key_sets[0] None ints bools"),
    "numbers of two axes": ({"key_sets": [[[0, 1]]]}, ValueError, "key_sets[0] 2 one axis"),
    "number of bools": (
        {"key_sets": zeros((3, 16), bool)},
        ValueError,
        "key_sets[0] (16,) (2, 17)",
    ),
    "batch of a set": (
        {"key_sets": [[0], zeros((3, 17), bool)]},
        ValueError,
        "key_sets[1] (3, 17) (2, 17)",
    ),
    "set per head": (
        {"key_sets": [zeros((2, 4, 17), bool)]},
        ValueError,
        "key_sets[0] (2, 4, 17)",
    ),
    # ignored keys
    "ignored past the end": ({"ignore_keys": [17]}, ValueError, "ignore_keys 17"),
    "ignored before the start": ({"ignore_keys": [0, -18]}, ValueError, "ignore_keys -18 17"),
    "ignored fraction": ({"ignore_keys": [1.5]}, TypeError, "ignore_keys float64 ints bools"),
    "ignored as text": ({"ignore_keys": "first"}, TypeError, "ignore_keys first"),
    "ignored of two axes": ({"ignore_keys": [[1, 2]]}, ValueError, "ignore_keys 2 one axis"),
    "ignored bools": ({"ignore_keys": zeros(16, bool)}, ValueError, "ignore_keys (16,) (2, 17)"),
    "ignored of a wrong batch": (
        {"ignore_keys": zeros((3, 17), bool)},
        ValueError,
        "ignore_keys (3, 17) (2, 17)",
    ),
    # received
    "received as text": ({"received": "yes"}, TypeError, "received 'yes' True False"),
    "received none": ({"received": None}, TypeError, "received None True False"),
}


@pytest.mark.parametrize("case", ERRORS)
def test_error_names_argument_expectation_and_finding(case):
    wrong, error, words = ERRORS[case]
    valid = {"query": zeros((2, 4, 5, 6)), "key": zeros((2, 2, 17, 6))}
    with pytest.raises(error) as raised:
        mha_fast.head_statistics(**valid | wrong)
    assert type(raised.value) is error
    message = str(raised.value)
    assert message.startswith(words.split()[0] + " "), message
    assert [word for word in words.split() if word not in message] == [], message
    assert "value" not in message  # there is none here


@pytest.mark.parametrize("argument", ["value", "out", "head_mask", "return_lse", "precision"])
def test_arguments_that_make_no_sense_here_are_not_taken(argument):
    with pytest.raises(TypeError, match=argument):
        mha_fast.head_statistics(zeros((5, 6)), zeros((5, 6)), **{argument: None})


@pytest.mark.parametrize("empty", [{"query": zeros((2, 4, 0, 6))}, {"key": zeros((2, 2, 0, 6))}])
def test_empty_axes_are_checked_as_well(empty):
    arguments = {"query": zeros((2, 4, 5, 6)), "key": zeros((2, 2, 17, 6)), "key_sets": [[17]]}
    with pytest.raises(ValueError, match="key_sets"):
        mha_fast.head_statistics(**arguments | empty)


def test_record_cannot_be_changed_and_says_its_sizes():
    found = mha_fast.head_statistics(*_query_and_key(np.float32), **EVERYTHING)
    with pytest.raises(AttributeError):
        found.entropy = 0
    assert repr(found) == (
        "HeadStatistics(shape=(2, 4), n_query=37, offsets=(-1, 2), n_set=1, n_key=150)"
    )
