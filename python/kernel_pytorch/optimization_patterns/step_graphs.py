"""CUDA graphs of a training step: a model's forward and its backward, each one launch.

For every kind of call (shapes, types, modes, autocast) the first calls run as they are and show which outputs get
gradients. Then forward and backward are captured; later calls replay them. What a caller gets is always a copy. Where a
replay would not be right the ordinary forward runs: while another forward waits for its backward, with hooks inside,
under torch.func, with a parameter moved elsewhere (captured anew). A backward that does not fit what was captured (a
second one of the same forward, other outputs, one that is to be differentiated itself) computes the forward again, with
the same random numbers, and goes on from there.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from . import capturing
from .bound_graphs import key_of
from .model_state import ModelState, obstacle_now, state_of
from .step_capture import (
    CannotCapture,
    CapturedStep,
    StepRunner,
    capture_step,
    duplicate,
    random_state,
    roots_of,
    undisturbed,
)

__all__ = ["StepGraphs"]

_MOST_MISSES = 3  # backward calls that did not fit, after which a kind of call stays as it is
_MOST_KINDS = 64  # that are remembered


@dataclass
class _Lesson:
    """What the ordinary calls of one kind have shown: which outputs were given gradients."""

    wanted: dict[int, bool] = field(default_factory=dict)
    count: int = 0
    misses: int = 0
    refusal: str = ""

    def mask(self) -> tuple[bool, ...] | None:
        return tuple(self.wanted.get(i, False) for i in range(self.count)) if any(self.wanted.values()) else None


def place_of(tensors: list[Tensor], state: ModelState) -> tuple[torch.device | None, str]:
    """The one GPU that everything is on, or why there is none."""
    devices = {tensor.device for tensor in (*tensors, *state.wanting, *state.buffers)}
    if len(devices) != 1 or next(iter(devices)).type != "cuda":
        return None, f"its tensors are on {', '.join(sorted(map(str, devices))) or 'no device'}, not on one GPU"
    if capturing.is_capturing():
        return None, "it is being captured already"
    return next(iter(devices)), ""


@dataclass(frozen=True)
class _Asked:
    """One call: its kind and what is known of that, the forward of its tensors alone, and the model just now."""

    key: Hashable
    lesson: _Lesson
    function: Callable[[list[Tensor]], Any]
    tensors: list[Tensor]
    state: ModelState
    device: torch.device


class StepGraphs:
    """A model's forward for training, as replays.

    Args:
        module: whose parameters are used, in place.
        function: its forward, called with the module and the arguments of a call.
        max_graphs: kinds of calls that are kept captured; the one used longest ago goes first. They share memory.
    """

    def __init__(self, module: nn.Module, function: Callable[..., Any], max_graphs: int = 4) -> None:
        self._module = weakref.ref(module)
        self.function = function
        self.max_graphs = max_graphs
        self.lock = threading.RLock()
        self._steps: OrderedDict[Hashable, CapturedStep] = OrderedDict()
        self._lessons: OrderedDict[Hashable, _Lesson] = OrderedDict()
        self._stream: Any = None
        self._pending: weakref.ref[_Call] | None = None
        self.order = capturing.StreamOrder()  # all graphs share memory
        self.counts = dict.fromkeys(
            ("replays", "plain_calls", "captures", "recaptures", "evictions", "recomputed_backwards"), 0
        )
        self.last_reason = ""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module = self._module()
        assert module is not None
        function = functools.partial(self.function, module)
        if not torch.is_grad_enabled():
            return function(*args, **kwargs)
        leaves, spec = pytree.tree_flatten((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        state = state_of(module)
        reason = obstacle_now() or state.obstacle
        if not reason and any(type(tensor) not in (Tensor, nn.Parameter) for tensor in tensors):
            reason = "an argument is a tensor of another class"
        if not reason and not state.wanting and not any(tensor.requires_grad for tensor in tensors):
            reason = "nothing wants a gradient"
        device, elsewhere = (None, reason) if reason else place_of(tensors, state)
        key = None if device is None else _kind(leaves, spec, tensors, state)
        if device is None or key is None:
            self.last_reason = elsewhere or "an argument that is no tensor cannot be hashed"
            self.counts["plain_calls"] += 1
            with self.lock:  # a capture in another thread has other leaves in the parameters' places
                return function(*args, **kwargs)
        with self.lock:
            lesson = self._lesson(key)
            call = self._call(_Asked(key, lesson, _on(function, leaves, spec), tensors, state, device))
            if call is not None:
                outputs = _Replay.apply(call, *tensors, *state.wanting)  # type: ignore[no-untyped-call]
                return call.step.answer(list(outputs))
            self.counts["plain_calls"] += 1
            output = function(*args, **kwargs)
            return output if lesson.refusal else _watched(lesson, output)

    def statistics(self) -> dict[str, Any]:
        with self.lock:
            return {
                **self.counts,
                "graphs": len(self._steps),
                "graph_bytes": sum(step.bytes for step in self._steps.values()),
                "refusals": [lesson.refusal for lesson in self._lessons.values() if lesson.refusal],
                "last_reason": self.last_reason,
            }

    def clear(self) -> None:
        """Gives the graphs' memory back. A backward that is still to come keeps its own."""
        with self.lock:
            self._steps.clear()
            self._lessons.clear()

    def _lesson(self, key: Hashable) -> _Lesson:
        lesson = self._lessons.setdefault(key, _Lesson())
        self._lessons.move_to_end(key)
        while len(self._lessons) > _MOST_KINDS:
            self._steps.pop(self._lessons.popitem(last=False)[0], None)
        return lesson

    def _call(self, asked: _Asked) -> _Call | None:
        """What a replay needs, or None for the ordinary way."""
        key, lesson = asked.key, asked.lesson
        pending = self._pending() if self._pending is not None else None
        if lesson.refusal or (pending is not None and not pending.done):
            self.last_reason = lesson.refusal or "another forward waits for its backward"
            return None
        step = self._steps.get(key)
        if step is not None and step.addresses != asked.state.addresses:
            self.counts["recaptures"] += 1
            del self._steps[key]
            step = None
        mask = lesson.mask()
        if step is None and mask is not None:
            step = self._capture(asked, mask)
        if step is None:
            return None
        self._steps.move_to_end(key)
        call = _Call(self, asked, step)
        self._pending = weakref.ref(call)
        self.counts["replays"] += 1
        return call

    def _capture(self, asked: _Asked, mask: tuple[bool, ...]) -> CapturedStep | None:
        device, lesson = asked.device, asked.lesson
        if self._stream is None:
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        alive = (step.forward.pool() for step in self._steps.values() if step.device == device)
        pool = next(alive, None) or torch.cuda.graph_pool_handle()
        module = self._module()
        assert module is not None
        try:
            step = capture_step(module, asked.function, asked.tensors, asked.state, mask, device, pool, self._stream)
        except Exception as error:  # whatever is wrong with the model shows again in the ordinary call that follows
            self._stream = None
            lesson.refusal = str(error) if isinstance(error, CannotCapture) else f"cannot be captured: {error}"
            self.last_reason = lesson.refusal
            return None
        self.counts["captures"] += 1
        self._steps[asked.key] = step
        while len(self._steps) > self.max_graphs:
            torch.cuda.synchronize()  # nobody may still be replaying it
            self._steps.popitem(last=False)
            self.counts["evictions"] += 1
        return step

    def missed(self, key: Hashable) -> None:
        """A backward asked for other outputs: what was learned is forgotten."""
        lesson = self._lesson(key)
        lesson.misses += 1
        lesson.wanted.clear()
        self._steps.pop(key, None)
        if lesson.misses >= _MOST_MISSES:
            lesson.refusal = "other outputs get gradients from call to call"


