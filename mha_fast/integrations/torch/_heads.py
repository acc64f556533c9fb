"""What the heads of a running model look at, measured during its own forward passes."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from ... import HeadStatistics, head_statistics
from ..._typing import Array
from ._arrays import as_array
from ._operator import n_thread

_watcher: ContextVar["WatchedHeads | None"] = ContextVar("mha_fast_watched_heads", default=None)


def watched() -> "WatchedHeads | None":
    """Return what collects the heads of the calls made now."""
    return _watcher.get()


@dataclass(repr=False, eq=False)
class WatchedHeads:
    """Measurements of every layer, in the order in which the layers ran.

    Attributes
    ----------
    layers : list of (str, HeadStatistics)
        Name of the attention module within the model, and what its heads looked at.
    """

    layers: list[tuple[str, HeadStatistics]] = field(default_factory=list)
    _names: Mapping[torch.nn.Module, str] = field(default_factory=dict)
    _options: dict[str, Any] = field(default_factory=dict)

    def see(
        self,
        module: torch.nn.Module | None,
        query: torch.Tensor,
        key: torch.Tensor,
        options: dict[str, Any],
        rows: torch.Tensor | None,
    ) -> None:
        """Measure one call of an attention. `rows` are visible keys as the mask functions tell."""
        arrays: dict[str, Any] = {
            name: as_array(x) if isinstance(x, torch.Tensor) else x
            for name, x in options.items()
            if x is not None
        }
        if rows is not None and "attn_mask" not in arrays and query.shape[2] == key.shape[2]:
            lengths = arrays.get("kv_lengths")
            if lengths is not None:  # the padding's own queries are not to count
                places = np.arange(query.shape[2])
                arrays["attn_mask"] = (places < lengths[:, None])[:, None, :, None]
        measured = head_statistics(
            as_array(query), as_array(key), **arrays, **self._options, num_threads=n_thread()
        )
        name = self._names.get(module, "") if module is not None else ""
        self.layers.append((name or f"call {len(self.layers)}", measured))

    def measurements(self) -> dict[str, Array]:
        """Return each measurement as (layers, heads), means over the batch.

        Entropy, confidence, mean distance, and the mass on each offset; of the layers that have
        as many heads as the first. For `mha_fast.pictures.head_maps`.
        """
        found: dict[str, Array] = {}
        if not self.layers:
            return found
        n_head = self.layers[0][1].entropy.shape[-1]
        layers = [seen for _, seen in self.layers if seen.entropy.shape[-1] == n_head]
        for name in ("entropy", "confidence", "mean_distance"):
            found[name.replace("_", " ")] = np.stack(
                [_mean_of_batch(getattr(seen, name), 1) for seen in layers]
            )
        for i, offset in enumerate(layers[0].offsets):
            masses = [_mean_of_batch(seen.offset_mass, 2)[:, i] for seen in layers]
            found[f"mass at {offset:+d}"] = np.stack(masses)
        return found

    def table(self) -> str:
        """Return a text with a line for each layer and head."""
        lines = [f"{'layer':<40} {'head':>4} {'entropy':>8} {'top':>6} {'distance':>9}  offsets"]
        for name, seen in self.layers:
            entropy, confidence, distance = (
                _mean_of_batch(x, 1) for x in (seen.entropy, seen.confidence, seen.mean_distance)
            )
            masses = _mean_of_batch(seen.offset_mass, 2)
            for head, mass in enumerate(masses):
                offsets = "  ".join(
                    f"{d:+d}: {m:.2f}" for d, m in zip(seen.offsets, mass, strict=True)
                )
                lines.append(
                    f"{name[-40:]:<40} {head:>4} {entropy[head]:>8.2f} {confidence[head]:>6.2f} "
                    f"{distance[head]:>9.1f}  {offsets}"
                )
        return "\n".join(lines)

    def head_maps(self) -> Any:
        """Return `mha_fast.pictures.head_maps` of `measurements`, a matplotlib figure."""
        from ... import pictures

        return pictures.head_maps(self.measurements())

    def __repr__(self) -> str:
        return f"WatchedHeads({len(self.layers)} calls)"


@contextmanager
def watch_heads(model: torch.nn.Module, **options: Any) -> Iterator[WatchedHeads]:
    """Measure what every head looks at in all forward passes of a model within the context.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        Any model that takes ``attn_implementation="mha_fast"``; another implementation is
        exchanged for it within the context.
    **options
        Of `mha_fast.head_statistics`: `offsets`, `key_sets`, `ignore_keys`, `received`.

    Yields
    ------
    WatchedHeads
        One entry per layer and forward pass.

    Notes
    -----
    The measurements take one more pass over the scores, with the masks of the model, and memory
    for one row of numbers per query; no array of queries x keys. ``output_attentions=True`` holds
    all of these arrays at once. Positions count as keys in the cache. Queries of right-hand padding
    are left out.

    Examples
    --------
    >>> import torch, mha_fast.torch
    >>> from transformers import BertConfig, BertModel
    >>> config = BertConfig(
    ...     vocab_size=99, hidden_size=32, num_hidden_layers=2, num_attention_heads=2,
    ...     intermediate_size=64,
    ... )
    >>> mha_fast.torch.register_transformers()
    >>> model = BertModel(config).eval()
    >>> with torch.no_grad(), mha_fast.torch.watch_heads(model) as seen:
    ...     out = model(torch.arange(20)[None])
    >>> [name for name, _ in seen.layers]
    ['encoder.layer.0.attention.self', 'encoder.layer.1.attention.self']
    >>> seen.measurements()["entropy"].shape
    (2, 2)
    """
    from ..transformers import NAME, register_transformers

    register_transformers()
    names = {module: name for name, module in model.named_modules()}
    before: Any = model.config._attn_implementation
    if before != NAME:
        model.set_attn_implementation(NAME)
    seen = WatchedHeads(_names=names, _options=options)
    token = _watcher.set(seen)
    try:
        yield seen
    finally:
        _watcher.reset(token)
        if before != NAME:
            model.set_attn_implementation(before)


def _mean_of_batch(numbers: Array, n_own: int) -> Array:
    """Mean over all axes but the last `n_own`."""
    return numbers.reshape(-1, *numbers.shape[numbers.ndim - n_own :]).mean(axis=0)
