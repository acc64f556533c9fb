"""MultiHeadAttention: the formula head by head, the weights of others, caches, pruning."""

import copy
import importlib.util
import inspect
import pickle
import tracemalloc
from itertools import pairwise

import numpy as np
import pytest
from _dtypes import ALL_DTYPES, DTYPES_16
from _support import assert_same_bits, run_python

import mha_fast
from mha_fast import KVCache, reference
from mha_fast.layer import MultiHeadAttention
from mha_fast.layer import _multi_head as layer_module

F32, F64 = np.float32, np.float64

# One for each way the matrices can be stacked, and each size that need not follow from another.
LAYERS = {
    "plain": {},
    "grouped": {"num_kv_heads": 2},
    "one key/value head": {"num_kv_heads": 1},
    "wide values": {"head_width": 5, "value_width": 7},
    "narrow values": {"value_width": 3},
    "other key and value": {"kdim": 10, "vdim": 10},
    "other value": {"vdim": 14},
    "other key": {"kdim": 14},
    "three widths": {"kdim": 10, "vdim": 14, "num_kv_heads": 2},
    "no bias": {"bias": False},
    "output bias alone": {"bias": False, "out_bias": True},
    "input bias alone": {"bias": True, "out_bias": False},
}
OPTIONS = {
    "mask": {"attn_mask": np.random.default_rng(7).random((2, 1, 9, 13)) < 0.7},
    "causal at the end": {"is_causal": True, "query_offset": "end"},
    "window": {"window": (2, 1), "query_offset": np.array([1, 3])},
    "lengths": {"kv_lengths": np.array([4, 13])},
    "scale": {"scale": 0.9},
    "softcap": {"softcap": 0.5},
    "ALiBi": {"alibi_slopes": np.array([0.1, 0.2, 0.4, 0.8])},
    "sinks": {"sinks": np.array([-1.0, 0.0, 1.0, 2.0])},
    "gates": {"head_mask": np.array([1.0, 0.0, 0.5, 2.0])},
}


def _layer(dtype=F64, embed_dim=12, num_heads=4, **sizes):
    """A layer with biases that are not 0."""
    layer = MultiHeadAttention(embed_dim, num_heads, dtype=dtype, seed=1, **sizes)
    rng = np.random.default_rng(2)
    for bias in (layer.b_Q, layer.b_K, layer.b_V, layer.b_O):
        if bias is not None:
            bias[...] = rng.normal(0, 0.3, bias.shape)
    return layer


def _tokens(shape, dtype=F64, seed=3):
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def _formula(layer, query, key=None, value=None, dtype=F64, **options):
    """The layer as it is defined, one head after the other, in the given dtype: (out, lse)."""
    key = query if key is None else key
    value = key if value is None else value

    def heads(tokens, weights, biases):
        biases = np.zeros(len(weights), dtype) if biases is None else biases
        one_by_one = [
            tokens.astype(dtype) @ w.astype(dtype) + np.asarray(b).astype(dtype)
            for w, b in zip(weights, biases, strict=True)
        ]
        return np.stack(one_by_one, axis=-3)

    out, lse = reference._attention_in(
        dtype,
        heads(query, layer.W_Q, layer.b_Q),
        heads(key, layer.W_K, layer.b_K),
        heads(value, layer.W_V, layer.b_V),
        options.pop("attn_mask", None),
        **options,
    )
    projected = sum(out[..., h, :, :] @ layer.W_O[h].astype(dtype) for h in range(layer.num_heads))
    if layer.b_O is not None:
        projected = projected + layer.b_O.astype(dtype)
    return projected, lse


def _assert_close(result, right, same):
    """At most twice the error of `same`, the formula in the same dtype, and a few last bits."""
    assert result.dtype == same.dtype
    assert result.shape == right.shape
    limit = 2 * np.abs(same - right).max() + 8 * np.finfo(same.dtype).eps * np.abs(right).max()
    np.testing.assert_allclose(result, right, rtol=0, atol=limit)


def _assert_is_formula(layer, *inputs, **options):
    out, lse = layer(*inputs, **options, return_lse=True)
    right = _formula(layer, *inputs, **options)
    same = _formula(layer, *inputs, **options, dtype=layer.dtype.type)
    _assert_close(out, right[0], same[0])
    _assert_close(lse, right[1], same[1])
    assert_same_bits(layer(*inputs, **options), out)


# ---- the formula ------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [F32, F64])
@pytest.mark.parametrize("sizes", LAYERS.values(), ids=LAYERS)
def test_cross_attention_is_the_formula(sizes, dtype):
    layer = _layer(dtype, **sizes)
    query = _tokens((2, 9, 12), dtype)
    key, value = _tokens((2, 13, layer.kdim), dtype, 4), _tokens((2, 13, layer.vdim), dtype, 5)
    _assert_is_formula(layer, query, key, value)
    if layer.kdim == layer.vdim:
        _assert_is_formula(layer, query, key)
    if layer.kdim == 12:
        _assert_is_formula(layer, key, key, value)  # one input for two matrices, one for the third


