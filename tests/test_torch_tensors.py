"""torch tensors as arguments, and its modules as sources of weights; torch itself is never imported."""

import subprocess
import sys

import numpy as np
import pytest

import mha_fast
from mha_fast import MultiHeadAttention

torch = pytest.importorskip("torch", reason="these tests pass torch tensors")
ml_dtypes = pytest.importorskip("ml_dtypes", reason="bfloat16 needs ml_dtypes")
nn = torch.nn


def tensor(*shape, dtype=torch.bfloat16, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def bits(x):
    return x.view(torch.int16).numpy().view(ml_dtypes.bfloat16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_tensors_give_the_bits_of_arrays(dtype):
    x = tensor(2, 4, 70, 32, dtype=dtype).transpose(1, 2).contiguous().transpose(1, 2)
    array = bits(x) if dtype == torch.bfloat16 else x.numpy()

    found = mha_fast.attention(x, x, x, is_causal=True)

    assert found.dtype == array.dtype
    expected = mha_fast.attention(array, array, array, is_causal=True)
    assert found.tobytes() == expected.tobytes()


def test_a_bfloat16_tensor_is_not_copied():
    x = tensor(2, 4, 7, 32)

    seen = mha_fast._checks.array("query", x)

    assert np.shares_memory(seen, x.view(torch.int16).numpy())
    assert seen.dtype == ml_dtypes.bfloat16


def test_a_bfloat16_tensor_as_mask_and_in_a_cache():
    x = tensor(1, 2, 5, 16)
    cache = mha_fast.KVCache(1, 2, 16, dtype="bfloat16")
    cache.append(x, x)

    out = cache.attend(x, tensor(5, 5, seed=1))

    expected = mha_fast.attention(*[bits(x)] * 3, bits(tensor(5, 5, seed=1)), is_causal=True)
    assert out.tobytes() == expected.tobytes()


def test_without_ml_dtypes_its_name_is_told(monkeypatch):
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    x = tensor(2, 4, 8)

    with pytest.raises(
        TypeError, match="^query is a torch tensor of bfloat16.*pip install ml_dtypes"
    ):
        mha_fast.attention(x, x, x)


def test_a_gradient_is_not_lost_without_a_word():
    x = tensor(2, 4, 8, dtype=torch.float32)
    parameter = nn.Parameter(x)

    with pytest.raises(
        TypeError, match=r"^key is a torch tensor that requires grad.*key\.detach\(\)$"
    ):
        mha_fast.attention(x, parameter, x)


def test_other_tensors_are_named():
    x = tensor(2, 4, 8, dtype=torch.float32)
    with pytest.raises(TypeError, match=r"^value is a torch tensor on meta; pass value\.cpu\(\)$"):
        mha_fast.attention(x, x, x.to("meta"))
    with pytest.raises(TypeError, match="^query is a torch tensor that NumPy cannot see"):
        mha_fast.attention(x.to_sparse(), x, x)


# ---- weights ------------------------------------------------------------------------------------


@pytest.fixture
def module():
    torch.manual_seed(0)
    return nn.MultiheadAttention(32, 4, batch_first=True).eval()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_whole_module_is_taken_with_its_heads(module, dtype):
    module = module.to(dtype)
    layer = MultiHeadAttention.from_torch(module)

    assert layer.num_heads == 4 and str(layer.dtype) == str(dtype).removeprefix("torch.")
    weight = module.in_proj_weight.detach()
    right = bits(weight) if dtype == torch.bfloat16 else weight.numpy()
    assert layer.state_dict()["in_proj_weight"].tobytes() == right.tobytes()


def test_the_result_of_a_module_is_that_of_the_layer(module):
    x = tensor(2, 5, 32, dtype=torch.float32)
    expected, _ = module(x, x, x, need_weights=False)

    found = MultiHeadAttention.from_torch(module)(x)

    np.testing.assert_allclose(found, expected.detach().numpy(), rtol=0, atol=1e-6)


def test_parameters_that_require_grad_are_copied(module):
    named = dict(module.named_parameters())
    assert all(x.requires_grad for x in named.values())

    layer = MultiHeadAttention.from_torch(named, 4)
    layer.W_Q[...] = 0

    assert module.in_proj_weight.detach().abs().min() > 0


def test_bfloat16_tensors_in_the_style_of_llama():
    shapes = {"q_proj": (64, 64), "k_proj": (16, 64), "v_proj": (16, 64), "o_proj": (64, 64)}
    tensors = {f"{name}.weight": tensor(*shape) for name, shape in shapes.items()}

    layer = MultiHeadAttention.from_llama(tensors, 8)
    wide = MultiHeadAttention.from_llama(tensors, 8, dtype=np.float32)

    assert layer.dtype == ml_dtypes.bfloat16 and wide.dtype == np.float32
    np.testing.assert_array_equal(layer.W_Q.astype(np.float32), wide.W_Q)
    assert layer.num_kv_heads == 2


def test_a_module_with_its_batch_second_says_what_to_pass():
    module = nn.MultiheadAttention(32, 4)  # torch's default

    with pytest.raises(ValueError, match=r"batch_first=False.*pass tensors\.state_dict\(\)"):
        MultiHeadAttention.from_torch(module)
    assert MultiHeadAttention.from_torch(module.state_dict(), 4).num_heads == 4


def test_a_module_with_more_than_the_layer_has_is_refused():
    module = nn.MultiheadAttention(32, 4, batch_first=True, add_zero_attn=True)

    with pytest.raises(ValueError, match="add_zero_attn=True"):
        MultiHeadAttention.from_torch(module)


def test_what_is_no_mapping_says_what_to_pass(module, tmp_path):
    for path in ("model.safetensors", tmp_path / "model.pt"):
        with pytest.raises(
            TypeError, match=r"tensors is the path .*load_file\(path\).*torch\.load"
        ):
            MultiHeadAttention.from_torch(path, 4)
    with pytest.raises(TypeError, match="tensors is of type list; expected a mapping"):
        MultiHeadAttention.from_torch([module.in_proj_weight], 4)
    with pytest.raises(TypeError, match="num_heads is None; expected an int"):
        MultiHeadAttention.from_torch(module.state_dict())


def test_a_missing_prefix_is_offered():
    model = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(32, 4, batch_first=True), 2, enable_nested_tensor=False
    )

    with pytest.raises(
        ValueError, match="with the prefix 'layers.0.self_attn', 'layers.1.self_attn'"
    ):
        MultiHeadAttention.from_torch(model.state_dict(), 4)
    layer = MultiHeadAttention.from_torch(model.state_dict(), 4, prefix="layers.1.self_attn")
    assert layer.embed_dim == 32


def test_torch_is_never_imported(tmp_path):
    script = (
        "import sys, numpy as np, mha_fast\n"
        "x = np.ones((1, 4, 8), np.float32)\n"
        "mha_fast.attention(x, x, x.tolist() and x)\n"
        "mha_fast.MultiHeadAttention(8, 2)(x[:, :, :8])\n"
        "mha_fast._checks.array('x', [1.0])\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script], cwd=tmp_path, check=True)
