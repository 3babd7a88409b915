"""The matrix product of the layers: functional.linear where this library's kernels are the ones to use, else torch's.

Where the core has a fallback only (fp64, fp32 on a GPU, GPUs other than Hopper), torch's is faster.
"""

from __future__ import annotations

import torch
import torch.nn.functional as torch_functional
from torch import Tensor

from .._ops.support.casting import product_dtype
from .._supports import runs_fast
from ..functional import activation as activate
from ..functional import linear

_SHAPE = (128, 128, 128)  # that every kernel takes whose type and device are right


def runs_here(x: Tensor) -> bool:
    """Whether a product with x is functional.linear's."""
    if x.device.type not in ("cpu", "cuda") or x.dtype is torch.float64:
        return False
    return runs_fast("matmul", _SHAPE, product_dtype(x), x.device)


def product(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str = "identity", residual: Tensor | None = None
) -> Tensor:
    """activation(x @ weight.T + bias) + residual, one pass where the product is ours and two where it is torch's."""
    if runs_here(x):
        return linear(x, weight, bias, activation=activation, residual=residual)
    if activation == "identity" and residual is None:
        return torch_functional.linear(x, weight, bias)
    return activate(torch_functional.linear(x, weight), activation, bias=bias, residual=residual)
