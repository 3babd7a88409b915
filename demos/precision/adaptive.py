"""Adaptive precision: each layer's bits by the error they save, inside a budget of bytes."""

import copy
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import torch
from common import Demo
from kernel_pytorch.precision import QuantizedLinear
from torch import Tensor, nn

demo = Demo("Adaptive precision: bits where they matter")
width, layers, rows = (128, 6, 64) if demo.quick else (1024, 12, 512)
dtype = torch.bfloat16 if demo.device.type == "cuda" else torch.float32
formats = ("int4", "int8")


class Residual(nn.Module):
    """x + scale * gelu(linear(x)): layers of unequal weight, as in trained models."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.linear, self.scale = nn.Linear(width, width), scale

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * nn.functional.gelu(self.linear(x))


scales = (0.05 * 64 ** torch.rand(layers)).tolist()
model = nn.Sequential(*map(Residual, scales)).to(demo.device, dtype).eval()
calibration, held_out = (torch.randn(rows, width, device=demo.device).to(dtype) for _ in range(2))


def with_formats(chosen: dict[int, str]) -> nn.Module:
    changed = copy.deepcopy(model)
    for index, name in chosen.items():
        changed[index].linear = QuantizedLinear.from_linear(changed[index].linear, format=name, group=64)
    return changed


def error(changed: nn.Module, x: Tensor) -> float:
    expected = model(x).double()
    return float((changed(x).double() - expected).norm() / expected.norm())


def bytes_of(name: str) -> int:
    return QuantizedLinear.from_linear(model[0].linear, format=name, group=64).quantized_weight.nbytes


with torch.no_grad():
    one, reference = model[0].linear, QuantizedLinear.from_linear(model[0].linear, format="int8", group=64)
    rounded = nn.functional.linear(held_out.float(), reference.dequantize(torch.float32), one.bias.float())
    demo.check("a layer's product: as torch with its rounded weight", reference(held_out), rounded, 0.01)
    small, large = (bytes_of(name) for name in formats)
    budget = layers * (small + large) // 2  # half of the layers may have 8 bits
    # What the second four bits of a layer save, all others untouched.
    saved = {
        i: error(with_formats({i: "int4"}), calibration) - error(with_formats({i: "int8"}), calibration)
        for i in range(layers)
    }
    best = set(sorted(saved, key=saved.__getitem__, reverse=True)[: (budget - layers * small) // (large - small)])
    adaptive = {i: formats[i in best] for i in range(layers)}
    drawn = [set(torch.randperm(layers)[: len(best)].tolist()) for _ in range(8)]
    results = {
        "4 bits everywhere": [dict.fromkeys(range(layers), "int4")],
        "8 bits in half of the layers": [{i: formats[i in half] for i in range(layers)} for half in drawn],
        "8 bits where they save most": [adaptive],
        "8 bits everywhere": [dict.fromkeys(range(layers), "int8")],
    }
    full = layers * model[0].linear.weight.nbytes
    print("  bits by layer:", " ".join(adaptive[i].removeprefix("int") for i in range(layers)))
    errors = {}
    for name, choices in results.items():
        errors[name] = sum(error(with_formats(chosen), held_out) for chosen in choices) / len(choices)
        size = sum(bytes_of(each) for each in choices[0].values())
        mean = f" (mean of {len(choices)} draws)" if len(choices) > 1 else ""
        print(f"  {name:28}  {size / full:5.1%} of the bytes, error {errors[name]:.2e}{mean}")
    better = errors["8 bits in half of the layers"] / errors["8 bits where they save most"]
    demo.require("better at the same bytes", better > 1, f"the error is {better:.2f} times smaller on other inputs")
    ways = {"plain": model, "adaptive": with_formats(adaptive)}
    demo.compare({name: lambda each=each: each(held_out[:1]) for name, each in ways.items()})
demo.finish()
