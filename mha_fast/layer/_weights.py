"""Weights of a layer: how they are drawn, and their names in the files of others."""

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias

import numpy as np

from .. import _checks
from .._typing import Array
from ._sizes import LayerSizes, check_sizes

Init: TypeAlias = Literal["xavier_uniform", "xavier_normal", "lecun_normal", "gpt_normal", "zeros"]
Style: TypeAlias = Literal["torch", "bert", "llama"]


class Module(Protocol):
    """What has tensors by name: a ``torch.nn.Module``."""

    def state_dict(self) -> Mapping[str, Any]: ...


# What `numpy.random.default_rng` takes.
Seed: TypeAlias = (
    int
    | Sequence[int]
    | np.random.SeedSequence
    | np.random.BitGenerator
    | np.random.Generator
    | np.random.RandomState
    | None
)

# ---- drawing ----------------------------------------------------------------------------------


def _xavier_uniform(rng: np.random.Generator, n_out: int, n_in: int) -> Array:
    bound = math.sqrt(6 / (n_in + n_out))  # Glorot and Bengio 2010, equation 16
    return rng.uniform(-bound, bound, (n_out, n_in))


def _xavier_normal(rng: np.random.Generator, n_out: int, n_in: int) -> Array:
    return rng.normal(0, math.sqrt(2 / (n_in + n_out)), (n_out, n_in))  # the same, equation 12


def _lecun_normal(rng: np.random.Generator, n_out: int, n_in: int) -> Array:
    return rng.normal(0, math.sqrt(1 / n_in), (n_out, n_in))  # LeCun et al. 1998, section 4.6


def _gpt_normal(rng: np.random.Generator, n_out: int, n_in: int) -> Array:
    return rng.normal(0, 0.02, (n_out, n_in))  # Radford et al. 2018, section 4.1


def _zeros(rng: np.random.Generator, n_out: int, n_in: int) -> Array:
    return np.zeros((n_out, n_in))


INITS: dict[str, Callable[[np.random.Generator, int, int], Array]] = {
    "xavier_uniform": _xavier_uniform,
    "xavier_normal": _xavier_normal,
    "lecun_normal": _lecun_normal,
    "gpt_normal": _gpt_normal,
    "zeros": _zeros,
}


def drawing(init: Any, seed: Any) -> Callable[[int, int], Array]:
    """Return the function that draws a matrix (n_out, n_in) of float64."""
    if not isinstance(init, str) or init not in INITS:
        raise ValueError(f"init is {init!r}; expected one of {', '.join(INITS)}")
    rng, draw = np.random.default_rng(seed), INITS[init]
    return lambda n_out, n_in: draw(rng, n_out, n_in)


# ---- reading ----------------------------------------------------------------------------------


@dataclass(slots=True)
class Tensors:
    """The tensors of a layer, matrices as (out, in). None: the layer has no such bias."""

    weights: list[Array]  # of query, key and value
    out_weight: Array
    biases: list[Array] | None
    out_bias: Array | None


class Names(NamedTuple):
    """Names of one family of models, without "weight" and "bias"."""

    inputs: tuple[str, str, str]
    output: str
    ignored: tuple[str, ...]  # what lies beside the attention, or is no weight


STYLES = {
    "torch": Names(("q_proj", "k_proj", "v_proj"), "out_proj", ()),
    "bert": Names(("self.query", "self.key", "self.value"), "output.dense", ("output.LayerNorm.",)),
    "llama": Names(("q_proj", "k_proj", "v_proj"), "o_proj", ("rotary_emb.",)),
}


