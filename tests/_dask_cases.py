"""Random calls over dask arrays: those of the fuzzer, cut in chunks at random."""

import warnings

import dask
import dask.array as da
import numpy as np
from _fuzz_cases import draw_case, finfo
from _fuzz_checks import Report, _compare

import mha_fast.dask

# Options that may come as dask arrays, and the axes in which a chunk is named.
SMALL_ARRAYS = ("query_offset", "kv_lengths", "alibi_slopes", "sinks", "head_mask")
MOST_CHUNKS = 4  # along one axis


def draw(seed, number):
    """Case `number` of a run: the call, and its arguments cut in chunks."""
    rng = np.random.default_rng((seed, number, 1))
    case = draw_case(seed, number, ["any"], "attention")
    # A log-sum-exp is rounded by its own size: where it is huge, so is the error of joined parts.
    # Such calls are replaced by what the fuzzer draws for merging.
    if case.exact or _is_low(case.arrays.get("attn_mask")):
        case = draw_case(seed, number, ["any"], "merge_attention")
        del case.options["cuts"]
        case.entry = "attention"
    arguments = {name: _perhaps_chunked(rng, x, 0.8) for name, x in case.arrays.items()}
    for name, option in case.options.items():
        is_array = name in SMALL_ARRAYS and isinstance(option, np.ndarray)
        arguments[name] = _perhaps_chunked(rng, option, 0.3) if is_array else option
    if rng.random() < 0.5:
        arguments["chunks"] = {
            name: int(rng.choice([-1, 1 + rng.integers(100)]))
            for name in ("batch", "heads", "queries", "keys")
            if rng.random() < 0.4
        }
    return case, arguments


def check(seed, number, report=None):
    """Compare one case with the formula; it may be as wrong as a call that is not cut."""
    case, arguments = draw(seed, number)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        results = mha_fast.dask.attention(**arguments, return_lse=True)
        sizes = [x.chunks for x in results]
        computed = dask.compute(*results, scheduler="synchronous")
    for x, chunks in zip(computed, sizes, strict=True):
        assert x.shape == tuple(map(sum, chunks)), (x.shape, chunks)
    _compare(case, computed, Report() if report is None else report, number)


def check_backward(seed, number):
    """Compare the gradients of one case with those of one call, in its dtype and in float64."""
    rng = np.random.default_rng((seed, number, 2))
    case = draw_case(seed, number, ["any"], "merge_attention")
    del case.options["cuts"]
    arrays, options = case.arrays, case.options
    out, lse = mha_fast.attention(**arrays, **options, return_lse=True)
    grads = {"grad_out": rng.standard_normal(out.shape).astype(out.dtype), "out": out, "lse": lse}
    if rng.random() < 0.5:
        grads["grad_lse"] = rng.standard_normal(lse.shape).astype(lse.dtype)
    wanted = _wanted(rng, case)
    one = mha_fast.attention_backward(**grads, **arrays, wanted=wanted, **options)
    wide = {name: _widened(x) for name, x in (grads | arrays).items()}
    right = mha_fast.attention_backward(**wide, wanted=wanted, **options)

    chunked = {name: _perhaps_chunked(rng, x, 0.7) for name, x in (grads | arrays).items()}
    chunks = {name: int(1 + rng.integers(80)) for name in ("heads", "queries", "keys")}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        lazy = mha_fast.dask.attention_backward(**chunked, wanted=wanted, chunks=chunks, **options)
        found = dask.compute(*lazy, scheduler="synchronous")
    for name, x, whole, exact in zip(wanted, found, one, right, strict=True):
        assert (x.shape, x.dtype) == (whole.shape, whole.dtype), name
        _assert_as_near(name, x, whole, exact)


def _wanted(rng, case):
    names = ["query", "key", "value"]
    mask = case.arrays.get("attn_mask")
    if mask is not None and mask.dtype != bool:
        names.append("attn_mask")
    names += [name for name in ("sinks", "alibi_slopes", "head_mask") if name in case.options]
    picked = rng.permutation(names)[: int(rng.integers(1, len(names) + 1))]
    return tuple(picked.tolist())


def _widened(x):
    return x if x.dtype == bool else x.astype(np.float64)


def _assert_as_near(name, found, whole, exact):
    """As near to the numbers in float64 as one call in the same dtype; sums are added otherwise."""
    exact = exact.astype(np.float64)
    eps = float(finfo(whole.dtype.type).eps)
    with np.errstate(invalid="ignore"):
        own = np.abs(whole.astype(np.float64) - exact).max(initial=0)
        error = np.abs(found.astype(np.float64) - exact).max(initial=0)
    limit = 4 * own + 16 * eps * (1 + np.abs(exact).max(initial=0))
    assert error <= limit, f"{name}: error {error}, of one call {own}, limit {limit}"


def _is_low(mask):
    """Whether logits can be so low that a log-sum-exp holds nothing else."""
    if mask is None or mask.dtype == bool:
        return False
    mask = mask.astype(float)
    return bool((np.isfinite(mask) & (mask < -1e4)).any())


def _perhaps_chunked(rng, x, probability):
    if rng.random() >= probability:
        return x
    chunks = tuple(_sizes(rng, n) for n in x.shape)
    return da.from_array(np.array(x), chunks=chunks)


def _sizes(rng, n):
    cuts = np.sort(rng.integers(0, n + 1, int(rng.integers(MOST_CHUNKS))))
    return tuple(np.diff([0, *cuts, n]).tolist())
