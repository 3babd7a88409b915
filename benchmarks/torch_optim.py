"""Our AdamW against torch's, fused and foreach: one step of 200 tensors of uneven size, 268 million parameters, on a
GPU; of one tensor of 1024x4096 on a CPU.

    python benchmarks/torch_optim.py [--quick] [--device cpu|cuda] [--only WORD] [--output FILE]

Every way has parameters of its own and is checked against fp32 first: three steps from the same values with the same
gradients. `share` is how fast a copy that moves the same bytes runs in the same turns, against ours.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from kernel_pytorch.optim import AdamW, clip_grad_norm_
from measure import Way, buffers_needed, compare, keep_freed_memory
from table import print_table
from torch_norms import describe_machine, launches_of

Parameters = list[torch.nn.Parameter]
Optimizer = Callable[[Parameters], torch.optim.Optimizer]


@dataclass(frozen=True)
class Case:
    name: str
    dtype: str
    ours: dict[str, Any]
    bytes_each: float  # that a step must read and write for one parameter
    on_cpu: bool = True
    clips: bool = False


CASES = [
    Case("adamw", "fp32", {}, 28),
    Case("adamw, state as parameters", "bf16", {"state_dtype": None}, 14),
    Case("adamw, state fp32", "bf16", {}, 22),
    Case("adamw, master", "bf16", {"master_weights": True}, 28, on_cpu=False),
    Case("adamw, stochastic", "bf16", {"state_dtype": None, "stochastic_rounding": True, "seed": 1}, 14),
    Case("adamw, compact", "bf16", {"state": "compact"}, 12.25),
    Case("adamw, 8-bit", "bf16", {"state": "8bit"}, 10.0625),
    Case("adamw, clipped", "fp32", {"max_grad_norm": 1.0}, 32, on_cpu=False, clips=True),
]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def sizes_on(device: torch.device) -> list[int]:
    """As in a model some tensors are vectors, and most of the rest is in large ones of uneven size."""
    if device.type == "cpu":
        return [1024 * 4096]
    large = [1_356_000 * (4 + i * 7 % 13) * 4 // 30 + i % 5 for i in range(200)]
    return [4096 + i % 3 if i % 4 == 1 else size for i, size in enumerate(large)]


def make_parameters(sizes: list[int], dtype: torch.dtype, device: torch.device) -> Parameters:
    generator = torch.Generator(device).manual_seed(0)
    made = []
    for size in sizes:
        parameter = torch.nn.Parameter(torch.randn(size, device=device, generator=generator).to(dtype))
        parameter.grad = torch.randn(size, device=device, generator=generator).to(dtype)
        made.append(parameter)
    return made


def torch_step(optimizer: torch.optim.Optimizer, parameters: Parameters, clips: bool) -> Callable[[], object]:
    if not clips:
        return optimizer.step

    def run() -> None:
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()

    return run


def make_ways(case: Case, sizes: list[int], buffers: int, device: torch.device) -> dict[str, Way]:
    capturable = device.type == "cuda"
    makers: dict[str, Optimizer] = {
        "ours": lambda p: AdamW(p, **case.ours),
        "torch": lambda p: torch.optim.AdamW(p, fused=True, capturable=capturable),
        "torch foreach": lambda p: torch.optim.AdamW(p, foreach=True, capturable=capturable),
    }
    ways: dict[str, Way] = {}
    for name, make in makers.items():
        sets = [make_parameters(sizes, DTYPES[case.dtype], device) for _ in range(buffers)]
        optimizers = [make(parameters) for parameters in sets]
        clips = case.clips and name != "ours"
        steps = [torch_step(o, p, clips) for o, p in zip(optimizers, sets, strict=True)]
        ways[name] = lambda buffer, steps=steps: steps[buffer]()  # type: ignore[misc]
    half = int(sum(sizes) * case.bytes_each) // 2
    sources = [torch.randint(0, 255, (half,), dtype=torch.uint8, device=device) for _ in range(buffers)]
    targets = [torch.zeros_like(source) for source in sources]
    ways["copy"] = lambda buffer: targets[buffer].copy_(sources[buffer])
    return ways


def check(case: Case, device: torch.device) -> None:
    sizes = [10000, 7, 130]
    mine = make_parameters(sizes, DTYPES[case.dtype], device)
    exact = [torch.nn.Parameter(p.detach().float()) for p in mine]
    optimizer, reference = AdamW(mine, **case.ours), torch.optim.AdamW(exact)
    for _ in range(3):
        for a, b in zip(mine, exact, strict=True):
            assert a.grad is not None
            b.grad = a.grad.float()
        if case.clips:
            clip_grad_norm_(exact, 1.0)
        optimizer.step()
        reference.step()
    limit = 1e-5 if case.dtype == "fp32" else 5e-2  # three roundings of values up to 4
    error = max(float((a.detach().float() - b.detach()).abs().max()) for a, b in zip(mine, exact, strict=True))
    if not error <= limit:
        sys.exit(f"torch_optim: {case.name} {case.dtype}: ours is {error:.1e} from fp32, the limit is {limit:.0e}")


def run_case(case: Case, device: torch.device, seconds: float) -> dict[str, Any]:
    check(case, device)
    sizes = sizes_on(device)
    moved = int(sum(sizes) * case.bytes_each)
    buffers = 1 if device.type == "cuda" else buffers_needed(moved, device)  # far larger than any cache of a GPU
    ways = make_ways(case, sizes, buffers, device)
    timings = compare(ways, buffers, device, seconds)
    mine = timings["ours"].median_us
    return {
        "op": case.name,
        "direction": "step",
        **launches_of(ways, device),
        "dtype": case.dtype,
        "rows": len(sizes),
        "columns": sum(sizes) // len(sizes),
        "device": device.type,
        "bytes": moved,
        "buffers": buffers,
        "timings": {name: asdict(timing) for name, timing in timings.items()},
        "share": timings["copy"].median_us / mine,
        "speedup": timings["torch"].median_us / mine,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a quarter of a second a way instead of one")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="only this one; by default every one there is")
    parser.add_argument("--only", default="", help="only rows whose 'name dtype' holds this text")
    parser.add_argument("--output", type=Path, help="write the results as JSON")
    arguments = parser.parse_args()
    if arguments.device == "cuda" and not torch.cuda.is_available():
        sys.exit("torch_optim: --device cuda: torch sees no CUDA device here")
    keep_freed_memory()
    runs = []
    for name in [arguments.device] if arguments.device else ["cpu"] + ["cuda"] * torch.cuda.is_available():
        device = torch.device(name)
        cases = [c for c in CASES if (name == "cuda" or c.on_cpu) and arguments.only in f"{c.name} {c.dtype}"]
        rows = [run_case(case, device, 0.25 if arguments.quick else 1.0) for case in cases]
        if not rows:
            sys.exit(f"torch_optim: --only {arguments.only!r}: no row has this text")
        runs.append({"machine": describe_machine(device), "rows": rows})
        print_table(runs[-1])
    if arguments.output:
        arguments.output.write_text(json.dumps({"benchmark": "torch_optim", "runs": runs}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
