"""mha_fast.heads: classes, relations, importance, gates, pruning."""

import math

import numpy as np
import pytest

import mha_fast
from mha_fast import heads, reference
from mha_fast._statistics_record import HeadStatistics

# ---------------------------------------------------------------- classes


def record(n_head=1, *, batch=(), offsets=(-1, 0, 1), entropy=0.0, mass=0.0, share=0.0, no_op=0.0):
    """Statistics in which every head shows the same numbers, unless arrays are given."""
    shape = (*batch, n_head)

    def full(numbers, *more):
        return np.broadcast_to(np.asarray(numbers, np.float64), (*shape, *more))

    return HeadStatistics(
        entropy=full(entropy),
        confidence=full(0.5),
        mean_distance=full(1.0),
        offset_mass=full(mass, len(offsets)),
        offset_argmax=full(share, len(offsets)),
        key_mass=None if no_op is None else full(no_op, 1),
        top_key=np.zeros((*shape, 7), np.int64),
        received=None,
        offsets=offsets,
    )


def test_heads_made_for_a_purpose_are_recognised():
    # Head by head: previous token, next token, two back, all alike, the first token.
    n_token = 32
    places = np.eye(n_token) * 30
    keys = [np.roll(places, shift, axis=0) for shift in (1, -1, 2)]  # scores 30 * 30 at the target
    shifted = np.stack([k.T for k in keys])  # row j of k.T: the query that looks at key j
    first = np.zeros((n_token, n_token))
    first[0] = 30
    key = np.stack([*shifted, np.zeros((n_token, n_token)), first])
    query = np.stack([places] * 5)

    found = heads.classify_heads(
        mha_fast.head_statistics(query, key, scale=1.0, offsets=(-2, -1, 0, 1), key_sets=[[0]])
    )

    looked_at = reference.attention_weights(query, key, scale=1.0).argmax(axis=-1)
    np.testing.assert_array_equal(looked_at[:3, 10], [9, 11, 8])  # the heads are as described
    np.testing.assert_array_equal(found.previous, [True, False, False, False, False])
    np.testing.assert_array_equal(found.next, [False, True, False, False, False])
    np.testing.assert_array_equal(found.positional, [True, True, True, False, False])
    np.testing.assert_array_equal(found.offset[:3], [-1, 1, -2])
    np.testing.assert_array_equal(found.broad, [False, False, False, True, False])
    np.testing.assert_array_equal(found.no_op, [False, False, False, False, True])
    assert repr(found).splitlines()[1].split() == ["p", "n", "o", "b", "0"]


@pytest.mark.parametrize(
    ("name", "numbers", "is_member"),
    [
        ("positional", {"share": [0, 0.9, 0]}, True),
        ("positional", {"share": [0.89, 0.89, 0]}, False),
        ("previous", {"mass": [0.51, 0, 0]}, True),
        ("previous", {"mass": [0.5, 0, 0]}, False),
        ("next", {"mass": [0, 0, 0.51]}, True),
        ("next", {"mass": [0.51, 0.51, 0.5]}, False),
        ("no_op", {"no_op": 0.51}, True),
        ("no_op", {"no_op": 0.5}, False),
        ("broad", {"entropy": math.log(10)}, True),
        ("broad", {"entropy": 2.3}, False),
    ],
)
def test_thresholds(name, numbers, is_member):
    assert getattr(heads.classify_heads(record(**numbers)), name)[0] == is_member


@pytest.mark.parametrize(
    ("name", "numbers", "threshold"),
    [
        ("positional", {"share": 0.6}, {"positional_share": 0.6}),
        ("previous", {"mass": 0.3}, {"neighbour_mass": 0.2}),
        ("next", {"mass": 0.3}, {"neighbour_mass": 0.2}),
        ("no_op", {"no_op": 0.3}, {"no_op_mass": 0.2}),
        ("broad", {"entropy": 1.0}, {"broad_entropy": 1.0}),
    ],
)
def test_thresholds_can_be_set(name, numbers, threshold):
    assert not getattr(heads.classify_heads(record(**numbers)), name)[0]
    assert getattr(heads.classify_heads(record(**numbers), **threshold), name)[0]


def test_batch_is_averaged_without_the_sequences_that_are_nan():
    entropy = [[[1.0, 3.0]], [[np.nan, 3.0]], [[4.0, np.nan]]]
    found = heads.classify_heads(record(2, batch=(3, 1), entropy=entropy))
    np.testing.assert_array_equal(found.broad, [True, True])  # means 2.5 and 3

    nothing = heads.classify_heads(record(2, batch=(3, 1), entropy=np.nan, share=np.nan))
    assert not nothing.broad.any() and not nothing.positional.any()


