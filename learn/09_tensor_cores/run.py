"""Step 9's host side: gemm.cu on the GPU."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import torch
from course import gpu, lines

n = 1024 if "--quick" in sys.argv else 8192
lines.problem(f"C = A B^T of {n} x {n} bf16 on {torch.cuda.get_device_name()}")
bytes_, flops = 6.0 * n * n, 2.0 * n**3

mma = gpu.mma_rate()
lines.roof("mma", mma / 1e12, "TFLOP/s")
lines.predicted("9 tensor cores", flops / mma, "FLOPs / rate of mma from registers")

a, b = (torch.randn(n, n, device="cuda").bfloat16() for _ in range(2))
c = torch.empty_like(a)
kernel = gpu.Kernel(Path(__file__).parent / "gemm.cu", "gemm", shared_bytes=3 * 32768)


def run() -> torch.Tensor:
    kernel((n // 128, n // 128), 128, a, b, c, n, n, n)
    return c


gpu.measure("9 tensor cores", run, bytes_, flops, a.float() @ b.float().T)
