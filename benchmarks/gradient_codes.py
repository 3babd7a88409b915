"""Gradients to codes with error feedback, and a mean of codes back: ours in one visit against torch's ops.

    python benchmarks/gradient_codes.py [--quick] [--device cpu|cuda] [--only WORD] [--output FILE]

A bucket of 268 million gradients (1 million on a CPU) for 8 processes. `share` is how fast a copy that moves the same
bytes runs in the same turns, against ours. Results of both ways are compared first.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from kernel_pytorch.advanced_memory._codes import CODES
from measure import Way, buffers_needed, compare, keep_freed_memory
from table import print_table
from torch import Tensor
from torch_norms import describe_machine, launches_of

ROWS = 8
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
CASES = [("int8", "fp32"), ("int8", "bf16"), ("int4", "fp32"), ("onebit", "fp32")]


def steps_of(values: Tensor, name: str) -> tuple[Tensor, Tensor]:
    """What a code says of blocks, as numbers of the scale, and the scales."""
    block, most = (64, 7) if name == "int4" else (256, 127)
    blocks = values.view(-1, block)
    if name == "onebit":
        return torch.where(blocks >= 0, 1.0, -1.0), blocks.abs().mean(-1, keepdim=True)
    scale = blocks.abs().amax(-1, keepdim=True) / most
    return (blocks * torch.where(scale > 0, 1 / scale, 0)).round_(), scale


def torch_encode(x: Tensor, error: Tensor, name: str) -> tuple[Tensor, Tensor]:
    error += x
    steps, scale = steps_of(error, name)
    error -= (steps * scale).view(-1)
    codes = steps.to(torch.int8).view(-1)
    if name == "int4":
        codes = (codes[::2] + 8) | (codes[1::2] + 8) << 4
    elif name == "onebit":
        codes = ((codes.view(-1, 8) > 0).to(torch.uint8) << torch.arange(8, device=x.device)).sum(-1, dtype=torch.uint8)
    return codes, scale


def encode_ways(name: str, dtype: torch.dtype, count: int, buffers: int, device: torch.device) -> dict[str, Way]:
    code, columns = CODES[name](), count // ROWS
    generator = torch.Generator(device).manual_seed(0)
    xs = [torch.randn(count, device=device, generator=generator).to(dtype) for _ in range(buffers)]
    errors = [[torch.zeros(count, device=device) for _ in xs] for _ in range(2)]
    code.encode(xs[0], ROWS, columns, errors[0][0])
    torch_encode(xs[0], errors[1][0], name)
    apart = float(((errors[0][0] - errors[1][0]).abs() > 1e-5).float().mean())
    if apart > 1e-3:  # a number between two codes goes to either, where products are rounded differently
        sys.exit(f"gradient_codes: {name}: {100 * apart:.2f} % of the errors are not those of torch's ops")
    halves = int(count * bytes_of(name, dtype)) // 2
    sources = [torch.zeros(halves, dtype=torch.uint8, device=device) for _ in xs]
    targets = [torch.empty_like(source) for source in sources]
    return {
        "ours": lambda buffer: code.encode(xs[buffer], ROWS, columns, errors[0][buffer]),
        "torch": lambda buffer: torch_encode(xs[buffer], errors[1][buffer], name),
        "copy": lambda buffer: targets[buffer].copy_(sources[buffer]),
    }


def bytes_of(name: str, dtype: torch.dtype) -> float:
    """A gradient is read, its error read and written, its code written."""
    return dtype.itemsize + 8 + CODES[name]().row_bytes(1024) / 1024


def run_case(name: str, dtype: str, device: torch.device, seconds: float) -> dict[str, Any]:
    count = 1 << (28 if device.type == "cuda" else 20)
    moved = int(count * bytes_of(name, DTYPES[dtype]))
    buffers = 1 if device.type == "cuda" else buffers_needed(moved, device)
    ways: dict[str, Callable[[int], object]] = encode_ways(name, DTYPES[dtype], count, buffers, device)
    timings = compare(ways, buffers, device, seconds)
    return {
        "op": f"{name} with error feedback",
        "direction": "encode",
        **launches_of(ways, device),
        "dtype": dtype,
        "rows": ROWS,
        "columns": count // ROWS,
        "device": device.type,
        "bytes": moved,
        "buffers": buffers,
        "timings": {way: asdict(timing) for way, timing in timings.items()},
        "share": timings["copy"].median_us / timings["ours"].median_us,
        "speedup": timings["torch"].median_us / timings["ours"].median_us,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a quarter of a second a way instead of one")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="only this one; by default every one there is")
    parser.add_argument("--only", default="", help="only rows whose 'code dtype' holds this text")
    parser.add_argument("--output", type=Path, help="write the results as JSON")
    arguments = parser.parse_args()
    if arguments.device == "cuda" and not torch.cuda.is_available():
        sys.exit("gradient_codes: --device cuda: torch sees no CUDA device here")
    keep_freed_memory()
    runs = []
    for kind in [arguments.device] if arguments.device else ["cpu"] + ["cuda"] * torch.cuda.is_available():
        device = torch.device(kind)
        cases = [case for case in CASES if arguments.only in " ".join(case)]
        rows = [run_case(name, dtype, device, 0.25 if arguments.quick else 1.0) for name, dtype in cases]
        if not rows:
            sys.exit(f"gradient_codes: --only {arguments.only!r}: no row has this text")
        runs.append({"machine": describe_machine(device), "rows": rows})
        print_table(runs[-1])
    if arguments.output:
        arguments.output.write_text(json.dumps({"benchmark": "gradient_codes", "runs": runs}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