@pytest.mark.parametrize("dtype", [F32, F64])
@pytest.mark.parametrize(
    "sizes", [x for x in LAYERS.values() if not {"kdim", "vdim"} & x.keys()], ids=str
)
def test_self_attention_is_the_formula(sizes, dtype):
    layer, tokens = _layer(dtype, **sizes), _tokens((2, 9, 12), dtype)
    _assert_is_formula(layer, tokens)
    assert_same_bits(layer(tokens, tokens, tokens), layer(tokens))
    _assert_is_formula(layer, tokens, tokens, _tokens((2, 9, 12), dtype, 4))


@pytest.mark.parametrize("sizes", [{}, {"num_kv_heads": 2, "kdim": 10}], ids=["plain", "other"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_options_are_those_of_attention(options, sizes):
    layer = _layer(F32, **sizes)
    _assert_is_formula(
        layer, _tokens((2, 9, 12), F32), _tokens((2, 13, layer.kdim), F32, 4),
        _tokens((2, 13, 12), F32, 5), **options,
    )  # fmt: skip


@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize(
    "wrong",
    [{"precision": "low"}, {"num_threads": 0}, {"window": (-1, 0)}, {"sinks": [0.0]}],
    ids=str,
)
def test_options_are_checked_by_attention(wrong, cached):
    layer = _layer()
    with pytest.raises(ValueError, match=next(iter(wrong))):
        layer(_tokens((2, 9, 12)), cache=layer.new_cache(2) if cached else None, **wrong)


def test_padding_has_no_influence_even_if_it_holds_nan():
    layer, query, key = _layer(F32), _tokens((2, 9, 12), F32), _tokens((2, 13, 12), F32, 4)
    right = layer(query, key, kv_lengths=[4, 13])
    key[0, 4:] = np.nan
    assert_same_bits(layer(query, key, kv_lengths=[4, 13]), right)


def test_every_option_of_attention_is_taken():
    own = inspect.signature(MultiHeadAttention.__call__).parameters
    missing = set(inspect.signature(mha_fast.attention).parameters) - set(own)
    assert missing == {"dropout_p", "dropout_seed"}  # which are for training: forward_saving
    assert missing <= set(inspect.signature(MultiHeadAttention.forward_saving).parameters)


@pytest.mark.parametrize(
    ("query", "key"), [((9, 12), (13, 12)), ((3, 1, 9, 12), (2, 13, 12)), ((0, 9, 12), (0, 2, 12))],
    ids=["one sequence", "broadcast", "no sequence"],
)  # fmt: skip
def test_batch_axes_broadcast(query, key):
    layer, query, key = _layer(), _tokens(query), _tokens(key, seed=4)
    out, lse = layer(query, key, return_lse=True)
    shape = np.broadcast_shapes(query.shape[:-2], key.shape[:-2])
    assert out.shape == (*shape, query.shape[-2], 12)
    assert lse.shape == (*shape, 4, query.shape[-2])
    if out.size:
        np.testing.assert_allclose(out, _formula(layer, query, key)[0], rtol=0, atol=1e-14)


@pytest.mark.parametrize("dtype", DTYPES_16)
def test_16_bits_round_where_the_formula_would(dtype):
    """Error against the formula in float32 with a rounding after each of its three steps."""
    layer = _layer(dtype, embed_dim=600, num_heads=8, num_kv_heads=4, head_width=75)
    tokens = _tokens((2, 40, 600), dtype)
    wide = _layer(F32, embed_dim=600, num_heads=8, num_kv_heads=4, head_width=75)
    for mine, theirs in zip(wide._parameters.arrays(), layer._parameters.arrays(), strict=True):
        mine[...] = theirs
    heads = [wide.project_query(tokens.astype(F32)), *wide.project_key_value(tokens.astype(F32))]
    rounded = [x.astype(dtype).astype(F32) for x in heads]
    joined = mha_fast.attention(*rounded).astype(dtype).astype(F32)
    same = wide.project_output(joined).astype(dtype).astype(F64)
    right = _formula(layer, tokens)[0]

    def rms(x):
        return np.sqrt(np.mean(np.square(x)))

    out = layer(tokens)
    assert out.dtype == dtype
    assert rms(out.astype(F64) - right) <= 1.05 * rms(same - right)


@pytest.mark.parametrize("dtype", ALL_DTYPES)
def test_out_receives_the_result(dtype):
    layer, tokens = _layer(dtype), _tokens((2, 9, 12), dtype)
    right = layer(tokens)
    whole, wide = np.empty((2, 9, 12), dtype), np.empty((2, 9, 24), dtype)
    for out in (whole, wide[..., ::2], np.empty((9, 2, 12), dtype).swapaxes(0, 1)):
        assert layer(tokens, out=out) is out
        assert_same_bits(out, right)
    assert layer(tokens, out=tokens) is tokens
    assert_same_bits(tokens, right)


# ---- memory -----------------------------------------------------------------------------------


def _spy(monkeypatch):
    """Let the layer call attention() as ever, and keep what it passes."""
    calls = []

    def attention(query, key, value, *args, **options):
        calls.append((query, key, value, options["out"]))
        return mha_fast.attention(query, key, value, *args, **options)

    monkeypatch.setattr(layer_module, "attention", attention)
    return calls


def test_self_attention_reads_the_heads_where_one_product_wrote_them(monkeypatch):
    calls, layer = _spy(monkeypatch), _layer(F32, num_kv_heads=2, value_width=5)
    layer(_tokens((2, 9, 12), F32))
    [(query, key, value, out)] = calls
    row = 4 * (4 * 3 + 2 * 3 + 2 * 5)  # bytes of all heads of a token
    assert [x.strides[-2] for x in (query, key, value)] == [row] * 3
    first = query.ctypes.data
    assert [x.ctypes.data - first for x in (key, value)] == [4 * 4 * 3, 4 * (4 * 3 + 2 * 3)]
    assert [x.strides[-3] for x in (query, key, value, out)] == [12, 12, 20, 20]
    assert all(mha_fast._checks.readable(x) is x for x in (query, key, value))
    assert out.strides[-2] == 4 * 4 * 5


def test_key_and_value_of_one_input_share_a_product(monkeypatch):
    calls, layer = _spy(monkeypatch), _layer(F32, kdim=10, vdim=10)
    layer(_tokens((2, 9, 12), F32), _tokens((2, 13, 10), F32))
    [(query, key, value, _)] = calls
    assert query.strides[-2] == 4 * 12
    assert key.strides[-2] == value.strides[-2] == 4 * 24
    assert value.ctypes.data - key.ctypes.data == 4 * 12


@pytest.mark.parametrize("dtype", [F32, F64])
def test_a_call_makes_the_heads_what_is_gathered_and_the_result_and_no_more(dtype):
    layer, tokens = _layer(dtype, embed_dim=64, num_heads=4), _tokens((2, 1000, 64), dtype)
    layer(tokens, num_threads=1)
    tracemalloc.start()
    try:
        layer(tokens, num_threads=1)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak <= (3 + 1 + 1) * tokens.nbytes + tokens.nbytes / 4  # the last for buffers of NumPy


def test_per_head_weights_are_views_that_the_layer_computes_with():
    layer, tokens = _layer(num_kv_heads=2, value_width=5), _tokens((2, 9, 12))
    before = layer(tokens)
    for name in ("W_Q", "W_K", "W_V", "W_O", "b_Q", "b_K", "b_V", "b_O"):
        view = getattr(layer, name)
        view *= 1.5
        assert np.shares_memory(view, getattr(layer, name))
        after = layer(tokens)
        assert not np.array_equal(after, before)
        np.testing.assert_allclose(after, _formula(layer, tokens)[0], rtol=0, atol=1e-13)
        before = after
    assert [layer.W_Q.shape, layer.W_K.shape] == [(4, 12, 3), (2, 12, 3)]
    assert [layer.W_V.shape, layer.W_O.shape] == [(2, 12, 5), (4, 5, 12)]


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_a_copy_has_weights_of_its_own(duplicate):
    layer, tokens = _layer(kdim=12), _tokens((2, 9, 12))
    twin, before = duplicate(layer), layer(tokens)
    assert_same_bits(twin(tokens), before)
    twin.W_Q[...] *= 2
    twin.W_V[...] *= 2
    assert_same_bits(layer(tokens), before)
    np.testing.assert_allclose(twin(tokens), _formula(twin, tokens)[0], rtol=0, atol=1e-13)


# ---- what it says of itself -------------------------------------------------------------------


def test_repr_makes_the_layer_again():
    layer = _layer(F32, num_kv_heads=2, value_width=5, kdim=10, vdim=14, bias=False, out_bias=True)
    text = repr(layer)
    assert "num_kv_heads=2" in text
    assert repr(eval(text, {"MultiHeadAttention": MultiHeadAttention, "float32": F32})) == text


@pytest.mark.parametrize("sizes", LAYERS.values(), ids=LAYERS)
def test_parameters_are_counted(sizes):
    layer = _layer(F32, **sizes)
    views = (layer.W_Q, layer.W_K, layer.W_V, layer.W_O, layer.b_Q, layer.b_K, layer.b_V, layer.b_O)
    assert layer.n_parameter == sum(x.size for x in views if x is not None)
    assert layer.nbytes == 4 * layer.n_parameter


# ---- initialisation ---------------------------------------------------------------------------

DEVIATIONS = {
    "xavier_uniform": lambda n_in, n_out: np.sqrt(2 / (n_in + n_out)),
    "xavier_normal": lambda n_in, n_out: np.sqrt(2 / (n_in + n_out)),
    "lecun_normal": lambda n_in, n_out: np.sqrt(1 / n_in),
    "gpt_normal": lambda n_in, n_out: 0.02,
    "zeros": lambda n_in, n_out: 0,
}


@pytest.mark.parametrize("init", DEVIATIONS)
def test_weights_are_drawn_as_named(init):
    layer = MultiHeadAttention(
        120, 4, num_kv_heads=2, value_width=90, kdim=100, init=init, seed=0, dtype=F64
    )
    in_and_out = {"W_Q": (120, 120), "W_K": (100, 60), "W_V": (120, 180), "W_O": (360, 120)}
    for name, (n_in, n_out) in in_and_out.items():
        weights, deviation = getattr(layer, name), DEVIATIONS[init](n_in, n_out)
        n = weights.size
        assert n == n_in * n_out
        # Five standard errors: of the mean, and of the deviation of normal numbers.
        assert abs(weights.mean()) <= 5 * deviation / np.sqrt(n)
        assert abs(weights.std() - deviation) <= 5 * deviation / np.sqrt(2 * n)
        largest = np.abs(weights).max()
        if init == "xavier_uniform":
            assert 0.999 * np.sqrt(3) * deviation <= largest <= np.sqrt(3) * deviation
        else:
            assert largest >= 3 * deviation  # the normal has tails
    assert not layer.b_Q.any() and not layer.b_O.any()


def test_seed_decides_the_weights():
    def weights(seed, dtype=F32):
        return MultiHeadAttention(12, 4, seed=seed, dtype=dtype).W_Q

    assert_same_bits(weights(5), weights(5))
    assert_same_bits(weights(5, F64).astype(F32), weights(5))
    assert_same_bits(weights(np.random.default_rng(5)), weights(5))
    assert not np.array_equal(weights(5), weights(6))
    assert not np.array_equal(weights(None), weights(None))


# ---- the weights of others --------------------------------------------------------------------

TORCH_CASES = {
    "plain": {"bias": True},
    "no bias": {"bias": False},
    "three widths": {"bias": True, "kdim": 40, "vdim": 24},
    "causal": {"bias": True},
    "padded": {"bias": True},
}

# torch brings an OpenMP runtime of its own, so it gets a process of its own.
_RUN_TORCH = """
import numpy as np, torch

torch.manual_seed(0)
for name, options in CASES.items():
    layer = torch.nn.MultiheadAttention(64, 8, batch_first=True, **options)
    for parameter in layer.parameters():
        if parameter.ndim == 1:
            torch.nn.init.normal_(parameter, 0, 0.3)
    key_width, value_width = options.get("kdim", 64), options.get("vdim", 64)
    query = torch.randn(2, 33, 64)
    key, value = torch.randn(2, 33, key_width), torch.randn(2, 33, value_width)
    if name in ("causal", "padded"):
        key = value = query
    mask = torch.triu(torch.ones(33, 33, dtype=torch.bool), 1) if name == "causal" else None
    padding = torch.arange(33) >= torch.tensor([[33], [20]]) if name == "padded" else None
    with torch.no_grad():
        out, _ = layer(
            query, key, value, attn_mask=mask, key_padding_mask=padding, need_weights=False
        )
    tensors = {"layer." + key: x.numpy() for key, x in layer.state_dict().items()}
    np.savez(
        name + ".npz", query=query.numpy(), key=key.numpy(), value=value.numpy(), out=out.numpy(),
        **tensors,
    )
"""


@pytest.fixture(scope="module")
def torch_results(tmp_path_factory):
    """State dict, inputs and output of torch.nn.MultiheadAttention, by case."""
    if importlib.util.find_spec("torch") is None:
        pytest.skip("torch is not installed")
    folder = tmp_path_factory.mktemp("torch")
    done = run_python(f"CASES = {TORCH_CASES!r}\n{_RUN_TORCH}", folder)
    assert done.returncode == 0, done.stderr
    return {name: dict(np.load(folder / f"{name}.npz")) for name in TORCH_CASES}


@pytest.mark.parametrize("case", TORCH_CASES)
def test_result_is_that_of_torch(torch_results, case):
    tensors = torch_results[case]
    layer = MultiHeadAttention.from_torch(tensors, num_heads=8, prefix="layer")
    options = {
        "causal": {"is_causal": True},
        "padded": {"kv_lengths": np.array([33, 20])},
    }.get(case, {})
    out = layer(tensors["query"], tensors["key"], tensors["value"], **options)
    assert out.dtype == F32
    assert 0.1 < np.abs(tensors["out"]).max() < 4
    np.testing.assert_allclose(out, tensors["out"], rtol=0, atol=1e-6)


@pytest.mark.parametrize("case", ["plain", "no bias", "three widths"])
def test_torch_gets_back_what_it_gave(torch_results, case):
    given = {name: x for name, x in torch_results[case].items() if name.startswith("layer.")}
    layer = MultiHeadAttention.from_torch(given, num_heads=8, prefix="layer.")
    back = layer.state_dict("torch", prefix="layer")
    assert back.keys() == given.keys()
    for name, tensor in given.items():
        assert_same_bits(back[name], tensor)


def _bert_tensors(prefix="", dtype=F64):
    """An attention block of 4 heads of width 3 in 16 features, values of width 5."""
    rng = np.random.default_rng(0)
    rows = {"self.query": (12, 16), "self.key": (12, 16), "self.value": (20, 16),
            "output.dense": (16, 20)}  # fmt: skip
    tensors = {f"{prefix}{name}.weight": rng.normal(0, 0.3, n) for name, n in rows.items()}
    tensors |= {f"{prefix}{name}.bias": rng.normal(0, 0.3, n[0]) for name, n in rows.items()}
    return {name: x.astype(dtype) for name, x in tensors.items()}


def _llama_tensors(dtype=F64):
    """6 heads of width 4 in 3 groups, 16 features, no biases."""
    rng = np.random.default_rng(0)
    rows = {"q_proj": (24, 16), "k_proj": (12, 16), "v_proj": (12, 16), "o_proj": (16, 24)}
    return {f"{name}.weight": rng.normal(0, 0.3, n).astype(dtype) for name, n in rows.items()}


def _split(x, n_head):
    return x.reshape(*x.shape[:-1], n_head, -1).swapaxes(-3, -2)


def _join(x):
    x = x.swapaxes(-3, -2)
    return x.reshape(*x.shape[:-2], -1)


def test_bert_tensors_give_the_block_they_are_named_for():
    prefix = "encoder.layer.3.attention."
    tensors, x = _bert_tensors(prefix), _tokens((2, 9, 16))

    def linear(x, name):
        return x @ tensors[f"{prefix}{name}.weight"].T + tensors[f"{prefix}{name}.bias"]

    heads = [_split(linear(x, f"self.{name}"), 4) for name in ("query", "key", "value")]
    right = linear(_join(reference.attention(*heads)), "output.dense")
    beside = {
        f"{prefix}output.LayerNorm.weight": np.ones(16),
        "encoder.layer.3.output.dense.weight": np.ones((16, 64)),
    }
    layer = MultiHeadAttention.from_bert(tensors | beside, 4, prefix=prefix)
    np.testing.assert_allclose(layer(x), right, rtol=0, atol=1e-14)
    back = layer.state_dict("bert", prefix=prefix)
    assert back.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert_same_bits(back[name], tensor)


def _rotary(heads, positions, base=100.0):
    """Su et al. 2021 as complex numbers: feature i and i + width / 2 are one."""
    half = heads.shape[-1] // 2
    turn = np.exp(1j * positions[..., None] * base ** -(np.arange(half) / half))
    turned = (heads[..., :half] + 1j * heads[..., half:]) * turn
    return np.concatenate([turned.real, turned.imag], axis=-1).astype(heads.dtype)


@pytest.mark.parametrize("position", [None, _rotary])
def test_llama_tensors_give_the_block_they_are_named_for(position):
    tensors, x = _llama_tensors(), _tokens((2, 9, 16))
    query, key, value = (
        _split(x @ tensors[f"{name}_proj.weight"].T, n) for name, n in zip("qkv", (6, 3, 3), strict=True)
    )  # fmt: skip
    if position is not None:
        query, key = position(query, np.arange(9)), position(key, np.arange(9))
    right = _join(reference.attention(query, key, value, is_causal=True))
    layer = MultiHeadAttention.from_llama(tensors, 6, position=position)
    assert (layer.num_kv_heads, layer.head_width, layer.b_Q, layer.b_O) == (3, 4, None, None)
    np.testing.assert_allclose(
        layer(x, is_causal=True), right @ tensors["o_proj.weight"].T, rtol=0, atol=1e-14
    )
    back = layer.state_dict("llama")
    assert back.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert_same_bits(back[name], tensor)


def test_llama_biases_of_the_inputs_alone_are_kept():
    tensors = _llama_tensors() | {f"{n}_proj.bias": np.full(r, 0.5) for n, r in
                                  zip("qkv", (24, 12, 12), strict=True)}  # fmt: skip
    layer = MultiHeadAttention.from_llama(tensors, 6)
    assert layer.b_O is None
    assert layer.state_dict("llama").keys() == tensors.keys()
    assert (layer.b_Q == 0.5).all()


@pytest.mark.parametrize("dtype", ALL_DTYPES)
def test_loading_takes_or_converts_the_dtype(dtype):
    assert MultiHeadAttention.from_bert(_bert_tensors(dtype=dtype), 4).dtype == dtype
    converted = MultiHeadAttention.from_bert(_bert_tensors(), 4, dtype=dtype)
    assert_same_bits(
        converted.state_dict("bert")["self.query.weight"],
        _bert_tensors(dtype=dtype)["self.query.weight"],
    )


def test_loaded_weights_are_copies():
    tensors = _bert_tensors()
    layer = MultiHeadAttention.from_bert(tensors, 4)
    before = layer.W_V.copy()
    tensors["self.value.weight"][...] = 0
    layer.state_dict("bert")["self.value.weight"][...] = 0
    assert_same_bits(layer.W_V, before)


def _without(tensors, name):
    return {key: x for key, x in tensors.items() if key != name}


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        (_without(_bert_tensors(), "self.key.weight"), "tensors has no 'self.key.weight'"),
        (_without(_bert_tensors(), "self.key.bias"), "tensors has no 'self.key.bias'"),
        (_bert_tensors() | {"self.distance.weight": np.ones(3)}, "also has 'self.distance.weight'"),
        (_bert_tensors() | {"self.query.weight": np.ones((13, 16))}, r"W_Q .*\(13, 16\).*num_heads"),
        (_bert_tensors() | {"self.key.weight": np.ones((13, 16))}, r"W_K .*\(13, 16\).*multiple of 3"),
        (_bert_tensors() | {"self.value.weight": np.ones((21, 16))}, r"W_V .*\(21, 16\)"),
        (_bert_tensors() | {"self.value.weight": np.ones(20)}, r"W_V has shape \(20,\)"),
        (_bert_tensors() | {"output.dense.weight": np.ones((20, 16))}, r"W_O .*expected \(16, 20\)"),
        (_bert_tensors() | {"self.query.bias": np.ones(13)}, r"b_Q has shape \(13,\)"),
        (_bert_tensors() | {"output.dense.bias": np.ones(1)}, r"b_O has shape \(1,\)"),
    ],
)  # fmt: skip
def test_tensors_that_do_not_fit_are_refused(tensors, message):
    with pytest.raises(ValueError, match=message):
        MultiHeadAttention.from_bert(tensors, 4)


