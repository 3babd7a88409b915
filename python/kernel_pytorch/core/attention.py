"""Multi-head attention with nn.MultiheadAttention's parameters: one projection for query, key and value.

Whose matrix products they are, _products.py says. The attention is functional.attention where the core has kernels for
heads of this size and type, else torch's F.scaled_dot_product_attention.
"""

from __future__ import annotations

import torch
import torch.nn.functional as torch_functional
from torch import Tensor, nn

from .._ops.support.masks import Sizes, mask_options
from .._supports import runs_attention
from ..functional import attention, rope
from ._checks import check_device, check_features, check_probability
from ._names import accepts_mask_names
from ._products import product


class AttentionLayer(nn.Module):
    """Multi-head attention of [..., sequence, d_model] tensors, batch first.

    Args:
        d_model: features in and out, a multiple of num_heads.
        dropout: probability, in training, of dropping an attention weight.
        bias: of all four projections.
    """

    in_proj_bias: Tensor | None

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        dropout: float = 0.1,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        name = type(self).__name__
        if num_heads < 1 or d_model % num_heads:
            raise ValueError(
                f"{name}: d_model is {d_model}, which {num_heads} heads cannot share; use a multiple of it"
            )
        check_device(name, device)
        self.d_model = d_model
        self.num_heads = num_heads
        self.head_dim = d_model // num_heads
        self.dropout = check_probability(name, dropout)
        self.in_proj_weight = nn.Parameter(torch.empty(3 * d_model, d_model, device=device, dtype=dtype))
        empty_bias = torch.empty(3 * d_model, device=device, dtype=dtype) if bias else None
        self.register_parameter("in_proj_bias", None if empty_bias is None else nn.Parameter(empty_bias))
        self.out_proj = nn.Linear(d_model, d_model, bias, device, dtype)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """As nn.MultiheadAttention starts."""
        nn.init.xavier_uniform_(self.in_proj_weight)
        self.out_proj.reset_parameters()
        if self.in_proj_bias is not None:
            nn.init.zeros_(self.in_proj_bias)
            nn.init.zeros_(self.out_proj.bias)

    @property
    def embed_dim(self) -> int:
        return self.d_model

    @accepts_mask_names
    def forward(
        self,
        query: Tensor,
        key: Tensor | None = None,
        value: Tensor | None = None,
        attention_mask: Tensor | None = None,
        is_causal: bool = False,
        rotary: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """query [..., queries, d_model] -> the same shape.

        Args:
            key, value: [..., keys, d_model]; absent, the query is all three, in one product; without a value the key
                is both.
            attention_mask: bool (True keeps), integers (1 keeps, 0 hides) or floating numbers (added to the scores), as
                [batch, keys], [queries, keys] or [batch, num_heads, queries, keys] with 1 for all; the rule is in
                _ops/support/masks.py and API.md. Of several batch dimensions, [..., num_heads, queries, keys]. Also by
                the names attn_mask and mask.
            is_causal: a query sees the keys up to its own position.
            rotary: cos and sin, as RotaryPositionalEncoding(head_dim) gives them, by which the heads of query and key
                are turned, straight out of the packed product; for tensors with at most one batch dimension.
        """
        q, k, v = self._project(query, query if key is None else key, value if value is not None else key)
        if rotary is not None:
            q, k = rope(q, k, *rotary)
        attended = self._attend(q, k, v, attention_mask, is_causal, self.dropout if self.training else 0.0)
        return self.out_proj(attended.flatten(-2))  # type: ignore[no-any-return]

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, attention_mask: Tensor | None, is_causal: bool, dropout_p: float
    ) -> Tensor:
        """Attention of [..., sequence, num_heads, head_dim]; the output has the same layout."""
        leading = q.shape[:-3]
        if attention_mask is not None and len(leading) > 1 and attention_mask.dim() > 3:
            attention_mask = attention_mask.expand(*leading, *attention_mask.shape[-3:]).flatten(0, -4)
        q, k, v = (x if x.dim() == 4 else x.reshape(-1, *x.shape[-3:]) for x in (q, k, v))
        sizes = Sizes(q.shape[0], q.shape[2], q.shape[1], k.shape[1])
        masks = mask_options(type(self).__name__, attention_mask, *sizes)
        if q.is_cuda and not runs_attention(self.head_dim, self.head_dim, q.dtype, q.device):
            if is_causal and masks:
                raise ValueError(
                    f"{type(self).__name__}: attention_mask and is_causal are both given; on a GPU in {q.dtype} give"
                    " one of them"
                )
            heads = [x.transpose(1, 2) for x in (q, k, v)]
            attended = torch_functional.scaled_dot_product_attention(
                heads[0], heads[1], heads[2], attn_mask=next(iter(masks.values()), None), dropout_p=dropout_p,
                is_causal=is_causal,
            ).transpose(1, 2)  # fmt: skip
        else:
            attended = attention(
                q, k, v, layout="bshd", causal=is_causal, causal_offset=0 if is_causal else None, dropout_p=dropout_p,
                **masks,
            )  # fmt: skip
        return attended.reshape(*leading, *attended.shape[1:])

    def _project(self, query: Tensor, key: Tensor, value: Tensor | None) -> tuple[Tensor, ...]:
        """Query, key and value as [..., sequence, num_heads, head_dim], views into as few products as possible."""
        value = query if value is None else value
        for name, tensor in (("query", query), ("key", key), ("value", value)):
            check_features(self, tensor, self.d_model, name)
        if key is query and value is query:
            return self._heads(query, 0, 3)
        if key is value:
            return *self._heads(query, 0, 1), *self._heads(key, 1, 3)
        return *self._heads(query, 0, 1), *self._heads(key, 1, 2), *self._heads(value, 2, 3)

    def _heads(self, x: Tensor, begin: int, end: int) -> tuple[Tensor, ...]:
        """Parts begin to end of query, key and value, from the one product that they share."""
        rows = slice(begin * self.d_model, end * self.d_model)
        in_float8 = self._modules.get("in_proj")  # precision.convert_model_to_fp8 puts it there
        if in_float8 is not None:
            packed: Tensor = in_float8(x, rows.start, rows.stop)
        else:
            bias = None if self.in_proj_bias is None else self.in_proj_bias[rows]
            packed = product(x, self.in_proj_weight[rows], bias)
        return packed.view(*x.shape[:-1], end - begin, self.num_heads, self.head_dim).unbind(-3)

    def extra_repr(self) -> str:
        return (
            f"{self.d_model}, num_heads={self.num_heads}, dropout={self.dropout}, bias={self.in_proj_bias is not None}"
        )


class OptimizedMultiHeadAttention(AttentionLayer):
    """AttentionLayer by the name of the seeds' basic components."""

    def __init__(
        self,
        dim: int,
        num_heads: int,
        dropout: float = 0.1,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(dim, num_heads, dropout, bias, device, dtype)


class CompilerOptimizedMultiHeadAttention(AttentionLayer):
    """AttentionLayer by the name of the seeds' compiled components: no dropout unless asked for."""

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(embed_dim, num_heads, dropout, bias, device, dtype)
