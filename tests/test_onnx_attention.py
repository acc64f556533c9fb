"""The ONNX operator Attention: ONNX's own cases, larger sizes, and where it goes its own way."""

import warnings
from typing import NamedTuple

import numpy as np
import pytest
from _support import run_python

from mha_fast import reference

onnx = pytest.importorskip("onnx", minversion="1.23", reason="needs the extra mha_fast[onnx]")

import ml_dtypes  # comes with onnx
from onnx import helper
from onnx.backend.test.runner import Runner
from onnx.inliner import inline_local_functions
from onnx.reference import ReferenceEvaluator

from mha_fast.integrations import onnx as mha_onnx

FLOAT, FLOAT16, DOUBLE, BFLOAT16 = 1, 10, 11, 16
DTYPES = (np.float32, np.float64, np.float16, ml_dtypes.bfloat16)
INPUTS = ("Q", "K", "V", "attn_mask", "past_key", "past_value", "nonpad_kv_seqlen")
OUTPUTS = ("Y", "present_key", "present_value", "qk_matmul_output")


def _cases_of_onnx():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # importing the cases of the other operators overflows
        from onnx.backend.test.case.node import collect_testcases

        cases = collect_testcases("Attention")
    # An expanded case is the same one as a graph of simpler operators, without our node.
    return [case for case in cases if not case.name.endswith("_expanded")]


CASES = _cases_of_onnx()


# ---- ONNX's own cases -------------------------------------------------------------------------


def test_no_case_of_onnx_is_lost():
    """onnx 1.23 has 93; a later one may add some."""
    assert len(CASES) >= 93
    assert len({case.name for case in CASES}) == len(CASES)
    for case in CASES:
        assert [node.op_type for node in case.model.graph.node] == ["Attention"]
        assert len(case.data_sets) == 1


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_case_of_onnx(case, isa, monkeypatch):
    kernel_calls = []

    def counted(*args, **options):
        kernel_calls.append(options)
        return attention(*args, **options)

    attention = mha_onnx.attention
    monkeypatch.setattr(mha_onnx, "attention", counted)
    model = ReferenceEvaluator(case.model, new_ops=[mha_onnx.Attention])
    ((inputs, outputs),) = case.data_sets

    result = model.run(None, dict(zip(model.input_names, inputs, strict=True)))

    assert len(kernel_calls) == 1
    Runner.assert_similar_outputs(outputs, result, case.rtol, case.atol)


# ---- the same options at sizes that cross tiles -----------------------------------------------


class Problem(NamedTuple):
    """Inputs in four axes, attributes, and which inputs there are."""

    inputs: dict
    attributes: dict


def problem(
    dtype, *, n_query=130, n_new=300, n_past=0, n_kv_head=2, mask=None, lengths=None, seed=0,
    **attributes,
):  # fmt: skip
    """Standard normal inputs. `mask` is (kind, shape); the widths are 40 and 56."""
    rng = np.random.default_rng(seed)

    def normal(*shape):
        return rng.standard_normal(shape).astype(dtype)

    inputs = {
        "Q": normal(2, 4, n_query, 40),
        "K": normal(2, n_kv_head, n_new, 40),
        "V": normal(2, n_kv_head, n_new, 56),
    }
    if n_past:
        inputs["past_key"] = normal(2, n_kv_head, n_past, 40)
        inputs["past_value"] = normal(2, n_kv_head, n_past, 56)
    if mask is not None:
        kind, shape = mask
        inputs["attn_mask"] = normal(*shape)
        if kind == "bool":
            inputs["attn_mask"] = rng.random(shape) < 0.7
        elif kind == "holes":
            inputs["attn_mask"][rng.random(shape) < 0.3] = -np.inf
    if lengths is not None:
        inputs["nonpad_kv_seqlen"] = np.array(lengths, np.int64)
    return Problem(inputs, attributes)


