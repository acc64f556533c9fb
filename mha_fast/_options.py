"""The options of a call, once: their names, defaults, types and checks, and who takes which.

A function names its options by a `TypedDict` that it unpacks, so that type checkers know each of
them, and has them spelt out by `Options.shown`, so that `help` does. What is not given is not even
passed on: a plain call asks about none of them.

A new option is a line in `OPTIONS`, a line in the dictionaries of the functions that take it, and
one function here that checks it and writes it into the record of the call. A test compares the
table with every public signature and every docstring.
"""

import inspect
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias, TypedDict, TypeVar

import numpy as np

from . import _checks
from ._typing import Array, ArrayLike, Window

if TYPE_CHECKING:
    from ._arguments import Call

Function = TypeVar("Function", bound=Callable[..., Any])
Reader: TypeAlias = Callable[["Call", Any], None]

# As mha_storage in src/contract/problem.h.
MASK_TYPES = {"bool": 1, "float16": 2, "bfloat16": 3, "float32": 4, "float64": 5}
LARGEST_OFFSET = 1 << 60


# ---- which function takes which, and of what type -----------------------------------------------


class _OfScores(TypedDict, total=False):
    window: Window | None
    scale: float | None
    softcap: float | None
    alibi_slopes: ArrayLike | None
    sinks: ArrayLike | None
    num_threads: int | None


class _OfPlaces(TypedDict, total=False):
    is_causal: bool
    query_offset: ArrayLike | Literal["end"]


class _OfResult(TypedDict, total=False):
    head_mask: ArrayLike | None
    precision: Literal["highest", "high"]
    out: Array | None


class _OfDropout(TypedDict, total=False):
    dropout_p: float
    dropout_seed: int | None


class VarlenOptions(_OfScores, _OfPlaces, _OfResult, _OfDropout):
    """Of `attention_varlen`, whose boundaries are the lengths."""


class AttentionOptions(VarlenOptions, total=False):
    """Of `attention` and of the layer."""

    kv_lengths: ArrayLike | None


class VarlenBackwardOptions(_OfScores, _OfPlaces, _OfDropout, total=False):
    """Of `attention_varlen_backward`: a backward pass allocates its results."""

    head_mask: ArrayLike | None
    precision: Literal["highest", "high"]


class BackwardOptions(VarlenBackwardOptions, total=False):
    """Of `attention_backward`."""

    kv_lengths: ArrayLike | None


class StatisticsOptions(_OfScores, _OfPlaces, total=False):
    """Of `head_statistics`: there is no result for a gate to act on."""

    kv_lengths: ArrayLike | None


class WeightsOptions(StatisticsOptions, total=False):
    """Of `attention_weights`, which always computes in full precision, in memory of its own."""

    head_mask: ArrayLike | None


class CachedOptions(_OfScores, _OfResult):
    """Of `KVCache.attend`: a cache knows its lengths, and its queries are its last tokens."""


class LayerOptions(CachedOptions, total=False):
    """Of `MultiHeadAttention`, whose `is_causal` depends on there being a cache."""

    query_offset: ArrayLike | Literal["end"]
    kv_lengths: ArrayLike | None


# ---- what is returned, and how ------------------------------------------------------------------


def _return_lse(call: "Call", value: Any) -> None:
    call.return_lse = _checks.flag("return_lse", value)


def _precision(call: "Call", value: Any) -> None:
    call.high = _checks.high_is_enough(value)


def _out(call: "Call", value: Any) -> None:
    if value is not None:
        shape = call.out_shape[1:] if call.one_head else call.out_shape
        call.out = _checks.result("out", value, shape, call.dtype, "query")


def _num_threads(call: "Call", value: Any) -> None:
    if value is not None:
        call.n_thread = _checks.positive_int("num_threads", value)


# ---- the scores ---------------------------------------------------------------------------------


def _scale(call: "Call", value: Any) -> None:
    if value is not None:
        call.scale = _checks.finite("scale", value)
        _checks.within_range("scale", call.scale, call.lse_dtype)


