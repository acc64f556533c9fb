"""attention_backward(): the gradients of `attention` with respect to each of its arguments.

Checks come first, as in the forward pass; then the arrays that the compiled core adds to, each of
the shape of its own argument; then, for the numbers per head, the last sums.
"""

import math
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, field
from typing import Any, Unpack

import numpy as np

from . import _arguments, _checks, _core
from ._options import BACKWARD, VARLEN_BACKWARD, BackwardOptions, VarlenBackwardOptions
from ._typing import Array, ArrayLike
from .config import threads_asked_for

WANTED = ("query", "key", "value", "attn_mask", "sinks", "alibi_slopes", "head_mask")


@BACKWARD.shown
def attention_backward(
    grad_out: ArrayLike,
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    out: ArrayLike,
    lse: ArrayLike,
    attn_mask: ArrayLike | None = None,
    *,
    grad_lse: ArrayLike | None = None,
    wanted: Sequence[str] = ("query", "key", "value"),
    **options: Unpack[BackwardOptions],
) -> tuple[Array, ...]:
    """Gradients of `attention`, with every option that it has.

    The scores are computed again, block by block, and become weights by the log-sum-exp of the
    forward pass; no array of ``n_query * n_key`` is made, but for the gradient of a mask that is one.

    Parameters
    ----------
    grad_out : array, (..., n_head, n_query, value_width)
        Gradient of a number with respect to the output of `attention`, of its dtype.
    query, key, value, attn_mask
        What `attention` got.
    out : array, (..., n_head, n_query, value_width)
        What it returned.
    lse : array, (..., n_head, n_query)
        What it returned with ``return_lse=True``. Where the call is one part of a larger one, over
        some of its keys, `out` and `lse` may be those of the larger one (`merge_attention`); the
        gradients are then those of the larger one.
    grad_lse : array, (..., n_head, n_query), optional
        Gradient of the same number with respect to `lse`, of its dtype.
    wanted : sequence of str
        The arguments whose gradients to return: "query", "key", "value", "attn_mask" (a float
        mask), "sinks", "alibi_slopes", "head_mask". What is not wanted is not computed.
    is_causal, window, query_offset, kv_lengths, scale, softcap, alibi_slopes, sinks, head_mask, \
dropout_p, dropout_seed
        As `attention` got them.
    precision, num_threads
        As in `attention`.

    Returns
    -------
    tuple of arrays
        In the order of `wanted`, each of the shape and dtype of its argument (numbers per head that
        were no floats: float64): summed over the axes that were broadcast and over the query
        heads that share a key/value head.

    Raises
    ------
    TypeError, ValueError, MemoryError
        As `attention`; also for arrays that do not fit the call, and for names in `wanted` that are
        unknown, given twice, or of arguments that were not given.

    Notes
    -----
    An excluded pair of query and key contributes exactly 0, and leaves no trace even if the query,
    the key, the value or `grad_out` holds NaN or Inf there. A query without keys and a key without
    queries have gradient 0. Through a gate of 0 nothing flows, but to the gate itself.

    16-bit inputs are accumulated in float32 and rounded once. The result is the same to the bit
    for any number of threads and in any batch.

    Five products of ``n_head * n_query * n_key`` by a width are needed where the forward pass takes
    two. The gradients of `attn_mask`, `alibi_slopes` and `head_mask` take two more each. Memory is
    that of the gradients (16-bit: in float32 too), a number per row, and about a MiB per thread.
    All of it runs on the vector units, also where the forward pass takes the matrix unit. The `lse`
    that bfloat16 gets there is within 2**-9, which is as much as one rounding of the results is
    off, and raises their rms error by a few percent.

    References
    ----------
    Dao et al. 2022, appendix B.4, for the recomputed weights and ``sum(grad_out * out)``.

    Examples
    --------
    >>> import numpy as np, mha_fast
    >>> x = np.random.default_rng(0).standard_normal((2, 8, 100, 64), dtype=np.float32)
    >>> out, lse = mha_fast.attention(x, x, x, is_causal=True, return_lse=True)
    >>> grads = mha_fast.attention_backward(np.ones_like(out), x, x, x, out, lse, is_causal=True)
    >>> [grad.shape for grad in grads]
    [(2, 8, 100, 64), (2, 8, 100, 64), (2, 8, 100, 64)]
    """
    call = _arguments.check(query, key, value, attn_mask, False, BACKWARD, options)
    given = {"query": query, "key": key, "value": value, "attn_mask": attn_mask, **options}
    names = _wanted(wanted, given)
    what = _forward_results(call, grad_out, out, lse, grad_lse)
    _make_up_for_coarse_lse(call, what)
    return _compute(call, what, names, given)


