"""What to say to those who call an option by the name that it has elsewhere."""

from collections.abc import Iterable

_LENGTHS = (
    "kv_lengths, the number of valid keys of each sequence; for padding on the left, "
    "attn_mask=mask[:, None, None, :], with True for the keys that may be seen"
)
_HEADS = "the shapes of query and key, which tell the numbers of heads"
_WEIGHTS = "attention_weights() for the weights"

# Name elsewhere (torch, JAX, flash-attention, Transformers, xFormers, ONNX): what to use here.
_ELSEWHERE = {
    "attention_mask": "attn_mask",
    "attn_bias": "attn_mask",
    "bias": "attn_mask",
    "mask": "attn_mask",
    "causal": "is_causal",
    "use_causal_mask": "is_causal",
    "key_padding_mask": _LENGTHS,
    "padding_mask": _LENGTHS,
    "src_key_padding_mask": _LENGTHS,
    "cache_seqlens": "kv_lengths",
    "key_lengths": "kv_lengths",
    "key_value_seq_lengths": "kv_lengths",
    "nonpad_kv_seqlen": "kv_lengths",
    "seq_lengths": "kv_lengths",
    "seqlens_k": "kv_lengths",
    "local_window_size": "window, a pair (left, right)",
    "sliding_window": "window, a pair (left, right) that does not count the query itself",
    "window_size": "window, a pair (left, right) with None for no bound",
    "sm_scale": "scale",
    "softmax_scale": "scale",
    "scaling": "scale",
    "logit_cap": "softcap",
    "logits_soft_cap": "softcap",
    "attn_logit_softcapping": "softcap",
    "alibi": "alibi_slopes",
    "s_aux": "sinks",
    "learnable_sink": "sinks",
    "enable_gqa": _HEADS,
    "kv_num_heads": _HEADS,
    "n_kv_head": _HEADS,
    "num_heads": _HEADS,
    "num_kv_heads": _HEADS,
    "q_num_heads": _HEADS,
    "average_attn_weights": _WEIGHTS,
    "need_weights": _WEIGHTS,
    "output_attentions": _WEIGHTS,
    "return_attn_probs": _WEIGHTS,
    "return_weights": _WEIGHTS,
    "return_logsumexp": "return_lse",
    "return_softmax_lse": "return_lse",
    "dropout": "dropout_p",
    "dropout_rate": "dropout_p",
    "layer_head_mask": "head_mask",
    "n_jobs": "num_threads",
    "n_thread": "num_threads",
    "n_threads": "num_threads",
    "threads": "num_threads",
    "offset": "query_offset",
    "past_length": "query_offset",
}
_METHODS = {
    _WEIGHTS: "the method attention_weights() for the weights",
    _HEADS: "num_heads and num_kv_heads of the layer itself",
}


def unknown_option(function: str, name: str, taken: Iterable[str]) -> TypeError:
    """The error of an argument that a function does not take.

    Parameters
    ----------
    function : str
        Its qualified name.
    name : str
        Of the argument.
    taken : iterable of str
        The options that it does take.
    """
    import difflib

    taken = list(taken)
    hint = _ELSEWHERE.get(name.lower())
    if "." in function:
        hint = _METHODS.get(hint, hint) if hint else None
    if hint is not None and hint.split(",")[0] not in taken and hint.isidentifier():
        hint = None  # this function has no use for it
    if hint is None:
        hint = next(iter(difflib.get_close_matches(name, taken, n=1, cutoff=0.6)), None)
    advice = f"; use {hint}" if hint else f"; expected {', '.join(taken)}"
    return TypeError(f"{function}() got an unexpected keyword argument {name!r}{advice}")
