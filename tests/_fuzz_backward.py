"""Backward passes for the fuzzer: judged by the formulas, and by what must not change the bits."""

import functools

import numpy as np
from _fuzz_cases import finfo
from _fuzz_formulas import backward_units, one_batch_entry, sequence
from _fuzz_layouts import awkward, compact
from _gradients import differentiable
from _support import WIDER, assert_same_bits, largest

import mha_fast
from mha_fast import reference

# Options of a case that are not options of the forward pass.
OWN = ("grad_seed", "share_wanted", "with_grad_lse", "poison_grad")


def check_backward(case, assert_near, floor_of_logit):
    """Raise AssertionError when a backward pass breaks its contract on this case."""
    forward, function = _functions(case)
    call = case.arrays | {name: x for name, x in case.options.items() if name not in OWN}
    out, lse = forward(**call, return_lse=True)
    grads = _grads(case, out, lse)
    wanted = _wanted(case, call)
    given = call | {"out": out, "lse": lse} | grads
    found = _placed_call(case, function, given, wanted)
    _check_values(case, given, wanted, found, assert_near, floor_of_logit)
    _check_bits(case, function, given, wanted, found)


def _functions(case):
    if case.entry == "attention_varlen_backward":
        return mha_fast.attention_varlen, mha_fast.attention_varlen_backward
    return mha_fast.attention, mha_fast.attention_backward


def _grads(case, out, lse):
    rng = np.random.default_rng(case.options.get("grad_seed", 0))
    grad_out = rng.standard_normal(out.shape).astype(out.dtype)
    if case.options.get("poison_grad") and grad_out.size:
        grad_out.flat[int(rng.integers(grad_out.size))] = np.nan
    if not case.options.get("with_grad_lse"):
        return {"grad_out": grad_out}
    return {"grad_out": grad_out, "grad_lse": rng.standard_normal(lse.shape).astype(lse.dtype)}


def _wanted(case, call):
    rng = np.random.default_rng(case.options.get("grad_seed", 0))
    names = [name for name in differentiable(call) if np.asarray(call[name]).dtype.kind != "i"]
    share = case.options.get("share_wanted", 1.0)
    return tuple(name for name in rng.permutation(names).tolist() if rng.random() < share)


def _placed_call(case, function, given, wanted):
    """Call with all arrays in their places; none of them may have been written."""
    place = compact
    if case.layout_seed is not None:
        place = functools.partial(awkward, np.random.default_rng(case.layout_seed))
    placed = {name: place(x) for name, x in given.items() if isinstance(x, np.ndarray) and x.ndim}
    before = {name: p.memory.tobytes() for name, p in placed.items()}
    found = function(
        **given | {name: p.view for name, p in placed.items()},
        wanted=wanted,
        num_threads=case.num_threads,
    )
    for name, p in placed.items():
        assert p.memory.tobytes() == before[name], f"{name} was written"
    return found


# ---- against the reference ----------------------------------------------------------------------


def _check_values(case, given, wanted, found, assert_near, floor_of_logit):
    arithmetic = case.dtype if case.dtype in (np.float32, np.float64) else np.float32
    with np.errstate(all="ignore"):  # NaN, Inf and overflow are ordinary results here
        right, same, units = _right(case, given, wanted, arithmetic)
    eps = float(np.finfo(arithmetic).eps)
    smallest = float(np.finfo(arithmetic).smallest_subnormal)
    for name, grad, right_grad, same_grad, unit in zip(
        wanted, found, right, same, units, strict=True
    ):
        dtype = np.asarray(given[name]).dtype
        assert grad.dtype == dtype, f"{name} has dtype {grad.dtype}"
        if name == "sinks" and given["value"].shape[-1] == 0:
            continue  # nothing flows from an empty output; the formula has 0 times NaN there
        if unit is None:  # of packed sequences; the bits of each alone are compared below
            assert grad.shape == right_grad.shape, f"{name}: {grad.shape}, right {right_grad.shape}"
            continue
        # Weights follow from an lse that was rounded; huge ones say little of them.
        logit = floor_of_logit + float(largest(given["lse"]))
        floor = 4 * eps * (1 + logit) * unit + 1e3 * smallest * (1 + unit)
        rounding = 0
        if (
            dtype.kind == "f"
            and dtype.itemsize < np.dtype(arithmetic).itemsize
            or dtype.itemsize == 2
        ):
            limits = finfo(dtype.type)
            rounding = 0.505 * np.maximum(
                np.abs(right_grad) * float(limits.eps), float(limits.smallest_subnormal)
            )
            too_large = np.abs(right_grad) * (1 + float(limits.eps)) + floor >= float(limits.max)
            grad = np.where(too_large, right_grad, grad.astype(right_grad.dtype))
        assert_near(f"gradient of {name}", grad, right_grad, same_grad, floor, rounding)


