"""Runs one random call and judges it: by the reference, and by what must not change the bits."""

import copy
import functools
import sys
from collections.abc import Callable
from typing import NamedTuple

import _fuzz_formulas as formulas
import numpy as np
from _fuzz_backward import check_backward
from _fuzz_cache import check_cache
from _fuzz_cases import finfo
from _fuzz_layouts import awkward, compact
from _fuzz_merge import attention_in_parts
from _support import WIDER, assert_same_bits, using_isa, weight_rounding

import mha_fast

# The largest error may be this multiple of that of the same formula evaluated by NumPy in the
# same precision, where that is above the floor of `_floor` ...
MULTIPLE = 2
# ... in units in the last place of the largest value, and of the largest part of a logit.
FLOOR = 4

# Bytes around and in `out` before the call; as a number of any dtype it is finite.
WRITABLE = 0xA5


class Report:
    """How near to its limit the largest error came."""

    def __init__(self):
        self.share, self.where = 0.0, "nowhere"

    def note(self, share, where):
        """Keep the largest share of a limit."""
        if np.isfinite(share) and share > self.share:
            self.share, self.where = float(share), where


def check(case, report=None):
    """Raise AssertionError when the library breaks its contract on this case."""
    report = Report() if report is None else report
    with using_isa(case.isa):
        if case.entry == "KVCache":
            check_cache(case, lambda one, result: _compare(one, result, report, case.number))
        elif case.entry.endswith("_backward"):
            near = functools.partial(_assert_near, number=case.number, report=report)
            # The weights come from a stored lse, which is rounded by its own size.
            capped = float(case.options.get("softcap", 0.0)) if case.exact else 0.0
            check_backward(case, near, _largest_part_of_a_logit(case) + capped)
        else:
            result = _checked_call(case)
            _compare(case, result, report, case.number)
            _check_bits(case, result)
    assert sys.float_info.min / 2 != 0, "subnormal numbers are flushed to zero after the call"


def reduced(case):
    """A simpler case that fails in the same way, without what does not matter."""
    reason = _failure(case)
    for name in ("layout_seed", "num_threads", *case.options, "attn_mask"):
        simpler = copy.deepcopy(case)
        if name in ("layout_seed", "num_threads"):
            setattr(simpler, name, None)
        else:
            simpler.options.pop(name, None)
            simpler.arrays.pop(name, None)
            simpler.unseen = []
        if _failure(simpler) == reason:
            case = simpler
    return case


def _failure(case):
    """Kind of exception and beginning of its message; None where all is well."""
    try:
        check(case)
    except Exception as error:  # noqa: BLE001 - whatever the finding was
        return type(error), str(error).split(":")[0]
    return None


def call(case):
    """Make the calls of a case without judging the result."""
    results_of(case)


def results_of(case):
    """All arrays that the calls of a case return, unjudged."""
    results = []
    with using_isa(case.isa):
        if case.entry == "KVCache":
            check_cache(case, lambda one, result: results.extend(result))
        else:
            results.extend(_checked_call(case))
    return results


# ---- the entry points ---------------------------------------------------------------------------


class Entry(NamedTuple):
    """How an entry point is called and judged."""

    call: Callable
    formula: Callable
    alone: Callable  # a smaller call of the same bits, see _fuzz_formulas.py
    call_alone: Callable
    has_out: bool = True


def _entry(case):
    functions = {
        "attention": (formulas.attention, formulas.one_batch_entry, "attention", True),
        "attention_weights": (
            formulas.weights,
            formulas.one_batch_entry,
            "attention_weights",
            False,
        ),
        "attention_varlen": (formulas.varlen, formulas.one_sequence, "attention", True),
    }
    if case.entry == "merge_attention":
        return Entry(attention_in_parts, formulas.merged, lambda case: None, None, False)
    formula, alone, call_alone, has_out = functions[case.entry]
    return Entry(
        getattr(mha_fast, case.entry), formula, alone, getattr(mha_fast, call_alone), has_out
    )


# ---- the call -----------------------------------------------------------------------------------