def test_tensors_whose_part_in_the_result_is_unknown_are_refused():
    with pytest.raises(ValueError, match=r"also has 'a\.q_norm\.weight'"):
        MultiHeadAttention.from_llama(
            {f"a.{name}": x for name, x in (_llama_tensors() | {"q_norm.weight": 1}).items()}, 6,
            prefix="a",
        )  # fmt: skip
    torch = MultiHeadAttention(8, 2).state_dict() | {"bias_k": np.zeros((1, 1, 8), F32)}
    with pytest.raises(ValueError, match="also has 'bias_k'"):
        MultiHeadAttention.from_torch(torch, 2)


def test_tensors_of_several_dtypes_need_a_dtype():
    mixed = _bert_tensors()
    mixed["self.key.bias"] = mixed["self.key.bias"].astype(F32)
    with pytest.raises(TypeError, match="float32, float64"):
        MultiHeadAttention.from_bert(mixed, 4)
    assert MultiHeadAttention.from_bert(mixed, 4, dtype=F32).dtype == F32


@pytest.mark.parametrize(
    ("sizes", "style", "message"),
    [
        ({"num_kv_heads": 2}, "torch", "not grouped"),
        ({"head_width": 5}, "torch", "fill embed_dim, 12"),
        ({"value_width": 5}, "torch", "fill embed_dim, 12"),
        ({"bias": True, "out_bias": False}, "torch", "all biases or none"),
        ({}, "gpt2", "expected one of torch, bert, llama"),
    ],
)
def test_a_style_without_form_for_the_layer_is_refused(sizes, style, message):
    with pytest.raises(ValueError, match=message):
        _layer(**sizes).state_dict(style)


