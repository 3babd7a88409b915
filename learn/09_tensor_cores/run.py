"""Step 9's host side: gemm.cu on the GPU."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import torch
from course import gpu, lines

n = 1024 if "--quick" in sys.argv else 8192
lines.problem(f"C = A B^T of {n} x {n} bf16 on {torch.cuda.get_device_name()}")
bytes_, flops = 6.0 * n * n, 2.0 * n**3

mma, shared, l2 = gpu.mma_rate(), gpu.shared_rate(), gpu.l2_rate()
lines.roof("mma", mma / 1e12, "TFLOP/s")
lines.roof("shared memory", shared / 1e12, "TB/s")
lines.roof("the L2 cache", l2 / 1e12, "TB/s")
# For 16 elements of k a block of 128 x 128 writes 256 rows of 32 bytes, and each half of them is read by two warps.
steps = (n // 128) ** 2 * (n // 16)
products, moved, fetched = flops / mma, steps * 3 * 256 * 32 / shared, steps * 256 * 32 / l2
in_turn = products + moved
lines.predicted("9 in turn", max(in_turn, fetched), "FLOPs / mma + bytes of shared memory / its rate, or those of L2")
lines.predicted("9 ahead", max(products, moved, fetched), "the largest of FLOPs / mma, shared memory and L2")

a, b = (torch.randn(n, n, device="cuda").bfloat16() for _ in range(2))
c, expected = torch.empty_like(a), a.float() @ b.float().T


def run(kernel: gpu.Kernel) -> torch.Tensor:
    kernel((n // 128, n // 128), 128, a, b, c, n, n)
    return c


for name, entry in {"9 in turn": "gemm_in_turn", "9 ahead": "gemm_ahead"}.items():
    kernel = gpu.Kernel(Path(__file__).parent / "gemm.cu", entry, shared_bytes=3 * 32768)
    c.zero_()
    gpu.measure(name, lambda kernel=kernel: run(kernel), bytes_, flops, expected)