def test_layers_become_rows():
    layers = [record(3, entropy=[0, 3, 0]), record(3, batch=(2,), entropy=[3, 0, 0])]
    found = heads.classify_heads(layers)

    np.testing.assert_array_equal(found.broad, [[False, True, False], [True, False, False]])
    assert repr(found).splitlines()[:3] == [
        "head    0 1 2",
        "layer 0 . b .",
        "layer 1 b . .",
    ]


def test_one_layer_in_a_list_keeps_its_row():
    assert heads.classify_heads([record(4)]).broad.shape == (1, 4)


def test_statistics_of_one_head_without_an_axis():
    x = np.random.default_rng(0).standard_normal((9, 4))
    found = heads.classify_heads(mha_fast.head_statistics(x, x))

    assert found.positional.shape == (1,)


def test_what_was_not_measured_is_not_judged():
    found = heads.classify_heads(record(offsets=(2,), mass=1.0, share=1.0, no_op=None))

    assert found.previous is None and found.next is None and found.no_op is None
    assert found.positional[0] and found.offset[0] == 2

    without = heads.classify_heads(record(2, offsets=(), entropy=5.0))
    assert not without.positional.any() and without.broad.all()


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ([], "statistics is empty"),
        ([record(2), record(3)], "differ"),
        ([record(), record(offsets=(0,))], "differ"),
        ([record(), record(no_op=None)], "differ"),
    ],
)
def test_layers_that_make_no_table_are_refused(layers, message):
    with pytest.raises(ValueError, match=message):
        heads.classify_heads(layers)


@pytest.mark.parametrize("no_op_set", [1, -1])
def test_set_that_was_not_measured_is_refused(no_op_set):
    with pytest.raises(ValueError, match=f"no_op_set is {no_op_set}; expected one of the 1"):
        heads.classify_heads(record(), no_op_set=no_op_set)


def test_set_of_keys_that_carry_nothing_can_be_chosen():
    x = np.zeros((1, 10, 4))
    measured = mha_fast.head_statistics(x, x, key_sets=[[0, 1], range(6)])

    assert not heads.classify_heads(measured).no_op[0]  # 0.2 of the weight
    assert heads.classify_heads(measured, no_op_set=1).no_op[0]  # 0.6


# ---------------------------------------------------------------- relations

TOP_KEY = [[1, 2, 3, 3], [0, 0, 0, 0], [2, 2, 1, -1]]


def test_relation_accuracy_counts_the_right_keys():
    found = heads.relation_accuracy(TOP_KEY, [(0, 1), (2, [0, 3]), (3, 0)])

    np.testing.assert_array_equal(found.hits, [2, 2, 0])
    np.testing.assert_allclose(found.accuracy, [2 / 3, 2 / 3, 0])
    assert found.n_pair == 3


def test_relation_accuracy_takes_layers_and_numpy_integers():
    pairs = np.array([(0, 2), (1, 2)])
    found = heads.relation_accuracy(np.stack([TOP_KEY, TOP_KEY[::-1]]), pairs)

    np.testing.assert_array_equal(found.hits, [[1, 0, 2], [2, 0, 1]])


def test_best_fixed_offset_is_the_baseline():
    found = heads.relation_accuracy(TOP_KEY, [(0, 1), (1, 2), (3, [1, 2])])

    assert found.offset_hits[1] == 2 and found.offset_hits[-1] == 1 and found.offset_hits[0] == 0
    assert (found.best_offset, found.baseline) == (1, 2 / 3)
    assert "% of 3 pairs; always offset +1: 67 %" in repr(found)


def test_nearest_of_equal_offsets_is_the_baseline():
    assert heads.relation_accuracy(TOP_KEY, [(3, [0, 2])]).best_offset == -1


def test_accuracies_of_several_sequences_add_up():
    first = heads.relation_accuracy(TOP_KEY, [(0, 1)])
    second = heads.relation_accuracy(np.array(TOP_KEY)[:, :2], [(1, 2), (0, 0)])
    both = first + second

    np.testing.assert_array_equal(both.hits, [2, 1, 1])
    assert both.n_pair == 3
    assert both.offset_hits[1] == 2 and both.offset_hits[0] == 1


def test_accuracies_of_other_heads_do_not_add_up():
    first = heads.relation_accuracy(TOP_KEY, [(0, 1)])
    with pytest.raises(ValueError, match="different heads"):
        first + heads.relation_accuracy(TOP_KEY[:2], [(0, 1)])
    with pytest.raises(ValueError, match="different offsets"):
        first + heads.relation_accuracy(TOP_KEY, [(0, 1)], baseline_offsets=[1])


