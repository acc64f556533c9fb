"""The layer: attention with its projections, and its weights under the names of others."""

from ._multi_head import MultiHeadAttention
from ._rotary import apply_rotary
from ._training import Activations

__all__ = ["Activations", "MultiHeadAttention", "apply_rotary"]
