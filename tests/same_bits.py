"""Whether two builds give the same bits: random calls of the fuzzer, run in both, compared to the byte.

    python tests/same_bits.py BEFORE AFTER                 two interpreters, e.g. venv/bin/python
    python tests/same_bits.py BEFORE AFTER --isa avx512 --cases 200

Each instruction set that both can run gets the same cases. NaN is compared apart: which of two
NaN an addition keeps is up to the order that a compiler gave its operands. Exit status 1 where
anything else differs.
"""

import argparse
import hashlib
import json
import subprocess
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

# The folder of the tests comes first, that of the checkout (bare sources) not at all.
ROOT = Path(__file__).resolve().parent.parent
sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != ROOT]

N_CASE, N_SHOWN = 2000, 10


def main(arguments=None):
    """Run the command; return the exit status."""
    options = _parser().parse_args(arguments)
    if options.worker:
        return _work(**json.loads(options.worker))
    pythons = (options.before, options.after)
    before, after = (_lines_of(python, what="facts")[0] for python in pythons)
    isas = [name for name in before["isas"] if name in after["isas"]]
    entries = [name for name in before["entries"] if name in after["entries"]]
    for name, facts in (("before", before), ("after", after)):
        print(f"{name}: {facts['folder']}")
    status = 0
    for isa in options.isa or isas:
        if isa not in isas:
            print(f"{isa}: not in both builds")
            status = 1
            continue
        status |= _compare(pythons, isa, entries, options)
    return status


def _compare(pythons, isa, entries, options):
    """Run all cases on one instruction set in both builds; print and return what differs."""
    how = {
        "what": "digests", "isa": isa, "entries": entries, "seed": options.seed,
        "n_case": options.cases,
    }  # fmt: skip
    with ThreadPoolExecutor() as pool:
        results = list(pool.map(lambda python: _lines_of(python, **how), pythons))
    other, other_nan = [], 0
    for number, (one, two) in enumerate(zip(*results, strict=True)):
        if one["numbers"] != two["numbers"]:
            other.append(f"  case {number}: {one['case']}")
        elif one["bytes"] != two["bytes"]:
            other_nan += 1
    print(f"{isa}: {options.cases} cases, {len(other)} differ, {other_nan} in bits of NaN alone")
    print("\n".join(other[:N_SHOWN]), end="\n" if other else "", flush=True)
    return 1 if other else 0


# ---- in either interpreter ----------------------------------------------------------------------


def _lines_of(python, **how):
    """What this file, run as a worker, prints there: one JSON value per line."""
    command = [python, str(Path(__file__).resolve()), "-", "-", "--worker", json.dumps(how)]
    worker = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if worker.returncode:
        raise SystemExit(f"{python} ended with status {worker.returncode}")
    return [json.loads(line) for line in worker.stdout.splitlines()]


def _work(what, **how):
    if what == "facts":
        _print_facts()
    else:
        _print_digests(**how)
    return 0


def _print_facts():
    from _fuzz_cases import entries
    from _support import ISAS

    import mha_fast

    folder = str(Path(mha_fast.__file__).parent)
    print(json.dumps({"isas": ISAS, "entries": entries(), "folder": folder}))


def _print_digests(isa, entries, seed, n_case):
    """One line per case: a digest of all result bytes, and one with every NaN made the same."""
    from _fuzz_cases import draw_case
    from _fuzz_checks import results_of

    warnings.simplefilter("ignore")
    for number in range(n_case):
        case = draw_case(seed, number, [isa], entries[number % len(entries)])
        results = results_of(case)
        whole, numbers = hashlib.sha256(), hashlib.sha256()
        for x in results:
            whole.update(x.tobytes())
            numbers.update(_one_nan(x).tobytes())
        line = {
            "bytes": whole.hexdigest(), "numbers": numbers.hexdigest(), "case": case.describe(),
        }  # fmt: skip
        print(json.dumps(line))


def _one_nan(x):
    import numpy as np

    x = x.copy()
    x[np.isnan(x)] = np.nan
    return x


def _parser():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("before", help="a Python that has the one build installed")
    parser.add_argument("after", help="a Python that has the other")
    parser.add_argument("--cases", type=int, default=N_CASE, help="per instruction set")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--isa", action="append", help="only these, as the tests name them")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    sys.exit(main())
