"""Ultra precision: a whole model inside a budget of bytes, by strategy and rounding, with the plan that was taken."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import torch
from common import Demo
from kernel_pytorch.precision import AllocationStrategy, PrecisionConfig, create_ultra_precision_module
from torch import Tensor, nn

demo = Demo("Ultra precision: formats chosen within a budget")
width, layers, rows = (128, 4, 256) if demo.quick else (1024, 8, 2048)
saved = 0.7  # of the bytes in 16 bits


def block() -> nn.Sequential:
    return nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))


model = nn.Sequential(*(block() for _ in range(layers)))
for index, part in enumerate(model):  # layers of unequal weight, and columns of unequal size, as in trained models
    part[3].weight.data *= 4.0 ** (-index)
    part[1].weight.data *= torch.exp(0.5 * torch.randn(width))
model = model.to(demo.device).eval()
calibration, held_out = (torch.randn(rows, width, device=demo.device) for _ in range(2))


def error(result: Tensor) -> float:
    expected = model(held_out).double()
    return float((result.double() - expected).norm() / expected.norm())


with torch.no_grad():
    errors, modules = {}, {}
    for name, strategy, rounding in (
        ("entropy, nearest", AllocationStrategy.ENTROPY_BASED, "nearest"),
        ("activations, nearest", AllocationStrategy.ACTIVATION_AWARE, "nearest"),
        ("activations, gptq", AllocationStrategy.ACTIVATION_AWARE, "gptq"),
    ):
        config = PrecisionConfig(allocation_strategy=strategy, target_memory_reduction=saved, rounding=rounding)
        modules[name] = create_ultra_precision_module(model, config, calibration=[calibration])
        errors[name] = error(modules[name](held_out))
        stats = modules[name].get_precision_stats()
        print(f"  {name:22} {stats.average_bits:5.2f} bits, error {errors[name]:.2%}")
        share = stats.memory_savings_ratio
        demo.require("inside the budget", share >= saved, f"{share:.1%} saved")
    print(modules["activations, gptq"].allocation)
    gain = errors["activations, nearest"] / errors["activations, gptq"]
    demo.require("gptq's rounding is better", gain > 1, f"the error is {gain:.2f} times smaller on other inputs")
    ways = {"plain": model, **modules}
    demo.compare({name: lambda each=each: each(held_out[:1]) for name, each in ways.items()})
demo.finish()
