"""Step 11's host side: attention.cu on the GPU, in turn and overlapped, next to the shipped kernel and torch."""

import math
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import torch
from course import gpu, lines
from kernel_pytorch.functional import attention

heads, length, size = (4, 512, 128) if "--quick" in sys.argv else (32, 8192, 128)
lines.problem(f"attention of {heads} heads, {length} x {length}, size {size}, bf16 on {torch.cuda.get_device_name()}")
scores = float(heads) * length * length
bytes_, flops = 8.0 * heads * length * size, 4 * scores * size

wgmma, exps, copy, memory = gpu.wgmma_rate(), gpu.exp_rate(), gpu.copy_rate(int(bytes_)), gpu.latency(1 << 29)
lines.roof("wgmma", wgmma / 1e12, "TFLOP/s")
lines.roof("exponentials", exps / 1e12, "10^12/s")
lines.roof("copy", copy / 1e9, "GB/s")
lines.roof("latency of memory, one warp", memory * 1e9, "ns")
blocks, key_blocks = heads * length // 128, length // 128
waves = math.ceil(blocks / gpu.multiprocessors())
rounding = waves * gpu.multiprocessors() / blocks
products, exponentials = rounding * flops / wgmma, rounding * scores / exps
ends = waves * (memory + gpu.multiprocessors() * 2 * 128 * size / copy)  # the first load, and the result
lines.predicted(
    "11 in turn",
    products + exponentials + ends,
    f"{waves} waves of blocks: FLOPs / wgmma + exponentials / their rate + latency + result / copy",
)
lines.predicted(
    "11 overlapped",
    max(products, exponentials) + exponentials / key_blocks + ends,
    "the larger of the two, the first exponentials of a block, latency, result / copy",
)

q, k, v = (torch.randn(heads, length, size, device="cuda").bfloat16() for _ in range(3))
output = torch.empty_like(q)
maps = [gpu.TensorMap(each, 128) for each in (q, k, v)]
scale = math.log2(math.e) / math.sqrt(size)
with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
    few = slice(0, 1)  # the reference of one head: all of them would take gigabytes
    expected = torch.nn.functional.scaled_dot_product_attention(*(each[few][None].float() for each in (q, k, v)))[0]


def run(kernel: gpu.Kernel) -> torch.Tensor:
    kernel((length // 128, heads), 384, *maps, output, length, scale)
    return output[few]


for name, entry in {"11 in turn": "attention_in_turn", "11 overlapped": "attention_overlapped"}.items():
    kernel = gpu.Kernel(Path(__file__).parent / "attention.cu", entry, shared_bytes=5 * 32768 + 128)
    output.zero_()
    gpu.measure(name, lambda kernel=kernel: run(kernel), bytes_, flops, expected, 0.02)
gpu.measure("the shipped kernel", lambda: attention(q[None], k[None], v[None])[0, few], bytes_, flops, expected, 0.02)
gpu.measure(
    "torch (SDPA)",
    lambda: torch.nn.functional.scaled_dot_product_attention(q[None], k[None], v[None])[0, few],
    bytes_,
    flops,
    expected,
    0.02,
)
