"""A training step inside a budget of memory: what to keep, what to make again, with the same gradients."""

import copy
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import torch
from common import Demo
from torch import nn
from torch.utils.checkpoint import checkpoint_sequential

from kernel_pytorch import fit_memory

demo = Demo("Checkpointing: a training step inside a budget")
width, layers, rows = (64, 4, 256) if demo.quick else (1024, 12, 8192)
block = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
model = nn.Sequential(*(copy.deepcopy(block) for _ in range(layers))).to(demo.device)
x = torch.randn(rows, width, device=demo.device)


def step() -> list[torch.Tensor]:
    return list(torch.autograd.grad(model(x).square().mean(), list(model.parameters())))


def checkpointed() -> list[torch.Tensor]:
    """Everything made again, block by block."""
    output = checkpoint_sequential(model, layers, x, use_reentrant=False)
    return list(torch.autograd.grad(output.square().mean(), list(model.parameters())))


plain = torch.cat([gradient.flatten() for gradient in step()])
with fit_memory(model, x, "1TiB") as everything:
    most, least = everything.everything_peak, everything.plan["least_bytes"]
print(f"  everything kept: {most / 1e6:.1f} MB at the peak; the least that a plan reaches: {least / 1e6:.1f} MB")
ways = {"everything kept": step, "torch, every block again": checkpointed}
for share in (0.6, 0.2):
    budget = int(least + share * (most - least))
    fit = fit_memory(model, x, budget)
    gradients = torch.cat([gradient.flatten() for gradient in step()])
    demo.check(f"gradients with {budget / 1e6:.1f} MB", gradients, plain, 0.0 if demo.device.type == "cpu" else 1e-6)
    demo.require("the plan fits", fit.measured_peak <= budget, f"{fit.measured_peak / 1e6:.1f} MB measured")
    fit.remove()

    def fitted(fit=fit) -> object:
        fit.install()
        result = step()
        fit.remove()
        return result

    ways[f"fit_memory, {budget / 1e6:.1f} MB"] = fitted
demo.compare(ways)
demo.finish()
