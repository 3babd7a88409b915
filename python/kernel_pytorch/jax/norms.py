"""Norms over the last dimension, with or without a residual."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from ._call import Array, call, parameter_for, same_type
from ._gradients import differentiable
from .pointwise import activation as activate


def rms_norm(
    x: Array,
    weight: Array | None = None,
    eps: float = 1e-6,
    *,
    residual: Array | None = None,
    weight_offset: float = 0.0,
    out_dtype: Any = None,
    activation: str | None = None,
    return_input: bool = False,
) -> Any:
    """x / sqrt(mean(x^2) + eps) * (weight + weight_offset), over the last dimension.

    Args:
        x: [..., columns]; fp32, bf16, fp16 and fp64.
        weight: [columns], x's type or fp32; ones where absent.
        residual: x's shape. With it x + residual is normalised, and (output, x + residual) returned.
        weight_offset: added to the weight; 1.0 for models that store weight - 1.
        out_dtype: type of the output: bf16 or fp16 if x is fp32.
        activation: of the output: gelu, gelu_tanh, silu, relu, relu_squared, sigmoid, tanh or identity.
        return_input: return (output, x). With that x as the block's residual the backward of the norm adds the two
            gradients of x itself, which otherwise is a pass over memory of XLA's.
    """
    x = jnp.asarray(x)
    options, types = {"eps": eps, "weight_offset": weight_offset}, {"output_dtype": out_dtype}
    saves = ("x", "sum", "weight", "rstd")
    if residual is None:
        tensors = {"x": x, "weight": parameter_for(x, weight)}
        return _without_residual("rms_norm", tensors, options, saves, types, activation, return_input)
    _check_return_input("rms_norm", return_input)
    x, residual = same_type(x, jnp.asarray(residual))
    tensors = {"x": x, "residual": residual, "weight": parameter_for(x, weight)}
    return _with_residual("add_rms_norm", tensors, options, _rms_gradient, saves, types, activation)


def layer_norm(
    x: Array,
    weight: Array | None = None,
    bias: Array | None = None,
    eps: float = 1e-5,
    *,
    residual: Array | None = None,
    out_dtype: Any = None,
    activation: str | None = None,
    return_input: bool = False,
) -> Any:
    """(x - mean) / sqrt(variance + eps) * weight + bias, over the last dimension; otherwise as `rms_norm`."""
    x = jnp.asarray(x)
    options, types = {"eps": eps}, {"output_dtype": out_dtype}
    saves = ("x", "sum", "weight", "bias", "mean", "rstd")
    if residual is not None:
        x, residual = same_type(x, jnp.asarray(residual))
    weight, bias = parameter_for(x, weight), parameter_for(x, bias)
    if weight is not None and bias is not None:
        weight, bias = same_type(weight, bias)
    if residual is None:
        tensors = {"x": x, "weight": weight, "bias": bias}
        return _without_residual("layer_norm", tensors, options, saves, types, activation, return_input)
    _check_return_input("layer_norm", return_input)
    tensors = {"x": x, "residual": residual, "weight": weight, "bias": bias}
    return _with_residual("add_layer_norm", tensors, options, _layer_gradient, saves, types, activation)


def add_rms_norm(
    x: Array,
    residual: Array,
    weight: Array | None = None,
    eps: float = 1e-6,
    *,
    weight_offset: float = 0.0,
    out_dtype: Any = None,
) -> tuple[Array, Array]:
    """The rms_norm of x + residual, and that sum: `rms_norm` with a residual."""
    return rms_norm(x, weight, eps, residual=residual, weight_offset=weight_offset, out_dtype=out_dtype)  # type: ignore[no-any-return]


def _without_residual(
    op: str, tensors: Any, options: Any, saves: Any, types: Any, activation: str | None, return_input: bool
) -> Any:
    results = ("output", "x") if return_input else ("output",)
    gradient = {"rms_norm": _rms_gradient, "layer_norm": _layer_gradient}[op]
    if activation is not None:
        op, options = f"{op}_activation", {**options, "activation": activation}
        gradient = {"rms_norm_activation": _activated_rms, "layer_norm_activation": _activated_layer}[op]
    made = differentiable(op, tensors, options, gradient, results=results, saves=saves, types=types)
    return made if return_input else made[0]


def _with_residual(
    op: str, tensors: Any, options: Any, gradient: Any, saves: Any, types: Any, kind: str | None
) -> tuple[Array, Array]:
    results = ("output", "sum")
    normed, total = differentiable(op, tensors, options, gradient, results=results, saves=saves, types=types)
    return normed if kind is None else activate(normed, kind), total


def _check_return_input(op: str, return_input: bool) -> None:
    if return_input:
        raise ValueError(f"{op}: return_input is given with a residual; the sum that is returned then is the input")


def _rms_gradient(values: Any, grads: Any, wanted: Any) -> Any:
    return _gradient("rms_norm_backward", values, grads, wanted, ("weight_offset",))


def _layer_gradient(values: Any, grads: Any, wanted: Any) -> Any:
    return _gradient("layer_norm_backward", values, grads, wanted, ())


def _activated_rms(values: Any, grads: Any, wanted: Any) -> Any:
    return _rms_gradient(values, _before_activation("rms_norm", values, grads, ("weight",)), wanted)


def _activated_layer(values: Any, grads: Any, wanted: Any) -> Any:
    return _layer_gradient(values, _before_activation("layer_norm", values, grads, ("weight", "bias")), wanted)


def _before_activation(op: str, values: Any, grads: Any, parameters: Any) -> Any:
    """The gradient of the norm's output, which is computed again."""
    grad = grads.get("output")
    if grad is None:
        return grads
    options = {name: values[name] for name in ("eps", "weight_offset") if name in values}
    tensors = {"x": values["x"], **{name: values.get(name) for name in parameters}}
    types = {} if grad.dtype == values["x"].dtype else {"output_dtype": grad.dtype}
    normed = call(op, tensors, options, types=types)["output"]
    slope = call("activation_backward", {"grad_output": grad, "x": normed}, {"kind": values["activation"]})
    return {**grads, "output": slope["grad_input"]}


def _gradient(op: str, values: Any, grads: Any, wanted: Any, options: Any) -> Any:
    value = values.get("sum", values.get("x"))
    grad_output = grads.get("output")
    if grad_output is None:
        grad_output = jnp.zeros_like(value)
    tensors = {name: values.get(name) for name in ("weight", "bias", "mean", "rstd") if name in values}
    flags = [f"{name}_grad" for name in ("weight", "bias") if name in wanted]
    if "x" in wanted or "residual" in wanted:
        flags.append("input_grad")
    outputs = call(
        op,
        {"grad_output": grad_output, "value": value, **tensors, "grad_sum": grads.get("sum", grads.get("x"))},
        {name: values[name] for name in options},
        wanted=flags,
    )
    grad_input = outputs.get("grad_input")
    return {
        "x": grad_input,
        "residual": grad_input,
        "weight": outputs.get("grad_weight"),
        "bias": outputs.get("grad_bias"),
    }
