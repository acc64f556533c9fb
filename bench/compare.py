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
from .cases import CASES
from .measure import N_RATIO, Effort, Measurement

_ROOT = Path(__file__).resolve().parent.parent
_FULL = Effort(rounds=4, turn_seconds=0.1)
_QUICK = Effort(rounds=1, turn_seconds=0.002)
_QUICK_CASES = ["odd", "tiny"]
_TIE = 0.05

# NumPy's BLAS, whichever it is, reads the size of its thread pool once, when it is loaded.
_THREAD_VARIABLES = (
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "MKL_NUM_THREADS",
    "BLIS_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
)


def measurements(options: argparse.Namespace, num_threads: int):
    """Run the measuring process for one thread count; yield what it prints, object by object."""
    command = [
        *(sys.executable, "-m", "bench.measure"),
        *("--peer", options.peer),
        *("--threads", str(num_threads)),
        *("--rounds", str(options.effort.rounds)),
        *("--turn-seconds", str(options.effort.turn_seconds)),
        *(() if options.dtype is None else ("--dtype", options.dtype)),
        *("--cases", *options.cases),
    ]
    environment = os.environ | dict.fromkeys(_THREAD_VARIABLES, str(num_threads))
    with subprocess.Popen(
        command, cwd=_ROOT, env=environment, stdout=subprocess.PIPE, text=True
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
        "shape": 21,
        "dtype": 8,
        "threads": 7,
        "mha_fast ms": 11,
        f"{peer} ms": 11,
        f"{peer} / mha_fast (range)": 26,
        "GFLOP/s (of peak)": 19,
        "GB/s (of read)": 15,
        f"max error, mha_fast / {peer}": 30,
    }


def cells(measured: Measurement) -> list[str]:
    """Return the row of one measurement, column by column."""
    what = [measured.case, measured.shape, measured.dtype, str(measured.num_threads)]
    if measured.refused is not None:
        return [*what, f"not timed: {measured.refused}"]
    return [
        *what,
        f"{measured.ours_seconds * 1e3:.4g}",
        f"{measured.peer_seconds * 1e3:.4g}",
        _ratio(measured),
        _of_peak(measured.gflops, measured.fma_peak),
        _of_peak(measured.gbytes, measured.read_peak),
        f"{measured.ours_error:.1e} / {measured.peer_error:.1e}",
    ]


def _ratio(measured):
    low, high = min(measured.ratios), max(measured.ratios)
    tie = " tie" if abs(measured.ratio - 1) < _TIE else ""
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
        f"times of {rounds} alternating turns of each; the range in brackets; under {_TIE:.0%} is a "
        "tie. Shape: batch, heads (/key and value heads where fewer), queries, keys, width."
    )
    if options.quick:
        text += " Quick run: too short to quote."
    return text


def _parse(arguments):
    parser = argparse.ArgumentParser(
        prog="python -m bench.compare", description="Time mha_fast against one other library."
    )
    parser.add_argument("--peer", choices=peers.names(), default="torch")
    parser.add_argument(
        "--threads", type=_counts, default=[1, 2], metavar="N,N", help="default: 1,2"
    )
    parser.add_argument(
        "--cases", type=_case_names, metavar="NAME,NAME", help=f"of: {', '.join(CASES)}"
    )
    parser.add_argument(
        "--dtype", choices=["float32", "float64"], help="for all cases (default: each its own)"
    )
    parser.add_argument("--rounds", type=_count, help=f"turns per ratio (default: {_FULL.rounds})")
    parser.add_argument("--quick", action="store_true", help="small cases, short turns")
    parser.add_argument("--markdown", action="store_true")
    options = parser.parse_args(arguments)
    effort = _QUICK if options.quick else _FULL
    options.effort = Effort(options.rounds or effort.rounds, effort.turn_seconds)
    options.cases = options.cases or (_QUICK_CASES if options.quick else list(CASES))
    return options


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
        if name not in CASES:
            raise argparse.ArgumentTypeError(f"no case {name!r}; there are {', '.join(CASES)}")
    return names


def main(arguments: list[str] | None = None) -> int:
    """Run the command; return its exit status."""
    options = _parse(arguments)
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
    return 1 if any(m.wrong for m in measured) else 0


if __name__ == "__main__":
    sys.exit(main())
