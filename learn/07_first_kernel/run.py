"""Step 7's host side: rms_norm.cu on the GPU."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import torch
from course import gpu, lines

quick = "--quick" in sys.argv
rows, columns, threads = (256 if quick else 16384), 4096, 256
lines.problem(f"rms_norm of {rows} x {columns} bf16 on {torch.cuda.get_device_name()}")
bytes_, flops = 4.0 * rows * columns, 4.0 * rows * columns

copy, alone, first_level = gpu.copy_rate(int(bytes_)), gpu.latency(1 << 29), gpu.latency(1 << 14)
memory = gpu.latency(1 << 29, warps_per_sm=2048 // 32)  # as here: every SM is full, each warp has one load under way
lines.roof("copy", copy / 1e9, "GB/s")
lines.roof("latency of memory, one warp", alone * 1e9, "ns")
lines.roof("latency of memory, all SMs full", memory * 1e9, "ns")
lines.roof("latency of the L1 cache", first_level * 1e9, "ns")
together = gpu.multiprocessors() * (2048 // threads)  # rows that run at the same time
# The two loops have 10 and 23 instructions; 2,048 threads are 16 warps for each scheduler, which issues one per cycle.
issue = 33 * 2048 / 32 / 4 / gpu.clock()
lines.roof("33 instructions of 16 warps", issue * 1e9, "ns")
seconds = max(rows / together, 1) * (columns / threads) * (memory + first_level + issue)
lines.predicted(
    "7 first kernel",
    max(seconds, bytes_ / copy),
    "rows / rows at a time * loads per thread * (latency of memory, all SMs full + latency of L1 + instructions)",
)

x, weight = torch.randn(rows, columns, device="cuda").bfloat16(), torch.randn(columns, device="cuda").bfloat16()
y = torch.empty_like(x)
kernel = gpu.Kernel(Path(__file__).parent / "rms_norm.cu", "rms_norm")


def run() -> torch.Tensor:
    kernel((rows, 1), threads, x, weight, y, columns, 1e-6)
    return y


expected = torch.nn.functional.rms_norm(x.double(), (columns,), weight.double(), 1e-6)
gpu.measure("7 first kernel", run, bytes_, flops, expected)
