"""torch.compile on top of an optimised model is the better of the two: when a compiled call first comes, the model as
`optimize` left it, the model compiled as it was, and the model compiled with its products and attention on our ops are
timed in turns on that call's arguments, and the fastest stays.

Where a compiler may not leave the model (fullgraph=True, export, a model that is called inside a compiled function)
nothing is timed, and it sees what was fastest before, or the model as it was. Either way our attention and losses that
are set by a switch of the model's own stay: a compiler can fuse nothing into what they replace.
"""

from __future__ import annotations

import itertools
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ..changes import Change, Changes, OfThisProcess, SetForward, Several, mark
from ..choose import Kept

KEY = "_kernel_pytorch_traced"
OPTIMIZED, COMPILED, PARTS = "as optimized", "compiled", "compiled with our products and attention"
# A compiler's own products and norms take their place; graphs and compiled calls are for calls without a compiler.
_HIDDEN = ("qkv", "residual + norm", "residual sums", "layout", "embedding", "cuda graph", "torch.compile")


class Choice(OfThisProcess):
    """Ways of one model under torch.compile, and which was the fastest, by kind of call."""

    def __init__(self, model: nn.Module, function: Callable[..., Any], shown: list[SetForward]) -> None:
        self.function, self.shown = function, shown
        original = type(model).forward
        own = [change.plain for change in shown if change.module is model]
        self.entries: dict[str, Callable[..., Any]] = {COMPILED: _entry(original)}
        if shown:
            self.entries[PARTS] = _entry(own[-1] if own else original)
        self.chosen: dict[Any, str] = {}
        self.times: dict[Any, dict[str, float]] = {}  # microseconds of a call
        self.failures: dict[str, str] = {}
        self.visible = COMPILED

    def show(self, way: str) -> None:
        """Lets a compiler see the replaced parts, or what they were."""
        if way == OPTIMIZED or way == self.visible:
            return
        for change in self.shown:
            if way == PARTS:
                change.show_to_compilers()
            else:
                change.hide_again()
        self.visible = way

    def __deepcopy__(self, memo: dict[int, Any]) -> Choice:
        made: Choice = super().__deepcopy__(memo)
        made.chosen, made.times, made.failures = {}, {}, {}
        return made


def _entry(function: Callable[..., Any]) -> Callable[..., Any]:
    """A frame for Dynamo to begin with. Its code object is its own, since compilations are kept per code object, and
    has a name of its own, since code objects with the same contents are equal."""

    def traced(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return function(self, *args, **kwargs)

    name = f"model_{next(_numbers)}"
    return types.FunctionType(traced.__code__.replace(co_name=name), traced.__globals__, name, None, traced.__closure__)


_numbers = itertools.count()


class _Hold(Change):
    """The choice, on the model itself."""

    def __init__(self, model: nn.Module, choice: Choice) -> None:
        self.model, self.choice = model, choice

    def apply(self) -> None:
        self.model.__dict__[KEY] = self.choice

    def undo(self) -> None:
        self.choice.show(COMPILED)
        self.model.__dict__.pop(KEY, None)


def choice_of(model: nn.Module) -> Choice | None:
    found: Choice | None = model.__dict__.get(KEY)
    return found


def attach(model: nn.Module, changes: Changes, kept: list[Kept]) -> None:
    """Gives the model a forward that chooses when a compiler runs it; the last of the changes."""
    original = type(model).forward
    if not kept or not isinstance(original, types.FunctionType):
        return
    method = model.__dict__.get("forward")
    function = original if method is None else method.__func__
    shown = [one.change for one in kept if not one.proposal.pointwise and one.proposal.pattern not in _HIDDEN]
    parts = [part for change in shown for part in (change.changes if isinstance(change, Several) else (change,))]

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            from .compiled_call import call_compiled, may_leave  # loads Dynamo, which traces this

            if may_leave():
                return call_compiled(self, args, kwargs)
            return original(self, *args, **kwargs)
        return function(self, *args, **kwargs)

    set_forward = SetForward(model, mark(forward))
    choice = Choice(model, function, [part for part in parts if isinstance(part, SetForward)])
    changes.apply(Several(_Hold(model, choice), _Outermost(set_forward)))


class _Outermost(Change):
    """A forward that asks itself whether a compiler runs it."""

    def __init__(self, change: SetForward) -> None:
        self.change = change

    def apply(self) -> None:
        self.change.apply()

    def undo(self) -> None:
        self.change.undo()
