"""Our ops for JAX against XLA's own, and against the same ops from torch.

    python benchmarks/jax_ops.py [--device cpu|gpu] [--quick] [--only TEXT] [--tune SECONDS] [--host] [--output FILE]

Peers in one process: XLA's fusions, and cuDNN's attention on a GPU. The ways take turns in an order that is drawn
anew. A turn is a queue of calls of a jitted function over several buffers, ended by one wait: on a GPU the host is
ahead, so that a turn's time is the device's. Rows of short calls are a step of one call per buffer, so that what XLA
does between steps is not counted. A row is checked before it is timed. On a GPU jax_profile.py then compares the time
that kernels take with that of the same call from torch; without torch that column is empty. Host time and import time
are of fresh processes. XLA times its own GEMMs while it compiles; with --tune ours are timed too, before each row.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # torch's process needs memory too

import jax
import jax.numpy as jnp
import provenance
from jax_cases import Case, Llama, cases
from table import lines_of, print_and_store
from timing import Timing, summarised

import kernel_pytorch

ROTATED_BYTES = {"gpu": 256 * 2**20, "cpu": 128 * 2**20}  # more than the last-level cache, twice over
# Turns of 10 ms on a GPU were 0.5 ms longer than their kernels together: what the host does at their begin and end.
TURN_SECONDS = {"gpu": 0.05, "cpu": 0.01}
# With two calls XLA's few microseconds between steps were 5 % of a norm's.
CALLS_OF_STEP = 16
IMPORT_CODE = """
import time, jax
begin = time.perf_counter()
import kernel_pytorch.jax
print(time.perf_counter() - begin)
"""
# A step of CALLS calls in a row, on few elements; "nothing" is a handler that returns at once.
HOST_CODE = """
import json, statistics, time
import jax, jax.numpy as jnp
import kernel_pytorch.jax as kp
from kernel_pytorch.jax import _registration
CALLS, STEPS = 64, 200
x, weight = jnp.ones((4, 64)), jnp.ones(64)
def nothing(x, weight):
    return jax.ffi.ffi_call(_registration.NOTHING, jax.ShapeDtypeStruct(x.shape, x.dtype))(x, weight)
def step(function):
    def run(x, weight):
        for _ in range(CALLS):
            x = function(x, weight)
        return x
    return jax.jit(run)
steps = {"ours": step(kp.rms_norm), "nothing": step(nothing)}
samples = {name: {"returned": [], "done": []} for name in steps}
for turn in range(STEPS + 10):
    for name, run in steps.items():
        begin = time.perf_counter()
        output = run(x, weight)
        returned = time.perf_counter()
        output.block_until_ready()
        done = time.perf_counter()
        if turn >= 10:
            samples[name]["returned"].append((returned - begin) / CALLS * 1e6)
            samples[name]["done"].append((done - begin) / CALLS * 1e6)
medians = {name: {when: statistics.median(of[when]) for when in of} for name, of in samples.items()}
print(json.dumps(medians))
"""
Way = Callable[[int], float]  # (calls) -> seconds of all


def queued(function: Callable[..., Any], buffers: list[tuple[Any, ...]]) -> Way:
    """A turn: calls on the buffers in order. Outputs live until their buffer's next call, so they rotate too."""
    kept: list[Any] = [None] * len(buffers)

    def take(calls: int) -> float:
        begin = time.perf_counter()
        for i in range(calls):
            kept[i % len(buffers)] = function(*buffers[i % len(buffers)])
        jax.block_until_ready(kept)
        return time.perf_counter() - begin

    return take


