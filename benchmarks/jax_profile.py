"""Where a jitted step's GPU time goes, kernel by kernel: rows of jax_ops.py, ours and the peer's.

    python benchmarks/jax_profile.py [--only TEXT] [--steps 5] [--rows 24] [--output FILE]
    python benchmarks/jax_profile.py --torch [--only TEXT] [--output FILE]

jax.profiler traces a few steps; what the device's streams did is summed by the kernel's name. Command buffers are off,
so that each kernel is an event of its own. "idle" is the time between the first and the last event in which none ran.
A kernel that starts early and waits for the one before (programmatic dependent launch) counts at the same time as it.

--torch compares a call with the same one from torch, in jax_torch.py's process: the time in which any kernel of it ran,
as each framework's profiler saw it (both read CUPTI). The two take turns, and calls rotate over the same number of
buffers, so that both read from memory.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_enable_command_buffer=".strip()

import jax
from jax_cases import Case, cases
from jax_ops import ROTATED_BYTES, Way
from timing import summarised

Event = tuple[str, float, float]  # name, begin and duration in nanoseconds


class TorchProcess:
    """The same op from torch, in a process that works only in its turns."""

    def __init__(self) -> None:
        words = [sys.executable, str(Path(__file__).with_name("jax_torch.py")), "cuda"]
        self.process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.version = self.ask({"ask": "version"})

    def ask(self, request: dict[str, Any]) -> Any:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        if not answer:
            raise RuntimeError(f"jax_torch.py ended with {self.process.wait()} at {request}")
        return json.loads(answer)

    def way(self, case: Case, buffers: int) -> Way:
        shapes = [list(array.shape) for array in case.inputs]
        self.ask({"ask": "prepare", "op": case.torch_op, "shapes": shapes, "buffers": buffers})
        return lambda calls: float(self.ask({"ask": "turn", "calls": calls}))


def device_events(folder: str) -> list[Event]:
    """What ran on the streams of the device, from a trace's files."""
    events: list[Event] = []
    for path in Path(folder).rglob("*.xplane.pb"):
        for plane in jax.profiler.ProfileData.from_file(str(path)).planes:
            if not plane.name.startswith("/device:GPU"):
                continue
            for line in plane.lines:
                if line.name.startswith("Stream"):
                    events += [(event.name, event.start_ns, event.duration_ns) for event in line.events]
    return sorted(events, key=lambda event: event[1])


def traced(step: Callable[..., Any], inputs: list[tuple[Any, ...]], steps: int) -> list[Event]:
    """What the device did in calls of a compiled step, on each of the inputs in turn."""
    for one in inputs:
        jax.block_until_ready(step(*one))
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, profiler_options=options):
            kept: list[Any] = [None] * len(inputs)
            for i in range(steps):
                kept[i % len(inputs)] = step(*inputs[i % len(inputs)])
            jax.block_until_ready(kept)
        return device_events(folder)


def idle_ns(events: Iterable[Event]) -> float:
    idle, end = 0.0, None
    for _, begin, duration in events:
        if end is not None and begin > end:
            idle += begin - end
        end = max(end or 0.0, begin + duration)
    return idle


def summed(events: list[Event], steps: int) -> dict[str, Any]:
    """Microseconds per step by kernel, the longest first."""
    of_name: dict[str, list[float]] = defaultdict(list)
    for name, _, duration in events:
        of_name[re.sub(r"^void ", "", name)].append(duration / 1e3)
    rows = [
        {"kernel": name, "calls_per_step": len(times) / steps, "us_per_step": sum(times) / steps}
        for name, times in of_name.items()
    ]
    rows.sort(key=lambda row: -float(row["us_per_step"]))  # type: ignore[arg-type]
    busy = sum(float(row["us_per_step"]) for row in rows)  # type: ignore[arg-type]
    return {
        "busy_us": busy,
        "idle_us": idle_ns(events) / 1e3 / steps,
        "overlap_us": busy - occupied_ns(events) / 1e3 / steps,
        "kernels": rows,
    }


def occupied_ns(events: list[Event]) -> float:
    """The time in which any of them ran."""
    return max(begin + duration for _, begin, duration in events) - events[0][1] - idle_ns(events)


def against_torch(case: Case, torch: TorchProcess, calls: int = 24, turns: int = 5) -> dict[str, Any]:
    each = sum(array.nbytes for array in case.inputs)
    count = max(2, min(calls, -(-ROTATED_BYTES["gpu"] // each)))
    buffers = [case.inputs, *(tuple(array + 0 for array in case.inputs) for _ in range(count - 1))]
    step = jax.jit(case.ours)
    turn = torch.way(case, count)
    turn(count)
    samples: dict[str, list[float]] = {"ours": [], "ours, from torch": []}
    kernels: dict[str, list[str]] = {}
    for _ in range(turns):
        theirs = [tuple(one) for one in torch.ask({"ask": "trace", "calls": calls})]
        seen = {"ours": traced(step, buffers, calls), "ours, from torch": sorted(theirs, key=lambda event: event[1])}
        for name, events in seen.items():
            samples[name].append(occupied_ns(events) / 1e3 / calls)
            kernels[name] = sorted({event[0] for event in events})
    timings = {name: summarised(values) for name, values in samples.items()}
    ratio = timings["ours"].median_us / timings["ours, from torch"].median_us
    made = {
        "op": case.name,
        "device_timings": {name: asdict(one) for name, one in timings.items()},
        "against_torch": ratio,
    }
    return {**made, "kernels": kernels}


def print_profile(title: str, profile: dict[str, Any], rows: int) -> None:
    print(
        f"{title}: busy {profile['busy_us']:.1f} us per step, idle {profile['idle_us']:.1f}, "
        f"of it at the same time {profile['overlap_us']:.1f}"
    )
    for row in profile["kernels"][:rows]:
        print(f"  {row['us_per_step']:10.1f} us {row['calls_per_step']:6.1f} x  {row['kernel'][:110]}")
    rest = profile["kernels"][rows:]
    if rest:
        print(f"  {sum(row['us_per_step'] for row in rest):10.1f} us in {len(rest)} more kernels")


def profiled(only: str, steps: int, rows: int) -> dict[str, Any]:
    found = {}
    for case in cases("gpu", only):
        for name, function in (("ours", case.ours), (case.peer_name, case.peer)):
            title = f"{case.name}, {name}"
            found[title] = summed(traced(jax.jit(function), [case.inputs], steps), steps)
            print_profile(title, found[title], rows)
    return found


def compared(only: str) -> dict[str, Any]:
    torch = TorchProcess()
    rows = []
    for case in cases("gpu", only):
        if not case.torch_op:
            continue
        row = against_torch(case, torch)
        rows.append(row)
        texts = [f"{name} {timing['median_us']:.2f} us" for name, timing in row["device_timings"].items()]
        print(f"{case.name}: {', '.join(texts)}, {row['against_torch']:.3f}x", flush=True)
    return {"torch": f"{torch.version}, in a process of its own", "rows": rows}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="rows of jax_ops.py whose name holds this text")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--rows", type=int, default=24, help="kernels to print")
    parser.add_argument("--torch", action="store_true", help="compare calls with the same ones from torch")
    parser.add_argument("--output", type=Path, help="write all as JSON")
    arguments = parser.parse_args()
    if jax.default_backend() != "gpu":
        sys.exit("jax_profile.py: it reads the streams of a GPU, and jax has none here")
    found = compared(arguments.only) if arguments.torch else profiled(arguments.only, arguments.steps, arguments.rows)
    if arguments.output:
        arguments.output.write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
