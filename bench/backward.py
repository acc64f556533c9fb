"""The backward pass against torch's, in alternating turns of one process.

    python -m bench.backward                                     the cells of the page
    python -m bench.backward --dtype bfloat16 --threads 1
    MHA_FAST_ISA=avx2 ATEN_CPU_CAPABILITY=avx2 python -m bench.backward --dtype float32

The gradients of both are held against float64 first, on one head. Torch runs the backward pass of
its own forward pass (``torch.autograd.grad``), without that forward pass. Ratio: torch's time over
ours, shortest of the turns, median of three; then the time of ours over that of our forward pass.
"""

import argparse
from dataclasses import dataclass
from functools import partial
from statistics import median

import numpy as np

import mha_fast
from mha_fast import reference

from .cases import CASES, Case, dtype_of
from .machine import describe
from .measure import N_RATIO, Effort, shortest_of_both

CELLS = ("prefill_2048_e64", "causal_2048_e64", "causal_2048_e128", "short_batch")

# Largest rms error of a gradient, over its rms: far above both contenders, far below a mistake.
_TOLERANCE = {"float32": 1e-4, "float64": 1e-11, "float16": 3e-3, "bfloat16": 3e-2}
_EFFORT = Effort(rounds=2, turn_seconds=0.2)


@dataclass(frozen=True)
class Problem:
    """Inputs, what the forward pass made of them, and a gradient that comes back."""

    case: Case
    grad_out: np.ndarray
    query: np.ndarray
    key: np.ndarray
    value: np.ndarray
    out: np.ndarray
    lse: np.ndarray

    @property
    def n_flop(self) -> float:
        """Multiplications and additions of the five products."""
        return 2.5 * self.case.n_flop


def make_problem(case: Case, dtype: str, num_threads: int) -> Problem:
    """Draw the arrays and run the forward pass."""
    rng = np.random.default_rng(0)
    rows = (case.n_batch, case.n_head, case.n_query, case.head_width)
    drawn = np.float64 if dtype == "float64" else np.float32
    grad_out, query, key, value = (
        rng.standard_normal(rows, dtype=drawn).astype(dtype_of(dtype)) for _ in range(4)
    )
    out, lse = mha_fast.attention(
        query, key, value, is_causal=case.is_causal, return_lse=True, num_threads=num_threads
    )
    return Problem(case, grad_out, query, key, value, out, lse)


def call_ours(problem: Problem, num_threads: int) -> partial:
    """Return our backward pass as a call without arguments."""
    p = problem
    return partial(
        mha_fast.attention_backward, p.grad_out, p.query, p.key, p.value, p.out, p.lse,
        is_causal=p.case.is_causal, num_threads=num_threads,
    )  # fmt: skip


def call_torch(problem: Problem, num_threads: int) -> partial:
    """Return torch's backward pass as a call without arguments."""
    import torch

    torch.set_num_threads(num_threads)
    p = problem
    query, key, value = (_tensor(x).requires_grad_() for x in (p.query, p.key, p.value))
    out = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, is_causal=p.case.is_causal
    )
    return partial(
        torch.autograd.grad, out, (query, key, value), _tensor(p.grad_out), retain_graph=True
    )


def _tensor(array):
    import torch

    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def check(who: str, problem: Problem, grads: tuple) -> None:
    """Compare the gradients of the first head with float64; raise where they are wrong."""
    p = problem
    one = [x[0, 0].astype(np.float64) for x in (p.grad_out, p.query, p.key, p.value)]
    right = reference.attention_backward(*one, None, None, is_causal=p.case.is_causal)
    for name, grad, right_grad in zip(("query", "key", "value"), grads, right, strict=True):
        mine = grad[0, 0]
        found = mine.astype(np.float64) if isinstance(mine, np.ndarray) else mine.double().numpy()
        error = np.sqrt(np.mean((found - right_grad) ** 2) / np.mean(right_grad**2))
        if not error <= _TOLERANCE[p.query.dtype.name]:
            raise SystemExit(f"backward: the gradient of {name} by {who} is off by {error:.2g}")


def _row(case, dtype, num_threads):
    problem = make_problem(case, dtype, num_threads)
    ours, peer = call_ours(problem, num_threads), call_torch(problem, num_threads)
    check("mha_fast", problem, ours())
    check("torch", problem, peer())
    forward = partial(
        mha_fast.attention, problem.query, problem.key, problem.value, return_lse=True,
        is_causal=case.is_causal, num_threads=num_threads,
    )  # fmt: skip
    pairs = [shortest_of_both(ours, peer, _EFFORT) for _ in range(N_RATIO)]
    ratios = [theirs / own for own, theirs in pairs]
    back, ahead = shortest_of_both(ours, forward, _EFFORT)
    speed = problem.n_flop / min(own for own, _ in pairs) / 1e9
    print(
        f"{case.shape + (', causal' if case.is_causal else ''):<28} {dtype:<9} {num_threads:<8}"
        f"{median(ratios):<6.2f}({min(ratios):.2f} to {max(ratios):.2f})   "
        f"{back / ahead:<15.2f} {speed:.0f}",
        flush=True,
    )


def main(arguments: list[str] | None = None) -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.backward", description="The backward pass against torch's."
    )
    parser.add_argument("--cases", nargs="+", choices=CASES, default=CELLS)
    parser.add_argument("--dtype", nargs="+", choices=_TOLERANCE, default=["float32", "bfloat16"])
    parser.add_argument("--threads", type=int, default=mha_fast.get_num_threads())
    options = parser.parse_args(arguments)
    try:
        import torch
    except ImportError as error:
        raise SystemExit(f"backward: needs torch ({error})") from error
    about = describe()
    print(f"mha_fast {about['mha_fast']} ({about['isa']}), torch {torch.__version__} "
          f"({torch.backends.cpu.get_cpu_capability()}); {about['cpu']}")  # fmt: skip
    print("batch, heads, queries, keys, width  dtype  threads  ratio (range)   "
          "over our forward  GFLOP/s")  # fmt: skip
    for name in options.cases:
        for dtype in options.dtype:
            _row(CASES[name], dtype, options.threads)


if __name__ == "__main__":
    main()
