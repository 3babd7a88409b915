"""What it saves to round to FP8 where a tensor is made: norms, gates, gradients of gates, and a Llama block of them.

    python benchmarks/fp8_fused.py [--device cuda|cpu] [--tokens N] [--dim N] [--hidden N] [--seconds S] [--output FILE]

Against the same in parts: the op in bf16, then its cast. Both write codes and transposed codes, as a training step
needs them, with amax. Casts alone stand against a copy of x, which moves as many bytes as one that reads x once.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from fp8_linear import Block
from llama_block import EPS, HEAD, OURS
from measure import capture_stream, compare
from timing import Timing
from torch import Tensor
from torch_norms import describe_machine

from kernel_pytorch import functional, precision

RECIPES: dict[str, dict[str, Any]] = {
    "delayed": {"granularity": "tensor", "scale": 0.01},
    "current": {"granularity": "tensor"},
    "blockwise": {"granularity": "1x128"},
}
Rows = list[dict[str, Any]]


class FusedBlock(Block):
    """The block of fp8_linear.py with norms and the gate rounded where they are made."""

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        packed = precision.fp8_norm_linear(x, self.qkv, self.norms[0], EPS).view(*x.shape[:2], -1, HEAD)
        query, key, value = packed.split([self.heads, self.key_heads, self.key_heads], 2)
        query, key = self.functions.rope(query, key, cos, sin)
        attended = torch.nn.functional.scaled_dot_product_attention(
            query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), is_causal=True, enable_gqa=True
        )
        output, total = precision.fp8_gated_mlp(
            self.out(attended.transpose(1, 2).flatten(2)), self.gate_up, self.down, norm_weight=self.norms[1],
            eps=EPS, residual=x,
        )  # fmt: skip
        return total + output


def options_of(recipe: str, device: torch.device, of_gradient: bool) -> dict[str, Any]:
    options = {**RECIPES[recipe], "transposed": True, "amax": torch.zeros(1, device=device)}
    options["square_transpose"] = recipe == "blockwise" and not of_gradient
    if of_gradient:
        options["dtype"] = torch.float8_e5m2
    if "scale" in options:
        options["scale"] = torch.full((1,), options["scale"], device=device)
    return options


def fused_ways(recipe: str, options: argparse.Namespace) -> dict[str, dict[str, Callable[[int], object]]]:
    """By what is made: fused and in parts."""
    device, rows, dim, hidden = options.device, options.tokens, options.dim, options.hidden

    def random(columns: int) -> list[Tensor]:
        return [torch.randn(rows, columns, device=device, dtype=torch.bfloat16) for _ in range(2)]

    x, residual, weight = random(dim), random(dim), torch.randn(dim, device=device, dtype=torch.bfloat16)
    packed, grads = random(2 * hidden), random(hidden)
    told, of_gradient = options_of(recipe, device, False), options_of(recipe, device, True)
    backward = torch.ops.kernel_pytorch.gated_activation_packed_backward.default

    def gate_parts(i: int) -> object:
        return functional.quantize(functional.swiglu_packed(packed[i]), **told)

    def gradient_parts(i: int) -> object:
        made = backward(grads[i], packed[i], None, None, "silu", 0.0, False)[0]
        return functional.quantize(made, **of_gradient)

    return {
        "gate": {
            "fused": lambda i: functional.gated_activation_quantized(*packed[i].chunk(2, 1), **told),
            "parts": gate_parts,
        },
        "gradient of a gate": {
            "fused": lambda i: functional.gated_activation_backward_quantized(
                grads[i], *packed[i].chunk(2, 1), **of_gradient
            ),
            "parts": gradient_parts,
        },
        "norm": {
            "fused": lambda i: functional.rms_norm_quantized(x[i], weight, **told),
            "parts": lambda i: functional.quantize(functional.rms_norm(x[i], weight), **told),
        },
        "norm of a sum": {
            "fused": lambda i: functional.rms_norm_quantized(x[i], weight, residual=residual[i], **told),
            "parts": lambda i: functional.quantize(functional.add_rms_norm(x[i], residual[i], weight)[0], **told),
        },
    }


def cast_ways(options: argparse.Namespace) -> dict[str, Callable[[int], object]]:
    x = [torch.randn(options.tokens, options.dim, device=options.device, dtype=torch.bfloat16) for _ in range(3)]
    ways: dict[str, Callable[[int], object]] = {"copy": lambda i: x[i].clone()}
    for recipe in RECIPES:
        told = options_of(recipe, options.device, False)
        ways[recipe] = lambda i, told=told: functional.quantize(x[i], **told)  # type: ignore[misc]
    plain = {**options_of("blockwise", options.device, False), "square_transpose": False}
    ways["1x128 both ways"] = lambda i: functional.quantize(x[i], **plain)
    return ways


def block_ways(recipe: str, options: argparse.Namespace) -> dict[str, Callable[[int], object]]:
    device, dim = options.device, options.dim
    x = torch.randn(1, options.tokens, dim, device=device, dtype=torch.bfloat16).requires_grad_()
    grad = torch.randn_like(x)
    cos, sin = functional.rope_tables(options.tokens, HEAD, device=device)
    sums = "all" if recipe == "blockwise" else "backward"
    config = precision.FP8Config(scaling_strategy=recipe, accurate_sums=sums, convert="all")
    ways: dict[str, Callable[[int], object]] = {}
    for name, kind in (("fused", FusedBlock), ("parts", Block)):
        model = precision.convert_model_to_fp8(kind(dim, options.hidden, OURS).to(device, torch.bfloat16), config)
        parameters = list(model.parameters())

        def step(_: int, model: Any = model, parameters: list[Any] = parameters) -> object:
            gradients = torch.autograd.grad(model(x, cos, sin), (x, *parameters), grad)
            precision.update_fp8_scales(model)
            return gradients

        ways[name] = step
    return ways


def text_of(timing: Timing) -> str:
    return f"{timing.median_us:.1f} µs ({timing.p25_us:.1f} to {timing.p75_us:.1f})"


def add_pair(rows: Rows, what: str, timings: dict[str, Timing]) -> None:
    fused, parts = timings["fused"], timings["parts"]
    ours = f"{text_of(fused)}, {parts.median_us / fused.median_us:.2f}x"
    rows.append({"what": what, "ours": ours, "torch": f"in parts: {text_of(parts)}"})


def measure_all(options: argparse.Namespace, keep: Callable[[Rows], None]) -> None:
    rows: Rows = []
    device, sizes = options.device, f"{options.tokens}x{options.dim}, {options.hidden}"
    for recipe in RECIPES:
        for what, ways in fused_ways(recipe, options).items():
            add_pair(rows, f"{what}, {recipe}, {sizes}", compare(ways, 2, device, options.seconds))
        keep(rows)
    timings = compare(cast_ways(options), 3, device, options.seconds)
    copy = timings.pop("copy")
    for name, timing in timings.items():
        ours = f"{text_of(timing)}, {100 * copy.median_us / timing.median_us:.0f} % of a copy"
        rows.append({"what": f"cast, {name}, {options.tokens}x{options.dim}", "ours": ours, "torch": text_of(copy)})
    keep(rows)
    for recipe in RECIPES:
        timings = compare(block_ways(recipe, options), 1, device, 2 * options.seconds)
        add_pair(rows, f"Llama block, forward and backward, {recipe}, {sizes}", timings)
        keep(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", type=torch.device)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--dim", type=int, default=4096)
    parser.add_argument("--hidden", type=int, default=14336)
    parser.add_argument("--seconds", type=float, default=0.2, help="for each way")
    parser.add_argument("--after", type=Path, help="wait until this file exists: other work on the GPU has ended")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    torch.manual_seed(0)
    while options.after and not options.after.exists():
        time.sleep(0.1)
    seen = 0

    def keep(rows: Rows) -> None:
        nonlocal seen
        for row in rows[seen:]:
            print(f"{row['what']:58} {row['ours']}; {row['torch']}", flush=True)
        seen = len(rows)
        if options.output:
            run = {"machine": describe_machine(options.device), "figures": rows}
            options.output.write_text(json.dumps({"benchmark": "fp8_fused", "runs": [run]}, indent=1))

    with torch.cuda.stream(capture_stream()) if options.device.type == "cuda" else torch.enable_grad():
        measure_all(options, keep)


if __name__ == "__main__":
    main()
