"""The sizes of a multi-head layer, checked in one place for `MultiHeadAttention` and `cost`."""

from dataclasses import dataclass
from itertools import groupby
from typing import Any

from .. import _checks

# Places of the matrices of the three inputs, in the order in which they are stacked.
QUERY, KEY, VALUE = range(3)


@dataclass(frozen=True, slots=True)
class LayerSizes:
    """Sizes of a layer. A matrix is (rows out, columns in), as it is stored."""

    embed_dim: int
    n_head: int
    n_kv_head: int
    head_width: int
    value_width: int
    kdim: int
    vdim: int

    @property
    def in_dims(self) -> tuple[int, int, int]:
        """Width of a token of query, key and value: columns of W_Q, W_K and W_V."""
        return self.embed_dim, self.kdim, self.vdim

    @property
    def in_heads(self) -> tuple[tuple[int, int], tuple[int, int], tuple[int, int]]:
        """Number of heads of query, key and value, and the width of one."""
        return (
            (self.n_head, self.head_width),
            (self.n_kv_head, self.head_width),
            (self.n_kv_head, self.value_width),
        )

    @property
    def in_rows(self) -> tuple[int, ...]:
        """Width of all heads of query, key and value: rows of W_Q, W_K and W_V."""
        return tuple(n_head * width for n_head, width in self.in_heads)

    @property
    def stacks(self) -> tuple[tuple[int, ...], ...]:
        """Which of W_Q, W_K and W_V are stacked: neighbours with inputs of equal width."""
        alike = groupby((QUERY, KEY, VALUE), key=self.in_dims.__getitem__)
        return tuple(tuple(members) for _, members in alike)

    @property
    def joined_width(self) -> int:
        """Width of the heads' outputs side by side: columns of W_O."""
        return self.n_head * self.value_width

    def arguments(self) -> dict[str, int]:
        """The sizes under the names that the public functions use."""
        return {
            "embed_dim": self.embed_dim,
            "num_heads": self.n_head,
            "num_kv_heads": self.n_kv_head,
            "head_width": self.head_width,
            "value_width": self.value_width,
            "kdim": self.kdim,
            "vdim": self.vdim,
        }


def check_sizes(
    embed_dim: Any,
    num_heads: Any,
    num_kv_heads: Any = None,
    head_width: Any = None,
    value_width: Any = None,
    kdim: Any = None,
    vdim: Any = None,
) -> LayerSizes:
    """Check sizes as `MultiHeadAttention` takes them, and fill in the defaults."""
    embed_dim = _checks.positive_int("embed_dim", embed_dim)
    n_head = _checks.size("num_heads", num_heads)
    n_kv_head = n_head if num_kv_heads is None else _checks.size("num_kv_heads", num_kv_heads)
    if n_head % n_kv_head if n_kv_head else n_head:
        raise ValueError(f"num_heads is {n_head}; expected a multiple of num_kv_heads, {n_kv_head}")
    if head_width is not None:
        head_width = _checks.positive_int("head_width", head_width)
    elif n_head and embed_dim % n_head == 0:
        head_width = embed_dim // n_head
    else:
        raise ValueError(
            f"embed_dim is {embed_dim}; expected a multiple of num_heads, {n_head}, or head_width"
        )
    return LayerSizes(
        embed_dim,
        n_head,
        n_kv_head,
        head_width,
        _width("value_width", value_width, head_width),
        _width("kdim", kdim, embed_dim),
        _width("vdim", vdim, embed_dim),
    )


def _width(name: str, width: Any, default: int) -> int:
    return default if width is None else _checks.positive_int(name, width)
