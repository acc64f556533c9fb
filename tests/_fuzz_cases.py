"""Random calls for the fuzzer. All of a case follows from the seed and the number of the case."""

import dataclasses
from typing import Any

import numpy as np

import mha_fast

try:
    import ml_dtypes
except ImportError:  # then this dtype falls away
    ml_dtypes = None

BFLOAT16 = (ml_dtypes.bfloat16,) if ml_dtypes else ()
DTYPES = (np.float32, np.float32, np.float64, np.float16, *BFLOAT16)
MASK_DTYPES = (np.float16, np.float32, np.float64, *BFLOAT16)
INTEGERS = (np.int64, np.int32, np.int16, np.uint16)

# Around the sub-tiles (4, 8, 16, 24 and 32 rows, times 2 to 4), the row tile (256), the key block
# (64) and the key split (512) of all the instruction sets; and ordinary sizes in between.
N_QUERY = (
    0, 1, 1, 1, 2, 3, 7, 8, 9, 15, 16, 17, 23, 24, 25, 31, 33, 63, 64, 65, 127, 129, 255, 257,
)  # fmt: skip
N_KEY = (0, 1, 2, 3, 15, 16, 17, 40, 63, 64, 65, 100, 127, 128, 129, 192, 257, 511, 512, 513, 1025)
WIDTH = (0, 1, 2, 3, 4, 7, 8, 15, 16, 17, 24, 33, 40, 64, 72, 128)
GROUP = (1, 1, 1, 2, 3, 8)
N_KV_HEAD = (1, 1, 2, 3)
BATCH_AXIS = (1, 1, 2, 3, 5)

# Multiply-adds of a case. Below SMALL one case in NumPy takes a millisecond or two; above LARGE
# the library uses more than one thread.
SMALL, LARGE = 1e5, 6e6


@dataclasses.dataclass
class Case:
    """One call by the values of its arguments; where they lie in memory comes later."""

    entry: str
    arrays: dict[str, np.ndarray]
    options: dict[str, Any]
    dtype: type
    # Logits that have no rounding error; see `_exact_numbers`.
    exact: bool = False
    isa: str | None = None
    num_threads: int | None = None
    layout_seed: int | None = None
    # Keys that no query may see; they and their values are not finite.
    unseen: list[int] = dataclasses.field(default_factory=list)
    number: int | None = None
    notes: list[str] = dataclasses.field(default_factory=list)

    @property
    def batch_shape(self):
        """Batch axes of the result of `attention`."""
        operands = [x for name, x in self.arrays.items() if name != "attn_mask"]
        return np.broadcast_shapes(*(x.shape[:-3] for x in operands))

    def describe(self):
        """Return the call in a few lines."""
        how = f"{self.isa}, threads {self.num_threads}, layout {self.layout_seed}"
        lines = [f"{self.entry}, {np.dtype(self.dtype).name}, {how}"]
        lines += [f"  {name}: {x.dtype.name} {x.shape}" for name, x in self.arrays.items()]
        for name, option in self.options.items():
            text = np.array2string(np.asarray(option), threshold=20, edgeitems=4)
            lines.append(f"  {name} = {text if isinstance(option, np.ndarray) else repr(option)}")
        return "\n".join(lines + [f"  ({note})" for note in self.notes])


def entries():
    """Names of the entry points that this version of the library has, attention most often."""
    others = [name for name in _DRAW if hasattr(mha_fast, name) and name != "attention"]
    return ["attention"] * 5 + others


def backward_entries():
    """Names of the entry points that are drawn only where they are asked for."""
    return list(_DRAW_BACKWARD)


def draw_case(seed, number, isas, entry=None):
    """Case `number` of the run with this seed."""
    rng = np.random.default_rng((seed, number))
    drawn_entry = str(rng.choice(entries()))
    case = (_DRAW | _DRAW_BACKWARD)[entry or drawn_entry](rng)
    case.number, case.isa = number, str(rng.choice(isas))
    case.num_threads = _pick(rng, (None, 1, 2, 3))
    case.layout_seed = int(rng.integers(2**32)) if rng.random() < 0.7 else None
    return case


# ---- the entry points ---------------------------------------------------------------------------


def _draw_attention(rng):
    dtype = _pick(rng, DTYPES)
    sizes = _sizes(rng, dtype)
    case = _case_of_numbers(rng, "attention", sizes, dtype)
    case.arrays = {name: _perhaps_repeated(rng, x) for name, x in case.arrays.items()}
    _draw_dense_options(rng, case, sizes)
    return _without_axes(rng, case)


