"""Find what became slower, by ratios to the NumPy baseline of the same run and never by seconds.

    python -m bench.guard NEW.json                     against bench/baseline.json
    python -m bench.guard BASELINE.json NEW.json       against another run
    python -m bench.guard --record NEW.json            take what is better into bench/baseline.json

Both kinds of file will do as a baseline: what pytest-benchmark writes, and the small file of
ratios that ``--record`` makes from it. That one holds the best ratio that each case ever had on the
machine, so that falls do not add up unseen; ``--record --anew`` forgets them, for another machine or
for a fall that is wanted.

Each case was measured several times. Where these ratios lie far apart the machine was busy, and
nothing is said about the case.

Exit status: 0 nothing fell, 1 a case fell by more than the tolerance or is missing, 2 wrong usage
or a file that cannot be used, 3 nothing fell for certain but the machine was busy.
"""

import argparse
import json
import math
import sys
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

RECORDED = Path(__file__).with_name("baseline.json")

# The ratio moves with these even when the code does not.
_SETTING = ("cpu", "isa", "num_threads", "numpy")


class BadFile(Exception):
    """A file holds no ratios that could be compared."""


@dataclass(frozen=True)
class Run:
    """Per case, how many times faster than NumPy, and how far apart its repeats lie.

    The spread is how far the least is below the largest, as a share; nothing for a recorded run.
    """

    ratios: dict[str, float]
    machine: dict[str, object]
    spreads: dict[str, float] = field(default_factory=dict)


