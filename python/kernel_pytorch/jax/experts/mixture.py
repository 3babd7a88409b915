"""Routing of tokens to experts, and the experts' MLPs."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .._call import Array, call
from .._gradients import differentiable
from .grouped import activation_of


class Routing(NamedTuple):
    """Where the tokens go: what `route` returns and `moe_mlp` takes. Rows are pairs (token, expert) sorted by expert.

    weights and experts [..., k]; offsets [experts], where an expert's rows end; counts [experts], dropped pairs too;
    token_of_row [tokens * k], -1 behind the last row; row_of_token [..., k], -1 where a pair was dropped; dropped,
    aux_loss and z_loss are scalars.
    """

    weights: Array
    experts: Array
    offsets: Array
    counts: Array
    token_of_row: Array
    row_of_token: Array
    dropped: Array
    aux_loss: Array
    z_loss: Array


def route(
    logits: Array,
    k: int,
    *,
    score: str = "softmax",
    bias: Array | None = None,
    groups: int | None = None,
    group_k: int | None = None,
    group_top: int = 2,
    renormalize: bool = True,
    scale: float = 1.0,
    capacity: int | None = None,
) -> Routing:
    """The k best experts of each token, their weights, and the rows sorted by expert.

    Args:
        logits: [..., experts], up to 1024 experts.
        k: experts of a token, up to 16. Of equal scores the lower index goes first.
        score: "softmax" over all experts, or "sigmoid" of each.
        bias: [experts], added to scores for the choice alone; it has no gradient.
        groups, group_k, group_top: experts are so many groups of neighbours; only a token's group_k best are chosen
            from. A group is as good as its best expert (1) or its best two together (2).
        renormalize: whether the weights of a token sum to `scale`; otherwise they are its scores times `scale`.
        capacity: an expert keeps its first so many tokens; others are dropped, with weight 0. None drops nothing.
    """
    _check_capacity("route", capacity)
    logits = jnp.asarray(logits)
    if logits.ndim == 0:
        raise ValueError("route: logits are a number; they must be [..., experts]")
    rows = logits.reshape(-1, logits.shape[-1])
    wide = jnp.float64 if rows.dtype == jnp.float64 else jnp.float32
    tensors = {"logits": rows, "bias": None if bias is None else jax.lax.stop_gradient(jnp.asarray(bias, wide))}
    options = {
        "k": int(k), "score": score, "groups": groups or 1, "group_k": group_k or groups or 1, "group_top": group_top,
        "renormalize": bool(renormalize), "scale": float(scale), "capacity": capacity or 0,
    }  # fmt: skip
    saves = ("logits", "experts", "counts", "row_of_token")
    outputs = differentiable("moe_route", tensors, options, _route_gradient, results=Routing._fields, saves=saves)
    return _with_leading(Routing(*outputs), (*logits.shape[:-1], k))


def route_chosen(experts: Array, weights: Array, num_experts: int, *, capacity: int | None = None) -> Routing:
    """The Routing of experts [..., k] that were chosen already; those outside [0, num_experts) count nothing."""
    _check_capacity("route_chosen", capacity)
    experts, weights = jnp.asarray(experts), jnp.asarray(weights)
    if experts.shape != weights.shape:
        raise ValueError(
            f"route_chosen: experts have shape {list(experts.shape)}, weights {list(weights.shape)}; they must be equal"
        )
    chosen = experts.reshape(-1, experts.shape[-1]).astype(jnp.int32)
    rows = call("moe_permute", {"experts": chosen}, {"num_experts": int(num_experts), "capacity": capacity or 0})
    wide = weights.reshape(chosen.shape).astype(jnp.float64 if weights.dtype == jnp.float64 else jnp.float32)
    if capacity is not None:
        wide = wide * (rows["row_of_token"] >= 0)
    none = jnp.zeros((), wide.dtype)
    return _with_leading(Routing(weights=wide, experts=chosen, aux_loss=none, z_loss=none, **rows), experts.shape)


def moe_combine(y: Array, routing: Routing, *, weighted: bool = True) -> Array:
    """The sum of each token's rows of y [tokens * k, columns], times the routing's weights unless not wanted."""
    y, rows = jnp.asarray(y), _pairs(routing.row_of_token)
    tensors = {"y": y, "row_of_token": rows, "weights": _pairs(routing.weights) if weighted else None}
    saves = ("y", "row_of_token", "weights")
    output = differentiable("moe_combine", tensors, {}, _combine_gradient, saves=saves)[0]
    return output.reshape(*routing.row_of_token.shape[:-1], y.shape[-1])  # type: ignore[no-any-return]


def moe_mlp(
    x: Array,
    routing: Routing,
    gate_up: Array,
    down: Array,
    *,
    gate_up_bias: Array | None = None,
    down_bias: Array | None = None,
    activation: str | None = "swiglu",
    transposed: bool = False,
    limit: float = 7.0,
    slope: float = 1.702,
) -> Array:
    """For each token the weighted sum of its experts' MLPs.

    Args:
        x: [..., size], the tokens that were routed.
        gate_up: [experts, size, columns]; with a gate columns are gates and ups. gate_up_bias: [experts, columns].
        down: [experts, inner, size]. down_bias: [experts, size].
        activation: as in `grouped_matmul`.
        transposed: whether gate_up is [experts, columns, size] and down [experts, size, inner].
        limit, slope: of swiglu_clamped.
    """
    x = jnp.asarray(x)
    if x.ndim == 0:
        raise ValueError("moe_mlp: x is a number; it must be [..., size]")
    tensors = {
        "x": x.reshape(-1, x.shape[-1]), "gate_up": gate_up, "down": down, "gate_up_bias": gate_up_bias,
        "down_bias": down_bias, "weights": _pairs(routing.weights), "chosen": _pairs(routing.experts),
        "offsets": routing.offsets, "token_of_row": routing.token_of_row, "row_of_token": _pairs(routing.row_of_token),
    }  # fmt: skip
    for name in ("gate_up", "down", "gate_up_bias", "down_bias"):
        if tensors[name] is not None:
            tensors[name] = jnp.asarray(tensors[name], x.dtype)
    options = {**activation_of("moe_mlp", activation, limit, slope), "transposed": bool(transposed)}
    saves = (*tensors, "preactivation")
    return differentiable("moe_mlp", tensors, options, _mlp_gradient, saves=saves)[0].reshape(x.shape)  # type: ignore[no-any-return]


def _check_capacity(op: str, capacity: int | None) -> None:
    if capacity is not None and capacity < 1:
        raise ValueError(f"{op}: capacity is {capacity}; it must be positive, or None to drop nothing")


def _pairs(one: Array) -> Array:
    return jnp.asarray(one).reshape(-1, one.shape[-1])


def _with_leading(routing: Routing, shape: tuple[int, ...]) -> Routing:
    pairs = {name: getattr(routing, name).reshape(shape) for name in ("weights", "experts", "row_of_token")}
    return routing._replace(**pairs)


def _route_gradient(values: Any, grads: Any, wanted: Any) -> Any:
    tensors = {f"grad_{name}": grads.get(name) for name in ("weights", "aux_loss", "z_loss")}
    tensors |= {name: values[name] for name in ("logits", "experts", "counts", "row_of_token")}
    options = {name: values[name] for name in ("k", "score", "renormalize", "scale")}
    return {"logits": call("moe_route_backward", tensors, options)["grad_logits"]}


def _combine_gradient(values: Any, grads: Any, wanted: Any) -> Any:
    tensors = {"grad_output": grads["output"], **{name: values.get(name) for name in ("y", "row_of_token", "weights")}}
    flags = {"y_grad": "y" in wanted, "weights_grad": "weights" in wanted}
    asked = tuple(name for name, is_set in flags.items() if is_set)
    outputs = call("moe_combine_backward", tensors, {}, wanted=asked)
    return {name: outputs[f"grad_{name}"] for name in wanted}


def _mlp_gradient(values: Any, grads: Any, wanted: Any) -> Any:
    tensors = {"grad_output": grads["output"]}
    names = ("x", "gate_up", "down", "gate_up_bias", "down_bias", "weights", "chosen", "offsets", "token_of_row",
             "row_of_token", "preactivation")  # fmt: skip
    tensors |= {name: values.get(name) for name in names}
    options = {name: values[name] for name in ("form", "activation", "limit", "slope", "transposed")}
    asked = tuple("input_grad" if name == "x" else f"{name}_grad" for name in wanted)
    outputs = call("moe_mlp_backward", tensors, options, wanted=asked)
    return {name: outputs[f"grad_{name}"] for name in wanted}
