"""The matrix product of the layers: functional.linear where this library's kernels are the ones to use, else torch's.

Where the core has a fallback only (fp64, fp32 on a GPU but for large products on Hopper, GPUs other than Hopper),
torch's is faster.
"""

from __future__ import annotations

import torch
import torch.nn.functional as torch_functional
from torch import Tensor

from .._ops.support.casting import product_dtype, torch_allows_tf32
from .._supports import runs_fast
from ..functional import activation as activate
from ..functional import linear

_SHAPE = (128, 128, 128)  # that every kernel takes whose type and device are right


def runs_here(x: Tensor) -> bool:
    """Whether a product with x is functional.linear's."""
    if x.device.type not in ("cpu", "cuda") or x.dtype is torch.float64:
        return False
    return runs_fast("matmul", _SHAPE, product_dtype(x), x.device)


def _runs_large_fp32(x: Tensor, weight: Tensor) -> bool:
    """Whether a kernel takes this product of fp32 by its sizes. Where tf32 is allowed torch's is as fast.

    Asked outside of torch.compile only, where sizes are numbers, with a power of two of rows: few questions are asked.
    """
    if x.device.type != "cuda" or torch.compiler.is_compiling() or product_dtype(x) is not torch.float32:
        return False
    if torch_allows_tf32() or x.numel() == 0 or not (x.is_contiguous() and weight.is_contiguous()):
        return False
    rows = x.numel() // x.shape[-1]
    return runs_fast("matmul", (1 << rows.bit_length() - 1, *weight.shape), torch.float32, x.device)


def product(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str = "identity", residual: Tensor | None = None
) -> Tensor:
    """activation(x @ weight.T + bias) + residual, one pass where the product is ours and two where it is torch's."""
    if runs_here(x) or _runs_large_fp32(x, weight):
        return linear(x, weight, bias, activation=activation, residual=residual)
    if activation == "identity" and residual is None:
        return torch_functional.linear(x, weight, bias)
    return activate(torch_functional.linear(x, weight), activation, bias=bias, residual=residual)
