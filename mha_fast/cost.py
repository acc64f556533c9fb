"""What a multi-head layer costs: parameters, multiply-adds and bytes, counted and not measured.

layer_cost       the parts of a layer for given sizes, as a record that prints as a table
chunk_cost       what a task of attention over chunks computes, gets and gives
score_variance   why scores are divided by the square root of the head width, by sampling
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt

from . import _checks
from .layer._sizes import check_sizes
from .layer._weights import Seed

__all__ = ["ChunkCost", "Cost", "Part", "chunk_cost", "layer_cost", "score_variance"]

# Of the numbers drawn at a time by `score_variance`.
_BLOCK_BYTES = 1 << 24


@dataclass(frozen=True, slots=True)
class Part:
    """One part of a layer, or the sum of several.

    Attributes
    ----------
    parameters : int
        Weights and biases.
    multiply_adds : int
        One multiplication with one addition; a bias is not counted.
    parameter_bytes : int
        What the parameters take.
    result_bytes : int
        What the result of the part takes when it is stored.
    """

    parameters: int = 0
    multiply_adds: int = 0
    parameter_bytes: int = 0
    result_bytes: int = 0

    def __add__(self, other: Part) -> Part:
        return Part(*(getattr(self, x.name) + getattr(other, x.name) for x in fields(self)))


@dataclass(frozen=True, slots=True)
class Cost:
    """What a layer costs, part by part; ``print`` shows a table.

    Attributes
    ----------
    query_projection, key_projection, value_projection, output_projection : Part
        The products with W_Q, W_K, W_V and W_O.
    scores : Part
        Products of queries and keys. Its result is the n_query x n_key matrix of each head, which
        `mha_fast.attention` never stores.
    values : Part
        Weighted sums of the values.
    cache : Part
        Keys and values of all n_key tokens, as a `KVCache` without spare room holds them. They are
        what the projections of key and value left there, not a further result.
    head_width, value_width : int
    scale : float
        The factor of the scores, ``1 / sqrt(head_width)``.
    """

    query_projection: Part
    key_projection: Part
    value_projection: Part
    scores: Part
    values: Part
    output_projection: Part
    cache: Part
    head_width: int
    value_width: int

    @property
    def scale(self) -> float:
        """Factor of the scores."""
        return _checks.default_scale(self.head_width)

    @property
    def projections(self) -> Part:
        """Sum of the four projections."""
        inputs = self.query_projection + self.key_projection + self.value_projection
        return inputs + self.output_projection

    @property
    def total(self) -> Part:
        """Sum of all parts but `cache`."""
        return self.projections + self.scores + self.values

    @property
    def parameters(self) -> int:
        """Number of weights and biases."""
        return self.total.parameters

    @property
    def multiply_adds(self) -> int:
        """Number of multiply-adds."""
        return self.total.multiply_adds

    def __str__(self) -> str:
        columns = [field.name for field in fields(Part)]
        parts = [(x.name, getattr(self, x.name)) for x in fields(self)]
        parts = [(name, part) for name, part in parts if isinstance(part, Part)]
        at_total = [name for name, _ in parts].index("cache")
        parts.insert(at_total, ("total", self.total))
        rows = [["", *(name.replace("_", " ") for name in columns)]]
        for name, part in parts:
            numbers = (getattr(part, column) for column in columns)
            rows.append([name.replace("_", " "), *(f"{n:,}" for n in numbers)])
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = []
        for name, *cells in rows:
            padded = (x.rjust(width) for x, width in zip(cells, widths[1:], strict=True))
            lines.append("  ".join((name.ljust(widths[0]), *padded)))
        return "\n".join(lines)


def layer_cost(
    embed_dim: int,
    num_heads: int,
    n_query: int = 1,
    n_key: int | None = None,
    *,
    n_batch: int = 1,
    n_cached: int = 0,
    num_kv_heads: int | None = None,
    head_width: int | None = None,
    value_width: int | None = None,
    kdim: int | None = None,
    vdim: int | None = None,
    bias: bool = True,
    output_projection: bool = True,
    dtype: npt.DTypeLike = np.float32,
) -> Cost:
    """Count what a layer of multi-head attention costs.

    Parameters
    ----------
    embed_dim, num_heads, num_kv_heads, head_width, value_width, kdim, vdim
        Sizes, as in `MultiHeadAttention`.
    n_query : int
        Tokens that attend.
    n_key : int, optional
        Tokens that are attended to; default ``n_cached + n_query``: self-attention.
    n_batch : int
        Number of sequences.
    n_cached : int
        How many of the `n_key` tokens have their keys and values in a cache, and are not projected.
    bias : bool
        Whether each projection has a bias.
    output_projection : bool
        Whether there is W_O, with its bias.
    dtype : dtype
        Of weights and results.

    Returns
    -------
    Cost

    Raises
    ------
    TypeError, ValueError
        A size that is no int or does not fit.

    Notes
    -----
    Every query is counted with every key. A causal limit, a window or a mask lets `attention` skip
    keys; with ``is_causal`` about half of the scores and values go.

    References
    ----------
    Vaswani et al. 2017, section 3.2.2.

    Examples
    --------
    >>> from mha_fast.cost import layer_cost
    >>> print(layer_cost(512, 8, n_query=100, bias=False))
                       parameters  multiply adds  parameter bytes  result bytes
    query projection      262,144     26,214,400        1,048,576       204,800
    key projection        262,144     26,214,400        1,048,576       204,800
    value projection      262,144     26,214,400        1,048,576       204,800
    scores                      0      5,120,000                0       320,000
    values                      0      5,120,000                0       204,800
    output projection     262,144     26,214,400        1,048,576       204,800
    total               1,048,576    115,097,600        4,194,304     1,344,000
    cache                       0              0                0       409,600
    """
    sizes = check_sizes(embed_dim, num_heads, num_kv_heads, head_width, value_width, kdim, vdim)
    n_query, n_batch = _checks.size("n_query", n_query), _checks.size("n_batch", n_batch)
    n_cached = _checks.size("n_cached", n_cached)
    n_key = n_cached + n_query if n_key is None else _checks.size("n_key", n_key)
    if n_cached > n_key:
        raise ValueError(f"n_cached is {n_cached}; expected at most n_key, {n_key}")
    bias = _checks.flag("bias", bias)
    itemsize = np.dtype(dtype).itemsize

    def projection(n_token: int, n_in: int, n_out: int) -> Part:
        n_token, parameters = n_batch * n_token, n_in * n_out + (n_out if bias else 0)
        multiply_adds, result = n_token * n_in * n_out, n_token * n_out
        return Part(parameters, multiply_adds, parameters * itemsize, result * itemsize)

    n_token = (n_query, n_key - n_cached, n_key - n_cached)
    query, key, value = map(projection, n_token, sizes.in_dims, sizes.in_rows)
    n_pair = n_batch * sizes.n_head * n_query * n_key
    n_joined = n_batch * n_query * sizes.joined_width
    n_kept = n_batch * n_key * sum(sizes.in_rows[1:])
    output = Part()
    if _checks.flag("output_projection", output_projection):
        output = projection(n_query, sizes.joined_width, sizes.embed_dim)
    return Cost(
        query_projection=query,
        key_projection=key,
        value_projection=value,
        scores=Part(multiply_adds=n_pair * sizes.head_width, result_bytes=n_pair * itemsize),
        values=Part(multiply_adds=n_pair * sizes.value_width, result_bytes=n_joined * itemsize),
        output_projection=output,
        cache=Part(result_bytes=n_kept * itemsize),
        head_width=sizes.head_width,
        value_width=sizes.value_width,
    )


@dataclass(frozen=True, slots=True)
class ChunkCost:
    """What one task of `mha_fast.dask.attention` computes, gets and gives.

    Attributes
    ----------
    multiply_adds : int
        Of scores and values.
    query_bytes, key_bytes, value_bytes : int
        Of the chunks it gets. What is on its machine already does not cross the network.
    part_bytes : int
        Of its result: an output in float32 (float64 for float64) and a log-sum-exp for each query,
        which go to the task that joins them.
    out_bytes : int
        Of the joined result in the dtype of the inputs, without the log-sum-exp.
    """

    multiply_adds: int
    query_bytes: int
    key_bytes: int
    value_bytes: int
    part_bytes: int
    out_bytes: int

    @property
    def input_bytes(self) -> int:
        """Bytes of the chunks of query, key and value."""
        return self.query_bytes + self.key_bytes + self.value_bytes


def chunk_cost(
    n_query: int,
    n_key: int,
    head_width: int,
    value_width: int | None = None,
    *,
    n_head: int = 1,
    n_kv_head: int | None = None,
    n_batch: int = 1,
    dtype: npt.DTypeLike = np.float32,
) -> ChunkCost:
    """Count what attention of a chunk of queries to a chunk of keys costs, and what it sends.

    Parameters
    ----------
    n_query, n_key : int
        Rows of the two chunks.
    head_width : int
    value_width : int, optional
        Default `head_width`.
    n_head, n_kv_head, n_batch : int
        Query heads, key/value heads (default as many) and batch entries in the chunk.
    dtype : dtype
        Of query, key and value.

    Returns
    -------
    ChunkCost
        Every query is counted with every key; masks and slopes, a few bytes for a row or a head
        unless they are masks of queries times keys, are not.

    Raises
    ------
    TypeError, ValueError
        A size that is no int or does not fit, a dtype that `attention` does not take.

    Examples
    --------
    >>> from mha_fast.cost import chunk_cost
    >>> cost = chunk_cost(4096, 4096, 64)
    >>> cost.multiply_adds, cost.input_bytes, cost.part_bytes
    (2147483648, 3145728, 1064960)
    """
    sizes = {"n_query": n_query, "n_key": n_key, "head_width": head_width, "n_batch": n_batch}
    n_query, n_key, width, n_batch = (_checks.size(name, n) for name, n in sizes.items())
    value_width = width if value_width is None else _checks.size("value_width", value_width)
    n_head = _checks.size("n_head", n_head)
    n_kv_head = n_head if n_kv_head is None else _checks.size("n_kv_head", n_kv_head)
    if n_kv_head and n_head % n_kv_head:
        raise ValueError(f"n_head is {n_head}; expected a multiple of n_kv_head, {n_kv_head}")
    kind = _checks.float_dtype(dtype)
    itemsize, sum_itemsize = kind.itemsize, max(kind.itemsize, 4)
    n_row, n_kv_row = n_batch * n_head * n_query, n_batch * n_kv_head * n_key
    return ChunkCost(
        multiply_adds=n_row * n_key * (width + value_width),
        query_bytes=n_row * width * itemsize,
        key_bytes=n_kv_row * width * itemsize,
        value_bytes=n_kv_row * value_width * itemsize,
        part_bytes=n_row * (value_width + 1) * sum_itemsize,
        out_bytes=n_row * value_width * itemsize,
    )


def score_variance(
    head_width: int, *, sigma: float = 1.0, n_sample: int = 100_000, seed: Seed = 0
) -> float:
    """Measure the variance of scaled scores, ``dot(q, k) / sqrt(head_width)``.

    Parameters
    ----------
    head_width : int
        Width of q and k.
    sigma : float
        Standard deviation of their components, which are independent and normal with mean 0.
    n_sample : int
        Pairs of q and k that are drawn, at least 2.
    seed : int, Generator or anything else that `numpy.random.default_rng` takes, optional
        None draws other pairs each time.

    Returns
    -------
    float
        Close to ``sigma**4`` for any width: a product of two components has variance
        ``sigma**4``, the sum of them `head_width` times that, and the scale takes this factor
        back. Off by about ``sigma**4 * sqrt((2 + 6 / head_width) / n_sample)``.

    Raises
    ------
    TypeError, ValueError
        A size or a deviation that does not fit.

    Notes
    -----
    Works through blocks of 16 MiB. The error follows from the fourth moment of a score,
    ``(3 + 6 / head_width) * sigma**8``.

    References
    ----------
    Vaswani et al. 2017, footnote 4.

    Examples
    --------
    >>> from mha_fast.cost import score_variance
    >>> [round(score_variance(width), 1) for width in (1, 64, 512)]
    [1.0, 1.0, 1.0]
    """
    width = _checks.positive_int("head_width", head_width)
    n_sample = _checks.positive_int("n_sample", n_sample)
    sigma = _checks.number("sigma", sigma)
    if n_sample < 2:
        raise ValueError(f"n_sample is {n_sample}; expected at least 2")
    if not 0 <= sigma < math.inf:
        raise ValueError(f"sigma is {sigma}; expected a finite number of at least 0")
    rng = np.random.default_rng(seed)
    blocks = [
        np.einsum("ij,ij->i", *rng.normal(0, sigma, (2, n, width)))
        for n in _block_sizes(n_sample, width)
    ]
    return float(np.var(np.concatenate(blocks) / math.sqrt(width), ddof=1))


def _block_sizes(n_sample: int, width: int) -> Iterator[int]:
    """Numbers of pairs that sum up to `n_sample`."""
    most = max(_BLOCK_BYTES // (2 * width * 8), 1)
    for start in range(0, n_sample, most):
        yield min(most, n_sample - start)
