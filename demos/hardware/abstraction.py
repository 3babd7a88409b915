"""One interface for the devices at hand: what they are, what a step needs in memory, which batch to take."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import copy

import torch
from common import Demo
from kernel_pytorch.hardware import HardwareAbstractionLayer, detect_available_devices

demo = Demo("Hardware: devices, memory, batches")
for kind, devices in detect_available_devices().items():
    print(f"  {kind}: {', '.join(map(str, devices)) or 'none'}")
hal = HardwareAbstractionLayer([demo.device])
width = 128 if demo.quick else 768
model = torch.nn.Sequential(
    torch.nn.LayerNorm(width), torch.nn.Linear(width, 4 * width), torch.nn.GELU(), torch.nn.Linear(4 * width, width)
)
for batch in (8, 64, 512):
    print(f"  batch {batch:4}: {hal.estimate_memory_usage(model, batch) * 1e3:8.2f} MB for a training step")
demo.require(
    "memory grows with the batch",
    hal.estimate_memory_usage(model, 8) < hal.estimate_memory_usage(model, 512),
    "512 needs more than 8",
)
print(f"  batch to take with 1 GB: {hal.get_optimal_batch_size(model, memory_limit_gb=1.0)} ({hal.batch_reason})")
plain = copy.deepcopy(model).to(demo.device).eval()
x = torch.randn(256, width, device=demo.device)
with torch.no_grad():
    prepared = hal.optimize_for_hardware(model.eval(), x)
    demo.check("optimised output", prepared(x), plain(x), 1e-4)
    demo.compare({"torch": lambda: plain(x), "optimised": lambda: prepared(x)})
demo.finish()
