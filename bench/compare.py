"""The table of mha_fast against one peer.

    python -m bench.compare --peer torch --threads 1,2

What is timed, and how, is in ``bench/measure.py``; this file starts one such process for each
thread count and lays out what it reports. Exit status: 0 measured, 1 a result was wrong and
therefore not timed, 2 wrong usage or no such library.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

from . import peers
from .accuracy import ROUNDING_OF
from .cases import ANY_DTYPE, CASES, DTYPES, find
from .machine import matrix_products
from .measure import N_RATIO, Effort, Measurement

ROOT = Path(__file__).resolve().parent.parent
TIE = 0.05  # less of a difference is none
_FULL = Effort(rounds=4, turn_seconds=0.1)
_QUICK = Effort(rounds=1, turn_seconds=0.002)
_QUICK_CASES = ["odd", "tiny"]

# NumPy's BLAS, whichever it is, reads the size of its thread pool once, when it is loaded.
_THREAD_VARIABLES = (
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "MKL_NUM_THREADS",
    "BLIS_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
)


def measurements(options: argparse.Namespace, num_threads: int):
    """Run the measuring process for one thread count; yield what it prints, object by object.

    `options` says peer, cases, dtype, precision and effort.
    """
    command = [
        *(sys.executable, "-m", "bench.measure"),
        *("--peer", options.peer),
        *("--threads", str(num_threads)),
        *("--rounds", str(options.effort.rounds)),
        *("--turn-seconds", str(options.effort.turn_seconds)),
        *(() if options.dtype is None else ("--dtype", options.dtype)),
        *("--precision", options.precision),
        *("--cases", *options.cases),
    ]
    environment = os.environ | dict.fromkeys(_THREAD_VARIABLES, str(num_threads))
    with subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True
    ) as process:
        for line in process.stdout:
            yield json.loads(line)
    if process.returncode:
        raise SystemExit(2)  # it has said why on the error stream


def heading(about: dict, peer: str) -> str:
    """Say what is compared on what."""
    machine = about["machine"]
    return (
        f"mha_fast {machine['mha_fast']} ({machine['isa']}) against {peer} {about['peer']}; "
        f"{machine['cpu']}, {machine['n_cpu']} CPUs; NumPy {machine['numpy']}"
    )


def columns(peer: str) -> dict[str, int]:
    """Return title and width of each column."""
    return {
        "case": max(map(len, CASES)),
        "shape": max(len(case.shape) for case in CASES.values()),
        "dtype": 14,
        "threads": 7,
        "mha_fast ms": 11,
        f"{peer} ms": 11,
        f"{peer} / mha_fast (range)": 26,
        "GFLOP/s (of FMA)": 19,
        "of matrix unit": 14,
        "GB/s (of read)": 15,
        f"max error, mha_fast / {peer}": 30,
    }


def cells(measured: Measurement) -> list[str]:
    """Return the row of one measurement, column by column."""
    dtype = measured.dtype
    if measured.precision != "highest":
        dtype += f", {measured.precision}"
    what = [measured.case, measured.shape, dtype, str(measured.num_threads)]
    if measured.refused is not None:
        return [*what, f"not timed: {measured.refused}"]
    return [
        *what,
        f"{measured.ours_seconds * 1e3:.4g}",
        f"{measured.peer_seconds * 1e3:.4g}",
        _ratio(measured),
        _of_peak(measured.gflops, measured.fma_peak),
        of_matrix_unit(measured),
        _of_peak(measured.gbytes, measured.read_peak),
        f"{measured.ours_error:.1e} / {measured.peer_error:.1e}",
    ]


def is_tie(ratio: float) -> bool:
    """Say whether the two are equally fast as far as can be told."""
    return abs(ratio - 1) < TIE


def of_matrix_unit(measured: Measurement) -> str:
    """Return the share of the matrix unit's bfloat16 peak, and that of the products it takes."""
    if measured.matrix_peak is None:
        return "–"
    share = measured.gflops / measured.matrix_peak
    n_product = matrix_products(measured.dtype, measured.precision)
    return (
        f"{share:.0%}" if n_product == 1 else f"{share:.0%} ({n_product}x: {n_product * share:.0%})"
    )


def _ratio(measured):
    low, high = min(measured.ratios), max(measured.ratios)
    tie = " tie" if is_tie(measured.ratio) else ""
    return f"{measured.ratio:.2f} ({low:.2f} to {high:.2f}){tie}"


def _of_peak(achieved, peak):
    share = "not measured" if peak is None else f"{achieved / peak:.0%}"
    return f"{achieved:.3g} ({share})"


