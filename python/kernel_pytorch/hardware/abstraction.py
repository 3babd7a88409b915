"""One object for "this machine": puts a model on a device, makes it faster there, and says what fits."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from .. import _library
from .. import _torch as _torch  # first: it says what is missing where torch is missing or old
from .._devices import has_amd_kernels
from . import detect_available_devices, device_info
from .memory import MemoryEstimate, dry_run, guess_inputs, with_batch
from .throughput import StepTime, rates_of, step_time

import torch  # isort: skip
from torch import Tensor, nn

__all__ = ["HardwareAbstractionLayer"]

_RESERVE = 0.1  # of the memory, for fragments and libraries
_FEW, _MORE = 2, 6  # samples of the two steps that sizes are learned from


class HardwareAbstractionLayer:
    """Models on the devices of this machine.

    Where `sample_inputs` (a tensor, tuple or dict with the batch first) are not given, one sample is guessed from the
    model's first layer: 128 tokens or positions, an image of 224 x 224.

    Args:
        target_devices: a device, or several in order of preference, as torch.device or text; None takes all that
            detect_available_devices() finds, in its order.
    """

    def __init__(self, target_devices: torch.device | str | Sequence[torch.device | str] | None = None) -> None:
        found = [device for devices in detect_available_devices().values() for device in devices]
        if target_devices is None:
            wanted: Sequence[torch.device | str] = found
        elif isinstance(target_devices, (str, torch.device)):
            wanted = [target_devices]
        else:
            wanted = target_devices
            if not wanted:
                warnings.warn("HardwareAbstractionLayer: no target devices were given; the CPU is used", stacklevel=2)
                wanted = ["cpu"]
        self.target_devices = [_present(torch.device(device), found) for device in wanted]
        self.device = self.target_devices[0]
        self.report: Any = (
            None  # of the latest optimize_for_hardware; None until the model's first call where that is due
        )
        self.batch_reason = ""  # of the latest get_optimal_batch_size

    def __repr__(self) -> str:
        return f"HardwareAbstractionLayer({[str(device) for device in self.target_devices]})"

    @property
    def has_our_kernels(self) -> bool:
        """Whether the library computes on the first target device; elsewhere torch's own kernels do."""
        is_rocm = self.device.type == "cuda" and getattr(torch.version, "hip", None)
        return self.device.type in ("cpu", "cuda") and (not is_rocm or has_amd_kernels())

    def optimize_for_hardware(
        self, model: nn.Module, sample_inputs: Any = None, *, goal: str | None = None, budget_seconds: float = 60.0
    ) -> nn.Module:
        """The same model on the first target device, optimized for it by kernel_pytorch.optimize.

        With sample inputs that happens now. Without them it happens at the model's first call, for that call's
        arguments: it takes up to about `budget_seconds` more, and then the model answers. `.report` is the report of
        either, and kernel_pytorch.restore undoes it. On a device without kernels of this library (see
        has_our_kernels) the model is moved and torch's own run, which a warning says.

        Args:
            goal: "train" or "inference"; None takes "train" for a model in training mode (and, at a first call, with
                gradients enabled).
        """
        from .._optimize.first_call import optimize_at_first_call  # slow to load, and only needed here
        from .._optimize.optimize import optimize, restore  # slow to load, and only needed here

        model = restore(model).to(self.device)
        self.report = None
        if not self.has_our_kernels:
            warnings.warn(
                f"HardwareAbstractionLayer: there are no kernels of kernel_pytorch for {self.device}; the model was "
                f"moved there and runs on torch's own",
                stacklevel=2,
            )
            return model
        if sample_inputs is None:
            return optimize_at_first_call(model, budget_seconds=budget_seconds, goal=goal, then=self._keep_report)
        inputs = torch.utils._pytree.tree_map_only(Tensor, lambda tensor: tensor.to(self.device), sample_inputs)
        result = optimize(
            model, inputs, goal=goal or ("train" if model.training else "inference"), budget_seconds=budget_seconds
        )
        self._keep_report(result)
        return result.model

    def _keep_report(self, result: Any) -> None:
        self.report = result.report

    def estimate_memory_usage(
        self,
        model: nn.Module,
        batch_size: int,
        sample_inputs: Any = None,
        *,
        training: bool | None = None,
        optimizer: str = "adamw",
        loss: Callable[[Any], Tensor] | None = None,
    ) -> float:
        """Gigabytes (1e9 bytes) that a step needs at its peak; see memory_estimate."""
        estimate = self.memory_estimate(
            model, batch_size, sample_inputs, training=training, optimizer=optimizer, loss=loss
        )
        return estimate.peak_bytes / 1e9

    def memory_estimate(
        self,
        model: nn.Module,
        batch_size: int,
        sample_inputs: Any = None,
        *,
        training: bool | None = None,
        optimizer: str = "adamw",
        loss: Callable[[Any], Tensor] | None = None,
    ) -> MemoryEstimate:
        """What a step needs at its peak and what that is made of, by a run without data.

        Args:
            training: forward, backward and optimizer step (parameters, gradients, optimizer state, activations);
                None asks the model's mode. Without it: forward alone.
            optimizer: "none", "sgd", "momentum", "rmsprop", "adagrad", "adam" or "adamw".
            loss: from the output to a scalar; by default every floating-point output gets a gradient of its size.
        """
        if batch_size < 1:
            raise ValueError(f"memory: batch_size is {batch_size}; it must be at least 1")
        inputs = sample_inputs if sample_inputs is not None else guess_inputs(model)
        return dry_run(
            model,
            with_batch(inputs, batch_size),
            training=model.training if training is None else training,
            optimizer=optimizer,
            loss=loss,
            device=self.device,
        )

    def get_optimal_batch_size(
        self,
        model: nn.Module,
        sample_inputs: Any = None,
        *,
        training: bool | None = None,
        optimizer: str = "adamw",
        loss: Callable[[Any], Tensor] | None = None,
        memory_limit_gb: float | None = None,
    ) -> int:
        """The batch that fits into the device's memory (a tenth is left free) and beyond which throughput hardly grows.

        Powers of two to 64, then multiples of 64. The throughput is a model of the step's operations, each by its
        products and bytes and the device's description (see throughput.py): the same question has the same answer.
        `batch_reason` says what decided. On a device that the library cannot describe memory alone decides.

        Raises:
            ValueError: not even one sample fits.
        """
        options: dict[str, Any] = {"training": training, "optimizer": optimizer, "loss": loss}
        capacity = _memory_bytes(self.device)
        if memory_limit_gb is not None:
            capacity = min(capacity, int(memory_limit_gb * 1e9))
        low, high = (
            _Point(batch, self.memory_estimate(model, batch, sample_inputs, **options)) for batch in (_FEW, _MORE)
        )
        step = self._step_time(model, low.estimate, high.estimate)
        if step is not None and step.sample_us <= 0:
            self.batch_reason = "nothing that the step computes grows with the batch"
            return 1
        fixed_us, sample_us = (0.0, 0.0) if step is None else (step.fixed_us, step.sample_us)
        usable = (1 - _RESERVE) * capacity
        is_above = high.estimate.peak_bytes > usable
        # The peak is a convex function of the batch (what does not grow with it may hide what does): the line through
        # two points is above it between them and below it beyond, so an answer is run before it is believed.
        for _ in range(10):
            plan = _library.call(
                "batch_plan",
                request={
                    "first_batch": low.batch,
                    "second_batch": high.batch,
                    "first_bytes": low.estimate.peak_bytes,
                    "second_bytes": max(high.estimate.peak_bytes, low.estimate.peak_bytes),
                    "capacity_bytes": capacity,
                    "reserve": _RESERVE,
                    "fixed_us": fixed_us,
                    "sample_us": sample_us,
                },
            )
            self.batch_reason = str(plan["reason"])
            batch = int(plan["batch"])
            if batch < 1:
                break
            point = _Point(batch, self.memory_estimate(model, batch, sample_inputs, **options))
            fits = point.estimate.peak_bytes <= usable
            if fits and (not is_above or batch <= low.batch):
                return batch
            if fits:
                low = point
            elif batch <= low.batch:
                self.batch_reason = f"one sample needs {point.estimate.peak_bytes / 1e9:.2f} GB"
                break
            else:
                high, is_above = point, True
        if low.estimate.peak_bytes <= usable:
            return low.batch
        raise ValueError(f"get_optimal_batch_size: {self.batch_reason}")

    def _step_time(self, model: nn.Module, few: MemoryEstimate, more: MemoryEstimate) -> StepTime | None:
        if not self.has_our_kernels:
            return None
        sizes = [parameter.element_size() for parameter in model.parameters() if parameter.is_floating_point()]
        rates = rates_of(device_info(self.device), max(sizes, default=4))
        return step_time(rates, (_FEW, _MORE), few.work, more.work, few.update)


@dataclass(frozen=True)
class _Point:
    batch: int
    estimate: MemoryEstimate


def _present(device: torch.device, found: Sequence[torch.device]) -> torch.device:
    """The device, with its number; raises, with what there is, for one that is not there."""
    if device.type == "cpu":
        return torch.device("cpu")
    index = device.index or 0
    for known in found:
        if known.type == device.type and (known.index or 0) == index:
            return known
    if device.type == "cuda":
        device_info(device)  # raises, with the reason
    names = ", ".join(str(known) for known in found)
    raise _library.KernelPyTorchError(f"no device {str(device)!r} here (torch can use {names})", "device")


def _memory_bytes(device: torch.device) -> int:
    if device.type == "cpu" or (device.type == "cuda" and not getattr(torch.version, "hip", None)):
        return device_info(device).memory_bytes
    if device.type == "mps":
        return int(torch.mps.recommended_max_memory())
    module = torch.get_device_module(device)
    if not hasattr(module, "get_device_properties"):
        raise ValueError(f"get_optimal_batch_size: torch does not tell the memory of {device}; give memory_limit_gb")
    return int(module.get_device_properties(device).total_memory)