def test_no_pairs_make_no_accuracy():
    found = heads.relation_accuracy(TOP_KEY, [], baseline_offsets=[])

    assert np.isnan(found.accuracy).all() and math.isnan(found.baseline)
    assert found.best_offset is None


@pytest.mark.parametrize(
    ("pair", "message"),
    [
        ((4, 0), "query 4; expected 0 to 3"),
        ((-1, 0), "query -1; expected 0 to 3"),
        ((0, -1), "key -1; expected 0 or more"),  # -1 in top_key means no key, and is never right
        ((0, [2, -1]), "key -1; expected 0 or more"),
    ],
)
def test_pairs_outside_are_refused(pair, message):
    with pytest.raises(ValueError, match=message):
        heads.relation_accuracy(TOP_KEY, [pair])


# ---------------------------------------------------------------- importance


def test_importance_is_the_derivative_by_the_gate():
    rng = np.random.default_rng(0)
    query, key, value, grad_out = rng.standard_normal((4, 3, 5, 7, 8))

    def losses(gates):
        """One number per sequence; linear in the gates, so a difference is a derivative."""
        out = reference.attention(query, key, value, head_mask=gates)
        return (out * grad_out).sum(axis=(1, 2, 3))

    out = reference.attention(query, key, value)
    everything = np.ones(5)
    derivatives = [losses(everything) - losses(everything - np.eye(5)[h]) for h in range(5)]
    expected = np.abs(derivatives).mean(axis=1)

    np.testing.assert_allclose(heads.head_importance(out, grad_out), expected, rtol=1e-10)
    np.testing.assert_allclose(
        heads.head_importance(out[1], grad_out[1]), np.abs(derivatives)[:, 1], rtol=1e-10
    )


def test_importance_normalized_has_length_one():
    out, grad_out = np.random.default_rng(0).standard_normal((2, 2, 4, 5, 3))
    plain = heads.head_importance(out, grad_out)
    found = heads.head_importance(out, grad_out, normalize=True)

    assert np.linalg.norm(found) == pytest.approx(1)
    np.testing.assert_allclose(found / found[0], plain / plain[0])


def test_importance_without_gradient_is_zero():
    out = np.ones((2, 4, 5, 3), np.float32)

    for normalize in (False, True):
        found = heads.head_importance(out, np.zeros_like(out), normalize=normalize)
        np.testing.assert_array_equal(found, np.zeros(4))


def test_importance_of_an_empty_batch_is_nan():
    assert np.isnan(heads.head_importance(np.ones((0, 4, 5, 3)), np.ones((0, 4, 5, 3)))).all()


@pytest.mark.parametrize("shapes", [((4, 5, 3), (4, 5, 2)), ((5, 3), (5, 3))])
def test_importance_refuses_shapes_that_do_not_fit(shapes):
    with pytest.raises(ValueError, match="out and grad_out have shapes"):
        heads.head_importance(*map(np.ones, shapes))


# ---------------------------------------------------------------- ablation and pruning


class Additive:
    """A score to which each head adds a number of its own; counts its calls."""

    def __init__(self, worth):
        self.worth = np.asarray(worth, np.float64)
        self.n_call = 0

    def __call__(self, gates):
        self.n_call += 1
        assert gates.shape == self.worth.shape and gates.dtype == np.float64
        assert np.isin(gates, (0, 1)).all()
        total = float((self.worth * gates).sum())
        gates[...] = -1  # what is handed out belongs to the function
        return total


WORTH = [[3.0, -1.0, 2.0], [0.5, 4.0, 0.25]]
CHEAPEST_FIRST = ((0, 1), (1, 2), (1, 0), (0, 2), (0, 0), (1, 1))


def test_ablation_finds_what_each_head_is_worth():
    score = Additive(WORTH)
    found = heads.ablate_heads(score, (2, 3))

    assert found.baseline == 8.75
    np.testing.assert_allclose(found.loss, WORTH)
    np.testing.assert_allclose(found.scores, 8.75 - np.array(WORTH))
    assert score.n_call == 7
    assert repr(found).splitlines()[1].split() == ["layer", "0", "3", "-1", "2"]


def test_ablation_of_all_but_one_keeps_the_other_layers():
    found = heads.ablate_heads(Additive(WORTH), (2, 3), all_but_one=True)

    np.testing.assert_allclose(found.scores, np.array(WORTH) + [[4.75], [4.0]])
    assert "alone" in repr(found)


