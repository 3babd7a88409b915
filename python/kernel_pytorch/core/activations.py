"""Activations as modules, alone and with what stands around them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as torch_functional
from torch import Tensor, nn

from ..functional import gated_activation_packed, gelu, layer_norm, relu, swiglu
from ._checks import activation_kind, check_features, check_probability
from ._products import product
from .norms import OptimizedLayerNorm, columns_last

_GatedMlp = Callable[[Tensor, Any, Any], Tensor]
# Types of layers, and the function that computes x, gate_up_proj, down_proj -> output where both are of that type.
_GATED_MLPS: list[tuple[type[nn.Module], _GatedMlp]] = []


def compute_gated_mlp_by(layer_type: type[nn.Module], function: _GatedMlp) -> None:
    """A FusedSwiGLU whose two layers are of this type calls the function; kernel_pytorch.precision gives FP8's."""
    _GATED_MLPS.append((layer_type, function))


class FusedGELU(nn.GELU):
    """nn.GELU on this library's kernels, forward and backward one pass each."""

    def __init__(self, approximate: str = "none") -> None:
        if approximate not in ("none", "tanh"):
            raise ValueError(f'FusedGELU: approximate is {approximate!r}; it must be "none" or "tanh"')
        super().__init__(approximate)

    def forward(self, x: Tensor) -> Tensor:
        """x, any shape and strides -> the same shape."""
        return gelu(x, self.approximate)


class FusedReLU(nn.ReLU):
    """nn.ReLU on this library's kernels. With inplace=True x is overwritten, by torch's own kernel."""

    def forward(self, x: Tensor) -> Tensor:
        """x, any shape and strides -> the same shape."""
        return torch_functional.relu(x, inplace=True) if self.inplace else relu(x)


class FusedSwiGLU(nn.Module):
    """down_proj(silu(gate) * up), gate and up the halves of one product gate_up_proj(x).

    The projection's bias is added in the pass that gates.

    Args:
        dim: features in and out.
        hidden_dim: features between; 4 * dim where absent.
        dropout: probability, in training, after the gate.
    """

    def __init__(
        self,
        dim: int,
        hidden_dim: int | None = None,
        bias: bool = False,
        dropout: float = 0.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.dim = dim
        self.hidden_dim = 4 * dim if hidden_dim is None else hidden_dim
        self.dropout = check_probability("FusedSwiGLU", dropout)
        self.gate_up_proj = nn.Linear(dim, 2 * self.hidden_dim, bias, device, dtype)
        self.down_proj = nn.Linear(self.hidden_dim, dim, bias, device, dtype)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., dim] -> [..., dim]."""
        check_features(self, x, self.dim)
        dropout_p = self.dropout if self.training else 0.0
        if type(self.gate_up_proj) is not nn.Linear or type(self.down_proj) is not nn.Linear:
            return self._with_other_layers(x, dropout_p)
        packed = product(x, self.gate_up_proj.weight)
        hidden = gated_activation_packed(packed, "silu", bias=self.gate_up_proj.bias, dropout_p=dropout_p)
        return product(hidden, self.down_proj.weight, self.down_proj.bias)

    def _with_other_layers(self, x: Tensor, dropout_p: float) -> Tensor:
        """Where a layer was replaced, by one in FP8 or another: its own forward counts."""
        gate_up, down = self.gate_up_proj, self.down_proj
        for layer_type, gated_mlp in _GATED_MLPS:
            if dropout_p == 0.0 and isinstance(gate_up, layer_type) and isinstance(down, layer_type):
                return gated_mlp(x, gate_up, down)
        hidden = gated_activation_packed(gate_up(x), "silu", dropout_p=dropout_p)
        return down(hidden)  # type: ignore[no-any-return]


class FusedLayerNormActivation(OptimizedLayerNorm):
    """activation(layer_norm(x)), forward in one pass over memory. Backward takes three (functional.layer_norm).

    Args:
        normalized_shape: the last dimension of the input, or several.
        activation: gelu, gelu_tanh, silu (or swish), relu, relu_squared, sigmoid, tanh or identity.
    """

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        activation: str = "gelu",
        eps: float = 1e-5,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        kind = activation_kind("FusedLayerNormActivation", activation)
        super().__init__(normalized_shape, eps, True, bias, device, dtype)
        self.activation = activation
        self._kind = kind

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        """x [..., *normalized_shape] -> the same shape."""
        rows = columns_last(self, x, "x")
        bias: Tensor | None = self.bias
        bias = bias if bias is None else bias.flatten()
        return layer_norm(rows, self.weight.flatten(), bias, self.eps, activation=self._kind).view(x.shape)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, activation={self.activation!r}"


def fused_layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float = 1e-5) -> Tensor:
    """`functional.layer_norm` by the name of the seeds."""
    return layer_norm(x, weight, bias, eps)


def fused_swiglu(x: Tensor, w_gate: Tensor, w_up: Tensor) -> Tensor:
    """silu(x @ w_gate.T) * (x @ w_up.T), the weights [hidden, features] as nn.Linear's; the gate is one pass."""
    return swiglu(product(x, w_gate), product(x, w_up))
