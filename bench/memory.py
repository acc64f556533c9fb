"""Peak memory of one call above its inputs and its output.

    python -m bench.memory --length 65536 --causal

One process measures one call: whatever a call leaves behind, a pool of threads or a cache, would
hide what the next one needs.
"""

import argparse
import sys

import numpy as np

import mha_fast
from mha_fast.reference import naive_attention

MIB = 1 << 20


def _status_bytes(field):
    with open("/proc/self/status") as lines:
        for line in lines:
            if line.startswith(field + ":"):
                return int(line.split()[1]) * 1024
    raise KeyError(f"/proc/self/status has no {field}")


def _maximum_so_far():
    # Elsewhere than on Linux only the maximum can be had. (Not the first choice on Linux: there a
    # process starts with the maximum of the one that started it.)
    import resource

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def resident_now() -> int:
    """Bytes in memory now, or the most so far where the system does not say."""
    return _status_bytes("VmRSS") if sys.platform == "linux" else _maximum_so_far()


def resident_peak() -> int:
    """Most bytes in memory so far."""
    return _status_bytes("VmHWM") if sys.platform == "linux" else _maximum_so_far()


def _fused(query, key, value, out, options):
    mha_fast.attention(
        query, key, value, is_causal=options.causal, num_threads=options.threads, out=out
    )


def _naive(query, key, value, out, options):
    out[...] = naive_attention(query, key, value, is_causal=options.causal)


CONTENDERS = {"mha_fast": _fused, "numpy": _naive}


def extra_bytes(options: argparse.Namespace) -> int:
    """Make one call; return how far memory rose above inputs and output."""
    shape = (1, 1, options.length, options.width)
    rng = np.random.default_rng(0)
    query, key, value, out = (np.empty(shape, options.dtype) for _ in range(4))
    for array in (query, key, value):
        rng.standard_normal(dtype=options.dtype, out=array)  # in place: no higher peak before
    out.fill(0)  # untouched pages would count as memory of the call
    before = resident_now()
    CONTENDERS[options.contender](query, key, value, out, options)
    return resident_peak() - before


def _parse(arguments):
    parser = argparse.ArgumentParser(
        prog="python -m bench.memory", description="Peak memory of one call on one head."
    )
    parser.add_argument("--length", type=int, default=65536, help="queries and keys")
    parser.add_argument("--width", type=int, default=64, help="width of the head")
    parser.add_argument("--dtype", choices=["float32", "float64"], default="float32")
    parser.add_argument("--causal", action="store_true")
    parser.add_argument("--threads", type=int, help="default: all that mha_fast would take")
    parser.add_argument("--contender", choices=CONTENDERS, default="mha_fast")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    """Run the command."""
    options = _parse(arguments)
    extra = extra_bytes(options)
    array = options.length * options.width * np.dtype(options.dtype).itemsize
    print(
        f"{options.contender}: {extra / MIB:.1f} MiB above inputs and output "
        f"({options.length} queries and keys, width {options.width}, {options.dtype}"
        f"{', causal' if options.causal else ''}; each array {array / MIB:.1f} MiB)"
    )


if __name__ == "__main__":
    main()
