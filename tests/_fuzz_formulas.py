"""What the entry points should return, by the formulas of ``mha_fast.reference``.

Each function takes the dtype to compute in, and the arguments of the entry point; it returns the
output and the lse. Each alone_* takes a case and returns a smaller call, and where its result lies
in that of the case.
"""

import numpy as np

from mha_fast import reference


def attention(dtype, **call):
    """Formula of `attention`."""
    return reference._attention_in(dtype, **call)


def merged(dtype, *, cuts, **call):
    """Joining parts of the keys gives what all of them give."""
    return reference._attention_in(dtype, **call)


def weights(dtype, query, key, attn_mask=None, *, queries=None, heads=None, sinks=None,
            head_mask=None, **options):  # fmt: skip
    """Formula of `attention_weights`."""
    query, key, _ = reference._with_all_heads(*(np.asarray(x, dtype) for x in (query, key, key)))
    with np.errstate(all="ignore"):
        scores, visible = reference.masked_scores(query, key, attn_mask, **options)
        result, lse = reference.softmax(scores, sinks)
        nothing = ~visible.any(axis=-1) | (lse == -np.inf)
        if head_mask is not None:
            gate = np.asarray(head_mask, dtype)[..., None, None]
            result = np.where(gate == 0, dtype(0), gate * result)
    result = np.where(~visible | nothing[..., None], dtype(0), result)
    rows, of_heads = _indices(queries, scores.shape[-2]), _indices(heads, scores.shape[-3])
    return result[..., of_heads, :, :][..., rows, :], lse[..., of_heads, :][..., rows]


def _indices(chosen, n):
    """Axes stay, also for an int."""
    return np.arange(n)[slice(None) if chosen is None else chosen].reshape(-1)


def varlen(dtype, query, key, value, *, cu_seqlens_q, cu_seqlens_k, **options):
    """Formula of `attention_varlen`: that of `attention` for each sequence."""
    out = np.zeros((*query.shape[:2], value.shape[2]), dtype)
    lse = np.zeros(query.shape[:2], dtype)
    for i in range(len(cu_seqlens_q) - 1):
        rows, call = sequence(i, query, key, value, cu_seqlens_q, cu_seqlens_k, options)
        part = reference._attention_in(dtype, **call)
        out[rows], lse[rows] = part[0].swapaxes(0, 1), part[1].T
    return out, lse


def sequence(i, query, key, value, cu_seqlens_q, cu_seqlens_k, options):
    """Rows of sequence i of a packed call, and the call of `attention` for it."""
    rows = slice(*(int(x) for x in cu_seqlens_q[i : i + 2]))
    keys = slice(*(int(x) for x in cu_seqlens_k[i : i + 2]))
    call = {"query": query[rows].swapaxes(0, 1), "key": key[keys].swapaxes(0, 1),
            "value": value[keys].swapaxes(0, 1), **options}  # fmt: skip
    n_sequence = len(cu_seqlens_q) - 1
    for name in ("alibi_slopes", "head_mask"):
        if np.ndim(call.get(name)) == 2:
            call[name] = call[name][i]
    if not isinstance(call.get("query_offset", ""), str):
        call["query_offset"] = int(np.broadcast_to(call["query_offset"], n_sequence)[i])
    return rows, call


def one_sequence(case):
    """The longest sequence of a packed call in a call of `attention`."""
    lengths = np.diff(case.options["cu_seqlens_q"])
    if not len(lengths):
        return None
    options = dict(case.options)
    cu = options.pop("cu_seqlens_q"), options.pop("cu_seqlens_k")
    rows, call = sequence(int(np.argmax(lengths)), *case.arrays.values(), *cu, options)
    return call, lambda out, lse: (out[rows].swapaxes(0, 1), lse[rows].T)


