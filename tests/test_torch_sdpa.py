"""scaled_dot_product_attention of tensors: torch's meaning, gradients, compiler and fall-backs."""

import numpy as np
import pytest
from _support import run_python

torch = pytest.importorskip("torch", reason="needs the extra mha_fast[torch]")

from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

import mha_fast.torch
from mha_fast.integrations.torch import _sdpa

DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
sdpa = mha_fast.torch.scaled_dot_product_attention


def normal(*shapes, dtype=torch.float32, seed=0, requires_grad=False):
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(shape, generator=generator, dtype=torch.float64)
        .to(dtype)
        .requires_grad_(requires_grad)
        for shape in shapes
    ]


@pytest.fixture
def kernel_calls(monkeypatch):
    """Count the calls that reach the kernels of mha_fast, and those handed to torch."""
    calls = {"ours": 0, "torch": 0}

    def counted(name, function):
        def call(*args, **kwargs):
            calls[name] += 1
            return function(*args, **kwargs)

        return call

    monkeypatch.setattr(_sdpa, "attention_of_arrays", counted("ours", _sdpa.attention_of_arrays))
    monkeypatch.setattr(_sdpa, "torch_sdpa", counted("torch", _sdpa.torch_sdpa))
    return calls


def assert_as_in_float64(out, *args, **kwargs):
    """No further from torch in float64 than twice torch in the same dtype, and some roundings."""
    wide = [
        x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x for x in args
    ]
    right = functional.scaled_dot_product_attention(*wide, **kwargs)
    same = functional.scaled_dot_product_attention(*args, **kwargs)
    assert out.shape == same.shape
    assert out.dtype == same.dtype
    value = args[2].detach().double()
    unit = 8 * torch.finfo(out.dtype).eps * float(value.abs().max()) if value.numel() else 0
    error, torchs = (float((x.double() - right).abs().max()) for x in (out, same))
    assert error <= 2 * torchs + unit


# ---- values -----------------------------------------------------------------------------------

