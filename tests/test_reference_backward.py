"""The reference's gradients: against finite differences, and against torch's autograd."""

import numpy as np
import pytest
from _gradients import (
    assert_close_to_largest,
    differentiable,
    directional_difference,
    torch_gradients,
    weighted_sum,
)
from _options import OPTIONS, arguments_of
from _support import assert_same_bits, normal_inputs

from mha_fast import reference

SIZES = {"n_query": 6, "n_key": 90, "head_width": 5, "value_width": 3}
DROPOUT = {"dropout_p": 0.4, "dropout_seed": 0x0123456789ABCDEF}

EXTRA = {
    "dropout": lambda *_: dict(DROPOUT),
    "mask of one query": lambda rng, n_query, n_key: {"attn_mask": rng.standard_normal(n_key)},
    "mask of the queries": lambda rng, n_query, n_key: {
        "attn_mask": rng.standard_normal((2, 1, n_query, 1))
    },
    "one number as mask": lambda *_: {"attn_mask": np.float64(0.5)},
}


def call_with(names, **sizes):
    """Arguments of attention(), with the named options."""
    sizes = SIZES | sizes
    call = dict(zip(("query", "key", "value"), normal_inputs(np.float64, **sizes), strict=True))
    n_query, n_key = sizes["n_query"], sizes["n_key"]
    together = arguments_of([n for n in names if n in OPTIONS], np.float64, n_query, n_key)
    for name in names:
        if name in EXTRA:
            together |= EXTRA[name](np.random.default_rng(5), n_query, n_key)
    return call | together


def random_grads(call, seed=11):
    """Gradients with respect to output and lse to begin with."""
    rng = np.random.default_rng(seed)
    out, lse = reference.attention(**call, return_lse=True)
    return rng.standard_normal(out.shape), rng.standard_normal(lse.shape)


def backward(call, grad_out, *, backward_of=reference.attention, **more):
    """attention_backward with the output and lse of the forward pass."""
    call = {name: x for name, x in call.items() if name != "return_lse"}
    out, lse = backward_of(**call, return_lse=True)
    function = {
        reference.attention: reference.attention_backward,
        reference.attention_varlen: reference.attention_varlen_backward,
    }[backward_of]
    return function(grad_out, out=out, lse=lse, **call, **more)


def assert_finite_differences_agree(forward, call, grad_out, grad_lse):
    wanted = differentiable(call)
    found = backward(call, grad_out, grad_lse=grad_lse, wanted=wanted, backward_of=forward)
    for name, grad in zip(wanted, found, strict=True):
        x = np.asarray(call[name])
        assert grad.shape == x.shape
        direction = np.random.default_rng(3).standard_normal(x.shape)
        direction = np.where(np.isfinite(x), direction, 0.0)

        def along(moved, name=name):
            return weighted_sum(forward, call | {name: moved}, grad_out, grad_lse)

        right = directional_difference(along, np.where(np.isfinite(x), x, -np.inf), direction)
        unit = np.sqrt((grad**2).sum() * (direction**2).sum())
        assert abs((grad * direction).sum() - right) <= 1e-7 * max(unit, 1e-3), name


@pytest.mark.parametrize("name", [*OPTIONS, *EXTRA])
def test_finite_differences_agree(name):
    call = call_with([name])
    assert_finite_differences_agree(reference.attention, call, *random_grads(call))


ALL_TOGETHER = ["float mask", "window", "offset at the end", "lengths", "scale", "softcap",
                "alibi per sequence", "sinks", "head mask per sequence", "dropout"]  # fmt: skip


def test_finite_differences_agree_with_all_options_together():
    call = call_with(ALL_TOGETHER)
    assert_finite_differences_agree(reference.attention, call, *random_grads(call))


@pytest.mark.parametrize("name", [*OPTIONS, *EXTRA])
def test_torch_agrees(name):
    assert_torch_agrees(call_with([name]))


def test_torch_agrees_with_all_options_together():
    assert_torch_agrees(call_with(ALL_TOGETHER))


@pytest.mark.parametrize("seed", range(40))
def test_torch_agrees_on_random_calls(seed):
    assert_torch_agrees(random_call(np.random.default_rng(seed)))


def assert_torch_agrees(call):
    torch = pytest.importorskip("torch", reason="compares with torch's autograd")
    grad_out, grad_lse = random_grads(call)
    wanted = differentiable(call)

    found = backward(call, grad_out, grad_lse=grad_lse, wanted=wanted)

    right = torch_gradients(torch, grad_out, call, grad_lse, wanted)
    for grad, right_grad in zip(found, right, strict=True):
        assert_close_to_largest(grad, right_grad, 1e-12)


