"""Attention over dask arrays: see `mha_fast.integrations.dask`."""

from .integrations.dask import attention, attention_backward

__all__ = ["attention", "attention_backward"]