# An attribute is a float32, so scales and caps are numbers that float32 holds.
PROBLEMS = {
    "plain": {},
    "every head its own": {"n_kv_head": 4},
    "one key head": {"n_kv_head": 1},
    "scale": {"scale": 0.3125},
    "softcap": {"softcap": 2.0},
    "causal": {"is_causal": 1},
    "causal, square": {"is_causal": 1, "n_query": 257, "n_new": 257},
    "causal, more queries than keys": {"is_causal": 1, "n_query": 300, "n_new": 70},
    "past": {"n_past": 170},
    "past, causal": {"n_past": 170, "n_new": 130, "is_causal": 1},
    "past, causal, window": {
        "n_past": 170, "n_new": 130, "is_causal": 1, "left_window_size": 65,
    },
    "past, mask with holes": {"n_past": 101, "n_new": 64, "mask": ("holes", (130, 165))},
    "past, one query": {"n_past": 600, "n_new": 1, "n_query": 1, "is_causal": 1},
    "mask of keys": {"mask": ("bool", (300,))},
    "mask": {"mask": ("float", (130, 300))},
    "mask of heads": {"mask": ("holes", (4, 130, 300))},
    "mask of batch, causal": {"mask": ("bool", (2, 1, 130, 300)), "is_causal": 1},
    "mask of all axes, softcap": {"mask": ("holes", (2, 4, 130, 300)), "softcap": 2.0},
    "short mask": {"mask": ("float", (2, 1, 130, 201))},
    "short mask, past, causal": {
        "mask": ("bool", (130, 190)), "n_past": 100, "n_new": 130, "is_causal": 1,
    },
    "lengths": {"lengths": (300, 65)},
    "lengths, causal": {"lengths": (300, 200), "is_causal": 1},
    "lengths, causal, fewer than queries": {"lengths": (64, 0), "is_causal": 1},
    "lengths, causal, one query": {
        "lengths": (600, 13), "n_new": 600, "n_query": 1, "is_causal": 1,
    },
    "lengths, short mask, causal": {
        "lengths": (201, 150), "mask": ("bool", (2, 4, 130, 201)), "is_causal": 1,
    },
    "lengths, mask shorter than they are": {
        "lengths": (300, 150), "mask": ("holes", (2, 1, 130, 201)), "is_causal": 1,
    },
    "lengths, window": {"lengths": (280, 150), "left_window_size": 70, "right_window_size": 3},
    "window": {"left_window_size": 64, "right_window_size": 63},
    "window, left": {"left_window_size": 0},
    "window, right": {"right_window_size": 5},
    "everything": {
        "n_new": 300, "lengths": (300, 131), "mask": ("holes", (4, 130, 290)), "is_causal": 1,
        "left_window_size": 100, "right_window_size": 2, "softcap": 3.0, "scale": 0.25,
    },
}  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: dtype.__name__)
@pytest.mark.parametrize("name", PROBLEMS)
def test_large_problem(name, dtype):
    inputs, attributes = problem(dtype, **PROBLEMS[name])
    right, limit = right_y(inputs, attributes)
    for axes in (3, 4):
        y, *present = run(inputs, attributes, OUTPUTS[:3], axes=axes)

        assert_close(y, as_axes(right, axes), limit, dtype)
        for result, whole in zip(present, all_keys(inputs), strict=True):
            assert result.dtype == dtype
            np.testing.assert_array_equal(result, whole)


@pytest.mark.parametrize("mode", range(4))
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: dtype.__name__)
@pytest.mark.parametrize(
    "name", ["plain", "past, causal, window", "short mask, past, causal", "everything"]
)
def test_qk_matmul_output(name, dtype, mode):
    inputs, attributes = problem(dtype, **PROBLEMS[name])
    y, scores = run(inputs, attributes | {"qk_matmul_output_mode": mode}, ("Y", OUTPUTS[3]))

    right, limit = right_scores(inputs, attributes, mode)
    assert scores.dtype == dtype
    np.testing.assert_array_equal(np.isfinite(scores), np.isfinite(right))
    finite = np.isfinite(right)
    np.testing.assert_array_equal(scores[~finite].astype(np.float64), right[~finite])
    assert np.all(np.abs(scores[finite].astype(np.float64) - right[finite]) <= limit[finite])
    np.testing.assert_array_equal(y, run(inputs, attributes, ("Y",))[0])


