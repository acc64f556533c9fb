"""The ONNX operator ``Attention`` on the kernels of mha_fast.

    import mha_fast.onnx
    from onnx.reference import ReferenceEvaluator

    ReferenceEvaluator(model, new_ops=[mha_fast.onnx.Attention]).run(None, inputs)

Needs the extra: ``pip install "mha_fast[onnx]"``.
"""

from importlib import import_module
from typing import Any

import numpy as np

from .. import attention, attention_weights, reference
from .._typing import Array, Window

try:
    # Not an import statement: whether a type checker finds onnx must make no difference.
    _OpRun: Any = import_module("onnx.reference.op_run").OpRun
except ModuleNotFoundError as error:
    raise ImportError(
        'mha_fast.onnx needs the onnx package; install it with: pip install "mha_fast[onnx]"'
    ) from error

__all__ = ["Attention"]

# Numbers of onnx.TensorProto.
_FLOAT, _FLOAT16, _DOUBLE, _BFLOAT16 = 1, 10, 11, 16
# Values of qk_matmul_output_mode.
_RAW, _CAPPED, _BIASED, _WEIGHTS = range(4)
_DTYPES = ("float32", "float64", "float16", "bfloat16")


class Attention(_OpRun):  # type: ignore[misc]
    """The operator ``Attention`` of opsets 23, 24 and 25 for `onnx.reference`.

    A model runs on it with ``ReferenceEvaluator(model, new_ops=[Attention])``. Inputs, outputs and
    attributes are those of the specification:

    ======================  =======================================================================
    Q, K, V                 4-D (batch, heads, rows, width), or 3-D (batch, rows, heads * width)
                            with `q_num_heads` and `kv_num_heads`; float32, float64, float16 or
                            bfloat16
    attn_mask               bool (True lets the key through), or numbers that are added to the
                            scores; broadcastable to (batch, heads, queries, keys)
    past_key, past_value    4-D; K and V are appended to them
    nonpad_kv_seqlen        (batch,), number of valid keys when K and V are a whole cache
    Y                       like Q, in its dtype
    present_key, -value     4-D
    qk_matmul_output        (batch, heads, queries, keys), chosen by `qk_matmul_output_mode`:
                            0 scaled products, 1 after the softcap, 2 after mask, causal limit,
                            window and lengths, 3 weights
    ======================  =======================================================================

    Raises
    ------
    ValueError
        A shape, a combination of inputs or the value of an attribute that does not fit.
    TypeError
        A dtype that is not accepted. The evaluator wraps it; the message is in its cause.

    Notes
    -----
    Y always comes from `mha_fast.attention`, without an array of queries times keys. Only a model
    that names the output `qk_matmul_output` gets that array, from `mha_fast.attention_weights`
    (mode 3) or plain NumPy (modes 0 to 2).

    *Positions.* Query 0 stands behind the past keys; at ``nonpad_kv_seqlen - queries`` of its
    sequence when lengths are given; else at key 0. Causal limit and windows count from there.

    *Short masks.* From opset 24 on, keys behind the end of the last axis of `attn_mask` are
    excluded, also if that axis has length 1. In opset 23 such an axis broadcasts and any other
    that is too short is an error, as in that opset's text and function body; the evaluator's own
    operator pads there too.

    *softmax_precision.* The softmax runs in float32, in float64 for float64, and is never rounded
    to the dtype of the inputs. FLOAT, FLOAT16 and BFLOAT16 therefore ask for no more than is done
    anyway and change nothing; DOUBLE runs the whole operator in float64 and rounds Y once.

    *Mixed dtypes.* V may differ from Q and K; the operator then runs in a dtype that holds both.

    *Never NaN from what is masked.* A query without a key gives 0 in Y and in mode 3. An excluded
    key has no influence even if it holds NaN or Inf, and is -inf in mode 2.

    *Functions.* The evaluator does not hand `new_ops` to the functions of a model: inline them
    first, ``onnx.inliner.inline_local_functions(model)``.

    An integer mask is added like a float one. `softcap` 0 means none, below 0 is an error. With
    4-D inputs opset 25 forbids the two numbers of heads; before it they must agree with the shapes.

    References
    ----------
    ONNX operator specification, ``Attention``, versions 23 to 25 (onnx 1.23, errata included).
    """

    op_domain = ""

    def run(self, *args: Any, **kwargs: Any) -> tuple[Array | None, ...]:
        """Run the node; outputs without a name come back as None.

        The evaluator stores outputs by name and fetches absent inputs under the name "". An array
        left there would become the mask, or the past, of the next node.
        """
        outputs = super().run(*args, **kwargs)
        return tuple(x if name else None for name, x in zip(self.output, outputs, strict=False))

    def _run(
        self,
        query: Array,
        key: Array,
        value: Array,
        attn_mask: Array | None = None,
        past_key: Array | None = None,
        past_value: Array | None = None,
        nonpad_kv_seqlen: Array | None = None,
        *,
        scale: float | None = None,
        is_causal: int = 0,
        q_num_heads: int | None = None,
        kv_num_heads: int | None = None,
        softmax_precision: int | None = None,
        softcap: float | None = None,
        qk_matmul_output_mode: int = 0,
        left_window_size: int = -1,
        right_window_size: int = -1,
    ) -> tuple[Array, ...]:
        if qk_matmul_output_mode not in (_RAW, _CAPPED, _BIASED, _WEIGHTS):
            raise ValueError(
                f"qk_matmul_output_mode is {qk_matmul_output_mode}; expected 0, 1, 2 or 3"
            )
        opset = self.run_params["opsets"][self.op_domain]
        _check_dtypes(query, key, value)
        rows_by_head, dtype = query.ndim == 3, query.dtype
        query, key, value = _with_head_axes(query, key, value, q_num_heads, kv_num_heads, opset)
        n_past, present_key, present_value = _appended(
            key, value, past_key, past_value, nonpad_kv_seqlen
        )
        n_query, n_key = query.shape[2], present_key.shape[2]
        lengths = _lengths(nonpad_kv_seqlen, len(query), n_key)
        # Keys behind the end of the mask are excluded for every query, so their rows are left
        # away and nothing needs to be padded.
        mask, n_seen = _mask(attn_mask, n_key, opset)
        options: dict[str, Any] = {
            "is_causal": bool(is_causal),
            "window": _window(left_window_size, right_window_size),
            "query_offset": n_past if lengths is None else lengths - n_query,
            "kv_lengths": None if lengths is None else np.minimum(lengths, n_seen),
            "scale": None if scale is None else float(scale),
            "softcap": float(softcap) if softcap else None,
        }
        computed_in = _dtype_of_computation(query, value, softmax_precision)
        q, k, v = (x.astype(computed_in, copy=False) for x in (query, present_key, present_value))
        attend = _attention_by_rows if rows_by_head else attention
        y = attend(q, k[:, :, :n_seen], v[:, :, :n_seen], mask, **options)
        outputs = [_rounded(y, dtype), present_key, present_value]
        if len(self.output) > 3 and self.output[3]:
            scores = _qk_matmul_output(qk_matmul_output_mode, q, k, n_seen, mask, options)
            outputs.append(_rounded(scores, dtype))
        return tuple(outputs)


