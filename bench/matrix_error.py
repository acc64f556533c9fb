"""Errors of the matrix unit against float64, beside those of the vector units and of torch.

    python -m bench.matrix_error                  prints the table, as reStructuredText
    python -m bench.matrix_error --length 512

Inputs: normal numbers; queries four times as large; values with an offset of 100, all for
(1, 8, length, length, 64). Exit status 2 where the CPU has no such unit.
"""

import argparse
import sys

import numpy as np

import mha_fast
from mha_fast import _core

INPUTS = ("normal", "4 x logits", "values + 100")


def draw(kind: str, length: int, dtype) -> list[np.ndarray]:
    """Query, key and value of one head after the other."""
    rng = np.random.default_rng(0)
    query, key, value = rng.standard_normal((3, 1, 8, length, 64), dtype=np.float32)
    if kind == "4 x logits":
        query *= 4
    if kind == "values + 100":
        value += 100
    return [x.astype(dtype) for x in (query, key, value)]


def right(inputs) -> np.ndarray:
    """Compute the formula in float64, head by head: it writes all weights out."""
    heads = [mha_fast.reference.attention(*(x[:, [h]] for x in inputs)) for h in range(8)]
    return np.concatenate(heads, axis=1)


def with_isa(name, *inputs, **options) -> np.ndarray:
    """Run `attention` on one instruction set."""
    before = _core.isa()
    _core.use_isa(name)
    try:
        return mha_fast.attention(*inputs, **options)
    finally:
        _core.use_isa(before)


def torch_attention(inputs) -> np.ndarray | None:
    """Run torch, if it is installed."""
    try:
        import torch
    except ImportError:
        return None
    tensors = [torch.from_numpy(x.astype(np.float32)) for x in inputs]
    if inputs[0].dtype.name == "bfloat16":
        tensors = [x.bfloat16() for x in tensors]
    return torch.nn.functional.scaled_dot_product_attention(*tensors).float().numpy()


def rows(dtype, length):
    """Yield kind of input, contender, largest and rms error."""
    for kind in INPUTS:
        inputs = draw(kind, length, dtype)
        expected = right(inputs)
        results = {"matrix unit": with_isa("amx", *inputs)}
        if dtype == np.float32:
            results['matrix unit, "high"'] = with_isa("amx", *inputs, precision="high")
        results["vector units"] = with_isa("avx512", *inputs)
        results["torch"] = torch_attention(inputs)
        for contender, result in results.items():
            if result is not None:
                error = result.astype(np.float64) - expected
                yield kind, contender, np.abs(error).max(), np.sqrt(np.mean(error**2))


def main(arguments: list[str] | None = None) -> int:
    """Run the command; return its exit status."""
    parser = argparse.ArgumentParser(prog="python -m bench.matrix_error", description=__doc__)
    parser.add_argument("--length", type=int, default=2048)
    options = parser.parse_args(arguments)
    if "amx" not in _core.available_isas():
        print("matrix_error: this CPU has no matrix unit", file=sys.stderr)
        return 2
    dtypes = [np.dtype(np.float32)]
    try:
        import ml_dtypes

        dtypes.append(np.dtype(ml_dtypes.bfloat16))
    except ImportError:
        pass
    line = "=" * 8 + " " + "=" * 12 + " " + "=" * 19 + " " + "=" * 9 + " " + "=" * 9
    print(line, f"{'dtype':8} {'inputs':12} {'computed by':19} {'max error':9} rms", line, sep="\n")
    for dtype in dtypes:
        for kind, contender, most, rms in rows(dtype, options.length):
            print(f"{dtype.name:8} {kind:12} {contender:19} {most:<9.1e} {rms:.2e}")
    print(line)
    return 0


if __name__ == "__main__":
    sys.exit(main())
