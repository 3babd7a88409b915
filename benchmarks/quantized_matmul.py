"""Products with weights of 4 and 8 bits against torch's linear layer in bf16, and torch's own products with such
weights, in its packing.

    python benchmarks/quantized_matmul.py [--rows N,...] [--size OUTxIN] [--device cpu] [--seconds S] [--output FILE]
    python benchmarks/quantized_matmul.py --targets [--seconds S] [--output FILE]     the figures of NOTES.md

Ways take turns over several weights that together exceed the last-level cache (measure.py); on a GPU a turn is a CUDA
graph. `quantize` is the time of bf16 to codes and scales, next to torch's copy of the weight. With --targets other
configs of our kernels take part, named by what they set.
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


# What --targets measures beside the heuristic's choice: by rows of x, and of the cast.
PRODUCT_CONFIGS = {
    1: {"16 warps": "cuda_stream warps=16 k_warps=4 tiles=2 stages=4 box=128"},
    16: {"two sets": "cuda_wgmma rows=16 groups=4 stages=4 spans=2 sets=2"},
    64: {"two sets": "cuda_wgmma rows=64 groups=3 stages=3 spans=2 sets=2"},
}
CAST_CONFIGS = {"paired": "cuda paired=1"}


def with_kernel(op: str, choice: str, way: measure.Way) -> measure.Way:
    def chosen(i: int) -> object:
        with tuning.overlay({op: choice}):
            return way(i)

    return chosen


def targets(device: torch.device, seconds: float) -> list[dict[str, Any]]:
    """The rows of figures that NOTES.md asks for, in order; at most one weight's formats in memory beside it."""
    lines = []
    wanted = {name: FORMATS[name] for name in ("nvfp4", "mxfp4", "int4")}
    for out, inner, row_counts in ((57344, 8192, (1, 16, 64)), (8192, 8192, (4096,))):
        count = measure.buffers_needed(out * inner // 2, device)
        weights = [torch.randn(out, inner, device=device, dtype=torch.bfloat16) * inner**-0.5 for _ in range(count)]
        stored = {
            name: [functional.quantize_weight(weight, name, **options) for weight in weights]
            for name, options in wanted.items()
        }
        for rows in row_counts:
            x = torch.randn(rows, inner, device=device, dtype=torch.bfloat16)
            ways: dict[str, measure.Way] = {"torch bf16": lambda i, x=x, w=weights: torch_functional.linear(x, w[i])}
            for name, made in stored.items():
                ways[name] = lambda i, made=made, x=x: functional.quantized_matmul(x, made[i])
                part = slice(out // 2, out // 2 + 512)
                error = (ways[name](0)[:, part] - x @ made[0].dequantize()[part].t()).abs().max().item()  # type: ignore[index]
                assert error < 0.1, f"{name}, {rows} rows: off by {error}"
                for label, choice in PRODUCT_CONFIGS.get(rows, {}).items():
                    if name != "int4":
                        ways[f"{name}, {label}"] = with_kernel("quantized_matmul", choice, ways[name])
            if rows >= 64:
                ways["mxfp4, fp8 rows"] = lambda i, x=x, made=stored["mxfp4"]: functional.quantized_matmul(
                    x, made[i], activations="fp8"
                )
            times = measure.compare(ways, count, device, seconds)
            theirs = times["torch bf16"].median_us
            for name, time in times.items():
                line = {"what": f"{rows} x {inner} by {out} x {inner}", "way": name, "µs": f"{time.median_us:.1f}"}
                lines.append({**line, "against bf16": f"{theirs / time.median_us:.2f}x", "of a copy": ""})
                print(lines[-1], flush=True)
        if row_counts == (4096,):
            lines.extend(casts(weights, device, seconds))
    return lines


def casts(weights: list[torch.Tensor], device: torch.device, seconds: float) -> list[dict[str, Any]]:
    """bf16 to nvfp4 and mxfp4, and to FP8 by rows, against a copy."""
    weights = [torch.cat([weight, weight]) for weight in weights]
    one = torch.ones(1, device=device)
    elements = weights[0].numel()
    ways: dict[str, measure.Way] = {"copy": lambda i: weights[i].clone()}
    moved = {"copy": 4.0 * elements, "fp8 rows": 3.0 * elements}
    for name, options in (("nvfp4", {"tensor_scale": one}), ("mxfp4", {})):
        ways[name] = lambda i, name=name, options=options: functional.quantize_weight(weights[i], name, **options)
        moved[name] = 2.0 * elements + functional.quantize_weight(weights[0], name, **options).nbytes
        for label, choice in CAST_CONFIGS.items():
            ways[f"{name}, {label}"] = with_kernel("group_quantize", choice, ways[name])
            moved[f"{name}, {label}"] = moved[name]
    ways["fp8 rows"] = lambda i: functional.quantize(weights[i], granularity="row")
    times = measure.compare(ways, len(weights), device, seconds)
    rate = moved["copy"] / times["copy"].median_us
    lines = []
    for name, time in times.items():
        line = {"what": f"cast of {tuple(weights[0].shape)}", "way": name, "µs": f"{time.median_us:.1f}"}
        lines.append({**line, "against bf16": "", "of a copy": f"{moved[name] / time.median_us / rate:.0%}"})
        print(lines[-1], flush=True)
    return lines


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
    parser.add_argument("--targets", action="store_true", help="the figures that NOTES.md asks for, on an H200")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    if arguments.targets:
        device = torch.device(arguments.device)
        lines = targets(device, arguments.seconds)
        run = {"machine": describe_machine(device), "columns": list(lines[0]), "figures": lines}
        print_and_store(run, arguments.output)
        return 0
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
