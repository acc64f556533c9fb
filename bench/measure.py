"""The process that times mha_fast against one peer; ``bench.compare`` starts it.

One process per thread count: most libraries fix the size of a thread pool when they are loaded.
Prints one JSON object per line: first what it runs on, then one for each case.
"""

import argparse
import json
import math
import time
from dataclasses import asdict, dataclass, replace
from functools import partial
from statistics import median

import mha_fast

from . import accuracy, machine, peers
from .cases import DTYPES, Case, find, make_inputs

# A median of three ratios survives one that was taken while the machine changed its speed.
N_RATIO = 3

# In so long a call what the other contender left in caches and cores is lost in the noise.
_LONG_CALL_SECONDS = 0.5


@dataclass(frozen=True)
class Effort:
    """How long to measure."""

    rounds: int  # turns of each contender per ratio
    turn_seconds: float


@dataclass(frozen=True)
class Measurement:
    """One case at one thread count; `refused` says why there are no times."""

    case: str
    shape: str
    dtype: str
    num_threads: int
    precision: str = "highest"
    way: str = ""  # which of the peer's ways was the fastest
    refused: str | None = None
    wrong: bool = False
    ours_seconds: float = math.nan
    peer_seconds: float = math.nan
    ratios: tuple[float, ...] = ()
    ours_error: float = math.nan
    peer_error: float = math.nan
    gflops: float = math.nan
    fma_peak: float | None = None
    matrix_peak: float | None = None
    gbytes: float = math.nan
    read_peak: float = math.nan

    @property
    def ratio(self) -> float:
        """The ratio to quote: peer over ours, so that above 1 is faster."""
        return median(self.ratios)


def shortest_of_turn(call, turn_seconds: float) -> float:
    """Call over and over for `turn_seconds`, twice at least; return the shortest time.

    The first call does not count: the caches and the cores still belong to the other contender.
    One that lasts longer than such things is all there is of the turn.
    """
    first = _seconds_of(call)
    if first > max(_LONG_CALL_SECONDS, turn_seconds):
        return first
    shortest = math.inf
    n_call = 0
    end = time.perf_counter() + turn_seconds
    while n_call < 2 or time.perf_counter() < end:
        shortest = min(shortest, _seconds_of(call))
        n_call += 1
    return shortest


def _seconds_of(call):
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def highest_of_turn(measure_peak, turn_seconds: float) -> float:
    """Measure a peak of the machine over and over for one turn; return the highest.

    A single measurement takes a millisecond, in which the threads of the turn before may still
    be spinning.
    """
    highest = measure_peak()
    end = time.perf_counter() + turn_seconds
    while time.perf_counter() < end:
        highest = max(highest, measure_peak())
    return highest


def shortest_of_both(ours, peer, effort: Effort) -> tuple[float, float]:
    """Let the two take turns, ours, peer, ours, peer; return the shortest time of each."""
    turns = [
        (shortest_of_turn(ours, effort.turn_seconds), shortest_of_turn(peer, effort.turn_seconds))
        for _ in range(effort.rounds)
    ]
    ours_turns, peer_turns = zip(*turns, strict=True)
    return min(ours_turns), min(peer_turns)


def measure_case(
    case: Case, peer, num_threads: int, effort: Effort, precision: str = "highest"
) -> Measurement:
    """Check both results against float64, then time both; `precision` is that of mha_fast."""
    nothing = Measurement(case.name, case.shape, case.dtype, num_threads, precision)
    inputs = make_inputs(case)
    call_ours = partial(
        mha_fast.attention,
        *inputs,
        is_causal=case.is_causal,
        precision=precision,
        num_threads=num_threads,
    )
    try:
        prepared = peer.prepare(case, inputs, num_threads)
        expected = accuracy.expected_rows(case, inputs)
        ours_error = _checked_error("mha_fast", expected, call_ours(), precision)
        peer_result = prepared.to_numpy(prepared.call())
        peer_error = _checked_error("the peer", expected, peer_result, "highest")
    except peers.Unsupported as reason:
        return replace(nothing, refused=str(reason))
    except accuracy.WrongResult as reason:
        return replace(nothing, refused=str(reason), wrong=True)

    measure_fma = machine.fma_meter(num_threads, case.dtype)
    measure_matrix = None
    if machine.matrix_products(case.dtype, precision) is not None:
        measure_matrix = machine.matrix_meter(num_threads)
    measure_read = machine.ReadMeter(num_threads, case.n_bytes)
    # The peaks are taken between the ratios: a shared machine changes its speed within a minute.
    pairs, fma_peaks, matrix_peaks, read_peaks = [], [], [], []
    for _ in range(N_RATIO):
        if measure_fma is not None:
            fma_peaks.append(highest_of_turn(measure_fma, effort.turn_seconds))
        if measure_matrix is not None:
            matrix_peaks.append(highest_of_turn(measure_matrix, effort.turn_seconds))
        read_peaks.append(highest_of_turn(measure_read, effort.turn_seconds))
        pairs.append(shortest_of_both(call_ours, prepared.call, effort))
    ours_seconds = min(ours for ours, _ in pairs)
    return replace(
        nothing,
        way=prepared.way,
        ours_seconds=ours_seconds,
        peer_seconds=min(peer_seconds for _, peer_seconds in pairs),
        ratios=tuple(peer_seconds / ours for ours, peer_seconds in pairs),
        ours_error=ours_error,
        peer_error=peer_error,
        gflops=case.n_flop / ours_seconds / 1e9,
        fma_peak=max(fma_peaks, default=None),
        matrix_peak=max(matrix_peaks, default=None),
        gbytes=case.n_bytes / ours_seconds / 1e9,
        read_peak=max(read_peaks),
    )


def _checked_error(who, expected, result, precision):
    try:
        return expected.error_of(result, precision)
    except accuracy.WrongResult as error:
        raise accuracy.WrongResult(f"{who} is wrong: {error}") from error


def _parse(arguments):
    parser = argparse.ArgumentParser(prog="python -m bench.measure", description=__doc__)
    parser.add_argument("--peer", required=True, choices=peers.names())
    parser.add_argument("--threads", required=True, type=int)
    parser.add_argument("--cases", required=True, nargs="+", type=find)
    parser.add_argument("--dtype", choices=DTYPES)
    parser.add_argument("--precision", default="highest")
    parser.add_argument("--rounds", required=True, type=int)
    parser.add_argument("--turn-seconds", required=True, type=float)
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    """Measure what the arguments say and print it line by line."""
    options = _parse(arguments)
    try:
        peer = peers.load(options.peer)
    except peers.MissingLibrary as error:
        raise SystemExit(f"measure: {error}") from error
    effort = Effort(options.rounds, options.turn_seconds)
    print(json.dumps({"machine": machine.describe(), "peer": peer.version()}), flush=True)
    with peer.session(options.threads):
        for case in options.cases:
            if options.dtype is not None:
                case = replace(case, dtype=options.dtype)
            measured = measure_case(case, peer, options.threads, effort, options.precision)
            print(json.dumps(asdict(measured)), flush=True)


if __name__ == "__main__":
    main()
