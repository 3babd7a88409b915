"""A call of an optimised model from code of torch.compile: the ways to run it are tried on the first call of a kind.

Functions marked `uncompiled` are not compiled themselves; the entries that they call are, by whatever backend and mode
the user asked for. All else that they call is disabled, or Dynamo would try to compile it: hence small steps.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch._dynamo.decorators import skip
from torch.utils import _pytree as pytree

from ..costs import synchronize
from ..measure import clock_of
from ..sites import Call
from ..state import holds_state, left_as_it_was
from ..verify import random_like
from .traced import KEY, OPTIMIZED, Choice

_Function = TypeVar("_Function", bound=Callable[..., Any])
uncompiled: Any = skip
disabled: Callable[[_Function], _Function] = torch.compiler.disable
_TURNS, _LEAST_TURNS = 9, 3
_TURN_US = 1e4  # calls of a turn follow each other: the host is ahead of the device
_MOST_SECONDS = 2.0  # of turns, compilation aside


@torch._dynamo.assume_constant_result  # type: ignore[untyped-decorator]
def may_leave() -> bool:
    """Asked while Dynamo traces: whether it began with the model's own forward and may end its graph there."""
    try:
        from torch._dynamo.symbolic_convert import InstructionTranslator  # loaded, since it asks

        root: Any = InstructionTranslator.current_tx().output.root_tx
        begins_here = root.f_code.co_name == "forward" and root.f_code.co_filename == _FORWARD_FILE
        return bool(begins_here and not root.one_graph and not getattr(root, "error_on_graph_break", False))
    except Exception:  # another torch, which keeps these elsewhere: then it is traced as part of its caller
        return False


_FORWARD_FILE = Choice.__init__.__code__.co_filename


@uncompiled  # type: ignore[untyped-decorator]
def call_compiled(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Calls of a kind (with gradients or not, in training or not, about as large) are tried once, whatever their
    shapes. Few calls of Python functions: each costs a visit of Dynamo's."""
    choice: Choice = model.__dict__[KEY]
    size = 0
    for leaf in (*args, *kwargs.values()):
        if isinstance(leaf, Tensor):
            size = max(size, leaf.numel())
    kind = (torch.is_grad_enabled(), model.training, size.bit_length() // 3)
    way = choice.chosen.get(kind)
    if way is None:
        way = _tried(model, args, kwargs, kind)
    if way == OPTIMIZED:
        return _as_optimized(choice, model, args, kwargs)
    if way != choice.visible:
        _show(choice, way)
    return choice.entries[way](model, *args, **kwargs)


@uncompiled  # type: ignore[untyped-decorator]
def _tried(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], kind: tuple[Any, ...]) -> str:
    trial = _begin(model, args, kwargs, kind)
    try:
        while (turn := _next(trial)) is not None:
            way, entry, given = turn
            try:
                output = entry(model, *given.args, **given.kwargs)
            except Exception as error:
                if way == OPTIMIZED:
                    raise  # the call itself is at fault
                _fail(trial, way, error)
                break
            _done(trial, output)
    finally:
        _end(trial)
    return _decide(trial)


class Trial:
    """Ways in turns; the first turn of each compiles, the second says how many calls a turn has."""

    def __init__(self, model: nn.Module, call: Call, kind: tuple[Any, ...]) -> None:
        self.model, self.call, self.kind = model, call, kind
        self.choice: Choice = model.__dict__[KEY]
        self.entries: dict[str, Any] = {OPTIMIZED: _optimized_entry, **self.choice.entries}
        self.trains = torch.is_grad_enabled() and any(p.requires_grad for p in model.parameters())
        self.copies = self.trains or holds_state(call.args, call.kwargs)
        self.device = next((p.device for p in model.parameters()), torch.device("cpu"))
        self.clock = clock_of(self.device)
        self.samples: dict[str, list[float]] = {way: [] for way in self.entries}
        self.queue: list[str] = []
        self.turns, self.calls, self.left = 0, 1, 0
        self.way, self.began, self.deadline, self.is_broken = "", 0, 0.0, False
        self.stack = ExitStack()
        self.leaves = [p for p in model.parameters() if p.requires_grad] if self.trains else []

    def arguments(self) -> Call:
        return self.call.fresh() if self.copies else self.call

    def backward(self, output: Any) -> None:
        own = getattr(output, "loss", None)
        found = [own] if isinstance(own, Tensor) else pytree.tree_leaves(output)
        roots = [leaf for leaf in found if isinstance(leaf, Tensor) and leaf.requires_grad]
        if roots:
            gradients = [random_like(root, index) for index, root in enumerate(roots)]
            torch.autograd.grad(roots, self.leaves, gradients, allow_unused=True)


@disabled
def _as_optimized(choice: Choice, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return choice.function(model, *args, **kwargs)


@disabled
def _optimized_entry(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
    choice: Choice = model.__dict__[KEY]
    return choice.function(model, *args, **kwargs)


@disabled
def _show(choice: Choice, way: str) -> None:
    choice.show(way)


@disabled
def _begin(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], kind: tuple[Any, ...]) -> Trial:
    trial = Trial(model, Call(args, kwargs), kind)
    trial.stack.enter_context(left_as_it_was(model))
    trial.queue = [way for way in trial.entries if way not in trial.choice.failures]
    return trial


@disabled
def _next(trial: Trial) -> tuple[str, Any, Call] | None:
    """The next call, with its clock started; None when enough is known."""
    if trial.left == 0:
        if not trial.queue and not _refill(trial):
            return None
        trial.way = trial.queue.pop(0)
        trial.choice.show(trial.way)
        trial.left = trial.calls if trial.turns else 1
        synchronize(trial.device)
        given = trial.arguments()
        trial.began = trial.clock()
    else:
        given = trial.arguments()
    torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
    return trial.way, trial.entries[trial.way], given


def _refill(trial: Trial) -> bool:
    ways = [way for way in trial.entries if way not in trial.choice.failures]
    if trial.turns == 0:
        trial.deadline = time.monotonic() + _MOST_SECONDS
    elif trial.turns == 1:  # every way has run twice
        shortest = min((trial.samples[way][-1] for way in ways), default=_TURN_US)
        trial.calls = max(1, min(20, int(_TURN_US / max(shortest, 1.0))))
        for way in ways:
            trial.samples[way].clear()
    late = time.monotonic() > trial.deadline and trial.turns > _LEAST_TURNS
    if len(ways) < 2 or late or trial.turns > _TURNS:
        return False
    trial.turns += 1
    trial.queue = ways
    return True


@disabled
def _done(trial: Trial, output: Any) -> None:
    if trial.trains:
        trial.backward(output)
    trial.left -= 1
    if trial.left == 0:
        synchronize(trial.device)
        calls = trial.calls if trial.turns else 1
        trial.samples[trial.way].append((trial.clock() - trial.began) / 1e3 / calls)


@disabled
def _fail(trial: Trial, way: str, error: Exception) -> None:
    """A way that raises is left out. Dynamo compiles nothing more in this call: the next one tries the others."""
    trial.is_broken = True
    trial.choice.failures[way] = f"{type(error).__name__}: {error}"[:300]


@disabled
def _end(trial: Trial) -> None:
    trial.stack.close()


@disabled
def _decide(trial: Trial) -> str:
    choice = trial.choice
    if trial.is_broken:
        return OPTIMIZED
    times = {way: statistics.median(s) for way, s in trial.samples.items() if s and way not in choice.failures}
    way = min(times, key=lambda one: times[one], default=OPTIMIZED)
    choice.chosen[trial.kind], choice.times[trial.kind] = way, times
    choice.show(way)
    return way
