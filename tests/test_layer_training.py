"""The layer's gradients: against its formulas, finite differences and torch; and what it keeps."""

import importlib.util
from itertools import pairwise

import numpy as np
import pytest
from _dtypes import DTYPES_16
from _gradients import assert_close_to_largest, directional_difference
from _support import assert_same_bits, run_python

from mha_fast import reference
from mha_fast.layer import Activations, MultiHeadAttention

F32, F64 = np.float32, np.float64

LAYERS = {
    "plain": {},
    "grouped": {"num_kv_heads": 2},
    "wide values": {"head_width": 6, "value_width": 7},
    "other key and value": {"kdim": 10, "vdim": 10},
    "other value": {"vdim": 14},
    "three widths": {"kdim": 10, "vdim": 14, "num_kv_heads": 1},
    "no bias": {"bias": False},
    "output bias alone": {"bias": False, "out_bias": True},
    "input bias alone": {"bias": True, "out_bias": False},
}
OPTIONS = {
    "float mask": {"attn_mask": np.random.default_rng(7).standard_normal((2, 1, 9, 13))},
    "bool mask": {"attn_mask": np.random.default_rng(7).random((9, 13)) < 0.7},
    "causal at the end": {"is_causal": True, "query_offset": "end"},
    "window": {"window": (2, 1), "query_offset": np.array([1, 3])},
    "lengths": {"kv_lengths": np.array([0, 13])},
    "scale": {"scale": 0.9},
    "softcap": {"softcap": 0.5},
    "ALiBi": {"alibi_slopes": np.array([0.1, 0.2, 0.4, 0.8])},
    "sinks": {"sinks": np.array([-1.0, 0.0, 1.0, 2.0])},
    "gates": {"head_mask": np.array([1.0, 0.0, 0.5, 2.0])},
    "dropout": {"dropout_p": 0.3, "dropout_seed": 5},
}
WITH_GRADIENT = ("attn_mask", "sinks", "alibi_slopes", "head_mask")


def rotary(heads, positions, base=100.0):
    """Feature i and i + width / 2 are one complex number that turns with the position."""
    half = heads.shape[-1] // 2
    turn = np.exp(1j * positions[..., None] * base ** -(np.arange(half) / half))
    turned = (heads[..., :half] + 1j * heads[..., half:]) * turn
    return np.concatenate([turned.real, turned.imag], axis=-1).astype(heads.dtype)


def make_layer(dtype=F64, embed_dim=12, num_heads=4, **sizes):
    """A layer with biases that are not 0."""
    layer = MultiHeadAttention(embed_dim, num_heads, dtype=dtype, seed=1, **sizes)
    rng = np.random.default_rng(2)
    for name, parameter in layer.parameters().items():
        if name.startswith("b_"):
            parameter[...] = rng.normal(0, 0.3, parameter.shape)
    return layer


def normal(shape, dtype=F64, seed=3):
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def of_all(layer, inputs, options, grad_lse=True):
    """All gradients by the layer, by the formulas in float64, and by those in its dtype."""
    options = dict(options)
    dropout = {name: options.pop(name) for name in ("dropout_p", "dropout_seed") if name in options}
    out, saved = layer.forward_saving(*inputs, **options, **dropout)
    grad_out = normal(out.shape, layer.dtype, 8)
    more = {"grad_lse": normal(saved.lse.shape, saved.lse.dtype, 9)} if grad_lse else {}
    wanted = [name for name in saved.differentiable if name in WITH_GRADIENT]
    everything = [*layer.parameters(), *saved.differentiable]

    mine = layer.backward(grad_out, saved, wanted=everything, **more)

    options |= more | dropout | {"wanted": wanted, "position": layer.position}
    args = grad_out, layer.parameters(), *inputs
    right = reference.multi_head_attention_backward(*args, **options)
    same = reference._layer_backward_in(layer.dtype.type, *args, **options)
    assert mine.keys() == right.keys()
    return mine, right, same


