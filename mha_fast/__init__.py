"""Fused multi-head attention on the CPU for NumPy.

    attention          softmax(scale * query @ key.T) @ value for every head, with masks, windows,
                       grouped heads, caches and gates; no n_query x n_key array is ever made
    attention_varlen   the same over packed sequences of any lengths
    attention_weights  the weights themselves, of all or some queries and heads
    head_statistics    what each head looks at: entropy, confidence, offsets, ... without the weights
    merge_attention    one result from results over disjoint sets of keys
    MultiHeadAttention the layer: projections, heads, output; weights of torch, BERT and LLaMA
    cost               parameters, multiply-adds and bytes of a layer, counted
    KVCache            keys and values of growing sequences, for decoding
    onnx               the ONNX operator Attention (import mha_fast.onnx; needs the extra "onnx")
    heads              classify, rank and prune heads by those measurements
    minilm, pictures   a real network in NumPy, and pictures of its heads (import them by name)
    reference          the same formulas in plain float64 NumPy
    show_config        version, instruction set, threads
    get_num_threads    how many threads a call uses at most
    set_num_threads    change that

The command ``mha-fast demo`` shows it at work.
"""

from importlib.metadata import version as _version

from . import _cpus

try:
    with _cpus.unbound():
        from . import _core as _core
except ImportError as error:
    from pathlib import Path as _Path

    if (_Path(__file__).parent.parent / "CMakeLists.txt").exists():
        raise ImportError(
            "This is the source tree of mha_fast, whose compiled core is not in it. "
            "Run Python from another folder to get the installed package, or install the tree "
            "for development with: pip install -e ."
        ) from error
    raise

from . import cost, heads, reference
from ._attention import attention, attention_varlen, attention_weights
from ._merge import merge_attention
from ._statistics import HeadStatistics, head_statistics
from .cache import KVCache
from .config import choose_isa as _choose_isa
from .config import get_num_threads, set_num_threads, show_config
from .layer import MultiHeadAttention

__version__ = _version("mha_fast")

__all__ = [
    "HeadStatistics",
    "KVCache",
    "MultiHeadAttention",
    "attention",
    "attention_varlen",
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

_core.limit_default_threads(_cpus.cpu_quota() or 0)
_choose_isa()
