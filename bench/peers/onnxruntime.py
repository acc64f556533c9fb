"""ONNX Runtime on the CPU: its own ``MultiHeadAttention`` or ONNX's ``Attention``.

Neither is always the faster one, the first reads keys and values in two layouts, and a mask that
says "causal" costs it less than its option does; a short trial chooses for each case. A model is
one node, inputs and output are bound once and never copied.
"""

from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import numpy as np
import onnxruntime
from onnx import TensorProto, helper

from . import (
    Prepared,
    Unsupported,
    as_rows_of_one_head,
    can_share_rows,
    fastest,
    from_rows_of_one_head,
)

_OPSETS = [helper.make_opsetid("", 23), helper.make_opsetid("com.microsoft", 1)]
_IR_VERSION = 11  # that of opset 23; the newest one of onnx may be too new for the runtime
_DTYPES = {
    "float32": TensorProto.FLOAT,
    "float16": TensorProto.FLOAT16,
    "int32": TensorProto.INT32,
    "bool": TensorProto.BOOL,
}


def version() -> str:
    """Return the version of ONNX Runtime."""
    return onnxruntime.__version__


def session(num_threads: int):
    """Do nothing: every model brings its own threads."""
    return nullcontext()


def prepare(case, inputs, num_threads: int) -> Prepared:
    """Return the fastest call that computes `case` once."""
    if case.dtype not in ("float32", "float16"):
        raise Unsupported(f"ONNX Runtime has no {case.dtype} attention on the CPU")
    ways = [_attention(case, inputs, num_threads)]
    for form, same_case, same_inputs in _forms(case, inputs):
        # MultiHeadAttention counts causal positions back from the last key.
        from_first_key = not same_case.is_causal or case.n_query == case.n_key
        if same_case.n_head == same_case.n_kv_head and from_first_key:
            for packed in (False, True):
                way = _multi_head_attention(same_case, same_inputs, num_threads, packed)
                to_numpy = partial(_from_form, case, way.to_numpy)
                ways.append(replace(way, to_numpy=to_numpy, way=way.way + form))
    return fastest(ways)


def _forms(case, inputs):
    """Yield forms of the same problem: what is special about it, case and inputs."""
    yield "", case, inputs
    if can_share_rows(case):
        yield ", group as rows", *as_rows_of_one_head(case, inputs)
    if case.is_causal and case.mask is None:
        # The lowest number and not -inf: what -inf gives in a block without any key is unsure.
        bias = np.zeros((1, 1, case.n_query, case.n_key), inputs.query.dtype)
        bias[..., ~np.tri(case.n_query, case.n_key, dtype=np.bool_)] = np.finfo(bias.dtype).min
        same_case = replace(case, is_causal=False, mask="float")
        yield ", causal as a mask", same_case, inputs._replace(attn_mask=bias)


def _from_form(case, to_numpy, result):
    return from_rows_of_one_head(case, to_numpy(result))


def _attention(case, inputs, num_threads):
    arrays = dict(zip(("query", "key", "value"), inputs[:3], strict=True))
    if inputs.attn_mask is not None:  # it wants the rows of the queries written out
        shape = (case.n_batch, 1, case.n_query, case.n_key)
        arrays["attn_mask"] = np.ascontiguousarray(np.broadcast_to(inputs.attn_mask, shape))
    node = helper.make_node("Attention", list(arrays), ["out"], is_causal=int(case.is_causal))
    call = _bound_call(node, arrays, inputs.query.shape, num_threads)
    return Prepared(call, _filled, "Attention")


def _multi_head_attention(case, inputs, num_threads, packed):
    pack = _packed if packed else np.asarray
    arrays = {
        "query": _packed(inputs.query),
        "key": pack(inputs.key),
        "value": pack(inputs.value),
    }
    inputs_of_node = [*arrays, "", "", ""]  # bias, key_padding_mask, attention_bias
    if case.mask == "key_padding":
        inputs_of_node[4] = "kept"
        arrays["kept"] = inputs.attn_mask[:, 0, 0].astype(np.int32)
    elif case.mask == "float":
        inputs_of_node[5] = "bias"
        arrays["bias"] = inputs.attn_mask
    node = helper.make_node(
        "MultiHeadAttention",
        inputs_of_node,
        ["out"],
        domain="com.microsoft",
        num_heads=case.n_head,
        unidirectional=int(case.is_causal),
    )
    call = _bound_call(node, arrays, arrays["query"].shape, num_threads)
    way = f"MultiHeadAttention, keys {'packed' if packed else 'by head'}"
    return Prepared(call, partial(_unpacked, case), way)


def _packed(array):
    """(batch, heads, rows, width) as (batch, rows, heads * width)."""
    n_batch, n_head, n_row, width = array.shape
    return np.ascontiguousarray(array.swapaxes(1, 2)).reshape(n_batch, n_row, n_head * width)


def _unpacked(case, result):
    rows = _filled(result).reshape(case.n_batch, case.n_query, case.n_head, case.head_width)
    return rows.swapaxes(1, 2)


def _filled(binding):
    return binding.get_outputs()[0].numpy()


def _bound_call(node, arrays, out_shape, num_threads):
    """Return a call that runs the model of one node and returns its binding."""
    dtype = arrays["query"].dtype
    out = np.empty(out_shape, dtype)
    model = helper.make_model(
        helper.make_graph(
            [node],
            node.op_type,
            [_declared(name, array) for name, array in arrays.items()],
            [_declared("out", out)],
        ),
        opset_imports=_OPSETS,
        ir_version=_IR_VERSION,
    )
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = num_threads
    options.inter_op_num_threads = 1
    runtime = onnxruntime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    binding = runtime.io_binding()
    # Values made from NumPy share its memory, so that somebody must keep the arrays.
    values = {n: onnxruntime.OrtValue.ortvalue_from_numpy(a) for n, a in arrays.items()}
    for name, value in values.items():
        binding.bind_ortvalue_input(name, value)
    out_value = onnxruntime.OrtValue.ortvalue_from_numpy(out)
    binding.bind_ortvalue_output("out", out_value)
    return _BoundCall(runtime, binding, (values, arrays, out_value, out))


class _BoundCall:
    def __init__(self, runtime, binding, kept):
        self._run = partial(runtime.run_with_iobinding, binding)
        self._binding = binding
        self._kept = kept

    def __call__(self):
        self._run()
        return self._binding


def _declared(name, array):
    return helper.make_tensor_value_info(name, _DTYPES[array.dtype.name], array.shape)
