"""Time and memory of one head against the length: 512 to 65,536 queries and keys of width 64.

    python -m bench.scaling                                  everything; several minutes
    python -m bench.scaling --peer numpy --lengths 512,1024  a part of it
    python -m bench.scaling --draw                           the picture and the page only

Full and causal, float32. Times: alternating turns against one peer, as in ``bench.compare``; a
window of 1024 keys, and how much of the time of a full call a causal one takes, for ``mha_fast``
alone. Memory: one process per point, as in ``bench.memory``. Everything is kept in
``bench/results/scaling.json``, drawn to ``docs/pictures/scaling.png`` and listed on the results page.
"""

import argparse
import shlex
import subprocess
import sys
from argparse import Namespace
from datetime import date
from functools import partial
from pathlib import Path
from statistics import median

import mha_fast

from . import machine, page, peers, scaling_view, store
from .cases import CASES, make_inputs, one_head
from .compare import ROOT, measurements
from .measure import N_RATIO, Effort, Measurement, shortest_of_both, shortest_of_turn
from .memory import CONTENDERS

LENGTHS = [512 << i for i in range(8)]
WINDOW = 1024
PEERS = [name for name in CONTENDERS if name != "mha_fast"]  # whose memory can be weighed

_TURN_SECONDS = 0.1
_QUICK_LENGTHS = [64, 128]
_QUICK_TURN_SECONDS = 0.002
_RATIO_CASES = ("prefill_2048_e64", "causal_2048_e64")


def pair_times(peer: str, lengths: list[int], num_threads: int, turn_seconds: float):
    """Yield a point of mha_fast and one of the peer for each length, full and causal."""
    problems = [one_head(n, is_causal) for n in lengths for is_causal in (False, True)]
    options = Namespace(
        peer=peer,
        cases=[problem.name for problem in problems],
        dtype="float32",
        precision="highest",
        effort=Effort(1, turn_seconds),
    )
    lines = measurements(options, num_threads)
    next(lines)  # about the machine
    for problem, line in zip(problems, lines, strict=True):
        measured = Measurement(**line)
        if measured.wrong:
            raise SystemExit(f"scaling: {problem.name}: {measured.refused}")
        if measured.refused is None:
            yield _point("mha_fast", problem, measured.ours_seconds)
            yield _point(peer, problem, measured.peer_seconds)


def _point(contender, problem, seconds):
    return {
        "contender": contender,
        "length": problem.n_query,
        "is_causal": problem.is_causal,
        "window": None,
        "seconds": seconds,
        "extra_bytes": None,
    }


def window_point(length: int, num_threads: int, turn_seconds: float) -> dict:
    """Time mha_fast where each query sees itself and `WINDOW` keys before it."""
    problem = one_head(length, False)
    query, key, value, _ = make_inputs(problem)
    call = partial(
        mha_fast.attention, query, key, value, window=(WINDOW, 0), num_threads=num_threads
    )
    seconds = min(shortest_of_turn(call, turn_seconds) for _ in range(N_RATIO))
    return _point("mha_fast", problem, seconds) | {"window": WINDOW}


def causal_share(num_threads: int, turn_seconds: float) -> float:
    """Time of a causal call over that of a full one."""
    calls = [
        partial(
            mha_fast.attention,
            *make_inputs(CASES[name]),
            is_causal=CASES[name].is_causal,
            num_threads=num_threads,
        )
        for name in _RATIO_CASES
    ]
    pairs = [shortest_of_both(*calls, Effort(3, turn_seconds)) for _ in range(N_RATIO)]
    return median(causal / full for full, causal in pairs)


def extra_bytes(point: dict, num_threads: int) -> int:
    """Weigh one call in a process of its own."""
    command = [
        *(sys.executable, "-m", "bench.memory", "--bytes"),
        *("--length", str(point["length"])),
        *("--threads", str(num_threads)),
        *("--contender", point["contender"]),
        *(("--causal",) if point["is_causal"] else ()),
    ]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    return int(done.stdout)


