"""Draw the pictures of these pages: ``python docs/draw_pictures.py`` (after a change to them).

Needs ``pip install matplotlib``, and what `mha_fast.minilm` needs.
"""

import io
from pathlib import Path

import numpy as np
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


if __name__ == "__main__":
    main()
