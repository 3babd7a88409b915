"""Where a jitted step's GPU time goes, kernel by kernel: rows of jax_ops.py, ours and the peer's.

    python benchmarks/jax_profile.py [--only TEXT] [--steps 5] [--rows 24] [--output FILE]

jax.profiler traces a few steps; what the device's streams did is summed by the kernel's name. Command buffers are off,
so that each kernel is an event of its own. "idle" is the time between the first and the last event in which none ran.
A kernel that starts early and waits for the one before (programmatic dependent launch) counts at the same time as it.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_enable_command_buffer=".strip()

import jax
from jax_cases import cases

Event = tuple[str, float, float]  # name, begin and duration in nanoseconds


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


def traced(function: Callable[..., Any], inputs: tuple[Any, ...], steps: int) -> list[Event]:
    step = jax.jit(function)
    for _ in range(3):
        jax.block_until_ready(step(*inputs))
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, profiler_options=options):
            kept = None
            for _ in range(steps):
                kept = step(*inputs)
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
    idle = idle_ns(events) / 1e3 / steps
    span = (max(begin + duration for _, begin, duration in events) - events[0][1]) / 1e3 / steps
    return {"busy_us": busy, "idle_us": idle, "overlap_us": busy + idle - span, "kernels": rows}


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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="rows of jax_ops.py whose name holds this text")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--rows", type=int, default=24, help="kernels to print")
    parser.add_argument("--output", type=Path, help="write all as JSON")
    arguments = parser.parse_args()
    if jax.default_backend() != "gpu":
        sys.exit("jax_profile.py: it reads the streams of a GPU, and jax has none here")
    found: dict[str, Any] = {}
    for case in cases("gpu", arguments.only):
        for name, function in (("ours", case.ours), (case.peer_name, case.peer)):
            profile = summed(traced(function, case.inputs, arguments.steps), arguments.steps)
            found[f"{case.name}, {name}"] = profile
            print_profile(f"{case.name}, {name}", profile, arguments.rows)
    if arguments.output:
        arguments.output.write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
