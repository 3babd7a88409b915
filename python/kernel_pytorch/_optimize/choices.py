"""Choices of routers while parts are verified.

Where two experts score almost alike, one rounding decides which of them a token goes to, and the token's row is another
one from there on. Such a choice says nothing about a replacement: so those of the original are repeated. What a
replacement makes of the scores is compared as everything else, since weights of experts are made of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode


class Choices(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes what `topk` chooses; with `known` it chooses that instead, call by call."""

    def __init__(self, known: Sequence[Tensor] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.made: list[Tensor] = []
        self._known = known

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if func is not torch.ops.aten.topk.default:
            return found
        values, chosen = found
        call = len(self.made)
        if call < len(self._known) and self._known[call].shape == chosen.shape:
            chosen = self._known[call]
            dim = args[2] if len(args) > 2 else (kwargs or {}).get("dim", -1)
            values = args[0].gather(dim, chosen)
        self.made.append(chosen)
        return values, chosen


def routes(module: nn.Module) -> bool:
    """Whether it has experts, as Hugging Face's and our layers say it."""
    return any(type(getattr(one, "num_experts", None)) is int for one in module.modules())


def choosing(module: nn.Module, known: Sequence[Tensor]) -> AbstractContextManager[Choices | None]:
    """Around a run of the module: of others than those with experts nothing is noted."""
    return Choices(known) if routes(module) else nullcontext()