# ---- cache ------------------------------------------------------------------------------------


@pytest.mark.parametrize("position", [None, _rotary])
@pytest.mark.parametrize("dtype", [F32, F64])
def test_chunks_through_a_cache_are_one_causal_call(dtype, position):
    layer = _layer(dtype, num_heads=6, num_kv_heads=3, head_width=4, value_width=5,
                   position=position)  # fmt: skip
    tokens, cache = _tokens((2, 16, 12), dtype), layer.new_cache(n_batch=2, capacity=4)
    right = layer(tokens, is_causal=True)
    ends = [0, 7, 8, 13, 16]
    chunks = [layer(tokens[:, start:end], cache=cache) for start, end in pairwise(ends)]
    np.testing.assert_allclose(
        np.concatenate(chunks, axis=1), right, rtol=0, atol=20 * np.finfo(dtype).eps
    )
    np.testing.assert_array_equal(cache.lengths, [16, 16])


def test_sequences_of_a_cache_have_lengths_of_their_own():
    layer, tokens = _layer(head_width=4, position=_rotary), _tokens((2, 9, 12))
    cache = layer.new_cache(2)
    for counts in ([5, 2], [3, 4]):
        first = cache.lengths
        chunk = np.stack([np.resize(tokens[i, first[i] : first[i] + 5], (5, 12)) for i in (0, 1)])
        out, lse = layer(chunk, cache=cache, counts=counts, return_lse=True)
        for i, n in enumerate(counts):
            alone = layer(tokens[i, : first[i] + n], is_causal=True)[first[i] :]
            np.testing.assert_allclose(out[i, :n], alone, rtol=0, atol=1e-14)
            np.testing.assert_array_equal(out[i, n:], np.broadcast_to(layer.b_O, (5 - n, 12)))
            assert (lse[i, :, n:] == -np.inf).all()
    np.testing.assert_array_equal(cache.lengths, [8, 6])


