"""Step 8's host side: rms_norm.cu on the GPU, next to torch and the shipped kernel."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import torch
from course import gpu, lines
from kernel_pytorch.functional import rms_norm

quick = "--quick" in sys.argv
rows, columns = (256 if quick else 16384), 4096
lines.problem(f"rms_norm of {rows} x {columns} bf16 on {torch.cuda.get_device_name()}")
bytes_, flops = 4.0 * rows * columns, 4.0 * rows * columns

copy, memory = gpu.copy_rate(int(bytes_)), gpu.latency(1 << 29)
lines.roof("copy", copy / 1e9, "GB/s")
lines.roof("bytes in flight / latency", gpu.multiprocessors() * 2048 * 16 / memory / 1e9, "GB/s")
lines.predicted("8 wide loads", bytes_ / copy, "bytes / copy: more bytes are in flight than the copy needs")

x, weight = torch.randn(rows, columns, device="cuda").bfloat16(), torch.randn(columns, device="cuda").bfloat16()
y = torch.empty_like(x)
kernel = gpu.Kernel(Path(__file__).parent / "rms_norm.cu", "rms_norm")


def run() -> torch.Tensor:
    kernel((rows, 1), columns // 8, x, weight, y, columns, 1e-6)
    return y


expected = torch.nn.functional.rms_norm(x.double(), (columns,), weight.double(), 1e-6)
gpu.measure("8 wide loads", run, bytes_, flops, expected)
gpu.measure("the shipped kernel", lambda: rms_norm(x, weight, eps=1e-6), bytes_, flops, expected)
gpu.measure("torch", lambda: torch.nn.functional.rms_norm(x, (columns,), weight, 1e-6), bytes_, flops, expected)