def test_scores_are_made_only_for_a_model_that_names_them(monkeypatch):
    inputs, attributes = problem(np.float32, n_query=5, n_new=7, qk_matmul_output_mode=3)
    monkeypatch.setattr(mha_onnx, "_qk_matmul_output", None)

    run(inputs, attributes, OUTPUTS[:3])
    with pytest.raises(TypeError):
        run(inputs, attributes, OUTPUTS)


# ---- details of the operator ------------------------------------------------------------------


@pytest.mark.parametrize("precision", (FLOAT, FLOAT16, BFLOAT16))
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: dtype.__name__)
def test_softmax_precision_below_the_usual_changes_nothing(dtype, precision):
    inputs, attributes = problem(dtype, n_query=20, n_new=70)
    (usual,) = run(inputs, attributes, ("Y",))
    (asked,) = run(inputs, attributes | {"softmax_precision": precision}, ("Y",))
    np.testing.assert_array_equal(asked, usual)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: dtype.__name__)
def test_softmax_precision_double_rounds_once(dtype):
    inputs, attributes = problem(dtype, softmax_precision=DOUBLE, mask=("holes", (130, 300)))
    y, weights = run(inputs, attributes | {"qk_matmul_output_mode": 3}, ("Y", OUTPUTS[3]))

    for result, right in (
        (y, right_y(inputs, attributes)[0]),
        (weights, right_scores(inputs, attributes, 3)[0]),
    ):
        info = ml_dtypes.finfo(dtype)
        half_ulp = float(info.eps) / 2 * np.abs(right) + float(info.smallest_subnormal)
        error = np.abs(result.astype(np.float64) - right)
        assert result.dtype == dtype
        assert np.all(error <= half_ulp + 1e-14)


@pytest.mark.parametrize("axes", (3, 4))
@pytest.mark.parametrize(
    ("first", "second"),
    [
        (np.float32, np.float16),
        (np.float16, np.float32),
        (np.float16, ml_dtypes.bfloat16),
        (ml_dtypes.bfloat16, np.float64),
    ],
)
def test_values_may_have_another_dtype(first, second, axes):
    inputs, attributes = problem(first, n_past=20, n_new=80)
    for name in ("V", "past_value"):
        inputs[name] = inputs[name].astype(second)

    y, _, present_value = run(inputs, attributes, OUTPUTS[:3], axes=axes)

    assert present_value.dtype == second
    right, limit = right_y(inputs, attributes)
    assert_close(y, as_axes(right, axes), limit, first)


def test_what_is_too_large_for_float16_becomes_inf():
    inputs, _ = problem(np.float16, n_query=3, n_new=5)
    inputs["V"] = np.full(inputs["V"].shape, 1e6, np.float32)
    (y,) = run(inputs, {}, ("Y",))
    assert np.all(y == np.inf)


@pytest.mark.parametrize("dtype", (np.int8, np.int64, np.uint16))
def test_integer_mask_is_added(dtype):
    inputs, attributes = problem(np.float32, n_query=20, n_new=70, is_causal=1)
    numbers = np.random.default_rng(1).integers(0, 4, (20, 70))
    results = [
        run(inputs | {"attn_mask": numbers.astype(kind)}, attributes, ("Y",))[0]
        for kind in (dtype, np.float32)
    ]
    np.testing.assert_array_equal(*results)


@pytest.mark.parametrize("kind", (np.bool_, np.float32))
def test_mask_with_one_column(kind):
    """Opset 23 broadcasts it; from opset 24 on it is short, and all keys but one are excluded."""
    inputs, attributes = problem(np.float32, n_query=5, n_new=70)
    mask = np.ones((5, 1), kind)

    (broadcast,) = run(inputs | {"attn_mask": mask}, attributes, ("Y",), opset=23)
    (padded,) = run(inputs | {"attn_mask": mask}, attributes, ("Y",), opset=24)

    right, limit = right_y(inputs, attributes)
    assert_close(broadcast, right, limit, np.float32)
    first_value = np.repeat(inputs["V"][:, :, :1], 2, axis=1)
    np.testing.assert_allclose(padded, np.broadcast_to(first_value, padded.shape), rtol=1e-6)


