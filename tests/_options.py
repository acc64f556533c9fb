"""The options of attention() that tests try alone, in pairs and together."""

import numpy as np

N_BATCH, N_HEAD = 2, 4


def _bool_mask(rng, n_query, n_key):
    mask = rng.random((N_BATCH, N_HEAD, n_query, n_key)) < 0.7
    mask[0, 1, -1] = False  # a query without a key
    mask[1, :, :, :70] = False  # a whole block of keys
    return mask


def _float_mask(rng, n_query, n_key):
    mask = rng.standard_normal((n_query, n_key))
    mask[rng.random(mask.shape) < 0.2] = -np.inf
    mask[0, :80] = -np.inf
    return mask


# name: what it passes, from (rng, n_query, n_key)
OPTIONS = {
    "bool mask": lambda rng, n_query, n_key: {"attn_mask": _bool_mask(rng, n_query, n_key)},
    "float mask": lambda rng, n_query, n_key: {"attn_mask": _float_mask(rng, n_query, n_key)},
    "causal": lambda *_: {"is_causal": True},
    "window": lambda *_: {"window": (20, 3)},
    "left window": lambda *_: {"window": (2, None)},
    "right window": lambda *_: {"window": (None, 0)},
    "offset": lambda rng, n_query, n_key: {"query_offset": n_key // 2},
    "negative offset": lambda *_: {"query_offset": -1},
    "offset per sequence": lambda rng, n_query, n_key: {
        "query_offset": np.array([3, n_key - n_query])
    },
    "offset at the end": lambda *_: {"query_offset": "end"},
    "lengths": lambda rng, n_query, n_key: {"kv_lengths": np.array([n_key // 3, n_key - 1])},
    "empty length": lambda rng, n_query, n_key: {"kv_lengths": np.array([n_key, 0])},
    "scale": lambda *_: {"scale": -0.4},
    "softcap": lambda *_: {"softcap": 1.5},
    "alibi": lambda rng, *_: {"alibi_slopes": rng.random(N_HEAD)},
    "alibi per sequence": lambda rng, *_: {"alibi_slopes": rng.normal(0, 0.02, (N_BATCH, N_HEAD))},
    "sinks": lambda rng, *_: {"sinks": rng.standard_normal(N_HEAD)},
    "head mask": lambda *_: {"head_mask": np.array([1.0, 0.0, -0.5, 2.0])},
    "head mask per sequence": lambda rng, *_: {"head_mask": rng.random((N_BATCH, N_HEAD))},
    "one thread": lambda *_: {"num_threads": 1},
}


def arguments_of(names, dtype, n_query, n_key):
    """What the named options pass, together; None where two set the same argument."""
    together = {}
    for name in names:
        rng = np.random.default_rng(list(OPTIONS).index(name))
        arguments = OPTIONS[name](rng, n_query, n_key)
        if together.keys() & arguments.keys():
            return None
        together |= arguments
    for name, argument in together.items():
        if isinstance(argument, np.ndarray) and argument.dtype == np.float64:
            together[name] = argument.astype(dtype)
    return together


def zeros(shape, dtype=np.float32):
    """An array whose shape and dtype are all that matters."""
    return np.zeros(shape, dtype)


# Wrong arguments that every function over scores refuses alike. The valid call has a batch of 2, 4
# heads over 2, 5 queries and 17 keys of width 6.
# id: (wrong arguments, error, words that the message has to contain, the argument first)
SCORE_ERRORS = {
    "wider key": ({"key": zeros((2, 2, 17, 6), np.float64)}, TypeError, "key float64 float32"),
    "key of rank 2": ({"key": zeros((17, 6))}, ValueError, "key (17, 6) (2, 4, 5, 6)"),
    "head width": ({"key": zeros((2, 2, 17, 7))}, ValueError, "key (2, 2, 17, 7) 6 query"),
    "heads not a multiple": ({"key": zeros((2, 3, 17, 6))}, ValueError, "query 4 3 key"),
    "batch": ({"key": zeros((3, 2, 17, 6))}, ValueError, "key (3, 2, 17, 6) (2, 4, 5, 6)"),
    "integer mask": ({"attn_mask": zeros((5, 17), np.int8)}, TypeError, "attn_mask int8 bool"),
    "mask too long": (
        {"attn_mask": zeros((5, 18))},
        ValueError,
        "attn_mask (5, 18) (2, 4, 5, 17)",
    ),
    "lengths": ({"kv_lengths": [3, 18]}, ValueError, "kv_lengths 18 17"),
    "window": ({"window": (-1, 0)}, ValueError, "window -1"),
    "offset": ({"query_offset": "start"}, ValueError, "query_offset 'start' 'end'"),
    "scale": ({"scale": np.nan}, ValueError, "scale nan finite"),
    "softcap": ({"softcap": -1.0}, ValueError, "softcap -1.0"),
    "number of slopes": ({"alibi_slopes": zeros(3)}, ValueError, "alibi_slopes (3,) (4,)"),
    "causal as text": ({"is_causal": "yes"}, TypeError, "is_causal 'yes' True False"),
    "no thread": ({"num_threads": 0}, ValueError, "num_threads 0"),
}