def _softcap(call: "Call", value: Any) -> None:
    if value is not None:
        call.softcap = _checks.finite_above_0("softcap", value)
        _checks.within_range("softcap", call.softcap, call.lse_dtype, above_0=True)


def _alibi_slopes(call: "Call", value: Any) -> None:
    if value is not None:
        call.alibi_slopes = _checks.per_head("alibi_slopes", value, call.per_head, call.has_rows)
        _checks.within_range(
            "alibi_slopes", call.alibi_slopes, call.lse_dtype, times=4 * LARGEST_OFFSET
        )


def _sinks(call: "Call", value: Any) -> None:
    if value is not None:
        call.sinks = _checks.per_head_only("sinks", value, call.per_head[-1])


def _head_mask(call: "Call", value: Any) -> None:
    if value is not None:
        call.head_mask = _checks.per_head("head_mask", value, call.per_head, call.has_rows)
        _checks.within_range("head_mask", call.head_mask, call.lse_dtype)


# ---- dropout ------------------------------------------------------------------------------------


def _dropout_p(call: "Call", value: Any) -> None:
    call.dropout_p = _checks.share("dropout_p", value)


def _dropout_seed(call: "Call", value: Any) -> None:
    if value is not None:
        call.dropout_seed = _checks.seed("dropout_seed", value)


# ---- who sees whom ------------------------------------------------------------------------------


def _attn_mask(call: "Call", value: Any) -> None:
    if value is None:
        return
    mask = _checks.array("attn_mask", value)
    if mask.dtype.name not in MASK_TYPES:
        advice = "; use .astype(bool) where 1 lets a key through" if mask.dtype.kind in "iu" else ""
        raise TypeError(
            f"attn_mask has dtype {mask.dtype}; expected bool, {_checks.FLOATS}{advice}"
        )
    shape = (*call.per_head, call.query.shape[-2], call.key.shape[-2])
    fits = mask.ndim <= len(shape) and all(
        n in (1, whole) for n, whole in zip(mask.shape[::-1], shape[::-1], strict=False)
    )
    if not fits:
        raise ValueError(
            f"attn_mask has shape {mask.shape}; expected one that broadcasts to {shape} "
            "(batch axes, heads, queries, keys)"
        )
    call.mask, call.mask_type = _checks.bits(mask), MASK_TYPES[mask.dtype.name]


def _kv_lengths(call: "Call", value: Any) -> None:
    if value is not None:
        n_key = call.key.shape[-2]
        shape = call.batch_shape
        call.kv_lengths = _checks.integers("kv_lengths", value, shape, 0, n_key, call.has_rows)


def _window(call: "Call", value: Any) -> None:
    if value is not None:
        left, right = _checks.window_bounds(value)
        call.window = (left, 0 if call.is_causal else right)


def _is_causal(call: "Call", value: Any) -> None:
    if _checks.flag("is_causal", value):
        call.is_causal, call.window = True, (call.window[0], 0)


def _query_offset(call: "Call", value: Any) -> None:
    if value is None or isinstance(value, str):
        if value != "end":
            error = TypeError if value is None else ValueError
            raise error(f"query_offset is {value!r}; expected an int, an int array or 'end'")
        call.ends_together = True  # settled when the lengths are known
    elif type(value) is not int or value != 0:
        shape, limit = call.per_head[:-1], LARGEST_OFFSET
        call.query_offset = _checks.integers(
            "query_offset", value, shape, -limit, limit, call.has_rows
        )


def _first_of_the_last(call: "Call") -> Array:
    """Position of query 0, per batch entry, where the last query is at the last valid key."""
    if not call.has_rows:
        return np.empty(0, np.int64)
    n_query = call.query.shape[-2] if call.q_lengths is None else call.q_lengths
    if call.kv_lengths is None:
        return _checks.filled(call.batch_shape, call.key.shape[-2] - n_query)
    return call.kv_lengths - n_query


