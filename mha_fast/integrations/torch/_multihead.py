"""torch.nn.MultiheadAttention on the kernels of mha_fast."""

from typing import Any, Self

import torch
from torch.nn import functional

from ._sdpa import scaled_dot_product_attention


class MultiheadAttention(torch.nn.MultiheadAttention):  # type: ignore[misc]
    """`torch.nn.MultiheadAttention` whose heads are computed by mha_fast.

    Same parameters, arguments and state; made anew with torch's arguments, or by `from_module`
    from a layer that is there. Calls that ask for the weights (``need_weights=True``), layers with
    ``bias_k`` or ``add_zero_attn``, and nested tensors go torch's way.
    """

    @classmethod
    def from_module(cls, module: torch.nn.MultiheadAttention) -> Self:
        """Return a layer that shares the parameters of `module`.

        Parameters
        ----------
        module : torch.nn.MultiheadAttention

        Returns
        -------
        MultiheadAttention
            Training either trains both.

        Raises
        ------
        TypeError
            `module` is something else.

        Examples
        --------
        >>> import torch, mha_fast.torch
        >>> theirs = torch.nn.MultiheadAttention(64, 8, batch_first=True)
        >>> ours = mha_fast.torch.MultiheadAttention.from_module(theirs)
        >>> x = torch.randn(2, 10, 64)
        >>> ours(x, x, x, need_weights=False)[0].shape
        torch.Size([2, 10, 64])
        """
        if not isinstance(module, torch.nn.MultiheadAttention):
            raise TypeError(
                f"module is of type {type(module).__name__}; expected torch.nn.MultiheadAttention"
            )
        result = cls.__new__(cls)
        torch.nn.Module.__init__(result)
        for name, x in vars(module).items():
            # the registries of parameters and submodules are copied, what they hold is shared
            result.__dict__[name] = x.copy() if isinstance(x, dict) else x
        return result

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        key_padding_mask: torch.Tensor | None = None,
        need_weights: bool = True,
        attn_mask: torch.Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Compute the layer. See `torch.nn.MultiheadAttention.forward`."""
        if (
            need_weights
            or self.bias_k is not None
            or self.add_zero_attn
            or query.is_nested
            or query.dim() not in (2, 3)
        ):
            return super().forward(
                query,
                key,
                value,
                key_padding_mask,
                need_weights,
                attn_mask,
                average_attn_weights,
                is_causal,
            )
        if is_causal and attn_mask is None:
            raise RuntimeError("Need attn_mask if specifying the is_causal hint.")  # torch's words
        batched = query.dim() == 3
        if batched and not self.batch_first:
            query, key, value = (x.transpose(0, 1) for x in (query, key, value))
        elif not batched:
            query, key, value = (x.unsqueeze(0) for x in (query, key, value))
            key_padding_mask = None if key_padding_mask is None else key_padding_mask[None]
        mask = self._joined_mask(key_padding_mask, attn_mask, query.dtype)
        q, k, v = map(self._split, self._projected(query, key, value))
        dropout_p = self.dropout if self.training else 0.0
        heads = scaled_dot_product_attention(q, k, v, mask, dropout_p)
        out = self.out_proj(heads.transpose(1, 2).flatten(2))
        if not batched:
            out = out.squeeze(0)
        elif not self.batch_first:
            out = out.transpose(0, 1)
        return out, None

    def _projected(self, *inputs: torch.Tensor) -> list[torch.Tensor]:
        """Queries, keys and values, (batch, rows, heads * width)."""
        if self._qkv_same_embed_dim:
            weights: Any = self.in_proj_weight.chunk(3)
        else:
            weights = self.q_proj_weight, self.k_proj_weight, self.v_proj_weight
        biases = (None,) * 3 if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
        return list(map(functional.linear, inputs, weights, biases))

    def _split(self, rows: torch.Tensor) -> torch.Tensor:
        return rows.unflatten(-1, (self.num_heads, self.head_dim)).transpose(1, 2)

    def _joined_mask(
        self, padding: torch.Tensor | None, attn_mask: torch.Tensor | None, dtype: torch.dtype
    ) -> torch.Tensor | None:
        """Both masks in one, as the function takes it: True lets the key through."""
        if padding is not None:
            padding = (~padding if padding.dtype == torch.bool else padding)[:, None, None]
        if attn_mask is not None:
            if attn_mask.dim() == 3:
                attn_mask = attn_mask.unflatten(0, (-1, self.num_heads))
            attn_mask = ~attn_mask if attn_mask.dtype == torch.bool else attn_mask
        if padding is None or attn_mask is None:
            return attn_mask if padding is None else padding
        if padding.dtype == attn_mask.dtype == torch.bool:
            return padding & attn_mask
        numbers = (x.to(dtype).log() if x.dtype == torch.bool else x for x in (padding, attn_mask))
        return sum(numbers, torch.zeros((), dtype=dtype))