def read(tensors: Any, style: str, prefix: str) -> Tensors:
    """Take the tensors of one layer out of a mapping; every name beneath the prefix must fit."""
    names = STYLES[style]
    prefix = with_dot(prefix)
    tensors = _mapping(tensors)
    found = {
        name.removeprefix(prefix): _checks.array(name, _detached(tensor))
        for name, tensor in tensors.items()
        if name.startswith(prefix) and not name.removeprefix(prefix).startswith(names.ignored)
    }

    def take(name: str) -> Array:
        if name not in found:
            raise ValueError(
                f"tensors has no {prefix + name!r}; expected it in style {style!r}"
                f"{_other_prefixes(tensors, f'{names.output}.weight')}"
            )
        return found.pop(name)

    if style == "torch":
        weights, biases = _torch_inputs(found, take)
    else:
        weights = [take(f"{name}.weight") for name in names.inputs]
        bias_names = [f"{name}.bias" for name in names.inputs]
        some = any(name in found for name in bias_names)
        biases = [take(name) for name in bias_names] if some else None
    result = Tensors(
        weights,
        take(f"{names.output}.weight"),
        biases,
        found.pop(f"{names.output}.bias", None),
    )
    if found:
        others = ", ".join(repr(prefix + name) for name in sorted(found)[:4])
        raise ValueError(
            f"tensors also has {others}; a layer of style {style!r} has no such tensors, and "
            "without them its result could be wrong"
        )
    return result


def number_of_heads(tensors: Any, num_heads: Any) -> Any:
    """Return the number that is given, or that a module of torch or Transformers knows."""
    if num_heads is not None:
        return num_heads
    for path in ("num_heads", "self.num_attention_heads", "config.num_attention_heads"):
        place = tensors
        for name in path.split("."):
            place = getattr(place, name, None)
        if isinstance(place, int):
            return place
    raise TypeError("num_heads is None; expected an int: the tensors do not tell")


def _mapping(tensors: Any) -> Mapping[str, Any]:
    """Return tensors by name, from a mapping or from a module that has them."""
    if isinstance(tensors, Mapping):
        return tensors
    if isinstance(tensors, str | os.PathLike):
        raise TypeError(
            f"tensors is the path {os.fspath(tensors)!r}; expected a mapping of names to arrays: pass "
            "safetensors.numpy.load_file(path), or what torch.load(path) returns"
        )
    if not callable(getattr(tensors, "state_dict", None)):
        raise TypeError(
            f"tensors is of type {type(tensors).__name__}; expected a mapping of names to arrays, "
            "such as the state dict of a module"
        )
    if getattr(tensors, "batch_first", None) is False:
        raise ValueError(
            "tensors is a module with batch_first=False, whose inputs are (tokens, batch, width); this "
            "layer takes (batch, tokens, width): pass tensors.state_dict(), and the inputs with their "
            "first two axes swapped"
        )
    if getattr(tensors, "add_zero_attn", False):
        raise ValueError(
            "tensors is a module with add_zero_attn=True, which this layer does not have; expected a "
            "module without it"
        )
    named: Mapping[str, Any] = tensors.state_dict()
    return named


def _detached(tensor: Any) -> Any:
    """Return the numbers of a parameter: they are copied, and no gradient is to flow back."""
    return tensor.detach() if getattr(tensor, "requires_grad", False) else tensor


def _other_prefixes(tensors: Mapping[str, Any], name: str) -> str:
    """Name what stands before `name`, which every layer of the style has."""
    ends = [full for full in tensors if full.endswith("." + name)]
    if not ends:
        return ""
    some = ", ".join(repr(full.removesuffix("." + name)) for full in ends[:3])
    more = f" and {len(ends) - 3} more" if len(ends) > 3 else ""
    return f"; there are layers with the prefix {some}{more}"


def _torch_inputs(
    found: dict[str, Array], take: Callable[[str], Array]
) -> tuple[list[Array], list[Array] | None]:
    """Matrices and biases of query, key and value; torch stacks them where the widths allow."""
    if "in_proj_weight" in found:
        weights = _thirds("in_proj_weight", take("in_proj_weight"))
    else:
        weights = [take(f"{name}_weight") for name in STYLES["torch"].inputs]
    bias = found.pop("in_proj_bias", None)
    return weights, None if bias is None else _thirds("in_proj_bias", bias)


def _thirds(name: str, stacked: Array) -> list[Array]:
    if stacked.ndim == 0 or len(stacked) % 3:
        raise ValueError(f"{name} has shape {stacked.shape}; expected three parts of equal length")
    return np.split(stacked, 3)