def _right(case, given, wanted, arithmetic):
    """The gradients, the same in the dtype of the arithmetic, and the size of the sums behind."""
    if case.entry == "attention_varlen_backward":
        right = reference.attention_varlen_backward(**given, wanted=wanted)
        return right, right, [None] * len(wanted)
    right = reference._attention_backward_in(WIDER[arithmetic], **given, wanted=wanted)
    same = reference._attention_backward_in(arithmetic, **given, wanted=wanted)
    return right, same, backward_units(wanted=wanted, **given)


# ---- the same bits ------------------------------------------------------------------------------


def _check_bits(case, function, given, wanted, found):
    """Layout, threads, excluded keys, what else is wanted and the other sequences change nothing."""
    arrays = {n: compact(x).view for n, x in given.items() if isinstance(x, np.ndarray) and x.ndim}
    for name in ("key", "value"):
        arrays[name][..., case.unseen, :] = 0
    threads = 1 if case.num_threads != 1 else 3
    again = function(**given | arrays, wanted=wanted[::-1], num_threads=threads)
    for name, one, other in zip(wanted, found, again[::-1], strict=True):
        _assert_same_bits(f"gradient of {name}, compact call", one, other)
    rows = tuple(name for name in wanted if name in ("query", "key", "value"))
    alone = _one_sequence(case, given) if rows else None
    if alone is None:
        return
    call, part_of = alone
    smaller = mha_fast.attention_backward(**call, wanted=rows)
    for name, one in zip(rows, smaller, strict=True):
        whole = part_of(name, found[wanted.index(name)])
        _assert_same_bits(f"gradient of {name} of one sequence", np.ascontiguousarray(one), whole)


def _one_sequence(case, given):
    """One sequence in a call of its own, where it shares no gradient; and its part of the whole."""
    if "dropout_p" in given:  # which numbers the batch entries
        return None
    if case.entry == "attention_varlen_backward":
        return _one_of_packed(given)
    if any(np.shape(given[name])[:-3] != case.batch_shape for name in ("query", "key", "value")):
        return None
    smaller = one_batch_entry(case)
    if smaller is None:
        return None
    call, _ = smaller
    entry = tuple(n // 2 for n in case.batch_shape)
    call = {name: x for name, x in call.items() if name not in OWN}
    call |= {name: given[name][entry] for name in ("grad_out", "out", "lse")}
    if "grad_lse" in given:
        call["grad_lse"] = given["grad_lse"][entry]
    return call, lambda name, whole: np.ascontiguousarray(whole[entry])


def _one_of_packed(given):
    cu_q, cu_k = given["cu_seqlens_q"], given["cu_seqlens_k"]
    if len(cu_q) < 2:
        return None
    i = int(np.argmax(np.diff(cu_q)))
    mine = (
        "query",
        "key",
        "value",
        "cu_seqlens_q",
        "cu_seqlens_k",
        "out",
        "lse",
        "grad_out",
        "grad_lse",
    )
    options = {name: x for name, x in given.items() if name not in mine}
    packed = (given[name] for name in ("query", "key", "value"))
    rows, call = sequence(i, *packed, cu_q, cu_k, options)
    keys = slice(*(int(x) for x in cu_k[i : i + 2]))
    call |= {name: given[name][rows].swapaxes(0, 1) for name in ("grad_out", "out")}
    call |= {name: given[name][rows].T for name in ("lse", "grad_lse") if name in given}

    def part_of(name, whole):
        return np.ascontiguousarray(whole[rows if name == "query" else keys].swapaxes(0, 1))

    return call, part_of


def _assert_same_bits(what, got, right):
    try:
        assert_same_bits(np.ascontiguousarray(got), np.ascontiguousarray(right))
    except AssertionError as error:
        raise AssertionError(f"{what}: other bits: {error}") from None