@VARLEN_BACKWARD.shown
def attention_varlen_backward(
    grad_out: ArrayLike,
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    out: ArrayLike,
    lse: ArrayLike,
    cu_seqlens_q: ArrayLike,
    cu_seqlens_k: ArrayLike,
    *,
    grad_lse: ArrayLike | None = None,
    wanted: Sequence[str] = ("query", "key", "value"),
    **options: Unpack[VarlenBackwardOptions],
) -> tuple[Array, ...]:
    """Gradients of `attention_varlen`: each sequence has those of a call of its own, to the bit.

    Parameters
    ----------
    grad_out : array, (n_row_q, n_head, value_width)
        Gradient of a number with respect to the output of `attention_varlen`, of its dtype.
    query, key, value, cu_seqlens_q, cu_seqlens_k
        What `attention_varlen` got.
    out, lse : array, (n_row_q, n_head, value_width) and (n_row_q, n_head)
        What it returned.
    grad_lse : array, (n_row_q, n_head), optional
        Gradient of the same number with respect to `lse`, of its dtype.
    wanted : sequence of str
        As in `attention_backward`, but for "attn_mask".
    is_causal, window, query_offset, scale, softcap, alibi_slopes, sinks, head_mask, dropout_p, \
dropout_seed
        As `attention_varlen` got them.
    precision, num_threads
        As in `attention`.

    Returns
    -------
    tuple of arrays
        In the order of `wanted`, each of the shape and dtype of its argument.

    Raises
    ------
    TypeError, ValueError, MemoryError
        As `attention_backward` and `attention_varlen`.

    Examples
    --------
    >>> import numpy as np, mha_fast
    >>> x = np.random.default_rng(0).standard_normal((12, 8, 64), dtype=np.float32)
    >>> ends = [0, 5, 5, 12]
    >>> out, lse = mha_fast.attention_varlen(x, x, x, ends, ends, return_lse=True)
    >>> grads = mha_fast.attention_varlen_backward(np.ones_like(out), x, x, x, out, lse, ends, ends)
    >>> [grad.shape for grad in grads]
    [(12, 8, 64), (12, 8, 64), (12, 8, 64)]
    """
    call = _arguments.check_packed(
        query, key, value, cu_seqlens_q, cu_seqlens_k, False, VARLEN_BACKWARD, options
    )
    given = {"query": query, "key": key, "value": value, "attn_mask": None, **options}
    names = _wanted(wanted, given)
    what = _forward_results(call, grad_out, out, lse, grad_lse)
    _make_up_for_coarse_lse(call, what)
    return _compute(call, what, names, given)


# ---- what the core takes ------------------------------------------------------------------------


@dataclass(slots=True)
class Gradients:
    """What the core reads and adds to, beside the call. What is None is absent, or not wanted."""

    grad_out: Array
    out: Array
    lse: Array
    grad_lse: Array | None
    delta: Array | None = None  # of each row; receives sum(grad_out * out) - grad_lse
    query: Array | None = None  # these are added to: zeros of the arithmetic type
    key: Array | None = None
    value: Array | None = None
    slope_sum: Array | None = None  # receive a sum of each row over its keys
    gate_sum: Array | None = None
    mask: Array | None = None  # receives (mask entries, heads, queries, keys), each its own or 1
    mask_batches: Array | None = None  # int64: batch entries in the order of the mask entries
    mask_bounds: Array | None = None  # int64: where those of each mask entry begin and end
    waves: Array | None = None  # int64: entries that share a gradient are in different ones
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)


