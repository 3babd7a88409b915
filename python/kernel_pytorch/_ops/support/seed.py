"""The seed of a random op: int64[2], the seed and the offset, on the op's device."""

from __future__ import annotations

import torch
from torch import Tensor


def seed_for(x: Tensor, seed: Tensor | None) -> Tensor:
    """The seed given, or one drawn from torch's generator of x's device: torch.manual_seed governs it, and a CUDA graph
    draws anew on every replay."""
    if seed is not None:
        return seed
    return torch.randint(-(2**63), 2**63 - 1, (2,), dtype=torch.int64, device=x.device)
