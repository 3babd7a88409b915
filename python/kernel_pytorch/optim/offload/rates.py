"""What this machine moves and updates by the second, measured, and the core's plan of a step by these rates."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ... import _library
from .lanes import threads_of_cpu
from .slabs import Field, Slabs, host_array

_MOST_ELEMENTS = 1 << 26  # of a sample: more than caches hold, of states that do not fit them
_COPY_BYTES, _COPIES = 1 << 25, 16  # half a gigabyte each way, as far apart in memory as states are
_TURNS = 3
RATES = ("up", "down", "host_memory", "cpu", "device")

Update = Callable[[list[Tensor], list[Tensor], dict[str, list[Tensor]]], bool]


def bytes_of(fields: list[Field], dtype: torch.dtype) -> dict[str, dict[str, float]]:
    """Bytes per element of either way: over the link, and in the host's memory by link and CPU together."""
    states, weight = sum(field.bytes_each for field in fields), float(dtype.itemsize)
    has_master = any(field.name == "master" for field in fields)
    down = weight if has_master else 2 * weight  # the gradient, and the weight unless its master is on the host
    on_cpu = 2 * states + down + weight  # states read and written, what came down read, the weight written
    return {
        "on_device": {"up": states, "down": states, "host_memory": 2 * states},
        "on_cpu": {"up": weight, "down": down, "host_memory": on_cpu + down + weight},
    }


def plan(
    measured: dict[str, Any],
    fields: list[Field],
    dtype: torch.dtype,
    elements: int,
    subgroups: int,
    device_share: float | None,
) -> dict[str, Any]:
    """The core's plan. Its bound is of the best rates. Where the share is to be chosen and rates of the link beside so
    many threads of the CPU are known ("beside"), the plan is the one of them with the least prediction, since threads
    that take the memory's bandwidth keep the link waiting; "threads" says how many."""
    request = {
        "elements": elements,
        "subgroup_elements": elements / subgroups,
        "device_share": -1 if device_share is None else device_share,
        "rates": {name: measured[name] for name in RATES},
        **bytes_of(fields, dtype),
    }
    answer: dict[str, Any] = _library.call("offload_plan", request=request)
    if device_share is not None or not measured.get("beside"):
        return answer
    unlimited = {"host_memory": 1e18, "device": measured["device"]}  # what memory gives is in the others' rates
    ways = []
    for beside in measured["beside"]:
        rates = {**unlimited, **{name: beside[name] for name in ("up", "down", "cpu")}}
        ways.append(
            {**_library.call("offload_plan", request={**request, "rates": rates}), "threads": beside["threads"]}
        )
    best = min(ways, key=lambda way: float(way["predicted_seconds"]))
    bound = {name: answer[name] for name in ("bound_seconds", "bound_share", "limit")}
    reason = (
        f"{best['on_device']} of {best['subgroups']} subgroups on the device beside {best['threads']} threads of the "
        f"CPU: {best['predicted_seconds'] * 1e3:.3f} ms predicted, bound {answer['bound_seconds'] * 1e3:.3f} ms, "
        f"limited by {answer['limit']}"
    )
    return {**best, **bound, "reason": reason}


class _Sample:
    """States, weights and gradients to time updates on."""

    def __init__(self, fields: list[Field], dtype: torch.dtype, device: torch.device, elements: int) -> None:
        parameter = host_array(dtype, elements, None).fill_(1)
        slabs = Slabs([parameter], fields, elements, pinned=False)
        self.parameter = parameter.to(device)
        self.gradient = torch.full_like(self.parameter, 1e-3)
        self.states = {name: [view.to(device)] for name, view in slabs.views(parameter).items()}

    def step(self, update: Update) -> None:
        update([self.parameter], [self.gradient], self.states)