def test_a_cache_is_causal_unless_told_otherwise():
    layer, tokens = _layer(), _tokens((1, 5, 12))
    both_ways = layer(tokens, cache=layer.new_cache(1), is_causal=False)
    np.testing.assert_allclose(both_ways, layer(tokens), rtol=0, atol=1e-15)
    assert not np.allclose(both_ways, layer(tokens, cache=layer.new_cache(1)))


@pytest.mark.parametrize(
    "wrong", [{"softcap": -1}, {"head_mask": [1.0]}, {"attn_mask": np.ones((3, 3), bool)}]
)
def test_a_call_that_fails_leaves_cache_and_out_as_they_were(wrong):
    layer, tokens = _layer(), _tokens((2, 5, 12))
    cache, out = layer.new_cache(2), np.full((2, 5, 12), 7.0)
    layer(tokens, cache=cache)
    with pytest.raises(ValueError):
        layer(tokens, cache=cache, out=out, **wrong)
    np.testing.assert_array_equal(cache.lengths, [5, 5])
    assert (out == 7).all()


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"key": np.zeros((2, 5, 12))}, ValueError, "key is given together with cache"),
        ({"value": np.zeros((2, 5, 12))}, ValueError, "value is given together with cache"),
        ({"kv_lengths": [5, 5]}, ValueError, "kv_lengths is given together with cache"),
        ({"query_offset": "end"}, ValueError, "query_offset is given together with cache"),
        ({"query": np.zeros((3, 5, 12))}, ValueError, r"query has shape \(3, 5, 12\); .* \(2, tok"),
        ({"query": np.zeros((5, 12))}, ValueError, r"query has shape \(5, 12\)"),
        ({"cache": KVCache(2, 2, 3, dtype=F64)}, ValueError, "key has shape"),
        ({"cache": KVCache(2, 4, 3, dtype=F32)}, TypeError, "like the cache"),
        ({"cache": {}}, TypeError, "cache is of type dict"),
        ({"cache": None, "counts": 3}, ValueError, "counts is given without cache"),
    ],
)
def test_a_cache_that_does_not_fit_the_call_is_refused(given, error, message):
    layer = _layer()
    call = {"query": np.zeros((2, 5, 12)), "cache": layer.new_cache(2)} | given
    with pytest.raises(error, match=message):
        layer(**call)


