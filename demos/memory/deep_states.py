"""Optimizer states in the host's memory: the numbers of AdamW, without its bytes on the device."""

import copy
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import torch
from common import Demo
from kernel_pytorch.optim import AdamW, DeepOptimizerStates
from torch import nn

demo = Demo("Deep optimizer states: AdamW without its bytes on the device")
width, layers, steps = (128, 4, 5) if demo.quick else (2048, 8, 10)
on_gpu = demo.device.type == "cuda"
model = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers))).to(demo.device)


def take_over(model: nn.Module) -> DeepOptimizerStates:
    return DeepOptimizerStates(torch.optim.AdamW(model.parameters(), 1e-3), model)


makers = {
    "torch.optim.AdamW": lambda model: torch.optim.AdamW(model.parameters(), 1e-3),
    "AdamW": lambda model: AdamW(model.parameters(), 1e-3),
    'AdamW(state="compact")': lambda model: AdamW(model.parameters(), 1e-3, state="compact"),
    "DeepOptimizerStates": take_over,
}
models = {name: copy.deepcopy(model) for name in makers}
optimizers = {name: make(models[name]) for name, make in makers.items()}
for step in range(steps):
    gradients = [
        torch.randn(p.shape, generator=torch.Generator().manual_seed(step)).to(p.device) for p in model.parameters()
    ]
    for name, each in models.items():
        for parameter, gradient in zip(each.parameters(), gradients):
            parameter.grad = gradient.clone()
        optimizers[name].step()


def moved(name: str) -> torch.Tensor:
    """How far the steps have taken the weights."""
    now = models[name].parameters()
    return torch.cat([(after - before).flatten() for after, before in zip(now, model.parameters())])


def bytes_on(name: str, kind: str) -> int:
    states = [value for state in optimizers[name].state.values() for value in state.values()]
    return sum(each.nbytes for each in states if isinstance(each, torch.Tensor) and each.device.type == kind)


demo.check("AdamW: as torch's", moved("AdamW"), moved("torch.optim.AdamW"), 1e-4)
demo.check("DeepOptimizerStates: bit for bit AdamW", moved("DeepOptimizerStates"), moved("AdamW"), 0.0)
demo.check("compact states: close to AdamW", moved('AdamW(state="compact")'), moved("AdamW"), 0.1)
parameters = sum(p.numel() for p in model.parameters())
for name in optimizers:
    device, host = bytes_on(name, demo.device.type), bytes_on(name, "cpu") if on_gpu else 0
    print(f"  {name:22}  {device / parameters:5.2f} bytes per parameter on the {'GPU' if on_gpu else 'CPU'}"
          + (f", {host / parameters:5.2f} on the host" if on_gpu else ""))  # fmt: skip
if on_gpu:
    demo.require("its states are on the host", bytes_on("DeepOptimizerStates", "cuda") < parameters, "none on the GPU")
else:
    print("  Parameters on a CPU have their states there anyway: this shows the numbers, a GPU what it saves.")
demo.compare({name: optimizer.step for name, optimizer in optimizers.items()})
demo.finish()
