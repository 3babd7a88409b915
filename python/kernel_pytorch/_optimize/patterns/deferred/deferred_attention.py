"""Attention written out in torch's functions by any module, or reached in a way that no other pattern sees: its forward
stays, and runs under a mode that makes one call of ours out of scores, softmax and product (scores.py).

Looked for when the other patterns are in force: one run of the sample under that mode says which modules still attend
in torch's functions.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as module_hooks

from ...._modules import evaluating
from ...changes import SetForward, mark, ours
from ...sites import Call, Found, Proposal, Refusal, Way
from ..context import Context, why_not_around
from .functions import Deferring
from .scores import settled

NAME = "deferred attention"


def find(context: Context, path: str, module: nn.Module, call: Call) -> Found:
    attends = context.deferred
    if attends is None:
        attends = context.deferred = _attending(context)
    count = attends.get(module)
    if not count:
        return None
    reason = why_not_around(module)
    if reason:
        return Refusal(path, NAME, reason)
    method = vars(module).get("forward")
    forward = _deferring(method.__func__ if method is not None and ours(module) else type(module).forward)
    source = f"{type(module).__name__}, {count} of scores, softmax and product"
    way = Way("the same forward, those as kernel_pytorch's attention", lambda: SetForward(module, mark(forward)))
    return Proposal(NAME, path, module, source, [way])


def _deferring(function: Any) -> Any:
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active() or _is_autocast():
            return function(self, *args, **kwargs)
        with Deferring():
            return settled(function(self, *args, **kwargs))

    return forward


def _is_autocast() -> bool:
    """Whether functions may give other types than their arguments', which scores are not asked about."""
    return torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")


def _attending(context: Context) -> Counter[nn.Module]:
    """How often each module attends in torch's functions: the innermost that holds all of it."""
    found: Counter[nn.Module] = Counter()
    if context.runs_compiled_code or _is_autocast():  # a compiler's backend sees these functions by itself
        return found
    stack: list[nn.Module] = []

    def listen(places: tuple[Any, ...]) -> None:
        common = [one for one, *others in zip(*places) if all(one is other for other in others)]
        found[common[-1]] += 1

    def enter(module: nn.Module, args: Any) -> None:
        stack.append(module)

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        if stack and stack[-1] is module:
            stack.pop()

    handles = [
        module_hooks.register_module_forward_pre_hook(enter),
        module_hooks.register_module_forward_hook(leave),
    ]
    call = context.recording.call("")
    assert call is not None
    try:
        with torch.no_grad(), evaluating(context.model), Deferring(listen, lambda: list(stack)):
            call.fresh().run(context.model)
    finally:
        for handle in handles:
            handle.remove()
    return found
