"""The error of our ops against fp64, beside that of torch's own in the same dtype, forward and backward, on one device.

    python benchmarks/accuracy.py [--quick] [--device cpu|cuda] [--only WORD] [--output FILE]

Both are given the same inputs, and torch's function on those inputs in fp64 is exact. A row fails, and so does the
command, where our rms error exceeds 1.2 times torch's, or our largest error twice torch's: the largest of some thousand
errors is a single draw from the tail, which differs that much between two equally good ways of rounding. Errors below a
twentieth of the dtype's rounding unit count as none; of a single number (a loss) all below one unit do, since its error
is one such draw.

Left out: dropout (its numbers are random) and FP8 (torch has no function of the same meaning).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from accuracy_cases import CASES, Case
from torch_norms import describe_machine

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
MOST_RMS, MOST_LARGEST = 1.2, 2.0
NOTHING = 0.05  # of the dtype's rounding unit

Tensors = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Row:
    op: str
    tensor: str  # "output", or which input's gradient
    dtype: str
    size: str
    rms: float  # of our errors over the rms of the exact values
    torch_rms: float
    largest: float  # of our errors, each over the exact value's magnitude and the rms of all
    torch_largest: float
    count: int  # of values

    @property
    def ratio(self) -> float:
        return self.rms / max(self.torch_rms, 1e-300)

    @property
    def passes(self) -> bool:
        nothing = (1 if self.count == 1 else NOTHING) * torch.finfo(DTYPES[self.dtype]).eps
        return (
            self.rms <= MOST_RMS * self.torch_rms + nothing
            and self.largest <= MOST_LARGEST * self.torch_largest + nothing
        )


def results_of(function: object, inputs: Tensors, leaves: int, grads: Tensors) -> Tensors:
    """The outputs, then the gradients of the first `leaves` inputs."""
    tensors = [tensor.detach().clone() for tensor in inputs]
    for tensor in tensors[:leaves]:
        tensor.requires_grad_()
    outputs = function(*tensors)  # type: ignore[operator]
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    if leaves == 0:
        return outputs
    gradients = torch.autograd.grad(outputs, tensors[:leaves], [grad.to(outputs[0].dtype) for grad in grads])
    return tuple(output.detach() for output in outputs) + gradients


def error_of(result: torch.Tensor, exact: torch.Tensor) -> tuple[float, float]:
    difference = (result.double() - exact).abs()
    scale = exact.square().mean().sqrt().clamp_min(1e-300)
    return (difference.square().mean().sqrt() / scale).item(), (difference / (exact.abs() + scale)).max().item()


def rows_of(case: Case, size: tuple[int, ...], dtype_name: str, device: torch.device) -> Iterator[Row]:
    dtype = DTYPES[dtype_name]
    generator = torch.Generator(device).manual_seed(sum(size))

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=device, generator=generator, dtype=torch.float64).to(dtype)

    inputs = tuple(tensor.to(device) for tensor in case.inputs(random, *size))  # drawn indices are on the CPU
    wide = tuple(tensor.double() if tensor.is_floating_point() else tensor for tensor in inputs)
    with torch.no_grad():
        outputs = case.torch(*wide)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    grads = tuple(random(*output.shape) for output in outputs)
    exact = results_of(case.torch, wide, case.leaves, grads)
    theirs = results_of(case.torch, inputs, case.leaves, grads)
    ours = results_of(case.ours, inputs, case.leaves, grads)
    names = ["output"] * len(outputs) + [f"gradient {i}" for i in range(case.leaves)]
    for name, one, other, truth in zip(names, ours, theirs, exact, strict=True):
        yield Row(
            case.name,
            name,
            dtype_name,
            "x".join(map(str, size)),
            *_pairs(error_of(one, truth), error_of(other, truth)),
            truth.numel(),
        )


def _pairs(ours: tuple[float, float], theirs: tuple[float, float]) -> tuple[float, float, float, float]:
    return ours[0], theirs[0], ours[1], theirs[1]


def measure(device: torch.device, only: str = "", quick: bool = False) -> list[Row]:
    rows = []
    for case in CASES:
        if only not in case.name:
            continue
        for dtype_name in DTYPES:
            for size in case.quick if quick else (*case.quick, *case.full):
                rows.extend(rows_of(case, size, dtype_name, device))
    return rows


TITLE = f"{'op':24}{'tensor':12}{'dtype':7}{'size':16}{'rms':>9}{'torch':>10}{'ratio':>7}{'largest':>10}{'torch':>10}"


def text_of(row: Row) -> str:
    figures = f"{row.rms:9.2e} {row.torch_rms:9.2e} {row.ratio:6.2f} {row.largest:9.2e} {row.torch_largest:9.2e}"
    return f"{row.op:24}{row.tensor:12}{row.dtype:7}{row.size:16}{figures}{'' if row.passes else '  FAILS'}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small sizes alone, as the tests do")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--only", default="", help="ops whose name contains this")
    parser.add_argument("--output", type=Path, help="also as JSON")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    rows = measure(device, arguments.only, arguments.quick)
    print(TITLE)
    for row in rows:
        print(text_of(row))
    failed = sum(not row.passes for row in rows)
    print(f"{len(rows)} rows, {failed} above {MOST_RMS} times torch's rms error or {MOST_LARGEST} times its largest")
    if arguments.output:
        run = {"machine": describe_machine(device), "rows": [asdict(row) for row in rows]}
        arguments.output.write_text(json.dumps({"benchmark": "accuracy", "runs": [run]}, indent=1) + "\n")
    return 1 if failed or not rows else 0


if __name__ == "__main__":
    sys.exit(main())
