"""Random shapes, chunks and options of `mha_fast.dask.attention` against the formula.

    python tests/fuzz_dask.py --cases 2000
    python tests/fuzz_dask.py --cases 2000 --backward  the gradients, against those of one call
    python tests/fuzz_dask.py --seed 7 --case 1234     one of them again

The calls are those of fuzz_attention.py, and so are the limits of the error.
"""

import argparse
import sys
import time
import traceback
from pathlib import Path

# The folder of the tests comes first, that of the checkout (bare sources) not at all.
ROOT = Path(__file__).resolve().parent.parent
sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != ROOT]

from _dask_cases import check, check_backward, draw
from _fuzz_checks import Report

N_CASE = 2000


def main(arguments=None):
    """Run the command; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=N_CASE)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--case", type=int, help="only this one")
    parser.add_argument("--backward", action="store_true", help="the gradients")
    options = parser.parse_args(arguments)
    numbers = range(options.cases) if options.case is None else [options.case]
    start, report, n_finding = time.monotonic(), Report(), 0
    for number in numbers:
        try:
            if options.backward:
                check_backward(options.seed, number)
            else:
                check(options.seed, number, report)
        except Exception:  # noqa: BLE001 - any exception is a finding
            n_finding += 1
            print(f"\nFINDING: seed {options.seed}, case {number}\n{traceback.format_exc()}")
            case, arguments = draw(options.seed, number)
            print(case.describe(), {k: getattr(v, "chunks", v) for k, v in arguments.items()})
    seconds = time.monotonic() - start
    nearest = f"; largest error {report.share:.2f} of its limit ({report.where})"
    print(
        f"{len(numbers)} cases in {seconds:.1f} s, {n_finding} findings"
        + ("" if options.backward else nearest)
    )
    return 1 if n_finding else 0


if __name__ == "__main__":
    sys.exit(main())