def random_call(rng):
    """A small call with a random choice of all options, broadcast axes included."""
    n_kv_head, group = rng.integers(1, 4, 2)
    n_query, n_key, head_width, value_width = rng.integers(1, 12, 4)
    batch, n_head = [(), (2,), (2, 3)][rng.integers(3)], n_kv_head * group

    def part_of(*shape):
        """Some axes are 1, and leading ones are missing."""
        shape = tuple(1 if rng.random() < 0.3 else n for n in shape)
        return shape[int(rng.integers(len(shape) + 1)) :] if rng.random() < 0.3 else shape

    query = rng.standard_normal((*batch, n_head, n_query, head_width))
    key = rng.standard_normal((*part_of(*batch), n_kv_head, n_key, head_width))
    value = rng.standard_normal((*part_of(*batch), n_kv_head, n_key, value_width))
    call = {"query": query, "key": key, "value": value}
    per_head = {
        "sinks": (n_head,),
        "alibi_slopes": (*part_of(*batch), n_head),
        "head_mask": (*part_of(*batch), n_head),
    }
    for name, shape in per_head.items():
        if rng.random() < 0.4:
            call[name] = rng.standard_normal(shape)
    mask = rng.standard_normal(part_of(*batch, n_head, n_query, n_key))
    visible = rng.random(mask.shape) < 0.8
    kind = rng.integers(3)
    if kind:
        call["attn_mask"] = visible if kind == 1 else np.where(visible, mask, -np.inf)
    choices = {
        "is_causal": True,
        "window": (int(rng.integers(4)), [None, 0, 2][rng.integers(3)]),
        "query_offset": ["end", 2, rng.integers(-3, 8, batch)][rng.integers(3)],
        "kv_lengths": rng.integers(0, n_key + 1, part_of(*batch)),
        "scale": 0.7,
        "softcap": 1.5,
    }
    call |= {name: x for name, x in choices.items() if rng.random() < 0.35}
    return call | (DROPOUT if rng.random() < 0.35 else {})


def test_gradients_do_not_depend_on_what_is_wanted():
    call = call_with(ALL_TOGETHER)
    grad_out, grad_lse = random_grads(call)
    wanted = differentiable(call)
    together = backward(call, grad_out, grad_lse=grad_lse, wanted=wanted)

    for name, right in zip(wanted, together, strict=True):
        (alone,) = backward(call, grad_out, grad_lse=grad_lse, wanted=(name,))
        assert_same_bits(alone, right)


def test_output_and_lse_are_computed_where_they_are_not_given():
    call = call_with(ALL_TOGETHER)
    grad_out, _ = random_grads(call)

    alone = reference.attention_backward(grad_out, out=None, lse=None, **call)

    for grad, right in zip(alone, backward(call, grad_out), strict=True):
        assert_same_bits(grad, right)


def test_parts_of_the_keys_take_the_lse_of_all():
    call = call_with(["scale"])
    grad_out, grad_lse = random_grads(call)
    right = backward(call, grad_out, grad_lse=grad_lse)
    out, lse = reference.attention(**call, return_lse=True)

    parts = []
    for part in (slice(0, 30), slice(30, None)):
        of_part = call | {name: call[name][..., part, :] for name in ("key", "value")}
        parts.append(
            reference.attention_backward(grad_out, out=out, lse=lse, grad_lse=grad_lse, **of_part)
        )

    first, second = parts
    assert_close_to_largest(first[0] + second[0], right[0], 1e-12)
    for i in (1, 2):
        assert_close_to_largest(np.concatenate([first[i], second[i]], axis=-2), right[i], 1e-12)


@pytest.mark.parametrize("poison", [np.nan, np.inf])
@pytest.mark.parametrize("with_lse", [False, True])
@pytest.mark.parametrize("names", [["dropout"], ["softcap", "sinks", "alibi"]], ids=str)
def test_what_is_excluded_leaves_no_trace(poison, with_lse, names):
    call = call_with(names)
    call["attn_mask"] = np.ones((6, 90), bool)
    call["attn_mask"][2] = False  # a query without keys
    call["kv_lengths"] = np.array([50, 90])
    call["head_mask"] = np.array([1.0, 0.0, 2.0, 0.0])
    grad_out, grad_lse = random_grads(call)
    more = {"wanted": differentiable(call)[:-1]} | ({"grad_lse": grad_lse} if with_lse else {})

    def set_unseen(number):
        """In all that has no way to the output, nor to the lse if that is asked for."""
        call["key"][0, :, 50:] = call["value"][0, :, 50:] = number
        call["query"][..., 2, :] = grad_out[..., 2, :] = number
        grad_out[:, [1, 3]] = number  # behind a closed gate
        if not with_lse:
            call["query"][:, [1, 3]] = number

    set_unseen(0.0)
    right = backward(call, grad_out, **more)
    set_unseen(poison)
    found = backward(call, grad_out, **more)

    for name, grad, right_grad in zip(more["wanted"], found, right, strict=True):
        np.testing.assert_allclose(grad, right_grad, rtol=1e-12, atol=1e-15, err_msg=name)
    grad_query, grad_key, grad_value = found[:3]
    assert not grad_query[..., 2, :].any()
    assert not grad_key[0, :, 50:].any()
    assert not grad_value[0, :, 50:].any()
    assert with_lse or not grad_query[:, [1, 3]].any()


