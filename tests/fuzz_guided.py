"""Coverage-guided fuzzing of the public functions; ``.ci/fuzz`` builds what it needs and runs it.

libFuzzer (through atheris) changes bytes so as to reach new branches of the checks in Python and,
in a build with MHA_FAST_FUZZ, of the native core. The bytes choose an entry point, sizes, dtypes,
layouts and options, sensible ones and others. A call must return what the formula says, or raise
TypeError, ValueError or MemoryError; AddressSanitizer watches the memory.
"""

import sys
import warnings
from pathlib import Path

import atheris

ROOT = Path(__file__).resolve().parent.parent
sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != ROOT]

import numpy as np

with atheris.instrument_imports(include=["mha_fast"]):
    import mha_fast
    from mha_fast import reference

ALLOWED = (TypeError, ValueError, MemoryError, OverflowError)
DTYPES = (np.float32, np.float64, np.float16)
MOST = 70  # of an axis: past a key block and every sub-tile
ISAS = mha_fast._core.available_isas()


class Choices:
    """What the bytes choose."""

    def __init__(self, data):
        self.given = atheris.FuzzedDataProvider(data)

    def one_of(self, things):
        return things[self.given.ConsumeIntInRange(0, len(things) - 1)]

    def size(self):
        return self.given.ConsumeIntInRange(0, MOST)

    def odd_number(self):
        """A number as nobody should give it."""
        return self.one_of((
            0, -1, 1, 2**31, -(2**63), 2**64, 1e300, -1e-300, float("nan"), float("inf"), None,
            True, "1", (), [], self.given.ConsumeInt(9), self.given.ConsumeFloat(),
        ))  # fmt: skip

    def array(self, shape, dtype):
        """Numbers of that shape, now and then in an odd place or with an odd one among them."""
        seed = self.given.ConsumeIntInRange(0, 255)
        x = np.random.default_rng(seed).standard_normal(shape).astype(dtype)
        match self.given.ConsumeIntInRange(0, 7):
            case 1 if x.ndim > 1:
                x = np.asfortranarray(x)
            case 2 if x.ndim:
                x = np.broadcast_to(x[..., :1], x.shape)
            case 3 if x.ndim:
                x = x[..., ::-1]
            case 4 if x.size:
                x.flat[seed % x.size] = self.one_of((np.nan, np.inf, -np.inf, 6e4))
        return x


def problem(choose):
    """Operands of one call, which fit together more often than not."""
    dtype = choose.one_of(DTYPES)
    n_kv_head = choose.given.ConsumeIntInRange(1, 3)
    n_head = n_kv_head * choose.given.ConsumeIntInRange(1, 3)
    n_query, n_key, width, value_width = (choose.size() for _ in range(4))
    batch = choose.one_of(((), (1,), (2,), (2, 1)))
    shapes = [
        (*batch, n_head, n_query, width),
        (*batch, n_kv_head, n_key, width),
        (*batch, n_kv_head, n_key, value_width),
    ]
    if choose.given.ConsumeIntInRange(0, 9) == 0:
        i = choose.given.ConsumeIntInRange(0, 2)
        shapes[i] = shapes[i][choose.given.ConsumeIntInRange(0, 3) :]
    return [choose.array(shape, dtype) for shape in shapes]


def options_of(choose, query, key, entry):
    """Some options, of which one in eight is odd."""
    n_query, n_key = query.shape[-2] if query.ndim > 1 else 1, key.shape[-2] if key.ndim > 1 else 1
    n_head = query.shape[-3] if query.ndim > 2 else 1
    sensible = {
        "is_causal": lambda: True,
        "window": lambda: (choose.size(), choose.one_of((None, choose.size()))),
        "scale": lambda: choose.one_of((0.0, 0.3, -1.0, 1e-30)),
        "softcap": lambda: choose.one_of((1.0, 30.0)),
        "kv_lengths": lambda: choose.given.ConsumeIntInRange(0, n_key),
        "query_offset": lambda: choose.one_of(("end", choose.size(), -choose.size())),
        "sinks": lambda: choose.array((n_head,), np.float64),
        "alibi_slopes": lambda: choose.array((n_head,), np.float64),
        "head_mask": lambda: choose.array((n_head,), np.float64),
        "num_threads": lambda: choose.given.ConsumeIntInRange(1, 3),
        "attn_mask": lambda: choose.array(
            choose.one_of(((n_query, n_key), (n_head, n_query, n_key), (1, n_key))),
            choose.one_of((np.bool_, np.float32, np.float64, np.float16)),
        ),
    }
    if entry != "attention":
        for name in ("head_mask", "attn_mask"):
            sensible.pop(name)
    names = [name for name in sensible if choose.given.ConsumeIntInRange(0, 3) == 0]
    return {
        name: choose.odd_number() if choose.given.ConsumeIntInRange(0, 7) == 0 else sensible[name]()
        for name in names
    }


def one_input(data):
    """What libFuzzer calls."""
    choose = Choices(data)
    mha_fast._core.use_isa(choose.one_of(ISAS))
    entry = choose.one_of(("attention", "attention_weights", "head_statistics"))
    query, key, value = problem(choose)
    options = options_of(choose, query, key, entry)
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        try:
            if entry == "attention":
                out, lse = mha_fast.attention(query, key, value, return_lse=True, **options)
            elif entry == "attention_weights":
                mha_fast.attention_weights(query, key, **options)
                return
            else:
                mha_fast.head_statistics(query, key, **options)
                return
        except ALLOWED:
            return
        right, right_lse = reference.attention(query, key, value, return_lse=True, **options)
        _compare(out, right, query.dtype)
        _compare(lse, right_lse, query.dtype)


def _compare(got, right, dtype):
    """The same places of NaN and Inf, and elsewhere roughly the same numbers.

    How exact they are is the other fuzzer's business. Large and unbounded numbers, where the two
    may overflow in different places, are left out.
    """
    if got.shape != right.shape:
        raise AssertionError(f"shape {got.shape}, expected {right.shape}")
    if dtype == np.float16 or not np.isfinite(right).all() or np.abs(right).max(initial=0) > 1e3:
        return
    np.testing.assert_allclose(got, right, rtol=1e-2, atol=1e-2)


if __name__ == "__main__":
    atheris.Setup(sys.argv, one_input)
    atheris.Fuzz()
