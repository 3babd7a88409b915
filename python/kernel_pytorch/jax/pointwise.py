"""Activations, gates, softmax and dropout."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from ._call import Array, call, parameter_for, same_type, seed_words
from ._gradients import differentiable


def activation(
    x: Array,
    kind: str,
    *,
    bias: Array | None = None,
    residual: Array | None = None,
    dropout_p: float = 0.0,
    seed: Any = None,
) -> Array:
    """dropout(function(x + bias)) + residual, in one pass over memory.

    Args:
        x: [..., columns].
        kind: gelu, gelu_tanh, silu, relu, relu_squared, sigmoid, tanh or identity.
        bias: [columns]; residual: x's shape.
        dropout_p: probability of dropping an element, in steps of 1/65536.
        seed: a key of jax.random, where dropout_p is not 0.
    """
    x = jnp.asarray(x)
    if x.ndim == 0:
        residual = residual if residual is None else jnp.asarray(residual)[None]
        return activation(x[None], kind, bias=bias, residual=residual, dropout_p=dropout_p, seed=seed)[0]
    if residual is not None:
        x, residual = same_type(x, jnp.asarray(residual))
    drawn = seed_words("activation", seed) if dropout_p else None
    tensors = {"x": x, "bias": parameter_for(x, bias), "residual": residual, "seed": drawn}
    options = {"kind": kind, "dropout_p": float(dropout_p)}
    return differentiable("activation", tensors, options, _activation_gradient, saves=("x", "bias", "seed"))[0]  # type: ignore[no-any-return]


def gelu(x: Array, approximate: str = "none") -> Array:
    """x times the probability of a normal variable below x; approximate="tanh" for the formula with tanh."""
    return activation(x, _gelu("gelu", approximate))


def silu(x: Array) -> Array:
    """x * sigmoid(x)."""
    return activation(x, "silu")


def relu(x: Array) -> Array:
    """max(x, 0)."""
    return activation(x, "relu")


def relu_squared(x: Array) -> Array:
    """max(x, 0) squared."""
    return activation(x, "relu_squared")


def gated_activation(
    gate: Array,
    up: Array,
    kind: str,
    *,
    gate_bias: Array | None = None,
    up_bias: Array | None = None,
    residual: Array | None = None,
    dropout_p: float = 0.0,
    seed: Any = None,
) -> Array:
    """dropout(function(gate + gate_bias) * (up + up_bias)) + residual, in one pass over memory.

    Args:
        gate, up: [..., columns] of one shape.
        kind: silu (SwiGLU), gelu or gelu_tanh (GEGLU), relu (ReGLU), sigmoid (GLU) or identity (their product).
        gate_bias, up_bias: [columns].
        residual, dropout_p, seed: as for `activation`.
    """
    gate, up = same_type(jnp.asarray(gate), jnp.asarray(up))
    gate_bias, up_bias = parameter_for(gate, gate_bias), parameter_for(gate, up_bias)
    if gate_bias is not None and up_bias is not None:
        gate_bias, up_bias = same_type(gate_bias, up_bias)
    tensors = {
        "gate": gate,
        "up": up,
        "gate_bias": gate_bias,
        "up_bias": up_bias,
        "residual": None if residual is None else jnp.asarray(residual, gate.dtype),
        "seed": seed_words("gated_activation", seed) if dropout_p else None,
    }
    options = {"kind": kind, "dropout_p": float(dropout_p)}
    saves = ("gate", "up", "gate_bias", "up_bias", "seed")
    return differentiable("gated_activation", tensors, options, _gated_gradient, saves=saves)[0]  # type: ignore[no-any-return]


def gated_activation_packed(
    x: Array,
    kind: str,
    *,
    bias: Array | None = None,
    residual: Array | None = None,
    dropout_p: float = 0.0,
    seed: Any = None,
) -> Array:
    """`gated_activation` of x [..., 2 n]: the gate in the first n columns, up in the others."""
    x = jnp.asarray(x)
    tensors = {
        "x": x,
        "bias": parameter_for(x, bias),
        "residual": None if residual is None else jnp.asarray(residual, x.dtype),
        "seed": seed_words("gated_activation_packed", seed) if dropout_p else None,
    }
    options = {"kind": kind, "dropout_p": float(dropout_p)}
    return differentiable("gated_activation_packed", tensors, options, _packed_gradient, saves=("x", "bias", "seed"))[0]  # type: ignore[no-any-return]


def swiglu(gate: Array, up: Array) -> Array:
    """silu(gate) * up."""
    return gated_activation(gate, up, "silu")


def geglu(gate: Array, up: Array, approximate: str = "none") -> Array:
    """gelu(gate) * up."""
    return gated_activation(gate, up, _gelu("geglu", approximate))


def reglu(gate: Array, up: Array) -> Array:
    """relu(gate) * up."""
    return gated_activation(gate, up, "relu")


def swiglu_packed(x: Array) -> Array:
    """silu(gate) * up of [gate, up] in the last dimension."""
    return gated_activation_packed(x, "silu")


def geglu_packed(x: Array, approximate: str = "none") -> Array:
    """gelu(gate) * up of [gate, up] in the last dimension; approximate: "none" or "tanh"."""
    return gated_activation_packed(x, _gelu("geglu_packed", approximate))


def reglu_packed(x: Array) -> Array:
    """relu(gate) * up of [gate, up] in the last dimension."""
    return gated_activation_packed(x, "relu")


def softmax(x: Array, *, scale: float = 1.0, mask: Array | None = None, causal: bool = False) -> Array:
    """softmax(scale * x + mask) over the last dimension, in one pass over memory.

    Args:
        x: [..., queries, keys] or any other shape.
        mask: broadcastable to x. Boolean: True keeps a score. Otherwise it is added, and may have a gradient.
        causal: query i sees keys j <= i + keys - queries.

    Returns:
        x's shape and type. A row whose scores are all removed is zero, and has no gradient.
    """
    return _softmax(x, scale, mask, causal, log=False)


def log_softmax(x: Array, *, scale: float = 1.0, mask: Array | None = None, causal: bool = False) -> Array:
    """The logarithm of `softmax`; removed scores give -inf."""
    return _softmax(x, scale, mask, causal, log=True)


def dropout(x: Array, p: float = 0.5, training: bool = True, *, seed: Any = None) -> Array:
    """x with each element zeroed with probability p and the others divided by 1 - p; x itself where not training."""
    x = jnp.asarray(x)
    if not training or p == 0.0:
        return x
    if x.ndim == 0:
        return dropout(x[None], p, seed=seed)[0]
    tensors = {"x": x, "seed": seed_words("dropout", seed)}
    return differentiable("dropout", tensors, {"p": float(p)}, _dropout_gradient, saves=("seed",))[0]  # type: ignore[no-any-return]


def _softmax(x: Array, scale: float, mask: Array | None, causal: bool, log: bool) -> Array:
    x = jnp.asarray(x)
    if mask is not None:
        mask = jnp.asarray(mask)
        if mask.dtype != jnp.bool_:
            mask = parameter_for(x, mask)
        try:
            mask = jnp.broadcast_to(mask, x.shape)
        except ValueError:
            raise ValueError(
                f"softmax: mask has shape {list(mask.shape)}, x has {list(x.shape)}; it must broadcast to that"
            ) from None
    options = {"scale": float(scale), "causal": bool(causal), "log": log}
    return differentiable("softmax", {"x": x, "mask": mask}, options, _softmax_gradient, saves=("output", "mask"))[0]  # type: ignore[no-any-return]


def _gelu(name: str, approximate: str) -> str:
    if approximate not in ("none", "tanh"):
        raise ValueError(f'{name}: approximate is {approximate!r}; it must be "none" or "tanh"')
    return "gelu" if approximate == "none" else "gelu_tanh"


def _activation_gradient(values: Any, grads: Any, wanted: Any) -> Any:
    return _one_input_gradient("activation_backward", values, grads, wanted)


def _packed_gradient(values: Any, grads: Any, wanted: Any) -> Any:
    return _one_input_gradient("gated_activation_packed_backward", values, grads, wanted)


def _one_input_gradient(op: str, values: Any, grads: Any, wanted: Any) -> Any:
    grad = grads["output"]
    if "x" not in wanted and "bias" not in wanted:
        return {"residual": grad}
    tensors = {name: values.get(name) for name in ("x", "bias", "seed")}
    options = {"kind": values["kind"], "dropout_p": values["dropout_p"]}
    flags = ["bias_grad"] if "bias" in wanted else []
    outputs = call(op, {"grad_output": grad, **tensors}, options, wanted=flags)
    return {"x": outputs["grad_input"], "bias": outputs.get("grad_bias"), "residual": grad}


def _gated_gradient(values: Any, grads: Any, wanted: Any) -> Any:
    grad = grads["output"]
    if set(wanted) <= {"residual"}:
        return {"residual": grad}
    tensors = {name: values.get(name) for name in ("gate", "up", "gate_bias", "up_bias", "seed")}
    options = {"kind": values["kind"], "dropout_p": values["dropout_p"]}
    flags = [f"{name}_grad" for name in ("gate_bias", "up_bias") if name in wanted]
    outputs = call("gated_activation_backward", {"grad_output": grad, **tensors}, options, wanted=flags)
    return {name.removeprefix("grad_"): value for name, value in outputs.items()} | {"residual": grad}


def _softmax_gradient(values: Any, grads: Any, wanted: Any) -> Any:
    mask, scale = values.get("mask"), values["scale"]
    options = {"log": values["log"], "masked": bool(values["causal"] or mask is not None)}
    tensors = {"grad_output": grads["output"], "output": values["output"]}
    if "mask" not in wanted:
        return {"x": call("softmax_backward", tensors, {**options, "scale": scale})["grad_input"]}
    of_scores = call("softmax_backward", tensors, {**options, "scale": 1.0})["grad_input"]
    return {"x": of_scores * scale, "mask": of_scores}


def _dropout_gradient(values: Any, grads: Any, wanted: Any) -> Any:
    outputs = call("dropout_backward", {"grad_output": grads["output"], "seed": values["seed"]}, {"p": values["p"]})
    return {"x": next(iter(outputs.values()))}