@pytest.mark.parametrize("mode", (2, 3))
def test_what_is_masked_cannot_poison(mode):
    clean, attributes = problem(
        np.float32, lengths=(200, 80), mask=("bool", (130, 260)), qk_matmul_output_mode=mode
    )
    clean["attn_mask"][7] = False
    poisoned = {name: x.copy() for name, x in clean.items()}
    poisoned["K"][0, :, 200:] = np.nan
    poisoned["V"][1, :, 80:] = np.inf
    poisoned["K"][1, :, 80:] = np.inf

    names = ("Y", OUTPUTS[3])
    y, scores = run(poisoned, attributes, names)

    for result, right in zip((y, scores), run(clean, attributes, names), strict=True):
        np.testing.assert_array_equal(result, right)
    assert not y[:, :, 7].any()
    assert np.all(scores[:, :, 7] == (-np.inf if mode == 2 else 0))


def test_unnamed_outputs_do_not_reach_the_next_node():
    """The first node leaves out present_key; the second one leaves out its mask."""
    inputs, _ = problem(np.float32, n_query=7, n_new=7, n_past=7, n_kv_head=4)
    inputs["V"], inputs["past_value"] = inputs["K"], inputs["past_key"]
    first = helper.make_node("Attention", ["Q", "K", "V"], ["Y1", "", "", "scores"])
    second = helper.make_node(
        "Attention", ["Y1", "K", "V", "", "past_key", "past_value"], ["Y", "present_key", "", ""]
    )
    model = model_of([first, second], inputs, ("Y",), 24)

    (y,) = ReferenceEvaluator(model, new_ops=[mha_onnx.Attention]).run(None, inputs)

    (between,) = run({name: inputs[name] for name in "QKV"}, {}, ("Y",))
    np.testing.assert_array_equal(y, run(inputs | {"Q": between}, {}, ("Y",))[0])


def test_node_in_a_function_of_the_model():
    """The evaluator hands new_ops to no function of a model, so functions are inlined first."""
    names = ["Q", "K", "V"], ["Y"]
    node = helper.make_node("Attention", *names)
    for name, of_function in (("scale", "own_scale"), ("softcap", "cap")):
        link = node.attribute.add()
        link.name, link.ref_attr_name, link.type = name, of_function, onnx.AttributeProto.FLOAT
    opsets = [helper.make_opsetid("", 25), helper.make_opsetid("own", 1)]
    linked = ["own_scale", "cap"]
    function = helper.make_function("own", "capped", *names, [node], opsets[:1], linked)
    inputs, _ = problem(np.float32, n_query=9, n_new=33)
    call = helper.make_node("capped", *names, domain="own", own_scale=0.5, cap=3.0)
    graph = graph_of([call], inputs, ("Y",))
    model = inline_local_functions(
        helper.make_model(graph, functions=[function], opset_imports=opsets)
    )

    (y,) = ReferenceEvaluator(model, new_ops=[mha_onnx.Attention]).run(None, inputs)

    np.testing.assert_array_equal(y, run(inputs, {"scale": 0.5, "softcap": 3.0}, ("Y",))[0])


@pytest.mark.parametrize("n_query", (0, 3))
@pytest.mark.parametrize("axes", (3, 4))
def test_nothing_to_attend_to(n_query, axes):
    inputs, attributes = problem(np.float32, n_query=n_query, n_new=0)
    y, scores = run(inputs, attributes, ("Y", OUTPUTS[3]), axes=axes)
    assert scores.shape == (2, 4, n_query, 0)
    np.testing.assert_array_equal(y, as_axes(np.zeros((2, 4, n_query, 56)), axes))