def _check_dtypes(query: Array, key: Array, value: Array) -> None:
    for name, x in (("Q", query), ("K", key), ("V", value)):
        if x.dtype.name not in _DTYPES:
            raise TypeError(f"{name} has dtype {x.dtype}; expected one of {', '.join(_DTYPES)}")
    if key.dtype != query.dtype:
        raise TypeError(f"K has dtype {key.dtype}; expected {query.dtype} like Q")


def _with_head_axes(
    query: Array,
    key: Array,
    value: Array,
    n_head: int | None,
    n_kv_head: int | None,
    opset: int,
) -> tuple[Array, Array, Array]:
    """Return views (batch, heads, rows, width)."""
    shapes = f"Q {query.shape}, K {key.shape} and V {value.shape}"
    if not query.ndim == key.ndim == value.ndim or query.ndim not in (3, 4):
        raise ValueError(f"inputs have shapes {shapes}; expected all three 3-D or all three 4-D")
    if not len(query) == len(key) == len(value):
        raise ValueError(f"inputs have shapes {shapes}; expected one batch size")
    if query.ndim == 4:
        _check_unsplit_heads("q_num_heads", n_head, query, opset)
        _check_unsplit_heads("kv_num_heads", n_kv_head, key, opset)
        return query, key, value
    return (
        _split_heads("Q", query, "q_num_heads", n_head),
        _split_heads("K", key, "kv_num_heads", n_kv_head),
        _split_heads("V", value, "kv_num_heads", n_kv_head),
    )


def _check_unsplit_heads(attribute: str, number: int | None, x: Array, opset: int) -> None:
    if number is None:
        return
    if opset >= 25:
        raise ValueError(f"{attribute} is {number}; expected no such attribute with 4-D inputs")
    if number != x.shape[1]:
        raise ValueError(f"{attribute} is {number}; expected {x.shape[1]} as in shape {x.shape}")


