"""Our products of fp32 on a CUDA device against torch's, in full and in tf32, and attention by mma against
FlashAttention-2.

    python benchmarks/tf32_cuda.py [--only WORD] [--output FILE]

Every product is timed in four ways in the same turns: ours and torch.mm, both in fp32 (torch's TF32 off) and both in
tf32. TFLOP/s count 2 m n k. Errors are those of the first rows against fp64, relative (of norms). Kernels are
named, so that one that the list has behind another is timed all the same.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as torch_functional
from kernel_pytorch.functional import attention, linear, matmul
from measure import compare
from table import print_and_store
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch_norms import describe_machine

from kernel_pytorch.tuning import overlay

ROWS = 256  # that are compared
CALLS = 2  # of each way in a turn
SECONDS = 0.3  # of each way
KERNELS = {"full": ("sm90_tf32", "cuda_mma_fp32", "cuda_tile"), "tf32": ("sm90_tf32", "cuda_mma_fp32")}


@contextmanager
def torch_products(precision: str) -> Iterator[None]:
    setting = torch.backends.cuda.matmul
    before = setting.fp32_precision
    setting.fp32_precision = "tf32" if precision == "tf32" else "ieee"
    try:
        yield
    finally:
        setting.fp32_precision = before


def error_of(output: Tensor, exact: Tensor) -> float:
    return float((output[:ROWS].double() - exact).norm() / exact.norm())


def product_row(name: str, precision: str, a: Tensor, b: Tensor, device: torch.device) -> dict[str, Any]:
    exact = a[:ROWS].double() @ b.double()
    ways: dict[str, Callable[[int], object]] = {}
    errors = {}

    def ours_by(kernel: str) -> Callable[[int], Tensor]:
        def run(_: int) -> Tensor:
            with overlay({"matmul": kernel}):
                return matmul(a, b, precision=precision)

        return run

    def theirs(_: int) -> Tensor:
        with torch_products(precision):
            return torch.mm(a, b)

    for kernel in KERNELS[precision]:
        ways["ours" if kernel == "sm90_tf32" else kernel] = ours_by(kernel)
    ways["torch.mm"] = theirs
    for way, run in ways.items():
        errors[way] = error_of(run(0), exact)  # type: ignore[arg-type]
    timings = compare(ways, CALLS, device, SECONDS)
    m, k = a.shape
    return row_of(name, timings, 2.0 * m * b.shape[1] * k, "torch.mm", errors)


def row_of(name: str, timings: dict[str, Any], flops: float, peer: str, errors: dict[str, float]) -> dict[str, Any]:
    row = {
        "op": name,
        "direction": "",
        "dtype": "fp32",
        "peer": peer,
        "timings": {way: asdict(timing) for way, timing in timings.items()},
        "tflops": {way: flops / timing.median_us / 1e6 for way, timing in timings.items()},
        "speedup": timings[peer].median_us / timings["ours"].median_us,
        "errors": errors,
    }
    rates = ", ".join(f"{way} {rate:.0f} ({errors[way]:.1e})" for way, rate in row["tflops"].items())
    print(f"{name}: {rates} TFLOP/s (error), {row['speedup']:.2f}x", file=sys.stderr, flush=True)
    return row


def layer_row(device: torch.device) -> dict[str, Any]:
    """A layer in full precision with its bias and gelu, 4096 tokens from 4096 to 4096."""
    x, weight = torch.randn(4096, 4096, device=device), torch.randn(4096, 4096, device=device) / 64
    bias = torch.randn(4096, device=device)
    exact = torch_functional.gelu(x[:ROWS].double() @ weight.double().t() + bias.double())

    def ours(_: int) -> Tensor:
        with overlay({"matmul": "sm90_tf32"}):
            return linear(x, weight, bias, activation="gelu", precision="full")

    def theirs(_: int) -> Tensor:
        with torch_products("full"):
            return torch_functional.gelu(torch_functional.linear(x, weight, bias))

    errors = {"ours": error_of(ours(0), exact), "torch": error_of(theirs(0), exact)}
    timings = compare({"ours": ours, "torch": theirs}, CALLS, device, SECONDS)
    return row_of("fp32 linear + bias + gelu 4096", timings, 2.0 * 4096**3, "torch", errors)


def attention_row(device: torch.device) -> dict[str, Any]:
    """The forward that GPUs without wgmma run, against FlashAttention-2 of the same tensors."""
    shape = (2, 16, 8192, 128)
    query, key, value = (torch.randn(shape, device=device, dtype=torch.bfloat16) for _ in range(3))

    def ours(_: int) -> Tensor:
        with overlay({"attention_forward": "cuda_mma"}):
            return attention(query, key, value, causal=True)

    def theirs(_: int) -> Tensor:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return torch_functional.scaled_dot_product_attention(query, key, value, is_causal=True)

    scores = query[0, 0, :ROWS].double() @ key[0, 0, :ROWS].double().t() / shape[-1] ** 0.5
    later = torch.ones(ROWS, ROWS, dtype=torch.bool, device=device).triu(1)
    exact = scores.masked_fill(later, -torch.inf).softmax(-1) @ value[0, 0, :ROWS].double()
    peer = "FlashAttention-2"
    errors = {"ours": error_of(ours(0)[0, 0], exact), peer: error_of(theirs(0)[0, 0], exact)}
    timings = compare({"ours": ours, peer: theirs}, CALLS, device, SECONDS)
    flops = 4.0 * shape[0] * shape[1] * shape[2] ** 2 / 2 * shape[3]
    return row_of("attention cuda_mma D128 causal 8192", timings, flops, peer, errors) | {"dtype": "bf16"}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="only rows whose name holds this text")
    parser.add_argument("--output", type=Path, help="write the results as JSON")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("tf32_cuda: torch sees no CUDA device here")
    device = torch.device("cuda")
    rows = []
    for m, n, k in ((4096, 4096, 4096), (2048, 2048, 2048), (8192, 8192, 1024)):
        a, weight = torch.randn(m, k, device=device), torch.randn(n, k, device=device)
        for precision in ("full", "tf32"):
            name = f"{'fp32' if precision == 'full' else 'tf32'} nt {m}x{n}x{k}"
            if arguments.only in name:
                rows.append(product_row(name, precision, a, weight.t(), device))
    a, b = torch.randn(4096, 4096, device=device), torch.randn(4096, 4096, device=device)
    if arguments.only in "fp32 nn 4096x4096x4096":
        rows.append(product_row("fp32 nn 4096x4096x4096", "full", a, b, device))
    if arguments.only in "fp32 linear + bias + gelu 4096":
        rows.append(layer_row(device))
    if arguments.only in "attention cuda_mma D128 causal 8192":
        rows.append(attention_row(device))
    if not rows:
        sys.exit(f"tf32_cuda: --only {arguments.only!r}: no row has this text")
    failures = [
        f"{row['op']}: error {row['errors']['ours']:.2e}, the peer's {row['errors'][row['peer']]:.2e}"
        for row in rows
        if not row["errors"]["ours"] <= 2 * row["errors"][row["peer"]]
    ]
    print_and_store({"machine": describe_machine(device), "products": rows}, arguments.output)
    for failure in failures:
        print(f"tf32_cuda: {failure}", file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
