"""What runs inside the tasks: a kernel call on one pair of chunks, a join, the last touch."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np

from ..._attention import attention
from ..._gradients import attention_backward
from ..._merge import merge_attention
from ..._options import LARGEST_OFFSET
from ..._typing import Array
from ._grid import Place
from ._threads import threads_per_task

Part: TypeAlias = tuple[Array, Array]  # out and lse of some queries over some keys


@dataclass(frozen=True)
class Options:
    """The options that all tasks of a call share."""

    dtype: np.dtype[Any]
    n_query: int  # of the whole call
    n_key: int
    window: tuple[int | None, int | None]  # the causal limit included
    scale: float
    softcap: float | None
    precision: Literal["highest", "high"]
    num_threads: int | None
    offset_at_end: bool
    return_lse: bool

    @property
    def sum_dtype(self) -> np.dtype[Any]:
        """What parts are kept and joined in, so that 16-bit results are rounded only once."""
        return np.dtype(np.float64 if self.dtype == np.float64 else np.float32)


@contextmanager
def naming(what: str, place: Place) -> Iterator[None]:
    """Tell in any exception which chunk it came from; its type stays."""
    try:
        yield
    except Exception as error:
        error.add_note(f"in {what} of the chunk with {place}")
        raise


def attend(
    options: Options,
    place: Place,
    dtype: np.dtype[Any],
    query: Array,
    key: Array,
    value: Array,
    attn_mask: Array | None,
    offset: Any,
    lengths: Any,
    **numbers: Any,
) -> Part:
    """Return (out, lse) of a chunk of queries over a chunk of keys, computed in `dtype`."""
    with naming("attention", place):
        position, valid = _positions(options, place, offset, lengths)
        return attention(
            query.astype(dtype, copy=False),
            key.astype(dtype, copy=False),
            value.astype(dtype, copy=False),
            attn_mask,
            window=options.window,
            query_offset=position,
            kv_lengths=valid,
            scale=options.scale,
            softcap=options.softcap,
            return_lse=True,
            precision=options.precision,
            num_threads=options.num_threads or threads_per_task(),
            **numbers,
        )


def join(place: Place, *parts: Part) -> Part:
    """Return the result over the keys of all parts."""
    with naming("merge_attention", place):
        outs, lses = zip(*parts, strict=True)
        return merge_attention(outs, lses)


def whole(options: Options, place: Place, *arguments: Any, **numbers: Any) -> Array | Part:
    """Return what queries that see one chunk of keys get: no joining, the gate in the kernel."""
    part = attend(options, place, options.dtype, *arguments, **numbers)
    return part if options.return_lse else part[0]


def joined(
    options: Options, place: Place, sinks: Any, head_mask: Any, *parts: Part
) -> Array | Part:
    """Join the last parts, count sinks, multiply by gates, round to the dtype of the call."""
    out, lse = join(place, *parts)
    with naming("attention", place), np.errstate(all="ignore"):  # NaN and Inf are ordinary here
        no_key = (lse == -np.inf)[..., None]
        if sinks is not None:
            # A sink belongs to none of the parts: it takes its weight from all keys at once.
            before, sink = lse, np.asarray(sinks, lse.dtype)[:, None]
            lse = np.logaddexp(before, sink)
            out *= np.exp(before - lse)[..., None]
        if head_mask is not None:
            gates = np.asarray(head_mask, out.dtype)[..., None, None]
            out *= gates
            np.copyto(out, 0, where=gates == 0)  # whatever the head holds
        np.copyto(out, 0, where=no_key)
        out = out.astype(options.dtype, copy=False)
        return (out, lse) if options.return_lse else out


def unseeing(options: Options, shape: tuple[int, ...], sinks: Any) -> Array | Part:
    """Return the result of queries that see no key: zeros, and the sink or -inf."""
    out = np.zeros(shape, options.dtype)
    if not options.return_lse:
        return out
    lse = np.full(shape[:-1], -np.inf, options.sum_dtype)
    if sinks is not None:
        lse[...] = np.asarray(sinks)[:, None]
    return out, lse


def differentiate(
    options: Options,
    place: Place,
    names: tuple[str, ...],
    grad_out: Array,
    query: Array,
    key: Array,
    value: Array,
    out: Array,
    lse: Array,
    attn_mask: Array | None,
    query_offset: Any,
    kv_lengths: Any,
    grad_lse: Array | None = None,
    alibi_slopes: Any = None,
    sinks: Any = None,
    head_mask: Any = None,
) -> tuple[Array, ...]:
    """Return the gradients of a pair of chunks, before any rounding to 16 bits.

    Those of sinks need the rows of the whole result and no key.
    """
    with naming("attention_backward", place):
        dtype = options.sum_dtype
        if names == ("sinks",):
            place = place._replace(keys=(place.keys[0], place.keys[0]))
            key, value, attn_mask = key[..., :0, :], value[..., :0, :], None
        position, valid = _positions(options, place, query_offset, kv_lengths)
        if attn_mask is not None and attn_mask.dtype.itemsize == 2:
            attn_mask = attn_mask.astype(dtype)
        return attention_backward(
            grad_out.astype(dtype, copy=False),
            query.astype(dtype, copy=False),
            key.astype(dtype, copy=False),
            value.astype(dtype, copy=False),
            out.astype(dtype, copy=False),
            lse,
            attn_mask,
            grad_lse=grad_lse,
            wanted=names,
            window=options.window,
            query_offset=position,
            kv_lengths=valid,
            scale=options.scale,
            softcap=options.softcap,
            precision=options.precision,
            num_threads=options.num_threads or threads_per_task(),
            alibi_slopes=_wide(alibi_slopes),
            sinks=_wide(sinks),
            head_mask=_wide(head_mask),
        )


def _wide(numbers: Any) -> Array | None:
    """Return numbers per head in float64, so that no part of their gradients is rounded."""
    return None if numbers is None else np.asarray(numbers, np.float64)


def add(*parts: Array) -> Array:
    """Return the sum of gradients, in the order of the parts."""
    total = parts[0] + parts[1]
    for part in parts[2:]:
        total += part
    return total


def rounded(dtype: np.dtype[Any], *parts: Array) -> Array:
    """Add up the last parts and give the sum the dtype of its argument."""
    total = add(*parts) if len(parts) > 1 else parts[0]
    with np.errstate(over="ignore"):  # beyond the largest float16: Inf, as from the kernel
        return total.astype(dtype, copy=False)


def pick(arrays: tuple[Array, ...], which: int) -> Array:
    """Return one of several results."""
    return arrays[which]


def _positions(
    options: Options, place: Place, offset: Any, lengths: Any
) -> tuple[Array, Array | None]:
    """Return the position of the chunk's first query among its keys, and how many are valid."""
    first_key, stop_key = place.keys
    valid = None
    if lengths is not None:
        lengths = np.asarray(lengths, np.int64)
        if lengths.size and not (0 <= lengths.min() and lengths.max() <= options.n_key):
            raise ValueError(
                f"kv_lengths holds {lengths.min()} to {lengths.max()}; expected 0 to "
                f"{options.n_key}"
            )
        valid = np.clip(lengths - first_key, 0, stop_key - first_key)
    if options.offset_at_end:
        offset = lengths - options.n_query
    position = np.asarray(offset, np.int64) + (place.queries[0] - first_key)
    return np.clip(position, -LARGEST_OFFSET, LARGEST_OFFSET), valid
