"""Which weights dropout keeps, and what it does to the output."""

import numpy as np
import pytest
from _support import normal_inputs

from mha_fast import reference
from mha_fast.reference._dropout import philox

# Random123, tests/kat_vectors: "philox 4x32 10", words of counter, key and output
KNOWN_ANSWERS = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000",
     "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff",
     "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0",
     "d16cfe09 94fdcceb 5001e420 24126ea1"),
]  # fmt: skip


def words(text):
    return [int(word, 16) for word in text.split()]


@pytest.mark.parametrize(("counter", "key", "answer"), KNOWN_ANSWERS)
def test_philox_gives_the_published_answers(counter, key, answer):
    counter = tuple(np.uint64(word) for word in words(counter))

    assert philox(counter, tuple(words(key))).tolist() == words(answer)


def test_a_weight_is_kept_by_its_own_word():
    seed, p, shape = 0x299F31D0_A4093822, 0.3, (2, 3, 5, 11)

    kept = reference.dropout_mask(seed, shape, p)

    assert kept.dtype == bool
    assert kept.shape == shape
    for b, h, i, j in np.ndindex(shape):
        counter = tuple(np.uint64(word) for word in (j // 4, i, b * 3 + h, 0))
        word = philox(counter, (0xA4093822, 0x299F31D0))[j % 4]
        assert kept[b, h, i, j] == (word >= int(0.3 * 2**32))


@pytest.mark.parametrize("p", [0.0, 2.0**-40, 0.1, 0.5, 0.999])
def test_the_share_of_dropped_weights_is_p(p):
    kept = reference.dropout_mask(1, (4, 8, 100, 101), p)

    n = kept.size
    assert abs((~kept).mean() - p) <= 5 * np.sqrt(p * (1 - p) / n)


def test_weights_do_not_depend_on_what_else_is_in_the_call():
    large = reference.dropout_mask(7, (3, 2, 9, 21), 0.5)

    np.testing.assert_array_equal(
        reference.dropout_mask(7, (2, 2, 4, 6), 0.5), large[:2, :, :4, :6]
    )
    np.testing.assert_array_equal(reference.dropout_mask(7, (9, 21), 0.5), large[0, 0])
    assert (reference.dropout_mask(8, (3, 2, 9, 21), 0.5) != large).any()
    assert (reference.dropout_mask(7 + 2**32, (3, 2, 9, 21), 0.5) != large).any()


@pytest.mark.parametrize("shape", [(0, 2, 3, 4), (1, 0, 3, 4), (1, 2, 0, 4), (1, 2, 3, 0)])
def test_there_may_be_no_weights(shape):
    assert reference.dropout_mask(1, shape, 0.5).shape == shape


def test_kept_weights_are_divided_and_lse_stays():
    query, key, value = normal_inputs(np.float64, n_query=5, n_key=9)
    weights, lse = reference.attention_weights(query, key, return_lse=True)
    kept = reference.dropout_mask(3, weights.shape, 0.25)

    dropout = {"dropout_p": 0.25, "dropout_seed": 3, "return_lse": True}
    out, lse_with_dropout = reference.attention(query, key, value, **dropout)

    right = (weights * kept / 0.75) @ np.repeat(value, 2, axis=-3)
    np.testing.assert_allclose(out, right, rtol=1e-12, atol=1e-12)
    np.testing.assert_array_equal(lse_with_dropout, lse)


def test_packed_sequences_count_as_batch_entries():
    query, key, value = normal_inputs(np.float64, batch=(3,), n_query=4, n_key=6)
    dropout = {"dropout_p": 0.5, "dropout_seed": 2**64 - 1}
    right = reference.attention(query, key, value, **dropout)

    rows = (x.swapaxes(1, 2).reshape(-1, x.shape[1], x.shape[3]) for x in (query, key, value))
    out = reference.attention_varlen(*rows, [0, 4, 8, 12], [0, 6, 12, 18], **dropout)

    np.testing.assert_allclose(out.reshape(3, 4, 4, -1), right.swapaxes(1, 2), rtol=1e-12)


@pytest.mark.parametrize(
    ("seed", "p", "words"),
    [
        (1, 1.0, "drop is 1.0; expected 0 <= p < 1"),
        (1, -0.1, "drop is -0.1"),
        (-1, 0.5, "seed is -1"),
        (2**64, 0.5, "seed is 18446744073709551616"),
    ],
)
def test_wrong_numbers_are_refused(seed, p, words):
    with pytest.raises(ValueError, match=words):
        reference.dropout_mask(seed, (2, 2), p)


def test_dropout_needs_a_seed():
    with pytest.raises(ValueError, match="dropout_seed is None"):
        reference.attention(*normal_inputs(np.float64), dropout_p=0.5)