def _draw_weights(rng):
    """Of `attention_weights`: no value, and a choice of queries and heads."""
    dtype = _pick(rng, DTYPES)
    sizes = _sizes(rng, dtype)
    case = _case_of_numbers(rng, "attention_weights", sizes, dtype)
    del case.arrays["value"]
    _draw_dense_options(rng, case, sizes)
    for name, n in (("queries", sizes["n_query"]), ("heads", sizes["n_head"])):
        if n and rng.random() < 0.4:
            case.options[name] = _choice_of(rng, n)
    return case


def _choice_of(rng, n):
    start, stop = np.sort(rng.integers(0, n + 1, 2)).tolist()
    ways = (
        int(rng.integers(-n, n)), slice(start, stop), slice(None, None, -2),
        rng.integers(0, n, 3), rng.random(n) < 0.5,
    )  # fmt: skip
    return _pick(rng, ways)


def _draw_varlen(rng):
    """Of `attention_varlen`: the rows of several sequences, one after the other."""
    dtype = _pick(rng, DTYPES)
    sizes = _sizes(rng, dtype)
    n_sequence = _pick(rng, (0, 1, 2, 3, 5, 9))
    lengths_q = np.array([_pick(rng, (0, 1, sizes["n_query"])) for _ in range(n_sequence)], int)
    lengths_k = rng.integers(0, sizes["n_key"] + 1, n_sequence)
    cu_q, cu_k = (np.append(0, np.cumsum(x)) for x in (lengths_q, lengths_k))
    packed = sizes | {"batch": (), "n_query": int(cu_q[-1]), "n_key": int(cu_k[-1])}
    case = _case_of_numbers(rng, "attention_varlen", packed, dtype)
    case.arrays = {
        name: _perhaps_repeated(rng, x.swapaxes(0, 1)) for name, x in case.arrays.items()
    }
    _draw_options(rng, case, sizes, (n_sequence,))
    _one_per_sequence(case, n_sequence)
    case.options["cu_seqlens_q"], case.options["cu_seqlens_k"] = cu_q, _integers(rng, cu_k)
    _perhaps_poison(rng, case)
    return case


def _draw_backward(rng):
    """Of `attention_backward`: a call of `attention`, and what comes back to it."""
    return _with_backward(rng, _draw_attention(rng))


def _draw_varlen_backward(rng):
    return _with_backward(rng, _draw_varlen(rng))


def _with_backward(rng, case):
    case.entry += "_backward"
    case.options["grad_seed"] = int(rng.integers(2**32))
    case.options["share_wanted"] = _pick(rng, (1.0, 0.6, 0.3))
    case.options["with_grad_lse"] = bool(rng.random() < 0.4)
    case.options["poison_grad"] = bool(not case.exact and rng.random() < 0.05)
    if rng.random() < 0.25:
        case.options["dropout_p"] = _pick(rng, (0.0, 0.1, 0.5, 0.9))
        case.options["dropout_seed"] = int(rng.integers(2**63)) * 2 + 1
    return case


def _one_per_sequence(case, n_sequence):
    """Write out what may broadcast over batch axes elsewhere, but not here."""
    for name in ("alibi_slopes", "head_mask"):
        numbers = case.options.get(name)
        if numbers is not None and numbers.ndim == 2:
            case.options[name] = np.broadcast_to(numbers, (n_sequence, numbers.shape[1])).copy()


def _draw_merge(rng):
    """Of `merge_attention`: a call of `attention` whose keys get cut in parts."""
    dtype = _pick(rng, DTYPES)
    sizes = _sizes(rng, dtype)
    case = Case("merge_attention", *_normal_numbers(rng, _operand_shapes(rng, sizes), dtype), dtype)
    _draw_dense_options(rng, case, sizes, poison=False)
    cuts = np.sort(rng.integers(0, sizes["n_key"] + 1, int(rng.integers(0, 4))))
    case.options["cuts"] = cuts.tolist()
    return case


def _draw_cache(rng):
    """Of `KVCache`: what happens to it is drawn along the way, see _fuzz_cache.py."""
    dtype = _pick(rng, DTYPES)
    options = {"seed": int(rng.integers(2**32)), "n_step": int(rng.integers(2, 9))}
    return Case("KVCache", {}, options, dtype)


def _case_of_numbers(rng, entry, sizes, dtype):
    """Query, key and value of one of several kinds; no options but those that the kind needs."""
    numbers = _pick(rng, (_normal_numbers,) * 5 + (_exact_numbers,) * 2 + (_tiny_numbers,))
    arrays, options = numbers(rng, _operand_shapes(rng, sizes), dtype)
    return Case(entry, arrays, options, dtype, numbers is _exact_numbers)