def test_nan_reaches_what_depends_on_it_and_no_more():
    call = call_with(["causal"], n_query=8, n_key=8)
    grad_out, _ = random_grads(call)
    call["key"][0, 1, 5, 0] = np.nan

    grad_query, grad_key, grad_value = backward(call, grad_out)

    sees_it = np.arange(8) >= 5
    np.testing.assert_array_equal(np.isnan(grad_query[0, 2:]).all(axis=-1), [sees_it] * 2)
    assert np.isfinite(grad_query[1]).all()
    assert np.isfinite(grad_query[0, :2]).all()
    assert np.isfinite(grad_query[0, 2:, :5]).all()
    for grad in (grad_key, grad_value):  # every key is seen by a query that sees the NaN
        assert np.isnan(grad[0, 1]).all()
        assert np.isfinite(grad[0, 0]).all()


def test_keys_that_no_query_sees_have_gradient_0():
    call = call_with(["causal"], n_query=6, n_key=90)

    _, grad_key, grad_value = backward(call, random_grads(call)[0])

    assert grad_key[..., :6, :].all()
    assert not grad_key[..., 6:, :].any()
    assert not grad_value[..., 6:, :].any()


def test_a_sink_gets_its_part_through_lse_where_a_query_has_no_key():
    call = call_with(["sinks"], n_query=2, n_key=3)
    call["kv_lengths"] = 0
    grad_out, grad_lse = random_grads(call)

    (grad_sinks,) = backward(call, grad_out, grad_lse=grad_lse, wanted=["sinks"])
    (without,) = backward(call, grad_out, wanted=["sinks"])

    np.testing.assert_allclose(grad_sinks, grad_lse.sum(axis=(0, 2)), rtol=1e-14)
    assert not without.any()


def test_gate_of_0_has_a_gradient_of_its_own():
    call = call_with(["dropout"])
    grad_out, _ = random_grads(call)
    ungated = reference.attention(**call)

    call["head_mask"] = np.zeros(4)
    found = backward(call, grad_out, wanted=["head_mask", "query", "key", "value"])

    np.testing.assert_allclose(found[0], (grad_out * ungated).sum(axis=(0, 2, 3)), rtol=1e-12)
    assert not any(grad.any() for grad in found[1:])


