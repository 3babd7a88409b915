"""Products of torch's whose gradients autograd would add up as whole tensors.

`linears`: several layers of one input. Its gradient is the sum of as many products; here each product after the first
adds to what is there, where autograd writes them all and reads them again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

# Apart from the ops of the core, which C++ declares: these are torch's products in another order.
OPS = torch.ops.kernel_pytorch_compile


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


@torch.library.custom_op("kernel_pytorch_compile::linears", mutates_args=())
def linears(x: Tensor, weights: Sequence[Tensor]) -> list[Tensor]:
    """x @ weight^T for each weight."""
    return [functional.linear(x, weight) for weight in weights]


@linears.register_fake
def _(x: Tensor, weights: Sequence[Tensor]) -> list[Tensor]:
    return [x.new_empty(*x.shape[:-1], weight.shape[0]) for weight in weights]


@torch.library.custom_op("kernel_pytorch_compile::linears_input_gradient", mutates_args=())
def linears_input_gradient(gradients: Sequence[Tensor], weights: Sequence[Tensor]) -> Tensor:
    """The sum of gradient @ weight, rounded after each product."""
    first, *others = zip(map(_rows, gradients), weights)
    total = first[0] @ first[1]
    for gradient, weight in others:
        total.addmm_(gradient, weight)
    return total.view(*gradients[0].shape[:-1], total.shape[-1])


@linears_input_gradient.register_fake
def _(gradients: Sequence[Tensor], weights: Sequence[Tensor]) -> Tensor:
    return gradients[0].new_empty(*gradients[0].shape[:-1], weights[0].shape[1])


def _keep_linears(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    x, weights = inputs
    ctx.save_for_backward(x, *weights)


def _linears_backward(ctx: Any, gradients: Sequence[Tensor | None]) -> tuple[Any, ...]:
    x, *weights = ctx.saved_tensors
    used = [(gradient, weight) for gradient, weight in zip(gradients, weights) if gradient is not None]
    grad_x = None
    if ctx.needs_input_grad[0] and used:
        grad_x = linears_input_gradient([one for one, _ in used], [weight for _, weight in used])
    wanted = zip(gradients, ctx.needs_input_grad[1])
    return grad_x, [_rows(one).t() @ _rows(x) if one is not None and wants else None for one, wants in wanted]


torch.library.register_autograd("kernel_pytorch_compile::linears", _linears_backward, setup_context=_keep_linears)
