"""Attention over dask arrays: one kernel call for each chunk of queries and keys, joined exactly.

    import dask.array as da
    import mha_fast.dask

    out = mha_fast.dask.attention(query, key, value, is_causal=True)  # lazy, a dask array
    out.compute()

Dask and its schedulers distribute; the arithmetic of parts is that of `mha_fast.attention` and
`mha_fast.merge_attention`. Needs the extra: ``pip install "mha_fast[dask]"``.
"""

try:
    import dask.array as _dask_array  # noqa: F401
except ModuleNotFoundError as error:
    raise ImportError(
        'mha_fast.dask needs dask; install it with: pip install "mha_fast[dask]"'
    ) from error

from ._attention import attention
from ._backward import attention_backward

__all__ = ["attention", "attention_backward"]
