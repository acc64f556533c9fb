"""The named problems that every benchmark runs: shapes, inputs, arithmetic and traffic."""

import re
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

DTYPES = ("float32", "float64", "float16", "bfloat16")


def dtype_of(name: str) -> np.dtype:
    """Return the dtype of that name; bfloat16 is the one that ml_dtypes adds to NumPy."""
    if name == "bfloat16":
        import ml_dtypes

        return np.dtype(ml_dtypes.bfloat16)
    return np.dtype(name)


@dataclass(frozen=True)
class Case:
    """One problem; sizes as in the documentation of ``mha_fast.attention``."""

    name: str
    n_batch: int
    n_head: int
    n_kv_head: int
    n_query: int
    n_key: int
    head_width: int
    is_causal: bool = False
    mask: str | None = None  # "float" or "key_padding"
    dtype: str = "float32"

    @property
    def shape(self) -> str:
        """Batch, heads (/key and value heads where fewer), queries, keys, width."""
        heads = f"{self.n_head}"
        if self.n_kv_head != self.n_head:
            heads += f"/{self.n_kv_head}"
        return f"{self.n_batch}, {heads}, {self.n_query}, {self.n_key}, {self.head_width}"

    @property
    def n_score(self) -> int:
        """Elements of the array of queries × keys of all heads."""
        return self.n_batch * self.n_head * self.n_query * self.n_key

    @property
    def n_pairs(self) -> int:
        """Pairs of query and key per head that the shape and the causal rule leave.

        A mask takes nothing off: what it excludes is known only to who has read it.
        """
        if not self.is_causal:
            return self.n_query * self.n_key
        n_full = max(self.n_query - self.n_key, 0)  # these see every key
        n_rising = self.n_query - n_full  # these see 1, 2, 3, ... keys
        return n_full * self.n_key + n_rising * (n_rising + 1) // 2

    @property
    def n_flop(self) -> int:
        """Multiplications and additions of the two products; the softmax is not counted."""
        return 4 * self.n_batch * self.n_head * self.n_pairs * self.head_width

    @property
    def n_bytes(self) -> int:
        """Every input read once and the output written once: the least that must move."""
        query_rows = 2 * self.n_head * self.n_query  # query and output
        key_rows = 2 * self.n_kv_head * self.n_key  # key and value
        item = dtype_of(self.dtype).itemsize
        rows = self.n_batch * (query_rows + key_rows) * self.head_width * item
        return rows + self._n_mask_bytes

    @property
    def _n_mask_bytes(self) -> int:
        match self.mask:
            case "float":
                return self.n_batch * self.n_query * self.n_key * dtype_of(self.dtype).itemsize
            case "key_padding":
                return self.n_batch * self.n_key
            case _:
                return 0


class Inputs(NamedTuple):
    """The arrays of one problem."""

    query: np.ndarray
    key: np.ndarray
    value: np.ndarray
    attn_mask: np.ndarray | None


def make_inputs(case: Case, seed: int = 0) -> Inputs:
    """Draw the arrays of `case`; equal seeds give equal arrays."""
    rng = np.random.default_rng(seed)
    # Normal data: zeros or constants run faster than anything real on some units.
    drawn = np.float64 if case.dtype == "float64" else np.float32
    dtype = dtype_of(case.dtype)

    def normal(*shape):
        return rng.standard_normal(shape, dtype=drawn).astype(dtype, copy=False)

    return Inputs(
        query=normal(case.n_batch, case.n_head, case.n_query, case.head_width),
        key=normal(case.n_batch, case.n_kv_head, case.n_key, case.head_width),
        value=normal(case.n_batch, case.n_kv_head, case.n_key, case.head_width),
        attn_mask=_make_mask(case, normal),
    )


def _make_mask(case, normal):
    match case.mask:
        case None:
            return None
        case "float":  # a bias that all heads share
            return normal(case.n_batch, 1, case.n_query, case.n_key)
        case "key_padding":  # the last eighth of the keys is padding
            keep = np.arange(case.n_key) < case.n_key - case.n_key // 8
            return np.tile(keep, (case.n_batch, 1, 1, 1))
        case _:
            raise ValueError(f"mask is {case.mask!r}; expected None, 'float' or 'key_padding'")


_ALL = (
    Case("prefill_512_e64", 1, 8, 8, 512, 512, 64),
    Case("prefill_512_e128", 1, 8, 8, 512, 512, 128),
    Case("prefill_1024_e64", 1, 8, 8, 1024, 1024, 64),
    Case("prefill_2048_e64", 1, 8, 8, 2048, 2048, 64),
    Case("prefill_2048_e128", 1, 8, 8, 2048, 2048, 128),
    Case("causal_2048_e64", 1, 8, 8, 2048, 2048, 64, is_causal=True),
    Case("causal_2048_e128", 1, 8, 8, 2048, 2048, 128, is_causal=True),
    Case("decode", 1, 32, 32, 1, 4096, 128),
    Case("decode_8_kv_heads", 1, 32, 8, 1, 4096, 128),
    Case("short_batch", 32, 12, 12, 128, 128, 64),
    Case("odd", 8, 8, 8, 37, 53, 80),
    Case("tiny", 1, 12, 12, 16, 16, 64),
    Case("float_mask", 1, 8, 8, 2048, 2048, 64, mask="float"),
    Case("key_padding_mask", 1, 8, 8, 2048, 2048, 64, mask="key_padding"),
    Case("prefill_512_e64_float64", 1, 8, 8, 512, 512, 64, dtype="float64"),
    Case("long_one_head", 1, 1, 1, 16384, 16384, 64),
    Case("long_one_head_causal", 1, 1, 1, 16384, 16384, 64, is_causal=True),
)

CASES = {case.name: case for case in _ALL}

# Those whose dtype may be exchanged without making one of the others.
ANY_DTYPE = [case.name for case in _ALL if case.dtype == "float32"]

# Plain NumPy computes these within seconds and 0.2 GB of scores: it is the yardstick of the guard.
GUARDED = [case.name for case in _ALL if case.n_score <= 8 * 2048 * 2048]

_ONE_HEAD = re.compile(r"one_head_(\d+)(_causal)?")


def one_head(length: int, is_causal: bool) -> Case:
    """Return the problem of `length` queries and keys of one head, as ``bench.scaling`` runs it."""
    name = f"one_head_{length}{'_causal' if is_causal else ''}"
    return Case(name, 1, 1, 1, length, length, 64, is_causal)


def find(name: str) -> Case:
    """Return the case of that name, one of `CASES` or of `one_head`.

    Raises
    ------
    ValueError
        There is no such case; the message names those of `CASES`.
    """
    if name in CASES:
        return CASES[name]
    if found := _ONE_HEAD.fullmatch(name):
        return one_head(int(found[1]), found[2] is not None)
    raise ValueError(f"no case {name!r}; there are {', '.join(CASES)}")