def _checked_call(case):
    """Call with operands (and out) in their places; nothing but out may have been written."""
    rng, place = None, compact
    if case.layout_seed is not None:
        rng = np.random.default_rng(case.layout_seed)
        place = functools.partial(awkward, rng)
    placed = {name: place(x) for name, x in case.arrays.items()}
    options = {
        name: place(x).view if isinstance(x, np.ndarray) and x.ndim else x
        for name, x in case.options.items()
    }
    before = {name: p.memory.tobytes() for name, p in placed.items()}
    out = _out(case, placed, rng)
    if out is not None:
        options["out"] = out.view
    result, lse = _entry(case).call(
        **{name: p.view for name, p in placed.items()},
        **options,
        return_lse=True,
        num_threads=case.num_threads,
    )
    if out is not None:
        assert result is out.view
        result = result.copy()
        _assert_only_out_written(out, placed)
    for name, p in placed.items():
        if out is None or out.memory is not p.memory:
            assert p.memory.tobytes() == before[name], f"{name} was written"
    return result, lse


def _out(case, placed, rng):
    """An array for the result, in an awkward place or over the query; or None."""
    if rng is None or not _entry(case).has_out or rng.random() < 0.4:
        return None
    query, value = placed["query"].view, placed["value"].view
    shape = (*query.shape[:-1], value.shape[-1])
    if query.ndim > 2:
        shape = (*case.batch_shape, *shape[-3:])
    if query.shape == shape and query.flags.writeable and query.dtype.isnative and not (
        0 in query.strides) and rng.random() < 0.3:  # fmt: skip
        over = query[..., ::-1, :] if rng.random() < 0.5 else query
        return placed["query"]._replace(view=over)
    out = awkward(rng, np.empty(shape, query.dtype.newbyteorder("=")), writable=True)
    out.memory[...] = WRITABLE
    return out


def _assert_only_out_written(out, placed):
    if any(out.memory is p.memory for p in placed.values()):
        return
    pattern = np.frombuffer(bytes([WRITABLE]) * out.view.itemsize, out.view.dtype)
    out.view[...] = pattern[0]
    assert (out.memory == WRITABLE).all(), "memory outside of out was written"


# ---- against the reference ----------------------------------------------------------------------


def _compare(case, result, report, number):
    arithmetic = case.dtype if case.dtype in (np.float32, np.float64) else np.float32
    right = _formula(case, WIDER[arithmetic])
    same = _formula(case, arithmetic)
    out, lse = result
    assert out.dtype == case.dtype, out.dtype
    assert lse.dtype == arithmetic, lse.dtype
    out_floor, lse_floor = _floor(case, arithmetic, right)
    rounding = 0
    if arithmetic != case.dtype:
        rounding = _half_ulp(right[0], case.dtype)
        if case.entry == "merge_attention":  # of each part, and of the whole
            rounding = rounding + _half_ulp(_largest(case.arrays["value"]), case.dtype)
    error = weight_rounding(case.dtype)
    out_floor, lse_floor = out_floor + 2 * error * _value_size(case), lse_floor + error
    _assert_near("out", out, right[0], same[0], out_floor, rounding, number, report)
    _assert_near("lse", lse, right[1], same[1], lse_floor, 0, number, report)


def _formula(case, dtype):
    return _entry(case).formula(dtype, **case.arrays, **case.options)


def _floor(case, dtype, right):
    """What rounding may do to output and lse although it did nothing to NumPy, by luck."""
    eps, smallest = float(np.finfo(dtype).eps), float(np.finfo(dtype).smallest_subnormal)
    logit = _largest_part_of_a_logit(case)
    out = FLOOR * eps * _value_size(case) * (1 + logit) + FLOOR * smallest
    return out, FLOOR * eps * (1 + logit + _largest(right[1]))


def _value_size(case):
    size = _largest(case.arrays.get("value", 1.0))
    return size * max(1.0, _largest(case.options.get("head_mask", 1.0)))


