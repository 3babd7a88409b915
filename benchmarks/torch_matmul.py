"""Our matrix products on the CPU against torch's: plain, with few rows, layers with their activation, named precisions.

    python benchmarks/torch_matmul.py [--quick] [--only WORD] [--threads N] [--output FILE]

TFLOP/s count 2 m n k; `faster` is the median of the ratios of neighbouring turns, which a busy machine disturbs least.
Every row is checked before it is timed: our error against fp64 on the same N(0, 1) values may be 1.1 times torch's (of
a named precision, what that one is worth). GPUs: matmul_cuda.py.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as torch_functional
from kernel_pytorch.functional import linear, matmul
from measure import keep_freed_memory
from table import print_and_store
from timing import summarised
from torch import Tensor
from torch_norms import describe_machine

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
NAMED_ERRORS = {"bf16": 4e-3, "bf16x3": 1e-5}
FAILURES: list[str] = []


@dataclass(frozen=True)
class Case:
    dtype: str
    m: int
    n: int
    k: int
    order: str = "nt"  # t: stored transposed; nt is a linear layer's
    layer: str = ""  # an activation with a bias in front
    precision: str = "full"

    @property
    def name(self) -> str:
        words = [self.dtype, f"{self.m}x{self.n}x{self.k}", self.order, self.layer and f"bias + {self.layer}"]
        words.append("" if self.precision == "full" else f"as {self.precision}")
        return " ".join(word for word in words if word)

    def operands(self) -> tuple[Tensor, Tensor, Tensor]:
        dtype = DTYPES[self.dtype]
        a = torch.randn(self.m, self.k) if self.order[0] == "n" else torch.randn(self.k, self.m)
        b = torch.randn(self.k, self.n) if self.order[1] == "n" else torch.randn(self.n, self.k)
        a, b = a.to(dtype), b.to(dtype)
        return a if self.order[0] == "n" else a.T, b if self.order[1] == "n" else b.T, torch.randn(self.n).to(dtype)


CASES = [
    *(Case("fp32", 2048, 2048, 2048, order) for order in ("nn", "nt", "tn")),
    Case("bf16", 2048, 2048, 2048),
    Case("bf16", 2048, 2048, 2048, "tn"),
    Case("fp16", 2048, 2048, 2048),
    Case("fp32", 2048, 2048, 2048, precision="bf16"),
    Case("fp32", 2048, 2048, 2048, precision="bf16x3"),
    Case("fp32", 512, 4096, 1024, layer="gelu"),
    Case("bf16", 512, 4096, 1024, layer="gelu"),
    Case("fp32", 256, 256, 256, "nn"),
    *(Case(dtype, m, 4096, 4096) for dtype in ("fp32", "bf16") for m in (1, 4, 16, 64)),
]


def ours(case: Case) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    if case.layer:
        return lambda a, b, bias: linear(a, b.T, bias, activation=case.layer)
    return lambda a, b, _: matmul(a, b, precision=case.precision)


def torchs(case: Case) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    if case.layer:
        return lambda a, b, bias: getattr(torch_functional, case.layer)(torch_functional.linear(a, b.T, bias))
    return lambda a, b, _: torch.matmul(a, b)


def check(case: Case, operands: tuple[Tensor, Tensor, Tensor]) -> None:
    a, b, bias = operands
    rows = a[:64]
    exact = rows.double() @ b.double()
    if case.layer:
        exact = getattr(torch_functional, case.layer)(exact + bias.double())
    scale = exact.norm()
    mine, theirs = (((way(case)(*operands)[:64] - exact).norm() / scale).item() for way in (ours, torchs))
    allowed = NAMED_ERRORS.get(case.precision, 1.1 * max(theirs, 1e-7))
    if not mine <= allowed:
        FAILURES.append(f"{case.name}: {mine:.2e} from exact, allowed {allowed:.2e}")


def run_case(case: Case, seconds: float) -> dict[str, Any]:
    sets = [case.operands() for _ in range(2)]
    check(case, sets[0])
    ways = {"ours": ours(case), "torch": torchs(case)}
    samples: dict[str, list[float]] = {name: [] for name in ways}
    kept: dict[str, Tensor] = {}
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(samples["ours"]) < 9:
        for i, (name, way) in enumerate(ways.items()):
            begin = time.perf_counter_ns()
            kept[name] = way(*sets[i])
            samples[name].append((time.perf_counter_ns() - begin) / 1e3)
    ratios = [theirs / mine for mine, theirs in zip(samples["ours"][2:], samples["torch"][2:], strict=True)]
    timings = {name: summarised(values[2:]) for name, values in samples.items()}
    flops = 2.0 * case.m * case.n * case.k
    return {
        "op": case.name,
        "direction": "",
        "dtype": case.dtype,
        "peer": "torch",
        "timings": {name: asdict(timing) for name, timing in timings.items()},
        "tflops": {name: flops / timing.median_us / 1e6 for name, timing in timings.items()},
        "speedup": statistics.median(ratios),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one second a row instead of four")
    parser.add_argument("--only", default="", help="only rows whose name holds one of these texts, commas between")
    parser.add_argument("--threads", type=int, help="of both; torch's default otherwise")
    parser.add_argument("--output", type=Path, help="write the results as JSON")
    arguments = parser.parse_args()
    keep_freed_memory()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    chosen = [case for case in CASES if any(text in case.name for text in arguments.only.split(","))]
    rows = [run_case(case, 1.0 if arguments.quick else 4.0) for case in chosen]
    run = {"machine": describe_machine(torch.device("cpu")), "products": rows}
    print_and_store(run, arguments.output)
    for failure in FAILURES:
        print(f"torch_matmul: {failure}", file=sys.stderr)
    return 1 if FAILURES else 0


if __name__ == "__main__":
    sys.exit(main())
