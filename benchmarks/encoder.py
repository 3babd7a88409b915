"""The models of variable_length.py: an encoder of patches, as ViT's, or of tokens, as BERT's, on kernels by name."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as torch_functional
from torch import Tensor, nn

from kernel_pytorch import functional

EPS = 1e-5


@dataclass(frozen=True)
class Size:
    layers: int
    dim: int
    heads: int
    requests: int
    longest: int
    passes: int
    batch_tokens: int


class Encoder(nn.Module):
    """Norms first for patches, last for tokens. `kernels` says whose: "torch", "ours", or "mixed", which leaves the
    products to torch. All three compute the same with the same parameters."""

    def __init__(self, size: Size, takes_tokens: bool, kernels: str) -> None:
        super().__init__()
        dim = size.dim
        self.heads, self.takes_tokens, self.kernels = size.heads, takes_tokens, kernels
        self.embed = nn.Embedding(30000, dim) if takes_tokens else nn.Linear(dim, dim)
        self.positions = nn.Embedding(size.longest + 128, dim)
        self.first_norm = nn.LayerNorm(dim)
        self.qkv = nn.ModuleList(nn.Linear(dim, 3 * dim) for _ in range(size.layers))
        self.out = nn.ModuleList(nn.Linear(dim, dim) for _ in range(size.layers))
        self.up = nn.ModuleList(nn.Linear(dim, 4 * dim) for _ in range(size.layers))
        self.down = nn.ModuleList(nn.Linear(4 * dim, dim) for _ in range(size.layers))
        self.norms = nn.ModuleList(nn.LayerNorm(dim) for _ in range(2 * size.layers))
        self.head = nn.Linear(dim, 1000)

    def linear(self, x: Tensor, layer: nn.Linear) -> Tensor:
        if self.kernels == "ours":
            return functional.linear(x, layer.weight, layer.bias)
        return torch_functional.linear(x, layer.weight, layer.bias)

    def norm(self, x: Tensor, layer: nn.LayerNorm) -> Tensor:
        if self.kernels == "torch":
            return torch_functional.layer_norm(x, x.shape[-1:], layer.weight, layer.bias, EPS)
        return functional.layer_norm(x, layer.weight, layer.bias, EPS)

    def linear_gelu(self, x: Tensor, layer: nn.Linear) -> Tensor:
        if self.kernels == "ours":
            return functional.linear(x, layer.weight, layer.bias, activation="gelu")
        if self.kernels == "mixed":
            return functional.activation(torch_functional.linear(x, layer.weight), "gelu", bias=layer.bias)
        return torch_functional.gelu(torch_functional.linear(x, layer.weight, layer.bias))

    def add_norm(self, x: Tensor, layer: nn.Linear, residual: Tensor, norm: nn.LayerNorm) -> tuple[Tensor, Tensor]:
        """The norm of residual + layer(x), and that sum."""
        if self.kernels == "ours":
            total = functional.linear(x, layer.weight, layer.bias, residual=residual)
            return functional.layer_norm(total, norm.weight, norm.bias, EPS), total
        change = torch_functional.linear(x, layer.weight, layer.bias)
        if self.kernels == "mixed":
            return functional.layer_norm(change, norm.weight, norm.bias, EPS, residual=residual)
        total = residual + change
        return self.norm(total, norm), total

    def attend(self, x: Tensor, layer: nn.Linear, key_lengths: Tensor | None) -> Tensor:
        packed = self.linear(x, layer).unflatten(-1, (3, self.heads, -1))
        if self.kernels != "torch":
            return functional.attention(*packed.unbind(2), layout="bshd", key_lengths=key_lengths).flatten(2)
        query, key, value = packed.permute(2, 0, 3, 1, 4)
        mask = None
        if key_lengths is not None:
            mask = (torch.arange(x.shape[1], device=x.device) < key_lengths[:, None])[:, None, None, :]
        attended = torch_functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        return attended.transpose(1, 2).flatten(2)

    def forward(self, x: Tensor, key_lengths: Tensor | None = None) -> Tensor:
        x = self.embed(x) + self.positions.weight[: x.shape[1]]
        return self.of_tokens(x, key_lengths) if self.takes_tokens else self.of_patches(x, key_lengths)

    def of_tokens(self, x: Tensor, key_lengths: Tensor | None) -> Tensor:
        x = self.norm(x, self.first_norm)
        for i in range(len(self.qkv)):
            x, _ = self.add_norm(self.attend(x, self.qkv[i], key_lengths), self.out[i], x, self.norms[2 * i])
            x, _ = self.add_norm(self.linear_gelu(x, self.up[i]), self.down[i], x, self.norms[2 * i + 1])
        return x

    def of_patches(self, x: Tensor, key_lengths: Tensor | None) -> Tensor:
        normed = self.norm(x, self.first_norm)
        for i in range(len(self.qkv)):
            normed, x = self.add_norm(self.attend(normed, self.qkv[i], key_lengths), self.out[i], x, self.norms[2 * i])
            normed, x = self.add_norm(self.linear_gelu(normed, self.up[i]), self.down[i], x, self.norms[2 * i + 1])
        if key_lengths is None:
            return self.linear(normed.mean(1), self.head)
        real = torch.arange(x.shape[1], device=x.device)[None, :, None] < key_lengths[:, None, None]
        return self.linear((normed * real).sum(1) / key_lengths[:, None].to(x.dtype), self.head)
