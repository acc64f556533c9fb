"""`merge_attention` for the fuzzer: a call of `attention` in parts of its keys."""

import numpy as np

import mha_fast


def attention_in_parts(query, key, value, attn_mask=None, *, cuts, return_lse, **options):
    """Attention to the keys before, between and behind the cuts, joined."""
    assert return_lse
    n_query, n_key = query.shape[-2], key.shape[-2]
    lengths = np.asarray(options.pop("kv_lengths", n_key), np.int64)
    offset = options.pop("query_offset", 0)
    offset = lengths - n_query if isinstance(offset, str) else np.asarray(offset)
    parts = []
    for start, stop in zip([0, *cuts], [*cuts, n_key], strict=True):
        keys = slice(start, stop)
        mask = attn_mask
        if mask is not None and mask.ndim and mask.shape[-1] > 1:
            mask = mask[..., keys]
        out, lse = mha_fast.attention(
            query, key[..., keys, :], value[..., keys, :], mask, return_lse=True,
            kv_lengths=np.clip(lengths - start, 0, stop - start), query_offset=offset - start,
            **options,
        )  # fmt: skip
        parts.append((out, lse))
        options.pop("sinks", None)  # counts once
    return mha_fast.merge_attention(*zip(*parts, strict=True))
