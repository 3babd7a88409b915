"""Which schedule to take: asks the plan in C++ (kernel_pytorch/plan/context_parallel_plan.h), which says why."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from ... import _library

# Default rates of attention, of a link in each direction and of memory, for one device of a kind without measurements.
_RATES = {
    "cuda": {"flops_per_second": 6e14, "link_bytes_per_second": 2e11, "memory_bytes_per_second": 3.5e12},
    "cpu": {"flops_per_second": 5e10, "link_bytes_per_second": 2e9, "memory_bytes_per_second": 1e10},
}


@dataclasses.dataclass(frozen=True)
class ContextParallelPlan:
    """The schedule, why it was chosen, and the cost of each: us, work_us, exposed_us, sent_bytes, obstacle and more."""

    schedule: str
    reason: str
    schedules: list[dict[str, Any]]

    def best_of(self, names: tuple[str, ...]) -> str:
        """The fastest possible one of these."""
        possible = [one for one in self.schedules if one["schedule"] in names and not one["obstacle"]]
        if not possible:
            reasons = "; ".join(f"{one['schedule']}: {one['obstacle']}" for one in self.schedules)
            raise ValueError(f"context parallel plan: none of {', '.join(names)} is possible; {reasons}")
        return str(min(possible, key=lambda one: one["us"])["schedule"])


def plan_context_parallel(
    members: int,
    sequence: int,
    heads: int,
    head_dim: int,
    *,
    key_heads: int | None = None,
    batch: int = 1,
    causal: bool = False,
    window: int = -1,
    backward: bool = False,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cuda",
    **rates: float,
) -> ContextParallelPlan:
    """How `members` devices share attention of a whole `sequence`.

    Args:
        window: keys that a query sees on each side that it sees; -1 is all.
        backward: whether a backward follows.
        device: whose usual rates are taken where `rates` names no better: flops_per_second of attention,
            link_bytes_per_second, memory_bytes_per_second, message_us, and free_bytes of memory.
    """
    usual = _RATES.get(torch.device(device).type, _RATES["cuda"])
    request = {
        "members": members,
        "batch": batch,
        "sequence": sequence,
        "heads": heads,
        "key_heads": key_heads or heads,
        "size": head_dim,
        "value_size": head_dim,
        "element_bytes": dtype.itemsize,
        "causal": causal,
        "window": window,
        "backward": backward,
        **usual,
        **rates,
    }
    return ContextParallelPlan(**_library.call("context_parallel_plan", request=request))
