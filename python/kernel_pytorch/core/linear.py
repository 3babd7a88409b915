"""Linear layers with torch's parameters. Whose product it is, _products.py says."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .._devices import device_info
from .._ops.support.casting import product_dtype
from ..functional import activation as activate
from ..functional import matmul
from ._checks import activation_kind, check_features, check_probability
from ._products import product

OPTIMIZATION_LEVELS = ("conservative", "balanced", "aggressive")


class OptimizedLinear(nn.Linear):
    """nn.Linear, x @ weight.T + bias.

    Args:
        optimization_level: how far products of fp32, gradients' too, may trade accuracy for speed. "conservative"
            multiplies fp32 exactly, also where torch is allowed TF32; "balanced" multiplies as torch is allowed to;
            "aggressive" rounds both factors to bf16 where the device has units for that, and sums in fp32 (an error of
            about 0.4 % of a factor). Products of other types are the same in all three.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        optimization_level: str = "balanced",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        if optimization_level not in OPTIMIZATION_LEVELS:
            raise ValueError(
                f"OptimizedLinear: optimization_level is {optimization_level!r}; "
                f"it must be one of {', '.join(OPTIMIZATION_LEVELS)}"
            )
        super().__init__(in_features, out_features, bias, device, dtype)
        self.optimization_level = optimization_level
        _look_at_the_cpu()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        _look_at_the_cpu()  # which may be another than that of the process that pickled

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in_features] -> [..., out_features]."""
        check_features(self, x, self.in_features)
        precision = _fp32_precision(self.optimization_level, x)
        if precision is None:
            return product(x, self.weight, self.bias)
        output = matmul(x, self.weight.t(), precision=precision)
        return output if self.bias is None else output + self.bias

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, optimization_level={self.optimization_level!r}"


def _fp32_precision(level: str, x: Tensor) -> str | None:
    """functional.matmul's precision for a level; None where functional.linear or torch's product is as precise."""
    if level == "balanced" or product_dtype(x) is not torch.float32:
        return None
    if level == "aggressive":
        return "bf16" if _has_bf16_units(x.device) else None
    return "full" if x.is_cuda else None  # on a CPU fp32 is multiplied exactly in any case


def _has_bf16_units(device: torch.device) -> bool:
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= (8, 0)
    return device.type == "cpu" and _cpu_has_bf16_units


_cpu_has_bf16_units = False  # known once there is a layer: torch.compile cannot look into the library


def _look_at_the_cpu() -> None:
    global _cpu_has_bf16_units
    cpu = device_info("cpu").cpu
    _cpu_has_bf16_units = cpu is not None and cpu.isa in ("v4bf16", "v4amx", "neonbf16", "sve256")


class FusedLinearActivation(nn.Linear):
    """activation(x @ weight.T + bias) + residual as part of the product; with dropout in training as a pass over it.

    Args:
        activation: gelu, gelu_tanh, silu (or swish), relu, relu_squared, sigmoid, tanh or identity.
        dropout: probability in training.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        activation: str = "relu",
        bias: bool = True,
        dropout: float = 0.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        kind = activation_kind("FusedLinearActivation", activation)
        super().__init__(in_features, out_features, bias, device, dtype)
        self.activation = activation
        self.dropout = check_probability("FusedLinearActivation", dropout)
        self._kind = kind

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """x [..., in_features] -> [..., out_features]; the residual, of that shape, is added last."""
        check_features(self, x, self.in_features)
        if not self.training or self.dropout == 0.0:
            return product(x, self.weight, self.bias, self._kind, residual)
        sums = product(x, self.weight)
        return activate(sums, self._kind, bias=self.bias, residual=residual, dropout_p=self.dropout)

    def extra_repr(self) -> str:
        dropout = f", dropout={self.dropout}" if self.dropout else ""
        return f"{super().extra_repr()}, activation={self.activation!r}{dropout}"
