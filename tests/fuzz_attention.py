"""Differential fuzzer: random calls against ``mha_fast.reference``.

    python tests/fuzz_attention.py --cases 20000            a long run
    python tests/fuzz_attention.py --seconds 600 --seed 7   as many as fit in ten minutes
    python tests/fuzz_attention.py --seed 7 --case 1234     one of them again
    python tests/fuzz_attention.py --entry attention_backward    gradients, which have runs of their own

A case follows from the seed and its number alone. Each finding is described, by a simpler call if
one fails in the same way; then the exit status is 1.

    _fuzz_cases.py      draws a call
    _fuzz_layouts.py    puts its arrays in awkward places
    _fuzz_checks.py     runs and judges it
    _fuzz_formulas.py   what each entry point should return
    _fuzz_merge.py, _fuzz_cache.py, _fuzz_backward.py    entry points that take more than one call
"""

import argparse
import sys
import time
import traceback
import warnings
from pathlib import Path

# The folder of the tests comes first, that of the checkout (bare sources) not at all.
ROOT = Path(__file__).resolve().parent.parent
sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != ROOT]

from _fuzz_cases import backward_entries, draw_case, entries
from _fuzz_checks import Report, check, reduced
from _support import ISAS

import mha_fast

N_CASE = 20000


def main(arguments=None):
    """Run the command; return the exit status."""
    options = _parser().parse_args(arguments)
    isas = options.isa or ISAS
    print(f"mha_fast {mha_fast.__version__} in {Path(mha_fast.__file__).parent}")
    print(f"seed {options.seed}; {', '.join(isas)}; {', '.join(dict.fromkeys(entries()))}")
    start, report, n_case, n_finding = time.monotonic(), Report(), 0, 0
    for number in _numbers(options):
        if options.seconds is not None and time.monotonic() - start >= options.seconds:
            break
        n_finding += not _passes(options, number, isas, report)
        n_case += 1
        if n_finding >= options.max_findings:
            break
    seconds = time.monotonic() - start
    print(
        f"{n_case} cases in {seconds:.1f} s ({n_case / seconds:.0f} per second), "
        f"{n_finding} findings; largest error {report.share:.2f} of its limit ({report.where})"
    )
    return 1 if n_finding else 0


def _passes(options, number, isas, report):
    """Check one case; describe it if something is wrong."""
    case = draw_case(options.seed, number, isas, options.entry)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            check(case, report)
    except Exception:  # noqa: BLE001 - any exception is a finding
        print(f"\nFINDING: seed {options.seed}, case {number}")
        print(traceback.format_exc() + reduced(case).describe(), flush=True)
        return False
    return True


def _numbers(options):
    """Numbers of the cases to run."""
    if options.case is not None:
        return [options.case]
    n_case = options.cases
    if n_case is None:
        n_case = N_CASE if options.seconds is None else sys.maxsize - options.start
    return range(options.start, options.start + n_case)


def _parser():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--cases", type=int, help=f"how many ({N_CASE} without --seconds)")
    parser.add_argument("--seconds", type=float, help="stop after this time")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--start", type=int, default=0, metavar="CASE", help="number of the first")
    parser.add_argument("--case", type=int, help="only the case of this number")
    parser.add_argument("--entry", choices=[*dict.fromkeys(entries()), *backward_entries()],
                        help="only this entry point; the backward ones only so")  # fmt: skip
    parser.add_argument("--isa", action="append", choices=ISAS)
    parser.add_argument("--max-findings", type=int, default=20, help="stop after so many")
    return parser


if __name__ == "__main__":
    sys.exit(main())
