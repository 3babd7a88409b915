"""Score and mask functions of attention as programs (expression.py)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..expression import trace
from ._autograd import transforms_active

Mod = Callable[..., Any]


def programs_of(
    score_mod: Mod | None, mask_mod: Mod | None, captured: Sequence[Tensor]
) -> tuple[str, str, list[Tensor]]:
    """The texts of both programs and the tensors that they read: those given, then those that they close over."""
    traced = trace(score_mod, mask_mod, captured)
    if traced.captured and transforms_active():
        raise RuntimeError(
            "attention: torch.func does not see captured tensors; use autograd, or bias in place of them"
        )
    return traced.score_mod, traced.mask_mod, list(traced.captured)


def masked(score_mod: Mod | None, mask_mod: Mod) -> Mod:
    """A score function that is -inf where the mask function does not keep: a mask that holds in full blocks too."""

    def changed(score: Any, batch: Any, head: Any, query: Any, key: Any, *captured: Any) -> Any:
        if score_mod is not None:
            score = score_mod(score, batch, head, query, key, *captured)
        return torch.where(mask_mod(batch, head, query, key, *captured), score, -torch.inf)

    return changed
