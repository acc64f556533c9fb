"""The matrix unit: when it is used, what it costs in accuracy, and what must not enter it.

The other tests run through it too, as instruction set "amx, all sizes".
"""

import importlib.util

import numpy as np
import pytest
from _dtypes import BFLOAT16, NEEDS_BFLOAT16
from _support import assert_same_bits, normal_inputs, run_python, using_isa

import mha_fast
from mha_fast import _core, reference

pytestmark = pytest.mark.skipif(
    "amx" not in _core.available_isas(), reason="this CPU has no matrix unit"
)
NAN, INF = np.nan, np.inf
LONG = {"batch": (1,), "n_head": 2, "n_kv_head": 2, "head_width": 64, "value_width": 64}


def _on(isa, *inputs, **options):
    with using_isa(isa):
        return mha_fast.attention(*inputs, **options)


# ---- when it is used ----------------------------------------------------------------------------


@pytest.mark.parametrize(("n_query", "used"), [(255, False), (256, True)])
def test_long_float32_calls_use_it_and_short_ones_do_not(n_query, used):
    inputs = normal_inputs(np.float32, **LONG, n_query=n_query, n_key=300)
    same = _on("amx", *inputs).tobytes() == _on("avx512", *inputs).tobytes()
    assert same is not used


def test_grouped_heads_count_as_rows():
    sizes = LONG | {"n_head": 8, "n_kv_head": 1}
    inputs = normal_inputs(np.float32, **sizes, n_query=32, n_key=300)
    assert _on("amx", *inputs).tobytes() != _on("avx512", *inputs).tobytes()


def test_float64_and_weights_do_not_change():
    inputs = normal_inputs(np.float64, **LONG, n_query=300, n_key=300)
    assert_same_bits(_on("amx", *inputs), _on("avx512", *inputs))
    query, key, _ = normal_inputs(np.float32, **LONG, n_query=300, n_key=300)
    with using_isa("avx512"):
        right = mha_fast.attention_weights(query, key)
    with using_isa("amx"):
        assert_same_bits(mha_fast.attention_weights(query, key), right)


REFUSED = """
import ctypes
class Stack(ctypes.Structure):
    _fields_ = [("sp", ctypes.c_void_p), ("flags", ctypes.c_int), ("size", ctypes.c_size_t)]
# Linux refuses the tile registers to a thread whose signal stack cannot hold them.
memory = ctypes.create_string_buffer(4096)
stack = Stack(ctypes.addressof(memory), 0, len(memory))
assert ctypes.CDLL(None).sigaltstack(ctypes.byref(stack), None) == 0
import numpy as np, mha_fast
from mha_fast import _core
x = np.ones((1, 300, 64), np.float32)
assert (mha_fast.attention(x, x, x) == 1).all()
print(_core.isa())
"""


@pytest.mark.skipif(_core.emulates_matrix_unit(), reason="nobody is asked for an emulated unit")
def test_without_permission_the_vector_units_work(tmp_path):
    process = run_python(REFUSED, tmp_path, MHA_FAST_ISA="")
    assert process.stdout.strip() == "avx512", process.stderr


# ---- accuracy -----------------------------------------------------------------------------------

TORCH = """
import numpy as np, torch
query, key, value = (torch.from_numpy(np.load(name + ".npy")) for name in ("q", "k", "v"))
out = torch.nn.functional.scaled_dot_product_attention(query, key, value)
np.save("torch.npy", out.numpy())
"""


@pytest.mark.parametrize("kind", ["normal", "4 x logits", "values + 100"])
def test_error_of_float32_is_no_larger_than_that_of_torch(kind, tmp_path):
    if importlib.util.find_spec("torch") is None:
        pytest.skip("torch is not installed")
    query, key, value = normal_inputs(
        np.float32, **LONG | {"n_head": 8, "n_kv_head": 8}, n_query=1024, n_key=1024
    )
    query *= 4 if kind == "4 x logits" else 1
    value += 100 if kind == "values + 100" else 0
    for name, x in (("q", query), ("k", key), ("v", value)):
        np.save(tmp_path / f"{name}.npy", x)
    process = run_python(TORCH, tmp_path)
    assert process.returncode == 0, process.stderr
    right = reference.attention(query, key, value)
    error = _on("amx", query, key, value) - right
    error_of_torch = np.load(tmp_path / "torch.npy") - right
    assert np.sqrt(np.mean(error**2)) <= np.sqrt(np.mean(error_of_torch**2))
    assert np.abs(error).max() <= np.abs(error_of_torch).max()


