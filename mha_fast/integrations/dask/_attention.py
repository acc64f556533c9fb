"""attention(): the same function over dask arrays."""

from collections.abc import Mapping
from typing import Any

from ... import _checks
from ..._typing import Window
from ._graph import attention_graph
from ._operands import check_attention, problem


def attention(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    *,
    is_causal: bool = False,
    window: Window | None = None,
    query_offset: Any = 0,
    kv_lengths: Any = None,
    scale: float | None = None,
    softcap: float | None = None,
    alibi_slopes: Any = None,
    sinks: Any = None,
    head_mask: Any = None,
    return_lse: bool = False,
    precision: str = "highest",
    num_threads: int | None = None,
    chunks: Mapping[str, Any] | None = None,
) -> Any:
    """Attention over dask arrays that may be chunked along every axis but the widths.

    Each task is one call of `mha_fast.attention` on a chunk of queries and a chunk of keys; the
    results of the key chunks are joined by `mha_fast.merge_attention`. Nothing is computed until
    dask is asked for it, and no array of ``n_query * n_key`` is made.

    Parameters
    ----------
    query : dask or NumPy array, (..., n_head, n_query, head_width)
        Shapes, dtypes and meaning are those of `mha_fast.attention`, also of what follows.
    key : dask or NumPy array, (..., n_kv_head, n_key, head_width)
    value : dask or NumPy array, (..., n_kv_head, n_key, value_width)
    attn_mask : dask or NumPy array, optional
        Bool or float, broadcastable to (..., n_head, n_query, n_key). Chunked like the rest;
        axes of size 1 are sent as they are.
    query_offset, kv_lengths, alibi_slopes, sinks, head_mask : dask or NumPy array, optional
        As in `mha_fast.attention`. Where `kv_lengths` is a dask array its numbers are not known
        when the graph is made, and no task is saved by them.
    is_causal, window, scale, softcap, return_lse, precision
        As in `mha_fast.attention`.
    num_threads : int, optional
        Threads of each kernel call. By default the cores of a machine over the tasks that run on
        it at a time. The result is the same to the bit.
    chunks : dict, optional
        Sizes of chunks for any of "batch" (every batch axis), "heads" (query heads), "queries"
        and "keys": an int, -1 for a single chunk, or a tuple of all sizes. Without it the chunks
        are those of the dask arrays, cut finer where two arrays are cut differently; axes that
        only NumPy arrays have are chunked by size.

    Returns
    -------
    out : dask array, (..., n_head, n_query, value_width)
        Of the dtype of query; chunked along batch, heads and queries.
    lse : dask array, (..., n_head, n_query)
        With `return_lse`. float64 for float64, otherwise float32.

    Raises
    ------
    TypeError, ValueError
        As `mha_fast.attention`, when the graph is made; also for chunks of unknown size and for
        chunks that are not NumPy arrays. An error inside a task has a note that names the chunk.

    Notes
    -----
    A pair of chunks in which the causal limit, the window or known lengths leave no key makes no
    task. A chunk of queries that sees no chunk of keys is filled with 0, its log-sum-exp with
    -inf (or the sink).

    Key chunks are joined four at a time in a tree that depends on the chunks alone. The result
    is the same to the bit for any scheduler, any number of workers and any order of events, and
    within rounding that of the undivided call.

    A task holds its chunks and its result. 16-bit inputs whose keys are in several chunks are
    widened to float32 in the task, which takes the chunks' size twice once more, so that
    partial results are not rounded before they are joined.

    Query heads are cut so that each chunk is a number of whole groups, or part of one group: the
    key/value heads are then cut with them.

    References
    ----------
    Joining parts of the keys: Dao et al. 2023 (flash decoding). Keys across machines: Liu et al.
    2023 (ring attention), Shyam et al. 2024 (tree attention).

    Examples
    --------
    >>> import dask.array as da
    >>> import mha_fast.dask
    >>> x = da.random.default_rng(0).standard_normal((8, 1000, 64), chunks=(4, 250, 64))
    >>> out = mha_fast.dask.attention(x, x, x, is_causal=True)
    >>> out.chunks
    ((4, 4), (250, 250, 250, 250), (64,))
    >>> out.compute().shape
    (8, 1000, 64)
    """
    _checks.flag("return_lse", return_lse)
    arrays = {
        "query": query,
        "key": key,
        "value": value,
        "attn_mask": attn_mask,
        "query_offset": query_offset,
        "kv_lengths": kv_lengths,
        "alibi_slopes": alibi_slopes,
        "sinks": sinks,
        "head_mask": head_mask,
    }
    options = {
        "is_causal": is_causal,
        "window": window,
        "scale": scale,
        "softcap": softcap,
        "precision": precision,
        "num_threads": num_threads,
    }
    return attention_graph(problem(arrays, options, chunks, check_attention), return_lse)
