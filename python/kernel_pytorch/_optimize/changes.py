"""What is done to a model, and how it is undone: a change knows one thing that it sets and what was there before.

A part is replaced by giving its module another `forward`, as an attribute of that one object: its class, parameters,
names, hooks and state_dict stay, what shares the module shares the change, and undoing it deletes the attribute.
`Changes` is the stack of them: what goes wrong half way is undone, in reverse.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

KEY = "_kernel_pytorch_changes"
_ABSENT = object()


class OfThisProcess:
    """State of a model that cannot leave the process: pickled with the model it is None, which counts as not
    there. A pickled model is therefore the model as it was before `optimize`. Copies within the process keep it.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        made = type(self).__new__(type(self))
        memo[id(self)] = made
        made.__dict__.update({name: copy.deepcopy(value, memo) for name, value in self.__dict__.items()})
        return made


class Change(OfThisProcess):
    """One reversible change. apply() and undo() may be called again and again; a second apply or undo does nothing."""

    def apply(self) -> None:
        raise NotImplementedError

    def undo(self) -> None:
        raise NotImplementedError

    def suspend(self) -> None:
        """Makes the model compute what it did before, for a while; cheaper than undo where memory only moved."""
        self.undo()

    def resume(self) -> None:
        self.apply()

    def release(self) -> None:
        """Gives back memory that would be made again when it is needed."""

    def hide_from_compilers(self, model: nn.Module) -> None:
        """Of a change of the model that is in force: torch.compile traces what the model did before it."""


class SetForward(Change):
    """Another forward for one module: function(self, ...)."""

    def __init__(self, module: nn.Module, function: Callable[..., Any]) -> None:
        self.module = module
        # Pickle stores a method as its object's attribute of the function's name: a pickled model gets its class's.
        function = _own_function(function)
        function.__name__ = "forward"
        with contextlib.suppress(TypeError, ValueError):  # who asks for the arguments' names gets those of the class
            function.__signature__ = inspect.signature(type(module).forward)  # type: ignore[attr-defined]
        self.method = types.MethodType(function, module)  # a copy of the model binds it to the copied module
        self.plain = function
        self.before: Any = _ABSENT
        self.hidden: Callable[..., Any] | None = None  # what a compiler sees instead

    def show_to_compilers(self) -> None:
        """After hide_from_compilers: torch.compile traces the function itself. (Of the model's own forward, who asks
        for it takes `plain`.)"""
        vars(self.plain).pop("_torchdynamo_inline", None)

    def hide_again(self) -> None:
        """After show_to_compilers."""
        if self.hidden is not None:
            self.plain._torchdynamo_inline = self.hidden  # type: ignore[attr-defined]

    def hide_from_compilers(self, model: nn.Module) -> None:
        """Where a function has this attribute Dynamo, torch.compile's tracer, inlines its value instead. It begins with
        the forward of the model itself, which it cannot exchange: that one asks.
        """
        function: Any = self.method.__func__
        before = type(self.module).forward if self.before is _ABSENT else getattr(self.before, "__func__", None)
        if not isinstance(before, types.FunctionType) or "_torchdynamo_inline" in vars(function):
            return
        before = vars(before).get("_torchdynamo_inline", before)
        self.hidden = before
        if self.module is model:
            self.undo()
            function = _unless_compiling(function, before)
            self.method = types.MethodType(function, model)
            self.apply()
        function._torchdynamo_inline = before

    def apply(self) -> None:
        if self.module.__dict__.get("forward") is self.method:
            return
        self.before = self.module.__dict__.get("forward", _ABSENT)
        self.module.__dict__["forward"] = self.method

    def undo(self) -> None:
        if self.module.__dict__.get("forward") is not self.method:
            return
        if self.before is _ABSENT:
            self.module.__dict__.pop("forward", None)
        else:
            self.module.__dict__["forward"] = self.before

    def __deepcopy__(self, memo: dict[int, Any]) -> SetForward:
        made = SetForward.__new__(SetForward)
        memo[id(self)] = made
        made.module = copy.deepcopy(self.module, memo)
        made.method = copy.deepcopy(self.method, memo)
        made.before = self.before if self.before is _ABSENT else copy.deepcopy(self.before, memo)
        made.plain, made.hidden = self.plain, self.hidden
        return made


class SetAttribute(Change):
    """Another value of an attribute of any object."""

    def __init__(self, owner: Any, name: str, value: Any) -> None:
        self.owner, self.name, self.value = owner, name, value
        self.before: Any = _ABSENT

    def apply(self) -> None:
        if vars(self.owner).get(self.name, _ABSENT) is self.value:
            return
        self.before = vars(self.owner).get(self.name, _ABSENT)
        setattr(self.owner, self.name, self.value)

    def undo(self) -> None:
        if vars(self.owner).get(self.name, _ABSENT) is not self.value:
            return
        if self.before is _ABSENT:
            delattr(self.owner, self.name)
        else:
            setattr(self.owner, self.name, self.before)


