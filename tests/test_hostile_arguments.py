"""Arguments made to break something: a clear error, before any work, and never the end of the process."""

import numpy as np
import pytest

import mha_fast

X = np.ones((2, 3, 5, 4), np.float32)
ATTENTION = mha_fast.attention
HUGE = 2**62


def strided(shape, strides=None):
    """An array that claims a shape far beyond the one number it holds."""
    return np.lib.stride_tricks.as_strided(
        np.ones(1, np.float32), shape, (0,) * len(shape) if strides is None else strides
    )


# ---- sizes whose products overflow --------------------------------------------------------------


@pytest.mark.parametrize(
    ("query", "key"),
    [
        (strided((2**30, 2**30, 1, 1)), X[:1, :1, :, :1]),  # 2^60 rows of output
        (strided((2**20, 2**20, 2**20, 1)), X[:1, :1, :, :1]),
        (strided((1, 2**40, 1)), strided((1, 2**40, 1))),
        (strided((2**40, 1, 1, 1)), strided((2**40, 1, 1, 1))),
    ],
)
def test_output_that_no_memory_holds(query, key):
    """Each is refused as a whole; none wraps around into a small number."""
    with pytest.raises((MemoryError, ValueError)):
        ATTENTION(query, key, key)


def test_scores_that_no_memory_holds_are_fine():
    """2^34 scores, of which a block exists at a time."""
    query = strided((1, 16, 1))
    key = strided((1, 2**30, 1))
    out = ATTENTION(query, key, key, kv_lengths=3)
    np.testing.assert_array_equal(out, np.ones((1, 16, 1)))


def test_weights_that_no_memory_holds():
    with pytest.raises((MemoryError, ValueError)):
        mha_fast.attention_weights(strided((1, 2**30, 1)), strided((1, 2**30, 1)))


@pytest.mark.parametrize("width", [0, 2**20])
def test_width_at_its_ends(width):
    wide = np.ones((1, 2, width), np.float32)
    if width:
        np.testing.assert_allclose(ATTENTION(wide, wide, wide), 1)
    else:
        assert ATTENTION(wide, wide, wide).shape == (1, 2, 0)


# ---- numbers outside their range ----------------------------------------------------------------


@pytest.mark.parametrize("lengths", [-1, [-1, 3], [3, 6], [2**63 - 1, 0], -(2**63), [1, 2, 3]])
def test_lengths_outside(lengths):
    with pytest.raises(ValueError, match="^kv_lengths "):
        ATTENTION(X, X, X, kv_lengths=lengths)


@pytest.mark.parametrize("lengths", [2**64, 1e300, np.nan, "3", [3, None], object(), 2 + 0j])
def test_lengths_that_are_no_lengths(lengths):
    with pytest.raises((TypeError, ValueError, OverflowError), match="kv_lengths "):
        ATTENTION(X, X, X, kv_lengths=lengths)


@pytest.mark.parametrize("window", [(-1, 0), (0, -1), (2**200, -5), (1,), (1, 2, 3), 5, "ab"])
def test_window_outside(window):
    with pytest.raises((TypeError, ValueError), match="window"):
        ATTENTION(X, X, X, window=window)


@pytest.mark.parametrize("offset", [HUGE, -HUGE, 2**63 - 1, -(2**63)])
def test_offset_at_the_ends_of_its_type(offset):
    """Positions near the ends must not wrap; either an error or the plain meaning."""
    try:
        out = ATTENTION(X, X, X, is_causal=True, query_offset=offset)
    except (ValueError, OverflowError) as error:
        assert "query_offset" in str(error)
        return
    np.testing.assert_array_equal(out, 1 if offset > 0 else 0)


@pytest.mark.parametrize("window", [(2**200, 2**200), (2**63, None), (2**62, 2**62)])
def test_window_without_bounds(window):
    np.testing.assert_array_equal(ATTENTION(X, X, X, window=window), ATTENTION(X, X, X))


@pytest.mark.parametrize(
    "boundaries", [[0, 6], [0, -1, 5], [1, 5], [0, 3, 2, 5], [0, 2**62, 5], [5], [], [0, 2.5, 5]]
)
def test_boundaries_outside(boundaries):
    rows = np.ones((5, 3, 4), np.float32)
    with pytest.raises((TypeError, ValueError), match="cu_seqlens_q"):
        mha_fast.attention_varlen(rows, rows, rows, boundaries, boundaries)


