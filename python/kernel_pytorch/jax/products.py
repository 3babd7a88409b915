"""Linear layers and MLPs: GEMMs whose epilogues hold bias, activation, gate and residual."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from . import _plain
from ._call import Array, call, same_type
from ._forward_mode import guarded
from ._gradients import differentiable
from .pointwise import gated_activation

_GATED = {"swiglu": "silu", "geglu": "gelu", "geglu_tanh": "gelu_tanh", "reglu": "relu", "glu": "sigmoid"}
_PRECISIONS = ("full", "tf32", "bf16", "bf16x3")


def matmul(a: Array, b: Array, *, precision: str = "full") -> Array:
    """a @ b, summed in fp32 and rounded once. With a bias, an activation, a gate or a residual: `linear`.

    Args:
        a: [..., m, k], or a vector [k]; of two types the wider is taken.
        b: [..., k, n], or a vector [k]; leading sizes broadcast.
        precision: of fp32 products: "full" is right to fp32's rounding, "bf16" rounds both to bf16 first, "bf16x3" adds
            three products of bf16 halves (errors near fp32's), "tf32" is a GPU's. Gradients are taken alike.
    """
    _check_precision("matmul", precision)
    a, b = same_type(jnp.asarray(a), jnp.asarray(b))
    if a.ndim == 0 or b.ndim == 0:
        raise ValueError(f"matmul: a has {a.ndim} dimensions, b has {b.ndim}; both need at least one")
    if b.ndim == 1:
        return matmul(a, b[:, None], precision=precision)[..., 0]
    if a.ndim == 1:
        return matmul(a[None], b, precision=precision)[..., 0, :]
    if b.ndim == 2:  # one product of all rows
        rows = a.reshape(-1, a.shape[-1])
        return _matmul(rows, b, precision).reshape(*a.shape[:-1], b.shape[-1])
    try:
        leading = jnp.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    except ValueError:
        raise ValueError(
            f"matmul: a has shape {list(a.shape)}, b has {list(b.shape)}; the sizes before the last two must broadcast"
        ) from None
    a, b = jnp.broadcast_to(a, (*leading, *a.shape[-2:])), jnp.broadcast_to(b, (*leading, *b.shape[-2:]))
    return _matmul(a, b, precision)


def _matmul(a: Array, b: Array, precision: str) -> Array:
    options = {"precision": precision}
    return differentiable("matmul", {"a": a, "b": b}, options, _matmul_gradient, saves=("a", "b"))[0]  # type: ignore[no-any-return]


def linear(
    x: Array,
    weight: Array,
    bias: Array | None = None,
    *,
    activation: str | None = None,
    residual: Array | None = None,
    weight_up: Array | None = None,
    precision: str = "full",
) -> Array:
    """activation(x @ weight.T + bias) + residual.

    Args:
        x: [..., in]; weight: [out, in]; bias: [out]; residual: [..., out].
        activation: gelu, gelu_tanh, silu, relu, relu_squared, sigmoid, tanh, or None; or a gated one, swiglu, geglu,
            geglu_tanh, reglu or glu: then the weight's rows are interleaved (gate, up, gate, up, ...; see
            `interleave_gate_up`), and function(gate) * up is taken of each pair.
        weight_up: of the weight's shape. The activated values are multiplied by x @ weight_up.T: a gated layer of two
            matrices. With a gradient it is two products and their own backward.
        precision: of fp32 products and those of their gradients, as `matmul`'s.
    """
    x = jnp.asarray(x)
    if weight_up is not None:
        return _of_two_matrices(x, weight, bias, activation, residual, weight_up, precision)
    tensors = {"x": x, "weight": weight, "bias": bias, "residual": residual}
    tensors = {name: None if value is None else jnp.asarray(value, x.dtype) for name, value in tensors.items()}
    options = _layer("linear", activation, precision)
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
    residual: Array | None = None,
    precision: str = "full",
) -> Array:
    """linear(linear(x, weight_in, bias_in, activation=activation), weight_out, bias_out, residual=residual), with
    `precision` both times."""
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
    options = _layer("mlp", activation, precision)
    saves = ("x", "weight_in", "bias_in", "weight_out", "bias_out", "hidden", "preactivation")
    return differentiable("mlp", tensors, options, _mlp_gradient, saves=saves)[0]  # type: ignore[no-any-return]


def interleave_gate_up(gate: Array, up: Array) -> Array:
    """Rows (gate, up, gate, up, ...) of two weights or biases, as gated layers take them."""
    gate, up = jnp.asarray(gate), jnp.asarray(up)
    if gate.ndim == 0 or gate.shape != up.shape:
        raise ValueError(
            f"interleave_gate_up: gate has shape {list(gate.shape)}, up has {list(up.shape)}; give two matrices (or "
            "biases) of one shape"
        )
    return jnp.stack([gate, up], axis=1).reshape(2 * gate.shape[0], *gate.shape[1:])


def _layer(op: str, activation: str | None, precision: str) -> dict[str, Any]:
    _check_precision(op, precision)
    if activation is not None and not isinstance(activation, str):
        raise TypeError(f"{op}: activation is {activation!r}; it must be the name of one, or None")
    kind = _GATED.get(activation or "", activation or "identity")
    return {"activation": kind, "gated": activation in _GATED, "precision": precision}


def _check_precision(op: str, precision: str) -> None:
    if precision not in _PRECISIONS:
        raise ValueError(f'{op}: precision is "{precision}"; it is one of {", ".join(_PRECISIONS)}')


def _of_two_matrices(
    x: Array, weight: Any, bias: Any, activation: str | None, residual: Any, weight_up: Any, precision: str
) -> Array:
    kind = _layer("linear", activation, precision)["activation"]
    given = {"x": x, "weight": weight, "weight_up": weight_up, "bias": bias, "residual": residual}
    arrays = {name: jnp.asarray(one, x.dtype) for name, one in given.items() if one is not None}

    def composed(arrays: Any) -> Any:
        gate = linear(arrays["x"], arrays["weight"], arrays.get("bias"), precision=precision)
        up = linear(arrays["x"], arrays["weight_up"], precision=precision)
        return gated_activation(gate, up, kind, residual=arrays.get("residual"))

    @jax.custom_vjp
    def run(arrays: Any) -> Any:
        if _plain.is_needed():
            return composed(arrays)
        return call("linear", arrays, {"activation": kind, "gated": False, "precision": precision})["output"]

    run.defvjp(lambda arrays: jax.vjp(composed, arrays), lambda pullback, grad: pullback(grad))
    made: Array = run({name: guarded("linear", one) for name, one in arrays.items()})
    return made


def _matmul_gradient(values: Any, grads: Any, wanted: Any) -> Any:
    """Products again, so that they have gradients of their own. Full ones of matrices read what is there as it lies."""
    a, b, grad, precision = values["a"], values["b"], grads["output"], values["precision"]
    gradients = {}
    if "a" in wanted:
        is_plain = b.ndim == 2 and precision == "full"
        gradients["a"] = linear(grad, b) if is_plain else _matmul(grad, jnp.swapaxes(b, -1, -2), precision)
    if "b" in wanted:
        gradients["b"] = _matmul(jnp.swapaxes(a, -1, -2), grad, precision)
    return gradients


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
        options = {name: values[name] for name in ("activation", "gated", "precision")}
        outputs = call(op, tensors, options, wanted=flags)
        gradients |= {name.removeprefix("grad_"): value for name, value in outputs.items()}
    return gradients
