"""What a call costs besides its kernel: tiny tensors, the import, and the first call on a GPU.

python benchmarks/overhead.py [--output FILE]
python benchmarks/overhead.py --tiny [--output FILE]    the tiny calls alone: 20 seconds, with a GPU too
python benchmarks/overhead.py --parts                   where a tiny call's time goes: our ops, autograd, an empty node

A tiny call is measured without gradient, with one (forward and backward each by itself), and as a whole. On CUDA the
backward runs on autograd's own thread; the last row lets the calling thread do it. Ours and torch's take turns; a
figure is the median of the turns, and the best of them.
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


Way = Callable[[], object]


def in_turns(ways: dict[str, Way], synchronize: Way, calls: int = 100, turns: int = 60) -> dict[str, list[float]]:
    """Microseconds of one call, turn by turn, sorted. The ways take turns of `calls` calls each, on an idle device."""
    samples: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(turns + 3):
        for name, way in ways.items():
            synchronize()
            begin = time.perf_counter_ns()
            for _ in range(calls):
                way()
            elapsed = time.perf_counter_ns() - begin
            if turn >= 3:
                samples[name].append(elapsed / 1e3 / calls)
    return {name: sorted(values) for name, values in samples.items()}


def tiny_calls(device: str) -> list[dict[str, str]]:
    x, weight, grad = (torch.randn(size, device=device) for size in ((4, 64), (64,), (4, 64)))
    leaves = x.clone().requires_grad_(), weight.clone().requires_grad_()
    synchronize = torch.cuda.synchronize if device == "cuda" else lambda: None

    def gradients(output: torch.Tensor, retain: bool = False) -> object:
        return torch.autograd.grad(output, leaves, grad, retain_graph=retain)

    def ways(norm: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> dict[str, Way]:
        kept = norm(*leaves)
        return {
            "no gradient": lambda: norm(x, weight),
            "forward with gradient": lambda: norm(*leaves),
            "backward alone": lambda: gradients(kept, retain=True),
            "forward and backward": lambda: gradients(norm(*leaves)),
        }

    ours = ways(lambda x, weight: functional.rms_norm(x, weight, 1e-6))
    theirs = ways(lambda x, weight: torch_functional.rms_norm(x, (64,), weight, 1e-6))
    rows = []

    def add(what: str, way: str) -> None:
        samples = in_turns({"ours": ours[way], "torch": theirs[way]}, synchronize)
        medians = {name: statistics.median(values) for name, values in samples.items()}
        texts = {name: f"{medians[name]:.1f} µs, best {values[0]:.1f}" for name, values in samples.items()}
        texts["ours"] += f" ({medians['torch'] / medians['ours']:.1f}x faster)"
        rows.append({"what": f"rms_norm of 4x64 on {device}, {what}", **texts})

    for way in ours:
        add(way, way)
    if device == "cuda":
        with torch.autograd.set_multithreading_enabled(False):
            add("forward and backward on one thread", "forward and backward")
    return rows


class Empty(torch.autograd.Function):
    """What autograd takes for a node in Python that does nothing: its output and gradients are there already."""

    @staticmethod
    def forward(ctx: object, x: torch.Tensor, weight: torch.Tensor, made: torch.Tensor) -> torch.Tensor:
        return made.detach()

    @staticmethod
    def backward(ctx: object, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        return grad, grad[0], None


def parts(device: str) -> list[dict[str, str]]:
    x, weight, grad = (torch.randn(size, device=device) for size in ((4, 64), (64,), (4, 64)))
    leaves = x.clone().requires_grad_(), weight.clone().requires_grad_()
    ops = torch.ops.kernel_pytorch
    _, rstd = ops.rms_norm_forward(x, weight, 1e-6, 0.0)

    def gradients(output: torch.Tensor, retain: bool = False) -> object:
        return torch.autograd.grad(output, leaves, grad, retain_graph=retain)

    norms = {"ours": lambda: functional.rms_norm(*leaves, 1e-6), "an empty node": lambda: Empty.apply(*leaves, grad)}
    norms["torch"] = lambda: torch_functional.rms_norm(leaves[0], (64,), leaves[1], 1e-6)
    ways: dict[str, Way] = {
        "an allocation": lambda: torch.empty_like(x),
        "our op without gradient": lambda: ops.rms_norm(x, weight, 1e-6, 0.0),
        "our forward op": lambda: ops.rms_norm_forward(x, weight, 1e-6, 0.0),
        "our backward op": lambda: ops.rms_norm_backward(grad, x, weight, rstd, None, 0.0, True, True),
    }
    for name, norm in norms.items():
        kept = norm()
        ways |= {
            f"forward with gradient, {name}": norm,
            f"backward of a kept graph, {name}": lambda kept=kept: gradients(kept, retain=True),
            f"forward and backward, {name}": lambda norm=norm: gradients(norm()),
        }
    samples = in_turns(ways, torch.cuda.synchronize if device == "cuda" else lambda: None, turns=30)
    texts = {name: f"{statistics.median(values):.1f} µs, best {values[0]:.1f}" for name, values in samples.items()}
    return [{"what": f"{name} on {device}", "time": text} for name, text in texts.items()]


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
    parser.add_argument("--tiny", action="store_true", help="tiny calls alone")
    parser.add_argument("--parts", action="store_true", help="the parts of a tiny call")
    arguments = parser.parse_args()
    if arguments.parts:
        for device in ("cpu", *(["cuda"] if torch.cuda.is_available() else [])):
            for row in parts(device):
                print(f"{row['what']:50} {row['time']}")
        return 0
    figures = tiny_calls("cpu")
    if torch.cuda.is_available():
        figures += tiny_calls("cuda")
    if not arguments.tiny:
        figures += [*(first_calls() if torch.cuda.is_available() else []), import_cost()]
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    run = {"machine": describe_machine(device), "figures": figures}
    print_and_store(run, arguments.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
