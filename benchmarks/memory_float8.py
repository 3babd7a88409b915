"""A Llama block in bf16 and in FP8, as `optimize` builds them: the part `float8` of memory.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from kernel_pytorch.precision import FP8Config, FP8LinearLayer, fp8_gated_mlp, fp8_norm_linear, fused
from torch import Tensor, nn

from kernel_pytorch import functional as F

Between = Callable[[], None]


class Block:
    """One set of weights, of which either way computes a step: forward, backward, gradients dropped at the end."""

    def __init__(self, device: torch.device) -> None:
        sizes = {"dim": 4096, "hidden": 14336, "heads": 32, "key_heads": 8, "batch": 4, "length": 4096}
        if device.type == "cpu":
            sizes = {"dim": 128, "hidden": 512, "heads": 4, "key_heads": 1, "batch": 1, "length": 64}
        self.sizes = sizes
        dim, hidden, self.size = sizes["dim"], sizes["hidden"], sizes["dim"] // sizes["heads"]
        rows = (sizes["heads"] + 2 * sizes["key_heads"]) * self.size
        config = FP8Config(scaling_strategy="current")

        def layer(columns: int, rows: int) -> FP8LinearLayer:
            return FP8LinearLayer(columns, rows, False, config, device=device, dtype=torch.bfloat16)

        self.qkv, self.out = layer(dim, rows), layer(dim, dim)
        self.gate_up, self.down = layer(dim, 2 * hidden), layer(hidden, dim)
        with torch.device(device):
            self.norms = [torch.ones(dim, dtype=torch.bfloat16, requires_grad=True) for _ in range(2)]
            self.x = torch.randn(sizes["batch"], sizes["length"], dim, dtype=torch.bfloat16, requires_grad=True)
            self.upstream = torch.randn_like(self.x)
        self.tables = F.rope_tables(sizes["length"], self.size, device=device)

    def attend(self, packed: Tensor) -> Tensor:
        heads, key_heads = self.sizes["heads"] * self.size, self.sizes["key_heads"] * self.size
        parts = packed.split([heads, key_heads, key_heads], -1)
        query, key, value = (part.view(*part.shape[:2], -1, self.size) for part in parts)
        query, key = F.rope(query, key, *self.tables)
        turned = (one.transpose(1, 2) for one in (query, key, value))
        attended = nn.functional.scaled_dot_product_attention(*turned, is_causal=True, enable_gqa=True)
        return attended.transpose(1, 2).flatten(2)

    def bf16(self) -> Tensor:
        linear = nn.functional.linear
        normed = F.rms_norm(self.x, self.norms[0], 1e-5)
        attended = linear(self.attend(linear(normed, self.qkv.weight)), self.out.weight)
        normed, total = F.rms_norm(attended, self.norms[1], 1e-5, residual=self.x)
        return linear(F.swiglu_packed(linear(normed, self.gate_up.weight)), self.down.weight) + total

    def float8(self) -> Tensor:
        attended = self.out(self.attend(fp8_norm_linear(self.x, self.qkv, self.norms[0], 1e-5)))
        output, total = fp8_gated_mlp(
            attended, self.gate_up, self.down, norm_weight=self.norms[1], eps=1e-5, residual=self.x
        )
        return output + total  # type: ignore[no-any-return]

    def step(self, forward: Callable[[], Tensor], between: Between) -> None:
        output = forward()
        between()
        output.backward(self.upstream)
        layers = (self.qkv, self.out, self.gate_up, self.down)
        for tensor in (self.x, *self.norms, *(layer.weight for layer in layers)):
            tensor.grad = None


def steps_of(device: torch.device) -> Iterator[tuple[str, Any]]:
    """Ways by name: bf16, FP8, and FP8 that makes the gradient of gate and up at once."""
    block, usual = Block(device), fused.LARGE_GRADIENT

    def step(forward: Callable[[], Tensor], large: int) -> Callable[[Between], None]:
        def run(between: Between) -> None:
            fused.LARGE_GRADIENT = large
            block.step(forward, between)
            fused.LARGE_GRADIENT = usual

        return run

    yield "Llama block, 16,384 tokens, bf16", step(block.bf16, usual)
    yield "FP8", step(block.float8, usual)
    yield "FP8, gradient of gate and up whole", step(block.float8, 1 << 62)