def assert_is_formula(layer, *inputs, **options):
    mine, right, same = of_all(layer, inputs, options)
    eps = np.finfo(layer.dtype).eps
    for name, grad in mine.items():
        given = options.get(name)
        assert grad.dtype == (layer.dtype if given is None else given.dtype), name
        assert grad.shape == right[name].shape, name
        unit = max(np.abs(right[name]).max(initial=0), 1.0)
        limit = 2 * np.abs(same[name] - right[name]).max(initial=0) + 16 * eps * unit
        np.testing.assert_allclose(grad, right[name], rtol=0, atol=limit, err_msg=name)


# ---- the formulas -----------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [F32, F64])
@pytest.mark.parametrize("sizes", LAYERS.values(), ids=LAYERS)
def test_gradients_of_cross_attention_are_the_formulas(sizes, dtype):
    layer = make_layer(dtype, **sizes)
    query = normal((2, 9, 12), dtype)
    key, value = normal((2, 13, layer.kdim), dtype, 4), normal((2, 13, layer.vdim), dtype, 5)
    assert_is_formula(layer, query, key, value)
    if layer.kdim == layer.vdim:
        assert_is_formula(layer, query, key)


@pytest.mark.parametrize("dtype", [F32, F64])
@pytest.mark.parametrize("position", [None, rotary])
@pytest.mark.parametrize("sizes", [{}, {"num_kv_heads": 2, "bias": False}], ids=str)
def test_gradients_of_self_attention_are_the_formulas(sizes, position, dtype):
    layer = make_layer(dtype, head_width=4, position=position, **sizes)
    assert_is_formula(layer, normal((2, 9, 12), dtype), is_causal=True)


@pytest.mark.parametrize("position", [None, rotary])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_gradients_with_options_are_the_formulas(options, position):
    layer = make_layer(F32, num_kv_heads=2, head_width=4, position=position)
    assert_is_formula(layer, normal((2, 9, 12), F32), normal((2, 13, 12), F32, 4), **options)


@pytest.mark.parametrize(
    ("query", "key"), [((9, 12), (13, 12)), ((3, 1, 9, 12), (2, 13, 12)), ((2, 0, 12), (2, 3, 12))],
    ids=["one sequence", "broadcast", "no query"],
)  # fmt: skip
def test_batch_axes_broadcast(query, key):
    layer = make_layer(head_width=4, position=rotary)
    assert_is_formula(layer, normal(query), normal(key, seed=4))


def test_one_sequence_in_several_positions():
    """Positions per sequence make a batch of what had none; its gradient is summed again."""
    layer = make_layer(head_width=4, position=rotary)
    query, key = normal((9, 12)), normal((2, 13, 12), seed=4)
    assert_is_formula(layer, query, key, query_offset=np.array([0, 4]), is_causal=True)


CALLS = {
    "self": ((), {"is_causal": True}),
    "cross": (("key",), {"kv_lengths": np.array([4, 7])}),
    "three": (("key", "value"), {"softcap": 0.5, "sinks": np.ones(4), "head_mask": np.ones(4)}),
    "dropout": ((), {"dropout_p": 0.3, "dropout_seed": 1, "alibi_slopes": np.ones(4) / 8}),
    "mask": ((), {"attn_mask": normal((5, 5))}),
}


