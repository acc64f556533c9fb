"""mha_fast for PyTorch, on the CPU.

    scaled_dot_product_attention  torch's function with torch's signature
    replaced_sdpa                 a context in which every call of torch's function comes here
    MultiheadAttention            torch's layer on these kernels; takes over a trained one
    attention                     all options of `mha_fast.attention`, with gradients
    register_transformers         ``attn_implementation="mha_fast"`` for the package transformers
    watch_heads                   what every head of a running model looks at

Needs ``pip install "mha_fast[torch]"``.
"""

try:
    import ml_dtypes as _ml_dtypes  # noqa: F401
    import torch as _torch  # noqa: F401
except ModuleNotFoundError as error:
    raise ImportError(
        f'mha_fast.torch needs {error.name}; install it with: pip install "mha_fast[torch]"'
    ) from error

from ._attention import attention
from ._heads import WatchedHeads, watch_heads
from ._multihead import MultiheadAttention
from ._sdpa import replaced_sdpa, scaled_dot_product_attention

__all__ = [
    "MultiheadAttention",
    "WatchedHeads",
    "attention",
    "register_transformers",
    "replaced_sdpa",
    "scaled_dot_product_attention",
    "watch_heads",
]


def register_transformers() -> None:
    """Make ``attn_implementation="mha_fast"`` known: `mha_fast.integrations.transformers`."""
    from ..transformers import register_transformers as register

    register()
