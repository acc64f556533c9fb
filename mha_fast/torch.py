"""PyTorch: see `mha_fast.integrations.torch`."""

from .integrations.torch import (
    MultiheadAttention,
    WatchedHeads,
    attention,
    register_transformers,
    replaced_sdpa,
    scaled_dot_product_attention,
    watch_heads,
)

__all__ = [
    "MultiheadAttention",
    "WatchedHeads",
    "attention",
    "register_transformers",
    "replaced_sdpa",
    "scaled_dot_product_attention",
    "watch_heads",
]
