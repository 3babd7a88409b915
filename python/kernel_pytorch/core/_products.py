"""The matrix product of the layers: functional.linear where this library's kernels are the ones to use, else torch's.

torch's are those of fp64, of fp32 on a GPU, and of GPUs other than Hopper, where this library has a plain kernel only.
"""

from __future__ import annotations

import torch
import torch.nn.functional as torch_functional
from torch import Tensor

from .._ops._casting import product_dtype
from ..functional import activation as activate
from ..functional import linear


def runs_here(x: Tensor) -> bool:
    """Whether a product with x is functional.linear's."""
    kind, dtype = x.device.type, product_dtype(x)
    if kind == "cpu":
        return dtype is not torch.float64 and x.dtype is not torch.float64
    return (
        kind == "cuda"
        and dtype in (torch.bfloat16, torch.float16)
        and torch.cuda.get_device_capability(x.device)[0] == 9
    )


def product(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str = "identity", residual: Tensor | None = None
) -> Tensor:
    """activation(x @ weight.T + bias) + residual, one pass where the product is ours and two where it is torch's."""
    if runs_here(x):
        return linear(x, weight, bias, activation=activation, residual=residual)
    if activation == "identity" and residual is None:
        return torch_functional.linear(x, weight, bias)
    return activate(torch_functional.linear(x, weight), activation, bias=bias, residual=residual)
