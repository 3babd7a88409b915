"""Products of groups of rows."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from .._call import Array, call, same_type
from .._gradients import differentiable
from ..pointwise import activation as activate
from ..pointwise import gated_activation

_GATES = {"swiglu": "silu", "geglu": "gelu", "geglu_tanh": "gelu_tanh", "reglu": "relu", "glu": "sigmoid"}
_KINDS = ("gelu", "gelu_tanh", "silu", "relu", "relu_squared", "sigmoid", "tanh")
_CLAMPED, _INTERLEAVED = "swiglu_clamped", "_interleaved"


def grouped_matmul(
    x: Array,
    weight: Array,
    offsets: Array,
    *,
    bias: Array | None = None,
    activation: str | None = None,
    gather: Array | None = None,
    transpose_weight: bool = False,
    limit: float = 7.0,
    slope: float = 1.702,
    out_dtype: Any = None,
) -> Array:
    """Row r of x times the matrix of r's group; rows behind the last group are zeros.

    Args:
        x: [rows, k], or with gather [any, k].
        weight: [groups, k, n], or with transpose_weight [groups, n, k]; bias: [groups, n].
        offsets: [groups], where each group ends, or [groups + 1] with a 0 in front. Groups may be empty.
        activation: None, gelu, silu, relu, ...; or a gate: swiglu, geglu, reglu, glu take the first half of the columns
            as gates, swiglu_interleaved and so on take gate, up, gate, up. swiglu_clamped is gpt-oss'.
        gather: [rows]: row r is x[gather[r]].
        limit, slope: of swiglu_clamped.
        out_dtype: float32, where x is narrower.
    """
    x, weight = same_type(jnp.asarray(x), jnp.asarray(weight))
    if weight.ndim != 3:
        raise ValueError(f"grouped_matmul: weight has shape {list(weight.shape)}; it must be [groups, k, n]")
    if x.ndim != 2:
        raise ValueError(f"grouped_matmul: x has shape {list(x.shape)}; it must be [rows, k]")
    matrices = jnp.swapaxes(weight, 1, 2) if transpose_weight else weight
    offsets = jnp.asarray(offsets)
    ends = (offsets[1:] if offsets.shape == (matrices.shape[0] + 1,) else offsets).astype(jnp.int32)
    gather = None if gather is None else jnp.asarray(gather).astype(jnp.int32)
    rows = x.shape[0] if gather is None else gather.shape[0]
    chosen = activation_of("grouped_matmul", activation, limit, slope)
    tensors = {
        "a": x, "b": matrices, "offsets": ends, "gather": gather,
        "bias": None if bias is None else jnp.asarray(bias, x.dtype),
    }  # fmt: skip
    options = {**activation_of("grouped_matmul", None), "rows": rows}
    types = {} if out_dtype is None else {"output_dtype": out_dtype}
    saves = ("a", "b", "offsets", "gather", "bias")
    v = differentiable("grouped_matmul", tensors, options, _grouped_gradient, saves=saves, types=types)[0]
    return activated(v, chosen)


def ragged_dot(
    lhs: Array, rhs: Array, group_sizes: Array, precision: Any = None, preferred_element_type: Any = None,
    group_offset: Array | None = None,
) -> Array:  # fmt: skip
    """jax.lax.ragged_dot by `grouped_matmul`: lhs [m, k], rhs [groups, k, n], group_sizes [groups].

    Sums are fp32, whatever `precision` asks for; group_offset is not supported, as in jax.lax.
    """
    if group_offset is not None:
        raise NotImplementedError("ragged_dot: group_offset is not supported; give the groups that rhs has")
    del precision
    ends = jnp.cumsum(jnp.asarray(group_sizes)).astype(jnp.int32)
    return grouped_matmul(lhs, rhs, ends, out_dtype=preferred_element_type)


def activation_of(op: str, name: str | None, limit: float = 7.0, slope: float = 1.702) -> dict[str, Any]:
    if name is None or name in _KINDS:
        return {"form": "plain", "activation": name or "identity", "limit": 0.0, "slope": float(slope)}
    gate = name.removesuffix(_INTERLEAVED)
    form = "packed_gated" if gate == name else "gated"
    if gate == _CLAMPED:
        if limit <= 0:
            raise ValueError(f"{op}: limit is {limit}; it must be positive")
        return {"form": form, "activation": "silu", "limit": float(limit), "slope": float(slope)}
    if gate not in _GATES:
        known = ", ".join((*_KINDS, *_GATES, _CLAMPED))
        raise ValueError(f'{op}: activation is "{name}"; it is one of {known}, gates also with {_INTERLEAVED}')
    return {"form": form, "activation": _GATES[gate], "limit": 0.0, "slope": float(slope)}


def activated(v: Array, chosen: dict[str, Any]) -> Array:
    """The activation as an op of its own, which has a gradient."""
    kind, limit = chosen["activation"], chosen["limit"]
    if chosen["form"] == "plain":
        return v if kind == "identity" else activate(v, kind)
    gate, up = (v[..., ::2], v[..., 1::2]) if chosen["form"] == "gated" else jnp.split(v, 2, -1)
    if not limit:
        return gated_activation(gate, up, kind)
    gate, up = jnp.minimum(gate, limit), jnp.clip(up, -limit, limit)
    return gate * jax.nn.sigmoid(chosen["slope"] * gate) * (up + 1)


def gradient_of_rows(grad: Array, matrices: Array, offsets: Array, gather: Array | None, source: int) -> Array:
    """The gradient of x [source, k] from that of the products, by matrices [groups, n, k]."""
    tensors = {"a": grad, "b": matrices, "offsets": offsets, "gather": None, "bias": None}
    options = {**activation_of("grouped_matmul", None), "rows": grad.shape[0]}
    of_rows = call("grouped_matmul", tensors, options)["output"]
    if gather is None:
        return of_rows  # type: ignore[no-any-return]
    indices = {"grad_output": of_rows, "indices": jnp.maximum(gather, 0)}  # rows in no group are zeros
    return next(iter(call("embedding_backward", indices, {"rows": source, "padding_index": -1}).values()))  # type: ignore[no-any-return]


def _grouped_gradient(values: Any, grads: Any, wanted: Any) -> Any:
    x, matrices, gather, offsets = values["a"], values["b"], values.get("gather"), values["offsets"]
    grad = grads["output"].astype(x.dtype)
    gradients = {}
    if "a" in wanted:
        gradients["a"] = gradient_of_rows(grad, jnp.swapaxes(matrices, 1, 2), offsets, gather, x.shape[0])
    if "b" in wanted:
        tensors = {"a": x, "b": grad, "offsets": offsets, "gather_a": gather, "gather_b": None}
        gradients["b"] = call("grouped_matmul_weight", tensors, {})["output"]
    if "bias" in wanted:
        tensors = {"x": grad, "offsets": offsets, "gather": None, "factors": None}
        gradients["bias"] = call("group_sums", tensors, {})["output"]
    return gradients
