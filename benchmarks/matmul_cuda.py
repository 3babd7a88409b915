"""Our matrix products on a CUDA device against torch.mm, compiled F.linear with its activation, and torch._scaled_mm.

    python benchmarks/matmul_cuda.py [--quick] [--only WORD] [--output FILE]

TFLOP/s count 2 m n k; `faster` is against the peer of the row, timed in the same turns on the same N(0, 1) tensors, the
vendor's product where there is nothing around it. Every row is checked before it is timed: our error against fp32 sums
of the same values may be 1.1 times the peer's.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as torch_functional
from kernel_pytorch._ops.float8 import scaled_matmul
from kernel_pytorch.functional import linear, matmul
from measure import compare
from table import print_and_store
from torch import Tensor
from torch_norms import describe_machine

CALLS = 4  # of each way in a turn: power, not launches, is what a product waits for
FAILURES: list[str] = []


@dataclass(frozen=True)
class Case:
    name: str
    m: int
    n: int
    k: int
    peer: str
    ours: Callable[[], Tensor]
    theirs: Callable[[], Tensor]
    exact: Callable[[], Tensor]  # of the first rows
    dtype: str = "bf16"
    calls: int = CALLS  # of each way in a turn


ROWS = 256  # that are compared


def normal(*shape: int, scale: float = 1.0) -> Tensor:
    return (torch.randn(*shape, device="cuda") * scale).to(torch.bfloat16)


def plain_cases() -> list[Case]:
    cases = []
    for size in (4096, 8192):
        a, b = normal(size, size), normal(size, size)
        for order, x, y in (("nt", a, b.t()), ("nn", a, b), ("tn", a.t(), b)):

            def ours(x: Tensor = x, y: Tensor = y) -> Tensor:
                return matmul(x, y)

            def theirs(x: Tensor = x, y: Tensor = y) -> Tensor:
                return torch.mm(x, y)

            def exact(x: Tensor = x, y: Tensor = y) -> Tensor:
                return x[:ROWS].float() @ y.float()

            cases.append(Case(f"matmul {order} {size}", size, size, size, "torch.mm", ours, theirs, exact))
    return cases


def layer_cases() -> list[Case]:
    tokens, width, hidden = 8192, 4096, 14336
    x, weight, bias = normal(tokens, width), normal(hidden, width, scale=width**-0.5), normal(hidden)
    pairs = normal(2 * hidden, width, scale=width**-0.5)
    halves = torch.cat((pairs[0::2], pairs[1::2]))

    @torch.compile
    def gelu_layer(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return torch_functional.gelu(torch_functional.linear(x, weight, bias))

    @torch.compile
    def swiglu_layer(x: Tensor, weight: Tensor) -> Tensor:
        gate, up = torch_functional.linear(x, weight).chunk(2, dim=-1)
        return torch_functional.silu(gate) * up

    def exact_gelu() -> Tensor:
        return torch_functional.gelu(x[:ROWS].float() @ weight.float().t() + bias.float())

    def exact_swiglu() -> Tensor:
        sums = x[:ROWS].float() @ pairs.float().t()
        return torch_functional.silu(sums[:, 0::2]) * sums[:, 1::2]

    return [
        Case(
            "linear + bias + gelu",
            tokens,
            hidden,
            width,
            "compiled",
            lambda: linear(x, weight, bias, activation="gelu"),
            lambda: gelu_layer(x, weight, bias),
            exact_gelu,
        ),
        Case(
            "linear + swiglu",
            tokens,
            2 * hidden,
            width,
            "compiled",
            lambda: linear(x, pairs, activation="swiglu"),
            lambda: swiglu_layer(x, halves),
            exact_swiglu,
        ),
    ]


def inference_cases() -> list[Case]:
    """Few tokens: the weight has to be read, so every call takes another one, together more than a cache holds."""
    cases = []
    for n, k in ((4096, 4096), (6144, 4096), (28672, 4096), (4096, 14336)):
        x = normal(128, k)
        weights = [normal(n, k, scale=k**-0.5) for _ in range(max(2, -(-(2 << 27) // (2 * n * k))))]
        ours, theirs = itertools.cycle(weights), itertools.cycle(weights)

        def mine(x: Tensor = x, weights: Iterator[Tensor] = ours) -> Tensor:
            return matmul(x, next(weights).t())

        def peers(x: Tensor = x, weights: Iterator[Tensor] = theirs) -> Tensor:
            return torch.mm(x, next(weights).t())

        def exact(x: Tensor = x, weight: Tensor = weights[0]) -> Tensor:
            return x.float() @ weight.float().t()

        name = f"matmul 128 tokens {n} {k}"
        cases.append(Case(name, 128, n, k, "torch.mm", mine, peers, exact, calls=len(weights)))
    return cases


def float8_cases() -> list[Case]:
    cases = []
    for size in (4096, 8192):
        a = torch.randn(size, size, device="cuda").to(torch.float8_e4m3fn)
        b = torch.randn(size, size, device="cuda").to(torch.float8_e4m3fn)
        blocks = size // 128
        one, rows = torch.rand(1, device="cuda") + 0.5, torch.rand(2, size, device="cuda") + 0.5
        thin = (torch.rand(blocks, size, device="cuda") + 0.5).t()  # rows fastest, as quantize writes them
        square = torch.rand(blocks, blocks, device="cuda") + 0.5
        scales = {
            "tensor": (one, one, one, one),
            "row": (rows[0], rows[1], rows[0][:, None], rows[1][None, :]),
            "1x128, 128x128": (thin, square, thin, square.t()),
        }
        for name, (scale_a, scale_b, their_a, their_b) in scales.items():
            fast = "128" not in name

            def ours(
                a: Tensor = a, b: Tensor = b, sa: Tensor = scale_a, sb: Tensor = scale_b, fast: bool = fast
            ) -> Tensor:
                return scaled_matmul(a, b, sa, sb, accurate=not fast)

            def theirs(
                a: Tensor = a, b: Tensor = b, sa: Tensor = their_a, sb: Tensor = their_b, fast: bool = fast
            ) -> Tensor:
                return torch._scaled_mm(a, b.t(), sa, sb, out_dtype=torch.bfloat16, use_fast_accum=fast)

            def exact(a: Tensor = a, b: Tensor = b, sa: Tensor = scale_a, sb: Tensor = scale_b) -> Tensor:
                return spread(a, sa)[:ROWS] @ spread(b, sb).t()

            cases.append(
                Case(f"scaled_matmul {name} {size}", size, size, size, "_scaled_mm", ours, theirs, exact, "e4m3")
            )
    return cases


def spread(codes: Tensor, scale: Tensor) -> Tensor:
    """What the codes stand for."""
    rows, columns = codes.shape
    if scale.dim() == 1:
        scale = scale[:, None]
    if scale.shape[0] not in (1, rows):
        scale = scale.repeat_interleave(128, 0)
    if scale.shape[1] not in (1, columns):
        scale = scale.repeat_interleave(128, 1)
    return codes.float() * scale


def check(case: Case) -> None:
    exact = case.exact()
    errors = [((way()[:ROWS].float() - exact).norm() / exact.norm()).item() for way in (case.ours, case.theirs)]
    if not errors[0] <= max(1.1 * errors[1], 1e-3):
        FAILURES.append(f"{case.name}: {errors[0]:.2e} from exact, the peer's {errors[1]:.2e}")


def run_case(case: Case, device: torch.device, seconds: float) -> dict[str, Any]:
    ways = {"ours": lambda _: case.ours(), case.peer: lambda _: case.theirs()}
    timings = compare(ways, case.calls, device, seconds)
    flops = 2.0 * case.m * case.n * case.k
    return {
        "op": case.name,
        "direction": "",
        "dtype": case.dtype,
        "m": case.m,
        "n": case.n,
        "k": case.k,
        "peer": case.peer,
        "timings": {name: asdict(timing) for name, timing in timings.items()},
        "tflops": {name: flops / timing.median_us / 1e6 for name, timing in timings.items()},
        "speedup": timings[case.peer].median_us / timings["ours"].median_us,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a fifth of a second a way instead of one")
    parser.add_argument("--only", default="", help="only rows whose name holds this text")
    parser.add_argument("--output", type=Path, help="write the results as JSON")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("matmul_cuda: torch sees no CUDA device here")
    device = torch.device("cuda")
    rows = []
    for make in (plain_cases, inference_cases, layer_cases, float8_cases):
        for case in make():
            if arguments.only not in case.name:
                continue
            check(case)
            rows.append(run_case(case, device, 0.2 if arguments.quick else 1.0))
            mine, theirs = rows[-1]["tflops"]["ours"], rows[-1]["tflops"][case.peer]
            text = f"{case.name}: {mine:.0f} against {theirs:.0f} TFLOP/s, {rows[-1]['speedup']:.3f}x"
            print(text, file=sys.stderr, flush=True)
    if not rows:
        sys.exit(f"matmul_cuda: --only {arguments.only!r}: no row has this text")
    run = {"machine": describe_machine(device), "products": rows}
    print_and_store(run, arguments.output)
    for failure in FAILURES:
        print(f"matmul_cuda: {failure}", file=sys.stderr)
    return 1 if FAILURES else 0


if __name__ == "__main__":
    sys.exit(main())
