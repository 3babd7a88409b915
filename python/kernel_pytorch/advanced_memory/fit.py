"""Training inside a budget of memory: `fit_memory` measures a step, asks the plan in C++ which activations to keep, to
make again or to move to the host, applies it to the model's blocks and says what it costs."""

from __future__ import annotations

import contextlib
import re
import time
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from .. import _library
from ._activations import MOVE, BlockCall, BlockTreatment, Session
from ._host import HostSlab, measure_link
from ._measure import BlockReads, BlockTrace, Counting, Meter, Reading, Tracing, tensors_of

__all__ = ["MemoryFit", "fit_memory", "parse_bytes"]

_UNITS = {
    "": 1,
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "KIB": 1 << 10,
    "MIB": 1 << 20,
    "GIB": 1 << 30,
    "TIB": 1 << 40,
}
_SMALLEST_MOVE = 1 << 20  # bytes on a GPU: a copy has a fixed cost


def parse_bytes(size: str | int | float, what: str = "budget") -> int:
    """40 * 2**30, "40GiB" or "42.9GB" as a number of bytes."""
    if isinstance(size, (int, float)):
        value, unit = float(size), ""
    else:
        match = re.fullmatch(r"\s*([0-9.]+)\s*([A-Za-z]*)\s*", size)
        if match is None or match[2].upper() not in _UNITS:
            raise ValueError(f'fit_memory: {what} is "{size}"; give bytes, or text such as "40GiB" or "512MB"')
        value, unit = float(match[1]), match[2].upper()
    if value < 0:
        raise ValueError(f"fit_memory: {what} is {size}; it cannot be below 0")
    return int(value * _UNITS[unit])


@dataclass
class MemoryFit:
    """What `fit_memory` did. `remove()` makes the model what it was, `install()` puts the plan back without measuring;
    as a context manager it is removed at the end.

    Peaks are of a whole step in bytes, of everything on the device. Those and the times are of the sample; `plan` is
    the answer of kp_activation_plan, with what is kept, moved and made again of each block.
    """

    plan: dict[str, Any]
    budget: int
    blocks: list[str]
    predicted_peak: int
    measured_peak: int
    everything_peak: int  # predicted, with everything kept
    predicted_ms: float
    measured_ms: float
    everything_ms: float  # predicted, with everything kept
    slab_bytes: int
    treatments: dict[str, dict[str, int]] = field(default_factory=dict)  # block: treatment: bytes
    _modules: dict[str, nn.Module] = field(default_factory=dict, repr=False)
    _run: Callable[..., Any] | None = field(default=None, repr=False)
    _installed: list[_Installed] = field(default_factory=list, repr=False)
    _session: Session = field(default_factory=Session, repr=False)

    @property
    def other_paths(self) -> list[str]:
        """Blocks whose forward was not the measured one at some call; from there on they keep everything."""
        return sorted(self._session.other_paths)

    def install(self) -> None:
        if not self._installed and self._run is not None:
            self._installed = [_Installed(block, name, self._run) for name, block in self._modules.items()]

    def remove(self) -> None:
        for installed in self._installed:
            installed.remove()
        self._installed = []

    def __enter__(self) -> MemoryFit:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def __str__(self) -> str:
        gib = 1 << 30
        return (
            f"fit_memory: {len(self.blocks)} blocks, budget {self.budget / gib:.2f} GiB. {self.plan['reason']}\n"
            f"  peak: predicted {self.predicted_peak / gib:.3f} GiB, measured {self.measured_peak / gib:.3f} GiB "
            f"({100 * (self.measured_peak / self.predicted_peak - 1):+.1f} %); everything kept "
            f"{self.everything_peak / gib:.3f} GiB\n"
            f"  step: predicted {self.predicted_ms:.2f} ms, measured {self.measured_ms:.2f} ms; everything kept "
            f"{self.everything_ms:.2f} ms (predicted); {self.slab_bytes / gib:.3f} GiB of host memory"
        )


