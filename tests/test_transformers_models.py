"""Models of the package transformers under attn_implementation="mha_fast", against "eager"."""

import pytest

torch = pytest.importorskip("torch", reason="needs the extra mha_fast[transformers]")
transformers = pytest.importorskip("transformers", reason="needs the extra mha_fast[transformers]")

import mha_fast.torch
from mha_fast.integrations import transformers as bridge

mha_fast.torch.register_transformers()

N_TOKEN = 40
SMALL = {
    "vocab_size": 99,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
}
DECODER = {
    **SMALL,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "eos_token_id": None,
    "bos_token_id": 1,
}


def build(model_class, config):
    """The same random weights twice: under "eager" and under "mha_fast"."""
    torch.manual_seed(0)
    config._attn_implementation = "eager"
    eager = model_class(config).eval()
    ours = model_class(type(config)(**config.to_dict())).eval()
    ours.load_state_dict(eager.state_dict())
    for model in (eager, ours):
        with torch.no_grad():  # default weights give logits near 0, whatever the attention does
            for name, parameter in model.named_parameters():
                if name.endswith(("q_proj.weight", "k_proj.weight", "query.weight", "key.weight")):
                    parameter.mul_(4)
    ours.set_attn_implementation("mha_fast")
    return eager, ours


def bert():
    config = transformers.BertConfig(**SMALL)
    return build(transformers.BertForMaskedLM, config)


def gpt2():
    config = transformers.GPT2Config(
        vocab_size=99, n_embd=64, n_layer=2, n_head=4, n_positions=128,
        pad_token_id=0, bos_token_id=1, eos_token_id=None,
    )  # fmt: skip
    return build(transformers.GPT2LMHeadModel, config)


def llama():
    return build(transformers.LlamaForCausalLM, transformers.LlamaConfig(**DECODER))


def mistral():
    config = transformers.MistralConfig(**DECODER, sliding_window=11)
    return build(transformers.MistralForCausalLM, config)


def gemma2():
    config = transformers.Gemma2Config(
        **DECODER,
        head_dim=16,
        sliding_window=11,
        attn_logit_softcapping=2.0,
        query_pre_attn_scalar=4,
    )
    return build(transformers.Gemma2ForCausalLM, config)


def gpt_oss():
    config = transformers.GptOssConfig(
        **DECODER, head_dim=16, sliding_window=11, num_local_experts=2, num_experts_per_tok=1
    )
    eager, ours = build(transformers.GptOssForCausalLM, config)
    for model in (eager, ours):
        torch.manual_seed(3)
        with torch.no_grad():
            for layer in model.model.layers:
                layer.self_attn.sinks.normal_()
    return eager, ours


def t5():
    config = transformers.T5Config(
        vocab_size=99, d_model=64, d_kv=16, d_ff=96, num_layers=2, num_heads=4,
        decoder_start_token_id=0, pad_token_id=0, eos_token_id=None,
    )  # fmt: skip
    return build(transformers.T5ForConditionalGeneration, config)


def whisper():
    config = transformers.WhisperConfig(
        vocab_size=99, d_model=64, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=96, decoder_ffn_dim=96, num_mel_bins=8,
        max_source_positions=25, max_target_positions=40, pad_token_id=0, bos_token_id=1,
        eos_token_id=2, decoder_start_token_id=1, suppress_tokens=None, begin_suppress_tokens=None,
    )  # fmt: skip
    return build(transformers.WhisperForConditionalGeneration, config)


def vit():
    config = transformers.ViTConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        image_size=32, patch_size=8,
    )  # fmt: skip
    return build(transformers.ViTForImageClassification, config)


DECODERS = {
    "GPT-2": gpt2,
    "LLaMA": llama,
    "Mistral": mistral,
    "Gemma 2": gemma2,
    "GPT-OSS": gpt_oss,
}


def batch(padding):
    """Three sequences of different lengths, padded on one side or not at all."""
    torch.manual_seed(1)
    tokens = torch.randint(3, 99, (3, N_TOKEN))
    mask = torch.ones_like(tokens)
    for row, n_pad in enumerate(() if padding == "none" else (0, 5, 17)):
        if n_pad:
            padded = slice(0, n_pad) if padding == "left" else slice(-n_pad, None)
            mask[row, padded] = tokens[row, padded] = 0
    return {"input_ids": tokens, "attention_mask": mask}


@pytest.fixture
def calls(monkeypatch):
    """What the attention of each layer was asked for."""
    made = []

    def listed(query, key, value, **options):
        made.append(options)
        return attention(query, key, value, **options)

    attention = bridge.attention
    monkeypatch.setattr(bridge, "attention", listed)
    return made


def assert_same_logits(ours, eager, mask=None):
    """Rounding only. Rows of padding are nobody's output."""
    rows = slice(None) if mask is None else mask.bool()
    right = eager.logits[rows]
    assert float(right.std()) > 1e-3
    error = (ours.logits[rows] - right).abs().max()
    # The float32 rounding of two layers, each of some hundred additions, in units of the logits.
    assert float(error) <= 300 * torch.finfo(torch.float32).eps * float(right.abs().max())


def no_square_mask(calls):
    """No call got an array of queries x keys."""
    return all(x.get("attn_mask") is None or x["attn_mask"].shape[-2] == 1 for x in calls)


# ---- logits -----------------------------------------------------------------------------------


