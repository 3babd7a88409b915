"""Whose work a GPU's kernels do: bytes and operations are counted by op, times by kernel, and the profiler links both.

An op's cost goes to the kernel it spends the longest in. The k-th call of an op in the profile is the k-th that was
counted, since both are of the same run. A kernel gets a cost only if every one of its calls has an owner: half a cost
would put it too low on the roofline.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

__all__ = ["costs_by_kernel", "outermost", "total_of"]

Total = tuple[int, "float | None", "float | None"]  # calls, bytes, operations


def total_of(calls: list[tuple[float, float]]) -> Total:
    """The total of all calls of an op."""
    return len(calls), sum(moved for moved, _ in calls), sum(flops for _, flops in calls)


def costs_by_kernel(events: Iterable[Any], by_op: Mapping[str, list[tuple[float, float]]]) -> dict[str, Total]:
    """From the profiler's events and the costs of each op's calls, the cost of each kernel whose calls all have one."""
    owners, launched = _kernels_of_calls(events, by_op)
    sums: dict[str, tuple[int, float, float]] = {}
    for name, calls in owners.items():
        if len(calls) != len(by_op[name]):
            continue  # not the run that was counted
        for kernels, (moved, flops) in zip(calls, by_op[name]):
            if kernels:
                longest = max(kernels, key=lambda kernel: kernels[kernel])
                count, all_bytes, all_flops = sums.get(longest, (0, 0.0, 0.0))
                sums[longest] = (count + 1, all_bytes + moved, all_flops + flops)
    return {kernel: total for kernel, total in sums.items() if total[0] == launched[kernel]}


def _kernels_of_calls(
    events: Iterable[Any], by_op: Mapping[str, Any]
) -> tuple[dict[str, list[dict[str, float]]], Counter[str]]:
    """For each counted op its calls in order, each with microseconds by kernel; and how often each kernel ran."""
    hosts = sorted((event for event in events if event.device_type.name == "CPU"), key=lambda e: e.time_range.start)
    calls: dict[int, dict[str, float]] = {}
    owners: dict[str, list[dict[str, float]]] = {}
    for event in hosts:
        if event.name in by_op and outermost(event.cpu_parent, by_op) is None:
            calls[id(event)] = {}
            owners.setdefault(event.name, []).append(calls[id(event)])
    launched: Counter[str] = Counter()
    for event in hosts:
        owner = outermost(event, by_op)
        known = set() if event.cpu_parent is None else {(k.name, k.duration) for k in event.cpu_parent.kernels}
        for kernel in event.kernels:
            if (kernel.name, kernel.duration) in known:
                continue  # of an event of the profiler's own inside the op, which shows the op's kernel again
            launched[kernel.name] += 1
            if owner is not None:
                kernels = calls[id(owner)]
                kernels[kernel.name] = kernels.get(kernel.name, 0.0) + kernel.duration
    return owners, launched


def outermost(event: Any, by_op: Mapping[str, Any]) -> Any:
    """The outermost op around the event that was counted: what is inside it is its own business."""
    found = None
    while event is not None:
        if event.name in by_op:
            found = event
        event = event.cpu_parent
    return found