class _Link:
    """Copies of pinned memory to the device and back, both at once."""

    def __init__(self, device: torch.device) -> None:
        self.host = [host_array(torch.uint8, _COPIES * _COPY_BYTES, self).view(_COPIES, _COPY_BYTES) for _ in range(2)]
        self.device = [torch.zeros(_COPY_BYTES, dtype=torch.uint8, device=device) for _ in range(2)]
        self.streams = [torch.cuda.Stream(device) for _ in range(2)]  # type: ignore[no-untyped-call]
        torch.cuda.synchronize(device)

    def start(self, turns: int) -> list[list[torch.cuda.Event]]:
        """For each way marks before the first copy and after each."""
        marks = []
        for way, stream in enumerate(self.streams):
            with torch.cuda.stream(stream):
                passed = [_mark(stream)]
                for turn in range(turns):
                    there, here = self.device[way], self.host[way][turn % _COPIES]
                    (there if way == 0 else here).copy_(here if way == 0 else there, non_blocking=True)
                    passed.append(_mark(stream))
                marks.append(passed)
        return marks

    @staticmethod
    def rates(marks: list[list[torch.cuda.Event]]) -> list[float]:
        """Of all copies."""
        for passed in marks:
            passed[-1].synchronize()
        return _Link.rates_so_far(marks)

    @staticmethod
    def rates_so_far(marks: list[list[torch.cuda.Event]]) -> list[float]:
        """Of the copies that have ended by now."""
        rates = []
        for passed in marks:
            ended = sum(mark.query() for mark in passed[1:])  # type: ignore[no-untyped-call]
            seconds = passed[0].elapsed_time(passed[ended]) * 1e-3 if ended else float("inf")
            rates.append(ended * _COPY_BYTES / seconds)
        return rates


def _mark(stream: torch.cuda.Stream) -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record(stream)
    return event


def measure(
    device: torch.device, dtype: torch.dtype, fields: list[Field], elements: int, update: Update
) -> dict[str, Any]:
    """Rates of the plan: bytes of the link both ways at once and of the host's memory, elements of both processors; and
    "beside", those of link and CPU at the same time for some numbers of threads.

    `elements` is how many a step has. Of several turns the best counts: what a bound is made of must not be exceeded.
    """
    elements = min(elements, _MOST_ELEMENTS)
    sample, link = _Sample(fields, dtype, torch.device("cpu"), elements), _Link(device)
    sample.step(update)
    alone = min(_seconds(lambda: sample.step(update)) for _ in range(_TURNS))
    link.rates(link.start(1))
    up, down = (max(rates) for rates in zip(*(link.rates(link.start(_COPIES)) for _ in range(_TURNS)), strict=True))
    bytes_each = bytes_of(fields, dtype)["on_cpu"]
    by_cpu = (bytes_each["host_memory"] - bytes_each["up"] - bytes_each["down"]) * elements
    threads, together, beside = torch.get_num_threads(), [], []
    for fewer in sorted({threads, *(max(threads * eighths // 8, 1) for eighths in (2, 3, 4, 5, 6, 7))}):
        turns = max(round(1.5 * alone * threads / fewer * up / _COPY_BYTES), 1)
        taken = []
        with threads_of_cpu(fewer):
            for _ in range(_TURNS):
                marks = link.start(turns)
                seconds = _seconds(lambda: sample.step(update))
                taken.append((seconds, *link.rates_so_far(marks)))  # while the CPU worked: alone the link is faster
                link.rates(marks)
        together += [by_cpu / seconds + sum(by_link) for seconds, *by_link in taken]
        seconds, *by_link = sorted(taken)[_TURNS // 2]
        beside.append({"threads": fewer, "up": by_link[0], "down": by_link[1], "cpu": elements / seconds})
    return {
        "up": up,
        "down": down,
        "host_memory": max(together),
        "cpu": elements / alone,
        "device": elements / _device_seconds(_Sample(fields, dtype, device, elements), update),
        "beside": [one for one in beside if one["up"] > 0 and one["down"] > 0],
    }


def _seconds(run: Callable[[], object]) -> float:
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin


def _device_seconds(sample: _Sample, update: Update) -> float:
    sample.step(update)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    begin.record()
    for _ in range(_TURNS):
        sample.step(update)
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) * 1e-3 / _TURNS