class Several(Change):
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

    def suspend(self) -> None:
        for change in reversed(self.changes):
            change.suspend()

    def resume(self) -> None:
        for change in self.changes:
            change.resume()

    def release(self) -> None:
        for change in self.changes:
            change.release()

    def hide_from_compilers(self, model: nn.Module) -> None:
        for change in self.changes:
            change.hide_from_compilers(model)


class PackRows(Change):
    """Weights of several linear layers one after the other in one tensor, so that one product can use them all.

    The parameters stay the same objects with the same values; only where they lie in memory changes, and back on undo.
    Each has a storage of its own, which is its part of the memory: what saves or copies a model by its storages
    (safetensors, deepcopy) sees parameters like any others.
    """

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self.tensors = tensors
        self.packed: torch.Tensor | None = None
        self.places: list[int] = []  # of the parameters in the packed tensor

    def apply(self) -> None:
        if self.holds():
            return
        values = [tensor.data for tensor in self.tensors]
        self.packed = torch.cat(values)
        for tensor, rows in zip(self.tensors, torch.split(self.packed, [len(value) for value in values])):
            tensor.data = torch.from_dlpack(rows)  # type: ignore[attr-defined]
        self.places = [tensor.data_ptr() for tensor in self.tensors]

    def undo(self) -> None:
        if self.packed is None:
            return
        for tensor in self.tensors:
            tensor.data = tensor.data.clone(memory_format=torch.contiguous_format)
        self.packed = None

    def suspend(self) -> None:
        pass  # values are where the original looks for them

    def resume(self) -> None:
        pass

    def holds(self) -> bool:
        """Whether the parameters still lie in the packed tensor: a move to another type or device takes them out, and
        nothing else can lie there while it lives. Asked in every call."""
        return self.packed is not None and [tensor.data_ptr() for tensor in self.tensors] == self.places

    def __deepcopy__(self, memo: dict[int, Any]) -> PackRows:
        """A copied model has weights of its own, each by itself."""
        return PackRows([copy.deepcopy(tensor, memo) for tensor in self.tensors])


class Changes(OfThisProcess):
    """What is in force on one model, oldest first.

    `hidden_in`: the model, of whose changes torch.compile sees nothing: it fuses around the original, and would only
    stop at each of our ops. None where they were chosen for what a compiler makes of them.
    """

    def __init__(self, hidden_in: nn.Module | None = None) -> None:
        self.hidden_in = hidden_in
        self.applied: list[Change] = []
        self.applied_later: list[Change] = []  # of a model that they were taken off

    def apply(self, change: Change) -> None:
        self.applied.append(change)  # first: an interrupt in between must find it
        change.apply()
        if self.hidden_in is not None:
            change.hide_from_compilers(self.hidden_in)

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

    def release(self) -> None:
        for change in self.applied:
            change.release()

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """The model computing what it did before everything, for a while."""
        held, self.applied = self.applied, []
        done: list[Change] = []
        try:
            for change in reversed(held):
                change.suspend()
                done.append(change)
            yield
        finally:
            for change in reversed(done):
                change.resume()
            self.applied = held


def changes_of(model: nn.Module) -> Changes | None:
    found: Changes | None = model.__dict__.get(KEY)
    return found


def take_off(model: nn.Module) -> Changes | None:
    """The model as it was before `optimize`; `put_on` makes it again what it was."""
    changes = model.__dict__.pop(KEY, None)
    if changes is not None:
        changes.release()
        held = list(changes.applied)
        changes.undo_all()
        changes.applied_later = held
    return changes  # type: ignore[no-any-return]


def put_on(model: nn.Module, changes: Changes | None) -> None:
    """What `take_off` took."""
    if changes is not None:
        held, changes.applied_later = changes.applied_later, []
        for change in held:
            changes.apply(change)
        model.__dict__[KEY] = changes


def _own_function(function: Callable[..., Any]) -> Any:
    """The function as an object of its own: attributes of one module's forward are not those of another's."""
    if not isinstance(function, types.FunctionType):
        return function
    made = types.FunctionType(
        function.__code__, function.__globals__, function.__name__, function.__defaults__, function.__closure__
    )
    made.__kwdefaults__ = function.__kwdefaults__
    made.__dict__.update(function.__dict__)
    return made


def _unless_compiling(function: Callable[..., Any], before: Callable[..., Any]) -> Any:
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return (before if torch.compiler.is_compiling() else function)(self, *args, **kwargs)

    forward.__dict__.update(vars(function))
    return forward


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