class _Call:
    """One forward by replay, until its backward has run. Autograd's node owns it: it dies with the graph."""

    def __init__(self, graphs: StepGraphs, asked: _Asked, step: CapturedStep) -> None:
        self.graphs, self.step, self.inputs = graphs, step, len(asked.tensors)
        self.key, self.function, self.state = (
            asked.key,
            asked.function,
            asked.state,
        )  # not the tensors: autograd has them
        self.random = random_state(step.device) if step.draws else None
        self.autocast = capturing.ambient()
        self.done = False

    def forward(self, inputs: tuple[Tensor, ...]) -> list[Tensor]:
        step = self.step
        with self.graphs.order.kept(step.device):
            for static, tensor in zip(step.inputs, inputs, strict=True):
                static.detach().copy_(tensor, non_blocking=True)
            step.forward.replay()
            return [duplicate(output) for output in step.outputs]

    def backward(self, inputs: Callable[[], tuple[Tensor, ...]], given: tuple[Tensor | None, ...]) -> list[Any]:
        if [parameter._version for parameter in self.state.wanting] != self.state.versions:
            raise RuntimeError(
                "optimize: a parameter was written to between this forward and its backward; "
                "call backward before the optimizer's step"
            )
        mask = tuple(gradient is not None for gradient in given)
        with self.graphs.lock:
            is_first, self.done = not self.done, True
            if is_first and mask == self.step.wanted and not torch.is_grad_enabled():
                return self._replay([gradient for gradient in given if gradient is not None])
            self.graphs.counts["recomputed_backwards"] += 1
            if mask != self.step.wanted:
                self.graphs.missed(self.key)
        return self._compute_again(inputs(), mask, [gradient for gradient in given if gradient is not None])

    def _replay(self, given: list[Tensor]) -> list[Any]:
        step = self.step
        with self.graphs.order.kept(step.device):
            for static, gradient in zip(step.output_gradients, given, strict=True):
                static.copy_(gradient, non_blocking=True)
            step.backward.replay()
            return self._placed(_copies(step.gradients, self._like()))

    def _like(self) -> list[Tensor]:
        return [static for static in self.step.inputs if static.requires_grad] + self.state.wanting

    def _placed(self, gradients: list[Tensor | None]) -> list[Any]:
        """In the order of the node's tensors, None where none is wanted."""
        found = iter(gradients)
        placed = [next(found) if static.requires_grad else None for static in self.step.inputs]
        return placed + list(found)

    def _compute_again(self, inputs: tuple[Tensor, ...], mask: tuple[bool, ...], given: list[Tensor]) -> list[Any]:
        """The ordinary way from the beginning: nothing of that forward is left. With create_graph it has a history."""
        device, keeps = self.step.device, torch.is_grad_enabled()
        fresh = inputs if keeps else [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in inputs]
        step = StepRunner(self.function, list(fresh), self.state.wanting)
        if not any(mask):
            return [None] * (len(inputs) + len(self.state.wanting))
        with undisturbed(self.state.buffers, device, self.random):
            with capturing.autocast_as(self.autocast):
                leaves, _ = step.forward()
            return self._placed(list(step.backward(roots_of(leaves, mask), given, keeps)))


