"""Optimizers of the seeds whose states are in the host's memory: another's parameters and states, taken over."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn

from .adamw import AdamW
from .offload.pipeline import Offload, default_subgroup
from .offload.views import DEPTH


@dataclass(frozen=True)
class MemoryConfig:
    """Memory that states may take.

    Args:
        cpu_memory_limit_gb: of the host; more states than that are refused.
        gpu_memory_limit_gb: of the device, for states on their way through it: subgroups are made small enough.
        disk_cache_limit_gb: must be as it is; states are never on a disk.
        offload_threshold: the share of the device's memory that may be taken, states included, before states leave it.
        prefetch_threshold, max_concurrent_transfers: must be as they are; the plan decides about the order of copies.
        compression_ratio: must be as it is; `AdamW(state="compact")` is smaller.
        use_async_offloading: must be True.
    """

    cpu_memory_limit_gb: float = 32.0
    gpu_memory_limit_gb: float = 24.0
    disk_cache_limit_gb: float = 100.0
    offload_threshold: float = 0.8
    prefetch_threshold: float = 0.6
    max_concurrent_transfers: int = 4
    compression_ratio: float = 0.7
    use_async_offloading: bool = True

    def __post_init__(self) -> None:
        meant = ("cpu_memory_limit_gb", "gpu_memory_limit_gb", "offload_threshold")
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name not in meant and value != field.default:
                raise ValueError(f"MemoryConfig: {field.name} is {value}; only {field.default} is built, leave it out")
            if field.name in meant and not value > 0:
                raise ValueError(f"MemoryConfig: {field.name} is {value}; it must be positive")
        if self.offload_threshold > 1:
            raise ValueError(f"MemoryConfig: offload_threshold is {self.offload_threshold}; it is a share, at most 1")


@dataclass(frozen=True)
class PerformanceModel:
    """Rates that the plan takes instead of measuring them: bytes and elements by the second."""

    up: float
    down: float
    host_memory: float
    cpu: float
    device: float

    def __post_init__(self) -> None:
        for field in fields(self):
            if not getattr(self, field.name) > 0:
                raise ValueError(f"PerformanceModel: {field.name} is {getattr(self, field.name)}; it must be positive")


class _TakenOver(AdamW):
    """An AdamW over another's groups: the same dictionaries, so that its schedulers go on, and its states."""

    def __init__(self, optimizer: torch.optim.Optimizer, model: nn.Module, how: Offload | None) -> None:
        name = type(self).__name__
        if not isinstance(optimizer, torch.optim.AdamW | AdamW):
            raise TypeError(
                f"{name}: the optimizer is {type(optimizer).__name__}; it must be an AdamW, torch's or ours"
            )
        own = {id(parameter) for parameter in model.parameters()}
        if not all(id(parameter) in own for group in optimizer.param_groups for parameter in group["params"]):
            raise ValueError(f"{name}: the optimizer has parameters that are not the model's; give the model it trains")
        given = optimizer.defaults
        options = {
            key: given[key] for key in ("state", "state_dtype", "master_weights", "max_grad_norm") if key in given
        }
        options.setdefault("state_dtype", None)  # as torch's, the parameters' own
        # torch asks for several groups as dictionaries, and keeps them.
        super().__init__(optimizer.param_groups, lr=given["lr"], offload=how, **options)
        saved = "fp32" if isinstance(optimizer, torch.optim.AdamW) else given["state"]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter in optimizer.state:
                    self.state[parameter] = self._loaded(optimizer.state.pop(parameter), parameter, group, saved)


def _parameters(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]