def sizes_of(tensors: Tensors, num_heads: Any) -> LayerSizes:
    """Work out the sizes of a layer from its matrices, and check that they fit each other."""
    for name, matrix in zip("QKVO", (*tensors.weights, tensors.out_weight), strict=True):
        if matrix.ndim != 2 or matrix.size == 0:
            raise ValueError(f"W_{name} has shape {matrix.shape}; expected a matrix (out, in)")
    query, key, value = tensors.weights
    n_head = _checks.positive_int("num_heads", num_heads)
    head_width = _part("W_Q", query, n_head, "num_heads")
    n_kv_head = _part("W_K", key, head_width, "the width of a query head")
    value_width = _part("W_V", value, n_kv_head, "the number of key heads")
    sizes = check_sizes(
        query.shape[1], n_head, n_kv_head, head_width, value_width, key.shape[1], value.shape[1]
    )
    expected = (sizes.embed_dim, sizes.joined_width)
    if tensors.out_weight.shape != expected:
        raise ValueError(f"W_O has shape {tensors.out_weight.shape}; expected {expected}")
    return sizes


def dtype_of(tensors: Tensors) -> np.dtype[Any]:
    """The one dtype of all tensors."""
    arrays = (*tensors.weights, tensors.out_weight, *(tensors.biases or ()), tensors.out_bias)
    dtypes = {x.dtype for x in arrays if x is not None}
    if len(dtypes) > 1:
        names = ", ".join(sorted(map(str, dtypes)))
        raise TypeError(f"tensors have dtypes {names}; expected one, or dtype to say which")
    return dtypes.pop()


def _part(name: str, matrix: Array, n: int, of_what: str) -> int:
    """Rows of the matrix over `n`."""
    if len(matrix) % n:
        raise ValueError(f"{name} has shape {matrix.shape}; expected a multiple of {n}, {of_what}")
    return len(matrix) // n


# ---- writing ----------------------------------------------------------------------------------


def written(tensors: Tensors, sizes: LayerSizes, style: Any, prefix: str) -> dict[str, Array]:
    """Name the tensors of a layer as the family of models does."""
    if style not in STYLES:
        raise ValueError(f"style is {style!r}; expected one of {', '.join(STYLES)}")
    names = STYLES[style]
    if style == "torch":
        result = _torch_named(tensors, sizes)
    else:
        result = {
            f"{name}.weight": x for name, x in zip(names.inputs, tensors.weights, strict=True)
        }
        if tensors.biases is not None:
            named = zip(names.inputs, tensors.biases, strict=True)
            result |= {f"{name}.bias": x for name, x in named}
    result[f"{names.output}.weight"] = tensors.out_weight
    if tensors.out_bias is not None:
        result[f"{names.output}.bias"] = tensors.out_bias
    return {with_dot(prefix) + name: x for name, x in result.items()}


def _torch_named(tensors: Tensors, sizes: LayerSizes) -> dict[str, Array]:
    """What `torch.nn.MultiheadAttention` holds, which knows only heads that share out embed_dim."""
    if sizes.in_rows != (sizes.embed_dim,) * 3 or sizes.n_head != sizes.n_kv_head:
        raise ValueError(
            f"style is 'torch'; expected a layer whose {sizes.n_head} heads of query, key and value "
            f"fill embed_dim, {sizes.embed_dim}, and are not grouped; torch has no other"
        )
    if (tensors.biases is None) != (tensors.out_bias is None):
        raise ValueError("style is 'torch'; expected a layer with all biases or none")
    if len(set(sizes.in_dims)) == 1:
        result = {"in_proj_weight": np.concatenate(tensors.weights)}
    else:
        named = zip(STYLES["torch"].inputs, tensors.weights, strict=True)
        result = {f"{name}_weight": x for name, x in named}
    if tensors.biases is not None:
        result["in_proj_bias"] = np.concatenate(tensors.biases)
    return result


def with_dot(prefix: str) -> str:
    """Return the prefix with a dot between it and what follows."""
    return prefix if not prefix or prefix.endswith(".") else prefix + "."
