"""What FP8 does to the numbers of a model: one forward and backward with every layer watched."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.nn.functional as torch_functional
from torch import Tensor, nn

from .._ops.float8 import dequantize, quantize
from .config import FP8Config
from .linear import GRADIENT, GRANULARITIES, INPUT, WEIGHT, FP8LinearLayer
from .scales import fp8_layers


@dataclass
class TensorNumerics:
    """Numerics of one tensor: the share of nonzero values that became 0, the saturated share, the relative error."""

    amax: float
    underflow: float
    saturation: float
    error: float


@dataclass
class LayerNumerics:
    """Numerics of one layer. output_error: the FP8 GEMM against bf16's, relative to the norm of the latter."""

    tensors: dict[str, TensorNumerics] = field(default_factory=dict)
    output_error: float = 0.0


def fp8_numerics_report(model: nn.Module, step: Callable[[], Tensor]) -> dict[str, LayerNumerics]:
    """Runs `step`, which returns a loss, and its backward, and reports on each FP8 layer by name.

    Gradients of parameters are left as they were. Costs several times a step: for looking, not for training.
    """
    report: dict[str, LayerNumerics] = {}
    layers = fp8_layers(model)
    kept = {parameter: parameter.grad for parameter in model.parameters()}
    for name, layer in layers.items():
        report[name] = LayerNumerics()
        layer.fp8_watcher = _watcher(report[name], layer)
    try:
        step().backward()  # type: ignore[no-untyped-call]
    finally:
        for layer in layers.values():
            layer.fp8_watcher = None
        for parameter, grad in kept.items():
            parameter.grad = grad
    return report


def _watcher(entry: LayerNumerics, layer: FP8LinearLayer) -> Callable[[Tensor, Tensor, Tensor | None, Tensor], None]:
    def watch(x: Tensor, weight: Tensor, bias: Tensor | None, output: Tensor) -> None:
        config = layer.fp8_config
        with torch.no_grad():
            entry.tensors["input"] = _numerics(layer, INPUT, x.detach(), config)
            entry.tensors["weight"] = _numerics(layer, WEIGHT, weight.detach(), config)
            narrow_bias = None if bias is None else bias.to(torch.bfloat16)
            plain = torch_functional.linear(x.to(torch.bfloat16), weight.to(torch.bfloat16), narrow_bias).float()
            entry.output_error = float((output.float() - plain).norm() / plain.norm().clamp_min(1e-30))
        if output.requires_grad:
            output.register_hook(_gradient_hook(entry, layer, config))  # type: ignore[no-untyped-call]

    return watch


def _gradient_hook(entry: LayerNumerics, layer: FP8LinearLayer, config: FP8Config) -> Callable[[Tensor], None]:
    def hook(grad: Tensor) -> None:
        with torch.no_grad():
            entry.tensors["gradient"] = _numerics(layer, GRADIENT, grad, config)

    return hook


def _numerics(layer: FP8LinearLayer, row: int, values: Tensor, config: FP8Config) -> TensorNumerics:
    fmt = config.backward_format if row == GRADIENT else config.forward_format
    granularity = GRANULARITIES[config.recipe][1 if row == WEIGHT else 0]
    delayed = config.recipe == "delayed" and layer.fp8_ready
    scale = layer.fp8_scale[row : row + 1] if delayed else None
    made = quantize(values, dtype=fmt.dtype, granularity=granularity, scale=scale)
    assert made.codes is not None
    exact = values.float()
    rounded = dequantize(made.codes, made.scales)
    ones = dequantize(torch.ones_like(values, dtype=torch.float32).to(fmt.dtype), made.scales)
    nonzero = (exact != 0).sum().clamp_min(1)
    finite = exact[torch.isfinite(exact)]
    return TensorNumerics(
        amax=float(finite.abs().max()) if finite.numel() else 0.0,
        underflow=float(((rounded == 0) & (exact != 0)).sum() / nonzero),
        saturation=float((exact.abs() > ones * fmt.largest * (1 + 2.0**-6)).sum() / max(exact.numel(), 1)),
        error=float((rounded - exact).norm() / exact.norm().clamp_min(1e-30)),
    )