OPTIONS = {
    "plain": {},
    "causal": {"is_causal": True},
    "scale": {"scale": -0.3},
    "bool mask": {"attn_mask": "bool"},
    "float mask": {"attn_mask": "own"},
    "float32 mask of a 16-bit query": {"attn_mask": "float32"},
    "bool mask and causal": {"attn_mask": "bool", "is_causal": True},
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_result_is_that_of_torch(dtype, kv_heads, options, kernel_calls):
    query, key, value = normal(
        (2, 4, 70, 24), (2, kv_heads, 90, 24), (2, kv_heads, 90, 8), dtype=dtype
    )
    mask, rest = None, dict(options)
    if kind := rest.pop("attn_mask", None):
        (mask,) = normal((4, 70, 90), seed=1, dtype=dtype if kind == "own" else torch.float32)
        if kind == "bool":
            mask = mask > -0.5
        elif kind == "float32" and dtype == torch.float64:
            pytest.skip("torch's own function fails on a float32 mask of a float64 query")
    rest["enable_gqa"] = kv_heads < 4

    out = sdpa(query, key, value, mask, **rest)

    assert kernel_calls == {"ours": 1, "torch": 0}
    if mask is not None and rest.pop("is_causal", False):  # refused by some of torch's paths
        mask = mask & torch.ones(70, 90, dtype=torch.bool).tril()
    assert_as_in_float64(out, query, key, value, mask, **rest)


SHAPES = {
    "one head": ((9, 8), (7, 8), (7, 5)),
    "three axes": ((3, 9, 8), (3, 7, 8), (3, 7, 5)),
    "five axes": ((2, 3, 4, 9, 8), (2, 3, 4, 7, 8), (2, 3, 4, 7, 5)),
    "a key head for all": ((2, 4, 9, 8), (2, 1, 7, 8), (2, 1, 7, 5)),
    "a query head for all": ((2, 1, 9, 8), (2, 4, 7, 8), (2, 4, 7, 5)),
    "a batch entry for all": ((3, 4, 9, 8), (1, 4, 7, 8), (1, 4, 7, 5)),
    "no queries": ((2, 4, 0, 8), (2, 4, 7, 8), (2, 4, 7, 5)),
    "no keys": ((2, 4, 9, 8), (2, 4, 0, 8), (2, 4, 0, 5)),
    "no width": ((2, 4, 9, 0), (2, 4, 7, 0), (2, 4, 7, 5)),
}


@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES)
def test_shapes_are_those_of_torch(shapes, kernel_calls):
    tensors = normal(*shapes)
    out = sdpa(*tensors)
    assert kernel_calls == {"ours": 1, "torch": 0}
    right = functional.scaled_dot_product_attention(*tensors)
    torch.testing.assert_close(out, right, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("kind", ["bool", "float"])
def test_row_without_a_key_is_zero(kind):
    query, key, value = normal((1, 2, 3, 8), (1, 2, 4, 8), (1, 2, 4, 8))
    mask = torch.ones(3, 4, dtype=torch.bool)
    mask[1] = False
    if kind == "float":
        mask = torch.where(mask, 0.0, -torch.inf)
    out = sdpa(query, key, value, mask)
    assert not out[:, :, 1].any()
    assert_as_in_float64(out, query, key, value, mask)


def test_hidden_nan_has_no_influence():
    """As documented: torch's own function lets it through."""
    query, key, value = normal((1, 2, 3, 8), (1, 2, 4, 8), (1, 2, 4, 8))
    mask = torch.ones(3, 4, dtype=torch.bool)
    mask[:, 3] = False
    right = sdpa(query, key, value, mask)
    key[:, :, 3], value[:, :, 3] = torch.nan, torch.inf
    assert torch.equal(sdpa(query, key, value, mask), right)


# ---- memory -----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_axes_lie_as_those_of_the_query(dtype):
    (rows,) = normal((2, 30, 4, 16), dtype=dtype)
    heads = rows.transpose(1, 2)
    assert sdpa(heads, heads, heads).transpose(1, 2).is_contiguous()
    dense = heads.contiguous()
    assert sdpa(dense, dense, dense).is_contiguous()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_nothing_is_copied(dtype):
    from mha_fast.integrations.torch._arrays import as_array, as_tensor

    (x,) = normal((3, 5), dtype=dtype)
    array = as_array(x)
    back = as_tensor(array)
    assert array.ctypes.data == x.data_ptr() == back.data_ptr()
    assert back.dtype == dtype
    assert torch.equal(back, x)
    assert array.astype(np.float64).tolist() == x.double().tolist()


def test_a_negative_view_is_read_as_what_it_stands_for():
    z = torch.complex(*normal((1, 2, 9, 8), (1, 2, 9, 8))).conj().imag
    assert z.is_neg()
    torch.testing.assert_close(sdpa(z, z, z), sdpa(*[z.resolve_neg()] * 3), rtol=0, atol=0)


def test_threads_are_no_more_than_those_of_torch(monkeypatch):
    asked = []
    monkeypatch.setattr(
        _sdpa, "attention_of_arrays", lambda *args, **kw: asked.append(kw["num_threads"])
    )
    before = torch.get_num_threads()
    try:
        for n in (1, 2):
            torch.set_num_threads(n)
            sdpa(*normal((1, 2, 3, 8), (1, 2, 3, 8), (1, 2, 3, 8)))
    finally:
        torch.set_num_threads(before)
    assert asked == [1, min(2, mha_fast.get_num_threads())]


# ---- gradients --------------------------------------------------------------------------------


@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("is_causal", [False, True])
def test_gradcheck(kv_heads, is_causal):
    tensors = normal(
        (2, 4, 5, 6), (2, kv_heads, 7, 6), (2, kv_heads, 7, 3), (1, 4, 1, 7),
        dtype=torch.float64, requires_grad=True,
    )  # fmt: skip

    def function(*args):
        return sdpa(*args, is_causal=is_causal, enable_gqa=kv_heads < 4)

    assert torch.autograd.gradcheck(function, tensors)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("wanted", [(0,), (1,), (2,), (3,), (0, 1, 2, 3)])
def test_gradients_are_those_of_torch(dtype, wanted):
    shapes = (2, 4, 70, 24), (2, 4, 90, 24), (2, 4, 90, 8), (4, 70, 90)
    (grad,) = normal((2, 4, 70, 8), seed=5, dtype=dtype)

    def gradients(function, dtype):
        tensors = [x.to(dtype) for x in normal(*shapes, dtype=grad.dtype)]
        for i in wanted:
            tensors[i].requires_grad_()
        function(*tensors).backward(grad.to(dtype))
        return [tensors[i].grad for i in wanted]

    ours = gradients(sdpa, dtype)
    torchs = gradients(functional.scaled_dot_product_attention, dtype)
    right = gradients(functional.scaled_dot_product_attention, torch.float64)
    for x, same, wide in zip(ours, torchs, right, strict=True):
        assert x.dtype == dtype
        error, theirs = (float((y.double() - wide).abs().max()) for y in (x, same))
        assert error <= 2 * theirs + 8 * torch.finfo(dtype).eps * float(wide.abs().max())


def test_second_gradient_says_what_to_use():
    tensors = normal(*[(1, 2, 3, 4)] * 3, requires_grad=True)
    (first,) = torch.autograd.grad(sdpa(*tensors).sum(), tensors[0], create_graph=True)
    with pytest.raises(NotImplementedError, match="MATH"):
        first.sum().backward()


def test_dropout_follows_the_seed_of_torch():
    query, key, value = normal((1, 4, 50, 16), (1, 4, 60, 16), (1, 4, 60, 60))
    results = []
    for seed in (3, 3, 4):
        torch.manual_seed(seed)
        results.append(sdpa(query, key, value, dropout_p=0.4))
    assert torch.equal(results[0], results[1])
    assert not torch.equal(results[0], results[2])
    # With the identity for values the output is the weights: some are 0, the others are larger.
    identity = torch.eye(60).expand(1, 4, 60, 60)
    weights = sdpa(query, key, identity)
    dropped = sdpa(query, key, identity, dropout_p=0.4)
    kept = dropped != 0
    torch.testing.assert_close(dropped[kept], weights[kept] / 0.6, rtol=1e-5, atol=1e-7)
    # Five standard deviations of the share of 12,000 weights.
    assert abs(float(kept.float().mean()) - 0.6) < 5 * (0.24 / kept.numel()) ** 0.5


def test_gradient_of_dropout_drops_the_same_weights():
    query, key, value = normal(*[(1, 2, 5, 4)] * 3, dtype=torch.float64, requires_grad=True)

    def function(*args):
        torch.manual_seed(1)
        return sdpa(*args, dropout_p=0.3)

    assert torch.autograd.gradcheck(function, (query, key, value))


# ---- registry, compiler, transforms -----------------------------------------------------------


def operator_arguments(layout, requires_grad):
    query, key, value, mask = normal(
        (2, 4, 9, 8), (2, 2, 7, 8), (2, 2, 7, 5), (4, 1, 7), dtype=torch.float64
    )
    if layout == "rows first":
        query, key, value = (
            x.transpose(1, 2).contiguous().transpose(1, 2) for x in (query, key, value)
        )
    sinks, slopes, gates = normal((4,), (4,), (4,), dtype=torch.float64, seed=1)
    operands = [query, key, value, mask, sinks, slopes, gates]
    for x in operands if requires_grad else ():
        x.requires_grad_()
    operands += [torch.tensor([7, 3]), torch.tensor(1), None]
    return (*operands, True, 3, None, False, 0.3, 5.0, 0.0)


@pytest.mark.parametrize("layout", ["heads first", "rows first"])
@pytest.mark.parametrize("requires_grad", [False, True])
def test_opcheck(layout, requires_grad):
    torch.library.opcheck(
        torch.ops.mha_fast.attention.default, operator_arguments(layout, requires_grad)
    )


def test_opcheck_of_the_gradient():
    forward = operator_arguments("heads first", requires_grad=False)
    out, lse = torch.ops.mha_fast.attention(*forward)
    args = (out, lse, *forward, out, lse, ["query", "attn_mask", "sinks", "head_mask"])
    torch.library.opcheck(torch.ops.mha_fast.attention_backward.default, args)


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiles_as_one_graph(dynamic):
    def function(query, key, value, mask):
        return sdpa(query, key, value, mask, enable_gqa=True) * 2

    compiled = torch.compile(function, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for n_query in (9, 12):
        tensors = normal(
            (2, 4, n_query, 8), (2, 2, 7, 8), (2, 2, 7, 5), (n_query, 7), requires_grad=True
        )
        out = compiled(*tensors)
        right = function(*tensors)
        assert torch.equal(out, right)
        expected = torch.autograd.grad(right.sum(), tensors)
        for x, y in zip(torch.autograd.grad(out.sum(), tensors), expected, strict=True):
            assert torch.equal(x, y)


def test_exports():
    class Model(torch.nn.Module):
        def forward(self, x):
            return sdpa(x, x, x, is_causal=True)

    (x,) = normal((1, 2, 9, 8))
    program = torch.export.export(Model(), (x,))
    assert "mha_fast.attention" in str(program.graph)
    assert torch.equal(program.module()(x), sdpa(x, x, x, is_causal=True))


@pytest.mark.parametrize("axis", [0, 2])
def test_vmap(axis):
    query, key = normal((3, 2, 4, 9, 8), (2, 4, 7, 8))
    mask = normal((3, 9, 7), seed=2)[0] > 0
    moved = query.movedim(0, axis)
    out = torch.vmap(lambda x, m: sdpa(x, key, key, m), in_dims=(axis, 0))(moved, mask)
    right = torch.stack([sdpa(x, key, key, m) for x, m in zip(query, mask, strict=True)])
    torch.testing.assert_close(out, right, rtol=0, atol=0)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_functional_gradients_are_torchs(kernel_calls):
    (x,) = normal((3, 2, 4, 9, 8))
    gradient = torch.func.vmap(torch.func.grad(lambda y: sdpa(y, y, y).square().sum()))(x)
    y = x.clone().requires_grad_()
    functional.scaled_dot_product_attention(y, y, y).square().sum().backward()
    torch.testing.assert_close(gradient, y.grad, rtol=1e-4, atol=1e-5)
    assert kernel_calls["ours"] == 0


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_forward_derivatives_are_torchs(kernel_calls):
    (x,) = normal((1, 2, 5, 4), dtype=torch.float64)
    with sdpa_kernel(SDPBackend.MATH):
        _, tangent = torch.func.jvp(lambda y: sdpa(y, y, y), (x,), (x,))
    h = 1e-6
    finite = (sdpa(*[x * (1 + h)] * 3) - sdpa(*[x * (1 - h)] * 3)) / (2 * h)
    torch.testing.assert_close(tangent, finite, rtol=1e-7, atol=1e-8)
    assert kernel_calls["torch"] == 1


def test_autocast(kernel_calls):
    query, key, value, mask = normal((1, 2, 9, 8), (1, 2, 7, 8), (1, 2, 7, 8), (9, 7))
    with torch.autocast("cpu", torch.bfloat16):
        out = sdpa(query, key, value, mask)
        theirs = functional.scaled_dot_product_attention(query, key, value, mask)
    assert out.dtype == theirs.dtype == torch.bfloat16
    assert kernel_calls["ours"] == 1
    assert torch.equal(out, sdpa(*(x.bfloat16() for x in (query, key, value, mask))))


# ---- what goes to torch -----------------------------------------------------------------------


def test_other_devices_go_to_torch(kernel_calls):
    x = torch.empty(1, 2, 3, 4, device="meta")
    assert sdpa(x, x, x).device.type == "meta"
    assert kernel_calls == {"ours": 0, "torch": 1}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_go_to_torch(kernel_calls):
    parts = normal((3, 2, 8), (5, 2, 8))
    x = torch.nested.nested_tensor(parts, layout=torch.jagged).transpose(1, 2)
    out = sdpa(x, x, x).transpose(1, 2)
    assert kernel_calls == {"ours": 0, "torch": 1}
    for part, result in zip(parts, out.unbind(), strict=True):
        heads = part.transpose(0, 1)
        right = sdpa(heads, heads, heads).transpose(0, 1)
        torch.testing.assert_close(result, right, rtol=1e-5, atol=1e-6)


REFUSED = {
    "mask of another dtype": lambda q, k: (q, k, k, torch.zeros(3, 4, dtype=torch.float16)),
    "mask that does not fit": lambda q, k: (q, k, k, torch.zeros(3, 5)),
    "heads that do not fit": lambda q, k: (q, k[:, :2], k[:, :2]),
    "mixed dtypes": lambda q, k: (q, k.double(), k),
    "integers": lambda q, k: (q.int(), k.int(), k.int()),
    "widths": lambda q, k: (q, k[..., :4], k),
    "dropout": lambda q, k: (q, k, k, None, 1.5),
}


@pytest.mark.parametrize("call", REFUSED.values(), ids=REFUSED)
def test_what_torch_refuses_is_refused_by_torch(call, kernel_calls):
    args = call(*normal((1, 4, 3, 8), (1, 4, 4, 8)))
    with pytest.raises((RuntimeError, IndexError, ValueError, TypeError)) as theirs:
        functional.scaled_dot_product_attention(*args)
    with pytest.raises(type(theirs.value)) as ours:
        sdpa(*args)
    assert str(ours.value).splitlines()[0] == str(theirs.value).splitlines()[0]
    assert kernel_calls["ours"] == 0


def test_subclasses_with_their_own_function_keep_it(kernel_calls):
    class Mine(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            return (
                "mine"
                if "scaled" in func.__name__
                else super().__torch_function__(func, types, args, kwargs)
            )

    x = torch.ones(1, 2, 3, 4).as_subclass(Mine)
    assert sdpa(x, x, x) == "mine"
    assert kernel_calls["ours"] == 0


# ---- in the place of torch's function ---------------------------------------------------------


def test_replaced_within_the_context_only(monkeypatch):
    calls = []
    monkeypatch.setattr(_sdpa, "through_operator", _listing(calls, _sdpa.through_operator))
    torchs_own = functional.scaled_dot_product_attention
    layer = torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    (x,) = normal((2, 9, 16))
    layer.eval()
    x.requires_grad_()  # else the layer takes a path of its own
    right = layer(x)
    with mha_fast.torch.replaced_sdpa():
        out = layer(x)
    assert functional.scaled_dot_product_attention is torchs_own
    assert len(calls) == 1
    torch.testing.assert_close(out, right, rtol=1e-5, atol=1e-5)


def _listing(calls, function):
    def call(*args):
        calls.append(args)
        return function(*args)

    return call


def test_replaced_again_after_an_error():
    with pytest.raises(ZeroDivisionError), mha_fast.torch.replaced_sdpa():
        raise ZeroDivisionError
    assert functional.scaled_dot_product_attention is not sdpa


# ---- all options ------------------------------------------------------------------------------


def test_attention_of_tensors_takes_every_option():
    query, key, value, sinks, slopes, gates = normal(
        (2, 4, 9, 8), (2, 2, 30, 8), (2, 2, 30, 5), (4,), (4,), (4,)
    )
    tensors = {
        "sinks": sinks,
        "alibi_slopes": slopes,
        "head_mask": gates,
        "kv_lengths": torch.tensor([30, 12]),
    }
    numbers = {
        "is_causal": True,
        "window": (6, None),
        "query_offset": "end",
        "scale": 0.2,
        "softcap": 3.0,
    }
    out, lse = mha_fast.torch.attention(query, key, value, return_lse=True, **tensors, **numbers)
    arrays = {name: x.numpy() for name, x in tensors.items()}
    right = mha_fast.attention(
        query.numpy(), key.numpy(), value.numpy(), return_lse=True, **arrays, **numbers
    )
    np.testing.assert_array_equal(out.numpy(), right[0])
    np.testing.assert_array_equal(lse.numpy(), right[1])
    direct = mha_fast.torch.attention(query, key, value, **tensors, **numbers)
    assert torch.equal(direct, out)


def test_attention_of_tensors_has_all_gradients():
    tensors = normal(
        (2, 4, 5, 6), (2, 2, 7, 6), (2, 2, 7, 3), (4, 1, 7), (4,), (4,), (4,),
        dtype=torch.float64, requires_grad=True,
    )  # fmt: skip

    def function(query, key, value, mask, sinks, slopes, gates):
        return mha_fast.torch.attention(
            query, key, value, mask, sinks=sinks, alibi_slopes=slopes, head_mask=gates,
            is_causal=True, query_offset=3, softcap=2.0, return_lse=True,
        )  # fmt: skip

    assert torch.autograd.gradcheck(function, tensors)


def test_attention_of_tensors_names_what_does_not_fit():
    (x,) = normal((1, 2, 3, 4))
    with pytest.raises(TypeError, match=r"key is of type ndarray; expected a tensor"):
        mha_fast.torch.attention(x, x.numpy(), x)
    with pytest.raises(TypeError, match=r"value is a tensor .* on meta; expected a dense one"):
        mha_fast.torch.attention(x, x, x.to("meta"))
    with pytest.raises(TypeError, match=r"query has dtype torch.int32; expected one of"):
        mha_fast.torch.attention(x.int(), x, x)
    with pytest.raises(ValueError, match=r"query_offset is 'start'"):
        mha_fast.torch.attention(x, x, x, query_offset="start")


@pytest.mark.parametrize("first", ["torch", "mha_fast"])
def test_one_pool_of_threads(first, tmp_path):
    """Two OpenMP runtimes in one process would spin against each other."""
    code = {"torch": "import torch, mha_fast", "mha_fast": "import mha_fast, torch"}[first]
    code += "\nfrom mha_fast.config import config_info\nprint(*config_info()['openmp_runtimes'])"
    done = run_python(code, tmp_path)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.split()) == 1
