"""Four small models in plain torch, as people write them: Llama, GPT, BERT and ViT, with random weights.

They are what `kpt optimize --demo` and `make run` work on; none of their code knows this library.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class RMSNorm(nn.Module):
    """As in Llama's reference code."""

    def __init__(self, dim: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * normed.type_as(x)


def rotate_half(x: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


def apply_rotary(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return query * cos + rotate_half(query) * sin, key * cos + rotate_half(key) * sin


class LlamaAttention(nn.Module):
    def __init__(self, dim: int, heads: int, key_heads: int) -> None:
        super().__init__()
        self.head_dim = dim // heads
        self.q_proj = nn.Linear(dim, heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(dim, key_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(dim, key_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(heads * self.head_dim, dim, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, _ = x.shape
        query = self.q_proj(x).view(batch, length, -1, self.head_dim).transpose(1, 2)
        key = self.k_proj(x).view(batch, length, -1, self.head_dim).transpose(1, 2)
        value = self.v_proj(x).view(batch, length, -1, self.head_dim).transpose(1, 2)
        query, key = apply_rotary(query, key, cos, sin)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        return self.o_proj(attended.transpose(1, 2).reshape(batch, length, -1))  # type: ignore[no-any-return]


class SwiGLU(nn.Module):
    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(dim, hidden, bias=False)
        self.up_proj = nn.Linear(dim, hidden, bias=False)
        self.down_proj = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))  # type: ignore[no-any-return]


class LlamaBlock(nn.Module):
    def __init__(self, dim: int, heads: int, key_heads: int, hidden: int) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(dim)
        self.self_attn = LlamaAttention(dim, heads, key_heads)
        self.post_attention_layernorm = RMSNorm(dim)
        self.mlp = SwiGLU(dim, hidden)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))  # type: ignore[no-any-return]


class Llama(nn.Module):
    """Token ids [batch, length] -> logits [batch, length, vocabulary]."""

    cos: Tensor
    sin: Tensor

    def __init__(
        self,
        dim: int = 512,
        layers: int = 4,
        heads: int = 8,
        key_heads: int = 4,
        vocabulary: int = 4096,
        length: int = 2048,
    ) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(vocabulary, dim)
        hidden = 64 * math.ceil(dim * 8 / 3 / 64)
        self.layers = nn.ModuleList(LlamaBlock(dim, heads, key_heads, hidden) for _ in range(layers))
        self.norm = RMSNorm(dim)
        self.lm_head = nn.Linear(dim, vocabulary, bias=False)
        frequencies = 1e4 ** (-torch.arange(0, dim // heads, 2) / (dim // heads))
        angles = torch.outer(torch.arange(length), frequencies)
        self.register_buffer("cos", torch.cat([angles.cos()] * 2, -1), persistent=False)
        self.register_buffer("sin", torch.cat([angles.sin()] * 2, -1), persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed_tokens(ids)
        cos, sin = (table[None, : ids.shape[1]].to(x.dtype) for table in (self.cos, self.sin))
        for layer in self.layers:
            x = layer(x, cos, sin)
        return self.lm_head(self.norm(x))  # type: ignore[no-any-return]


class Attention(nn.Module):
    """GPT's, BERT's and ViT's: one projection for query, key and value."""

    def __init__(self, dim: int, heads: int, causal: bool, dropout: float) -> None:
        super().__init__()
        self.heads, self.causal, self.dropout = heads, causal, dropout
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, dim = x.shape
        query, key, value = self.qkv(x).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        drop = self.dropout if self.training else 0.0
        attended = F.scaled_dot_product_attention(query, key, value, dropout_p=drop, is_causal=self.causal)
        return self.proj(attended.transpose(1, 2).reshape(batch, length, dim))  # type: ignore[no-any-return]


class MLP(nn.Module):
    def __init__(self, dim: int, hidden: int, approximate: str, dropout: float) -> None:
        super().__init__()
        self.fc1 = nn.Linear(dim, hidden)
        self.act = nn.GELU(approximate)
        self.fc2 = nn.Linear(hidden, dim)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.fc2(self.act(self.fc1(x))))  # type: ignore[no-any-return]


class PreNormBlock(nn.Module):
    """GPT's and ViT's."""

    def __init__(self, dim: int, heads: int, causal: bool, approximate: str, dropout: float) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dim)
        self.attn = Attention(dim, heads, causal, dropout)
        self.norm2 = nn.LayerNorm(dim)
        self.mlp = MLP(dim, 4 * dim, approximate, dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))  # type: ignore[no-any-return]


class GPT(nn.Module):
    """Token ids [batch, length] -> logits."""

    def __init__(
        self,
        dim: int = 512,
        layers: int = 4,
        heads: int = 8,
        vocabulary: int = 4096,
        length: int = 1024,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, dim)
        self.positions = nn.Embedding(length, dim)
        self.blocks = nn.ModuleList(PreNormBlock(dim, heads, True, "tanh", dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, vocabulary, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.positions.weight[: ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))  # type: ignore[no-any-return]


class PostNormOutput(nn.Module):
    def __init__(self, inputs: int, dim: int, dropout: float) -> None:
        super().__init__()
        self.dense = nn.Linear(inputs, dim)
        self.dropout = nn.Dropout(dropout)
        self.LayerNorm = nn.LayerNorm(dim, eps=1e-12)

    def forward(self, hidden: Tensor, x: Tensor) -> Tensor:
        return self.LayerNorm(self.dropout(self.dense(hidden)) + x)  # type: ignore[no-any-return]


class BertAttention(nn.Module):
    """Scores and probabilities written out, as BERT's first code had them."""

    def __init__(self, dim: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value = (nn.Linear(dim, dim) for _ in range(3))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, dim = x.shape
        query, key, value = (
            f(x).view(batch, length, self.heads, -1).transpose(1, 2) for f in (self.query, self.key, self.value)
        )
        scores = query @ key.transpose(-1, -2) / math.sqrt(dim // self.heads)
        attended = self.dropout(F.softmax(scores, dim=-1)) @ value
        return attended.transpose(1, 2).reshape(batch, length, dim)  # type: ignore[no-any-return]


class BertLayer(nn.Module):
    def __init__(self, dim: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.attention = BertAttention(dim, heads, dropout)
        self.attention_output = PostNormOutput(dim, dim, dropout)
        self.intermediate = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU())
        self.output = PostNormOutput(4 * dim, dim, dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = self.attention_output(self.attention(x), x)
        return self.output(self.intermediate(x), x)  # type: ignore[no-any-return]


class Bert(nn.Module):
    """Token ids [batch, length] -> [batch, length, dim]."""

    def __init__(
        self,
        dim: int = 512,
        layers: int = 4,
        heads: int = 8,
        vocabulary: int = 4096,
        length: int = 512,
        dropout: float = 0.1,
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, dim)
        self.positions = nn.Embedding(length, dim)
        self.norm = nn.LayerNorm(dim, eps=1e-12)
        self.layers = nn.ModuleList(BertLayer(dim, heads, dropout) for _ in range(layers))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.norm(self.tokens(ids) + self.positions.weight[: ids.shape[1]])
        for layer in self.layers:
            x = layer(x)
        return x  # type: ignore[no-any-return]


class ViT(nn.Module):
    """Images [batch, 3, side, side] -> classes."""

    def __init__(
        self, dim: int = 384, layers: int = 6, heads: int = 6, side: int = 224, patch: int = 16, classes: int = 1000
    ) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, dim, patch, patch)
        self.cls = nn.Parameter(torch.zeros(1, 1, dim))
        self.positions = nn.Parameter(torch.randn(1, (side // patch) ** 2 + 1, dim) * 0.02)
        self.blocks = nn.ModuleList(PreNormBlock(dim, heads, False, "none", 0.0) for _ in range(layers))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, classes)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls.expand(len(x), -1, -1), x], 1) + self.positions
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)[:, 0])  # type: ignore[no-any-return]


DEMOS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Any]]] = {
    "llama": (Llama, lambda: torch.randint(4096, (1, 512))),
    "gpt": (GPT, lambda: torch.randint(4096, (1, 512))),
    "bert": (Bert, lambda: torch.randint(4096, (2, 384))),
    "vit": (ViT, lambda: torch.randn(4, 3, 224, 224)),
}
