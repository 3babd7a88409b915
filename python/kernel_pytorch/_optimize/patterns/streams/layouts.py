"""Rows that lie apart: where a stream of rows [batch, length, channels] begins as a transposed view of a convolution's
output, everything that is added to it keeps that layout, through all layers. Every norm, sum and product then reads
elements one row apart, or copies them first. One copy where it begins makes the rows contiguous for all that follows;
the whole model says whether that pays.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from ...changes import SetForward, mark, ours
from ...sites import Call, Found, Proposal, Refusal, Way, are_apart
from ..context import Context, why_not_around

NAME = "layout"


def find(context: Context, path: str, module: nn.Module, call: Call) -> Found:
    is_first = path != "" and path == context.recording.first_apart
    if not is_first or context.compiled or not module._modules:  # what one norm makes of them is contiguous
        return None
    reason = why_not_around(module)
    if reason:
        return Refusal(path, NAME, reason)
    method = vars(module).get("forward")
    function = method.__func__ if method is not None and ours(module) else type(module).forward

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        args = tuple(map(together, args))
        return function(self, *args, **{name: together(value) for name, value in kwargs.items()})

    source = f"{type(module).__name__}, called with rows that lie apart in memory"
    way = Way("the same forward of a copy with contiguous rows", lambda: SetForward(module, mark(forward)))
    return Proposal(NAME, path, module, source, [way], opaque=True, timed="")


def together(value: Any) -> Any:
    return value.contiguous() if are_apart(value) else value