def read_run(path: Path) -> Run:
    """Read the ratios from a report of pytest-benchmark or from a recorded baseline.

    Raises
    ------
    BadFile
        Names the file and what is wrong with it.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise BadFile(f"{path}: cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise BadFile(f"{path}: is not JSON: {error}") from error
    try:
        run = _run_from_report(content) if "benchmarks" in content else _recorded_run(content)
    except BadFile as error:
        raise BadFile(f"{path}: {error}") from error
    except (KeyError, TypeError, AttributeError) as error:
        raise BadFile(
            f"{path}: is neither a report of bench/test_bench_attention.py nor a recorded "
            f"baseline ({type(error).__name__}: {error})"
        ) from error
    if not run.ratios:
        raise BadFile(f"{path}: holds no timings (was it a run with --benchmark-disable?)")
    return run


def _recorded_run(content):
    ratios = content["ratios"].items()
    checked = {case: _positive(ratio, f"the ratio of {case}") for case, ratio in ratios}
    return Run(checked, dict(content["machine"]))


def _run_from_report(report):
    shortest = defaultdict(lambda: defaultdict(dict))  # case -> repeat -> contender -> seconds
    for benchmark in report["benchmarks"]:
        info = benchmark["extra_info"]
        case, contender = info["case"], info["contender"]
        seconds = _positive(benchmark["stats"]["min"], f"the time of {contender} in {case}")
        shortest[case][info["repeat"]][contender] = seconds
    repeated = {
        case: [_ratio(case, pair) for pair in repeats.values()]
        for case, repeats in shortest.items()
    }
    ratios = {case: median(found) for case, found in repeated.items()}
    spreads = {case: 1 - min(found) / max(found) for case, found in repeated.items()}
    return Run(ratios, dict(report["machine_info"]["mha_fast"]), spreads)


def _ratio(case, seconds):
    for contender in ("numpy", "mha_fast"):
        if contender not in seconds:
            raise BadFile(f"has no timing of {contender} beside the other one in {case}")
    return seconds["numpy"] / seconds["mha_fast"]


def _positive(number, what):
    # A NaN compares false with everything and would pass for "did not fall".
    if not isinstance(number, int | float) or not math.isfinite(number) or number <= 0:
        raise BadFile(f"{what} is {number!r}; expected a finite number above 0")
    return number


@dataclass(frozen=True)
class Verdict:
    """What became of one case."""

    case: str
    before: float | None
    after: float | None
    failed: bool
    word: str
    busy: bool = False


def judge(baseline: Run, new: Run, tolerance: float, most_spread: float = 0.25) -> list[Verdict]:
    """Compare case by case; a fall by more than `tolerance` of the old ratio fails.

    A case whose repeats spread by more than `most_spread` is not judged.
    """
    cases = dict.fromkeys([*baseline.ratios, *new.ratios])  # a set that keeps the order
    return [
        _verdict(
            case,
            baseline.ratios.get(case),
            new.ratios.get(case),
            tolerance,
            new.spreads.get(case, 0) > most_spread,
        )
        for case in cases
    ]


def _verdict(case, before, after, tolerance, busy):
    if after is None:
        return Verdict(case, before, after, True, "MISSING")
    if before is None:
        return Verdict(case, before, after, False, "new, not compared")
    if busy:
        return Verdict(case, before, after, False, "not judged, the machine was busy", True)
    if after < before * (1 - tolerance):
        return Verdict(case, before, after, True, "FELL")
    return Verdict(case, before, after, False, "ok")


def table(verdicts: list[Verdict]) -> str:
    """Return the verdicts as text, one line each."""
    width = max(len(verdict.case) for verdict in verdicts)
    lines = [f"{'case':{width}}  {'baseline':>9}  {'new':>9}  {'change':>7}"]
    for verdict in verdicts:
        change = ""
        if verdict.before is not None and verdict.after is not None:
            change = f"{verdict.after / verdict.before - 1:+.0%}"
        lines.append(
            f"{verdict.case:{width}}  {_times(verdict.before):>9}  {_times(verdict.after):>9}  "
            f"{change:>7}  {verdict.word}"
        )
    return "\n".join(lines)


def _times(ratio):
    return "-" if ratio is None else f"{ratio:.2f}x"


def different_settings(baseline: Run, new: Run) -> list[str]:
    """Say where the two runs were not made alike, so that a change of ratio can be explained."""
    return [
        f"note: {name} was {baseline.machine.get(name)} in the baseline and is "
        f"{new.machine.get(name)} now; ratios may differ for that reason alone"
        for name in _SETTING
        if baseline.machine.get(name) != new.machine.get(name)
    ]


def best_of(before: Run, new: Run) -> Run:
    """Per case the better ratio of two runs; cases that `new` does not have are gone.

    Raises
    ------
    BadFile
        The runs were made on different machines or with different settings.
    """
    if notes := different_settings(before, new):
        raise BadFile("\n".join([*notes, "the best of both means nothing; --anew begins again"]))
    ratios = {case: max(ratio, before.ratios.get(case, 0)) for case, ratio in new.ratios.items()}
    return Run(ratios, new.machine)


def record(run: Run, path: Path) -> None:
    """Write the ratios of `run`, and what they were measured on, to `path`."""
    ratios = {case: round(ratio, 3) for case, ratio in run.ratios.items()}
    content = {"machine": run.machine, "ratios": ratios}
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _fraction(text):
    value = float(text)
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not in 0 <= tolerance < 1")
    return value


def _parse(arguments):
    parser = argparse.ArgumentParser(
        prog="python -m bench.guard",
        description="Compare two benchmark runs by their ratios to the NumPy baseline.",
    )
    parser.add_argument(
        "files", nargs="*", type=Path, metavar="FILE",
        help="NEW.json, or BASELINE.json NEW.json (default baseline: bench/baseline.json)",
    )  # fmt: skip
    parser.add_argument(
        "--tolerance", type=_fraction, default=0.3, metavar="FRACTION",
        help="how much of the old ratio may be lost (default: 0.3)",
    )  # fmt: skip
    parser.add_argument(
        "--spread", type=_fraction, default=0.25, metavar="FRACTION",
        help="how far a case's least ratio may be below its largest (default: 0.25)",
    )  # fmt: skip
    parser.add_argument(
        "--record", type=Path, metavar="NEW.json", help="take what is better into the baseline"
    )
    parser.add_argument("--anew", action="store_true", help="--record all of it, better or not")
    parser.add_argument(
        "--output", type=Path, default=RECORDED, metavar="PATH",
        help="where --record writes (default: bench/baseline.json)",
    )  # fmt: skip
    options = parser.parse_args(arguments)
    if options.record is None and len(options.files) not in (1, 2):
        parser.error("expected NEW.json or BASELINE.json NEW.json")
    if options.anew and options.record is None:
        parser.error("--anew goes with --record")
    if options.record is not None and options.files:
        parser.error("--record takes one file and compares nothing")
    return options


def main(arguments: list[str] | None = None) -> int:
    """Run the command; return its exit status."""
    options = _parse(arguments)
    try:
        if options.record is not None:
            run = read_run(options.record)
            if options.output.exists() and not options.anew:
                run = best_of(read_run(options.output), run)
            record(run, options.output)
            print(f"{options.output}: recorded {len(run.ratios)} ratios")
            return 0
        baseline, new = (read_run(path) for path in [RECORDED, *options.files][-2:])
    except BadFile as error:
        print(f"guard: {error}", file=sys.stderr)
        return 2
    verdicts = judge(baseline, new, options.tolerance, options.spread)
    print("times faster than NumPy in the same run")
    print(table(verdicts))
    for note in different_settings(baseline, new):
        print(note)
    n_failed = sum(verdict.failed for verdict in verdicts)
    if n_failed:
        print(f"{n_failed} failed: fell by more than {options.tolerance:.0%}, or missing")
    n_busy = sum(verdict.busy for verdict in verdicts)
    if n_busy:
        print(f"{n_busy} not judged: measure again when nothing else runs")
    return 1 if n_failed else 3 if n_busy else 0


if __name__ == "__main__":
    sys.exit(main())
