"""JAX: see `mha_fast.integrations.jax`."""

from .integrations.jax import dot_product_attention

__all__ = ["dot_product_attention"]
