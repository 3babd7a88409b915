"""linear_cross_entropy, forward and backward, against F.linear and F.cross_entropy under torch.compile, on a GPU.

    python benchmarks/linear_cross_entropy.py [--tokens N] [--size N] [--classes N] [--turns N] [--output FILE]

TFLOP/s count 6 * tokens * size * classes: three products. Ours and the peer take turns; each way's gradients, and the
most memory beyond them, are compared and reported, for the weight's gradient added up in bf16 and in fp32.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as torch_functional
from kernel_pytorch.functional import linear_cross_entropy
from table import print_and_store
from timing import summarised
from torch import Tensor
from torch_norms import describe_machine

PEER = "torch.compile"
Way = Callable[[Tensor, Tensor, Tensor], Tensor]


@torch.compile
def compiled(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    return torch_functional.cross_entropy(torch_functional.linear(hidden, weight).float(), target)


def in_fp32(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    return linear_cross_entropy(hidden, weight, target, accumulate_dtype=torch.float32)


def step(way: Way, leaves: tuple[Tensor, ...]) -> None:
    hidden, weight, target = leaves
    hidden.grad = weight.grad = None
    way(hidden, weight, target).backward()


def extra_megabytes(way: Way, leaves: tuple[Tensor, ...]) -> float:
    leaves[0].grad = leaves[1].grad = None
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step(way, leaves)
    torch.cuda.synchronize()
    gradients = leaves[0].nbytes + leaves[1].nbytes
    return (torch.cuda.max_memory_allocated() - before - gradients) / 2**20


def sample_errors(way: Way, leaves: tuple[Tensor, ...], classes: int = 2048) -> tuple[float, float]:
    """Errors of the gradients of some classes and some tokens, against sums in fp32."""
    hidden, weight, target = leaves
    step(way, leaves)
    with torch.no_grad():
        exact_weight = torch.zeros(classes, hidden.shape[1], device=hidden.device)
        exact_hidden = None
        for begin in range(0, hidden.shape[0], 512):
            rows, goal = hidden[begin : begin + 512].float(), target[begin : begin + 512]
            gradient = torch.softmax(rows @ weight.float().t(), -1)
            gradient[torch.arange(len(goal), device=goal.device), goal] -= 1
            gradient /= hidden.shape[0]
            exact_weight += gradient[:, :classes].t() @ rows
            if exact_hidden is None:
                exact_hidden = gradient @ weight.float()
        assert exact_hidden is not None and hidden.grad is not None and weight.grad is not None
        of_hidden = (hidden.grad[:512].float() - exact_hidden).norm() / exact_hidden.norm()
        of_weight = (weight.grad[:classes].float() - exact_weight).norm() / exact_weight.norm()
    return of_hidden.item(), of_weight.item()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--size", type=int, default=4096)
    parser.add_argument("--classes", type=int, default=128256)
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--output", type=Path, help="write the results as JSON")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("linear_cross_entropy: torch sees no CUDA device here")
    torch.manual_seed(0)
    shape = (arguments.tokens, arguments.size), (arguments.classes, arguments.size)
    hidden = torch.randn(*shape[0], device="cuda", dtype=torch.bfloat16).requires_grad_()
    weight = (torch.randn(*shape[1], device="cuda") * arguments.size**-0.5).bfloat16().requires_grad_()
    leaves = (hidden, weight, torch.randint(arguments.classes, (arguments.tokens,), device="cuda"))
    ways: dict[str, Way] = {"ours": linear_cross_entropy, "ours, dW in fp32": in_fp32, PEER: compiled}
    report = {}
    for name, way in ways.items():
        for _ in range(2):
            step(way, leaves)
        errors, extra = sample_errors(way, leaves), extra_megabytes(way, leaves)
        report[name] = {"grad_hidden_error": errors[0], "grad_weight_error": errors[1], "extra_mb": extra}
        print(f"{name}: extra {extra:.0f} MB, errors of the gradients {errors[0]:.2e} {errors[1]:.2e}", flush=True)
    samples: dict[str, list[float]] = {name: [] for name in ways}
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    for _ in range(arguments.turns):
        for name, way in ways.items():
            begin.record()
            step(way, leaves)
            end.record()
            end.synchronize()
            samples[name].append(begin.elapsed_time(end) * 1e3)
    flops = 6.0 * arguments.tokens * arguments.size * arguments.classes
    rows: list[dict[str, Any]] = []
    for name in list(ways)[:2]:
        timings = {}
        for key, values in (("ours", samples[name]), (PEER, samples[PEER])):
            timings[key] = summarised(values)
        what = f"linear_cross_entropy {arguments.tokens}x{arguments.size}x{arguments.classes}"
        suffix = f"{name[4:]}; {report[name]['extra_mb']:.0f} MB extra, compiled {report[PEER]['extra_mb']:.0f} MB"
        rows.append(
            {
                "op": what + suffix,
                "direction": "",
                "dtype": "bf16",
                "peer": PEER,
                "timings": {key: asdict(timing) for key, timing in timings.items()},
                "tflops": {key: flops / timing.median_us / 1e6 for key, timing in timings.items()},
                "speedup": timings[PEER].median_us / timings["ours"].median_us,
                **report[name],
            }
        )
    run = {"machine": describe_machine(torch.device("cuda")), "products": rows}
    print_and_store(run, arguments.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
