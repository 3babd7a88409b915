"""Step 10's host side: gemm.cu on the GPU, next to the shipped kernel and cuBLAS."""

import math
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import torch
from course import gpu, lines
from kernel_pytorch.functional import linear

n = 1024 if "--quick" in sys.argv else 8192
lines.problem(f"C = A B^T of {n} x {n} bf16 on {torch.cuda.get_device_name()}")
bytes_, flops = 6.0 * n * n, 2.0 * n**3

wgmma, copy, memory = gpu.wgmma_rate(), gpu.copy_rate(int(bytes_)), gpu.latency(1 << 29)
lines.roof("wgmma", wgmma / 1e12, "TFLOP/s")
lines.roof("copy", copy / 1e9, "GB/s")
lines.roof("latency of memory, one warp", memory * 1e9, "ns")
tiles = (n // 128) * (n // 256)
waves = math.ceil(tiles / gpu.multiprocessors())
at_once = gpu.multiprocessors() * 128 * 256  # elements of C
lines.predicted(
    "10 TMA and wgmma",
    waves * (at_once * 2.0 * n / wgmma + memory + 2 * at_once / copy),
    f"{waves} waves of {gpu.multiprocessors()} tiles, each FLOPs / wgmma + latency of memory + result / copy",
)

a, b = (torch.randn(n, n, device="cuda").bfloat16() for _ in range(2))
c = torch.empty_like(a)
maps = gpu.TensorMap(a, 128), gpu.TensorMap(b, 256)
kernel = gpu.Kernel(Path(__file__).parent / "gemm.cu", "gemm", shared_bytes=4 * 49152 + 64)


def run() -> torch.Tensor:
    kernel((tiles, 1), 384, *maps, c, n, n, n)
    return c


expected = a.float() @ b.float().T
gpu.measure("10 TMA and wgmma", run, bytes_, flops, expected)
gpu.measure("the shipped kernel", lambda: linear(a, b), bytes_, flops, expected)
gpu.measure("cuBLAS (torch)", lambda: torch.nn.functional.linear(a, b), bytes_, flops, expected)
