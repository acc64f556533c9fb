"""Draw the pictures of these pages: ``python docs/draw_pictures.py`` (after a change to them).

Needs ``pip install matplotlib``, and what `mha_fast.minilm` needs.
"""

import importlib.util
import io
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from PIL import Image

from mha_fast import minilm, pictures

FOLDER = Path(__file__).parent / "pictures"
DPI = 90
TEXT = "{}, who anchored the innings after {} fell early, finally reached his century in the 47th over."
RELATIONS = (("his", "Kohli"), ("century", "47th over"))


def habits(reading):
    """Maps of what the heads do, whatever the text says."""

    def of_layers(name, *column):
        return np.stack([getattr(layer, name)[:, *column] for layer in reading.statistics])

    previous, following = (reading.statistics[0].offsets.index(d) for d in (-1, 1))
    return pictures.head_maps(
        {
            "entropy, in nats": of_layers("entropy"),
            "weight on [CLS] and [SEP]": of_layers("key_mass", 0),
            "weight on the previous token": of_layers("offset_mass", previous),
            "weight on the next token": of_layers("offset_mass", following),
        }
    )


def relations(reading):
    """Maps of the weight from one phrase to another."""
    return pictures.head_maps(
        {
            f'weight from "{source}" to "{target}"': reading.weight_between(source, target)
            for source, target in RELATIONS
        }
    )


def lines(reading, chosen):
    """Lines between tokens, for (layer, head, phrase that looks)."""
    titles = [f'layer {layer} head {head}, "{word}"' for layer, head, word in chosen]
    weights = [reading.weights[layer, head] for layer, head, _ in chosen]
    sources = [reading.places(word) for _, _, word in chosen]
    return pictures.token_views(
        reading.tokens,
        dict(zip(titles, weights, strict=True)),
        dict(zip(titles, sources, strict=True)),
    )


def learning(example, n_step=400, every=10):
    """Loss, and what the heads look at, while the network of the example learns."""
    rng = np.random.default_rng(0)
    network = example.Network(rng)
    masses = []

    def look(_):
        seen = example.look_at_heads(network, np.random.default_rng(1))
        masses.append([layer.offset_mass.mean(axis=0).max(axis=0) for layer in seen])

    losses = example.train(network, rng, n_step, report=look, every=every)
    figure = Figure(figsize=(8, 3.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    steps = np.arange(1, n_step + 1)
    left.plot(steps, losses, color="tab:blue")
    left.set(xlabel="step", ylabel="loss", ylim=(0, None))
    looked = [1, *range(every, n_step + 1, every)]
    masses = np.array(masses)  # (times, layer, offset)
    right.plot(looked, masses[:, 0, 0], label="layer 0, on the letter before")
    right.plot(looked, masses[:, 1, 2], label="layer 1, behind the last appearance")
    right.set(xlabel="step", ylabel="weight, in the head with most of it", ylim=(0, 1))
    right.legend()
    return figure


def load_example(name):
    """Import a file of the folder examples."""
    path = FOLDER.parents[1] / "examples" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def save(figure, name):
    """Save a figure in 256 colours: to the eye the same, and a third of the bytes."""
    drawn = io.BytesIO()
    figure.savefig(drawn, dpi=DPI)
    image = Image.open(drawn).convert("RGB").quantize(256, dither=Image.Dither.NONE)
    image.save(FOLDER / name, optimize=True)


def main():
    """Draw all of them."""
    network = minilm.load()
    reading = network.read(TEXT.format("Kohli", "Rohit"))
    exchanged = network.read(TEXT.format("Rohit", "Kohli"))
    save(habits(reading), "habits.png")
    save(relations(reading), "relations.png")
    save(lines(reading, [(2, 5, "his"), (5, 1, "century")]), "lines.png")
    save(lines(exchanged, [(2, 5, "his"), (5, 1, "his")]), "exchanged.png")
    save(learning(load_example("train_small_network")), "learning.png")


if __name__ == "__main__":
    main()
