"""The ONNX operator ``Attention``: see `mha_fast.integrations.onnx`."""

from .integrations.onnx import Attention

__all__ = ["Attention"]
