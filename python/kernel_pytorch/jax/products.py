"""Linear layers and MLPs: GEMMs whose epilogues hold bias, activation, gate and residual."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from ._call import Array, call
from ._gradients import differentiable


def linear(
    x: Array,
    weight: Array,
    bias: Array | None = None,
    *,
    activation: str | None = None,
    gated: bool = False,
    residual: Array | None = None,
) -> Array:
    """activation(x @ weight.T + bias) + residual.

    Args:
        x: [..., in]; weight: [out, in]; bias: [out]; residual: [..., out].
        activation: gelu, gelu_tanh, silu, relu, relu_squared, sigmoid, tanh, or None.
        gated: rows of the weight come in pairs (gate, up), see `interleave_gate_up`: activation(gate) * up.
    """
    x = jnp.asarray(x)
    tensors = {"x": x, "weight": weight, "bias": bias, "residual": residual}
    tensors = {name: None if value is None else jnp.asarray(value, x.dtype) for name, value in tensors.items()}
    options = {"activation": activation or "identity", "gated": bool(gated)}
    saves = ("x", "weight", "bias", "preactivation")
    return differentiable("linear", tensors, options, _linear_gradient, saves=saves)[0]  # type: ignore[no-any-return]


def mlp(
    x: Array,
    weight_in: Array,
    weight_out: Array,
    bias_in: Array | None = None,
    bias_out: Array | None = None,
    *,
    activation: str | None = "gelu",
    gated: bool = False,
    residual: Array | None = None,
) -> Array:
    """linear(linear(x, weight_in, bias_in, activation, gated), weight_out, bias_out) + residual."""
    x = jnp.asarray(x)
    tensors = {
        "x": x,
        "weight_in": weight_in,
        "bias_in": bias_in,
        "weight_out": weight_out,
        "bias_out": bias_out,
        "residual": residual,
    }
    tensors = {name: None if value is None else jnp.asarray(value, x.dtype) for name, value in tensors.items()}
    options = {"activation": activation or "identity", "gated": bool(gated)}
    saves = ("x", "weight_in", "bias_in", "weight_out", "bias_out", "hidden", "preactivation")
    return differentiable("mlp", tensors, options, _mlp_gradient, saves=saves)[0]  # type: ignore[no-any-return]


def interleave_gate_up(gate: Array, up: Array) -> Array:
    """Rows (gate, up, gate, up, ...) of two weights or biases, as gated layers take them."""
    gate, up = jnp.asarray(gate), jnp.asarray(up)
    return jnp.stack([gate, up], axis=1).reshape(2 * gate.shape[0], *gate.shape[1:])


def _linear_gradient(values: Any, grads: Any, wanted: Any) -> Any:
    return _gradient(
        "linear_backward", ("weight", "bias"), ("x", "weight", "bias", "preactivation"), values, grads, wanted
    )


def _mlp_gradient(values: Any, grads: Any, wanted: Any) -> Any:
    parameters = ("weight_in", "bias_in", "weight_out", "bias_out")
    return _gradient("mlp_backward", parameters, ("x", *parameters, "hidden", "preactivation"), values, grads, wanted)


def _gradient(op: str, parameters: Any, saved: Any, values: Any, grads: Any, wanted: Any) -> Any:
    grad = grads["output"]
    flags = [f"{name}_grad" for name in parameters if name in wanted] + ["input_grad"] * ("x" in wanted)
    gradients = {"residual": grad}
    if flags:
        tensors = {"grad_output": grad, **{name: values.get(name) for name in saved}}
        options = {"activation": values["activation"], "gated": values["gated"]}
        outputs = call(op, tensors, options, wanted=flags)
        gradients |= {name.removeprefix("grad_"): value for name, value in outputs.items()}
    return gradients