# ---- errors -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "attributes", "message"),
    [
        ({"K": None}, {}, "Q .*K .*expected all three 3-D or all three 4-D"),
        ({"Q": (1, 2, 3, 4, 8)}, {}, "expected all three 3-D or all three 4-D"),
        ({"K": (1, 2, 6, 8)}, {}, "expected one batch size"),
        ({"K": (2, 2, 6, 9)}, {}, "expected head width 8"),
        ({"Q": (2, 5, 4, 8)}, {}, "expected a multiple of the 2 heads"),
        ({"past_key": (2, 2, 5, 8)}, {}, "only one of past_key and past_value"),
        ({"past_value": (2, 2, 5, 8)}, {}, "only one of past_key and past_value"),
        ({"past_key": (2, 2, 5, 9), "past_value": (2, 2, 5, 8)}, {}, r"past_key has shape .*, 9\)"),
        ({"past_key": (2, 2, 5, 8), "past_value": (2, 5, 8)}, {}, r"past_value has shape"),
        (
            {"past_key": (2, 2, 5, 8), "past_value": (2, 2, 5, 8), "nonpad_kv_seqlen": [1, 2]},
            {},
            "nonpad_kv_seqlen and past_key are given",
        ),
        ({"nonpad_kv_seqlen": [1, 7]}, {}, "nonpad_kv_seqlen holds 1 to 7; expected 0 to 6"),
        ({"nonpad_kv_seqlen": [-1, 2]}, {}, "nonpad_kv_seqlen holds -1 to 2"),
        ({"nonpad_kv_seqlen": [1]}, {}, r"nonpad_kv_seqlen has shape \(1,\); expected \(2,\)"),
        ({"attn_mask": (4, 7)}, {}, r"attn_mask has shape \(4, 7\)"),
        ({}, {"left_window_size": -2}, "left_window_size is -2; expected -1 or more"),
        ({}, {"right_window_size": -5}, "right_window_size is -5"),
        ({}, {"qk_matmul_output_mode": 4}, "qk_matmul_output_mode is 4"),
        ({}, {"softmax_precision": 7}, r"softmax_precision is 7; expected 1 \(FLOAT\)"),
        ({}, {"softcap": -1.0}, "softcap is -1.0"),
        ({}, {"scale": np.inf}, "scale is inf"),
        ({}, {"q_num_heads": 4}, "q_num_heads is 4; expected no such attribute"),
    ],
)
def test_error(change, attributes, message):
    with pytest.raises(ValueError, match=message):
        run(small_inputs(change), attributes, ("Y",), axes=None)


@pytest.mark.parametrize(
    ("change", "attributes", "message"),
    [
        ({}, {"q_num_heads": 4}, "kv_num_heads is None; expected the number of heads"),
        ({}, {"kv_num_heads": 2}, "q_num_heads is None; expected the number of heads"),
        ({}, {"q_num_heads": 0, "kv_num_heads": 2}, "q_num_heads is 0"),
        ({}, {"q_num_heads": 3, "kv_num_heads": 2}, r"Q has shape \(2, 4, 32\).* 3 heads divide"),
        ({}, {"q_num_heads": 4, "kv_num_heads": 3}, r"K has shape \(2, 6, 16\).* 3 heads divide"),
        ({"V": (2, 6, 15)}, {"q_num_heads": 4, "kv_num_heads": 2}, r"V has shape \(2, 6, 15\)"),
    ],
)
def test_error_of_inputs_with_three_axes(change, attributes, message):
    inputs = {"Q": (2, 4, 32), "K": (2, 6, 16), "V": (2, 6, 16)} | change
    arrays = {name: np.zeros(shape, np.float32) for name, shape in inputs.items()}
    with pytest.raises(ValueError, match=message):
        run(arrays, attributes, ("Y",), axes=None)