def test_precision_high_is_another_way_and_close():
    inputs = normal_inputs(np.float32, **LONG, n_query=512, n_key=700)
    high, highest = _on("amx", *inputs, precision="high"), _on("amx", *inputs)
    error = np.abs(high - highest).max()
    # Normal inputs keep |score| under 8 and |value| under 6: 2^-16 per product, twice.
    assert 1e-7 < error < 100 * 2.0**-16
    for dtype in (np.float16, np.float64):
        other = [x.astype(dtype) for x in inputs]
        assert_same_bits(_on("amx", *other, precision="high"), _on("amx", *other))


@NEEDS_BFLOAT16
@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"window": (100, 30)}])
def test_bfloat16_scores_that_do_not_fit_beside_such_that_do(options):
    """Some keys are large, so their blocks keep float32 scores, and their maxima reach far."""
    query, key, value = normal_inputs(np.float32, **LONG, n_query=2048, n_key=2048)
    key[:, :, 600:630] *= 20
    inputs = [x.astype(BFLOAT16) for x in (query, key, value)]
    wide = [x.astype(np.float32) for x in inputs]
    right = _on("avx512", *wide, **options)
    size = np.abs(wide[2]).max()
    error = np.abs(_on("amx", *inputs, **options).astype(np.float32) - right)
    assert error.max() <= 2.0**-7 * size


# ---- what must not enter ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "dtype", [np.float32, np.float16, pytest.param(BFLOAT16, marks=NEEDS_BFLOAT16)]
)
@pytest.mark.parametrize("bad", [NAN, INF, -INF])
@pytest.mark.parametrize(
    "options", [{"is_causal": True}, {"kv_lengths": 700}, {"window": (50, 50)}]
)
def test_excluded_rows_leave_no_trace(bad, options, dtype):
    sizes = LONG | {"n_query": 1000, "n_key": 1000}
    query, key, value = (x.astype(dtype) for x in normal_inputs(np.float32, **sizes))
    seen = slice(None, 700)  # queries that do not see keys from 750 on
    right = _on("amx", query, key, value, **options)
    key, value = key.copy(), value.copy()
    key[:, :, 750:] = bad
    value[:, :, 750:] = bad
    result = _on("amx", query, key, value, **options)
    assert_same_bits(result[:, :, seen].copy(), right[:, :, seen].copy())


@pytest.mark.parametrize("place", ["query", "key", "value"])
@pytest.mark.parametrize("number", [NAN, INF, 1e30, -3e38])
def test_visible_numbers_of_any_size_act_as_in_the_formula(place, number):
    sizes = LONG | {"n_query": 300, "n_key": 300}
    arrays = dict(zip(("query", "key", "value"), normal_inputs(np.float32, **sizes), strict=True))
    arrays[place][0, 1, 40, 3] = number
    with np.errstate(all="ignore"):
        right = reference._attention_in(np.float32, *arrays.values())[0]
    out = _on("amx", *arrays.values())
    finite = np.isfinite(right)
    np.testing.assert_array_equal(np.isfinite(out), finite)
    np.testing.assert_allclose(out[finite], right[finite], rtol=2e-5, atol=1e-5)
    untouched = _on("amx", *normal_inputs(np.float32, **sizes))
    assert_same_bits(out[:, 0].copy(), untouched[:, 0].copy())


def test_values_from_the_smallest_to_the_largest_keep_their_accuracy():
    query, key, value = normal_inputs(np.float32, **LONG, n_query=300, n_key=300)
    value *= np.logspace(-37, 37, 64).astype(np.float32)
    out, right = _on("amx", query, key, value), reference.attention(query, key, value)
    size = np.abs(value).max(axis=(0, 1, 2))
    assert (np.abs(out - right) / size).max() < 1e-6


@NEEDS_BFLOAT16
@pytest.mark.parametrize("large", [2.0**51, NAN, INF])
def test_large_values_beside_small_scores(large):
    """Outliers are told apart for whole blocks of 512 keys where scores are short."""
    query, key, value = normal_inputs(BFLOAT16, **LONG, n_query=64, n_key=1024)
    query, key = (x * BFLOAT16(0.25) for x in (query, key))
    value[..., ::7, 3] = large
    out = _on("amx", query, key, value).astype(np.float64)
    right = reference.attention(query, key, value)
    if np.isnan(large):
        assert np.isnan(out[..., 3]).all()
        assert np.isfinite(out[..., :3]).all()
    else:
        np.testing.assert_allclose(out[..., 3], right[..., 3], rtol=0.01)
    np.testing.assert_allclose(out[..., 4:], right[..., 4:], atol=0.02)