def _sizes(rng, dtype):
    """Sizes of a call that is not too much work for NumPy."""
    choices = {
        "n_kv_head": N_KV_HEAD, "group": GROUP, "n_query": N_QUERY, "n_key": N_KEY,
        "head_width": WIDTH, "value_width": WIDTH,
    }  # fmt: skip
    most = SMALL * _pick(rng, (0.1, 1, 3))
    if rng.random() < 0.03:
        most = LARGE * (1 if dtype == np.float64 else 3)
        for name in ("n_query", "n_key", "head_width", "value_width"):
            choices[name] = choices[name][len(choices[name]) // 2 :]
    sizes = {name: _pick(rng, numbers) for name, numbers in choices.items()}
    sizes["batch"] = tuple(_pick(rng, BATCH_AXIS) for _ in range(_pick(rng, (0, 1, 1, 1, 2, 3))))
    while _work(sizes) > most:
        name = _pick(rng, [*choices, "batch"])
        if name == "batch":
            sizes["batch"] = sizes["batch"][1:]
        else:
            sizes[name] = _pick(rng, [n for n in choices[name] if n <= sizes[name]])
    if rng.random() < 0.02:
        sizes["n_kv_head"] = 0
    if sizes["batch"] and rng.random() < 0.02:
        sizes["batch"] = (0, *sizes["batch"][1:])
    sizes["n_head"] = sizes["n_kv_head"] * sizes["group"]
    return sizes


def _work(sizes):
    """Multiply-adds, and some for the scores; sizes of 0 leave arrays as large as sizes of 1."""
    per_pair = sizes["head_width"] + sizes["value_width"] + 8
    n_row = sizes["n_kv_head"] * sizes["group"] * max(sizes["n_query"], 1)
    return np.prod(sizes["batch"], initial=1.0) * n_row * max(sizes["n_key"], 1) * per_pair


def _operand_shapes(rng, sizes):
    """Shapes of query, key and value; batch axes are 1 or missing here and there."""
    shapes = []
    for head, row, width in (
        ("n_head", "n_query", "head_width"),
        ("n_kv_head", "n_key", "head_width"),
        ("n_kv_head", "n_key", "value_width"),
    ):
        batch = _broadcastable(rng, sizes["batch"]) if rng.random() < 0.2 else sizes["batch"]
        shapes.append((*batch, sizes[head], sizes[row], sizes[width]))
    return shapes


def _without_axes(rng, case):
    """Write a call of a single head with rank 2, now and then."""
    operands = [case.arrays[name] for name in ("query", "key", "value")]
    if all(x.ndim == 3 and x.shape[0] == 1 for x in operands) and rng.random() < 0.5:
        case.arrays |= {name: case.arrays[name][0] for name in ("query", "key", "value")}
    return case


# ---- numbers ------------------------------------------------------------------------------------


def _normal_numbers(rng, shapes, dtype):
    factor = _pick(rng, (0.1, 1, 1, 1, 6))
    query, key, value = (rng.standard_normal(shape) for shape in shapes)
    return _operands(query * factor, key, value, dtype), {}


def _exact_numbers(rng, shapes, dtype):
    """Small integers times a power of two: any order of summation gives the same logit.

    So huge logits can be judged, where a rounding error in a logit would decide everything.
    """
    query, key = (rng.integers(-2, 3, shape).astype(float) for shape in shapes[:2])
    most = 10 if np.dtype(dtype).itemsize == 2 else 50 if dtype == np.float32 else 500
    up, down = rng.integers(0, most, 2)
    value = rng.standard_normal(shapes[2])
    scale = _pick(rng, (1.0, 1.0, -1.0, 0.5, 0.0, 4.0, 2.0**-20))
    query, key = query * 2.0**up, key * 2.0 ** _pick(rng, (down, -down, -up))
    return _operands(query, key, value, dtype), {"scale": scale}


def _tiny_numbers(rng, shapes, dtype):
    """Subnormal values (and perhaps keys), which flushing to zero would lose."""
    unit = float(finfo(dtype).smallest_subnormal)
    query, key, value = (rng.standard_normal(shape) for shape in shapes)
    value = np.rint(value * 300) * unit
    if rng.random() < 0.5:
        key = np.rint(key * 300) * unit
    return _operands(query, key, value, dtype), {}


def _operands(query, key, value, dtype):
    return {"query": query.astype(dtype), "key": key.astype(dtype), "value": value.astype(dtype)}


def _perhaps_repeated(rng, x):
    """Perhaps make one axis a repetition of its first entry, with stride 0."""
    if x.ndim and rng.random() < 0.05:
        axis = int(rng.integers(x.ndim))
        if x.shape[axis] > 1:
            return np.broadcast_to(x.take([0], axis=axis), x.shape)
    return x


# ---- options ------------------------------------------------------------------------------------


def _draw_dense_options(rng, case, sizes, *, poison=True):
    """Options of the entry points whose operands have batch axes."""
    batch = case.batch_shape
    _draw_options(rng, case, sizes, batch)
    unseen = set()
    if rng.random() < 0.4:
        full = (*batch, sizes["n_head"], sizes["n_query"], sizes["n_key"])
        case.arrays["attn_mask"] = _mask(rng, full, case)
        if rng.random() < 0.3 and case.arrays["attn_mask"].shape[-1:] == (sizes["n_key"],):
            unseen.update(_hidden_by_mask(rng, case))
    if rng.random() < 0.25:
        lengths = rng.integers(0, sizes["n_key"] + 1, _broadcastable(rng, batch))
        case.options["kv_lengths"] = _integers(rng, np.asarray(lengths))
        if rng.random() < 0.5:
            unseen.update(range(int(lengths.max(initial=0)), sizes["n_key"]))
    if unseen:
        _poison_unseen(rng, case, sorted(unseen))
    if poison:
        _perhaps_poison(rng, case)


def _draw_options(rng, case, sizes, batch):
    """Options that all the entry points share."""
    options, n_head, n_key = case.options, sizes["n_head"], sizes["n_key"]

    def some(probability):
        return rng.random() < probability

    if some(0.3):
        options["is_causal"] = True
    if some(0.25):
        bounds = (None, 0, 1, 5, 63, 64, 65, n_key, 10**9, 2**70)
        options["window"] = (_pick(rng, bounds), _pick(rng, bounds))
    if some(0.4):
        options["query_offset"] = _query_offset(rng, sizes, batch)
    if not case.exact and some(0.3):
        options["scale"] = _pick(rng, (0, 0.0, 1, 0.3, -0.3, 1e-30, np.float32(0.7)))
    if some(0.15):
        options["softcap"] = _pick(rng, (0.5, 2.0, 30, 1e-3, 1e4))
    if not case.exact and some(0.15) and not _far_away(options.get("query_offset", 0)):
        slopes = 2.0 ** -rng.integers(1, 9, _per_head(rng, n_head, batch))
        options["alibi_slopes"] = slopes * _pick(rng, (1, 1, 1, 0, -0.25))
    if some(0.15):
        options["sinks"] = rng.integers(-8, 9, n_head) / 4
    if some(0.15):
        gates = rng.choice([0.0, 1.0, 0.5, -2.0, -0.0], _per_head(rng, n_head, batch))
        options["head_mask"] = gates.astype(_pick(rng, (np.float32, np.float64)))


def _query_offset(rng, sizes, batch):
    way = _pick(rng, ("end", "number", "array", "far"))
    if way == "end":
        return "end"
    low, high = -sizes["n_query"] - 2, sizes["n_key"] + 2
    if way == "number":
        return int(rng.integers(low, high))
    if way == "far":
        return _pick(rng, (-(10**9), 10**9, 2**59, -(2**59)))
    return rng.integers(low, high, _broadcastable(rng, batch))


def _far_away(offset):
    return isinstance(offset, int) and abs(offset) > 10**6


def _per_head(rng, n_head, batch):
    return (*(_broadcastable(rng, batch) if rng.random() < 0.5 else ()), n_head)


def _integers(rng, x):
    return int(x) if x.ndim == 0 and rng.random() < 0.5 else x.astype(_pick(rng, INTEGERS))


# ---- masks --------------------------------------------------------------------------------------


def _mask(rng, full, case):
    """A bool or float mask that broadcasts to `full`, perhaps by strides of 0 already."""
    shape = _broadcastable(rng, full)
    let_through = _let_through(rng, shape)
    if rng.random() < 0.5:
        mask = let_through
    else:
        mask = _float_mask(rng, let_through, case)
    return np.broadcast_to(mask, full) if rng.random() < 0.2 else mask


def _let_through(rng, shape):
    if not shape or rng.random() < 0.7:
        return np.asarray(rng.random(shape) < _pick(rng, (0, 0.02, 0.5, 0.98, 1)))
    # padding: the leading or the trailing keys of each row
    bound = rng.integers(0, shape[-1] + 1, (*shape[:-1], 1))
    return (np.arange(shape[-1]) < bound) == (rng.random() < 0.5)


def _float_mask(rng, let_through, case):
    dtype = _pick(rng, MASK_DTYPES)
    lowest = float(-np.inf)
    addends = np.zeros(let_through.shape)
    if not case.exact:
        # A low finite number is not an exclusion. (What float32 cannot hold makes no sense of lse.)
        least = max(_least(dtype), _least(np.float64 if case.dtype == np.float64 else np.float32))
        # Parts of the keys lose it in an lse that low: no merging with these.
        if case.entry == "merge_attention":
            least = -30.0
        lowest = _pick(rng, (lowest, lowest, least, -30.0))
        addends = rng.standard_normal(let_through.shape) * _pick(rng, (0, 1, 1, 10))
    return np.asarray(np.where(let_through, addends, lowest)).astype(dtype)


def _least(dtype):
    return float(finfo(dtype).min)


def finfo(dtype):
    """Like np.finfo, also of bfloat16."""
    return ml_dtypes.finfo(dtype) if dtype in BFLOAT16 else np.finfo(dtype)


# ---- NaN and Inf --------------------------------------------------------------------------------


def _hidden_by_mask(rng, case):
    """Let the mask exclude some keys for all queries; return them."""
    mask = case.arrays["attn_mask"] = case.arrays["attn_mask"].copy()
    keys = np.flatnonzero(rng.random(mask.shape[-1]) < _pick(rng, (0.03, 0.5)))
    mask[..., keys] = False if mask.dtype == bool else -np.inf
    return keys.tolist()


def _poison_unseen(rng, case, keys):
    case.unseen = keys
    for name in ("key", "value"):
        if name in case.arrays:
            x = case.arrays[name] = case.arrays[name].copy()
            x[..., keys, :] = _pick(rng, (np.nan, np.inf, -np.inf))
    case.notes.append(f"keys {keys} and their values are not finite")


def _perhaps_poison(rng, case):
    """Put a few NaN or Inf into the arrays; the reference says what they reach."""
    query = case.arrays["query"]
    if case.exact or not 0.01 < np.abs(query.astype(np.float32)).max(initial=0) < 8:
        return
    if rng.random() < 0.7:
        return
    for _ in range(_pick(rng, (1, 1, 2, 5))):
        # NaN in a mask does not exclude, so it would show keys that must stay unseen.
        names = [
            name for name, x in case.arrays.items()
            if x.size and x.dtype != bool and not (case.unseen and name == "attn_mask")
        ]  # fmt: skip
        names += [name for name in ("sinks", "head_mask") if np.size(case.options.get(name, ()))]
        if names:
            _poison(rng, case, _pick(rng, names))


def _poison(rng, case, name):
    poison = np.nan
    if name == "value" and _weights_are_moderate(case):
        poison = _pick(rng, (np.nan, np.inf, -np.inf))
    holder = case.arrays if name in case.arrays else case.options
    x = holder[name] = holder[name].copy()
    if name == "value" and rng.random() < 0.3:
        x[..., int(rng.integers(x.shape[-2])), :] = poison
    else:
        x.flat[int(rng.integers(x.size))] = poison
    case.notes.append(f"{poison} in {name}")


def _weights_are_moderate(case):
    """Whether no visible weight is near 0: Inf times what one precision rounds to 0 is NaN."""
    mask = case.arrays.get("attn_mask", np.zeros(0, bool))
    return mask.dtype == bool and not {"alibi_slopes", "sinks"} & case.options.keys()


# ---- small things -------------------------------------------------------------------------------


def _pick(rng, things):
    """One of a sequence of things that NumPy would turn into an array."""
    return things[int(rng.integers(len(things)))]


def _broadcastable(rng, full):
    """A shape that broadcasts to `full`: axes of 1 and missing leading ones."""
    shape = tuple(n if rng.random() < 0.6 else 1 for n in full)
    return shape[int(rng.integers(len(full) + 1)) :] if rng.random() < 0.3 else shape


_DRAW = {
    "attention": _draw_attention,
    "attention_varlen": _draw_varlen,
    "attention_weights": _draw_weights,
    "merge_attention": _draw_merge,
    "KVCache": _draw_cache,
}
_DRAW_BACKWARD = {
    "attention_backward": _draw_backward,
    "attention_varlen_backward": _draw_varlen_backward,
}
