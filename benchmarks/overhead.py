"""What a call costs besides its kernel: tiny tensors, the import, and the first call on a GPU.

python benchmarks/overhead.py [--output FILE]
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as torch_functional
from table import print_and_store
from torch_norms import describe_machine

from kernel_pytorch import functional

IMPORT_CODE = """
import time, torch
begin = time.perf_counter()
import kernel_pytorch, kernel_pytorch.functional
print(time.perf_counter() - begin)
"""
FIRST_CALL_CODE = """
import time, torch, kernel_pytorch.functional as F
x = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
torch.cuda.synchronize()
begin = time.perf_counter()
F.rms_norm(x)
torch.cuda.synchronize()
print(time.perf_counter() - begin)
"""


def microseconds_in_turns(ways: dict[str, Callable[[], object]], calls: int = 200, turns: int = 40) -> dict[str, float]:
    """Median time of one call; the ways take turns of `calls` calls each."""
    samples: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(turns + 3):
        for name, way in ways.items():
            begin = time.perf_counter_ns()
            for _ in range(calls):
                way()
            samples[name].append((time.perf_counter_ns() - begin) / 1e3 / calls)
    return {name: statistics.median(values[3:]) for name, values in samples.items()}


def tiny_calls(device: str) -> list[dict[str, str]]:
    x, weight = torch.randn(4, 64, device=device), torch.randn(64, device=device)
    x_leaf, weight_leaf = x.clone().requires_grad_(), weight.clone().requires_grad_()
    grad = torch.randn(4, 64, device=device)

    def ours() -> torch.Tensor:
        return functional.rms_norm(x, weight, 1e-6)

    def torchs() -> torch.Tensor:
        return torch_functional.rms_norm(x, (64,), weight, 1e-6)

    def ours_with_grad() -> object:
        return torch.autograd.grad(functional.rms_norm(x_leaf, weight_leaf, 1e-6), (x_leaf, weight_leaf), grad)

    def torchs_with_grad() -> object:
        output = torch_functional.rms_norm(x_leaf, (64,), weight_leaf, 1e-6)
        return torch.autograd.grad(output, (x_leaf, weight_leaf), grad)

    rows = []
    for what, mine, theirs in (
        (f"rms_norm of 4x64 on {device}, no gradient", ours, torchs),
        (f"rms_norm of 4x64 on {device}, forward and backward", ours_with_grad, torchs_with_grad),
    ):
        times = microseconds_in_turns({"ours": mine, "torch": theirs})
        ratio = times["torch"] / times["ours"]
        rows.append(
            {"what": what, "ours": f"{times['ours']:.1f} µs ({ratio:.1f}x faster)", "torch": f"{times['torch']:.1f} µs"}
        )
    return rows


def seconds_of(code: str, cache: str) -> float:
    environment = {**os.environ, "KERNEL_PYTORCH_CACHE_DIR": cache}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stderr)
    return float(done.stdout)


def import_cost() -> dict[str, str]:
    with tempfile.TemporaryDirectory() as cache:
        seconds = statistics.median(seconds_of(IMPORT_CODE, cache) for _ in range(5))
    return {"what": "import beyond torch's", "ours": f"{seconds * 1e3:.0f} ms", "torch": ""}


def first_calls() -> list[dict[str, str]]:
    rows = []
    with tempfile.TemporaryDirectory() as cache:
        for state in ("an empty", "a warm"):
            seconds = seconds_of(FIRST_CALL_CODE, cache)
            what = f"first GPU call, {state} cubin cache"
            rows.append({"what": what, "ours": f"{seconds * 1e3:.0f} ms", "torch": ""})
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="write the figures as JSON")
    arguments = parser.parse_args()
    figures = tiny_calls("cpu")
    if torch.cuda.is_available():
        figures += tiny_calls("cuda") + first_calls()
    figures.append(import_cost())
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    run = {"machine": describe_machine(device), "figures": figures}
    print_and_store(run, arguments.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
