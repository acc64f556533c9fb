"""The formulas of the library in plain NumPy: slow, short, and the judge of everything else.

Nothing here is shared with the compiled kernel or with its argument checks, so that a mistake
there cannot hide here too. Every array of scores is written out in full.

    attention         every option of ``mha_fast.attention``, in float64
    attention_varlen  the same, sequence by sequence
    attention_weights  the weights of one call, gated like its output
    attention_backward, attention_varlen_backward  the gradients of the first two
    multi_head_attention, multi_head_attention_backward  the layer with its projections
    dropout_mask      which weights dropout keeps
    head_statistics   what ``mha_fast.head_statistics`` measures, from those weights
    naive_attention   the usual five lines in the dtype of the input; baseline of the benchmarks
    masked_scores     the scores before the softmax, and which keys each query may see
    softmax           weights and log-sum-exp of those scores

Sizes are written ``n_head, n_kv_head, n_query, n_key, head_width, value_width``; ``...`` stands
for any number of batch axes.
"""

from ._attention import _attention_in as _attention_in
from ._attention import attention, attention_varlen
from ._backward import _attention_backward_in as _attention_backward_in
from ._backward import attention_backward, attention_varlen_backward
from ._dropout import dropout_mask
from ._layer import _layer_backward_in as _layer_backward_in
from ._layer import multi_head_attention, multi_head_attention_backward
from ._naive import naive_attention
from ._scores import masked_scores, softmax
from ._scores import with_all_heads as _with_all_heads  # noqa: F401  (the tests use it)
from ._statistics import head_statistics
from ._weights import attention_weights

__all__ = [
    "attention",
    "attention_backward",
    "attention_varlen",
    "attention_varlen_backward",
    "attention_weights",
    "dropout_mask",
    "head_statistics",
    "masked_scores",
    "multi_head_attention",
    "multi_head_attention_backward",
    "naive_attention",
    "softmax",
]
