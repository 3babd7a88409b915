"""Arguments that a call changes (a cache that grows, a state that is written): every run of a sample gets copies of its
own, so that the second run computes what the first did.
"""

from __future__ import annotations

import copy
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ..optimization_patterns.results import CONSTANTS, is_configuration

# What no call changes, or what belongs to the model and is not a call's to copy.
_CONSTANTS = (*CONSTANTS, torch.Generator, types.MethodType)
_MOST_OBJECTS = 20_000  # of one argument; an object that reaches more is no cache
_MOST_BYTES = 1 << 28  # of copies that wait for a timed turn


class _TooLarge(Exception):
    """An argument reaches more objects than a state would."""


def is_state(value: Any) -> bool:
    """Whether a call may change the value although it is no tensor."""
    return not isinstance(value, (Tensor, *_CONSTANTS)) and not is_configuration(value)


def tensors_in(value: Any) -> list[Tensor]:
    """Every tensor that the value holds, in an order that depends on its structure alone: also those of dataclasses,
    caches and other objects that pytrees do not open."""
    return _reached(value)[0]


def _reached(value: Any) -> tuple[list[Tensor], list[Any]]:
    """Tensors, and what a copy shares with the original: modules and configurations."""
    found: list[Tensor] = []
    shared: list[Any] = []
    seen: set[int] = set()
    waiting = [value]
    while waiting:
        one = waiting.pop()
        if isinstance(one, Tensor):
            if id(one) not in seen:
                found.append(one)
        elif isinstance(one, nn.Module) or is_configuration(one):
            shared.append(one)
        elif isinstance(one, _CONSTANTS) or id(one) in seen:
            continue
        else:
            waiting.extend(reversed(_parts(one)))
        seen.add(id(one))
        if len(seen) > _MOST_OBJECTS:
            raise _TooLarge
    return found, shared


def _parts(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return list(value.values())
    if isinstance(value, (list, tuple, set, frozenset)):
        return list(value)
    slots = [name for base in type(value).__mro__ for name in getattr(base, "__slots__", ())]
    held = [getattr(value, name) for name in slots if isinstance(name, str) and hasattr(value, name)]
    return [*held, *getattr(value, "__dict__", {}).values()]


def states_of(value: Any) -> list[Any]:
    """The arguments that a call may change, tensors aside."""
    return [leaf for leaf in pytree.tree_leaves(value) if is_state(leaf)]


def holds_state(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a call with these arguments may change something besides tensors: a cache, a list that it appends to."""
    given = (*args, *kwargs.values())
    return bool(states_of(given)) or any(_has_container(value) for value in given)


def _has_container(value: Any) -> bool:
    if isinstance(value, tuple):
        return any(_has_container(one) for one in value)
    return isinstance(value, (list, dict, set))


def copied(value: Any) -> Any:
    """Tensors as copies without history, what holds state as deep copies; what cannot be copied as it is."""
    memo: dict[int, Any] = {}

    def clone(tensor: Tensor) -> Tensor:
        if id(tensor) not in memo:
            made = tensor.detach().clone()
            memo[id(tensor)] = made.requires_grad_() if tensor.requires_grad and tensor.is_floating_point() else made
        return memo[id(tensor)]  # type: ignore[no-any-return]

    def copy_leaf(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return clone(leaf)
        if not is_state(leaf):
            return leaf
        try:
            tensors, shared = _reached(leaf)
            for tensor in tensors:
                clone(tensor)
            memo.update((id(one), one) for one in shared)
            return copy.deepcopy(leaf, memo)
        except Exception:  # any object may refuse to be copied, in any way; the model then gets the one there is
            return leaf

    return pytree.tree_map(copy_leaf, value)


class Repeated:
    """function(call), on a fresh copy of the call's arguments where they hold state. Copies for a timed turn are made
    before it (`prepare`), so that no clock sees them.
    """

    def __init__(self, call: Any, function: Callable[[Any], object]) -> None:
        self.call, self.function = call, function
        self._has_state = holds_state(call.args, call.kwargs)
        self._bytes = sum(tensor.nbytes for tensor in _known_tensors([call.args, call.kwargs]))
        self._ready: list[Any] = []

    def prepare(self, count: int) -> None:
        if self._has_state:
            most = max(_MOST_BYTES // max(self._bytes, 1), 1)
            while len(self._ready) < min(count, most):
                self._ready.append(self.call.fresh())

    def __call__(self) -> object:
        if not self._has_state:
            return self.function(self.call)
        return self.function(self._ready.pop() if self._ready else self.call.fresh())


def _known_tensors(states: list[Any]) -> list[Tensor]:
    try:
        return tensors_in(states)
    except _TooLarge:
        return []


def prepare(run: Callable[[], object], count: int = 1) -> None:
    """Lets a run that needs fresh arguments make them before a clock or a counter starts."""
    if isinstance(run, Repeated):
        run.prepare(count)


@contextmanager
def random_numbers_kept(model: nn.Module) -> Iterator[None]:
    """Runs inside leave the random numbers of the CPU and of the model's GPUs as they were."""
    devices = {tensor.device for tensor in (*model.parameters(), *model.buffers()) if tensor.is_cuda}
    with torch.random.fork_rng(devices=list(devices)):
        yield


_KEPT = (Tensor, dict, list, set, type(None), bool, int, float)
_OUR_NAMES = "_kernel_pytorch"


def _attributes(part: nn.Module) -> dict[str, Any]:
    """What a module may keep from one run to the next; torch's own tables of parts and hooks aside."""
    own = vars(part)
    return {
        name: value
        for name, value in own.items()
        if isinstance(value, _KEPT) and name not in _TABLES and not name.startswith(_OUR_NAMES)
    }


_TABLES = frozenset(vars(nn.Module()))


@contextmanager
def attributes_kept(model: nn.Module) -> Iterator[None]:
    """Tables that a model derives from its parameters and keeps (a bias by position), counters and lists are as before
    after runs inside."""
    parts = [(part, _attributes(part)) for part in model.modules()]
    contents = [
        (value, copy.copy(value))
        for _, attributes in parts
        for value in attributes.values()
        if isinstance(value, (dict, list, set))
    ]
    try:
        yield
    finally:
        for part, before in parts:
            now = _attributes(part)
            for name in now.keys() - before.keys():
                del part.__dict__[name]
            for name, value in before.items():
                if now.get(name, part) is not value and name in vars(part):
                    part.__dict__[name] = value
        for value, held in contents:
            if not _same_items(value, held):
                value.clear()
                value.extend(held) if isinstance(value, list) else value.update(held)


def _same_items(a: Any, b: Any) -> bool:
    """The very same objects in the same places."""
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(a[key] is b[key] for key in a)
    return len(a) == len(b) and all(x is y for x, y in zip(a, b))


@contextmanager
def left_as_it_was(model: nn.Module) -> Iterator[None]:
    """Runs inside leave the model's buffers (statistics, counters, cached tables), what it keeps in attributes and the
    random numbers as they were, and move no tensor that somebody else may hold."""
    kept = [
        (part, name, buffer, buffer.detach().clone())
        for part in model.modules()
        for name, buffer in part._buffers.items()
        if buffer is not None and not nn.parameter.is_lazy(buffer) and not buffer.is_meta
    ]
    try:
        with random_numbers_kept(model), attributes_kept(model):
            yield
    finally:
        with torch.no_grad():
            for part, name, buffer, value in kept:
                if buffer.shape == value.shape and not torch.equal(buffer, value):
                    buffer.copy_(value)
                part._buffers[name] = buffer
