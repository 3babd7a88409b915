"""Gated activations: casts and gradients."""

from __future__ import annotations

from torch import Tensor

from .support.casting import parameter_for, same_type
from .support.declare import differentiable
from .support.seed import seed_for


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
        kind: silu (SwiGLU), gelu or gelu_tanh (GEGLU), relu (ReGLU), sigmoid (GLU) or identity (their product).
        gate_bias, up_bias: [columns], the gate's type or fp32.
        residual, dropout_p, seed: as for `activation`.
    """
    if up.dtype is not gate.dtype:
        gate, up = same_type(gate, up)
    if residual is not None and residual.dtype is not gate.dtype:
        residual = residual.to(gate.dtype)
    gate_bias, up_bias = parameter_for(gate, gate_bias), parameter_for(gate, up_bias)
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
    """`gated_activation` of a gate and an up that lie in one tensor, the gate first.

    Args:
        x: [..., 2 n], gate and up; any strides.
        kind: the gate's function, as in `gated_activation`.
        bias: [2 n], added to gate and up.
        residual: [..., n], added to the result.
        dropout_p: probability of dropping an element, as in `gated_activation`.
        seed: int64[2] on x's device, the seed and the offset of the dropout; None draws one.

    Returns:
        [..., n], of x's type.
    """
    if residual is not None and residual.dtype is not x.dtype:
        residual = residual.to(x.dtype)
    drawn = seed_for(x, seed) if dropout_p else None
    return _packed(x, parameter_for(x, bias), residual, drawn, kind, dropout_p)  # type: ignore[no-any-return]


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


_INSTEAD = "a composition of torch's functions"

_gated = differentiable("gated_activation", instead=_INSTEAD)
_packed = differentiable("gated_activation_packed", name="gated_activation", instead=_INSTEAD)
