"""A plan for many machines, on paper: time and bytes of attention over key chunks.

    python -m bench.dask_plan                                  64 machines, 10 million tokens
    python -m bench.dask_plan --machines 2 --tokens 32768 --gmadds 100 --gbytes 1

Every machine holds an equal share of the queries, keys and values, in stripes so that a causal limit
leaves each the same work. Two orders:

    ring   queries stay; the shares of keys and values go round, each machine computing with one
           while the next arrives (Liu et al. 2023)
    tree   keys stay; each machine computes with the queries of all, and the partial results of a
           share of queries are joined pairwise on the way back to its owner (Shyam et al. 2024)

Both are simulated step by step. A machine computes and receives at a time; a step ends when both are
done, and the next begins when every neighbour has what it needs. Dask's scheduler keeps no such order;
for it there is a bound:

    dask   every machine gets each chunk that it does not hold once, every partial result is joined
           elsewhere than it was made unless by chance, and nothing is sent while a machine computes
"""

import argparse
import math
from dataclasses import dataclass

from mha_fast.cost import chunk_cost


@dataclass(frozen=True)
class Plan:
    """What is computed, and on what."""

    machines: int = 64
    tokens: int = 10_000_000
    heads: int = 1
    width: int = 64
    dtype: str = "float32"
    gmadds: float = 1000.0  # billion multiply-adds a second, of a machine
    gbytes: float = 1.25  # billion bytes a second into a machine, and as many out of it
    latency: float = 1e-3  # seconds before a message flows: dask's scheduler and the network
    chunk: int = 0  # rows of a chunk for "dask"; 0: all those of a machine
    is_causal: bool = True

    @property
    def rows(self) -> int:
        """Queries, and keys, of a machine."""
        return math.ceil(self.tokens / self.machines)

    @property
    def share(self):
        """Cost of the queries of one machine with the keys of one machine."""
        return chunk_cost(self.rows, self.rows, self.width, n_head=self.heads, dtype=self.dtype)

    @property
    def step_seconds(self) -> float:
        """Time to compute with one share of keys; in stripes a causal limit leaves half."""
        work = self.share.multiply_adds * ((1 + 1 / self.rows) / 2 if self.is_causal else 1)
        return work / (self.gmadds * 1e9)

    def sending(self, n_byte: int) -> float:
        """Time for a message to arrive."""
        return self.latency + n_byte / (self.gbytes * 1e9)


@dataclass(frozen=True)
class Outcome:
    """Of a simulation."""

    seconds: float
    bytes_in: int  # into the machine that gets the most
    most_held: int  # bytes of operands and results on one machine at a time


def ring(plan: Plan) -> Outcome:
    """Shares of keys and values go round; the time of each machine is kept by itself."""
    share = plan.share
    message = share.key_bytes + share.value_bytes
    arrived = [0.0] * plan.machines  # when the keys of the coming step are there
    done = [0.0] * plan.machines
    for step in range(plan.machines):
        started = [max(a, d) for a, d in zip(arrived, done, strict=True)]
        done = [start + plan.step_seconds for start in started]
        if step < plan.machines - 1:
            # a share leaves when its holder has it and the receiver has begun with the last one
            arrived = [
                max(started[(i - 1) % plan.machines], started[i]) + plan.sending(message)
                for i in range(plan.machines)
            ]
    held = share.query_bytes + share.part_bytes + 2 * message
    return Outcome(max(done), (plan.machines - 1) * message, held)


def tree(plan: Plan) -> Outcome:
    """Queries go to all machines; partial results come back, joined pairwise on the way."""
    share = plan.share
    n_other = plan.machines - 1
    arrived, done = 0.0, 0.0
    for step in range(plan.machines):
        done = max(arrived, done) + plan.step_seconds
        if step < n_other:
            arrived += plan.sending(share.query_bytes)
    # Joining is a reduction and scatter by halves: in each level a machine sends half of what it
    # still has parts of, and gets as much.
    levels = math.ceil(math.log2(plan.machines)) if n_other else 0
    n_byte = n_other * share.query_bytes
    parts = plan.machines
    for _ in range(levels):
        sent = parts // 2
        done += plan.sending(sent * share.part_bytes)
        n_byte += sent * share.part_bytes
        parts -= sent
    held = share.key_bytes + share.value_bytes + 2 * share.query_bytes
    return Outcome(done, n_byte, held + plan.machines * share.part_bytes)


def dask(plan: Plan) -> Outcome:
    """No order, nothing overlaps: a bound."""
    rows = plan.chunk or plan.rows
    one = chunk_cost(rows, rows, plan.width, n_head=plan.heads, dtype=plan.dtype)
    n_chunk = math.ceil(plan.tokens / rows)
    n_pair = n_chunk * (n_chunk + 1) // 2 if plan.is_causal else n_chunk**2
    away = 1 - 1 / plan.machines
    n_input = math.ceil(n_chunk * away)
    n_part = math.ceil(n_pair / plan.machines * away)
    n_byte = n_input * one.input_bytes + n_part * one.part_bytes
    seconds = plan.step_seconds * plan.machines + (3 * n_input + n_part) * plan.latency
    held = 2 * one.input_bytes + one.part_bytes
    return Outcome(seconds + n_byte / (plan.gbytes * 1e9), n_byte, held)


def table(plan: Plan) -> str:
    """Return both orders beside the time without any network."""
    least = plan.step_seconds * plan.machines
    what = f"{plan.heads} head(s) of {plan.width}, {plan.dtype}"
    lines = [
        f"{plan.machines} machines, {plan.tokens:,} tokens, {what}{', causal' * plan.is_causal}",
        f"{plan.rows:,} tokens a machine; {least:,.1f} s if nothing had to be sent",
        "order   seconds   efficiency   GB into a machine   GB held",
    ]
    for order in (ring, tree, dask):
        outcome = order(plan)
        lines.append(
            f"{order.__name__:<5}{outcome.seconds:>10,.1f}{least / outcome.seconds:>13.2f}"
            f"{outcome.bytes_in / 1e9:>20.3f}{outcome.most_held / 1e9:>10.3f}"
        )
    return "\n".join(lines)


def main(arguments=None) -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.dask_plan", description=__doc__.splitlines()[0]
    )
    for name, default in vars(Plan()).items():
        if not isinstance(default, bool):
            parser.add_argument(f"--{name}", type=type(default), default=default)
    parser.add_argument("--full", action="store_true", help="without the causal limit")
    options = vars(parser.parse_args(arguments))
    print(table(Plan(is_causal=not options.pop("full"), **options)))


if __name__ == "__main__":
    main()