def test_ablation_of_one_layer():
    found = heads.ablate_heads(Additive([1.0, 2.0]), 2)

    np.testing.assert_allclose(found.loss, [1, 2])
    assert repr(found).splitlines()[:2] == ["head 0 1", "     1 2"]


@pytest.mark.parametrize(
    "prune",
    [
        lambda score, **options: heads.prune_greedily(score, (2, 3), **options),
        lambda score, **options: heads.prune_in_order(score, WORTH, **options),
    ],
    ids=["greedily", "in order"],
)
class TestPruningOfIndependentHeads:
    def test_least_worth_goes_first(self, prune):
        path = prune(Additive(WORTH))

        assert path.removed == CHEAPEST_FIRST
        np.testing.assert_allclose(path.scores, [9.75, 9.5, 9, 7, 4, 0])
        assert path.baseline == 8.75

    def test_number_of_removals(self, prune):
        assert prune(Additive(WORTH), n_remove=2).removed == CHEAPEST_FIRST[:2]
        assert prune(Additive(WORTH), n_remove=0).removed == ()

    def test_stops_before_the_score_falls_too_low(self, prune):
        assert prune(Additive(WORTH), min_score=7.0).removed == CHEAPEST_FIRST[:4]
        assert prune(Additive(WORTH), min_score=7.1).removed == CHEAPEST_FIRST[:3]
        assert prune(Additive(WORTH), min_score=10).removed == ()

    def test_gates_after_some_removals(self, prune):
        path = prune(Additive(WORTH), n_remove=3)

        np.testing.assert_array_equal(path.head_mask(0), np.ones((2, 3)))
        np.testing.assert_array_equal(path.head_mask(2), [[1, 0, 1], [1, 1, 0]])
        np.testing.assert_array_equal(path.head_mask(), [[1, 0, 1], [0, 1, 0]])
        for n_removed in (-1, 4):
            with pytest.raises(ValueError, match=f"n_removed is {n_removed}; expected 0 to 3"):
                path.head_mask(n_removed)

    def test_prints_one_line_per_removal(self, prune):
        lines = repr(prune(Additive(WORTH), n_remove=2)).splitlines()

        assert [line.split() for line in lines[1:]] == [
            ["6", "8.75"],
            ["5", "9.75", "layer", "0", "head", "1"],
            ["4", "9.5", "layer", "1", "head", "2"],
        ]

    def test_impossible_number_of_removals(self, prune):
        for n_remove in (-1, 7):
            with pytest.raises(ValueError, match=f"n_remove is {n_remove}; expected 0 to 6"):
                prune(Additive(WORTH), n_remove=n_remove)

    def test_nan_score(self, prune):
        with pytest.raises(ValueError, match="score returned NaN"):
            prune(lambda gates: math.nan)


def redundant(gates):
    """Head 0 or head 1 is needed, no matter which; head 2 helps a little."""
    return max(gates[0], gates[1]) + 0.5 * gates[2]


def test_greedy_pruning_sees_what_heads_do_for_each_other():
    greedy = heads.prune_greedily(redundant, 3)
    assert greedy.removed == ((0,), (2,), (1,))  # the first of the two that tie goes first
    np.testing.assert_allclose(greedy.scores, [1.5, 1, 0])

    fixed = heads.prune_in_order(redundant, heads.ablate_heads(redundant, 3).loss)
    assert fixed.removed == ((0,), (1,), (2,))
    np.testing.assert_allclose(fixed.scores, [1.5, 0.5, 0])


def test_number_of_calls_is_as_documented():
    score = Additive(WORTH)
    heads.prune_greedily(score, (2, 3))
    assert score.n_call == 6 * 7 / 2 + 1

    score = Additive(WORTH)
    heads.prune_in_order(score, WORTH)
    assert score.n_call == 6 + 1


def test_pruning_refuses_importance_that_is_nan():
    with pytest.raises(ValueError, match="importance has NaN"):
        heads.prune_in_order(Additive(WORTH), [[1, 2, 3], [4, 5, np.nan]])


def test_pruned_gates_switch_heads_of_the_kernel_off():
    query, key, value = np.random.default_rng(0).standard_normal((3, 4, 9, 8), dtype=np.float32)
    whole = mha_fast.attention(query, key, value)

    def score(gates):
        return -np.abs(mha_fast.attention(query, key, value, head_mask=gates) - whole).sum()

    path = heads.prune_greedily(score, 4, n_remove=2)
    out = mha_fast.attention(query, key, value, head_mask=path.head_mask())

    smallest = np.argsort(np.abs(whole).sum(axis=(1, 2)))[:2]
    assert {head for (head,) in path.removed} == set(smallest)
    assert not out[smallest].any()
    np.testing.assert_array_equal(np.delete(out, smallest, 0), np.delete(whole, smallest, 0))


