"""The command line: ``mha-fast``, which is also ``python -m mha_fast``."""

import argparse
import os
import sys
from collections.abc import Sequence

from .. import __version__, show_config
from . import demo, heads_command

LARGEST_SIZE = 8192  # NumPy keeps the scores whole: 2 GiB an array of them at this size


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command.

    Parameters
    ----------
    arguments : sequence of str, optional
        The words after the program's name; those of this process when not given.

    Returns
    -------
    int
        Exit code 0. A usage error leaves by ``SystemExit`` with code 2.
    """
    try:
        try:
            options = build_parser().parse_args(arguments)
            options.run(options)
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        # The reader has seen enough, as in `mha-fast info | head -1`. Python flushes once more on
        # its way out, and that has to go somewhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def build_parser() -> argparse.ArgumentParser:
    """Describe the commands and their options."""
    parser = argparse.ArgumentParser(
        prog="mha-fast", description="Fused multi-head attention on the CPU for NumPy."
    )
    parser.add_argument("--version", action="version", version=f"mha_fast {__version__}")
    commands = parser.add_subparsers(metavar="command", required=True)

    text = "an example to follow by hand, then time and error against NumPy"
    shown = commands.add_parser("demo", help=text, description=f"Show {text}.")
    shown.add_argument(
        "--size",
        type=sequence_length,
        default=2048,
        metavar="N",
        help=f"queries and keys of the timed run, 1 to {LARGEST_SIZE} (default: 2048)",
    )
    shown.set_defaults(run=lambda options: demo.run(options.size))

    text = "version, instruction set, threads and OpenMP runtime"
    info = commands.add_parser("info", help=text, description=f"Show {text}.")
    info.set_defaults(run=lambda options: show_config())

    text = "what the heads of a real network attend to in a text"
    heads = commands.add_parser("heads", help=text, description=f"Show {text}.")
    heads_command.add_arguments(heads)
    heads.set_defaults(run=lambda o: heads_command.run(o.text, o.relation, o.pictures))
    return parser


def sequence_length(word: str) -> int:
    """The number that `word` spells, when the demo can run at that size."""
    try:
        size = int(word)
    except ValueError:
        size = 0
    if not 1 <= size <= LARGEST_SIZE:
        raise argparse.ArgumentTypeError(
            f"expected a whole number from 1 to {LARGEST_SIZE}, got {word!r}"
        )
    return size
