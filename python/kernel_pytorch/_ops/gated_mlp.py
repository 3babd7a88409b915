"""gated_mlp for torch: a gated MLP whose gate and up are one weight, all gates before all ups. The kernels are C++
(kernel_pytorch/torch/ops/linear.cpp); how a call reaches them is in _declare.py.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ._casting import autocast, product_dtype
from ._declare import backward, differentiable


def gated_mlp(
    x: Tensor,
    weight_in: Tensor,
    weight_out: Tensor,
    *,
    activation: str = "silu",
    residual: Tensor | None = None,
    vendor: bool = False,
) -> Tensor:
    """(activation(x @ gate.T) * (x @ up.T)) @ weight_out.T + residual, weight_in being gate and up one after the other.

    Two products forward and four backward: the gate is the end of the first, its gradient the end of the one before it,
    so that what is between them is written once and not read again. On a GPU of compute capability 9.0 in bf16 or fp16
    with a hidden size that is a multiple of 64; on a CPU by the reference. `vendor`: the weights' gradients, which are
    products and nothing else, by cuBLASLt where it is there.
    """
    x, weight_in, weight_out = autocast(x, weight_in, weight_out)
    if residual is not None and residual.dtype is not x.dtype:
        residual = residual.to(x.dtype)
    return _gated_mlp(x, weight_in, weight_out, residual, activation, vendor)  # type: ignore[no-any-return]


def runs_on_halves(x: Tensor, hidden: int) -> bool:
    """Whether there is a kernel for it."""
    if x.device.type != "cuda" or hidden % 64 or x.shape[-1] % 8:
        return False
    return product_dtype(x) in (torch.bfloat16, torch.float16) and torch.cuda.get_device_capability(x.device) == (9, 0)


def _shapes(
    x: Tensor, weight_in: Tensor, weight_out: Tensor, residual: Tensor | None, activation: str, vendor: bool
) -> tuple[Tensor, ...]:
    columns = (weight_out.shape[0], weight_in.shape[0] // 2, weight_in.shape[0])
    return tuple(x.new_empty((*x.shape[:-1], count)) for count in columns)


def _backward_shapes(
    grad_output: Tensor,
    x: Tensor,
    weight_in: Tensor,
    weight_out: Tensor,
    hidden: Tensor,
    preactivation: Tensor,
    activation: str,
    vendor: bool,
    *wanted: bool,
) -> tuple[Tensor, ...]:
    tensors = (x, weight_in, weight_out)
    return tuple(t.new_empty(t.shape) if want else x.new_empty((0,)) for t, want in zip(tensors, wanted, strict=True))


def _gradient(grads: Any, saved: Any, wanted: Any) -> Any:
    if not any(wanted[:3]):
        return None, None, None, grads[0]
    return *_backward(grads[0], *saved, *wanted[:3]), grads[0]


_INSTEAD = "torch.nn.functional.linear and silu"
_WEIGHTS = ["weight_in", "weight_out"]

_backward = backward(
    "gated_mlp",
    shapes=_backward_shapes,
    parameters=_WEIGHTS,
    per_sample=["weight_in_grad", "weight_out_grad"],
    instead=_INSTEAD,
)
_gated_mlp = differentiable(
    "gated_mlp",
    shapes=_shapes,
    saves=["x", *_WEIGHTS, "hidden", "preactivation", "activation", "vendor"],
    gradient=_gradient,
    parameters=_WEIGHTS,
    instead=_INSTEAD,
)
