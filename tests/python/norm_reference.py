"""The norms by their formulas in float64, differentiable, and the comparison of a low-precision result with them."""

from __future__ import annotations

import torch
from torch import Tensor

# One unit in the last place (2^-8 for bf16, 2^-11 for fp16) and a little, since statistics are fp32.
RELATIVE = {torch.float64: 1e-12, torch.float32: 4e-6, torch.bfloat16: 1.1 * 2.0**-8, torch.float16: 1.1 * 2.0**-11}


def reference_norm(
    kind: str,
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    eps: float = 1e-6,
    weight_offset: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """(output, sum) in float64; the sum is rounded to x's type as the contract says, its gradient passes straight."""
    value = x.double()
    if residual is not None:
        exact = value + residual.double()
        value = exact + (exact.to(x.dtype).double() - exact).detach()
    total = value
    if kind == "layer_norm":
        value = value - value.mean(-1, keepdim=True)
    output = value / (value.square().mean(-1, keepdim=True) + eps).sqrt()
    if weight is not None:
        output = output * (weight.double() + weight_offset)
    if bias is not None:
        output = output + bias.double()
    return output, total


def assert_near(actual: Tensor, expected: Tensor, factor: float = 1.0) -> None:
    """`factor` widens the bound for gradients: sums of many rounded terms, or differences of terms of about one."""
    assert actual.shape == expected.shape
    bound = RELATIVE[actual.dtype] * factor
    scale = expected.abs().max().item() if expected.numel() else 1.0
    absolute = bound * max(scale, 0.1) * (0.05 if actual.dtype in (torch.bfloat16, torch.float16) else 1.0)
    torch.testing.assert_close(actual.double(), expected.double(), rtol=bound, atol=absolute, equal_nan=True)