class _Forward:
    """A block's forward under a plan, in the module's own dictionary. A copy of the module has its plain forward."""

    def __init__(self, block: nn.Module, name: str, run: Callable[..., Any]) -> None:
        self.block, self.name, self.plain, self._run = block, name, block.forward, run
        self.__wrapped__ = block.forward  # for inspect.signature

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # hooks and ops of one call are Python's here
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.plain(*args, **kwargs)
        return self._run(self.name, self.plain, args, kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return _plain_forward(memo.get(id(self.block), self.block))

    def __reduce__(self) -> Any:
        return _plain_forward, (self.block,)


def _plain_forward(block: nn.Module) -> Any:
    return types.MethodType(type(block).forward, block)


class _Installed:
    """A forward that stands in a module's place until it is removed."""

    def __init__(self, block: nn.Module, name: str, run: Callable[..., Any]) -> None:
        self._block = block
        self._before = block.__dict__.get("forward")
        block.forward = _Forward(block, name, run)

    def remove(self) -> None:
        if self._before is None:
            self._block.__dict__.pop("forward", None)
        else:
            self._block.forward = self._before


@contextlib.contextmanager
def _installed(blocks: dict[str, nn.Module], run: Callable[..., Any]) -> Iterator[None]:
    forwards = [_Installed(block, name, run) for name, block in blocks.items()]
    try:
        yield
    finally:
        for forward in forwards:
            forward.remove()


def find_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """The repeated parts of a model: elements of its outermost lists, and without lists its direct children."""
    found: dict[str, nn.Module] = {}

    def walk(module: nn.Module, path: str) -> None:
        for name, child in module.named_children():
            inner = f"{path}.{name}" if path else name
            if isinstance(child, (nn.ModuleList, nn.Sequential)) and len(child) > 1:
                found.update({f"{inner}.{place}": one for place, one in child.named_children()})
            else:
                walk(child, inner)

    if isinstance(model, nn.Sequential):
        return dict(model.named_children())
    walk(model, "")
    return found or dict(model.named_children())


class _Step:
    """Steps of a model that leave nothing behind: gradients are returned and dropped, random numbers and buffers put
    back."""

    def __init__(self, model: nn.Module, sample: Any, loss: Callable[[Any], Tensor] | None) -> None:
        self.model, self.loss = model, loss
        self.args, self.kwargs = _arguments(sample)
        self.parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.device = next((p.device for p in model.parameters()), torch.device("cpu"))

    def forward(self) -> Any:
        return self.model(*self.args, **self.kwargs)

    def run(self) -> None:
        output = self.forward()
        if self.loss is not None:
            targets, weights = [self.loss(output)], None
        elif getattr(output, "loss", None) is not None:
            targets, weights = [output.loss], None
        else:
            targets = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor) and leaf.requires_grad]
            weights = [torch.ones_like(leaf) for leaf in targets]
        del output
        gradients = torch.autograd.grad(targets, self.parameters, weights, allow_unused=True)
        del gradients

    def milliseconds(self, repetitions: int = 3) -> float:
        times = []
        for _ in range(repetitions):
            self._wait()
            start = time.perf_counter()
            self.run()
            self._wait()
            times.append((time.perf_counter() - start) * 1e3)
        return min(times)

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    @contextlib.contextmanager
    def unchanged(self) -> Iterator[None]:
        buffers = [(buffer, buffer.detach().clone()) for buffer in self.model.buffers()]
        devices = [self.device] if self.device.type == "cuda" else []
        try:
            with torch.random.fork_rng(devices=devices):
                yield
        finally:
            with torch.no_grad():
                for buffer, value in buffers:
                    buffer.copy_(value)