@pytest.mark.parametrize("n", [0, -1, 2**31, 2**100, 1.5, "2"])
def test_number_of_threads_outside(n):
    if n in (2**31, 2**100):
        try:
            np.testing.assert_array_equal(ATTENTION(X, X, X, num_threads=n), ATTENTION(X, X, X))
        except (ValueError, OverflowError) as error:
            assert "num_threads" in str(error)
        return
    with pytest.raises((TypeError, ValueError), match="^num_threads is "):
        ATTENTION(X, X, X, num_threads=n)


# ---- objects that lie ---------------------------------------------------------------------------


class Lying(np.ndarray):
    """Says other things about itself than what the buffer holds."""

    shape = property(lambda self: (2, 3, 10**9, 4))
    strides = property(lambda self: (10**12, 10**9, 10**6, 10**3))
    ndim = property(lambda self: 7)
    size = property(lambda self: 0)


@pytest.mark.parametrize("place", [0, 1, 2])
def test_subclass_that_lies_about_its_layout(place):
    """What counts is what NumPy's own array says."""
    operands = [X, X, X]
    operands[place] = X.view(Lying)
    try:
        out = ATTENTION(*operands)
    except (TypeError, ValueError):
        return
    np.testing.assert_array_equal(np.asarray(out), np.ones_like(X))


class Raising:
    """Refuses to become an array."""

    def __array__(self, *_, **__):
        raise RuntimeError("not today")


class Wrong:
    """Becomes something that is no array."""

    def __array__(self, *_, **__):
        return "text"


class Endless:
    """A sequence without an end."""

    def __len__(self):
        return 2**40

    def __getitem__(self, i):
        raise RuntimeError("no element")


@pytest.mark.parametrize("place", range(4))
def test_object_whose_conversion_raises(place):
    operands = [X, X, X, None]
    operands[place] = Raising()
    with pytest.raises((RuntimeError, TypeError), match="not today|expected"):
        ATTENTION(*operands)


@pytest.mark.parametrize("place", range(4))
@pytest.mark.parametrize("value", [Wrong(), Endless(), "text", {}, lambda: 1, np.float32])
def test_object_that_is_no_array(place, value):
    operands = [X, X, X, None]
    operands[place] = value
    with pytest.raises((TypeError, ValueError, RuntimeError, MemoryError)):
        ATTENTION(*operands)


class Shrinking:
    """Another array each time it is asked."""

    def __init__(self):
        self.n_call = 0

    def __array__(self, *_, **__):
        self.n_call += 1
        return X[:, :, : 5 - self.n_call]


def test_object_that_changes_while_it_is_looked_at():
    try:
        out = ATTENTION(X, Shrinking(), Shrinking())
    except (TypeError, ValueError):
        return
    np.testing.assert_array_equal(out, np.ones_like(X))


# ---- outputs that are not what they seem --------------------------------------------------------


def _read_only():
    out = np.empty_like(X)
    out.flags.writeable = False
    return out


@pytest.mark.parametrize(
    "out",
    [
        _read_only(),
        np.empty((2, 3, 5, 5), np.float32),
        np.empty_like(X, dtype=np.float64),
        np.empty_like(X, dtype=">f4"),
        np.empty(X.size * 4 + 1, np.uint8)[1:].view(np.float32).reshape(X.shape)[::-1, :, :, ::-1],
        strided(X.shape),
        b"bytes",
        [[0.0]],
    ],
    ids=["read-only", "shape", "dtype", "byte order", "reversed", "one place", "bytes", "list"],
)
def test_output_that_cannot_be_written(out):
    before = np.array(out, copy=True) if isinstance(out, np.ndarray) else None
    try:
        returned = ATTENTION(X, X, X, out=out)
    except (TypeError, ValueError) as error:
        assert "out" in str(error)
        if before is not None:
            np.testing.assert_array_equal(out, before)
        return
    assert returned is out
    np.testing.assert_array_equal(out, 1)


@pytest.mark.parametrize("deep", [65, 1000])
def test_more_axes_than_there_can_be(deep):
    nested = 1.0
    for _ in range(deep):
        nested = [nested]
    with pytest.raises((TypeError, ValueError)):
        ATTENTION(nested, nested, nested)


def test_most_axes_that_there_can_be():
    x = np.ones((1,) * 61 + X.shape[-3:], np.float32) if np.lib.NumpyVersion(
        np.__version__
    ) >= "2.0.0" else np.ones((1,) * 29 + X.shape[-3:], np.float32)  # fmt: skip
    assert ATTENTION(x, x, x).shape == x.shape
