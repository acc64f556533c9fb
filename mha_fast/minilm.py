"""A small trained network to look into: see `mha_fast.show.minilm`."""

from .show.minilm import INSTALL_COMMAND, MiniLM, Reading, load

__all__ = ["INSTALL_COMMAND", "MiniLM", "Reading", "load"]
