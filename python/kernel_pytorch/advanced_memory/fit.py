"""Training inside a budget of memory: `fit_memory` measures a step, asks the plan in C++ which activations to keep, to
make again or to move to the host, applies it to the model's blocks and says what it costs."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from .. import _library
from ._activations import MOVE, BlockCall, BlockTreatment, Session
from ._host import HostSlab
from ._meter import Counting, Meter, tensors_of
from ._request import Measured, measure_step, runner
from ._step import InstalledForward, Step, bytes_text, find_blocks, named_blocks, parse_bytes

__all__ = ["MemoryFit", "fit_memory"]


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
    float8_error: float = 0.0  # the largest relative error of a tensor that is stored as codes, on the sample
    treatments: dict[str, dict[str, int]] = field(default_factory=dict)  # block: treatment: bytes
    _modules: dict[str, nn.Module] = field(default_factory=dict, repr=False)
    _run: Callable[..., Any] | None = field(default=None, repr=False)
    _installed: list[InstalledForward] = field(default_factory=list, repr=False)
    _session: Session = field(default_factory=Session, repr=False)

    @property
    def other_paths(self) -> list[str]:
        """Blocks whose forward was not the measured one at some call; from there on they keep everything."""
        return sorted(self._session.other_paths)

    def install(self) -> None:
        if not self._installed and self._run is not None:
            self._installed = [InstalledForward(block, name, self._run) for name, block in self._modules.items()]

    def remove(self) -> None:
        for installed in self._installed:
            installed.remove()
        self._installed = []

    def __enter__(self) -> MemoryFit:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def __str__(self) -> str:
        text = bytes_text
        return (
            f"fit_memory: {len(self.blocks)} blocks, budget {text(self.budget)}. {self.plan['reason']}\n"
            f"  peak: predicted {text(self.predicted_peak)}, measured {text(self.measured_peak)} "
            f"({100 * (self.measured_peak / self.predicted_peak - 1):+.1f} %); everything kept "
            f"{text(self.everything_peak)}\n"
            f"  step: predicted {self.predicted_ms:.2f} ms, measured {self.measured_ms:.2f} ms; everything kept "
            f"{self.everything_ms:.2f} ms (predicted); {text(self.slab_bytes)} of host memory"
            + (f"\n  FP8: stored tensors are off by up to {self.float8_error:.2%}" if self.float8_error else "")
        )


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
    gradients: str = "kept",
    move: bool = True,
    recompute: bool = True,
    float8: bool = False,
) -> MemoryFit:
    """Makes training steps of `model` fit into `budget` bytes of its device, at the least loss of time.

    A step is measured on the sample, block by block; the plan says which tensors each block keeps for backward, which
    it makes again by running their op once more, and which it moves to pinned host memory and back under the work of
    its neighbours. Gradients are those of the plain model. Parameters, hooks and the state_dict are untouched; under
    no_grad nothing changes. A step is forward and backward: what an optimizer's step needs besides goes into `reserve`.
    Give a model that is in DistributedDataParallel, or wrap it afterwards.

    Args:
        model: on the device that it trains on, in training mode.
        sample: as the model is called: a tensor, a tuple or a dict of arguments. Peaks are those of its shape.
        budget: bytes, or text such as "40GiB", for everything on the device, parameters and optimizer states that exist
            included; None: 90 % of the device's memory. On a CPU what counts are the tensors that ops return.
        loss: from the model's output to a scalar; by default the output's `loss`, or else a gradient of ones.
        blocks: names of modules to treat; by default the elements of the outermost ModuleList or Sequential.
        reserve: bytes of the budget for what does not exist yet, such as an optimizer's states before its first step.
        gradients: "kept" until the end of the step, or "released", as optim.release_gradients does: none outlives the
            step of its parameter.
        move, recompute: whether the plan may move to the host and make again.
        float8: whether large tensors that cost much to make again may be stored as E4M3 codes with a scale for 128
            numbers. Gradients are then no longer those of the plain model; `float8_error` says by how much the stored
            tensors are off.

    Raises:
        MemoryError: no plan fits; the message says what the smallest peak is. The model is as before.

    Warns where the measured peak is above the budget all the same.
    """
    core = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model
    if not core.training:
        raise ValueError(f"fit_memory: {type(core).__name__} is in evaluation mode; call train() first")
    if gradients not in ("kept", "released"):
        raise ValueError(f'fit_memory: gradients is "{gradients}"; it must be "kept" or "released"')
    if gradients == "released" and core is not model:
        raise ValueError('fit_memory: gradients="released" with DistributedDataParallel, which reduces them afterwards')
    step = Step(core, sample, loss, gradients == "released")
    chosen = find_blocks(core) if blocks is None else named_blocks(core, blocks)
    limit = _device_budget(step.device) if budget is None else parse_bytes(budget)
    room = limit - parse_bytes(reserve, "reserve")
    with step.unchanged():
        measured = measure_step(step, chosen, move, recompute, float8)
        measured.request["budget_bytes"] = max(room, 0)
        plan = _library.call("activation_plan", request=measured.request)
        if not plan["fits"]:
            raise MemoryError(f"fit_memory: {type(core).__name__} does not fit: {plan['reason']}")
        fit = _apply(step, measured, plan, limit)
        try:
            fit.measured_peak = _peak(step, fit._session)
            fit.measured_ms = step.milliseconds()
            fit.float8_error = _float8_error(step, fit._session) if float8 else 0.0
        except BaseException:
            fit.remove()
            raise
    if fit.measured_peak > room:
        warnings.warn(
            f"fit_memory: the step takes {bytes_text(fit.measured_peak)}, predicted were "
            f"{bytes_text(fit.predicted_peak)}, and the budget leaves {bytes_text(room)}. Blocks that are not called "
            "one after the other are not foreseen; give a smaller budget",
            stacklevel=2,
        )
    return fit


def _device_budget(device: torch.device) -> int:
    if device.type != "cuda":
        raise ValueError(f'fit_memory: give a budget, such as "4GiB": the memory of {device} is not the model\'s alone')
    return int(0.9 * torch.cuda.get_device_properties(device).total_memory)


def _apply(step: Step, measured: Measured, plan: dict[str, Any], budget: int) -> MemoryFit:
    slab = HostSlab(step.device)
    treatments: dict[str, BlockTreatment] = {}
    summary: dict[str, dict[str, int]] = {}
    for trace, kind, block in zip(measured.traces, measured.kinds, plan["blocks"], strict=True):
        how = dict(zip(measured.numbers[kind], block["treatments"], strict=True))
        summary[trace.name] = dict.fromkeys(("keep", "move", "recompute"), 0)
        for number, treatment in how.items():
            if treatment != "none":
                summary[trace.name][treatment] += trace.size_of(number)
        if not any(treatment in ("move", "recompute") for treatment in how.values()):
            treatments[trace.name] = BlockTreatment()  # keeps everything: plain autograd does
            continue
        how = {number: treatment for number, treatment in how.items() if treatment != "none"}
        treatments[trace.name] = trace.treatment(how)
        for number, treatment in how.items():
            if treatment == MOVE:
                treatments[trace.name].slots[number] = slab.reserve(trace.stored_bytes(number))
    session = Session()
    run = runner(treatments, session)
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


def _float8_error(step: Step, session: Session) -> float:
    session.errors = []
    step.run()
    errors, session.errors = session.errors, None
    return max(errors, default=0.0)


def _peak(step: Step, session: Session) -> int:
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