@pytest.mark.parametrize("shift", [-960.0, 120.0])
def test_lse_far_from_0(shift):
    rng = np.random.default_rng(0)
    query, key, value = rng.standard_normal((3, 1, 50, 16)) * 0.1
    query[..., 0], key[..., 0] = 1.0, shift
    call = {"query": query, "key": key, "value": value, "attn_mask": np.tri(50, dtype=bool)}
    grad_out, _ = random_grads(call)
    right = backward(call | {"key": np.concatenate([key[..., :1] * 0, key[..., 1:]], -1)}, grad_out)

    found = backward(call, grad_out)

    unmoved = [found[0][..., 1:], found[1], found[2]]
    for grad, right_grad in zip(unmoved, [right[0][..., 1:], *right[1:]], strict=True):
        np.testing.assert_allclose(grad, right_grad, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("low", [-1e9, -1e20, float(np.finfo(np.float32).min)])
@pytest.mark.parametrize("lse_dtype", [np.float32, np.float64])
def test_weights_sum_to_1_where_lse_has_no_place_for_their_number(low, lse_dtype):
    """A mask of very low numbers hides nothing where a whole row has them: all keys weigh the same.

    Their logarithm is lost in the lse, and ``exp(score - lse)`` would be 1 for each of them.
    """
    call = call_with([], n_query=3, n_key=40)
    call |= {"query": np.zeros((2, 4, 3, 5)), "attn_mask": np.float64(low)}
    call["sinks"] = np.array([low, -np.inf, 0.0, low])
    weights = np.array([1 / 41, 1 / 40, 0, 1 / 41])
    grad_out, _ = random_grads(call)
    out, lse = reference.attention(**call, return_lse=True)

    grad_value, grad_sinks = reference.attention_backward(
        grad_out, out=out, lse=lse.astype(lse_dtype), wanted=["value", "sinks"], **call
    )

    of_heads = grad_out.sum(axis=2) * weights[:, None]  # of any key
    right = np.repeat(of_heads.reshape(2, 2, 2, 1, 3).sum(axis=2), 40, axis=2)
    np.testing.assert_allclose(grad_value, right, rtol=1e-12)
    sums = (grad_out * out).sum(axis=(0, 2, 3))
    np.testing.assert_allclose(grad_sinks, -sums * [1 / 41, 0, 0, 1 / 41], rtol=1e-12)


def test_broadcast_operands_get_the_sum():
    call = call_with(["scale"])
    call["query"] = np.broadcast_to(call["query"][0], call["query"].shape)
    call["value"] = np.broadcast_to(call["value"][:, :, :1], call["value"].shape)
    grad_out = np.broadcast_to(np.float64(0.5), (2, 4, 6, 3))
    whole = backward(call, grad_out)

    grad_query, grad_key, _ = backward(call | {"query": call["query"][:1]}, grad_out)

    np.testing.assert_allclose(grad_query, whole[0].sum(axis=0, keepdims=True), rtol=1e-12)
    np.testing.assert_allclose(grad_key, whole[1], rtol=1e-12, atol=1e-15)


def test_one_head_without_a_batch():
    call = {name: x[0, 0] for name, x in call_with([]).items()}
    grad_out, grad_lse = random_grads(call)
    right = backward(
        {name: x[None, None] for name, x in call.items()},
        grad_out[None, None],
        grad_lse=grad_lse[None, None],
    )

    found = backward(call, grad_out, grad_lse=grad_lse)

    for grad, right_grad in zip(found, right, strict=True):
        np.testing.assert_allclose(grad, right_grad[0, 0], rtol=1e-12)


@pytest.mark.parametrize("n_query, n_key", [(0, 5), (5, 0), (0, 0)])
def test_empty_inputs(n_query, n_key):
    call = call_with(["alibi", "sinks", "head mask"], n_query=n_query, n_key=n_key)
    grad_out, grad_lse = random_grads(call)
    wanted = differentiable(call)

    found = backward(call, grad_out, grad_lse=grad_lse, wanted=wanted)

    for name, grad in zip(wanted, found, strict=True):
        assert grad.shape == call[name].shape
        assert name == "sinks" or not grad.any()


PACKED = {"cu_seqlens_q": [0, 3, 3, 7, 9], "cu_seqlens_k": [0, 4, 9, 9, 12]}
PACKED_OPTIONS = {
    "none": {},
    "causal at the end": {"is_causal": True, "query_offset": "end"},
    "dropout": DROPOUT,
    "softcap, window": {"softcap": 1.5, "window": (2, 1), "query_offset": np.array([0, 1, 2, -1])},
    "per head": {"sinks": np.arange(4) / 4, "head_mask": np.arange(4.0), "alibi_slopes": -np.ones(4)},
    "per sequence": {"head_mask": np.arange(16.0).reshape(4, 4), "alibi_slopes": np.ones((4, 4)) / 8},
}  # fmt: skip


def packed_call(options):
    rng = np.random.default_rng(0)
    shapes = {"query": (9, 4, 5), "key": (12, 2, 5), "value": (12, 2, 3)}
    call = {name: rng.standard_normal(shape) for name, shape in shapes.items()}
    return call | PACKED | options, rng.standard_normal((9, 4, 3)), rng.standard_normal((9, 4))


@pytest.mark.parametrize("options", PACKED_OPTIONS.values(), ids=PACKED_OPTIONS.keys())
def test_finite_differences_agree_on_packed_sequences(options):
    call, grad_out, grad_lse = packed_call(options)
    assert_finite_differences_agree(reference.attention_varlen, call, grad_out, grad_lse)


@pytest.mark.parametrize("options", PACKED_OPTIONS.values(), ids=PACKED_OPTIONS.keys())
def test_rows_and_keys_without_the_other_have_gradient_0(options):
    call, grad_out, _ = packed_call(options)

    grad_query, grad_key, grad_value = backward(
        call, grad_out, backward_of=reference.attention_varlen
    )

    assert not grad_query[3:7].any()
    assert not grad_key[4:9].any()
    assert not grad_value[4:9].any()
    assert grad_key[:4].any() and grad_key[9:].any()


@pytest.mark.parametrize(
    ("wanted", "options", "words"),
    [
        (["keys"], {}, "wanted names 'keys'; expected some of query, key, value, attn_mask"),
        (["sinks"], {}, "wanted names 'sinks', which was not given"),
        (["attn_mask"], {"attn_mask": np.ones((6, 90), bool)}, "'attn_mask', which is bool"),
    ],
)
def test_wrong_names_are_refused(wanted, options, words):
    call = call_with([]) | options
    grad_out, _ = random_grads(call)

    with pytest.raises(ValueError, match=words):
        backward(call, grad_out, wanted=wanted)