@pytest.mark.parametrize("padding", ["none", "left", "right"])
@pytest.mark.parametrize("name", DECODERS)
@torch.no_grad()
def test_decoder_logits(name, padding, calls):
    eager, ours = DECODERS[name]()
    inputs = batch(padding)
    out = ours(**inputs)
    assert len(calls) == 2
    assert no_square_mask(calls)
    assert_same_logits(out, eager(**inputs), inputs["attention_mask"])


@pytest.mark.parametrize("padding", ["none", "left", "right"])
@torch.no_grad()
def test_bert_logits(padding, calls):
    eager, ours = bert()
    inputs = batch(padding)
    out = ours(**inputs)
    assert len(calls) == 2
    assert no_square_mask(calls)
    if padding == "right":
        assert all(x["kv_lengths"].tolist() == [40, 35, 23] for x in calls)
        assert all(x["attn_mask"] is None for x in calls)
    assert_same_logits(out, eager(**inputs), inputs["attention_mask"])


@torch.no_grad()
def test_bert_logits_with_holes_in_the_mask(calls):
    eager, ours = bert()
    inputs = batch("none")
    inputs["attention_mask"][1, 4:20:3] = 0
    out = ours(**inputs)
    assert not no_square_mask(calls)
    assert_same_logits(out, eager(**inputs), inputs["attention_mask"])


@pytest.mark.parametrize("padding", ["none", "left", "right"])
@torch.no_grad()
def test_t5_logits(padding, calls):
    eager, ours = t5()
    inputs = batch(padding) | {"decoder_input_ids": batch("none")["input_ids"][:, :9]}
    out = ours(**inputs)
    assert len(calls) == 6  # encoder, decoder, and from one to the other
    assert_same_logits(out, eager(**inputs))


@torch.no_grad()
def test_whisper_logits(calls):
    eager, ours = whisper()
    torch.manual_seed(2)
    inputs = {
        "input_features": torch.randn(2, 8, 50),
        "decoder_input_ids": torch.randint(3, 99, (2, 9)),
    }
    out = ours(**inputs)
    assert len(calls) == 6
    assert_same_logits(out, eager(**inputs))


@torch.no_grad()
def test_vit_logits(calls):
    eager, ours = vit()
    pixels = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(2))
    out = ours(pixels)
    assert len(calls) == 2
    assert_same_logits(out, eager(pixels))


@pytest.mark.parametrize("name", DECODERS)
@torch.no_grad()
def test_own_masks_in_four_axes(name, calls):
    """A mask that the user made, bool or of numbers, says it all: nothing is added."""
    eager, ours = DECODERS[name]()
    inputs = {"input_ids": batch("none")["input_ids"]}
    generator = torch.Generator().manual_seed(4)
    seen = torch.rand(3, 1, N_TOKEN, N_TOKEN, generator=generator) < 0.5
    seen[:, :, :, 0] = True
    added = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)
    masks = [added]
    if name in ("LLaMA", "Mistral"):
        right = eager(**inputs, attention_mask=added)
        assert_same_logits(ours(**inputs, attention_mask=seen), right)
    for mask in masks:
        assert_same_logits(
            ours(**inputs, attention_mask=mask), eager(**inputs, attention_mask=mask)
        )


@pytest.mark.parametrize("name", ["LLaMA", "Mistral"])
@torch.no_grad()
def test_compiled_logits(name):
    eager, ours = DECODERS[name]()
    inputs = batch("left")
    compiled = torch.compile(ours, backend="aot_eager")
    assert_same_logits(compiled(**inputs), eager(**inputs), inputs["attention_mask"])


def test_gradients_are_those_of_eager():
    eager, ours = llama()
    inputs = batch("left")
    gradients = []
    for model in (eager, ours):
        logits = model(**inputs).logits[inputs["attention_mask"].bool()]
        logits.square().mean().backward()
        gradients.append({name: p.grad for name, p in model.named_parameters()})
    for name, right in gradients[0].items():
        error = (gradients[1][name] - right).abs().max()
        assert error <= 1000 * torch.finfo(torch.float32).eps * right.abs().max(), name


# ---- generation -------------------------------------------------------------------------------


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("padding", ["none", "left"])
@pytest.mark.parametrize("name", DECODERS)
@torch.no_grad()
def test_greedy_generation(name, padding, cache, calls):
    eager, ours = DECODERS[name]()
    if cache == "static" and not ours._can_compile_fullgraph and name == "GPT-2":
        pytest.skip("transformers has no static cache for this model")
    options = {
        "max_new_tokens": 12,
        "do_sample": False,
        "return_dict_in_generate": True,
        "output_logits": True,
        "disable_compile": True,
        "cache_implementation": "static" if cache == "static" else None,
    }
    inputs = batch(padding)
    out = ours.generate(**inputs, **options)
    right = eager.generate(**inputs, **options)
    assert len(calls) == 2 * 12
    logits, expected = torch.stack(out.logits), torch.stack(right.logits)
    assert torch.equal(out.sequences, right.sequences)
    error = (logits - expected).abs().max()
    assert float(error) <= 1000 * torch.finfo(torch.float32).eps * float(expected.abs().max())


@pytest.mark.parametrize("make", [t5, whisper])
@torch.no_grad()
def test_greedy_generation_of_encoder_and_decoder(make):
    eager, ours = make()
    if make is t5:
        inputs = batch("right")
    else:
        torch.manual_seed(2)
        inputs = {"input_features": torch.randn(2, 8, 50)}
    options = {"max_new_tokens": 8, "do_sample": False}
    right = eager.generate(**inputs, **options)
    assert torch.equal(ours.generate(**inputs, **options), right)
