"""Keys and values of growing sequences, for decoding."""

from ._contiguous import KVCache

__all__ = ["KVCache"]
