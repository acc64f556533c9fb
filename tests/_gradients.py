"""Gradients to compare with: by finite differences, and by torch's autograd in float64."""

import math

import numpy as np

from mha_fast import reference

DIFFERENTIABLE = ("query", "key", "value", "attn_mask", "sinks", "alibi_slopes", "head_mask")


def differentiable(call):
    """Names of the arguments in `call` that have a gradient."""
    given = [name for name in DIFFERENTIABLE if call.get(name) is not None]
    return tuple(name for name in given if np.asarray(call[name]).dtype != bool)


def directional_difference(function, x, direction, step=1e-4):
    """Derivative of a function of one array, from five points; the error is of order step**4."""
    ahead, behind = (
        [function(x + sign * n * step * direction) for n in (1, 2)] for sign in (1, -1)
    )
    return (8 * (ahead[0] - behind[0]) - (ahead[1] - behind[1])) / (12 * step)


def weighted_sum(forward, call, grad_out, grad_lse):
    """The number whose gradients are asked for: a weighted sum of output and finite lse."""
    out, lse = forward(**call, return_lse=True)
    return (out * grad_out).sum() + (np.where(lse == -np.inf, 0.0, lse) * grad_lse).sum()


def assert_close_to_largest(result, right, factor):
    """No error above `factor` times the largest number."""
    assert result.shape == right.shape
    assert np.isfinite(result).all()
    assert np.abs(result - right).max(initial=0) <= factor * np.abs(right).max(initial=1e-30)


def torch_gradients(torch, grad_out, call, grad_lse, wanted):
    """Gradients by torch's autograd in float64, from a forward pass written in torch."""
    leaves = {
        name: torch.tensor(np.asarray(x, np.float64), requires_grad=name in wanted)
        for name, x in call.items()
        if name in DIFFERENTIABLE and x is not None and np.asarray(x).dtype != bool
    }
    out, lse = _forward_in_torch(torch, leaves, call)
    loss = (out * torch.tensor(grad_out)).sum() + (lse * torch.tensor(grad_lse)).sum()
    found = torch.autograd.grad(
        loss, [leaves[name] for name in wanted], allow_unused=True, materialize_grads=True
    )
    return [x.numpy() for x in found]


def _forward_in_torch(torch, leaves, call):
    """Output and lse; lse is 0 where a query has neither key nor sink."""
    query, key, value = (leaves[name] for name in ("query", "key", "value"))
    query, key, value = (x[None] if x.ndim == 2 else x for x in (query, key, value))
    group = query.shape[-3] // key.shape[-3]
    key, value = (x.repeat_interleave(group, dim=-3) for x in (key, value))
    visible, distance = visibility(call, query.shape, key.shape)
    visible, distance = torch.tensor(visible), torch.tensor(distance)

    scale = call.get("scale")
    scores = query @ key.mT * (1 / math.sqrt(max(query.shape[-1], 1)) if scale is None else scale)
    if call.get("softcap") is not None:
        scores = call["softcap"] * torch.tanh(scores / call["softcap"])
    if "alibi_slopes" in leaves:
        scores = scores - leaves["alibi_slopes"][..., None, None] * distance
    if "attn_mask" in leaves:
        scores = scores + leaves["attn_mask"]
    # Rows without a key keep one made-up logit, so that no NaN is born and multiplied by 0.
    empty = ~visible.any(dim=-1, keepdim=True)
    scores = torch.where(visible, scores, -torch.inf)
    sink = torch.full_like(scores[..., :1], -torch.inf)
    if "sinks" in leaves:
        sink = leaves["sinks"][..., None, None].expand_as(sink)
    else:
        sink = torch.where(empty, 0.0, sink)
    with_sink = torch.cat([scores, sink], dim=-1)
    weights = with_sink.softmax(dim=-1)[..., :-1]
    if call.get("dropout_p"):
        kept = reference.dropout_mask(call["dropout_seed"], tuple(weights.shape), call["dropout_p"])
        weights = weights * torch.tensor(kept) / (1 - call["dropout_p"])
    out = weights @ value
    if "head_mask" in leaves:
        out = out * leaves["head_mask"][..., None, None]
    lse = with_sink.logsumexp(dim=-1)
    if query.ndim == call["query"].ndim:
        return out, lse
    return out[0], lse[0]


def visibility(call, query_shape, key_shape):
    """Which keys each query sees, and how far away they are, without the reference's help."""
    batch = np.broadcast_shapes(query_shape[:-3], key_shape[:-3])
    n_query, n_key = query_shape[-2], key_shape[-2]
    full = (*batch, query_shape[-3], n_query, n_key)
    lengths = call.get("kv_lengths")
    lengths = np.broadcast_to(n_key if lengths is None else lengths, batch)
    offset = call.get("query_offset", 0)
    offset = lengths - n_query if isinstance(offset, str) else np.broadcast_to(offset, batch)
    at = offset[..., None, None] + np.arange(n_query)[:, None]
    j = np.arange(n_key)
    left, right = call.get("window") or (None, None)
    seen = np.broadcast_to(j < lengths[..., None, None], (*batch, n_query, n_key)).copy()
    if call.get("is_causal"):
        seen &= j <= at
    if left is not None:
        seen &= at - j <= left
    if right is not None:
        seen &= j - at <= right
    visible = np.broadcast_to(seen[..., None, :, :], full)
    mask = call.get("attn_mask")
    if mask is not None:
        visible = visible & (mask if mask.dtype == bool else mask != -np.inf)
    return visible, np.abs(j - at)[..., None, :, :].astype(float)
