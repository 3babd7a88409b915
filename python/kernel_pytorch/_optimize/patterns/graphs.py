"""The whole model as CUDA graphs at shapes that come back: launches cost nothing any more. For inference one of its
forward; for training one of forward and one of backward (optimization_patterns/step_graphs.py says what holds then).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ..._modules import evaluating
from ...optimization_patterns import PyGraph
from ...optimization_patterns.results import Results
from ...optimization_patterns.step_graphs import StepGraphs
from ..agreement import is_shared
from ..changes import Change, OfThisProcess, SetForward, Several, mark
from ..costs import synchronize
from ..runner import runner
from ..sites import Call, Found, Proposal, Refusal, Way
from ..state import states_of
from .context import Context, why_not_plain

NAME = "cuda graph"
_LEAST_SHARE = 0.5
_KEY = "_kernel_pytorch_graph"


class Inner(nn.Module):
    """A model by the forward that it had before the graph."""

    def __init__(self, model: nn.Module, forward: Any) -> None:
        super().__init__()
        self.model = model
        self.before = forward
        self.training = model.training  # of this shell alone

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.before(*args, **kwargs)


class Holder(OfThisProcess):
    """The graphs of one model; a copy of the model begins with none."""

    def __init__(self) -> None:
        self.runner: Any = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Holder:
        return Holder()


class Hold(Change):
    """A place for graphs on the model itself."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.holder = model, Holder()

    def apply(self) -> None:
        self.model.__dict__[_KEY] = self.holder

    def undo(self) -> None:
        self.model.__dict__.pop(_KEY, None)

    def release(self) -> None:
        self.holder.runner = None


def graph_bytes(model: nn.Module) -> int:
    """Memory that the model's graphs hold from step to step, which no peak of a step shows."""
    holder = model.__dict__.get(_KEY)
    return 0 if holder is None or holder.runner is None else int(holder.runner.statistics()["graph_bytes"])


def find(context: Context, path: str, module: nn.Module, call: Call) -> Found:
    if path != "" or context.device.type != "cuda" or context.compiled:
        return None
    if is_shared():
        return Refusal(path, NAME, "ranks exchange tensors inside it, and each would decide on its own what to capture")
    if context.trains:
        return _find_for_training(context.device, path, module, call)
    reason = why_not_plain("", module)
    reason = reason or _why_no_graph(module, call.fresh())
    if reason:
        return Refusal(path, NAME, reason)
    way = Way("replays of a CUDA graph, one for each shape", lambda: _change(module))
    return Proposal(NAME, path, module, f"{type(module).__name__}, its launches one by one", [way])


def _why_no_graph(module: nn.Module, call: Call) -> str | None:
    """Of what a call gets and returns, or None: a replay hands out objects of its own, which must be nobody else's."""
    states = states_of((call.args, call.kwargs))
    if states:
        return f"it is called with a {type(states[0]).__name__}, which a call may change"
    with torch.no_grad(), evaluating(module):
        results = Results(call.run(module))
    held = {id(value) for part in module.modules() for value in vars(part).values()}
    own = next((one for one in results.objects if id(one) in held), None)
    if own is not None:
        return f"it returns its own {type(own).__name__}, which a graph would give anew in each call"
    return results.refusal or None


def _change(module: nn.Module) -> Several:
    before = module.__dict__.get("forward")  # ours, of the model as a part
    function = type(module).forward if before is None else before.__func__

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        holder: Holder = self.__dict__[_KEY]
        if self.training or torch.is_grad_enabled() or torch.compiler.is_compiling():
            return function(self, *args, **kwargs)
        if holder.runner is None:
            inner = Inner(self, lambda *a, **k: function(self, *a, **k))
            holder.runner = PyGraph(inner, always=True, bind_inputs=True, spares=True)
        holder.runner.module.training = self.training
        return holder.runner(*args, **kwargs)

    return Several(Hold(module), SetForward(module, mark(forward)))


def _find_for_training(device: torch.device, path: str, module: nn.Module, call: Call) -> Found:
    """Captured on the sample, to say why where that fails."""
    share = _host_share(runner(module, call, True), device)
    if share < _LEAST_SHARE:
        reason = f"the host asks for a step in {share:.0%} of its time: the device waits for no launch"
        return Refusal(path, NAME, reason)
    change = _training_change(module)
    hold = change.changes[0]
    assert isinstance(hold, Hold)
    try:
        change.apply()
        step = runner(module, call, True)
        for _ in range(2):  # the first shows which outputs get gradients
            step()
        found = hold.holder.runner.statistics()
    finally:
        change.release()
        change.undo()
    if not found["graphs"]:
        return Refusal(path, NAME, found["last_reason"] or "no output of it wants a gradient")
    way = Way("replays of two CUDA graphs for each shape", lambda: _training_change(module))
    source = f"{type(module).__name__}, the launches of forward and backward one by one"
    return Proposal(NAME, path, module, source, [way])


def _host_share(step: Callable[[], object], device: torch.device) -> float:
    """How much of a step's time has passed when the host has asked for all of it."""
    step()
    synchronize(device)
    begin = time.perf_counter()
    step()
    asked = time.perf_counter()
    synchronize(device)
    return (asked - begin) / (time.perf_counter() - begin)


def _training_change(module: nn.Module) -> Several:
    before = module.__dict__.get("forward")  # ours, of the model as a part
    function = type(module).forward if before is None else before.__func__

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        holder: Holder = self.__dict__[_KEY]
        if holder.runner is None:
            holder.runner = StepGraphs(self, function)
        return holder.runner(*args, **kwargs)

    return Several(Hold(module), SetForward(module, mark(forward)))