def _wanted(wanted: Any, given: dict[str, Any]) -> tuple[str, ...]:
    """Check the names of what is wanted."""
    expected = f"a sequence of names among {', '.join(WANTED)}"
    if isinstance(wanted, str) or not isinstance(wanted, Sequence):
        raise TypeError(f"wanted is {wanted!r}; expected {expected}")
    for name in wanted:
        if name not in WANTED:
            raise ValueError(f"wanted holds {name!r}; expected {expected}")
        if given.get(name) is None:
            raise ValueError(f"wanted holds {name!r}, an argument that was not given")
    if len(set(wanted)) < len(wanted):
        raise ValueError(f"wanted is {wanted!r}; expected each name once")
    if "attn_mask" in wanted and np.asarray(given["attn_mask"]).dtype == np.bool_:
        raise ValueError("wanted holds 'attn_mask', a mask of bools; expected a float mask")
    return tuple(wanted)


def _forward_results(
    call: _arguments.Call, grad_out: Any, out: Any, lse: Any, grad_lse: Any
) -> Gradients:
    """Check what came out of the forward pass and what came back."""
    own = slice(1, None) if call.one_head else slice(None)
    lse_dtype = np.dtype(call.lse_dtype)
    arrays = [
        _fitting("grad_out", grad_out, call.out_shape[own], call.dtype, "query"),
        _fitting("out", out, call.out_shape[own], call.dtype, "query"),
        _fitting("lse", lse, call.lse_shape[own], lse_dtype, "the lse of attention"),
    ]
    if grad_lse is not None:
        like = "the lse of attention"
        arrays.append(_fitting("grad_lse", grad_lse, call.lse_shape[own], lse_dtype, like))
    if call.one_head:
        arrays = [x[None] for x in arrays]
    if call.cu_seqlens_q is not None:
        arrays = [x.swapaxes(0, 1) for x in arrays]
    rows = [_checks.readable(x) for x in arrays[:2]]
    numbers = [x if x.flags.aligned else x.copy() for x in arrays[2:]]
    return Gradients(rows[0], rows[1], numbers[0], numbers[1] if grad_lse is not None else None)


def _fitting(name: str, x: Any, shape: tuple[int, ...], dtype: np.dtype[Any], like: str) -> Array:
    array = _checks.array(name, x)
    if array.dtype != dtype:
        raise TypeError(f"{name} has dtype {array.dtype}; expected {dtype} like {like}")
    if array.shape != shape:
        raise ValueError(f"{name} has shape {array.shape}; expected {shape}")
    return array


# ---- where lse is large -------------------------------------------------------------------------

# From this rounding error of an lse on, the sums of the weights that follow from it are looked at.
_COARSE = 2.0**-12


def _make_up_for_coarse_lse(call: _arguments.Call, what: Gradients) -> None:
    """Let weights that would sum to more than 1 sum to 1.

    Beside logits of -1e9, as masks hold that hide all keys of a query, the logarithm of the number
    of keys has no place left in lse, and ``exp(logit - lse)`` would be 1 for each of them. Every
    gradient is a multiple of what comes back to its row, so that is divided by the sum.
    """
    size = np.abs(what.lse)
    is_coarse = (size > _COARSE / np.finfo(what.lse.dtype).eps) & (size != np.inf)
    if not is_coarse.any():
        return
    total = _sums_of_weights(call, what.lse)
    with np.errstate(invalid="ignore"):  # of NaN no sum is above 1
        if call.sinks is not None:
            total = total + _weights_of_sinks(call, what.lse)
        factor = np.where(is_coarse & (total > 1), 1 / np.maximum(total, 1), 1)
    factor = factor.astype(what.lse.dtype)
    scaled = what.grad_out.view(call.dtype).astype(what.lse.dtype) * factor[..., None]
    what.grad_out = _checks.readable(scaled.astype(call.dtype))
    if what.grad_lse is not None:
        what.grad_lse = what.grad_lse * factor