class TextTable:
    """Rows of fixed width, printed as they come."""

    def __init__(self, columns: dict[str, int]):
        self._widths = list(columns.values())
        self.row(list(columns))

    def row(self, cells: list[str]) -> None:
        padded = (f"{cell:{width}}" for cell, width in zip(cells, self._widths, strict=False))
        print("  ".join(padded).rstrip(), flush=True)


class MarkdownTable:
    """The same in Markdown."""

    def __init__(self, columns: dict[str, int]):
        self.row(list(columns))
        self.row(["---"] * len(columns))

    def row(self, cells: list[str]) -> None:
        print("| " + " | ".join(cells) + " |", flush=True)


def peaks(measured: list[Measurement]) -> list[str]:
    """State what the machine could do while the table was made."""
    lines = []
    for num_threads in dict.fromkeys(m.num_threads for m in measured):
        timed = [m for m in measured if m.num_threads == num_threads and m.refused is None]
        if timed:
            lines.append(
                f"peaks of the machine, {num_threads} thread(s): "
                f"fused multiply-add {_range((m.fma_peak for m in timed), 'GFLOP/s')}, "
                f"matrix unit {_range((m.matrix_peak for m in timed), 'GFLOP/s')}, "
                f"streaming read {_range((m.read_peak for m in timed), 'GB/s')}"
            )
    return lines


def _range(values, unit):
    known = [value for value in values if value is not None]
    return f"{min(known):.3g} to {max(known):.3g} {unit}" if known else "not measured"


def footnote(options: argparse.Namespace) -> str:
    """Say how the numbers came about."""
    rounds = options.effort.rounds
    text = (
        f"ms: the shortest time of all. Ratio: the median of {N_RATIO}, each between the shortest "
        f"times of {rounds} alternating turns of each; the range in brackets; under {TIE:.0%} is a "
        "tie. Matrix unit: of its bfloat16 multiply-adds; in brackets the same with the bfloat16 "
        "products counted that one product of float32 or float16 takes there (6; float32 in "
        "precision high: 3). "
        "Shape: batch, heads (/key and value heads where fewer), queries, keys, width."
    )
    if options.quick:
        text += " Quick run: too short to quote."
    return text


def _parse(arguments):
    parser = argparse.ArgumentParser(
        prog="python -m bench.compare", description="Time mha_fast against one other library."
    )
    parser.add_argument("--peer", choices=peers.names(), default="torch")
    add_options(parser)
    parser.add_argument(
        "--dtype", choices=DTYPES, help="for all cases (default: float32, or what the name says)"
    )
    parser.add_argument("--markdown", action="store_true")
    options = parser.parse_args(arguments)
    if options.precision == "high" and options.dtype not in (None, "float32"):
        parser.error("precision high is one of float32")
    complete(options, list(CASES) if options.dtype is None else ANY_DTYPE)
    return options


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add what every table can choose."""
    parser.add_argument(
        "--threads", type=_counts, default=[1, 2], metavar="N,N", help="default: 1,2"
    )
    parser.add_argument(
        "--cases", type=_case_names, metavar="NAME,NAME", help=f"of: {', '.join(CASES)}"
    )
    parser.add_argument(
        "--precision", choices=ROUNDING_OF, default="highest", help="of mha_fast in float32"
    )
    parser.add_argument("--rounds", type=_count, help=f"turns per ratio (default: {_FULL.rounds})")
    parser.add_argument("--quick", action="store_true", help="small cases, short turns")


def complete(options: argparse.Namespace, all_cases: list[str]) -> None:
    """Replace what was not said by what it then means."""
    effort = _QUICK if options.quick else _FULL
    options.effort = Effort(options.rounds or effort.rounds, effort.turn_seconds)
    options.cases = options.cases or (_QUICK_CASES if options.quick else all_cases)


def _count(text):
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is less than 1")
    return number


def _counts(text):
    return [_count(part) for part in text.split(",")]


def _case_names(text):
    names = text.split(",")
    for name in names:
        try:
            find(name)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error
    return names


def print_table(options: argparse.Namespace) -> tuple[dict, list[Measurement]]:
    """Measure and print row by row; return what was measured, and on what."""
    table = None
    measured = []
    for num_threads in options.threads:
        lines = measurements(options, num_threads)
        about = next(lines)
        if table is None:
            print(heading(about, options.peer), end="\n\n")
            table = (MarkdownTable if options.markdown else TextTable)(columns(options.peer))
        for line in lines:
            measured.append(Measurement(**line))
            table.row(cells(measured[-1]))
    print("", *peaks(measured), footnote(options), sep="\n")
    return about, measured


def main(arguments: list[str] | None = None) -> int:
    """Run the command; return its exit status."""
    _, measured = print_table(_parse(arguments))
    return 1 if any(m.wrong for m in measured) else 0


if __name__ == "__main__":
    sys.exit(main())
