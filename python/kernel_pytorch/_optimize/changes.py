"""What is done to a model, and how it is undone: a change knows one thing that it sets and what was there before.

A part is replaced by giving its module another `forward`, as an attribute of that one object: its class, parameters,
names, hooks and state_dict stay, what shares the module shares the change, and undoing it deletes the attribute.
`Changes` is the stack of them: what goes wrong half way is undone, in reverse.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import nn

KEY = "_kernel_pytorch_changes"
_ABSENT = object()


class Change(Protocol):
    """One reversible change. apply() and undo() may be called again and again, in turn."""

    def apply(self) -> None: ...

    def undo(self) -> None: ...


class SetForward:
    """Another forward for one module: function(self, ...)."""

    def __init__(self, module: nn.Module, function: Callable[..., Any]) -> None:
        self.module = module
        self.method = types.MethodType(function, module)  # a copy of the model binds it to the copied module
        self.before: Any = _ABSENT

    def apply(self) -> None:
        self.before = self.module.__dict__.get("forward", _ABSENT)
        self.module.__dict__["forward"] = self.method

    def undo(self) -> None:
        if self.before is _ABSENT:
            self.module.__dict__.pop("forward", None)
        else:
            self.module.__dict__["forward"] = self.before

    def __deepcopy__(self, memo: dict[int, Any]) -> SetForward:
        import copy

        made = SetForward.__new__(SetForward)
        memo[id(self)] = made
        made.module = copy.deepcopy(self.module, memo)
        made.method = copy.deepcopy(self.method, memo)
        made.before = self.before if self.before is _ABSENT else copy.deepcopy(self.before, memo)
        return made


class SetAttribute:
    """Another value of an attribute of any object."""

    def __init__(self, owner: Any, name: str, value: Any) -> None:
        self.owner, self.name, self.value = owner, name, value
        self.before: Any = None

    def apply(self) -> None:
        self.before = getattr(self.owner, self.name)
        setattr(self.owner, self.name, self.value)

    def undo(self) -> None:
        setattr(self.owner, self.name, self.before)


class Several:
    """Changes that belong together; a failure of one undoes those before it."""

    def __init__(self, *changes: Change) -> None:
        self.changes = changes

    def apply(self) -> None:
        done: list[Change] = []
        try:
            for change in self.changes:
                change.apply()
                done.append(change)
        except BaseException:
            for change in reversed(done):
                change.undo()
            raise

    def undo(self) -> None:
        for change in reversed(self.changes):
            change.undo()


class Changes:
    """What is in force on one model, oldest first."""

    def __init__(self) -> None:
        self.applied: list[Change] = []

    def apply(self, change: Change) -> None:
        change.apply()
        self.applied.append(change)

    def undo(self, change: Change) -> None:
        """Undoes one change, whatever was done after it: later ones are lifted off and put back."""
        later = self.applied[self.applied.index(change) + 1 :]
        for other in reversed(later):
            other.undo()
        change.undo()
        self.applied.remove(change)
        for other in later:
            other.apply()

    def undo_all(self) -> None:
        while self.applied:
            self.applied[-1].undo()
            self.applied.pop()

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """The model as it was before everything, for a while."""
        held = list(self.applied)
        for change in reversed(held):
            change.undo()
        self.applied = []
        try:
            yield
        finally:
            for change in held:
                self.apply(change)


def changes_of(model: nn.Module) -> Changes | None:
    found: Changes | None = model.__dict__.get(KEY)
    return found


def uncompiled(model: nn.Module) -> nn.Module:
    """The module inside torch.compile's wrapper, or the model itself."""
    inner = getattr(model, "_orig_mod", None)
    return inner if isinstance(inner, nn.Module) else model


def ours(module: nn.Module) -> bool:
    """Whether the module's forward is one that a SetForward gave it."""
    method = module.__dict__.get("forward")
    return getattr(getattr(method, "__func__", None), "kernel_pytorch", False) is True


def mark(function: Callable[..., Any]) -> Callable[..., Any]:
    """Says of a forward that it is ours."""
    function.kernel_pytorch = True  # type: ignore[attr-defined]
    return function


def same_memory(first: torch.Tensor, second: torch.Tensor) -> bool:
    return first.data_ptr() == second.data_ptr() and first.dtype is second.dtype and first.device == second.device
