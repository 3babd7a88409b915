"""Score and mask functions of attention as programs: traced (expression.py) once per call, or once per graph."""

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
    """The texts of both programs and the tensors that they read.

    Tensors that a function closes over are found, except by a compiler, which must see them as arguments.
    """
    if captured and transforms_active():
        raise RuntimeError(
            "attention: torch.func does not see captured tensors; use autograd, or bias in place of them"
        )
    if not torch.compiler.is_compiling():
        traced = trace(score_mod, mask_mod, captured)
        return traced.score_mod, traced.mask_mod, list(traced.captured)
    kinds = tuple([(tensor.dtype, tuple([int(size) for size in tensor.shape])) for tensor in captured])
    score_text, mask_text = _texts(score_mod, mask_mod, kinds)
    return score_text, mask_text, list(captured)


def masked(score_mod: Mod | None, mask_mod: Mod) -> Mod:
    """A score function that is -inf where the mask function does not keep: a mask that holds in full blocks too."""

    def changed(score: Any, batch: Any, head: Any, query: Any, key: Any, *captured: Any) -> Any:
        if score_mod is not None:
            score = score_mod(score, batch, head, query, key, *captured)
        return torch.where(mask_mod(batch, head, query, key, *captured), score, -torch.inf)

    return changed


def without_captured(mask_mod: Mod) -> Mod:
    """A block mask's function, which knows nothing of further arguments."""
    return lambda batch, head, query, key, *_: mask_mod(batch, head, query, key)


def _texts(score_mod: Mod | None, mask_mod: Mod | None, kinds: tuple[tuple[torch.dtype, Any], ...]) -> tuple[str, str]:
    """The texts alone, from the types and shapes of what is captured: constants of a graph."""
    stand_ins = [torch.empty(shape, dtype=dtype, device="meta") for dtype, shape in kinds]
    traced = trace(score_mod, mask_mod, stand_ins)
    if len(traced.captured) > len(stand_ins):
        raise RuntimeError(
            "attention: a score or mask function closes over a tensor, which a compiler cannot see; "
            "pass it as captured=(tensor,) and take it as a further argument"
        )
    return traced.score_mod, traced.mask_mod


# As transforms_active: the compiler calls it while tracing and keeps the answer.
_texts._dynamo_marked_constant = True  # type: ignore[attr-defined]
