"""What a Llama block spends outside its matrix products and its attention: norms, rope, gate, sums, copies.

    python benchmarks/llama_block.py [--device cpu|cuda] [--tokens N] [--dim N] [--output FILE]

The same block, forward and backward, with torch's functions, with torch.compile and with ours. The profiler names every
kernel; products and attention are left out by name and the rest is summed and counted, so that the GEMMs, which are the
same in all three, neither hide nor help anything. How many of the kernels are ours is the library's own count of its
launches. Medians of several windows, with the least and the most.
"""

from __future__ import annotations

import argparse
import re
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as torch_functional
from kernel_pytorch.utils.profiling import count_launches
from table import print_and_store
from torch.profiler import ProfilerActivity, profile
from torch_norms import describe_machine

from kernel_pytorch import functional

Tensor = torch.Tensor
HEAD = 128
EPS = 1e-5
# Products and attention, as GPUs' libraries and torch's CPU ops name them.
LEFT_OUT = re.compile(
    r"gemm|cublas|cutlass|nvjet|xmma|splitk|flash|fmha|sdpa|attention|aten::(add)?mm|aten::bmm|mkldnn|onednn|matmul",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Functions:
    """The memory-bound parts; the rest of the block is one and the same."""

    norm: Callable[[Tensor, Tensor], Tensor]
    add_norm: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
    rope: Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
    swiglu_packed: Callable[[Tensor], Tensor]


def torch_add_norm(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    total = x + residual
    return torch_functional.rms_norm(total, weight.shape, weight, EPS), total


def torch_rope(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    def turn(x: Tensor) -> Tensor:
        first, second = x.chunk(2, -1)
        turned = torch.cat([first * cos - second * sin, second * cos + first * sin], -1)
        return turned.to(x.dtype)

    cos, sin = cos[:, None], sin[:, None]
    return turn(query), turn(key)


def torch_swiglu_packed(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, -1)
    return torch_functional.silu(gate) * up


TORCH = Functions(
    lambda x, weight: torch_functional.rms_norm(x, weight.shape, weight, EPS),
    torch_add_norm,
    torch_rope,
    torch_swiglu_packed,
)
OURS = Functions(
    lambda x, weight: functional.rms_norm(x, weight, EPS),
    lambda x, residual, weight: functional.add_rms_norm(x, residual, weight, EPS),
    functional.rope,
    functional.swiglu_packed,
)


class Block:
    """Weights and one step of a block with grouped heads, ending with the norm of the block that follows."""

    def __init__(self, dim: int, tokens: int, device: torch.device, dtype: torch.dtype) -> None:
        def leaf(*shape: int) -> Tensor:
            return (torch.randn(shape, device=device) * shape[-1] ** -0.5).to(dtype).requires_grad_()

        self.heads, self.key_heads = dim // HEAD, max(dim // HEAD // 4, 1)
        hidden = dim * 7 // 2
        self.norms = [torch.ones(dim, device=device, dtype=dtype).requires_grad_() for _ in range(3)]
        self.qkv, self.out = leaf((self.heads + 2 * self.key_heads) * HEAD, dim), leaf(dim, dim)
        self.gate_up, self.down = leaf(2 * hidden, dim), leaf(dim, hidden)
        self.x = torch.randn(1, tokens, dim, device=device, dtype=dtype).requires_grad_()
        self.cos, self.sin = functional.rope_tables(tokens, HEAD, device=device)
        self.grad = torch.randn_like(self.x)

    def leaves(self) -> list[Tensor]:
        return [self.x, *self.norms, self.qkv, self.out, self.gate_up, self.down]

    def forward(self, functions: Functions) -> tuple[Tensor, Tensor]:
        x, linear = self.x, torch_functional.linear
        packed = linear(functions.norm(x, self.norms[0]), self.qkv).view(*x.shape[:2], -1, HEAD)
        query, key, value = packed.split([self.heads, self.key_heads, self.key_heads], 2)
        query, key = functions.rope(query, key, self.cos, self.sin)
        attended = torch_functional.scaled_dot_product_attention(
            query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), is_causal=True, enable_gqa=True
        )
        normed, x = functions.add_norm(linear(attended.transpose(1, 2).flatten(2), self.out), x, self.norms[1])
        hidden = functions.swiglu_packed(linear(normed, self.gate_up))
        return functions.add_norm(linear(hidden, self.down), x, self.norms[2])

    def step(self, forward: Callable[[], tuple[Tensor, Tensor]]) -> tuple[Tensor, ...]:
        normed, total = forward()
        return torch.autograd.grad([normed, total], self.leaves(), [self.grad, self.grad])


def memory_bound(step: Callable[[], object], device: torch.device, steps: int) -> tuple[float, float]:
    """Microseconds and kernels of one step that are neither products nor attention."""
    on_gpu = device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    with profile(activities=activities) as profiler:
        for _ in range(steps):
            step()
        if on_gpu:
            torch.cuda.synchronize()
    microseconds, kernels = 0.0, 0
    for event in profiler.events():
        on_device = event.device_type == torch.autograd.DeviceType.CUDA
        if on_device != on_gpu or getattr(event, "is_user_annotation", False) or LEFT_OUT.search(event.name):
            continue
        microseconds += event.self_device_time_total if on_gpu else event.self_cpu_time_total
        kernels += 1
    return microseconds / steps, kernels / steps


def check(block: Block, ways: dict[str, Callable[[], tuple[Tensor, Tensor]]]) -> None:
    """Raises where ours and torch's gradients differ by more than the dtype's rounding through the block."""
    results = {name: block.step(ways[name]) for name in ("ours", "torch")}
    bound = 5e-2 if block.x.dtype == torch.bfloat16 else 1e-3
    for mine, theirs in zip(results["ours"], results["torch"], strict=True):
        error = ((mine - theirs).abs().max() / theirs.abs().max()).item()
        if not error <= bound:
            sys.exit(
                f"llama_block: gradients of shape {list(mine.shape)} differ by {error:.2e} of the largest, not {bound}"
            )


def measure(block: Block, device: torch.device, windows: int, steps: int) -> list[dict[str, str]]:
    compiled = torch.compile(lambda: block.forward(TORCH))
    ways: dict[str, Callable[[], tuple[Tensor, Tensor]]] = {
        "ours": lambda: block.forward(OURS),
        "torch": lambda: block.forward(TORCH),
        "torch.compile": compiled,
    }
    check(block, ways)
    samples: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for window in range(windows + 1):
        for name, way in ways.items():
            sample = memory_bound(lambda way=way: block.step(way), device, steps)  # type: ignore[misc]
            if window:
                samples[name].append(sample)
    launches = count_launches(lambda: block.step(ways["ours"])).kernels
    median = {name: statistics.median(time for time, _ in values) for name, values in samples.items()}
    rows = []
    for peer in ("torch", "torch.compile"):
        texts = {}
        for name in ("ours", peer):
            times = [time for time, _ in samples[name]]
            kernels = f", {samples[name][0][1]:.0f} kernels" if device.type == "cuda" else ""
            texts[name] = f"{median[name]:.0f} µs ({min(times):.0f} to {max(times):.0f}){kernels}"
        what = f"Llama block of {block.x.shape[1]}x{block.x.shape[2]}, forward and backward, against {peer}"
        texts["ours"] += f" ({launches} of our library)" if device.type == "cuda" else ""
        texts["ours"] += f", {median[peer] / median['ours']:.2f}x"
        rows.append({"what": what, "ours": texts["ours"], "torch": texts[peer]})
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), help="the GPU where there is one, by default")
    parser.add_argument("--tokens", type=int, help="8192 on a GPU, 256 on a CPU")
    parser.add_argument("--dim", type=int, help="4096 on a GPU, 1024 on a CPU")
    parser.add_argument("--output", type=Path, help="write the figures as JSON")
    arguments = parser.parse_args()
    device = torch.device(arguments.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    on_gpu = device.type == "cuda"
    torch.manual_seed(0)
    tokens, dim = arguments.tokens or (8192 if on_gpu else 256), arguments.dim or (4096 if on_gpu else 1024)
    block = Block(dim, tokens, device, torch.bfloat16 if on_gpu else torch.float32)
    figures = measure(block, device, windows=5, steps=10 if on_gpu else 2)
    run = {"machine": describe_machine(device), "figures": figures}
    print_and_store(run, arguments.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
