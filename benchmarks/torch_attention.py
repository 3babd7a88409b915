"""Our attention on the CPU against torch's scaled_dot_product_attention, forward and backward.

    python benchmarks/torch_attention.py [--quick] [--only WORD] [--threads N] [--output FILE]

TFLOP/s count 4 * queries * keys * head size per head and batch, half of it where causal, and 2.5 times that backward;
`faster` is the median of the ratios of neighbouring turns, which a busy machine disturbs least. Every row is checked
before it is timed: our error against fp64 on the same values may be 1.1 times torch's. GPUs: attention_cuda.py.
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
from kernel_pytorch.functional import attention
from measure import keep_freed_memory
from table import print_and_store
from timing import summarised
from torch_norms import describe_machine

PEER = "torch"
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
Tensors = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Case:
    dtype: str
    size: int
    causal: bool
    batch: int = 1
    heads: int = 8
    key_heads: int = 8
    queries: int = 2048
    keys: int = 2048

    @property
    def name(self) -> str:
        heads = f"H{self.heads}" if self.heads == self.key_heads else f"H{self.heads}/{self.key_heads}"
        lengths = f"S{self.queries}" if self.queries == self.keys else f"S{self.queries}x{self.keys}"
        return f"{self.dtype} B{self.batch} {heads} {lengths} D{self.size} {'causal' if self.causal else 'full'}"

    def flops(self, direction: str) -> float:
        products = 4.0 if direction == "forward" else 10.0
        scores = self.batch * self.heads * self.queries * self.keys * (0.5 if self.causal else 1.0)
        return products * scores * self.size


CASES = [
    *(Case(dtype, size, causal) for dtype in ("fp32", "bf16") for size in (64, 128) for causal in (True, False)),
    Case("fp16", 64, True),
    Case("fp32", 128, False, heads=32, key_heads=8, queries=512, keys=512),
    Case("fp32", 128, False, batch=4, heads=32, queries=1, keys=4096, key_heads=8),
]


def ours(case: Case) -> Callable[..., torch.Tensor]:
    return lambda q, k, v: attention(q, k, v, causal=case.causal)


def torchs(case: Case) -> Callable[..., torch.Tensor]:
    grouped = case.heads != case.key_heads
    return lambda q, k, v: torch_functional.scaled_dot_product_attention(
        q, k, v, is_causal=case.causal, enable_gqa=grouped
    )


def make_inputs(case: Case) -> Tensors:
    generator = torch.Generator().manual_seed(0)
    shapes = [(case.heads, case.queries), (case.key_heads, case.keys), (case.key_heads, case.keys)]
    return tuple(
        torch.randn(case.batch, heads, rows, case.size, generator=generator).to(DTYPES[case.dtype])
        for heads, rows in shapes
    )


def backward_way(function: Callable[..., torch.Tensor], inputs: Tensors) -> Callable[[], Any]:
    leaves = tuple(tensor.detach().requires_grad_() for tensor in inputs)
    result = function(*leaves)
    gradient = torch.randn(result.shape, generator=torch.Generator().manual_seed(1)).to(result.dtype)
    return lambda: torch.autograd.grad(result, leaves, gradient, retain_graph=True)


def forward_way(function: Callable[..., torch.Tensor], inputs: Tensors) -> Callable[[], Any]:
    def way() -> Any:
        with torch.no_grad():
            return (function(*inputs),)

    return way


WAYS = {"forward": forward_way, "backward": backward_way}
FAILURES: list[str] = []


def check(case: Case, direction: str, inputs: Tensors, mine: Tensors, theirs: Tensors) -> None:
    """Adds to FAILURES where ours is further from exact than 1.1 times torch's error, and than fp32's rounding."""
    exact = WAYS[direction](torchs(case), tuple(tensor.double() for tensor in inputs))()
    for wanted, our_result, their_result in zip(exact, mine, theirs, strict=True):
        error, peers = ((wanted - result.double()).abs().max().item() for result in (our_result, their_result))
        if not error <= max(1.1 * peers, 2e-6 * wanted.abs().max().item()):
            FAILURES.append(f"{case.name} {direction}: ours is {error:.1e} from exact, torch's {peers:.1e}")


def run_case(case: Case, direction: str, seconds: float) -> dict[str, Any]:
    inputs = make_inputs(case)
    make_way = WAYS[direction]
    ways = {"ours": make_way(ours(case), inputs), PEER: make_way(torchs(case), inputs)}
    check(case, direction, inputs, ways["ours"](), ways[PEER]())
    samples: dict[str, list[float]] = {name: [] for name in ways}
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(samples[PEER]) < 7:
        for name, way in ways.items():
            begin = time.perf_counter_ns()
            way()
            samples[name].append((time.perf_counter_ns() - begin) / 1e3)
    timings = {name: summarised(values) for name, values in samples.items()}
    ratios = [theirs / mine for mine, theirs in zip(samples["ours"], samples[PEER], strict=True)]
    return {
        "op": f"attention {case.name}",
        "direction": direction,
        **asdict(case),
        "peer": PEER,
        "timings": {name: asdict(timing) for name, timing in timings.items()},
        "tflops": {name: case.flops(direction) / timing.median_us / 1e6 for name, timing in timings.items()},
        "speedup": statistics.median(ratios),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a second a row instead of four")
    parser.add_argument("--only", default="", help="only rows whose 'name direction' holds this text")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--output", type=Path, help="write the results as JSON")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    keep_freed_memory()
    rows = []
    for case in CASES:
        for direction in WAYS:
            if arguments.only not in f"{case.name} {direction}":
                continue
            rows.append(run_case(case, direction, 1.0 if arguments.quick else 4.0))
            print(f"{case.name} {direction}: {rows[-1]['speedup']:.2f}x", file=sys.stderr, flush=True)
    if not rows:
        sys.exit(f"torch_attention: --only {arguments.only!r}: no row has this text")
    run = {"machine": describe_machine(torch.device("cpu")), "attention": rows}
    print_and_store(run, arguments.output)
    for failure in FAILURES:
        print(f"torch_attention: {failure}", file=sys.stderr)
    return 1 if FAILURES else 0


if __name__ == "__main__":
    sys.exit(main())