# ---- positions --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "first"),
    [
        ({}, 0),
        ({"query_offset": 3}, 3),
        ({"query_offset": np.array([3, 5])}, np.array([3, 5])),
        ({"query_offset": "end"}, 4),
        ({"query_offset": "end", "kv_lengths": [10, 13]}, np.array([1, 4])),
    ],
)
def test_queries_stand_at_their_offset(options, first):
    layer = _layer(head_width=4, position=_rotary)
    query, key = _tokens((2, 9, 12)), _tokens((2, 13, 12), seed=4)
    at = np.asarray(first)[..., None, None] + np.arange(9)
    key_heads, value_heads = layer.project_key_value(key)
    heads = reference.attention(layer.project_query(query, at), key_heads, value_heads, **options)
    out = layer(query, key, **options)
    np.testing.assert_allclose(out, layer.project_output(heads), rtol=0, atol=1e-14)
    assert not np.allclose(out, _layer(head_width=4)(query, key, **options))


@pytest.mark.parametrize(
    ("position", "error", "message"),
    [
        (lambda heads, positions: heads[..., :1], ValueError, "position returned shape"),
        (lambda heads, positions: heads.astype(F32), TypeError, "position returned float32"),
        (lambda heads, positions: None, TypeError, "position returned NoneType"),
    ],
)
def test_a_position_that_returns_no_heads_is_refused(position, error, message):
    with pytest.raises(error, match=message):
        _layer(position=position)(_tokens((2, 9, 12)))


