"""`KVCache` for the fuzzer: a random life of a cache beside plain lists of what it should hold."""

import numpy as np
from _fuzz_cases import Case

import mha_fast


def check_cache(case, compare):
    """Let the cache live through some steps; `compare` judges the result of each attend."""
    rng = np.random.default_rng(case.options["seed"])
    life = _Life(rng, case.dtype)
    steps = (life.append, life.append, life.attend, life.attend, life.truncate, life.reorder)
    for _ in range(case.options["n_step"]):
        life.append()
        steps[int(rng.integers(len(steps)))]()
        np.testing.assert_array_equal(life.cache.lengths, life.lengths())
    life.attend(compare)


class _Life:
    def __init__(self, rng, dtype):
        n_batch, self.n_kv_head, self.group = (int(n) for n in rng.integers(1, 4, 3))
        self.head_width, self.value_width = (int(n) for n in rng.choice([0, 1, 8, 17, 40], 2))
        self.rng, self.dtype = rng, dtype
        self.cache = mha_fast.KVCache(
            n_batch, self.n_kv_head, self.head_width, self.value_width, dtype=dtype,
            capacity=int(rng.integers(0, 30)),
        )  # fmt: skip
        self.keys = [self._rows(0, self.head_width) for _ in range(n_batch)]
        self.values = [self._rows(0, self.value_width) for _ in range(n_batch)]

    def lengths(self):
        return np.array([x.shape[1] for x in self.keys], int)

    def append(self):
        """The same number of new tokens for all, or one for each and the rest padding."""
        n_batch, n_token = len(self.keys), int(self.rng.choice([0, 1, 1, 5, 64, 70]))
        counts = self.rng.integers(0, n_token + 1, n_batch) if self.rng.random() < 0.5 else None
        key = np.array([self._rows(n_token, self.head_width) for _ in range(n_batch)])
        value = np.array([self._rows(n_token, self.value_width) for _ in range(n_batch)])
        for i in range(n_batch):
            new = n_token if counts is None else int(counts[i])
            self.keys[i] = np.concatenate([self.keys[i], key[i, :, :new]], axis=1)
            self.values[i] = np.concatenate([self.values[i], value[i, :, :new]], axis=1)
            key[i, :, new:] = value[i, :, new:] = np.nan
        self.cache.append(key, value, counts)

    def truncate(self):
        lengths = self.rng.integers(0, self.lengths() + 1)
        self.cache.truncate(lengths)
        self.keys = [x[:, :n] for x, n in zip(self.keys, lengths, strict=True)]
        self.values = [x[:, :n] for x, n in zip(self.values, lengths, strict=True)]

    def reorder(self):
        n_batch = len(self.keys)
        n_new = n_batch if self.rng.random() < 0.7 else int(self.rng.integers(1, 5))
        indices = self.rng.integers(0, n_batch, n_new)
        self.cache.reorder(indices)
        self.keys = [self.keys[i] for i in indices]
        self.values = [self.values[i] for i in indices]

    def attend(self, compare=None):
        """Queries for the last tokens, fewer of them for some sequences perhaps."""
        rng, n_batch, lengths = self.rng, len(self.keys), self.lengths()
        n_query, n_head = int(rng.choice([1, 1, 2, 9, 33])), self.n_kv_head * self.group
        query = np.array([self._rows(n_query, self.head_width, n_head) for _ in range(n_batch)])
        options = {}
        if rng.random() < 0.3:
            options["is_causal"] = False
        if rng.random() < 0.3:
            options["window"] = (int(rng.integers(0, 70)), None)
        if rng.random() < 0.3:
            options["softcap"] = 3.0
        counts = rng.integers(0, n_query + 1, n_batch) if rng.random() < 0.4 else None
        if rng.random() < 0.3 and counts is None:  # padding has no lse, with a sink neither
            options["sinks"] = rng.integers(-4, 5, n_head) / 4
        result = self.cache.attend(query, counts=counts, return_lse=True, **options)
        if compare is not None:
            compare(self._as_attention(query, counts, lengths, options), result)

    def _as_attention(self, query, counts, lengths, options):
        """The same in a call of `attention`; a mask without keys stands for the padding."""
        arrays = {"query": query}
        for name, rows in (("key", self.keys), ("value", self.values)):
            width = rows[0].shape[-1]
            arrays[name] = np.full(
                (len(rows), self.n_kv_head, lengths.max(), width), np.nan, self.dtype
            )
            for place, x in zip(arrays[name], rows, strict=True):
                place[:, : x.shape[1]] = x
        n_query = query.shape[2]
        options = {"is_causal": True, "kv_lengths": lengths, **options}
        options["query_offset"] = lengths - (n_query if counts is None else counts)
        if counts is not None:
            arrays["attn_mask"] = np.arange(n_query)[:, None] < counts[:, None, None, None]
        return Case("attention", arrays, options, self.dtype)

    def _rows(self, n, width, n_head=None):
        shape = (n_head or self.n_kv_head, n, width)
        return self.rng.standard_normal(shape).astype(self.dtype)