def _sums_of_weights(call: _arguments.Call, lse: Array) -> Array:
    """``sum_j exp(logit_j - lse)`` of each row: the gradient of a gate where all values are 1."""
    plain = copy(call)
    assert call.value is not None
    one = _checks.bits(np.ones(1, call.dtype))
    plain.value = np.broadcast_to(one, (*call.value.shape[:-1], 1))
    plain.head_mask, plain.dropout_p = None, 0.0
    ones = np.broadcast_to(one, (*lse.shape, 1))
    what = Gradients(ones, ones, lse, None, delta=_per_row(call), gate_sum=_per_row(call))
    _core.differentiate(plain, what, call.n_thread or threads_asked_for())
    assert what.gate_sum is not None
    return what.gate_sum


# ---- the arrays of the results ------------------------------------------------------------------


def _compute(
    call: _arguments.Call, what: Gradients, names: tuple[str, ...], given: dict[str, Any]
) -> tuple[Array, ...]:
    """Allocate, run the kernel, and give the results the shapes and dtypes of their arguments."""
    if set(names) - {"value"}:
        what.delta = _per_row(call)
    for name in ("query", "key", "value"):
        if name in names:
            setattr(what, name, _zeros_like(call, getattr(call, name)))
    if "alibi_slopes" in names:
        what.slope_sum = _per_row(call)
    if "head_mask" in names:
        what.gate_sum = _per_row(call)
    if "attn_mask" in names:
        _prepare_mask(call, what)
    what.waves = _waves(call, names)
    if what.lse.size:
        _core.differentiate(call, what, call.n_thread or threads_asked_for())
    with np.errstate(invalid="ignore", over="ignore"):  # NaN and Inf are ordinary results here
        return tuple(_result(name, call, what, given[name]) for name in names)


def _per_row(call: _arguments.Call) -> Array:
    """A number for each query and head, like lse."""
    numbers = np.zeros(call.lse_shape, call.lse_dtype)
    return numbers.T if call.cu_seqlens_q is not None else numbers


def _zeros_like(call: _arguments.Call, x: Array) -> Array:
    """Zeros of the arithmetic type, of the shape of an operand, whole in memory as its owner sees it."""
    if call.cu_seqlens_q is None:
        return np.zeros(x.shape, call.lse_dtype)
    n_head, n_row, width = x.shape
    return np.zeros((n_row, n_head, width), call.lse_dtype).swapaxes(0, 1)


def _prepare_mask(call: _arguments.Call, what: Gradients) -> None:
    """Set the array of the mask's gradient, and which batch entries each of its entries is for."""
    assert call.mask is not None
    shape = (1,) * (len(call.lse_shape) + 1 - call.mask.ndim) + call.mask.shape
    n_entry = math.prod(shape[:-3])
    what.mask = np.zeros((n_entry, *shape[-3:]), call.lse_dtype)
    entry = _entries(shape[:-3], call.batch_shape)
    what.mask_batches = np.argsort(entry, kind="stable").astype(np.int64)
    what.mask_bounds = np.searchsorted(entry[what.mask_batches], np.arange(n_entry + 1))


def _entries(own: tuple[int, ...], batch_shape: tuple[int, ...]) -> Array:
    """Which entry of an operand with batch axes `own` each entry of the whole batch reads."""
    return np.broadcast_to(np.arange(math.prod(own)).reshape(own), batch_shape).ravel()


def _waves(call: _arguments.Call, names: tuple[str, ...]) -> Array | None:
    """Number the waves: entries that share one of these gradients come one after the other."""
    if call.cu_seqlens_q is not None:
        return None
    shared = [
        _entries(x.shape[:-3], call.batch_shape)
        for x in (getattr(call, name) for name in ("query", "key", "value") if name in names)
        if math.prod(x.shape[:-3]) != call.n_batch
    ]
    if not shared:
        return None
    waves = np.zeros(call.n_batch, np.int64)
    following = [np.zeros(entry.max(initial=0) + 1, np.int64) for entry in shared]
    for b in range(call.n_batch):
        waves[b] = max(first[entry[b]] for first, entry in zip(following, shared, strict=True))
        for first, entry in zip(following, shared, strict=True):
            first[entry[b]] = waves[b] + 1
    return waves