@pytest.mark.parametrize(
    ("name", "dtype", "message"),
    [
        ("Q", np.int32, "Q has dtype int32; expected one of float32"),
        ("K", np.float64, "K has dtype float64; expected float32 like Q"),
        ("V", np.int32, "V has dtype int32"),
        ("past_key", np.float16, "past_key has dtype float16; expected float32"),
        ("past_value", np.float16, "past_value has dtype float16; expected float32"),
        ("nonpad_kv_seqlen", np.float32, "nonpad_kv_seqlen has dtype float32"),
        ("attn_mask", np.complex64, "attn_mask has dtype complex64"),
    ],
)
def test_error_of_dtype(name, dtype, message):
    extra = {"attn_mask": (4, 6), "nonpad_kv_seqlen": [1, 2]}
    if name.startswith("past"):
        extra = {"past_key": (2, 2, 5, 8), "past_value": (2, 2, 5, 8)}
    inputs = small_inputs(extra)
    inputs[name] = inputs[name].astype(dtype)
    with pytest.raises(TypeError) as error:
        run(inputs, {}, ("Y",), axes=None)
    assert message in str(error.value.__cause__)


def test_heads_before_opset_25_must_agree_with_the_shapes():
    inputs = small_inputs({})
    (right,) = run(inputs, {}, ("Y",), axes=None)
    heads = {"q_num_heads": 4, "kv_num_heads": 2}
    (y,) = run(inputs, heads, ("Y",), axes=None, opset=24)
    np.testing.assert_array_equal(y, right)
    with pytest.raises(ValueError, match="kv_num_heads is 1; expected 2"):
        run(inputs, heads | {"kv_num_heads": 1}, ("Y",), axes=None, opset=24)


def test_short_mask_in_opset_23():
    with pytest.raises(ValueError, match=r"attn_mask has shape \(4, 5\)"):
        run(small_inputs({"attn_mask": (4, 5)}), {}, ("Y",), axes=None, opset=23)


def test_without_onnx(tmp_path):
    process = run_python("import sys; sys.modules['onnx'] = None; import mha_fast.onnx", tmp_path)
    assert process.returncode == 1
    assert "ImportError: mha_fast.onnx needs the onnx package" in process.stderr
    assert 'pip install "mha_fast[onnx]"' in process.stderr


def test_onnx_is_imported_only_when_asked_for(tmp_path):
    process = run_python("import sys, mha_fast; print('onnx' in sys.modules)", tmp_path)
    assert process.stdout.strip() == "False", process.stderr


# ---- models -----------------------------------------------------------------------------------


def run(inputs, attributes, outputs, *, axes=4, opset=25):
    """Run one node; `axes` 3 hands Q, K and V over with three, None leaves all as it is."""
    if axes == 3:
        attributes = attributes | {
            "q_num_heads": inputs["Q"].shape[1],
            "kv_num_heads": inputs["K"].shape[1],
        }
        inputs = inputs | {name: as_axes(inputs[name], 3) for name in "QKV"}
    node = helper.make_node(
        "Attention",
        [name if name in inputs else "" for name in INPUTS],
        [name if name in outputs else "" for name in OUTPUTS],
        **attributes,
    )
    model = model_of([node], inputs, outputs, opset)
    return ReferenceEvaluator(model, new_ops=[mha_onnx.Attention]).run(None, inputs)


def model_of(nodes, inputs, outputs, opset):
    graph = graph_of(nodes, inputs, outputs)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)])


def graph_of(nodes, inputs, outputs):
    of_dtype = helper.np_dtype_to_tensor_dtype
    return helper.make_graph(
        nodes,
        "graph",
        [helper.make_tensor_value_info(n, of_dtype(x.dtype), x.shape) for n, x in inputs.items()],
        [helper.make_tensor_value_info(n, of_dtype(inputs["Q"].dtype), None) for n in outputs],
    )


def small_inputs(change):
    """Float32 inputs of given shapes; None takes the batch axis away, a list is as it stands."""
    shapes = {"Q": (2, 4, 4, 8), "K": (2, 2, 6, 8), "V": (2, 2, 6, 8)} | change
    return {
        name: np.array(shape)
        if isinstance(shape, list)
        else np.zeros((2, 6, 8) if shape is None else shape, np.float32)
        for name, shape in shapes.items()
    }


def as_axes(x, axes):
    """(batch, heads, rows, width) as it is, or as (batch, rows, heads * width)."""
    if axes == 4:
        return x
    n_batch, n_head, n_row, width = x.shape
    return x.swapaxes(1, 2).reshape(n_batch, n_row, n_head * width)