@pytest.mark.parametrize("position", [None, rotary])
@pytest.mark.parametrize(("given", "options"), CALLS.values(), ids=CALLS)
def test_formulas_agree_with_finite_differences(given, options, position):
    parameters = make_layer(num_kv_heads=2, head_width=4).parameters()
    call = {"query": normal((2, 5, 12))}
    call |= {name: normal((2, 7, 12), seed=4 + len(name)) for name in given}
    call |= {name: x for name, x in options.items() if name in WITH_GRADIENT}
    fixed = {name: x for name, x in options.items() if name not in WITH_GRADIENT}
    fixed |= {"position": position}

    def number(all_arrays):
        arrays = {name: x for name, x in all_arrays.items() if name in call}
        weights = {name: x for name, x in all_arrays.items() if name in parameters}
        out, lse = reference.multi_head_attention(weights, **arrays, **fixed, return_lse=True)
        return (out * grad_out).sum() + (lse * grad_lse).sum()

    out, lse = reference.multi_head_attention(parameters, **call, **fixed, return_lse=True)
    grad_out, grad_lse = normal(out.shape, seed=8), normal(lse.shape, seed=9)
    wanted = [name for name in call if name in WITH_GRADIENT]
    found = reference.multi_head_attention_backward(
        grad_out, parameters, **call, **fixed, grad_lse=grad_lse, wanted=wanted
    )

    arrays = parameters | call
    assert found.keys() == arrays.keys()
    for name, grad in found.items():
        direction = normal(grad.shape, seed=10)

        def along(moved, name=name):
            return number(arrays | {name: moved})

        right = directional_difference(along, arrays[name], direction)
        unit = np.sqrt((grad**2).sum() * (direction**2).sum())
        assert abs((grad * direction).sum() - right) <= 1e-7 * max(unit, 1.0), name


# ---- torch ------------------------------------------------------------------------------------

TORCH_CASES = {
    "plain": {},
    "no bias": {"bias": False},
    "three widths": {"kdim": 40, "vdim": 24},
    "causal": {},
    "padded": {},
}

# torch brings an OpenMP runtime of its own, so it gets a process of its own.
_RUN_TORCH = """
import numpy as np, torch

torch.manual_seed(0)
torch.set_default_dtype(torch.float64)
for name, options in CASES.items():
    layer = torch.nn.MultiheadAttention(32, 4, batch_first=True, **options)
    for parameter in layer.parameters():
        if parameter.ndim == 1:
            torch.nn.init.normal_(parameter, 0, 0.3)
    widths = 32, options.get("kdim", 32), options.get("vdim", 32)
    inputs = [torch.randn(2, 17, width, requires_grad=True) for width in widths]
    used = inputs[:1] * 3 if name in ("causal", "padded") else inputs
    mask = torch.triu(torch.ones(17, 17, dtype=torch.bool), 1) if name == "causal" else None
    padding = torch.arange(17) >= torch.tensor([[17], [9]]) if name == "padded" else None
    out, _ = layer(*used, attn_mask=mask, key_padding_mask=padding, need_weights=False)
    grad_out = torch.randn_like(out)
    out.backward(grad_out)
    found = {f"input.{i}": x.detach().numpy() for i, x in enumerate(inputs)}
    found |= {f"grad.{i}": x.grad.numpy() for i, x in enumerate(inputs) if x.grad is not None}
    found |= {"layer." + key: x.detach().numpy() for key, x in layer.named_parameters()}
    found |= {"grad." + key: x.grad.numpy() for key, x in layer.named_parameters()}
    np.savez(name + ".npz", grad_out=grad_out.numpy(), **found)
"""


@pytest.fixture(scope="module")
def torch_results(tmp_path_factory):
    """Weights, inputs and gradients of torch.nn.MultiheadAttention, by case."""
    if importlib.util.find_spec("torch") is None:
        pytest.skip("torch is not installed")
    folder = tmp_path_factory.mktemp("torch")
    done = run_python(f"CASES = {TORCH_CASES!r}\n{_RUN_TORCH}", folder)
    assert done.returncode == 0, done.stderr
    return {name: dict(np.load(folder / f"{name}.npz")) for name in TORCH_CASES}