def measure(options: argparse.Namespace) -> dict:
    """Measure what the options say."""
    about = {"machine": machine.describe()}
    del about["machine"]["num_threads"]  # the one below counts
    points = {}
    for peer in options.peer:
        for point in pair_times(peer, options.lengths, options.threads, options.turn_seconds):
            _show(point)
            _keep(points, point)
    for length in options.lengths:
        point = window_point(length, options.threads, options.turn_seconds)
        _show(point)
        _keep(points, point)
    for point in points.values():
        if point["window"] is None:
            point["extra_bytes"] = extra_bytes(point, options.threads)
            _show(point)
    return {
        "about": about,
        "date": date.today().isoformat(),
        "commands": [_command(options)],
        "num_threads": options.threads,
        "quick": options.quick,
        "causal_share": causal_share(options.threads, options.turn_seconds),
        "points": list(points.values()),
    }


def _key(point):
    return point["contender"], point["length"], point["is_causal"], point["window"]


def _keep(points, point):
    """mha_fast is timed against every peer: the shortest time counts."""
    known = points.get(_key(point))
    if known is None or point["seconds"] < known["seconds"]:
        points[_key(point)] = point


def _show(point):
    kind = "causal" if point["is_causal"] else "full"
    if point["window"] is not None:
        kind = f"window {point['window']}"
    found = f"{point['seconds'] * 1e3:.4g} ms"
    if point["extra_bytes"] is not None:
        found = f"{point['extra_bytes'] / (1 << 20):.1f} MiB"
    print(f"{point['contender']:9} {point['length']:6} {kind:11} {found}", flush=True)


def merged(old: dict | None, new: dict) -> dict:
    """Return `new` with those points of `old` that are still good and were not measured again."""
    alike = ("about", "num_threads", "quick")
    if old is None or any(old[name] != new[name] for name in alike):
        return new
    points = {_key(point): point for point in old["points"]}
    points |= {_key(point): point for point in new["points"]}
    commands = list(dict.fromkeys([*old["commands"], *new["commands"]]))
    return new | {"commands": commands, "points": list(points.values())}


def _command(options):
    words = ["python", "-m", "bench.scaling", "--peer", ",".join(options.peer)]
    if options.lengths != LENGTHS:
        words += ["--lengths", ",".join(map(str, options.lengths))]
    words += ["--threads", str(options.threads)]
    return shlex.join([*words, *(["--quick"] if options.quick else [])])


def _numbers(text):
    return [int(part) for part in text.split(",")]


def _parse(arguments):
    parser = argparse.ArgumentParser(
        prog="python -m bench.scaling", description="Time and memory of one head against length."
    )
    parser.add_argument("--peer", type=peers.list_of(PEERS), metavar="NAME,NAME")
    parser.add_argument("--lengths", type=_numbers, metavar="N,N", help="default: 512 to 65536")
    parser.add_argument("--threads", type=int, default=mha_fast.get_num_threads())
    parser.add_argument("--quick", action="store_true", help="short calls, short turns")
    parser.add_argument("--draw", action="store_true", help="measure nothing")
    parser.add_argument("--results", type=Path, default=store.RESULTS, help="folder to keep it in")
    parser.add_argument("--picture", type=Path, default=scaling_view.PICTURE)
    parser.add_argument("--page", type=Path, default=page.PAGE, help="the page to write")
    options = parser.parse_args(arguments)
    options.peer = options.peer or [name for name in PEERS if name in peers.installed()]
    options.lengths = options.lengths or (_QUICK_LENGTHS if options.quick else LENGTHS)
    options.turn_seconds = _QUICK_TURN_SECONDS if options.quick else _TURN_SECONDS
    return options


def main(arguments: list[str] | None = None) -> None:
    """Run the command."""
    options = _parse(arguments)
    path = options.results / store.SCALING
    if not options.draw:
        store.write(merged(store.read(path), measure(options)), "points", path)
    kept = store.read(path)
    if kept is None:
        raise SystemExit(f"scaling: {path} is not there: nothing to draw")
    scaling_view.draw(kept, options.picture)
    page.write(options.results, options.page)
    print(f"{options.picture}, {options.page}: written")


if __name__ == "__main__":
    main()