def test_positions_need_a_layer_that_uses_them():
    with pytest.raises(ValueError, match="the layer has no position"):
        _layer().project_query(_tokens((9, 12)), np.arange(9))
    with pytest.raises(ValueError, match=r"positions has shape \(8,\)"):
        _layer(position=_rotary, head_width=4).project_query(_tokens((9, 12)), np.arange(8))


# ---- pruning ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sizes", "heads", "n_kv_head"),
    [
        ({}, [1], 3),
        ({}, [0, -1], 2),
        ({}, slice(1, 4), 1),
        ({}, 2, 3),
        ({}, np.array([True, False, False, True]), 2),
        ({}, [], 4),
        ({"num_kv_heads": 2}, [2, 3], 1),
        ({"num_kv_heads": 2}, [0, 3], 2),
        ({"num_kv_heads": 2}, [0, 1, 2], 1),
        ({"num_kv_heads": 1, "bias": False, "value_width": 5}, [1], 1),
        ({"kdim": 10, "vdim": 14, "num_kv_heads": 2}, [1, 2], 2),
        ({}, [0, 1, 2, 3], 0),
        ({"bias": False}, [0, 1, 2, 3], 0),
    ],
    ids=str,
)
def test_pruned_layer_gives_the_output_of_the_gated_one(sizes, heads, n_kv_head):
    layer = _layer(**sizes)
    query = _tokens((2, 9, 12))
    key, value = _tokens((2, 13, layer.kdim), seed=4), _tokens((2, 13, layer.vdim), seed=5)
    gates = np.ones(4)
    gates[heads] = 0
    smaller = layer.prune_heads(heads)
    assert (smaller.num_heads, smaller.num_kv_heads) == (gates.sum(), n_kv_head)
    if gates.all():
        assert smaller.n_parameter == layer.n_parameter
    else:
        assert smaller.n_parameter < layer.n_parameter
    gated = layer(query, key, value, head_mask=gates, is_causal=True)
    np.testing.assert_allclose(smaller(query, key, value, is_causal=True), gated, atol=1e-14)
    assert not np.shares_memory(smaller.W_O, layer.W_O)


