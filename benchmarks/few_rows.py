"""Linear layers of few rows, as in decoding: ours against torch's in CUDA graphs, so that no launch is waited for.

    python benchmarks/few_rows.py [--rows N,...] [--output FILE]

A graph holds one call for each of several weights, together larger than L2, as the layers of a model are. A gated
layer is silu(x gate^T) * (x up^T): ours is one call; torch's is two linears and our gated_activation, which stands for
the one pass that a compiler makes of it. Ours and torch's take turns; a figure is the median of a call's times.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as torch_functional
from table import print_and_store
from torch import Tensor
from torch_norms import describe_machine

from kernel_pytorch import functional

# out x in: a small decoder, Llama 3 8B, and the gated layers of both
LAYERS = ((1024, 2048), (2048, 2048), (2048, 6144), (4096, 4096), (6144, 4096), (4096, 14336), (32000, 2048))
GATED = ((6144, 2048), (14336, 4096))
WEIGHT_BYTES = 400_000_000  # in a graph: several times L2
TURNS, REPLAYS = 9, 5

Call = Callable[[Tensor, Tensor], Tensor]


def plain(x: Tensor, weight: Tensor) -> Tensor:
    return torch_functional.linear(x, weight)


def ours(x: Tensor, weight: Tensor) -> Tensor:
    return functional.linear(x, weight)


def plain_gated(x: Tensor, weight: Tensor) -> Tensor:
    gate, up = weight.chunk(2)
    return functional.gated_activation(torch_functional.linear(x, gate), torch_functional.linear(x, up), "silu")


def ours_gated(x: Tensor, weight: Tensor) -> Tensor:
    gate, up = weight.chunk(2)
    return functional.linear(x, gate, activation="silu", weight_up=up)


def captured(call: Call, x: Tensor, weights: list[Tensor]) -> torch.cuda.CUDAGraph:
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for weight in weights[:2]:
            call(x, weight)
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for weight in weights:
            call(x, weight)
    return graph


def microseconds(graph: torch.cuda.CUDAGraph, calls: int) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    graph.replay()
    start.record()
    for _ in range(REPLAYS):
        graph.replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e3 / (REPLAYS * calls)


def row(rows: int, size: tuple[int, int], gated: bool) -> dict[str, Any]:
    out, inner = size
    matrix = (2 * out if gated else out, inner)
    count = max(2, WEIGHT_BYTES // (2 * matrix[0] * inner))
    x = torch.randn(rows, inner, device="cuda", dtype=torch.bfloat16)
    weights = [torch.randn(matrix, device="cuda", dtype=torch.bfloat16) * inner**-0.5 for _ in range(count)]
    calls = {"ours": ours_gated, "torch": plain_gated} if gated else {"ours": ours, "torch": plain}
    with torch.no_grad():
        error = (calls["ours"](x, weights[0]).double() - calls["torch"](x, weights[0]).double()).abs().max().item()
        assert error < 0.1, f"{rows} rows of {matrix}: ours and torch's differ by {error}"
        graphs = {name: captured(call, x, weights) for name, call in calls.items()}
        times: dict[str, list[float]] = {name: [] for name in graphs}
        for _ in range(TURNS):
            for name, graph in graphs.items():
                times[name].append(microseconds(graph, count))
    mine, theirs = (statistics.median(times[name]) for name in ("ours", "torch"))
    bandwidth = 2 * matrix[0] * inner / mine / 1e6
    what = f"{rows} x {inner} by {'two of ' if gated else ''}{out} x {inner}"
    return {
        "what": what + (", gated" if gated else ""),
        "ours": f"{mine:.1f} µs, {bandwidth:.2f} TB/s ({theirs / mine:.2f}x faster)",
        "torch": f"{theirs:.1f} µs",
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="1,8,16", help="numbers of rows, separated by commas")
    parser.add_argument("--output", type=Path, help="write the figures as JSON")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("few_rows: torch sees no CUDA device here; this benchmark is of one")
    torch.manual_seed(0)
    figures = []
    for rows in map(int, arguments.rows.split(",")):
        figures += [row(rows, size, False) for size in LAYERS] + [row(rows, size, True) for size in GATED]
    run = {"machine": describe_machine(torch.device("cuda")), "figures": figures}
    print_and_store(run, arguments.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
