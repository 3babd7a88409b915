"""What formulas share: the type they compute in, activations and their slopes, the random bits of base/philox.h."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..support.casting import MaybeTensor

_WORD = 0xFFFFFFFF


class NoFormula(Exception):
    """Raised by a formula, before it computes anything, for options that it has not: the host takes the call."""


def wide(x: MaybeTensor) -> MaybeTensor:
    """In the type that sums are of: fp64 for fp64, fp32 for everything else; None stays None."""
    return None if x is None else x if x.dtype is torch.float64 else x.float()


def column_sums(x: Tensor) -> Tensor:
    return x.sum(tuple(range(x.dim() - 1))) if x.dim() > 1 else x


def rows_at(table: Tensor, index: Tensor) -> Tensor:
    """table[index], and NaN for an index outside it: a device cannot stop for one without waiting."""
    inside = (index >= 0) & (index < table.shape[0])
    if table.shape[0] == 0:
        return table.new_full((*index.shape, *table.shape[1:]), float("nan"))
    rows = table[torch.where(inside, index, 0).long()]
    return torch.where(inside.reshape((*index.shape, *(1,) * (table.dim() - 1))), rows, float("nan"))


def evaluate(kind: str, x: Tensor) -> tuple[Tensor, Tensor]:
    """The activation of x and its slope there, as ops/engines/pointwise/reference.cpp has them."""
    if kind == "identity":
        return x, torch.ones_like(x)
    if kind == "gelu":
        below = torch.special.erfc(x * -math.sqrt(0.5)) / 2
        return x * below, below + x * torch.exp(x * x / -2) / math.sqrt(2 * math.pi)
    if kind == "gelu_tanh":
        slope = math.sqrt(2 / math.pi)
        t = torch.tanh(slope * (x + 0.044715 * x * x * x))
        return x * (1 + t) / 2, (1 + t) / 2 + x * (1 - t * t) * slope * (1 + 3 * 0.044715 * x * x) / 2
    if kind == "silu":
        s = torch.sigmoid(x)
        return x * s, s * (1 + x * (1 - s))
    if kind == "relu":
        return torch.relu(x), torch.where(x <= 0, 0.0, 1.0).to(x.dtype)
    if kind == "relu_squared":
        return torch.relu(x) * torch.relu(x), 2 * torch.relu(x)
    if kind == "sigmoid":
        s = torch.sigmoid(x)
        return s, s * (1 - s)
    if kind == "tanh":
        t = torch.tanh(x)
        return t, 1 - t * t
    raise ValueError(f"activation: {kind!r} is no activation")


def drop(x: Tensor, seed: Tensor | None, p: float) -> Tensor:
    """x with elements zeroed by the bits that every other device draws for them, the others divided by their share."""
    threshold = int(p * 65536 + 0.5)
    if p == 0 or seed is None:
        return x
    if threshold >= 65536:
        return torch.zeros_like(x)
    kept = _bits(x.numel(), seed).reshape(x.shape) >= threshold
    return torch.where(kept, x * (65536 / (65536 - threshold)), torch.zeros((), dtype=x.dtype, device=x.device))


def _bits(count: int, seed: Tensor) -> Tensor:
    """16 bits for each of `count` elements. Words of 32 bits are int64 here: products wrap, and the mask cuts them."""
    key0, key1 = seed[0] & _WORD, seed[0] >> 32 & _WORD
    block = torch.arange(-(-count // 8), device=seed.device)
    words = [block & _WORD, block >> 32, *((seed[1] >> shift & _WORD).expand_as(block) for shift in (0, 32))]
    for _ in range(7):
        first, second = words[0] * 0xD2511F53, words[2] * 0xCD9E8D57
        words = [
            (second >> 32 & _WORD) ^ words[1] ^ key0,
            second & _WORD,
            (first >> 32 & _WORD) ^ words[3] ^ key1,
            first & _WORD,
        ]
        key0, key1 = key0 + 0x9E3779B9 & _WORD, key1 + 0xBB67AE85 & _WORD
    halves = [half for word in words for half in (word & 0xFFFF, word >> 16)]
    return torch.stack(halves, -1).reshape(-1)[:count]
