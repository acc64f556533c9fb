"""What a token costs through KVCache as the cache grows.

    python -m bench.cache --threads 1

One sequence, 32 query heads on 8 key/value heads of width 64, float32. The shortest of many calls;
a cost that grows linearly shows as equal numbers per key.
"""

import argparse

import numpy as np

import mha_fast

from .measure import shortest_of_turn

LENGTHS = (1_000, 4_000, 16_000, 64_000)


def seconds_of_a_token(length: int, threads: int) -> tuple[float, float]:
    """Shortest times of attending with one query, and of appending one token."""
    rng = np.random.default_rng(0)
    cache = mha_fast.KVCache(1, 8, 64, capacity=2 * length)
    cache.append(*rng.standard_normal((2, 1, 8, length, 64), dtype=np.float32))
    query = rng.standard_normal((1, 32, 1, 64), dtype=np.float32)
    key, value = rng.standard_normal((2, 1, 8, 1, 64), dtype=np.float32)

    def append():
        cache.append(key, value)
        cache.truncate(length)

    attend = shortest_of_turn(lambda: cache.attend(query, num_threads=threads), 0.5)
    return attend, shortest_of_turn(append, 0.1)


def main(arguments: list[str] | None = None) -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.cache", description="Cost of a token as a cache grows."
    )
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    parser.add_argument("--threads", type=int, default=mha_fast.get_num_threads())
    options = parser.parse_args(arguments)
    print("keys in the cache  attend ms  ns per key  append and truncate us")
    for length in options.lengths:
        attend, append = seconds_of_a_token(length, options.threads)
        print(
            f"{length:<17}  {attend * 1e3:<9.4g}  {attend / length * 1e9:<10.1f}  {append * 1e6:.1f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
