"""AdamW with its states in the host's memory, against naive ways in torch: one step of 268 million bf16 weights with
fp32 masters and averages (12 bytes each on the host), in 200 tensors of uneven size.

    python benchmarks/torch_offload.py [--parameters N] [--turns N] [--output FILE]

Times are of a whole step, from gradients that are there to states that are back in the host's memory. `share` is the
plan's bound, from rates measured on this machine, over the time. naive, CPU step: gradients are copied to pageable
memory, torch's fused AdamW steps fp32 masters there, weights are copied back. naive, states moved: each tensor's states
are copied to the GPU, stepped there by torch's fused AdamW and copied back. `timelines` of the file: one more step of
each way under torch's profiler, when each resource begins, when it ends and how long it works, in milliseconds.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from kernel_pytorch.optim import AdamW, Offload
from kernel_pytorch.optim.offload.pipeline import OffloadedStates
from table import print_and_store
from torch_norms import describe_machine
from torch_optim import make_parameters, sizes_on

Step = Callable[[], None]


class Ours:
    """Weights and states of one way."""

    def __init__(self, sizes: list[int], device: torch.device, mode: str, **options: Any) -> None:
        self.parameters = make_parameters(sizes, torch.bfloat16, device)
        self.optimizer = AdamW(self.parameters, offload=Offload(mode), **options)

    @property
    def states(self) -> OffloadedStates:
        (states,) = self.optimizer._offloaded.all()
        return states

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer._offloaded.finish()

    def plan(self) -> dict[str, Any]:
        states, group = self.states, self.optimizer.param_groups[0]
        plan = states.make_plan(self.optimizer._update_of(group, self.parameters[0], (None, None, None)))
        taken = states.on_device if states.on_device is not None else plan["on_device"]
        return {**plan, "rates": states.rates, "host_bytes": states.slabs.host_bytes(), "taken_by_device": taken}


def naive_cpu_step(sizes: list[int], device: torch.device) -> Step:
    parameters = make_parameters(sizes, torch.bfloat16, device)
    masters = [torch.nn.Parameter(parameter.detach().float().cpu()) for parameter in parameters]
    optimizer = torch.optim.AdamW(masters, fused=True)

    def step() -> None:
        for parameter, master in zip(parameters, masters, strict=True):
            assert parameter.grad is not None
            master.grad = parameter.grad.cpu().float()
        optimizer.step()
        for parameter, master in zip(parameters, masters, strict=True):
            parameter.data.copy_(master.data)

    return step


def naive_states_moved(sizes: list[int], device: torch.device) -> Step:
    parameters = make_parameters(sizes, torch.bfloat16, device)
    on_host = [[p.detach().float().cpu(), *(torch.zeros(p.shape) for _ in range(2))] for p in parameters]
    steps = [torch.zeros((), device=device) for _ in parameters]

    def step() -> None:
        for parameter, states, count in zip(parameters, on_host, steps, strict=True):
            assert parameter.grad is not None
            master, first, second = (state.to(device) for state in states)
            count += 1
            torch._fused_adamw_(
                [master],
                [parameter.grad.float()],
                [first],
                [second],
                [],
                [count],
                lr=1e-3,
                beta1=0.9,
                beta2=0.999,
                weight_decay=1e-2,
                eps=1e-8,
                amsgrad=False,
                maximize=False,
            )
            for state, moved in zip(states, (master, first, second), strict=True):
                state.copy_(moved)
            parameter.data.copy_(master)

    return step


def seconds_of(run: Step) -> float:
    torch.cuda.synchronize()
    begin = time.perf_counter()
    run()
    torch.cuda.synchronize()
    return time.perf_counter() - begin


def timeline(name: str, ours: Ours) -> list[dict[str, Any]]:
    """Begin, end and busy milliseconds of the link's directions, of the GPU's updates and of the CPU's."""
    lanes: dict[str, list[tuple[float, float]]] = {}
    states = ours.states

    def timed(lane: str, run: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            begin = time.perf_counter_ns()
            result = run(*arguments)
            lanes.setdefault(lane, []).append((begin - start, time.perf_counter_ns() - start))
            return result

        return call

    parts = {
        "CPU, with waiting": "_update_on_host",
        "queueing for the GPU": "_update_on_device",
        "queueing gradients": "_flush",
        "queueing weights": "_send",
    }
    for lane, part in parts.items():
        setattr(states, part, timed(lane, getattr(states, part)))
    made = ours.optimizer._update_of

    def update_of(*arguments: Any) -> Any:
        update = made(*arguments)
        on_cpu = timed("CPU updates", update)
        return lambda weights, *rest: (on_cpu if weights[0].device.type == "cpu" else update)(weights, *rest)

    ours.optimizer._update_of = update_of  # type: ignore[method-assign]
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile, torch.profiler.record_function("whole step"):
        start = time.perf_counter_ns()
        seconds_of(ours.step)
    del ours.optimizer._update_of
    for part in parts.values():
        delattr(states, part)
    assert profile.profiler is not None and profile.profiler.kineto_results is not None
    events = profile.profiler.kineto_results.events()
    zero = next(event.start_ns() for event in events if event.name() == "whole step")
    for event in events:
        if event.device_type() == torch.profiler.DeviceType.CPU:
            continue
        lane = "to the GPU" if "HtoD" in event.name() else "to the host" if "DtoH" in event.name() else ""
        lane = "GPU updates" if "optimizer_step" in event.name() else lane
        if lane:
            begin = event.start_ns() - zero
            lanes.setdefault(lane, []).append((begin, begin + event.duration_ns()))
    rows = []
    for lane, spans in sorted(lanes.items()):
        row: dict[str, Any] = {"way": name, "lane": lane, "count": len(spans)}
        row["begin_ms"] = min(begin for begin, _ in spans) / 1e6
        row["end_ms"] = max(end for _, end in spans) / 1e6
        row["busy_ms"] = sum(end - begin for begin, end in spans) / 1e6
        rows.append(row)
        print({key: round(value, 2) if isinstance(value, float) else value for key, value in row.items()}, flush=True)
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=float, default=1.0, help="share of the 268 million")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--without-naive", action="store_true")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("torch_offload: torch sees no CUDA device here")
    device = torch.device("cuda")
    sizes = [max(int(size * arguments.parameters), 1) for size in sizes_on(device)]
    ours = {mode: Ours(sizes, device, mode, master_weights=True) for mode in ("interleave", "host", "stream")}
    ours["stream, compact"] = Ours(sizes, device, "stream", state="compact")
    ways: dict[str, Step] = {name: one.step for name, one in ours.items()}
    if not arguments.without_naive:
        ways["naive, CPU step"] = naive_cpu_step(sizes, device)
        ways["naive, states moved"] = naive_states_moved(sizes, device)
    for name, step in ways.items():
        for _ in range(1 if name.startswith("naive") else 12):  # shares follow what earlier steps took
            step()
    times: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(arguments.turns):
        for name, step in ways.items():
            if not name.startswith("naive") or turn < 2:
                times[name].append(seconds_of(step))
    for name in ("host", "stream"):  # the same states: one measurement for all
        ours[name].states.rates = ours["interleave"].states.rates
    plans = {name: one.plan() for name, one in ours.items()}
    timelines = [row for name, one in ours.items() for row in timeline(name, one)]
    naive = min((statistics.median(taken) for name, taken in times.items() if name.startswith("naive")), default=None)
    figures = []
    for name, taken in times.items():
        plan, median = plans.get(name), statistics.median(taken)
        bound = f"{plan['bound_seconds'] * 1e3:.1f} ms, {100 * plan['bound_seconds'] / median:.0f} %" if plan else ""
        figures.append(
            {
                "way": name,
                "a step": f"{median * 1e3:.1f} ms ({min(taken) * 1e3:.1f} to {max(taken) * 1e3:.1f})",
                "faster than naive": f"{naive / median:.2f}x" if naive else "",
                "bound, share of it": bound,
                "on the GPU": f"{plan['taken_by_device']} of {plan['subgroups']} subgroups" if plan else "",
                "limit": plan["limit"].replace("_", " ") if plan else "",
                "seconds": taken,
                "plan": plan,
            }
        )
    columns = ["way", "a step", "faster than naive", "bound, share of it", "on the GPU", "limit"]
    machine = describe_machine(device)
    print_and_store(
        {
            "machine": machine,
            "parameters": sum(sizes),
            "columns": columns,
            "figures": figures,
            "timelines": timelines,
        },
        arguments.output,
    )
    print(plans["interleave"]["rates"], flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