# ---- and their last steps -----------------------------------------------------------------------


def _result(name: str, call: _arguments.Call, what: Gradients, argument: Any) -> Array:
    """Return one gradient in the shape and dtype of its argument."""
    shape = np.shape(argument)
    if name in ("query", "key", "value"):
        grad = getattr(what, name)
        grad = grad.swapaxes(0, 1) if call.cu_seqlens_q is not None else grad
        return _rounded(grad, call.dtype).reshape(shape)
    if name == "attn_mask":
        assert what.mask is not None
        return _rounded(what.mask, np.asarray(argument).dtype.newbyteorder("=")).reshape(shape)
    dtype = np.asarray(argument).dtype.newbyteorder("=")
    if dtype.kind != "f" and dtype.name != "bfloat16":
        dtype = np.dtype(np.float64)
    return _sum_of_rows(name, call, what, shape).astype(dtype)


def _rounded(grad: Array, dtype: np.dtype[Any]) -> Array:
    """Round once to the dtype of the argument; 16 bits natively, which NumPy does slowly."""
    if grad.dtype == dtype:
        return grad
    if grad.dtype != np.float32 or dtype.itemsize != 2:
        return grad.astype(dtype)
    narrow = np.empty(grad.shape, dtype)
    element = _arguments.FLOAT16 if dtype == np.float16 else _arguments.BFLOAT16
    _core.round_numbers(element, grad, _checks.bits(narrow))
    return narrow


def _sum_of_rows(
    name: str, call: _arguments.Call, what: Gradients, shape: tuple[int, ...]
) -> Array:
    """Sum what the rows of each head came to, in float64, to the shape of the argument."""
    if name == "sinks":
        rows = _rows_of_sinks(call, what)
    elif name == "alibi_slopes":
        assert what.slope_sum is not None
        rows = -what.slope_sum.astype(np.float64)
    else:
        assert what.gate_sum is not None
        rows = what.gate_sum.astype(np.float64)
    if call.cu_seqlens_q is not None:
        per_head = _sums_of_sequences(rows, call.cu_seqlens_q)
    else:
        per_head = rows.sum(axis=-1)
    return _sum_to(per_head, shape)


def _rows_of_sinks(call: _arguments.Call, what: Gradients) -> Array:
    """A sink is a key whose weight is exp(sink - lse) and whose value is 0.

    Where delta is 0 nothing flows: the query has no key, or its gate is 0.
    """
    assert what.delta is not None
    return np.where(what.delta == 0, 0.0, -_weights_of_sinks(call, what.lse) * what.delta)


def _weights_of_sinks(call: _arguments.Call, lse: Array) -> Array:
    """Of each row; the sinks are rounded to the arithmetic type, as the core does it."""
    assert call.sinks is not None
    sinks = call.sinks.astype(lse.dtype).astype(np.float64)[:, None]
    return np.where(sinks == -np.inf, 0.0, np.exp(np.minimum(sinks - lse, 0)))


def _sums_of_sequences(rows: Array, boundaries: Array) -> Array:
    """(n_head, n_row) to (n_sequence, n_head)."""
    total = np.zeros((len(boundaries) - 1, len(rows)))
    used = np.flatnonzero(np.diff(boundaries))
    if len(used):
        total[used] = np.add.reduceat(rows, boundaries[used], axis=1).T
    return total


def _sum_to(numbers: Array, shape: tuple[int, ...]) -> Array:
    """Sum over the axes that broadcasting `shape` made or lengthened."""
    numbers = numbers.sum(axis=tuple(range(numbers.ndim - len(shape))))
    longer = tuple(i for i, n in enumerate(shape) if n == 1 and numbers.shape[i] != 1)
    return numbers.sum(axis=longer, keepdims=True)