@pytest.mark.parametrize("heads", [[0], [1, 3, 5]])
def test_grouped_heads_are_pruned_evenly_or_not_at_all(heads):
    layer = MultiHeadAttention(12, 6, num_kv_heads=2)
    with pytest.raises(
        ValueError, match=r"leaves \[2, [13]\] query heads .* \[0, 1\]; .* same num"
    ):
        layer.prune_heads(heads)


@pytest.mark.parametrize(
    ("heads", "error"), [([4], ValueError), ([0.5], TypeError), (None, TypeError)]
)
def test_heads_that_are_no_index_are_refused(heads, error):
    with pytest.raises(error, match="heads"):
        _layer().prune_heads(heads)


def test_pruned_layer_keeps_position_and_is_saved_like_any_other():
    layer = _layer(head_width=4, position=_rotary)
    smaller, tokens = layer.prune_heads([2]), _tokens((2, 9, 12))
    np.testing.assert_allclose(smaller(tokens), layer(tokens, head_mask=[1, 1, 0, 1]), atol=1e-14)
    again = MultiHeadAttention.from_bert(smaller.state_dict("bert"), 3)
    again.position = _rotary
    assert_same_bits(again(tokens), smaller(tokens))


# ---- errors -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((12, 5), ValueError, "embed_dim is 12; expected a multiple of num_heads, 5"),
        ((12, 0), ValueError, "embed_dim is 12"),
        ((0, 4), ValueError, "embed_dim is 0"),
        ((12, -4), ValueError, "num_heads is -4"),
        ((12.0, 4), TypeError, "embed_dim is 12.0"),
        ((12, 4, {"num_kv_heads": 3}), ValueError, "expected a multiple of num_kv_heads, 3"),
        ((12, 4, {"num_kv_heads": 0}), ValueError, "expected a multiple of num_kv_heads, 0"),
        ((12, 4, {"head_width": 0}), ValueError, "head_width is 0"),
        ((12, 4, {"value_width": -1}), ValueError, "value_width is -1"),
        ((12, 4, {"kdim": 0}), ValueError, "kdim is 0"),
        ((12, 4, {"vdim": "12"}), TypeError, "vdim is '12'"),
        ((12, 4, {"bias": None}), TypeError, "bias is None"),
        ((12, 4, {"out_bias": "no"}), TypeError, "out_bias is 'no'"),
        ((12, 4, {"dtype": int}), TypeError, "dtype is <class 'int'>"),
        ((12, 4, {"init": "he"}), ValueError, "init is 'he'; expected one of xavier_uniform"),
        ((12, 4, {"position": 3}), TypeError, "position is 3; expected a callable"),
    ],
)
def test_a_layer_that_cannot_be_is_refused(arguments, error, message):
    *sizes, named = arguments if isinstance(arguments[-1], dict) else (*arguments, {})
    with pytest.raises(error, match=message):
        MultiHeadAttention(*sizes, **named)


X = np.zeros((2, 9, 12))


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        ({"query": X.astype(F32)}, TypeError, "query has dtype float32; expected float64 like the"),
        ({"query": X[0, 0]}, ValueError, r"query has shape \(12,\); expected \(..., tokens, 12\)"),
        ({"query": X[..., :5]}, ValueError, r"query has shape \(2, 9, 5\)"),
        ({"query": X, "key": X[..., :5]}, ValueError, r"key has shape \(2, 9, 5\)"),
        ({"query": X, "key": X, "value": X[:, :5]}, ValueError, "value .* 9 tokens to match key"),
        ({"query": X, "value": X[..., :5]}, ValueError, r"value has shape \(2, 9, 5\)"),
        ({"query": X, "key": np.zeros((3, 9, 12))}, ValueError, r"key has shape \(3, 9, 12\) and"),
        ({"query": X, "out": X[:1]}, ValueError, r"out has shape \(1, 9, 12\); expected \(2, 9"),
        ({"query": X, "out": X.astype(F32)}, TypeError, "out has dtype float32"),
        ({"query": X, "out": []}, TypeError, "out is of type list"),
        ({"query": X, "out": np.broadcast_to(X[0], X.shape)}, ValueError, "out is read-only"),
        ({"query": X, "attn_mask": np.ones((3, 3), bool)}, ValueError, r"attn_mask .*\(2, 4, 9, 9"),
        ({"query": X, "is_causal": "yes"}, TypeError, "is_causal"),
    ],
)
def test_a_call_that_does_not_fit_is_refused(call, error, message):
    with pytest.raises(error, match=message):
        _layer()(**call)


def test_heads_that_do_not_fit_are_refused():
    layer = _layer(value_width=5)
    with pytest.raises(ValueError, match=r"heads has shape \(2, 4, 9, 3\); expected \(..., 4, que"):
        layer.project_output(np.zeros((2, 4, 9, 3)))
    with pytest.raises(TypeError, match="heads has dtype float32"):
        layer.project_output(np.zeros((2, 4, 9, 5), F32))