def one_batch_entry(case):
    """The call with one entry of the batch and no other."""
    batch = case.batch_shape
    if np.prod(batch) < 2:
        return None
    entry = tuple(n // 2 for n in batch)
    call = {}
    for name, x in (case.arrays | case.options).items():
        if name in case.arrays:
            own = x.reshape((1,) * (3 - x.ndim) + x.shape)  # a mask may lack axes
            call[name] = np.broadcast_to(own, batch + own.shape[-3:])[entry]
        elif name in ("alibi_slopes", "head_mask"):
            call[name] = np.broadcast_to(x, (*batch, np.shape(x)[-1]))[entry]
        elif name in ("kv_lengths", "query_offset") and not isinstance(x, str):
            call[name] = np.broadcast_to(x, batch)[entry]
        else:
            call[name] = x
    return call, lambda out, lse: (out[entry], lse[entry])


def backward_units(*, query, key, value, out, lse, grad_out, wanted, attn_mask=None, grad_lse=None,
                   sinks=None, head_mask=None, alibi_slopes=None, dropout_p=0.0, dropout_seed=None,
                   **score_options):  # fmt: skip
    """How large the sums behind each gradient are: the largest sum of magnitudes."""
    query, key, value, out, grad_out, lse = (
        np.nan_to_num(np.asarray(x, np.float64), nan=0, posinf=0, neginf=0)
        for x in (query, key, value, out, grad_out, lse)
    )
    owned = {
        "query": query, "key": key, "value": value, "attn_mask": attn_mask, "sinks": sinks,
        "head_mask": head_mask, "alibi_slopes": alibi_slopes,
    }  # fmt: skip
    n_kv_head = 1 if query.ndim == 2 else key.shape[-3]
    q, k, v = reference._with_all_heads(query, key, value)
    one = (None,) if query.ndim == 2 else ()
    do, o, lse = np.abs(grad_out[one]), np.abs(out[one]), lse[one]
    dlse = 0 if grad_lse is None else np.abs(np.asarray(grad_lse, np.float64)[one])
    slopes = None if alibi_slopes is None else np.nan_to_num(np.asarray(alibi_slopes, np.float64))
    if attn_mask is not None and attn_mask.dtype != bool:
        attn_mask = np.where(np.isnan(attn_mask), 0, attn_mask)
    gate = 1.0
    if head_mask is not None:
        gate = np.abs(np.nan_to_num(np.asarray(head_mask, np.float64)))[..., None, None]
    factor = 1 / (1 - dropout_p)
    with np.errstate(all="ignore"):
        scores, visible = reference.masked_scores(
            q, k, attn_mask, alibi_slopes=slopes, **score_options
        )
        weights = np.where(visible, np.exp(np.minimum(scores - lse[..., None], 0)), 0)
        grad_kept = factor * (do @ np.swapaxes(np.abs(v), -1, -2))
        delta = ((do * o).sum(axis=-1) + dlse)[..., None]
        grad_scores = weights * (gate * grad_kept + delta)
        n_query, n_key = scores.shape[-2:]
        far = np.abs(reference._scores.positions(
            n_query, n_key, score_options.get("query_offset", 0), score_options.get("kv_lengths")
        ) - np.arange(n_key)).astype(float)  # fmt: skip
        scale = abs(float(reference._scores.score_scale(score_options.get("scale"), q.shape[-1])))
        sums = {
            "query": scale * (grad_scores @ np.abs(k)),
            "key": scale * (np.swapaxes(grad_scores, -1, -2) @ np.abs(q)),
            "value": gate * factor * (np.swapaxes(weights, -1, -2) @ do),
            "attn_mask": grad_scores,
            "alibi_slopes": (grad_scores * far).sum((-2, -1)),
            "head_mask": (weights * grad_kept).sum((-2, -1)),
        }
        if sinks is not None:
            sink = np.nan_to_num(np.asarray(sinks, np.float64))[..., None, None]
            weight = np.exp(np.minimum(sink - lse[..., None], 0))
            sums["sinks"] = (weight * delta).sum(axis=(-2, -1))
    for name in ("key", "value"):
        sums[name] = reference._backward._sum_group(sums[name], n_kv_head)
    return [
        float(
            np.nan_to_num(reference._backward._sum_to(sums[name], np.shape(owned[name]))).max(
                initial=0
            )
        )
        for name in wanted
    ]
