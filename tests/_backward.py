"""Running attention_backward() and judging what it returns."""

import numpy as np
from _gradients import differentiable

import mha_fast
from mha_fast import reference

ALL_OPTIONS = ["float mask", "window", "offset at the end", "lengths", "scale", "softcap",
               "alibi per sequence", "sinks", "head mask per sequence"]  # fmt: skip

# Options of the forward pass that say how, not what.
NOT_IN_THE_FORMULA = ("num_threads", "precision")


def without_threads(call):
    """The call without what does not change its numbers."""
    return {name: x for name, x in call.items() if name not in NOT_IN_THE_FORMULA}


def random_grads(call, seed=11):
    """Gradients with respect to output and lse to begin with."""
    rng = np.random.default_rng(seed)
    out, lse = mha_fast.attention(**call, return_lse=True)
    return rng.standard_normal(out.shape).astype(out.dtype), rng.standard_normal(lse.shape).astype(
        lse.dtype
    )


def backward(call, grad_out, *, of=mha_fast, **more):
    """attention_backward, or another one, of what the kernel returns."""
    out, lse = mha_fast.attention(**call, return_lse=True)
    return of.attention_backward(grad_out, out=out, lse=lse, **call | more)


def assert_gradients_correct(call, *, with_grad_lse=False, wanted=None):
    """Compare all gradients of a call with the formulas.

    float64 to 1e-12 of the largest number in any of them, and the rounding of lse: that of a single
    key is 0 but for rounding. In float32 the error is at most twice that of the same formulas evaluated by NumPy in
    float32, and some units in the last place, also of the lse; 16-bit results get half a unit of their own last place
    on top.
    """
    call = without_threads(call)
    dtype = call["query"].dtype
    grad_out, grad_lse = random_grads(call)
    out, lse = mha_fast.attention(**call, return_lse=True)
    wanted = differentiable(call) if wanted is None else wanted
    more = {"grad_lse": grad_lse if with_grad_lse else None, "wanted": wanted}
    found = mha_fast.attention_backward(grad_out, out=out, lse=lse, **call, **more)
    right = reference.attention_backward(grad_out, out=out, lse=lse, **call, **more)
    largest_lse = np.abs(lse[lse > -np.inf]).max(initial=0)
    if dtype == np.float64:
        largest = max(np.abs(grad).max(initial=1e-30) for grad in right)
        relative = 1e-12 + 4 * np.finfo(np.float64).eps * largest_lse
        for name, grad, right_grad in zip(wanted, found, right, strict=True):
            assert grad.dtype == np.float64 and grad.shape == right_grad.shape
            assert np.abs(grad - right_grad).max(initial=0) <= relative * largest, name
        return
    same = reference._attention_backward_in(np.float32, grad_out, out=out, lse=lse, **call, **more)
    for name, grad, right_grad, same_grad in zip(wanted, found, right, same, strict=True):
        assert grad.dtype == np.asarray(call[name]).dtype, name
        largest = np.abs(right_grad).max(initial=1e-30)
        limit = (
            2 * np.abs(same_grad - right_grad).max(initial=0)
            + (8 + largest_lse) * np.finfo(np.float32).eps * largest
        )
        if grad.dtype.itemsize == 2:
            limit += largest * (2**-11 if grad.dtype == np.float16 else 2**-8)
            limit += 2.0**-25 if grad.dtype == np.float16 else 0
        assert np.isfinite(grad.astype(np.float64)).all()
        assert np.abs(grad.astype(np.float64) - right_grad).max(initial=0) <= limit, name
