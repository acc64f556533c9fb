"""Attention over dask arrays: see `mha_fast.integrations.dask`."""

from .integrations.dask import attention

__all__ = ["attention"]