# ---------------------------------------------------------------- gates

LOG_ALPHA = np.array([[-4.0, -1.0, 0.0], [0.5, 2.0, 5.0]])


def test_share_of_open_gates_is_the_open_probability():
    gates = heads.HardConcrete(np.broadcast_to(LOG_ALPHA, (20_000, 2, 3)))
    samples = gates.sample(np.random.default_rng(0))
    probability = heads.HardConcrete(LOG_ALPHA).open_probability

    deviation = np.sqrt(probability * (1 - probability) / 20_000)
    np.testing.assert_array_less(np.abs((samples > 0).mean(axis=0) - probability), 4 * deviation)
    assert samples.min() == 0 and samples.max() == 1


def test_samples_follow_the_distribution_between_its_ends():
    # P(gate <= x) for 0 <= x < 1: the stretched value lies below x.
    gates = heads.HardConcrete(np.full(20_000, 0.7), temperature=0.5, low=-0.2, high=1.3)
    samples = gates.sample(np.random.default_rng(1))
    for x in (0.0, 0.3, 0.8):
        share = (x + 0.2) / 1.5
        logit = 0.5 * math.log(share / (1 - share)) - 0.7
        probability = 1 / (1 + math.exp(-logit))
        deviation = math.sqrt(probability * (1 - probability) / 20_000)
        assert abs((samples <= x).mean() - probability) < 4 * deviation


def test_expected_number_of_open_heads_is_the_sum():
    gates = heads.HardConcrete(LOG_ALPHA)

    by_hand = [1 / (1 + math.exp(-a + 2 / 3 * math.log(0.1 / 1.1))) for a in LOG_ALPHA.ravel()]
    assert gates.expected_l0 == pytest.approx(sum(by_hand))


def test_gates_after_training_are_without_noise():
    found = heads.HardConcrete(LOG_ALPHA).deterministic()

    by_hand = 1.2 / (1 + np.exp(-LOG_ALPHA)) - 0.1
    np.testing.assert_allclose(found, np.minimum(1, np.maximum(0, by_hand)))
    assert found[0, 0] == 0 and found[1, 2] == 1


def test_same_generator_draws_the_same_gates():
    gates = heads.HardConcrete(LOG_ALPHA)
    first, again, other = (gates.sample(np.random.default_rng(seed)) for seed in (3, 3, 4))

    np.testing.assert_array_equal(first, again)
    assert (first != other).any()


def test_slopes_are_the_derivatives():
    step = 1e-5
    here, above, below = (
        heads.HardConcrete(np.broadcast_to(LOG_ALPHA + shift, (50, 2, 3)), temperature=0.5)
        for shift in (0, step, -step)
    )

    gates, slopes = here.sample_with_slope(np.random.default_rng(3))

    ends = [x.sample(np.random.default_rng(3)) for x in (above, below)]
    np.testing.assert_array_equal(gates, here.sample(np.random.default_rng(3)))
    np.testing.assert_allclose(slopes, (ends[0] - ends[1]) / (2 * step), rtol=1e-6, atol=1e-8)
    assert ((gates == 0) & (slopes == 0)).any() and ((gates == 1) & (slopes == 0)).any()
    difference = (above.open_probability - below.open_probability) / (2 * step)
    np.testing.assert_allclose(here.expected_l0_slope, difference, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize(("log_alpha", "gate"), [(-1e4, 0.0), (1e4, 1.0)])
def test_extreme_locations_do_not_overflow(log_alpha, gate):
    gates = heads.HardConcrete([log_alpha])

    assert gates.deterministic() == gates.sample(np.random.default_rng(0)) == gate
    assert gates.expected_l0 == gate
    assert gates.sample_with_slope(np.random.default_rng(0)) == (gate, 0)
    assert gates.expected_l0_slope == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": 0}, "temperature is 0; expected a number above 0"),
        ({"temperature": math.nan}, "temperature is nan"),
        ({"low": 0}, "low and high are 0 and 1.1"),
        ({"high": 1}, "low and high are -0.1 and 1"),
    ],
)
def test_parameters_that_make_no_distribution_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        heads.HardConcrete(LOG_ALPHA, **options)


def test_gates_print_as_a_table():
    lines = repr(heads.HardConcrete(LOG_ALPHA)).splitlines()

    assert lines[0].split() == ["head", "0", "1", "2"]
    assert lines[1].split() == ["layer", "0", "0.00", "0.22", "0.50"]
    assert lines[-1] == "gate after training; 4.4 of 6 expected open in training"
