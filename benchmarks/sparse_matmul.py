"""Products with 2:4 weights against torch's dense product in bf16 and, on a GPU, torch's own 2:4 product (cuSPARSELt).

    python benchmarks/sparse_matmul.py [--shape MxNxK ...] [--device cpu] [--seconds S] [--configs] [--output FILE]

Rates are of the dense product's operations. Ways take turns (measure.py); on a GPU a turn is a CUDA graph. cuSPARSELt
is timed with torch's default algorithm and with the one that its own search finds best, with its results in either
order. --configs times each config of our kernel.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import measure
import torch
import torch.nn.functional as torch_functional
from table import print_and_store
from torch_norms import describe_machine

from kernel_pytorch import functional, tuning

CONFIGS = [
    "rows=256 stages=5 cluster=2 boxes=1", "rows=256 stages=4 cluster=2 boxes=2",
    "rows=256 stages=4 cluster=1 boxes=2", "rows=128 stages=6 cluster=2 boxes=2",
]  # fmt: skip


def cusparselt(weight: torch.Tensor, x: torch.Tensor) -> dict[str, Callable[[int], torch.Tensor]]:
    if x.device.type != "cuda":
        return {}
    dense = functional.sparse_compress(weight).to_dense()
    compressed = torch._cslt_compress(dense)
    across = x.t()
    ways = {}
    for turns in (False, True):
        best = torch._cslt_sparse_mm_search(compressed, across, transpose_result=turns)
        name = "cuSPARSELt" + (", output as ours" if turns else ", output transposed")
        for algorithm, label in ((0, ""), (best, ", its best algorithm")):
            ways[name + label] = lambda i, algorithm=algorithm, turns=turns: torch._cslt_sparse_mm(
                compressed, across, alg_id=algorithm, transpose_result=turns
            )
    return ways


def products(shape: tuple[int, int, int], device: torch.device, seconds: float, configs: bool) -> dict[str, Any]:
    m, n, k = shape
    x = torch.randn(m, k, device=device, dtype=torch.bfloat16)
    weight = torch.randn(n, k, device=device, dtype=torch.bfloat16) * k**-0.5
    sparse = functional.sparse_compress(weight)
    expected = torch_functional.linear(x[:64].float(), sparse.to_dense().float())
    error = (functional.sparse_matmul(x, sparse)[:64].float() - expected).abs().max().item()
    assert error < 0.1, f"{shape}: off by {error}"
    ways: dict[str, Any] = {
        "torch bf16": lambda i: torch_functional.linear(x, weight),
        "ours": lambda i: functional.sparse_matmul(x, sparse),
        **cusparselt(weight, x),
    }
    if configs:
        for config in CONFIGS:
            ways[config] = lambda i, config=config: with_config(config, x, sparse)
    with torch.no_grad():
        times = measure.compare(ways, 1, device, seconds)
    line = {"what": f"{m} x {n} x {k}"}
    for name, time in times.items():
        rate = 2e-6 * m * n * k / time.median_us
        line[name] = f"{time.median_us:.1f} µs, {rate:.0f} TFLOP/s" if rate > 10 else f"{time.median_us:.1f} µs"
    return line


def with_config(config: str, x: torch.Tensor, sparse: Any) -> torch.Tensor:
    with tuning.overlay({"sparse_matmul": f"sm90 {config}"}):
        return functional.sparse_matmul(x, sparse)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", nargs="+", default=["8192x8192x8192", "4096x4096x4096", "64x8192x8192"])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seconds", type=float, default=1.0, help="of timing, a line")
    parser.add_argument("--configs", action="store_true")
    parser.add_argument("--output", type=Path, help="write the figures as JSON")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    device = torch.device(arguments.device)
    figures = []
    for text in arguments.shape:
        m, n, k = map(int, text.split("x"))
        figures.append(products((m, n, k), device, arguments.seconds, arguments.configs))
        print(figures[-1], flush=True)
        run = {"machine": describe_machine(device), "columns": list(figures[0]), "figures": figures}
        print_and_store(run, arguments.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