# ---- the right results, straight from the text of the specification ---------------------------


def all_keys(inputs):
    key, value = inputs["K"], inputs["V"]
    if "past_key" in inputs:
        key = np.concatenate((inputs["past_key"], key), axis=2)
        value = np.concatenate((inputs["past_value"], value), axis=2)
    return key, value


def bias_of(inputs, attributes):
    """The additive bias of every query and key in float64, with all masks in it."""
    n_batch, n_head, n_query, _ = inputs["Q"].shape
    n_key = all_keys(inputs)[0].shape[2]
    bias = np.zeros((n_batch, n_head, n_query, n_key))
    if "attn_mask" in inputs:
        mask = inputs["attn_mask"]
        if mask.dtype == np.bool_:
            mask = np.where(mask, 0.0, -np.inf)
        bias[..., : mask.shape[-1]] += mask.astype(np.float64)
        bias[..., mask.shape[-1] :] = -np.inf
    for b in range(n_batch):
        offset, n_valid = 0, n_key
        if "past_key" in inputs:
            offset = inputs["past_key"].shape[2]
        if "nonpad_kv_seqlen" in inputs:
            n_valid = int(inputs["nonpad_kv_seqlen"][b])
            offset = n_valid - n_query
        for i in range(n_query):
            first, last = 0, n_valid - 1
            if attributes.get("left_window_size", -1) >= 0:
                first = offset + i - attributes["left_window_size"]
            if attributes.get("right_window_size", -1) >= 0:
                last = min(last, offset + i + attributes["right_window_size"])
            if attributes.get("is_causal"):
                last = min(last, offset + i)
            bias[b, :, i, : max(first, 0)] = -np.inf
            bias[b, :, i, max(last + 1, 0) :] = -np.inf
    return bias


def right_y(inputs, attributes):
    """Y in float64, and the largest error that it may show.

    The kernel has tests of its own for the last bits; here a wrong key would be seen.
    """
    dtype = inputs["Q"].dtype
    key, value = all_keys(inputs)
    options = {name: attributes.get(name) for name in ("scale", "softcap")}
    right = reference.attention(inputs["Q"], key, value, bias_of(inputs, attributes), **options)
    limit = 64 * eps_of_kernel(dtype) * np.abs(value.astype(np.float64)).max(initial=0)
    return right, limit + float(ml_dtypes.finfo(dtype).eps) * np.abs(right).max(initial=0)


def eps_of_kernel(dtype):
    return np.finfo(np.float64 if dtype == np.float64 else np.float32).eps


def right_scores(inputs, attributes, mode):
    """The fourth output in float64, and the largest error that each entry may show."""
    dtype = inputs["Q"].dtype
    key = np.repeat(all_keys(inputs)[0], 4 // inputs["K"].shape[1], axis=1).astype(np.float64)
    query, width = inputs["Q"].astype(np.float64), inputs["Q"].shape[3]
    scale = attributes.get("scale", 1 / np.sqrt(width))
    eps = eps_of_kernel(dtype)
    right = scale * query @ key.swapaxes(2, 3)
    # Rounding of a sum of products, of the few steps after it, and to the dtype of the output.
    limit = (width + 8) * eps * (scale * np.abs(query) @ np.abs(key).swapaxes(2, 3) + 1)
    if mode >= 1 and "softcap" in attributes:
        right = attributes["softcap"] * np.tanh(right / attributes["softcap"])
    if mode >= 2:
        bias = bias_of(inputs, attributes)
        right = right + bias
        limit = limit + 2 * eps * np.abs(np.where(bias == -np.inf, 0, bias))
    if mode == 3:
        limit = np.full(right.shape, 4 * limit.max())
        right, _ = reference.softmax(right)
    return right, limit + float(ml_dtypes.finfo(dtype).eps) * np.where(
        right == -np.inf, 0, np.abs(right)
    )


def assert_close(result, right, limit, dtype):
    assert result.dtype == dtype
    assert result.shape == right.shape
    assert np.isfinite(result).all()
    assert np.abs(result.astype(right.dtype) - right).max(initial=0) <= limit
