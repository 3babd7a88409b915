"""Activations: casts and gradients."""

from __future__ import annotations

from torch import Tensor

from .support.casting import parameter_for, same_type
from .support.declare import backward, differentiable
from .support.seed import seed_for


def activation(
    x: Tensor,
    kind: str,
    *,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    dropout_p: float = 0.0,
    seed: Tensor | None = None,
) -> Tensor:
    """dropout(function(x + bias)) + residual, in one pass over memory.

    Args:
        x: [..., columns], any strides; fp32, bf16, fp16 and fp64.
        kind: gelu, gelu_tanh, silu, relu, relu_squared, sigmoid, tanh or identity.
        bias: [columns], x's type or fp32. A narrower one is widened to x's type.
        residual: x's shape; where the types differ, both are taken in the wider one.
        dropout_p: probability of dropping an element, in steps of 1/65536; what is kept is divided by 1 - p.
        seed: int64[2] on x's device, the seed and the offset of the dropout; None draws one from torch's generator.

    Returns:
        The output, contiguous, of x's shape and type; computed in fp32 and rounded once.
    """
    if x.dim() == 0:
        residual = residual if residual is None else residual[None]
        return activation(x[None], kind, bias=bias, residual=residual, dropout_p=dropout_p, seed=seed)[0]
    if residual is not None and residual.dtype is not x.dtype:
        x, residual = same_type(x, residual)
    if bias is not None and bias.dtype is not x.dtype:
        bias = parameter_for(x, bias)
    return _activation(x, bias, residual, seed_for(x, seed) if dropout_p else None, kind, dropout_p)  # type: ignore[no-any-return]


def gelu(x: Tensor, approximate: str = "none") -> Tensor:
    """x times the probability of a normal variable below x; approximate="tanh" for the formula with tanh."""
    if approximate not in ("none", "tanh"):
        raise ValueError(f'gelu: approximate is {approximate!r}; it must be "none" or "tanh"')
    return activation(x, "gelu" if approximate == "none" else "gelu_tanh")


def silu(x: Tensor) -> Tensor:
    """x * sigmoid(x)."""
    return activation(x, "silu")


def relu(x: Tensor) -> Tensor:
    """max(x, 0)."""
    return activation(x, "relu")


def relu_squared(x: Tensor) -> Tensor:
    """max(x, 0) squared."""
    return activation(x, "relu_squared")


def backward_of_activation(grad_output: Tensor, x: Tensor, kind: str) -> Tensor:
    """The gradient of activation(x, kind) alone, for gradients of ops that end with one."""
    grad_x, _ = _backward(grad_output, x, None, None, kind, 0.0, False)
    return grad_x  # type: ignore[no-any-return]


_INSTEAD = "torch.nn.functional's activations"

_backward = backward("activation", instead=_INSTEAD)
_activation = differentiable("activation", gradient_call=_backward, instead=_INSTEAD)
