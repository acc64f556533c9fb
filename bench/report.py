"""Measure against every peer that is installed, and write the results page.

    python -m bench.report                                    everything; a long while
    python -m bench.report --peer torch --dtype float32       one part of it
    python -m bench.report --peer torch --dtype float32 --precision high
    python -m bench.report --render                           the page only

Each part is kept in ``bench/results/`` (see ``bench/store.py``), and ``docs/results.rst`` is
written from all that is kept there. Exit status: 0 done, 1 a result was wrong and therefore not
timed, 2 wrong usage.
"""

import argparse
import shlex
import sys
from argparse import Namespace
from datetime import date
from pathlib import Path

from . import page, peers, store
from .cases import ANY_DTYPE, DTYPES
from .compare import add_options, complete, print_table


def measure_part(peer: str, dtype: str, options: argparse.Namespace) -> store.Part:
    """Measure one part, showing the table while it grows."""
    chosen = Namespace(**vars(options) | {"peer": peer, "dtype": dtype, "markdown": False})
    about, measured = print_table(chosen)
    del about["machine"]["num_threads"]  # that of the process; each row has its own
    return store.Part(
        about=about,
        date=date.today().isoformat(),
        commands=[command(chosen)],
        peer=peer,
        dtype=dtype,
        precision=options.precision,
        quick=options.quick,
        rows=measured,
    )


def command(options: argparse.Namespace) -> str:
    """Return the command that measures this part again."""
    words = ["python", "-m", "bench.report", "--peer", options.peer, "--dtype", options.dtype]
    if options.precision != "highest":
        words += ["--precision", options.precision]
    words += ["--threads", ",".join(map(str, options.threads))]
    if options.cases != ANY_DTYPE:
        words += ["--cases", ",".join(options.cases)]
    if options.rounds is not None:
        words += ["--rounds", str(options.rounds)]
    if options.quick:
        words.append("--quick")
    return shlex.join(words)


def _parse(arguments):
    parser = argparse.ArgumentParser(
        prog="python -m bench.report", description="Measure parts of the results page; write it."
    )
    parser.add_argument(
        "--peer", type=peers.list_of(peers.names()), metavar="NAME,NAME",
        help="default: all whose library is installed",
    )  # fmt: skip
    parser.add_argument(
        "--dtype", type=peers.list_of(DTYPES), metavar="NAME,NAME",
        help=f"default: {','.join(DTYPES)}; float32 with --precision high",
    )  # fmt: skip
    add_options(parser)
    parser.add_argument("--render", action="store_true", help="measure nothing")
    parser.add_argument("--results", type=Path, default=store.RESULTS, help="folder of the parts")
    parser.add_argument("--page", type=Path, default=page.PAGE, help="the page to write")
    options = parser.parse_args(arguments)
    if options.precision == "high" and options.dtype not in (None, ["float32"]):
        parser.error("precision high is one of float32")
    options.dtype = options.dtype or (DTYPES if options.precision == "highest" else ["float32"])
    options.peer = options.peer or peers.installed()
    complete(options, ANY_DTYPE)
    return options


def main(arguments: list[str] | None = None) -> int:
    """Run the command; return its exit status."""
    options = _parse(arguments)
    n_wrong = 0
    if not options.render:
        for peer in options.peer:
            for dtype in options.dtype:
                part = measure_part(peer, dtype, options)
                store.add_part(part, options.results)
                n_wrong += sum(row.wrong for row in part.rows)
                print()
    page.write(options.results, options.page)
    print(f"{options.page}: written")
    return 1 if n_wrong else 0


if __name__ == "__main__":
    sys.exit(main())
