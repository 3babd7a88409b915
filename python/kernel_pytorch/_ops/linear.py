"""linear and mlp: casts and gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .gated_activation import gated_activation
from .matmul import matmul
from .support.autograd import wants_gradient
from .support.casting import autocast, parameter_for, product_precision
from .support.declare import backward, differentiable

# What an activation's word means: the function, and whether it is of the even columns alone (the gates).
_GATED = {"swiglu": "silu", "geglu": "gelu", "geglu_tanh": "gelu_tanh", "reglu": "relu", "glu": "sigmoid"}


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str | None = None,
    residual: Tensor | None = None,
    weight_up: Tensor | None = None,
    precision: str | None = None,
) -> Tensor:
    """activation(x @ weight.T + bias) + residual in one pass: what surrounds the product is part of its kernel.

    Args:
        x: [..., in], any strides; fp32, bf16, fp16 and fp64.
        weight: [out, in], any strides, x's type (autocast casts both).
        bias: [out], x's type or fp32; a narrower one is widened.
        activation: None, gelu, gelu_tanh, silu, relu, relu_squared, sigmoid or tanh; or a gated one, swiglu, geglu,
            geglu_tanh, reglu or glu: then the weight's rows are interleaved (gate, up, gate, up, ...; see
            `interleave_gate_up`), function(gate) * up is taken of each pair, and the output has out / 2 columns.
        residual: of the output's shape and type, added last.
        weight_up: of the weight's shape and type. The activated values are multiplied by x @ weight_up.T: a gated layer
            of two matrices as they are, in one product where a kernel takes both (bf16 and fp16 on a Hopper GPU, or up
            to 16 rows on any from sm_80). Calls that need a gradient compute two products and their own backward.
        precision: of fp32 products and those of their gradients, as `matmul`'s.

    Returns:
        [..., out], contiguous, of x's type; summed in fp32 and rounded once.

    Backward takes the bias' gradient along with the weight's product. Second derivatives exist without an activation.
    """
    x, weight = autocast(x, weight)
    if x.dtype is not weight.dtype or residual is not None:
        residual = _residual_for("linear", x, weight, residual)
    kind, gated = ("identity", False) if activation is None else _layer("linear", activation)
    if weight_up is not None:
        (weight_up,) = autocast(weight_up)
        if wants_gradient(x, weight, bias, residual, weight_up):
            gate = linear(x, weight, bias, precision=precision)
            return gated_activation(gate, linear(x, weight_up, precision=precision), kind, residual=residual)
    precision = product_precision("linear", precision, x)
    return _linear(x, weight, parameter_for(x, bias), residual, kind, gated, precision, weight_up)  # type: ignore[no-any-return]


def mlp(
    x: Tensor,
    weight_in: Tensor,
    weight_out: Tensor,
    bias_in: Tensor | None = None,
    bias_out: Tensor | None = None,
    *,
    activation: str | None = "gelu",
    residual: Tensor | None = None,
    precision: str | None = None,
) -> Tensor:
    """linear(linear(x, weight_in, bias_in, activation=activation), weight_out, bias_out, residual=residual).

    Backward is four products: the activation's gradient is part of the one that comes before it.

    Args:
        precision: of all products of fp32, as `matmul`'s.
    """
    x, weight_in, weight_out = autocast(x, weight_in, weight_out)
    residual = _residual_for("mlp", x, weight_in, residual)
    kind, gated = _layer("mlp", activation)
    biases = parameter_for(x, bias_in), parameter_for(x, bias_out)
    precision = product_precision("mlp", precision, x)
    return _mlp(x, weight_in, biases[0], weight_out, biases[1], residual, kind, gated, precision)  # type: ignore[no-any-return]


def interleave_gate_up(gate: Tensor, up: Tensor) -> Tensor:
    """The weight (or bias) of a gated layer, rows gate[0], up[0], gate[1], up[1], ..., from its two halves."""
    if gate.dim() == 0 or gate.shape != up.shape:
        raise ValueError(
            f"interleave_gate_up: gate has shape {list(gate.shape)}, up has {list(up.shape)}; give two matrices (or "
            "biases) of one shape"
        )
    return torch.stack((gate, up), dim=1).flatten(0, 1)


def _layer(op: str, activation: str | None) -> tuple[str, bool]:
    if activation is None:
        return "identity", False
    if not isinstance(activation, str):
        raise TypeError(f"{op}: activation is {activation!r}; it must be the name of one, or None")
    return (_GATED[activation], True) if activation in _GATED else (activation, False)


def _residual_for(op: str, x: Tensor, weight: Tensor, residual: Tensor | None) -> Tensor | None:
    """The residual in x's type, which must be the weight's."""
    if x.dtype is not weight.dtype:
        raise TypeError(
            f"{op}: x is {x.dtype}, weight is {weight.dtype}; convert one of them, or call it under torch.autocast"
        )
    return residual if residual is None or residual.dtype is x.dtype else residual.to(x.dtype)


def _gradient(grads: Any, saved: Any, wanted: Any) -> Any:
    # None for weight_up: with it, the op is called without gradients alone.
    if not any(wanted[:3]):  # the residual alone
        return None, None, None, grads[0], None
    if torch.is_grad_enabled() and saved[4] == "identity" and not saved[5]:
        return *_differentiable_gradient(grads[0], saved, wanted), grads[0], None
    return *_backward(grads[0], *saved, *wanted[:3]), grads[0], None


def _differentiable_gradient(grad: Tensor, saved: Any, wanted: Any) -> tuple[Tensor | None, ...]:
    """The gradients of a layer without an activation, as GEMMs that are differentiable themselves."""
    x, weight, bias, *_, precision = saved
    rows, grad_rows = x.reshape(-1, x.shape[-1]), grad.reshape(-1, grad.shape[-1])
    return (
        matmul(grad, weight, precision=precision) if wanted[0] else None,
        matmul(grad_rows.mT, rows, precision=precision) if wanted[1] else None,
        grad_rows.sum(0).to(bias.dtype) if wanted[2] else None,
    )


_INSTEAD = "torch.nn.functional.linear and its activation"

_backward = backward("linear", instead=_INSTEAD)
_linear = differentiable("linear", gradient=_gradient, instead=_INSTEAD)
_mlp = differentiable("mlp", instead=_INSTEAD)
