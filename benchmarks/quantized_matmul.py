"""Products with weights of 4 and 8 bits against torch's linear layer in bf16, and torch's own products with such
weights, in its packing.

    python benchmarks/quantized_matmul.py [--rows N,...] [--size OUTxIN] [--device cpu] [--seconds S] [--output FILE]

Ways take turns over several weights that together exceed the last-level cache (measure.py); on a GPU a turn is a CUDA
graph. `quantize` is the time of bf16 to codes and scales, next to torch's copy of the weight.
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

from kernel_pytorch import functional

FORMATS = {"nvfp4": {}, "mxfp4": {}, "int4": {"group": 128}, "int8": {"group": 128}}


def packed_by_torch(weights: list[torch.Tensor]) -> dict[str, Callable[[torch.Tensor, int], torch.Tensor]]:
    """torch's own products with such weights; their content does not matter for their time."""
    out, inner = weights[0].shape
    device = weights[0].device
    scales = torch.rand(inner // 128, out, 2, device=device, dtype=torch.bfloat16)
    if device.type == "cuda":
        codes = torch.randint(0, 256, (out, inner // 2), device=device, dtype=torch.uint8)
        packed = [torch._convert_weight_to_int4pack(codes, 8) for _ in weights]
        return {"torch int4pack": lambda x, i: torch._weight_int4pack_mm(x, packed[i], 128, scales)}
    codes = torch.randint(0, 16, (out, inner), dtype=torch.int32)
    packed = [torch._convert_weight_to_int4pack_for_cpu(codes, 1) for _ in weights]
    eights = [torch.randint(-128, 128, (out, inner), dtype=torch.int8) for _ in weights]
    of_rows = torch.rand(out, dtype=torch.bfloat16)
    return {
        "torch int4pack": lambda x, i: torch._weight_int4pack_mm_for_cpu(x, packed[i], 128, scales),
        "torch int8": lambda x, i: torch._weight_int8pack_mm(x, eights[i], of_rows),
    }


def products(rows: int, size: tuple[int, int], device: torch.device, seconds: float) -> dict[str, Any]:
    out, inner = size
    count = measure.buffers_needed(out * inner // 2, device)
    x = torch.randn(rows, inner, device=device, dtype=torch.bfloat16)
    weights = [torch.randn(out, inner, device=device, dtype=torch.bfloat16) * inner**-0.5 for _ in range(count)]
    ways: dict[str, Any] = {"torch bf16": lambda i: torch_functional.linear(x, weights[i])}
    stored = {}
    for name, options in FORMATS.items():
        made = stored[name] = [functional.quantize_weight(weight, name, **options) for weight in weights]
        expected = x.double() @ made[0].dequantize(torch.float32).double().t()
        error = (functional.quantized_matmul(x, made[0]).double() - expected).abs().max().item()
        assert error < 0.1, f"{name}, {rows} rows: off by {error}"
        ways[name] = lambda i, made=made: functional.quantized_matmul(x, made[i])
    for name, way in packed_by_torch(weights).items():
        ways[name] = lambda i, way=way: way(x, i)
    with torch.no_grad():
        times = measure.compare(ways, count, device, seconds)
    theirs = times["torch bf16"].median_us
    line = {"what": f"{rows} x {inner} by {out} x {inner}"}
    for name, time in times.items():
        text = f"{time.median_us:.1f} µs"
        if name in stored:
            text += f", {stored[name][0].nbytes / time.median_us / 1e6:.2f} TB/s, {theirs / time.median_us:.2f}x"
        line[name] = text
    return line


def quantizing(size: tuple[int, int], device: torch.device, seconds: float) -> dict[str, Any]:
    out, inner = size
    count = measure.buffers_needed(2 * out * inner, device)
    weights = [torch.randn(out, inner, device=device, dtype=torch.bfloat16) for _ in range(count)]
    one = torch.ones(1, device=device)
    ways: dict[str, Any] = {"torch bf16": lambda i: weights[i].clone()}
    for name, options in FORMATS.items():
        known = {**options, "tensor_scale": one} if name == "nvfp4" else options
        ways[name] = lambda i, name=name, known=known: functional.quantize_weight(weights[i], name, **known)
    times = measure.compare(ways, count, device, seconds)
    copied = 4 * out * inner / times["torch bf16"].median_us
    line = {"what": f"quantize {out} x {inner}, share of a copy's bandwidth"}
    for name, time in times.items():
        bytes_of_codes = functional.quantize_weight(weights[0], name, **FORMATS[name]).nbytes if name in FORMATS else 0
        share = (2 * out * inner + bytes_of_codes) / time.median_us / copied
        line[name] = f"{time.median_us:.1f} µs" + (f", {share:.0%}" if name in FORMATS else "")
    return line


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="1,4,16,64,512", help="numbers of rows, separated by commas")
    parser.add_argument("--size", default="14336x4096", help="of the weight: OUTxIN")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seconds", type=float, default=1.0, help="of timing, a line")
    parser.add_argument("--output", type=Path, help="write the figures as JSON")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    out, inner = map(int, arguments.size.split("x"))
    device = torch.device(arguments.device)
    lines = []
    for rows in map(int, arguments.rows.split(",")):
        lines.append(products(rows, (out, inner), device, arguments.seconds))
        print(lines[-1], flush=True)
    lines.append(quantizing((out, inner), device, arguments.seconds))
    columns = [name for name in lines[0] if name in lines[-1]]
    columns += [name for name in lines[0] if name not in columns]
    figures = [{name: line.get(name, "") for name in columns} for line in lines]
    run = {"machine": describe_machine(device), "columns": columns, "figures": figures}
    print_and_store(run, arguments.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
