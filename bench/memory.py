"""Peak memory of one call above its inputs and its output.

    python -m bench.memory --length 65536 --causal
    python -m bench.memory --length 65536 --causal --backward

One process measures one call: whatever a call leaves behind, a pool of threads or a cache, would
hide what the next one needs.
"""

import argparse
import sys
from dataclasses import replace

import numpy as np

import mha_fast

from . import peers
from .cases import Case, make_inputs

MIB = 1 << 20
_SMALL = 16
_TILE = 64  # rows and keys that take the code of a long call


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


# Those that allocate within the call and not when they prepare it.
CONTENDERS = ("mha_fast", "numpy", "torch")


def extra_bytes(options: argparse.Namespace) -> int:
    """Make one call; return how far memory rose above inputs and output."""
    case = Case(
        "one call", 1, 1, 1, options.length, options.length, options.width,
        is_causal=options.causal, dtype=options.dtype,
    )  # fmt: skip
    weigh = _rise_of_mha_fast if options.contender == "mha_fast" else _rise_of_peer
    if options.backward:
        weigh = _rise_of_backward
    return weigh(case, make_inputs(case), options)


def _rise_of_mha_fast(case, inputs, options):
    out = np.empty_like(inputs.query)
    out.fill(0)  # untouched pages would count as memory of the call
    small = make_inputs(replace(case, n_query=_TILE, n_key=_TILE))
    mha_fast.attention(*small, is_causal=case.is_causal)  # pages of code are read at the first call
    before = resident_now()
    mha_fast.attention(*inputs, is_causal=case.is_causal, num_threads=options.threads, out=out)
    return resident_peak() - before


def _rise_of_backward(case, inputs, options):
    """Above the inputs, what the forward pass left, and the three gradients."""
    forward = {"is_causal": case.is_causal, "num_threads": options.threads}
    out, lse = mha_fast.attention(*inputs, return_lse=True, **forward)
    before = resident_now()
    grads = mha_fast.attention_backward(out, *inputs[:3], out, lse, **forward)
    return resident_peak() - before - sum(grad.nbytes for grad in grads)


def _rise_of_peer(case, inputs, options):
    peer = peers.load(options.contender)
    num_threads = options.threads or mha_fast.get_num_threads()
    with peer.session(num_threads):
        # Pages of code are read at the first call, and these libraries have a lot of it.
        small = replace(case, n_query=_SMALL, n_key=_SMALL)
        peer.prepare(small, make_inputs(small), num_threads).call()
        prepared = peer.prepare(case, inputs, num_threads)
        before = resident_now()
        result = prepared.call()
        rise = resident_peak() - before
        # A result of a few pages may lie in memory that was there before.
        return max(rise - prepared.to_numpy(result).nbytes, 0)


def _parse(arguments):
    parser = argparse.ArgumentParser(
        prog="python -m bench.memory", description="Peak memory of one call on one head."
    )
    parser.add_argument("--length", type=int, default=65536, help="queries and keys")
    parser.add_argument("--width", type=int, default=64, help="width of the head")
    parser.add_argument("--dtype", choices=["float32", "float64"], default="float32")
    parser.add_argument("--causal", action="store_true")
    parser.add_argument("--backward", action="store_true", help="of attention_backward()")
    parser.add_argument("--threads", type=int, help="default: all that mha_fast would take")
    parser.add_argument("--contender", choices=CONTENDERS, default="mha_fast")
    parser.add_argument("--bytes", action="store_true", help="print the number alone")
    options = parser.parse_args(arguments)
    if options.backward and options.contender != "mha_fast":
        parser.error("--backward is of mha_fast")
    return options


def main(arguments: list[str] | None = None) -> None:
    """Run the command."""
    options = _parse(arguments)
    try:
        extra = extra_bytes(options)
    except (peers.MissingLibrary, peers.Unsupported) as error:
        raise SystemExit(f"memory: {error}") from error
    if options.bytes:
        print(extra)
        return
    array = options.length * options.width * np.dtype(options.dtype).itemsize
    print(
        f"{options.contender}: {extra / MIB:.1f} MiB above inputs and "
        f"{'gradients' if options.backward else 'output'} "
        f"({options.length} queries and keys, width {options.width}, {options.dtype}"
        f"{', causal' if options.causal else ''}; each array {array / MIB:.1f} MiB)"
    )


if __name__ == "__main__":
    main()
