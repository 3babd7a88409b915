"""Our ops against torch's, forward and backward, on every device of this machine; norms are in torch_norms.py.

    python benchmarks/torch_ops.py [--quick] [--compile] [--device cpu|cuda] [--only WORD] [--output FILE]

The ops are in cases_*.py: a line or two each. A row is checked before it is timed: ours must equal torch's composition
on the same values in fp32, within the dtype's rounding or what torch's own result has as error. `share` is how fast a
copy that moves the same bytes runs in the same turns, against ours: 100 % is the memory's speed.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import cases_pointwise
import cases_rows
import cases_tables
import torch
from cases import DTYPES, TOLERANCE, Op
from measure import Way, buffers_needed, compare, keep_freed_memory
from table import print_table
from torch_norms import backward_way, describe_machine, forward_way, launches_of

ALL_OPS: list[Op] = [*cases_pointwise.OPS, *cases_rows.OPS, *cases_tables.OPS]
DIRECTIONS = ("forward", "backward")


class Inputs:
    """What a way works on: the same values each time it is made."""

    def __init__(self, op: Op, direction: str, dtype: torch.dtype, device: torch.device) -> None:
        rows, columns = op.shape_on(device)
        buffers = buffers_needed(op.bytes_moved(direction, dtype, device), device)
        torch.manual_seed(0)
        generator = torch.Generator(device).manual_seed(0)

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(shape, device=device, generator=generator).to(dtype)

        self.tensors = [op.inputs(random, rows, columns) for _ in range(buffers)]
        self.grads: list[torch.Tensor] = []
        if direction == "backward":
            leaves = len(self.tensors[0]) if op.leaves is None else op.leaves
            for tensors in self.tensors:
                for tensor in tensors[:leaves]:
                    tensor.requires_grad_(tensor.is_floating_point())
            with torch.no_grad():
                first = op.ours(*self.tensors[0])
            result = first[0] if isinstance(first, tuple) else first
            self.grads = [random(*result.shape) for _ in range(buffers)]

    def way(self, function: Callable[..., Any]) -> Way:
        return backward_way(function, self.tensors, self.grads) if self.grads else forward_way(function, self.tensors)

    def exact_way(self, function: Callable[..., Any]) -> Way:
        """On the first buffer alone, in fp32."""
        tensors = [tuple(exact(tensor) for tensor in self.tensors[0])]
        grads = [grad.float() for grad in self.grads[:1]]
        return backward_way(function, tensors, grads) if grads else forward_way(function, tensors)


def make_ways(op: Op, direction: str, dtype: torch.dtype, device: torch.device, with_compile: bool) -> dict[str, Way]:
    functions = {"ours": op.ours, "torch": op.torch}
    if with_compile:
        torch.compiler.reset()
        functions["torch.compile"] = torch.compile(op.torch)
    first = Inputs(op, direction, dtype, device)
    # A replay on a GPU goes over all buffers and leaves nothing in its cache for the next way.
    shared = device.type == "cuda"
    ways = {
        name: (first if shared or name == "ours" else Inputs(op, direction, dtype, device)).way(function)
        for name, function in functions.items()
    }
    if op.checked:
        check(f"{op.name} {direction}", dtype, first.exact_way(op.torch)(0), ways["ours"](0), ways["torch"](0))
    half = op.bytes_moved(direction, dtype, device) // 2
    sources = [torch.randint(0, 255, (half,), dtype=torch.uint8, device=device) for _ in first.tensors]
    targets = [torch.zeros_like(source) for source in sources]
    ways["copy"] = lambda buffer: targets[buffer].copy_(sources[buffer])
    return ways


def exact(tensor: torch.Tensor) -> torch.Tensor:
    """The same values in fp32, with the same wish for a gradient; integers and flags as they are."""
    if not tensor.is_floating_point():
        return tensor
    return tensor.detach().float().requires_grad_(tensor.requires_grad)


FAILURES: list[str] = []


def check(what: str, dtype: torch.dtype, wanted: Any, actual: Any, torchs: Any) -> None:
    """Adds to FAILURES where ours is further from exact than the dtype's rounding and than half as much again of
    torch's error, which inputs that were rounded before (a saved output) give both.
    """
    results = (result if isinstance(result, tuple) else (result,) for result in (wanted, actual, torchs))
    for exact_value, mine, theirs in zip(*results, strict=True):
        if exact_value is None or mine is None or not exact_value.is_floating_point():
            continue
        largest = exact_value.abs().max().clamp(min=1)
        error, peers = (((exact_value - x.float()).abs().max() / largest).item() for x in (mine, theirs))
        limit = max(TOLERANCE[dtype], 1.5 * peers)
        if not error <= limit:
            FAILURES.append(f"{what} {dtype}: ours is {error:.1e} from exact, the limit is {limit:.0e}")


def run_case(
    op: Op, direction: str, dtype_name: str, device: torch.device, seconds: float, with_compile: bool
) -> dict[str, Any]:
    dtype = DTYPES[dtype_name]
    rows, columns = op.shape_on(device)
    moved = op.bytes_moved(direction, dtype, device)
    buffers = buffers_needed(moved, device)
    ways = make_ways(op, direction, dtype, device, with_compile)
    timings = compare(ways, buffers, device, seconds)
    mine = timings["ours"].median_us
    return {
        **launches_of(ways, device),
        "op": op.name,
        "direction": direction,
        "dtype": dtype_name,
        "rows": rows,
        "columns": columns,
        "device": device.type,
        "bytes": moved,
        "buffers": buffers,
        "timings": {name: asdict(timing) for name, timing in timings.items()},
        "share": timings["copy"].median_us / mine,
        "speedup": timings["torch"].median_us / mine,
    }


def run_device(device: torch.device, only: str, seconds: float, with_compile: bool) -> dict[str, Any]:
    dtypes = ("bf16",) if device.type == "cuda" else ("fp32", "bf16")
    cases = [
        (op, direction, dtype)
        for op in ALL_OPS
        for direction in DIRECTIONS
        for dtype in op.dtypes or dtypes
        if op.moved(direction) and only in f"{op.name} {direction} {dtype}"
    ]
    rows = []
    for i, (op, direction, dtype) in enumerate(cases):
        if sys.stderr.isatty():
            print(f"\r\033[K{device}: {i + 1} of {len(cases)} {op.name} ", end="", file=sys.stderr, flush=True)
        rows.append(run_case(op, direction, dtype, device, seconds, with_compile))
    if sys.stderr.isatty():
        print("\r\033[K", end="", file=sys.stderr)
    return {"machine": describe_machine(device), "rows": rows}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a quarter of a second a way instead of one")
    parser.add_argument("--compile", action="store_true", help="torch.compile as a third peer")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="only this one; by default every one there is")
    parser.add_argument("--only", default="", help="only rows whose 'op direction dtype' holds this text")
    parser.add_argument("--output", type=Path, help="write the results as JSON")
    arguments = parser.parse_args()
    if arguments.device == "cuda" and not torch.cuda.is_available():
        sys.exit("torch_ops: --device cuda: torch sees no CUDA device here")
    keep_freed_memory()
    devices = [arguments.device] if arguments.device else ["cpu"] + ["cuda"] * torch.cuda.is_available()
    runs = []
    for name in devices:
        run = run_device(torch.device(name), arguments.only, 0.25 if arguments.quick else 1.0, arguments.compile)
        if not run["rows"]:
            sys.exit(f"torch_ops: --only {arguments.only!r}: no row has this text")
        runs.append(run)
        print_table(run)
    for failure in FAILURES:
        print(f"torch_ops: {failure}", file=sys.stderr)
    if arguments.output:
        arguments.output.write_text(json.dumps({"benchmark": "torch_ops", "runs": runs}, indent=1) + "\n")
    return 1 if FAILURES else 0


if __name__ == "__main__":
    sys.exit(main())
