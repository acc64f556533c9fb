"""The oracle of head_statistics, against loops over queries and keys that follow the formulas."""

import math

import numpy as np
import pytest

from mha_fast import reference

OFFSETS = (0, -2, 1)
KEY_SETS = ([0], [2, 5, 5], [])
CASES = {
    "plain": {},
    "causal": {"is_causal": True},
    "end": {"is_causal": True, "query_offset": "end", "kv_lengths": [4, 9]},
    "offsets of a batch": {"query_offset": [3, -1], "window": (2, 1)},
    "sinks": {"sinks": [0.0, 1.0, -1.0, 2.0]},
    "scores": {"scale": 0.3, "softcap": 2.0, "alibi_slopes": [0.1, 0.2, 0.3, 0.4]},
    "bool mask": {"attn_mask": np.random.default_rng(7).random((2, 1, 6, 9)) < 0.4},
}


def inputs():
    rng = np.random.default_rng(0)
    return rng.standard_normal((2, 4, 6, 8)), rng.standard_normal((2, 2, 9, 8))


def first_position(b, query_offset=0, kv_lengths=None, **_):
    if query_offset == "end":
        return (9 if kv_lengths is None else kv_lengths[b]) - 6
    return np.broadcast_to(query_offset, 2)[b]


def by_loops(weights, first, ignored):
    """Measurements of one head, one query after the other."""
    rows = [(first + i, row) for i, row in enumerate(weights) if any(w > 0 for w in row)]

    def mean(of_row):
        return sum(of_row(p, row) for p, row in rows) / len(rows)

    def at(row, j):
        return row[j] if 0 <= j < len(row) else 0.0

    keys = range(weights.shape[1])
    return {
        "entropy": mean(lambda p, row: -sum(w * math.log(w) for w in row if w > 0)),
        "confidence": mean(lambda p, row: max(row[j] for j in keys if j not in ignored)),
        "mean_distance": mean(lambda p, row: sum(row[j] * abs(p - j) for j in keys)),
        "offset_mass": [mean(lambda p, row, d=d: at(row, p + d)) for d in OFFSETS],
        "offset_argmax": [mean(lambda p, row, d=d: row.argmax() == p + d) for d in OFFSETS],
        "key_mass": [mean(lambda p, row, s=s: sum(row[j] for j in set(s))) for s in KEY_SETS],
        "top_key": [row.argmax() if any(row) else -1 for row in weights],
        "received": [sum(row[j] for row in weights) for j in keys],
    }


@pytest.mark.parametrize("options", CASES.values(), ids=CASES)
def test_every_field_follows_its_formula(options):
    query, key = inputs()
    ignored = [0, 3]
    found = reference.head_statistics(
        query,
        key,
        offsets=OFFSETS,
        key_sets=KEY_SETS,
        ignore_keys=ignored,
        received=True,
        **options,
    )
    weights = reference.attention_weights(query, key, **options)

    assert found.offsets == OFFSETS
    for b, h in np.ndindex(2, 4):
        expected = by_loops(weights[b, h], first_position(b, **options), ignored)
        for name, numbers in expected.items():
            np.testing.assert_allclose(
                getattr(found, name)[b, h], numbers, rtol=0, atol=1e-13, err_msg=name
            )


def test_shapes_and_dtypes():
    found = reference.head_statistics(*inputs(), key_sets=[[0]], received=True, offsets=(-1, 1))

    for name in ("entropy", "confidence", "mean_distance"):
        assert getattr(found, name).shape == (2, 4)
    assert found.offset_mass.shape == found.offset_argmax.shape == (2, 4, 2)
    assert found.key_mass.shape == (2, 4, 1)
    assert found.top_key.shape == (2, 4, 6) and found.top_key.dtype == np.int64
    assert found.received.shape == (2, 4, 9)


def test_what_was_not_asked_for_is_none():
    found = reference.head_statistics(*inputs())

    assert found.key_mass is None and found.received is None
    assert found.offsets == (-1, 0, 1)


def test_key_sets_in_all_their_forms_agree():
    query, key = inputs()
    members = np.zeros((2, 9), bool)
    members[0, [1, 4]] = members[1, 2] = True
    of_batch = np.broadcast_to(members[:, None], (2, 2, 9))

    as_numbers = reference.head_statistics(query, key, key_sets=[[1, 4], [2]]).key_mass
    as_bools = reference.head_statistics(query, key, key_sets=members).key_mass
    as_batches = reference.head_statistics(query, key, key_sets=list(of_batch)).key_mass

    np.testing.assert_array_equal(as_bools, as_numbers)
    np.testing.assert_array_equal(as_batches, as_numbers)


