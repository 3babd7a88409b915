"""A transformer's MLP and its whole block. Whose products they are, _products.py says."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..functional import activation as activate
from ..functional import gated_activation
from ._checks import check_features, check_probability
from ._names import accepts_mask_names
from ._products import product
from .attention import OptimizedMultiHeadAttention
from .norms import OptimizedLayerNorm


class OptimizedMLP(nn.Module):
    """down_proj(silu(gate_proj(x)) * up_proj(x)); biases, gate and dropout are one pass.

    Args:
        dim: features in and out.
        hidden_dim: features between; 4 * dim where absent.
        dropout: probability, in training, after the gate.
    """

    def __init__(
        self,
        dim: int,
        hidden_dim: int | None = None,
        bias: bool = False,
        dropout: float = 0.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.dim = dim
        self.hidden_dim = 4 * dim if hidden_dim is None else hidden_dim
        self.dropout = check_probability("OptimizedMLP", dropout)
        self.gate_proj = nn.Linear(dim, self.hidden_dim, bias, device, dtype)
        self.up_proj = nn.Linear(dim, self.hidden_dim, bias, device, dtype)
        self.down_proj = nn.Linear(self.hidden_dim, dim, bias, device, dtype)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., dim] -> [..., dim]."""
        check_features(self, x, self.dim)
        dropout_p = self.dropout if self.training else 0.0
        layers = (self.gate_proj, self.up_proj, self.down_proj)
        if any(type(layer) is not nn.Linear for layer in layers):  # replaced, as by FP8: its own forward counts
            gate, up = self.gate_proj(x), self.up_proj(x)
            return self.down_proj(gated_activation(gate, up, "silu", dropout_p=dropout_p))  # type: ignore[no-any-return]
        hidden = gated_activation(
            product(x, self.gate_proj.weight),
            product(x, self.up_proj.weight),
            "silu",
            gate_bias=self.gate_proj.bias,
            up_bias=self.up_proj.bias,
            dropout_p=dropout_p,
        )
        return product(hidden, self.down_proj.weight, self.down_proj.bias)


class OptimizedTransformerBlock(nn.Module):
    """x + attn(norm1(x)), then x + mlp(norm2(x)): the first sum is part of the second norm's pass.

    Args:
        dim: features in and out, a multiple of num_heads.
        mlp_ratio: the MLP's hidden features by dim.
        dropout: probability, in training, of attention weights and of what both halves add to x.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        mlp_ratio: float = 4,
        dropout: float = 0.1,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.dim = dim
        self.dropout = check_probability("OptimizedTransformerBlock", dropout)
        self.norm1 = OptimizedLayerNorm(dim, device=device, dtype=dtype)
        self.attn = OptimizedMultiHeadAttention(dim, num_heads, dropout, device=device, dtype=dtype)
        self.norm2 = OptimizedLayerNorm(dim, device=device, dtype=dtype)
        self.mlp = OptimizedMLP(dim, int(dim * mlp_ratio), device=device, dtype=dtype)

    @accepts_mask_names
    def forward(
        self,
        x: Tensor,
        attention_mask: Tensor | None = None,
        is_causal: bool = False,
        rotary: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """x [..., sequence, dim] -> the same shape; mask and rotary as AttentionLayer's."""
        check_features(self, x, self.dim)
        attended = self.attn(self.norm1(x), attention_mask=attention_mask, is_causal=is_causal, rotary=rotary)
        if not self.training or self.dropout == 0.0:
            normed, x = self.norm2(attended, x)
            return self.mlp(normed) + x  # type: ignore[no-any-return]
        x = activate(attended, "identity", residual=x, dropout_p=self.dropout)
        return activate(self.mlp(self.norm2(x)), "identity", residual=x, dropout_p=self.dropout)