def in_steps(function: Callable[..., Any], buffers: list[tuple[Any, ...]]) -> Way:
    """A turn: steps, each with a call for every buffer."""
    step = jax.jit(lambda all_buffers: [function(*one) for one in all_buffers])

    def take(calls: int) -> float:
        kept = None
        begin = time.perf_counter()
        for _ in range(-(-calls // len(buffers))):
            kept = step(buffers)
        jax.block_until_ready(kept)
        return (time.perf_counter() - begin) * calls / (-(-calls // len(buffers)) * len(buffers))

    return take


def compare(ways: dict[str, Way], seconds: float, least: int, turn_seconds: float) -> dict[str, Timing]:
    """Times the ways in turns for about `seconds` each; a turn has at least `least` calls and lasts `turn_seconds`."""
    calls = {}
    for name, way in ways.items():
        way(least)  # compile, choose, load
        calls[name] = max(least, round(turn_seconds / (way(least) / least)))
    samples: dict[str, list[float]] = {name: [] for name in ways}
    order, draw = list(ways), random.Random(0)
    end = time.perf_counter() + seconds * len(ways)
    turn = 0
    while time.perf_counter() < end or turn < 7:
        draw.shuffle(order)
        for name in order:
            samples[name].append(ways[name](calls[name]) / calls[name] * 1e6)
        turn += 1
    return {name: summarised(values) for name, values in samples.items()}


def error_against(case: Case) -> float:
    """The largest difference from the peer by the peer's largest value, over all outputs."""
    ours, theirs = (jax.tree.leaves(jax.jit(one)(*case.inputs)) for one in (case.ours, case.peer))
    errors = []
    for one, other in zip(ours, theirs, strict=True):
        one, other = one.astype(jnp.float32), other.astype(jnp.float32)
        errors.append(float(jnp.abs(one - other).max() / jnp.abs(other).max()))
    return max(errors)


def tune(case: Case, seconds: float) -> None:
    """Measures what our calls could run, call by call: nothing is tuned inside XLA's command buffers."""
    with kernel_pytorch.tuning.autotune(seconds) as report, jax.disable_jit():
        jax.block_until_ready(case.ours(*case.inputs))
    for one in report.tuned:
        before, after = (f"{row.name} {row.median_us:.0f} us" for row in (one.before, one.after))
        print(f"  {one.key.op}: {after}, was {before}")
    for one in report.untuned:
        print(f"  {one.key.op} was not tuned: {one.reason}")


def timed(case: Case, device: str, seconds: float) -> dict[str, Any]:
    error = error_against(case)
    if not error < case.tolerance:
        sys.exit(f"{case.name}: ours differs from {case.peer_name} by {error}, allowed is {case.tolerance}")
    each = sum(array.nbytes for array in case.inputs)
    is_short = device == "gpu" and bool(case.torch_op)
    count = CALLS_OF_STEP if is_short else max(2, min(16, -(-ROTATED_BYTES[device] // each)))
    buffers = [case.inputs, *(tuple(array + 0 for array in case.inputs) for _ in range(count - 1))]
    ways = {
        name: in_steps(function, buffers) if is_short else queued(jax.jit(function), buffers)
        for name, function in (("ours", case.ours), (case.peer_name, case.peer))
    }
    timings = compare(ways, seconds, count, TURN_SECONDS[device])
    ours, peer = timings["ours"].median_us, timings[case.peer_name].median_us
    row = {"op": case.name, "dtype": case.dtype, "error": error, "speedup": peer / ours}
    row["timings"] = {name: asdict(timing) for name, timing in timings.items()}
    return row


def words_of(code: str, flags: str = "") -> str:
    environment = {**os.environ, "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {flags}".strip()}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # an installed package has its bytecode
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stderr)
    return done.stdout


def host_figures(device: str) -> list[dict[str, Any]]:
    """Microseconds per call in a jitted step: of ours, of an empty handler, and their difference."""
    modes = {"": ""}
    if device == "gpu":
        modes = {", in command buffers": "", ", without command buffers": "--xla_gpu_enable_command_buffer="}
    figures = []
    for mode, flags in modes.items():
        medians = json.loads(words_of(HOST_CODE, flags))
        for when in ("returned", "done"):
            ours, nothing = medians["ours"][when], medians["nothing"][when]
            what = f"a call in a jitted step of 64, until {when}{mode}"
            figures.append({"what": what, "ours_us": ours, "empty_us": nothing, "beyond_us": ours - nothing})
    return figures


def import_milliseconds() -> float:
    return statistics.median(float(words_of(IMPORT_CODE)) for _ in range(5)) * 1e3


def add_device_times(run: dict[str, Any], only: str) -> None:
    """Of the rows that torch has too: the time of kernels, here and there."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "device_times.json"
        script = str(Path(__file__).with_name("jax_profile.py"))
        subprocess.run([sys.executable, script, "--torch", "--only", only, "--output", str(output)], check=True)
        compared = json.loads(output.read_text())
    run["machine"]["torch"] = compared["torch"]
    of_row = {row["op"]: row for row in compared["rows"]}
    for row in run["rows"]:
        if row["op"] in of_row:
            row |= {name: of_row[row["op"]][name] for name in ("device_timings", "against_torch")}


def has_torch() -> bool:
    return subprocess.run([sys.executable, "-c", "import torch"], capture_output=True).returncode == 0


def inserted_copies(llama: Llama) -> dict[str, int]:
    """Instructions in the compiled step that move data and compute nothing, counted by name."""
    text = jax.jit(llama.ours).lower(*llama.inputs).compile().as_text()
    names = ("copy", "transpose", "slice", "concatenate", "pad", "all-gather")
    return {name: len(re.findall(rf"= \S+ {name}\(", text)) for name in names}


def processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def machine_facts(device: str) -> dict[str, Any]:
    return {
        "device": jax.devices("gpu")[0].device_kind if device == "gpu" else processor(),
        "jax": jax.__version__,
        "kernel_pytorch": kernel_pytorch.__version__,
        **provenance.record(),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "gpu"), default=jax.default_backend())
    parser.add_argument("--quick", action="store_true", help="a fifth of the time")
    parser.add_argument("--only", default="", help="rows whose name holds this text")
    parser.add_argument("--tune", type=float, default=0.0, help="seconds of tuning before each row")
    parser.add_argument("--host", action="store_true", help="host and import time alone")
    parser.add_argument("--output", type=Path, help="write the run as JSON")
    arguments = parser.parse_args()
    device = arguments.device
    jax.config.update("jax_default_device", jax.devices(device)[0])
    if arguments.host:
        for figure in host_figures(device):
            print(f"{figure['what']}: {figure['beyond_us']:.2f} us beyond an empty handler's {figure['empty_us']:.2f}")
        print(f"import: {import_milliseconds():.1f} ms beyond jax's")
        return 0
    seconds = 0.2 if arguments.quick else 1.0
    run: dict[str, Any] = {"machine": machine_facts(device), "rows": []}
    names_of_torch = set()
    for case in cases(device, arguments.only):
        names_of_torch |= {case.torch_op} - {""}
        if arguments.tune:
            tune(case, arguments.tune)
        run["rows"].append(timed(case, device, seconds))
        print(lines_of(run)[-1], flush=True)
    if device == "gpu" and names_of_torch and has_torch():
        add_device_times(run, arguments.only)
    if not arguments.only:
        run["host"], run["import_ms"] = host_figures(device), import_milliseconds()
        run["inserted"] = inserted_copies(Llama(device))
    print()
    print_and_store(run, arguments.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