def _largest_part_of_a_logit(case):
    """Bound on dot products, ALiBi, mask and sinks, each of which is rounded by its own size."""
    options = case.options
    query, key = case.arrays["query"], case.arrays["key"]
    part = 3.0  # logits without error repeat, and the errors of equal weights add up
    if not case.exact:
        scale = options.get("scale")
        scale = 1 / np.sqrt(max(query.shape[-1], 1)) if scale is None else abs(scale)
        part = float(scale) * _largest_norm(query) * _largest_norm(key)
    if "alibi_slopes" in options:
        offset = options.get("query_offset", 0)
        n_row = max(query.shape[:-1]) + max(key.shape[:-1])
        reach = n_row + (0 if isinstance(offset, str) else _largest(offset))
        part += _largest(options["alibi_slopes"]) * reach
    mask = case.arrays.get("attn_mask")
    if mask is not None and mask.dtype != bool:
        # Beside the lowest numbers every other part vanishes, in any precision.
        mask = np.asarray(mask, np.float64)
        part += _largest(mask[np.abs(mask) < 1e30])
    return part + _largest(options.get("sinks", 0.0))


def _assert_near(name, got, right, same, floor, rounding, number, report):
    """Same shape; NaN and Inf in the same places; elsewhere no error above the limit."""
    assert got.shape == right.shape, f"{name}: shape {got.shape}, right {right.shape}"
    finite = np.isfinite(right)
    with np.errstate(invalid="ignore", over="ignore"):
        error = np.where(finite, np.abs(got.astype(right.dtype) - right), 0)
        own = np.where(finite, np.abs(same.astype(right.dtype) - right), 0)
    limit = MULTIPLE * own[np.isfinite(own)].max(initial=0) + floor
    excess = error - np.where(finite, rounding, 0)
    wrong = ~(excess <= limit)  # also where only `got` is NaN or Inf
    wrong |= ~finite & (got != right) & ~(np.isnan(got) & np.isnan(right))
    report.note(excess.max(initial=0) / limit, f"{name} of case {number}")
    assert not wrong.any(), _where(name, wrong, got, right, limit)


def _where(name, wrong, got, right, limit):
    index = tuple(np.argwhere(wrong)[0].tolist())
    return (f"{name}: {wrong.sum()} of {wrong.size} wrong, first at {index}: {got[index]}, "
            f"right {right[index]}, limit {limit:.3g}")  # fmt: skip


def _half_ulp(x, dtype):
    """Error of rounding `x` once to a 16-bit dtype, and a hundredth more."""
    limits = finfo(dtype)
    return 0.505 * np.maximum(np.abs(x) * float(limits.eps), float(limits.smallest_subnormal))


def _largest(x):
    magnitude = np.abs(np.asarray(x, np.float64))
    return float(magnitude[np.isfinite(magnitude)].max(initial=0))


def _largest_norm(x):
    if not x.size:
        return 0.0
    x = np.nan_to_num(np.asarray(x, np.float64), nan=0, posinf=0, neginf=0)
    return float(np.sqrt(np.square(x).sum(axis=-1).max(initial=0)))


# ---- the same bits ------------------------------------------------------------------------------


def _check_bits(case, result):
    """Layout, out, lse, threads, excluded keys and the other sequences change nothing."""
    entry = _entry(case)
    if case.entry != "merge_attention":
        options = case.options | {"num_threads": 1 if case.num_threads != 1 else 3}
        again = entry.call(**_compact_and_finite(case), **options)
        _assert_same_bits("compact call without lse", again, result[0])
    smaller = entry.alone(case)
    if smaller is not None:
        arguments, part = smaller
        alone = entry.call_alone(**arguments, return_lse=True)
        for name, one, whole in zip(("out", "lse"), alone, part(*result), strict=True):
            _assert_same_bits(f"{name} of one sequence alone", one, whole)


def _compact_and_finite(case):
    """The arrays in C order, with zeros where what they hold must not matter."""
    arrays = {name: compact(x).view for name, x in case.arrays.items()}
    for name in {"key", "value"} & arrays.keys():
        arrays[name][..., case.unseen, :] = 0
    return arrays


def _assert_same_bits(what, got, right):
    try:
        assert_same_bits(got, right)
    except AssertionError as error:
        raise AssertionError(f"{what}: other bits: {error}") from None