def _arguments(sample: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(sample, dict):
        return (), sample
    return (tuple(sample) if isinstance(sample, (tuple, list)) else (sample,)), {}


class _Watch:
    """Of a step under a plan on a CPU: what the runtime makes counts as well."""

    def __init__(self, meter: Meter) -> None:
        self._meter = meter

    def made(self, tensor: Tensor) -> None:
        self._meter.note(tensor)

    def left(self, call: BlockCall) -> None:
        pass

    def read(self, call: BlockCall, number: int) -> None:
        pass

    def was_read(self) -> None:
        pass


def fit_memory(
    model: nn.Module,
    sample: Any,
    budget: str | int | float | None = None,
    *,
    loss: Callable[[Any], Tensor] | None = None,
    blocks: Sequence[str] | None = None,
    reserve: str | int | float = 0,
    move: bool = True,
    recompute: bool = True,
) -> MemoryFit:
    """Makes training steps of `model` fit into `budget` bytes of its device, at the least loss of time.

    A step is measured on the sample, block by block; the plan says which tensors each block keeps for backward, which
    it makes again by running their op once more, and which it moves to pinned host memory and back under the work of
    its neighbours. Gradients are those of the plain model. Parameters, hooks and the state_dict are untouched; under
    no_grad nothing changes. Give a model that is in DistributedDataParallel, or wrap it afterwards.

    Args:
        sample: as the model is called: a tensor, a tuple or a dict of arguments. Peaks are those of its shape.
        budget: bytes, or text such as "40GiB", for everything on the device, parameters and optimizer states that exist
            included; None: 90 % of the device's memory. On a CPU what counts are the tensors that ops return.
        loss: from the model's output to a scalar; by default the output's `loss`, or else a gradient of ones.
        blocks: names of modules to treat; by default the elements of the outermost ModuleList or Sequential.
        reserve: bytes of the budget for what does not exist yet, such as an optimizer's states before its first step.
        move, recompute: whether the plan may move to the host and make again.

    Raises:
        MemoryError: no plan fits; the message says what the smallest peak is. The model is as before.
    """
    core = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model
    if not core.training:
        raise ValueError(f"fit_memory: {type(core).__name__} is in evaluation mode; call train() first")
    step = _Step(core, sample, loss)
    chosen = find_blocks(core) if blocks is None else {name: core.get_submodule(name) for name in blocks}
    limit = _device_budget(step.device) if budget is None else parse_bytes(budget)
    room = limit - parse_bytes(reserve, "reserve")
    with step.unchanged():
        measured = _measure(step, chosen, move, recompute)
        measured.request["budget_bytes"] = max(room, 0)
        plan = _library.call("activation_plan", request=measured.request)
        if not plan["fits"]:
            raise MemoryError(f"fit_memory: {type(core).__name__} does not fit: {plan['reason']}")
        fit = _apply(step, measured, plan, limit)
        try:
            fit.measured_peak = _peak(step, fit._session)
            fit.measured_ms = step.milliseconds()
        except BaseException:
            fit.remove()
            raise
    return fit


def _device_budget(device: torch.device) -> int:
    if device.type != "cuda":
        raise ValueError(f'fit_memory: give a budget, such as "4GiB": the memory of {device} is not the model\'s alone')
    return int(0.9 * torch.cuda.get_device_properties(device).total_memory)


@dataclass
class _Measured:
    request: dict[str, Any]
    traces: list[BlockTrace]
    kinds: list[int]  # by block of the chain
    numbers: list[list[int]]  # by kind: of the trace's storages, those that the plan knows
    blocks: dict[str, nn.Module]


def _trace(step: _Step, blocks: dict[str, nn.Module]) -> Tracing:
    meter = Meter(step.device, tensors_of(step.model, (step.args, step.kwargs)))
    tracing = Tracing(meter)
    with _installed(blocks, tracing.run), tracing:
        output = step.forward()
    del output
    tracing.finish()
    return tracing


def _measure(step: _Step, blocks: dict[str, nn.Module], move: bool, recompute: bool) -> _Measured:
    tracing = _trace(step, blocks)  # the first forward of a process measures the making of its kernels as well
    called = [trace.name for trace in tracing.traces]
    blocks = {name: block for name, block in blocks.items() if called.count(name) == 1}  # twice in a step: left alone
    tracing = _trace(step, blocks)
    traces = tracing.traces
    if not recompute:
        for trace in traces:
            for one in trace.made:
                one.can_recompute = False
    session = Session()
    again = {trace.name: trace.treatment(trace.everything_again()) for trace in traces}
    meter = Meter(step.device, tensors_of(step.model, (step.args, step.kwargs)))
    reading = session.listener = Reading(meter)
    with _installed(blocks, _runner(again, session)):
        with Counting(meter):
            step.run()
        session.listener = None
        again_ms = step.milliseconds()
    reads = reading.finish()
    kinds: dict[Any, int] = {}
    of_block = [
        kinds.setdefault((trace.signature(), tuple(map(tuple, one.numbers))), len(kinds))
        for trace, one in zip(traces, reads, strict=True)
    ]
    recomputed_us = 0.0
    described, numbers = [], []
    for kind in range(len(kinds)):
        members = [place for place, one in enumerate(of_block) if one == kind]
        times = [min(times) for times in zip(*(traces[place].microseconds for place in members), strict=True)]
        trace = traces[members[0]]
        numbers.append(trace.numbers())
        described.append(_describe(trace, reads[members[0]], numbers[-1], times, step.device))
        ran = {trace.made[number].op for number, how in trace.everything_again().items() if how == "recompute"}
        recomputed_us += len(members) * sum(times[op] for op in ran)
    to_host, to_device = measure_link(step.device) if move and len(traces) > 1 else (0.0, 0.0)
    request = {
        "kinds": described,
        "chain": [
            {"kind": kind, "forward_start": trace.start, "backward_start": one.start}
            for kind, trace, one in zip(of_block, traces, reads, strict=True)
        ],
        "between": reading.between,
        "outside": tracing.outside,
        "to_host": to_host,
        "to_device": to_device,
        "step_us": max(again_ms * 1e3 - recomputed_us, 0.0),
    }
    return _Measured(request, traces, of_block, numbers, blocks)


def _describe(
    trace: BlockTrace, reads: BlockReads, numbers: list[int], times: list[float], device: torch.device
) -> dict[str, Any]:
    place_of = {number: place for place, number in enumerate(numbers)}
    least = _SMALLEST_MOVE if device.type == "cuda" else 1
    activations = []
    for number in numbers:
        one = trace.made[number]
        activations.append(
            {
                "bytes": _rounded(one.bytes, device),
                "op": one.op,
                "dies": one.dies if one.dies >= 0 else len(trace.ops),
                "recompute_us": times[one.op] if one.op >= 0 else 0,
                "can_recompute": one.can_recompute,
                "can_move": one.can_move and one.bytes >= least,
                "inputs": [place_of[i] for i in one.inputs] if one.can_recompute else [],
                "reads": [event for event, read in enumerate(reads.numbers) if number in read],
            }
        )
    return {
        "activations": activations,
        "forward_us": sum(times),
        "backward_us": 2 * sum(times),  # as a rule: each product has two in backward
        "forward_bytes": trace.bytes,
        "backward_at": reads.at,
        "backward_greatest": reads.greatest,
    }


def _rounded(size: int, device: torch.device) -> int:
    return -(-size // 512) * 512 if device.type == "cuda" else size


def _runner(treatments: dict[str, BlockTreatment], session: Session) -> Callable[..., Any]:
    def run(name: str, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        return BlockCall(name, treatments[name], session).run(forward, args, kwargs)

    return run


def _apply(step: _Step, measured: _Measured, plan: dict[str, Any], budget: int) -> MemoryFit:
    slab = HostSlab(step.device)
    treatments: dict[str, BlockTreatment] = {}
    summary: dict[str, dict[str, int]] = {}
    for trace, kind, block in zip(measured.traces, measured.kinds, plan["blocks"], strict=True):
        how = dict(zip(measured.numbers[kind], block["treatments"], strict=True))
        summary[trace.name] = dict.fromkeys(("keep", "move", "recompute"), 0)
        for number, treatment in how.items():
            if treatment != "none":
                summary[trace.name][treatment] += trace.made[number].bytes
        if not any(treatment in ("move", "recompute") for treatment in how.values()):
            treatments[trace.name] = BlockTreatment()  # keeps everything: plain autograd does
            continue
        how = {number: treatment for number, treatment in how.items() if treatment != "none"}
        treatments[trace.name] = trace.treatment(how)
        for number, treatment in how.items():
            if treatment == MOVE:
                treatments[trace.name].slots[number] = slab.reserve(trace.made[number].bytes)
    session = Session()
    run = _runner(treatments, session)
    extra_ms = (plan["recompute_us"] + plan["stall_us"]) / 1e3
    fit = MemoryFit(
        plan=plan,
        budget=budget,
        blocks=list(measured.blocks),
        predicted_peak=int(plan["peak_bytes"]),
        measured_peak=0,
        everything_peak=int(plan["everything_bytes"]),
        predicted_ms=plan["step_us"] / 1e3,
        measured_ms=0.0,
        everything_ms=plan["step_us"] / 1e3 - extra_ms,
        slab_bytes=slab.size,
        treatments=summary,
        _modules=measured.blocks,
        _run=run,
        _session=session,
    )
    fit.install()
    return fit


def _peak(step: _Step, session: Session) -> int:
    """Of one step as it is installed."""
    meter = Meter(step.device, tensors_of(step.model, (step.args, step.kwargs)))
    if meter.is_cuda:
        step.run()  # the slab, and what else is made once
        meter.reset()
        step.run()
        return meter.greatest()
    session.listener = _Watch(meter)
    try:
        with Counting(meter):
            step.run()
    finally:
        session.listener = None
    return meter.greatest()
