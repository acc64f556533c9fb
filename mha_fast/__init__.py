"""Fused multi-head attention on the CPU for NumPy.

    attention          softmax(scale * query @ key.T) @ value for every head, with masks, windows,
                       grouped heads, caches and gates; no n_query x n_key array is ever made
    attention_varlen   the same over packed sequences of any lengths
    attention_backward, attention_varlen_backward   gradients of all their arguments
    attention_weights  the weights themselves, of all or some queries and heads
    head_statistics    what each head looks at: entropy, confidence, offsets, ... without the weights
    merge_attention    one result from results over disjoint sets of keys
    MultiHeadAttention the layer: projections, heads, output; weights of torch, BERT and LLaMA
    apply_rotary       the rotary embedding, for heads or as the position of a layer
    cost               parameters, multiply-adds and bytes of a layer, counted
    KVCache            keys and values of growing sequences, for decoding
    onnx               the ONNX operator Attention (import mha_fast.onnx; needs the extra "onnx")
    torch              PyTorch and Transformers (import mha_fast.torch; needs the extra "torch")
    jax                JAX's dot_product_attention (import mha_fast.jax; needs the extra "jax")
    dask               attention over dask arrays (import mha_fast.dask; needs the extra "dask")
    heads              classify, rank and prune heads by those measurements
    minilm, pictures   a real network in NumPy, and pictures of its heads (import them by name)
    reference          the same formulas in plain float64 NumPy
    show_config        version, instruction set, threads
    get_num_threads    how many threads a call uses at most
    set_num_threads    change that

The command ``mha-fast demo`` shows it at work.
"""

from typing import TYPE_CHECKING, Any

from . import _cpus

try:
    with _cpus.unbound():
        from . import _core
except ImportError as error:
    from . import _source_tree

    __path__ = _source_tree.with_core(__path__, error)
    with _cpus.unbound():
        from . import _core

from ._attention import attention, attention_varlen, attention_weights
from .config import choose_isa as _choose_isa
from .config import get_num_threads, set_num_threads, show_config

if TYPE_CHECKING:
    from . import cost, heads, reference
    from ._gradients import attention_backward, attention_varlen_backward
    from ._merge import merge_attention
    from ._statistics import HeadStatistics, head_statistics
    from .cache import KVCache
    from .layer import MultiHeadAttention, apply_rotary

    __version__: str

__all__ = [
    "HeadStatistics",
    "KVCache",
    "MultiHeadAttention",
    "apply_rotary",
    "attention",
    "attention_backward",
    "attention_varlen",
    "attention_varlen_backward",
    "attention_weights",
    "cost",
    "get_num_threads",
    "head_statistics",
    "heads",
    "merge_attention",
    "reference",
    "set_num_threads",
    "show_config",
]

# Imported when first asked for: where each name is. The others are on the path of a call.
_LATER = {
    "HeadStatistics": "_statistics",
    "KVCache": "cache",
    "MultiHeadAttention": "layer",
    "apply_rotary": "layer",
    "attention_backward": "_gradients",
    "attention_varlen_backward": "_gradients",
    "cost": "",
    "head_statistics": "_statistics",
    "heads": "",
    "merge_attention": "_merge",
    "reference": "",
}


if not TYPE_CHECKING:  # who would take any name for one that exists

    def __getattr__(name: str) -> Any:
        if name == "__version__":
            from importlib.metadata import version

            value: Any = version(__name__)
        elif name in _LATER:
            from importlib import import_module

            module = import_module(f"{__name__}.{_LATER[name] or name}")
            value = getattr(module, name) if _LATER[name] else module
        else:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        globals()[name] = value  # from now on without this function
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_LATER, "__version__"})


_core.limit_default_threads(_cpus.cpu_quota() or 0)
_choose_isa()