def _split_heads(name: str, x: Array, attribute: str, number: int | None) -> Array:
    """(batch, rows, heads * width) as a view (batch, heads, rows, width)."""
    if number is None or number < 1:
        raise ValueError(f"{attribute} is {number}; expected the number of heads with 3-D inputs")
    n_batch, n_row, width = x.shape
    if width % number:
        raise ValueError(f"{name} has shape {x.shape}; expected a width that {number} heads divide")
    return x.reshape(n_batch, n_row, number, width // number).swapaxes(1, 2)


def _appended(
    key: Array,
    value: Array,
    past_key: Array | None,
    past_value: Array | None,
    nonpad_kv_seqlen: Array | None,
) -> tuple[int, Array, Array]:
    """Return the number of past keys, and all keys and values with the new ones last."""
    if past_key is None and past_value is None:
        return 0, key, value
    if past_key is None or past_value is None:
        raise ValueError("only one of past_key and past_value is given; expected both or none")
    if nonpad_kv_seqlen is not None:
        raise ValueError("nonpad_kv_seqlen and past_key are given; expected at most one of them")
    for name, past, new in (("past_key", past_key, key), ("past_value", past_value, value)):
        if past.dtype != new.dtype:
            raise TypeError(f"{name} has dtype {past.dtype}; expected {new.dtype}")
        n_batch, n_head, _, width = new.shape
        if past.ndim != 4 or (*past.shape[:2], past.shape[3]) != (n_batch, n_head, width):
            raise ValueError(
                f"{name} has shape {past.shape}; expected ({n_batch}, {n_head}, rows, {width})"
            )
    return (
        past_key.shape[2],
        np.concatenate((past_key, key), axis=2),
        np.concatenate((past_value, value), axis=2),
    )


def _lengths(nonpad_kv_seqlen: Array | None, n_batch: int, n_key: int) -> Array | None:
    """Return the number of valid keys of each sequence as int64."""
    if nonpad_kv_seqlen is None:
        return None
    lengths = nonpad_kv_seqlen
    if lengths.dtype.kind not in "iu":
        raise TypeError(f"nonpad_kv_seqlen has dtype {lengths.dtype}; expected int64")
    if lengths.shape != (n_batch,):
        raise ValueError(f"nonpad_kv_seqlen has shape {lengths.shape}; expected ({n_batch},)")
    if lengths.size and not 0 <= lengths.min() <= lengths.max() <= n_key:
        raise ValueError(
            f"nonpad_kv_seqlen holds {lengths.min()} to {lengths.max()}; expected 0 to {n_key}"
        )
    return lengths.astype(np.int64)


def _window(left: int, right: int) -> Window:
    """Return the bounds with None in place of -1."""
    for name, bound in (("left_window_size", left), ("right_window_size", right)):
        if bound < -1:
            raise ValueError(f"{name} is {bound}; expected -1 or more")
    return None if left == -1 else left, None if right == -1 else right


def _mask(attn_mask: Array | None, n_key: int, opset: int) -> tuple[Array | None, int]:
    """Return the mask as `attention` takes it, and how many keys it lets be seen."""
    if attn_mask is None:
        return None, n_key
    mask = attn_mask.astype(np.float64) if attn_mask.dtype.kind in "iu" else attn_mask
    short = opset >= 24 and mask.ndim and mask.shape[-1] < n_key
    return mask, mask.shape[-1] if short else n_key


def _dtype_of_computation(
    query: Array, value: Array, softmax_precision: int | None
) -> np.dtype[Any]:
    if softmax_precision not in (None, _FLOAT, _FLOAT16, _DOUBLE, _BFLOAT16):
        raise ValueError(
            f"softmax_precision is {softmax_precision}; expected {_FLOAT} (FLOAT), {_FLOAT16} "
            f"(FLOAT16), {_DOUBLE} (DOUBLE) or {_BFLOAT16} (BFLOAT16)"
        )
    if softmax_precision == _DOUBLE or np.float64 in (query.dtype, value.dtype):
        return np.dtype(np.float64)
    return query.dtype if value.dtype == query.dtype else np.dtype(np.float32)


def _attention_by_rows(
    query: Array, key: Array, value: Array, mask: Array | None, **options: Any
) -> Array:
    """Attention whose result is (batch, rows, heads * width), written in that order."""
    n_batch, n_head, n_query, _ = query.shape
    value_width = value.shape[3]
    out = np.empty((n_batch, n_query, n_head, value_width), query.dtype)
    attention(query, key, value, mask, out=out.swapaxes(1, 2), **options)
    return out.reshape(n_batch, n_query, n_head * value_width)


def _qk_matmul_output(
    mode: int,
    query: Array,
    key: Array,
    n_seen: int,
    mask: Array | None,
    options: dict[str, Any],
) -> Array:
    """Return the array (batch, heads, queries, keys) of the fourth output."""
    if mode == _RAW:
        return _scores(query, key, scale=options["scale"])
    if mode == _CAPPED:
        return _scores(query, key, scale=options["scale"], softcap=options["softcap"])
    seen = key[:, :, :n_seen]
    if mode == _BIASED:
        scores, excluded = _scores(query, seen, mask, **options), -np.inf
    else:
        scores, excluded = attention_weights(query, seen, mask, **options), 0.0
    behind = key.shape[2] - n_seen
    return np.pad(scores, ((0, 0), (0, 0), (0, 0), (0, behind)), constant_values=excluded)


def _scores(query: Array, key: Array, mask: Array | None = None, **options: Any) -> Array:
    """Scores before the softmax, in float32, or float64 for float64."""
    dtype = np.float64 if query.dtype == np.float64 else np.float32
    query, key = query.astype(dtype, copy=False), key.astype(dtype, copy=False)
    key = np.repeat(key, query.shape[1] // key.shape[1], axis=1)
    with np.errstate(all="ignore"):  # NaN, Inf and overflow are ordinary results here
        scores, _ = reference.masked_scores(query, key, mask, **options)
    return scores


def _rounded(x: Array, dtype: np.dtype[Any]) -> Array:
    with np.errstate(over="ignore"):  # what is too large for a 16-bit dtype becomes Inf
        return x.astype(dtype, copy=False)
