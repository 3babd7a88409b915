"""The next token of each row of logits, in one op."""

from __future__ import annotations

import torch
from torch import Tensor

from .support.declare import without_gradient


def _row(value: Tensor | float | None, logits: Tensor, dtype: torch.dtype) -> Tensor | None:
    if value is None or isinstance(value, Tensor):
        return value
    return torch.full((logits.shape[0],), value, dtype=dtype, device=logits.device)


def sample(
    logits: Tensor,
    *,
    temperature: Tensor | float | None = None,
    top_k: Tensor | int | None = None,
    top_p: Tensor | float | None = None,
    min_p: Tensor | float | None = None,
    seeds: Tensor | int | None = None,
    positions: Tensor | int | None = None,
) -> Tensor:
    """The next token of each row, int64 [rows]: temperature, top-k, top-p, min-p and the draw in one kernel.

    A row's token depends on its own logits, numbers, seed and position alone, and is the same on every device. -1 where
    no logit is a number. Without gradients. Every number is one for all rows or a tensor of one for each.

    Args:
        logits: [rows, vocabulary], fp32, bf16 or fp16; at most 2^20 tokens.
        temperature: fp32; 0 takes the largest logit, the first of equal ones. None is 1.
        top_k: int32; keeps the largest k, those equal to the last of them too. None or 0 keeps all.
        top_p: fp32; of these keeps a logit while larger ones hold less than this share. None or 1 keeps all.
        min_p: fp32; of these keeps what is at least this share of the likeliest token. None or 0 keeps all.
        seeds: int64; None draws one for each row from torch's generator.
        positions: int64; the place of the token in its text: calls of one seed draw independently. None is 0.
    """
    if seeds is None:
        seeds = torch.randint(-(2**63), 2**63 - 1, (logits.shape[0],), dtype=torch.int64, device=logits.device)
    tokens: Tensor = sampled(
        logits,
        _row(temperature, logits, torch.float32),
        _row(top_k, logits, torch.int32),
        _row(top_p, logits, torch.float32),
        _row(min_p, logits, torch.float32),
        _row(seeds, logits, torch.int64),
        _row(positions, logits, torch.int64),
    )
    return tokens.long()


sampled = without_gradient("sample")  # int32, every number a tensor
