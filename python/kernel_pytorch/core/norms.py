"""The norms as modules. They are torch's modules with another forward: parameters, names, state_dict and repr are
inherited, so a checkpoint loads both ways and isinstance checks of other tools hold.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..functional import layer_norm, rms_norm


def columns_last(module: nn.RMSNorm | nn.LayerNorm, tensor: Tensor, name: str) -> Tensor:
    """The normalised dimensions as one. A view wherever strides allow it."""
    dimensions = len(module.normalized_shape)
    if tuple(tensor.shape[-dimensions:]) != tuple(module.normalized_shape):
        raise RuntimeError(
            f"{type(module).__name__}: {name} has shape {list(tensor.shape)}, its last dimensions must be "
            f"normalized_shape {list(module.normalized_shape)}; build the module for that shape"
        )
    return tensor.flatten(-dimensions) if dimensions > 1 else tensor


class OptimizedRMSNorm(nn.RMSNorm):
    """nn.RMSNorm on this library's kernels.

    Args:
        normalized_shape: the last dimension of the input, or several.
        weight_offset: added to the weight; 1.0 for models that store weight - 1, whose weight starts at 0.
    """

    eps: float | None
    weight_offset: float

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float | None = 1e-6,
        elementwise_affine: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        weight_offset: float = 0.0,
    ) -> None:
        super().__init__(normalized_shape, eps, elementwise_affine, device, dtype)
        self.weight_offset = weight_offset
        if weight_offset:
            self.reset_parameters()

    def reset_parameters(self) -> None:
        """Starts the weight so that weight + weight_offset is 1."""
        if self.elementwise_affine:
            nn.init.constant_(self.weight, 1.0 - getattr(self, "weight_offset", 0.0))

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Any:
        """x [..., *normalized_shape] -> the same shape; with a residual the pair (output, x + residual)."""
        weight: Tensor | None = self.weight
        if weight is not None and weight.dim() == 1:
            return rms_norm(x, weight, self.eps, residual=residual, weight_offset=self.weight_offset)
        rows = columns_last(self, x, "x")
        if weight is not None:
            weight = weight.flatten()
        if residual is None:
            return rms_norm(rows, weight, self.eps, weight_offset=self.weight_offset).view(x.shape)
        residual = columns_last(self, residual, "residual")
        output, sum_ = rms_norm(rows, weight, self.eps, residual=residual, weight_offset=self.weight_offset)
        return output.view(x.shape), sum_.view(x.shape)

    def extra_repr(self) -> str:
        return super().extra_repr() + (f", weight_offset={self.weight_offset}" if self.weight_offset else "")


class OptimizedLayerNorm(nn.LayerNorm):
    """nn.LayerNorm on this library's kernels.

    Args:
        normalized_shape: the last dimension of the input, or several.
        bias: whether there is one; without it the state_dict has no entry for it, as torch's.
    """

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(normalized_shape, eps, elementwise_affine, bias, device, dtype)

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Any:
        """x [..., *normalized_shape] -> the same shape; with a residual the pair (output, x + residual)."""
        weight: Tensor | None = self.weight
        bias: Tensor | None = self.bias
        if weight is not None and weight.dim() == 1:
            return layer_norm(x, weight, bias, self.eps, residual=residual)
        rows = columns_last(self, x, "x")
        if weight is not None:
            weight = weight.flatten()
        if bias is not None:
            bias = bias.flatten()
        if residual is None:
            return layer_norm(rows, weight, bias, self.eps).view(x.shape)
        output, sum_ = layer_norm(rows, weight, bias, self.eps, residual=columns_last(self, residual, "residual"))
        return output.view(x.shape), sum_.view(x.shape)