# ---- the table ----------------------------------------------------------------------------------


class Option(NamedTuple):
    """What there is to know about one option, whoever takes it."""

    name: str
    default: Any
    read: Reader  # checks a value and writes it into the record


# In the order in which signatures show them.
OPTIONS = (
    Option("attn_mask", None, _attn_mask),
    Option("is_causal", False, _is_causal),
    Option("window", None, _window),
    Option("query_offset", 0, _query_offset),
    Option("kv_lengths", None, _kv_lengths),
    Option("scale", None, _scale),
    Option("softcap", None, _softcap),
    Option("alibi_slopes", None, _alibi_slopes),
    Option("sinks", None, _sinks),
    Option("head_mask", None, _head_mask),
    Option("dropout_p", 0.0, _dropout_p),
    Option("dropout_seed", None, _dropout_seed),
    Option("return_lse", False, _return_lse),
    Option("precision", "highest", _precision),
    Option("out", None, _out),
    Option("num_threads", None, _num_threads),
)
_RANKS = {option.name: rank for rank, option in enumerate(OPTIONS)}
read_attn_mask, read_return_lse = _attn_mask, _return_lse  # every signature has these in its text


class Options:
    """The options that one function takes: those of a `TypedDict`."""

    def __init__(self, names: type, *, has_value: bool = True) -> None:
        self._function = ""  # its qualified name, for errors
        self.has_value = has_value  # whether the function takes values at all
        own: frozenset[str] = names.__optional_keys__  # type: ignore[attr-defined]
        self.options = tuple(option for option in OPTIONS if option.name in own)
        self._readers = {option.name: option.read for option in self.options}

    def read(self, call: "Call", given: Mapping[str, Any]) -> None:
        """Check what is given, and write it into the record."""
        for name, value in given.items():
            read = self._readers.get(name)
            if read is None:
                raise self._unknown(name)
            read(call, value)
        if call.ends_together:
            call.query_offset = _first_of_the_last(call)
        if call.dropout_p > 0 and call.dropout_seed is None:
            raise ValueError(
                f"dropout_seed is None; expected an int of 64 bits with dropout_p {call.dropout_p}"
            )

    def check_names(self, given: Mapping[str, Any]) -> None:
        """Refuse a name that is no option of the function."""
        for name in given:
            if name not in self._readers:
                raise self._unknown(name)

    def _unknown(self, name: str) -> TypeError:
        from ._hints import unknown_option

        return unknown_option(self._function, name, self._taken)

    def shown(self, function: Function) -> Function:
        """Give the function a signature for `help` in which its options are spelt out.

        Its name goes into the errors of this object, which is therefore of one function only.
        """
        assert not self._function, self._function
        mine = list(inspect.signature(function).parameters.values())[:-1]  # but for **options
        keyword = inspect.Parameter.KEYWORD_ONLY
        mine += [inspect.Parameter(name, keyword, default=value) for name, value, _ in self.options]
        mine.sort(key=lambda x: (x.kind, _RANKS.get(x.name, -1) if x.kind == keyword else 0))
        plain = [x.replace(annotation=inspect.Parameter.empty) for x in mine]
        self._function = function.__qualname__
        self._taken = [x.name for x in mine if x.name != "self"]
        function.__signature__ = inspect.Signature(plain)  # type: ignore[attr-defined]
        return function


ATTENTION = Options(AttentionOptions)
VARLEN = Options(VarlenOptions)
BACKWARD = Options(BackwardOptions)
VARLEN_BACKWARD = Options(VarlenBackwardOptions)
WEIGHTS = Options(WeightsOptions, has_value=False)
STATISTICS = Options(StatisticsOptions, has_value=False)
CACHED = Options(CachedOptions)
LAYER = Options(LayerOptions)
LAYER_TRAINING = Options(BackwardOptions)
LAYER_WEIGHTS = Options(WeightsOptions, has_value=False)
LAYER_STATISTICS = Options(StatisticsOptions, has_value=False)
