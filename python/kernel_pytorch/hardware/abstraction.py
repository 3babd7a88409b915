"""One object for "this machine": puts a model on a device, makes it faster there, and says what fits."""

from __future__ import annotations

import functools
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from .. import _library
from .. import _torch as _torch  # first: it says what is missing where torch is missing or old
from . import detect_available_devices, device_info
from .memory import MemoryEstimate, dry_run, guess_inputs, with_batch

import torch  # isort: skip
from torch import Tensor, nn

__all__ = ["HardwareAbstractionLayer"]

_RESERVE = 0.1  # of the memory, for fragments and libraries
_LAUNCH_US = {"cuda": 5.0, "cpu": 3.0}  # of an operation whatever its size


class HardwareAbstractionLayer:
    """Models on the devices of this machine.

    Where `sample_inputs` (a tensor, tuple or dict with the batch first) are not given, one sample is guessed from the
    model's first layer: 128 tokens or positions, an image of 224 x 224.

    Args:
        target_devices: in order of preference; None takes what is there, CUDA first.
    """

    def __init__(self, target_devices: Sequence[torch.device | str] | None = None) -> None:
        if target_devices is None:
            found = detect_available_devices()
            target_devices = [*found["cuda"], *found["cpu"]]
        elif not target_devices:
            warnings.warn("HardwareAbstractionLayer: no target devices were given; the CPU is used", stacklevel=2)
            target_devices = ["cpu"]
        self.target_devices = [torch.device(device) for device in target_devices]
        self.device = self.target_devices[0]
        device_info(self.device)  # raises, with the reason, for a device that is not there
        self.report: Any = None  # of the latest optimize_for_hardware
        self.batch_reason = ""  # of the latest get_optimal_batch_size

    def optimize_for_hardware(
        self, model: nn.Module, sample_inputs: Any = None, *, goal: str | None = None, budget_seconds: float = 60.0
    ) -> nn.Module:
        """The same model on the first target device; with sample inputs also optimized for it.

        With them it is kernel_pytorch.optimize (goal "train" for a model in training mode, else "inference"), whose
        report is left at `.report` and which kernel_pytorch.restore undoes. Without them nothing can be verified or
        measured: the model is moved, and that is all.
        """
        model = model.to(self.device)
        self.report = None
        if sample_inputs is None:
            return model
        from .._optimize.optimize import optimize

        inputs = torch.utils._pytree.tree_map_only(Tensor, lambda tensor: tensor.to(self.device), sample_inputs)
        result = optimize(
            model, inputs, goal=goal or ("train" if model.training else "inference"), budget_seconds=budget_seconds
        )
        self.report = result.report
        return result.model

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

        Powers of two to 64, then multiples of 64. The throughput is a model: the step's operations at a fixed time
        each, its flops at the rate of a large product, which is measured once. `batch_reason` says what decided.

        Raises:
            ValueError: not even one sample fits.
        """
        options: dict[str, Any] = {"training": training, "optimizer": optimizer, "loss": loss}
        capacity = device_info(self.device).memory_bytes
        if memory_limit_gb is not None:
            capacity = min(capacity, int(memory_limit_gb * 1e9))
        dtype = next((parameter.dtype for parameter in model.parameters()), torch.float32)
        low, high = (_Point(batch, self.memory_estimate(model, batch, sample_inputs, **options)) for batch in (2, 6))
        rate = _flops_per_second(self.device, dtype)
        sample_us = max(high.estimate.flops - low.estimate.flops, 0.0) / 4 / rate * 1e6
        fixed_us = low.estimate.operations * _LAUNCH_US.get(self.device.type, 5.0)
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


@dataclass(frozen=True)
class _Point:
    batch: int
    estimate: MemoryEstimate


@functools.cache
def _flops_per_second(device: torch.device, dtype: torch.dtype) -> float:
    """Of a large product, by the median of five; measured once, so that answers do not change from call to call."""
    n = 4096 if device.type == "cuda" else 384
    kind = dtype if dtype.is_floating_point else torch.float32
    a = torch.randn(n, n, device=device).to(kind)
    times = []
    for _ in range(6):
        _wait(device)
        begin = time.perf_counter()
        torch.matmul(a, a)
        _wait(device)
        times.append(time.perf_counter() - begin)
    return 2.0 * n**3 / sorted(times[1:])[2]


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