def test_sets_may_differ_within_the_batch():
    query, key = inputs()
    members = np.arange(9) < [[2], [5]]

    found = reference.head_statistics(query, key, key_sets=[members], ignore_keys=members)
    weights = reference.attention_weights(query, key)

    for b, end in enumerate((2, 5)):
        np.testing.assert_allclose(found.key_mass[b, :, 0], weights[b, :, :, :end].sum(-1).mean(-1))
        np.testing.assert_allclose(found.confidence[b], weights[b, :, :, end:].max(-1).mean(-1))


def test_head_without_any_visible_key_is_nan():
    query, key = inputs()
    found = reference.head_statistics(query, key, kv_lengths=[0, 9], key_sets=[[0]], received=True)

    for name in (
        "entropy",
        "confidence",
        "mean_distance",
        "offset_mass",
        "offset_argmax",
        "key_mass",
    ):
        assert np.isnan(getattr(found, name)[0]).all(), name
        assert np.isfinite(getattr(found, name)[1]).all(), name
    assert (found.top_key[0] == -1).all() and (found.received[0] == 0).all()


def test_nan_reaches_the_means_of_its_head_only():
    query, key = inputs()
    query[0, 1, 2, 0] = np.nan
    found = reference.head_statistics(query, key, key_sets=[[0]], received=True)

    is_nan = np.zeros((2, 4), bool)
    is_nan[0, 1] = True
    for name in ("entropy", "confidence", "mean_distance"):
        np.testing.assert_array_equal(np.isnan(getattr(found, name)), is_nan)
    for name in ("offset_mass", "offset_argmax", "key_mass", "received"):
        np.testing.assert_array_equal(np.isnan(getattr(found, name)).all(axis=-1), is_nan)
    assert found.top_key[0, 1, 2] == -1
    assert (np.delete(found.top_key[0, 1], 2) >= 0).all()


def test_nan_in_an_excluded_key_has_no_influence():
    query, key = inputs()
    options = {"kv_lengths": [5, 9], "received": True}
    expected = reference.head_statistics(query, key, **options)
    key[0, :, 5:] = np.nan
    found = reference.head_statistics(query, key, **options)

    np.testing.assert_array_equal(found.entropy, expected.entropy)
    np.testing.assert_array_equal(found.top_key, expected.top_key)
    np.testing.assert_array_equal(found.received, expected.received)


def test_lowest_key_wins_a_tie():
    found = reference.head_statistics(np.zeros((1, 3, 4)), np.ones((1, 5, 4)), window=(1, 1))

    np.testing.assert_array_equal(found.top_key, [[0, 0, 1]])


def test_one_key_with_all_the_weight_has_entropy_plus_zero():
    found = reference.head_statistics(np.ones((1, 2, 4)), np.ones((1, 1, 4)))

    assert found.entropy[0] == 0 and not np.signbit(found.entropy[0])
    assert found.confidence[0] == 1


@pytest.mark.parametrize(("n_query", "n_key"), [(0, 5), (5, 0), (0, 0)])
def test_empty_axes(n_query, n_key):
    query, key = np.ones((2, n_query, 4)), np.ones((2, n_key, 4))
    found = reference.head_statistics(query, key, offsets=(), received=True)

    assert np.isnan(found.entropy).all() and found.entropy.shape == (2,)
    assert found.offset_mass.shape == (2, 0)
    assert found.top_key.shape == (2, n_query) and (found.top_key == -1).all()
    np.testing.assert_array_equal(found.received, np.zeros((2, n_key)))


def test_one_head_has_no_axis_of_heads():
    query, key = inputs()
    alone = reference.head_statistics(query[0, 0], key[0, 0], key_sets=[[0]], received=True)
    among = reference.head_statistics(query[0, :1], key[0, :1], key_sets=[[0]], received=True)

    for name in ("entropy", "offset_mass", "key_mass", "top_key", "received"):
        np.testing.assert_array_equal(getattr(alone, name), getattr(among, name)[0])


def test_repr_tells_the_sizes():
    query, key = inputs()
    found = reference.head_statistics(query, key, key_sets=[[0], [1]], received=True)

    assert repr(found) == (
        "HeadStatistics(shape=(2, 4), n_query=6, offsets=(-1, 0, 1), n_set=2, n_key=9)"
    )
