"""A linear layer whose products are of 8-bit integers."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .._ops.int8_matmul import int8_matmul, quantize_rows


class Int8Linear(nn.Module):
    """activation(x @ weight.T + bias) by int8 products (W8A8): the weight is int8 with one scale a row, and a row
    of x is rounded to 8 bits by its own largest magnitude in each call. Gradients reach x, as if it had not been
    rounded, and the bias; the weight is fixed.

    `from_linear` rounds a layer's weight. The constructor makes an empty one for load_state_dict.

    Args:
        dtype: of the bias.
        activation: what is applied to the result, by its name in functional.activation.
    """

    weight: Tensor
    scale: Tensor

    def __init__(
        self, in_features: int, out_features: int, bias: bool = True, *, activation: str | None = None,
        device: torch.device | str | None = None, dtype: torch.dtype = torch.bfloat16,
    ) -> None:  # fmt: skip
        super().__init__()
        self.in_features, self.out_features, self.activation = in_features, out_features, activation
        self.register_buffer("weight", torch.zeros(out_features, in_features, dtype=torch.int8, device=device))
        self.register_buffer("scale", torch.zeros(out_features, dtype=torch.float32, device=device))
        self.bias = nn.Parameter(torch.zeros(out_features, dtype=dtype, device=device)) if bias else None

    @classmethod
    def from_linear(cls, linear: nn.Linear, *, activation: str | None = None) -> Int8Linear:
        """The layer with its weight rounded; the bias is the same parameter."""
        made = cls(linear.in_features, linear.out_features, False, activation=activation, device="meta")
        made.weight, made.scale = quantize_rows(linear.weight)
        made.bias = linear.bias
        return made

    def dequantize(self, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        """The weight's values."""
        return (self.weight.float() * self.scale[:, None]).to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        return int8_matmul(x, self.weight, self.scale, bias=self.bias, activation=self.activation)

    def _apply(self, fn, recurse=True):  # type: ignore[no-untyped-def]
        """`.half()` changes the bias; scales stay fp32."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.scale = self.scale.float()
        return self

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"