class _Replay(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: _Call, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.call = call
        ctx.save_for_backward(*tensors[: call.inputs])
        outputs = call.forward(tensors[: call.inputs])
        fixed = [o for o, differentiable in zip(outputs, call.step.differentiable) if not differentiable]
        ctx.mark_non_differentiable(*fixed)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *given: Tensor | None) -> tuple[Tensor | None, ...]:
        return None, *ctx.call.backward(lambda: ctx.saved_tensors, given)


def _copies(gradients: list[Tensor | None], like: list[Tensor]) -> list[Tensor | None]:
    """Each as its parameter lies in memory, so that autograd keeps it as it is; those that lie so already at once."""
    made: list[Tensor | None] = []
    sources: list[Tensor] = []
    targets: list[Tensor] = []
    for gradient, parameter in zip(gradients, like, strict=True):
        if gradient is None:
            made.append(None)
            continue
        made.append(torch.empty_like(parameter, dtype=gradient.dtype, requires_grad=False))
        target = made[-1]
        assert target is not None
        if target.stride() == gradient.stride():
            sources.append(gradient)
            targets.append(target)
        else:
            target.copy_(gradient)
    if targets:
        torch._foreach_copy_(targets, sources)
    return made


def _on(function: Callable[..., Any], leaves: list[Any], spec: Any) -> Callable[[list[Tensor]], Any]:
    """The function of a call's tensors alone. Keeps the arguments that are none."""
    fixed = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    places = [index for index, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]

    def call(tensors: list[Tensor]) -> Any:
        values = list(fixed)
        for place, tensor in zip(places, tensors, strict=True):
            values[place] = tensor
        args, kwargs = pytree.tree_unflatten(values, spec)
        return function(*args, **kwargs)

    return call


def _watched(lesson: _Lesson, output: Any) -> Any:
    """The output of an ordinary call, with hooks that note which of its tensors get gradients from outside."""
    leaves, spec = pytree.tree_flatten(output)
    lesson.count = 0
    for place, leaf in enumerate(leaves):
        if not isinstance(leaf, Tensor):
            continue
        index, lesson.count = lesson.count, lesson.count + 1
        if leaf.requires_grad and not lesson.wanted.get(index):
            # The hook is on an alias: an output's own hook would also see gradients from outputs computed from it.
            leaves[place] = alias = leaf.view_as(leaf)
            alias.register_hook(_noting(lesson.wanted, index))  # type: ignore[no-untyped-call]
    return pytree.tree_unflatten(leaves, spec)


def _noting(wanted: dict[int, bool], index: int) -> Callable[[Tensor], None]:
    def note(gradient: Tensor) -> None:
        wanted[index] = True

    return note


def _kind(leaves: list[Any], spec: Any, tensors: list[Tensor], state: ModelState) -> Hashable | None:
    arguments = key_of(leaves, spec)
    layout = tuple((tensor.requires_grad, tensor.stride()) for tensor in tensors)
    modes = (torch.are_deterministic_algorithms_enabled(), capturing.ambient())
    return None if arguments is None else (arguments, layout, state.flags, modes)
