"""Gated activations for torch: casts, shapes, gradients. The kernels are C++ (kernel_pytorch/torch/ops/
gated_activation.cpp); how a call reaches them is in _declare.py.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ._casting import parameter_for, same_type
from ._declare import backward, differentiable
from ._seed import seed_for


def gated_activation(
    gate: Tensor,
    up: Tensor,
    kind: str,
    *,
    gate_bias: Tensor | None = None,
    up_bias: Tensor | None = None,
    residual: Tensor | None = None,
    dropout_p: float = 0.0,
    seed: Tensor | None = None,
) -> Tensor:
    """dropout(function(gate + gate_bias) * (up + up_bias)) + residual, in one pass over memory.

    Args:
        gate, up: [..., columns] of one shape, any strides; where the types differ, both are taken in the wider one.
        kind: silu (SwiGLU), gelu or gelu_tanh (GEGLU), relu (ReGLU) or sigmoid (GLU).
        gate_bias, up_bias: [columns], the gate's type or fp32.
        residual, dropout_p, seed: as for `activation`.
    """
    if up.dtype is not gate.dtype:
        gate, up = same_type(gate, up)
    if residual is not None and residual.dtype is not gate.dtype:
        residual = residual.to(gate.dtype)
    if gate_bias is not None and gate_bias.dtype is not gate.dtype:
        gate_bias = parameter_for(gate, gate_bias)
    if up_bias is not None and up_bias.dtype is not gate.dtype:
        up_bias = parameter_for(gate, up_bias)
    if gate_bias is not None and up_bias is not None and gate_bias.dtype is not up_bias.dtype:
        gate_bias, up_bias = same_type(gate_bias, up_bias)
    drawn = seed_for(gate, seed) if dropout_p else None
    return _gated(gate, up, gate_bias, up_bias, residual, drawn, kind, dropout_p)  # type: ignore[no-any-return]


def gated_activation_packed(
    x: Tensor,
    kind: str,
    *,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    dropout_p: float = 0.0,
    seed: Tensor | None = None,
) -> Tensor:
    """`gated_activation` of the halves of x [..., 2 n], gate before up: [..., n]. The bias has 2 n columns as well."""
    if residual is not None and residual.dtype is not x.dtype:
        residual = residual.to(x.dtype)
    if bias is not None and bias.dtype is not x.dtype:
        bias = parameter_for(x, bias)
    return _packed(x, bias, residual, seed_for(x, seed) if dropout_p else None, kind, dropout_p)  # type: ignore[no-any-return]


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up."""
    return gated_activation(gate, up, "silu")


def geglu(gate: Tensor, up: Tensor, approximate: str = "none") -> Tensor:
    """gelu(gate) * up."""
    return gated_activation(gate, up, _gelu(approximate))


def reglu(gate: Tensor, up: Tensor) -> Tensor:
    """relu(gate) * up."""
    return gated_activation(gate, up, "relu")


def swiglu_packed(x: Tensor) -> Tensor:
    """silu(x[..., :n]) * x[..., n:] of x [..., 2 n]."""
    return gated_activation_packed(x, "silu")


def geglu_packed(x: Tensor, approximate: str = "none") -> Tensor:
    """gelu(x[..., :n]) * x[..., n:] of x [..., 2 n]."""
    return gated_activation_packed(x, _gelu(approximate))


def reglu_packed(x: Tensor) -> Tensor:
    """relu(x[..., :n]) * x[..., n:] of x [..., 2 n]."""
    return gated_activation_packed(x, "relu")


def _gelu(approximate: str) -> str:
    if approximate not in ("none", "tanh"):
        raise ValueError(f'geglu: approximate is {approximate!r}; it must be "none" or "tanh"')
    return "gelu" if approximate == "none" else "gelu_tanh"


def _shapes(gate: Tensor, *_: Any) -> Tensor:
    return gate.new_empty(gate.shape)


def _backward_shapes(
    grad_output: Tensor,
    gate: Tensor,
    up: Tensor,
    gate_bias: Tensor | None,
    up_bias: Tensor | None,
    seed: Tensor | None,
    kind: str,
    dropout_p: float,
    gate_bias_grad: bool,
    up_bias_grad: bool,
) -> tuple[Tensor, ...]:
    return (
        gate.new_empty(gate.shape),
        gate.new_empty(gate.shape),
        _bias_shape(gate_bias, gate_bias_grad, gate),
        _bias_shape(up_bias, up_bias_grad, gate),
    )


def _bias_shape(bias: Tensor | None, wanted: bool, x: Tensor) -> Tensor:
    return bias.new_empty(bias.shape) if wanted and bias is not None else x.new_empty((0,))


def _packed_shapes(x: Tensor, *_: Any) -> Tensor:
    return x.new_empty((*x.shape[:-1], x.shape[-1] // 2))


def _packed_backward_shapes(
    grad_output: Tensor,
    x: Tensor,
    bias: Tensor | None,
    seed: Tensor | None,
    kind: str,
    dropout_p: float,
    bias_grad: bool,
) -> tuple[Tensor, ...]:
    return x.new_empty(x.shape), _bias_shape(bias, bias_grad, x)


def _gradient(grads: Any, saved: Any, wanted: Any) -> Any:
    _, _, gate_bias_wanted, up_bias_wanted, _, _ = wanted
    if not any(wanted[:4]):  # the residual alone
        return None, None, None, None, grads[0], None
    gradients = _backward(grads[0], *saved, gate_bias_wanted, up_bias_wanted)
    return *gradients, grads[0], None


def _packed_gradient(grads: Any, saved: Any, wanted: Any) -> Any:
    x_wanted, bias_wanted, _, _ = wanted
    if not x_wanted and not bias_wanted:
        return None, None, grads[0], None
    return *_packed_backward(grads[0], *saved, bias_wanted), grads[0], None


_INSTEAD = "a composition of torch's functions"

_backward = backward(
    "gated_activation",
    shapes=_backward_shapes,
    parameters=["gate_bias", "up_bias", "seed"],
    per_sample=["gate_bias_grad", "up_bias_grad"],
    instead=_INSTEAD,
)
_gated = differentiable(
    "gated_activation",
    shapes=_shapes,
    saves=["gate", "up", "gate_bias", "up_bias", "seed", "kind", "dropout_p"],
    gradient=_gradient,
    parameters=["gate_bias", "up_bias", "seed"],
    instead=_INSTEAD,
)
_packed_backward = backward(
    "gated_activation_packed",
    shapes=_packed_backward_shapes,
    parameters=["bias", "seed"],
    per_sample=["bias_grad"],
    name="gated_activation",
    instead=_INSTEAD,
)
_packed = differentiable(
    "gated_activation_packed",
    shapes=_packed_shapes,
    saves=["x", "bias", "seed", "kind", "dropout_p"],
    gradient=_packed_gradient,
    parameters=["bias", "seed"],
    name="gated_activation",
    instead=_INSTEAD,
)
