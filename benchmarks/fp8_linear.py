"""A training step in FP8 against bf16: one linear layer, and a Llama block.

    python benchmarks/fp8_linear.py [--device cuda|cpu] [--tokens N] [--features IN OUT] [--block] [--output FILE]

A step is forward and backward with everything it needs: casts, transposes, amax, and for delayed scaling the update of
its scales. The linear layer stands against F.linear in bf16; the block, whose norms, rope and gate are ours in both,
against torch.compile of the same block in bf16. On a CPU, where FP8 is emulated, it is a test of this script.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
import torch.nn.functional as torch_functional
from llama_block import HEAD, OURS, TORCH, Functions
from measure import capture_stream, compare
from timing import Timing
from torch import Tensor, nn
from torch_norms import describe_machine

from kernel_pytorch import functional, precision

# Recipes, and whose sums leave the FP8 accumulator every 128 of k; block scales always ask for it.
WAYS = (
    ("delayed", "none"),
    ("delayed", "backward"),
    ("current", "none"),
    ("current", "backward"),
    ("blockwise", "all"),
)


def linear_ways(tokens: int, features: tuple[int, int], device: torch.device, buffers: int) -> dict[str, object]:
    inside, outside = features
    dtype = torch.bfloat16
    x = [torch.randn(tokens, inside, device=device, dtype=dtype).requires_grad_() for _ in range(buffers)]
    grads = [torch.randn(tokens, outside, device=device, dtype=dtype) for _ in range(buffers)]
    plain = nn.Linear(inside, outside, bias=False, device=device, dtype=dtype)

    def step_of(layer: nn.Module) -> object:
        def step(i: int) -> object:
            gradients = torch.autograd.grad(layer(x[i]), (x[i], plain.weight), grads[i])
            if isinstance(layer, precision.FP8LinearLayer):
                precision.update_fp8_scales(layer)
            return gradients

        return step

    ways: dict[str, object] = {"bf16": step_of(plain)}
    for recipe, sums in WAYS:
        config = precision.FP8Config(scaling_strategy=recipe, accurate_sums=sums)
        ways[f"{recipe}, accurate: {sums}"] = step_of(precision.FP8LinearLayer.from_linear(plain, config))
    return ways


class Block(nn.Module):
    """A Llama block of nn.Linear layers around torch's attention."""

    def __init__(self, dim: int, hidden: int, functions: Functions) -> None:
        super().__init__()
        self.functions = functions
        self.heads, self.key_heads = dim // HEAD, max(dim // HEAD // 4, 1)
        self.qkv = nn.Linear(dim, (self.heads + 2 * self.key_heads) * HEAD, bias=False)
        self.out = nn.Linear(dim, dim, bias=False)
        self.gate_up = nn.Linear(dim, 2 * hidden, bias=False)
        self.down = nn.Linear(hidden, dim, bias=False)
        self.norms = nn.ParameterList([nn.Parameter(torch.ones(dim)) for _ in range(2)])

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        functions = self.functions
        packed = self.qkv(functions.norm(x, self.norms[0])).view(*x.shape[:2], -1, HEAD)
        query, key, value = packed.split([self.heads, self.key_heads, self.key_heads], 2)
        query, key = functions.rope(query, key, cos, sin)
        attended = torch_functional.scaled_dot_product_attention(
            query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), is_causal=True, enable_gqa=True
        )
        normed, x = functions.add_norm(self.out(attended.transpose(1, 2).flatten(2)), x, self.norms[1])
        return x + self.down(functions.swiglu_packed(self.gate_up(normed)))


def block_ways(tokens: int, dim: int, hidden: int, device: torch.device, buffers: int) -> dict[str, object]:
    dtype = torch.bfloat16
    x = [torch.randn(1, tokens, dim, device=device, dtype=dtype).requires_grad_() for _ in range(buffers)]
    grad = torch.randn(1, tokens, dim, device=device, dtype=dtype)
    cos, sin = functional.rope_tables(tokens, HEAD, device=device)

    def step_of(model: nn.Module, run: object) -> object:
        parameters = list(model.parameters())

        def step(i: int) -> object:
            gradients = torch.autograd.grad(run(x[i], cos, sin), (x[i], *parameters), grad)
            precision.update_fp8_scales(model)
            return gradients

        return step

    plain = Block(dim, hidden, TORCH).to(device, dtype)
    ways: dict[str, object] = {"torch.compile bf16": step_of(plain, torch.compile(plain))}
    for recipe, sums in WAYS:
        model = Block(dim, hidden, OURS).to(device, dtype)
        config = precision.FP8Config(scaling_strategy=recipe, accurate_sums=sums, expected_tokens=tokens)
        precision.convert_model_to_fp8(model, config)
        ways[f"{recipe}, accurate: {sums}"] = step_of(model, model)
    return ways


def report(title: str, timings: dict[str, Timing], flops: float) -> list[dict[str, object]]:
    first = next(iter(timings.values())).median_us
    rows = [
        {
            "case": title,
            "way": name,
            "us": round(timing.median_us, 1),
            "p25_us": round(timing.p25_us, 1),
            "p75_us": round(timing.p75_us, 1),
            "tflops": round(flops / timing.median_us / 1e6, 1),
            "speedup": round(first / timing.median_us, 3),
        }
        for name, timing in timings.items()
    ]
    print(title)
    for row in rows:
        print(f"  {row['way']:28} {row['us']:10} us  {row['tflops']:8} TFLOP/s  {row['speedup']:6}x", flush=True)
    return rows


def figures_of(rows: list[dict[str, object]]) -> list[dict[str, str]]:
    """The rows as table.py prints them: each way beside the first of its case."""
    figures = []
    peer: dict[str, object] = {}
    for row in rows:
        if row["speedup"] == 1.0:
            peer = row
            continue
        text = f"{row['us']:.0f} µs ({row['p25_us']:.0f} to {row['p75_us']:.0f}), {row['tflops']:.0f} TFLOP/s"
        figures.append(
            {
                "what": f"{row['case']}, forward and backward; {row['way']}",
                "ours": f"{text}, {row['speedup']:.2f}x",
                "torch": f"{peer['way']}: {peer['us']:.0f} µs ({peer['p25_us']:.0f} to {peer['p75_us']:.0f})",
            }
        )
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--features", type=int, nargs=2, default=(4096, 14336))
    parser.add_argument("--block", action="store_true", help="the Llama block as well")
    parser.add_argument("--seconds", type=float, default=1.0, help="for each way")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    device = torch.device(options.device)
    torch.manual_seed(0)
    inside, outside = options.features
    with torch.cuda.stream(capture_stream()) if device.type == "cuda" else torch.enable_grad():
        ways = linear_ways(options.tokens, (inside, outside), device, 2)
        timings = compare(ways, 2, device, options.seconds)
        title = f"linear {inside} -> {outside}, {options.tokens} tokens"
        rows = report(title, timings, 6.0 * options.tokens * inside * outside)
        if options.block:
            ways = block_ways(options.tokens, inside, outside, device, 1)  # its tensors exceed any cache
            timings = compare(ways, 1, device, options.seconds)
            products = inside * (inside * 5 // 2 + 3 * outside)
            rows += report(f"Llama block, {options.tokens} tokens", timings, 6.0 * options.tokens * products)
    if options.output:
        run = {"machine": describe_machine(device), "figures": figures_of(rows), "rows": rows}
        options.output.write_text(json.dumps({"benchmark": "fp8_linear", "runs": [run]}, indent=1))


if __name__ == "__main__":
    main()