@pytest.mark.parametrize("case", TORCH_CASES)
def test_gradients_are_those_of_torch(torch_results, case):
    theirs = torch_results[case]
    layer = MultiHeadAttention.from_torch(theirs, num_heads=4, prefix="layer")
    inputs = [theirs[f"input.{i}"] for i in range(3)]
    options = {"causal": {"is_causal": True}, "padded": {"kv_lengths": np.array([17, 9])}}.get(case)
    if options is not None:
        inputs = inputs[:1]
    _, saved = layer.forward_saving(*inputs, **(options or {}))

    grads = layer.backward(theirs["grad_out"], saved)

    # A layer whose parameters are the gradients writes them under torch's names.
    holder = MultiHeadAttention.from_torch(theirs, num_heads=4, prefix="layer")
    for name, parameter in holder.parameters().items():
        parameter[...] = grads[name]
    for name, grad in holder.state_dict("torch").items():
        assert_close_to_largest(grad, theirs[f"grad.{name}"], 1e-12)
    for i, _ in enumerate(inputs):
        assert_close_to_largest(grads[("query", "key", "value")[i]], theirs[f"grad.{i}"], 1e-12)


# ---- what is kept, and what is asked for ------------------------------------------------------


def test_output_is_that_of_a_call():
    layer, tokens = make_layer(F32, head_width=4, position=rotary), normal((2, 9, 12), F32)
    out, lse = layer(tokens, is_causal=True, return_lse=True)

    kept_out, saved = layer.forward_saving(tokens, is_causal=True)

    assert isinstance(saved, Activations)
    assert_same_bits(kept_out, out)
    assert_same_bits(saved.lse, lse)
    assert_same_bits(layer.project_output(saved.out), out)
    heads = layer.project_query(tokens), *layer.project_key_value(tokens)
    for mine, right in zip((saved.query, saved.key, saved.value), heads, strict=True):
        np.testing.assert_allclose(mine, right, rtol=0, atol=1e-5)


def test_default_is_all_parameters_and_what_was_given():
    layer = make_layer()
    query, key = normal((2, 9, 12)), normal((2, 13, 12), seed=4)
    for inputs, names in (((query,), ["query"]), ((query, key), ["query", "key"])):
        out, saved = layer.forward_saving(*inputs, sinks=np.ones(4))
        grads = layer.backward(out, saved)
        assert list(grads) == [*layer.parameters(), *names]
        for name, parameter in layer.parameters().items():
            assert grads[name].shape == parameter.shape


@pytest.mark.parametrize("name", ["W_O", "b_O", "W_K", "query", "head_mask"])
def test_what_is_wanted_alone_is_as_with_the_others(name):
    layer, tokens = make_layer(F32), normal((2, 9, 12), F32)
    out, saved = layer.forward_saving(tokens, head_mask=np.array([1.0, 0.5, 0.0, 2.0], F32))
    right = layer.backward(out, saved, wanted=[*layer.parameters(), "query", "head_mask"])

    alone = layer.backward(out, saved, wanted=[name])

    assert list(alone) == [name]
    assert_same_bits(alone[name], right[name])


def test_parameters_are_views():
    layer, tokens = make_layer(), normal((2, 9, 12))
    assert list(make_layer(bias=False).parameters()) == ["W_Q", "W_K", "W_V", "W_O"]
    for name, parameter in layer.parameters().items():
        before = layer(tokens)
        parameter *= 2
        assert np.shares_memory(parameter, getattr(layer, name))
        assert not np.array_equal(layer(tokens), before)


def test_small_steps_down_the_gradient_lower_the_loss():
    layer, tokens = make_layer(F32), normal((4, 9, 12), F32)
    target, losses = normal((4, 9, 12), F32, 6), []
    for _ in range(20):
        out, saved = layer.forward_saving(tokens)
        losses.append(float(((out - target) ** 2).mean()))
        grads = layer.backward(2 * (out - target) / out.size, saved)
        for name, parameter in layer.parameters().items():
            parameter -= 0.3 * grads[name]
    assert all(later < earlier for earlier, later in pairwise(losses))


