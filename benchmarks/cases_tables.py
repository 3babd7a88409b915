"""Rows of a table, and means over tokens."""

from __future__ import annotations

import torch
import torch.nn.functional as torch_functional
from cases import Op, Random

from kernel_pytorch import functional

Tensors = tuple[torch.Tensor, ...]
TABLE = 8  # rows of the table for each index: a vocabulary of 131,072 for 16,384 tokens
TOKENS = 512
CHUNK = 64


def table(random: Random, rows: int, columns: int) -> Tensors:
    weight = random(TABLE * rows, columns)
    return torch.randint(0, TABLE * rows, (rows,), device=weight.device), weight


def sequences(random: Random, rows: int, columns: int) -> Tensors:
    return (random(rows // TOKENS, TOKENS, columns),)


def packed(random: Random, rows: int, columns: int) -> Tensors:
    """Sequences of 256 and 768 tokens in turn, one after another."""
    x = random(rows, columns)
    ends = torch.arange(0, rows + 1, TOKENS) + torch.arange(rows // TOKENS + 1) % 2 * (TOKENS // 2)
    return x, ends.clamp(max=rows).to(x.device)


def torch_packed(x: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """By index_add: torch's means of a nested tensor have no gradient."""
    lengths = ends.diff()
    sequence = torch.repeat_interleave(lengths, output_size=x.shape[0])
    sums = torch.zeros(lengths.numel(), x.shape[1], dtype=x.dtype, device=x.device).index_add(0, sequence, x)
    return sums / lengths[:, None].to(x.dtype)


OPS = [
    Op("embedding", table, functional.embedding, torch_functional.embedding, forward=2, backward=1 + TABLE),
    Op("mean_pool", sequences, functional.mean_pool, lambda x: x.mean(1), forward=1, backward=1),
    Op("mean_pool cu_seqlens", packed, functional.mean_pool, torch_packed, forward=1),
    Op(
        "chunk_mean_pool",
        sequences,
        lambda x: functional.chunk_mean_pool(x, CHUNK),
        lambda x: x.unflatten(1, (-1, CHUNK)).mean(2),
        forward=1 + 1 / CHUNK,
        backward=1 + 1 / CHUNK,
    ),
]