def _subgroup(optimizer: torch.optim.Optimizer, gigabytes: float, least_groups: int, owner: str) -> int:
    """Elements of a subgroup so that those under way fit into the device's share, 12 bytes each."""
    elements = sum(parameter.numel() for parameter in _parameters(optimizer))
    fitting = int(gigabytes * 1e9 / (12 * DEPTH))
    if fitting < 1 << 16:
        raise ValueError(f"{owner}: {gigabytes} GB of the device hold {fitting} elements at a time; give it more")
    return max(min(default_subgroup(elements, 12), fitting, -(-elements // least_groups)), 1)


class DeepOptimizerStates(_TakenOver):
    """An AdamW whose states are in the host's memory, updated by CPU and GPU at once, in place of `optimizer`.

    `optimizer` gives its states away; its groups stay the same dictionaries, so that schedulers made for it go on.
    Parameters on the CPU are stepped there.

    Args:
        optimizer: torch.optim.AdamW or this package's.
        model: whose parameters it has.
        memory_config: limits; states stay on the device while they are below its threshold. None: they leave it.
        performance_model: rates for the plan; None: measured in the first step.
        num_groups: of how many subgroups a step has at least.
        enable_profiling: keeps the seconds of steps for `get_performance_stats`; steps wait for their end.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        model: nn.Module,
        memory_config: MemoryConfig | None = None,
        performance_model: PerformanceModel | None = None,
        num_groups: int = 4,
        enable_profiling: bool = True,
    ) -> None:
        if num_groups < 1:
            raise ValueError(f"DeepOptimizerStates: num_groups is {num_groups}; it must be positive")
        self.memory_config = memory_config or MemoryConfig()
        limit = self.memory_config.gpu_memory_limit_gb
        how: Offload | None = Offload(
            "interleave",
            _subgroup(optimizer, limit, num_groups, "DeepOptimizerStates"),
            rates=_rates(performance_model),
        )
        bytes_needed = sum(12 * parameter.numel() for parameter in _parameters(optimizer))
        if memory_config is not None and _fits_on_device(optimizer, bytes_needed, memory_config):
            how = None
        elif bytes_needed > self.memory_config.cpu_memory_limit_gb * 1e9:
            raise ValueError(
                f"DeepOptimizerStates: states take up to {bytes_needed / 1e9:.1f} GB, cpu_memory_limit_gb is "
                f"{self.memory_config.cpu_memory_limit_gb}; raise it, or take AdamW(state='compact')"
            )
        super().__init__(optimizer, model, how)
        self._seconds: list[float] | None = [] if enable_profiling else None

    def step(self, closure: Callable[[], Any] | None = None) -> dict[str, Any]:  # type: ignore[override]
        """One step. Returns {"loss": the closure's, "step_seconds": None without profiling}."""
        if self._seconds is None:
            return {"loss": super().step(closure), "step_seconds": None}
        begin = time.perf_counter()
        loss = super().step(closure)
        self._offloaded.finish()
        self._seconds.append(time.perf_counter() - begin)
        return {"loss": loss, "step_seconds": self._seconds[-1]}

    def get_performance_stats(self) -> dict[str, Any]:
        """Steps, their mean seconds, bytes on the host, and the plan's prediction and bound where there is a plan."""
        kept, states = self._seconds or [], self._offloaded.all()
        plans = [one.plan for one in states if one.plan is not None]
        return {
            "steps": len(kept),
            "mean_step_seconds": sum(kept) / len(kept) if kept else None,
            "host_bytes": sum(one.slabs.host_bytes() for one in states),
            "predicted_seconds": sum(plan["predicted_seconds"] for plan in plans) if plans else None,
            "bound_seconds": sum(plan["bound_seconds"] for plan in plans) if plans else None,
        }

    def optimize_memory_configuration(self) -> str:
        """Measures the machine again and plans anew; what `explain` then tells."""
        for states in self._offloaded.all():
            states.forget_rates()
        return self.explain()

    def cleanup(self) -> None:
        """Waits until every step is in the host's memory."""
        self._offloaded.finish()


class InterleaveOffloadingOptimizer(_TakenOver):
    """An AdamW whose states are in the host's memory, in place of `optimizer`; see `DeepOptimizerStates`.

    Args:
        optimizer, model: as `DeepOptimizerStates`.
        memory_limit_gb: of the device, for states on their way through it.
        cpu_offload: False: states stay with the parameters.
        disk_offload: must be False.
        auto_tune: the plan chooses the share of CPU and device; False: half each.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        model: nn.Module,
        memory_limit_gb: float = 24.0,
        cpu_offload: bool = True,
        disk_offload: bool = False,
        auto_tune: bool = True,
    ) -> None:
        name = "InterleaveOffloadingOptimizer"
        if disk_offload:
            raise ValueError(f"{name}: disk_offload is not built; states of the host's memory are cpu_offload=True")
        subgroup = _subgroup(optimizer, memory_limit_gb, 1, name)
        share = None if auto_tune else 0.5
        super().__init__(optimizer, model, Offload("interleave", subgroup, share) if cpu_offload else None)

    def get_stats(self) -> dict[str, Any]:
        """Bytes on the host, and what `explain` tells."""
        return {
            "host_bytes": sum(states.slabs.host_bytes() for states in self._offloaded.all()),
            "explanation": self.explain(),
        }


class CPUGPUHybridOptimizer(AdamW):
    """An AdamW of a model's parameters whose states are in the host's memory, updated by CPU and GPU at once.

    Args:
        optimizer_class: torch.optim.AdamW or this package's.
        model: whose parameters are trained.
        lr: the rate.
        cpu_ratio: the CPU's share of the parameters, without auto_balance.
        auto_balance: the plan chooses the shares.
        options: of `AdamW`.
    """

    def __init__(
        self,
        optimizer_class: type[torch.optim.Optimizer],
        model: nn.Module,
        lr: float = 1e-3,
        cpu_ratio: float = 0.5,
        auto_balance: bool = True,
        **options: Any,
    ) -> None:
        if not issubclass(optimizer_class, torch.optim.AdamW | AdamW):
            raise TypeError(f"CPUGPUHybridOptimizer: optimizer_class is {optimizer_class.__name__}; it must be AdamW")
        if not 0 <= cpu_ratio <= 1:
            raise ValueError(f"CPUGPUHybridOptimizer: cpu_ratio is {cpu_ratio}; it must be from 0 to 1")
        if issubclass(optimizer_class, torch.optim.AdamW):
            options.setdefault("state_dtype", None)
        share = None if auto_balance else 1 - cpu_ratio
        super().__init__(model.parameters(), lr=lr, offload=Offload("interleave", device_share=share), **options)


def _rates(model: PerformanceModel | None) -> dict[str, float] | None:
    return None if model is None else {field.name: getattr(model, field.name) for field in fields(model)}


def _fits_on_device(optimizer: torch.optim.Optimizer, needed: int, config: MemoryConfig) -> bool:
    devices = {parameter.device for parameter in _parameters(optimizer)}
    if any(device.type != "cuda" for device in devices):
        return False
    for device in devices:
        free, total = torch.cuda.mem_get_info(device)
        if total - free + needed > config.offload_threshold * total:
            return False
    return True