@pytest.mark.parametrize("dtype", DTYPES_16)
def test_16_bit_gradients_are_rounded_where_the_formula_would(dtype):
    layer = make_layer(dtype, embed_dim=32, num_heads=4)
    tokens, grad_out = normal((2, 40, 32), dtype), normal((2, 40, 32), dtype, 4)
    # Without a sink the gradient of b_K is 0, and what there is of it all rounding.
    options = {"is_causal": True, "sinks": np.zeros(4)}
    _, saved = layer.forward_saving(tokens, **options)

    grads = layer.backward(grad_out, saved)

    right = reference.multi_head_attention_backward(
        grad_out.astype(F64), {n: x.astype(F64) for n, x in layer.parameters().items()},
        tokens.astype(F64), **options,
    )  # fmt: skip
    # Heads, their outputs, both gradients of them and the result are rounded: five times half a
    # place, of numbers that add up like independent ones.
    eps = 2.0**-8 if np.dtype(dtype).name == "bfloat16" else 2.0**-11
    for name, grad in grads.items():
        assert grad.dtype == dtype
        error = np.sqrt(np.mean((grad.astype(F64) - right[name]) ** 2))
        assert error <= 5 * eps * np.sqrt(np.mean(right[name] ** 2)), name


class Shift:
    """Adds a number to all features at each position: a position that is no rotation."""

    def __call__(self, heads, positions):
        return heads + np.asarray(positions[..., None], heads.dtype)


class ShiftWithGradient(Shift):
    """The same, and it knows its gradient."""

    def backward(self, grad, positions):
        return grad


def test_position_without_a_known_gradient_is_refused():
    layer, tokens = make_layer(position=Shift()), normal((2, 9, 12))
    out, saved = layer.forward_saving(tokens)
    with pytest.raises(ValueError, match="position is no rotation"):
        layer.backward(out, saved)
    layer.position = lambda heads, positions: heads * 2.0 ** np.sign(positions)[..., None]
    out, saved = layer.forward_saving(tokens)
    with pytest.raises(ValueError, match="position is no rotation"):  # it scales
        layer.backward(out, saved)


def test_position_may_bring_its_gradient():
    layer, tokens = make_layer(position=ShiftWithGradient()), normal((2, 9, 12))
    out, saved = layer.forward_saving(tokens)
    grad = layer.backward(out, saved, wanted=["query"])["query"]

    def loss(tokens):
        return (layer(tokens) ** 2).sum() / 2

    direction = normal(tokens.shape, seed=5)
    right = directional_difference(loss, tokens, direction)
    assert abs((grad * direction).sum() - right) <= 1e-7 * abs(right)


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"wanted": ["W_Z"]}, ValueError, "wanted names 'W_Z'; expected some of W_Q"),
        ({"wanted": ["key"]}, ValueError, "wanted names 'key'"),
        ({"wanted": ["sinks"]}, ValueError, "wanted names 'sinks'"),
        ({"wanted": "W_Q"}, TypeError, "wanted is 'W_Q'; expected a sequence"),
        ({"grad_out": normal((2, 9, 11))}, ValueError, r"grad_out has shape \(2, 9, 11\)"),
        ({"grad_out": normal((2, 9, 12), F32)}, TypeError, "grad_out has dtype float32"),
        ({"saved": None}, TypeError, "saved is of type NoneType"),
    ],
)
def test_wrong_arguments_are_refused(arguments, error, words):
    layer = make_layer()
    out, saved = layer.forward_saving(normal((2, 9, 12)))
    with pytest.raises(error, match=words):
        layer.backward(**({"grad_out": out, "saved": saved} | arguments))


def test_activations_of_another_layer_are_refused():
    out, saved = make_layer(num_kv_heads=2).forward_saving(normal((2, 9, 12)))
    with pytest.raises(ValueError, match=r"saved has .* = \(4, 2, 3, 3\); expected \(4, 4, 3, 3\)"):
        make_layer().backward(out, saved)


def test_a_layer_without_heads_has_gradients():
    layer, tokens = make_layer().prune_heads(slice(None)), normal((2, 9, 12))
    out, saved = layer.forward_saving(tokens)
    grads = layer.backward(out, saved)
    np.testing.assert_allclose(grads["b_O"], out.sum(axis=(0, 1)))
    assert not grads["query"].any()
