"""Step 12: a transformer block, forward and backward, by torch ops and by the shipped fused ops.

The same formula twice. `plain` is one torch op after another: each writes its result to memory and the next reads it
back. `fused` calls the kernels of the steps before: the norm of step 8, the GEMM of step 10 with the residual in its
epilogue, SwiGLU in one pass, the attention of step 11, and their backward ops. The prediction adds up, pass by pass,
the larger of bytes / copy and FLOPs / GEMM rate.
"""

import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import torch
import torch.nn.functional as F
from course import lines
from torch import Tensor

from kernel_pytorch import functional as kp

Weights = dict[str, Tensor]


def split_heads(qkv: Tensor, heads: int) -> tuple[Tensor, ...]:
    batch, length, width = qkv.shape
    return qkv.view(batch, length, 3, heads, width // 3 // heads).permute(2, 0, 3, 1, 4).unbind()


def merge_heads(x: Tensor) -> Tensor:
    return x.transpose(1, 2).flatten(2)


def plain(x: Tensor, w: Weights, heads: int) -> Tensor:
    q, k, v = split_heads(F.linear(F.rms_norm(x, x.shape[-1:], w["norm"], 1e-6), w["qkv"]), heads)
    x = x + F.linear(merge_heads(F.scaled_dot_product_attention(q, k, v, is_causal=True)), w["out"])
    y = F.rms_norm(x, x.shape[-1:], w["norm2"], 1e-6)
    return x + F.linear(F.silu(F.linear(y, w["gate"])) * F.linear(y, w["up"]), w["down"])


def fused(x: Tensor, w: Weights, heads: int) -> Tensor:
    q, k, v = split_heads(kp.linear(kp.rms_norm(x, w["norm"]), w["qkv"]), heads)
    x = kp.linear(merge_heads(kp.attention(q, k, v, causal=True)), w["out"], residual=x)
    y = kp.rms_norm(x, w["norm2"])
    return kp.linear(kp.swiglu(kp.linear(y, w["gate"]), kp.linear(y, w["up"])), w["down"], residual=x)


def costs(batch: int, length: int, width: int, inner: int, element: int, is_fused: bool) -> list[tuple[float, float]]:
    """Bytes and FLOPs of every pass, forward and backward."""
    tokens = batch * length
    passes: list[tuple[float, float]] = []

    def gemm(columns: int, depth: int) -> None:  # and its two backward products
        bytes_ = element * (tokens * depth + columns * depth + tokens * columns)
        passes.extend([(bytes_, 2.0 * tokens * columns * depth)] * 3)

    def rows(count: float, columns: int) -> None:
        passes.append((count * tokens * columns * element, 0.0))

    for columns, depth in ((3 * width, width), (width, width), (inner, width), (inner, width), (width, inner)):
        gemm(columns, depth)
    products = 2.0 * batch * length * length * width  # causal: half of 4
    passes += [(element * 4.0 * tokens * width, products), (element * 8.0 * tokens * width, 2.5 * products)]
    for _ in range(2):
        rows(2, width)  # norm
        rows(3, width)  # its backward: x, the gradient, the result
        rows(3, width)  # gradients of the two branches are added
    if is_fused:
        rows(3, inner)  # silu(gate) * up
        rows(5, inner)  # its backward: gate, up and the gradient in, two gradients out
    else:
        for count in (2, 3):  # silu, times up
            rows(count, inner)
        for _ in range(3):  # gradients of up, of silu's output, of gate
            rows(3, inner)
        for _ in range(2):  # x + attention, x + MLP
            rows(3, width)
    return passes


def seconds_of(*runs: Callable[[], object], total: float) -> list[float]:
    """Medians; several are measured in turns, so that a change of the clock meets them all."""

    def once(run: Callable[[], object]) -> float:
        start = time.perf_counter()
        run()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return time.perf_counter() - start

    for run in runs * 2:
        once(run)
    turns = max(3, min(50, int(total / max(once(run) for run in runs))))
    times = [[once(run) for run in runs] for _ in range(turns)]
    return [statistics.median(of_one) for of_one in zip(*times)]


def gemm_rate(side: int, device: str, dtype: torch.dtype, total: float) -> float:
    a = torch.randn(side, side, device=device, dtype=dtype)
    return 2.0 * side**3 / seconds_of(lambda: a @ a, total=total)[0]


def copy_rate(count: int, device: str, dtype: torch.dtype, total: float) -> float:
    source = torch.randn(count, device=device, dtype=dtype)
    target = torch.empty_like(source)
    return 2 * source.nbytes / seconds_of(lambda: target.copy_(source), total=total)[0]


def main() -> None:
    quick, on_gpu = "--quick" in sys.argv, torch.cuda.is_available()
    device, dtype = ("cuda", torch.bfloat16) if on_gpu else ("cpu", torch.float32)
    batch, length, width, inner, heads = (4, 2048, 4096, 14336, 32) if on_gpu else (2, 512, 512, 1408, 8)
    if quick:
        batch, length, width, inner, heads = 1, 128, 256, 704, 4
    name = torch.cuda.get_device_name() if on_gpu else "the CPU"
    lines.problem(f"block of width {width} and {inner}, {batch} x {length} tokens, {dtype} on {name}")
    total = 0.05 if quick else 0.7

    rate = gemm_rate(256 if quick else 8192 if on_gpu else 1024, device, dtype, total / 2)
    copy = copy_rate(1 << (28 if on_gpu else 20 if quick else 24), device, dtype, total / 2)
    lines.roof("GEMM (torch)", rate / 1e9, "GFLOP/s")
    lines.roof("copy (torch)", copy / 1e9, "GB/s")
    element = dtype.itemsize
    counts = {}
    for label, is_fused in (("12 torch ops", False), ("12 fused ops", True)):
        counts[label] = costs(batch, length, width, inner, element, is_fused)
        seconds = sum(max(bytes_ / copy, flops / rate) for bytes_, flops in counts[label])
        lines.predicted(
            label, seconds, f"{len(counts[label])} passes, each the larger of bytes / copy and FLOPs / GEMM"
        )

    torch.manual_seed(1)
    shapes = {"norm": (width,), "norm2": (width,), "qkv": (3 * width, width), "out": (width, width)}
    shapes |= {"gate": (inner, width), "up": (inner, width), "down": (width, inner)}
    w = {
        name: (torch.randn(shape, device=device) * shape[-1] ** -0.5 + (len(shape) == 1)).to(dtype).requires_grad_()
        for name, shape in shapes.items()
    }
    x = torch.randn(batch, length, width, device=device).to(dtype).requires_grad_()
    gradient = torch.randn_like(x)

    def step(block) -> list[Tensor]:
        output = block(x, w, heads)
        return [output, *torch.autograd.grad(output, [x, *w.values()], gradient)]

    expected = [each.detach() for each in step(plain)]
    blocks = {"12 torch ops": plain, "12 fused ops": fused}
    times = seconds_of(*(partial(step, block) for block in blocks.values()), total=total)
    for (label, block), seconds in zip(blocks.items(), times):
        error = max(
            float((mine.detach().float() - theirs.float()).norm() / theirs.float().norm())
            for mine, theirs in zip(step(block), expected)
        )
        bytes_, flops = (float(sum(column)) for column in zip(*counts[label]))
        lines.measured(label, seconds, bytes_, flops, error, 0.02 if on_gpu else 1e-4)


main()
