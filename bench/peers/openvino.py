"""OpenVINO on the CPU: ``ScaledDotProductAttention``, compiled once for the shape of the case.

The plugin multiplies with transposed keys; they are offered as they are and transposed already, and
a short trial chooses. A graph of free sizes was never faster.
"""

from contextlib import nullcontext
from functools import partial

import numpy as np
import openvino
from openvino import Type, opset13

from . import (
    Prepared,
    Unsupported,
    as_rows_of_one_head,
    can_share_rows,
    fastest,
    from_rows_of_one_head,
)

_TYPES = {
    "float32": Type.f32,
    "float16": Type.f16,
    "bfloat16": Type.bf16,
    "bool": Type.boolean,
}
_CAPABILITIES = {"float32": "FP32", "float16": "FP16", "bfloat16": "BF16"}
_CORE = openvino.Core()


def version() -> str:
    """Return the version of OpenVINO."""
    return openvino.__version__


def session(num_threads: int):
    """Do nothing: every compiled model brings its own threads."""
    return nullcontext()


def prepare(case, inputs, num_threads: int) -> Prepared:
    """Return the fastest call that computes `case` once."""
    capability = _CAPABILITIES.get(case.dtype)
    if capability not in _CORE.get_property("CPU", "OPTIMIZATION_CAPABILITIES"):
        raise Unsupported(f"OpenVINO does not compute in {case.dtype} on this CPU")
    if case.is_causal and case.mask is not None:
        raise Unsupported("OpenVINO takes a mask or causal, not both")
    as_one_head = inputs
    if case.n_head != case.n_kv_head:
        if not can_share_rows(case):
            raise Unsupported("OpenVINO has no grouped heads")
        _, as_one_head = as_rows_of_one_head(case, inputs)
    return fastest([_prepared(case, as_one_head, num_threads, turned) for turned in (False, True)])


def _prepared(case, as_one_head, num_threads, turned):
    arrays = [array for array in as_one_head if array is not None]
    if turned:
        arrays[1] = np.ascontiguousarray(arrays[1].swapaxes(-1, -2))
    call = _BoundCall(_compiled(case, arrays, turned, num_threads), arrays)
    to_numpy = partial(_array, case, as_one_head.query.dtype)
    return Prepared(call, to_numpy, f"keys {'transposed' if turned else 'as they are'}")


def _compiled(case, arrays, turned, num_threads):
    parameters = [opset13.parameter(array.shape, _TYPES[array.dtype.name]) for array in arrays]
    query, key, *others = parameters
    if turned:
        key = opset13.transpose(key, opset13.constant([0, 1, 3, 2]))
    out = opset13.scaled_dot_product_attention(query, key, *others, causal=case.is_causal)
    return _CORE.compile_model(
        openvino.Model([out], parameters),
        "CPU",
        {
            "PERFORMANCE_HINT": "LATENCY",
            "INFERENCE_NUM_THREADS": num_threads,
            # Left to itself it computes float32 in bfloat16 where that is faster.
            "INFERENCE_PRECISION_HINT": _TYPES[case.dtype],
        },
    )


class _BoundCall:
    def __init__(self, compiled, arrays):
        self._request = compiled.create_infer_request()
        self._arrays = arrays  # the tensors share their memory
        for number, array in enumerate(arrays):
            self._request.set_input_tensor(number, _tensor(array))
        self._infer = partial(self._request.infer, share_inputs=True, share_outputs=True)

    def __call__(self):
        self._infer()
        return self._request


def _tensor(array):
    if array.dtype.name == "bfloat16":
        return openvino.Tensor(array.view(np.uint16), array.shape, Type.bf16)
    return openvino.Tensor(array, shared_memory=True)


def _array(case, dtype, request):
    data = request.get_output_tensor(0).data
    # bfloat16 comes out as some other type of 16 bits where ml_dtypes is unknown to OpenVINO.
    return from_rows_of_one_head(case, data if data.dtype == dtype else data.view(dtype))
