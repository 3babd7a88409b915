"""Linear layers with torch's parameters. Whose product it is, _products.py says."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..functional import activation as activate
from ._checks import activation_kind, check_features, check_probability
from ._products import product

OPTIMIZATION_LEVELS = ("conservative", "balanced", "aggressive")


class OptimizedLinear(nn.Linear):
    """nn.Linear, x @ weight.T + bias.

    Args:
        optimization_level: "conservative", "balanced" or "aggressive": how far a product may trade accuracy for speed.
            All three multiply as the types say; what else there is, a caller asks for (functional.matmul's precision).
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

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in_features] -> [..., out_features]."""
        check_features(self, x, self.in_features)
        return product(x, self.weight, self.bias)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, optimization_level={self.optimization_level!r}"


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
