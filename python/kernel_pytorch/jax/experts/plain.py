"""The experts' ops in plain jnp, for platforms without kernels (see _plain.py)."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from .._plain import Array, Values, activated, formula, widened

_LEAST_SUM = 1e-20  # of scores that weights are divided by, as in ops/moe_routing


@formula("moe_permute")
def _permute(values: Values) -> dict[str, Array]:
    experts, number, capacity = values["experts"], values["num_experts"], values["capacity"]
    flat = experts.reshape(-1)
    is_inside = (flat >= 0) & (flat < number)
    of_expert = jax.nn.one_hot(jnp.where(is_inside, flat, -1), number, dtype=jnp.int32)
    place = ((jnp.cumsum(of_expert, 0) - of_expert) * of_expert).sum(1)  # among the pairs of its expert
    counts = of_expert.sum(0)
    is_kept = is_inside & (place < capacity) if capacity else is_inside
    kept = jnp.minimum(counts, capacity) if capacity else counts
    ends = jnp.cumsum(kept)
    rows = jnp.where(is_kept, (ends - kept)[jnp.clip(flat, 0, number - 1)] + place, -1)
    tokens = jnp.arange(flat.size, dtype=jnp.int32) // experts.shape[1]
    token_of_row = jnp.full(flat.shape, -1, jnp.int32).at[jnp.where(is_kept, rows, flat.size)].set(tokens, mode="drop")
    return {
        "offsets": ends.astype(jnp.int32),
        "counts": counts,
        "token_of_row": token_of_row,
        "row_of_token": rows.reshape(experts.shape).astype(jnp.int32),
        "dropped": (is_inside & ~is_kept).sum().astype(jnp.int32),
    }


@formula("moe_route")
def _route(values: Values) -> dict[str, Array]:
    logits, bias, k = widened(values["logits"]), values.get("bias"), values["k"]
    tokens, number = logits.shape
    is_softmax = values["score"] == "softmax"
    scores = jax.nn.softmax(logits) if is_softmax else jax.nn.sigmoid(logits)
    shares = scores if is_softmax else scores / scores.sum(-1, keepdims=True)
    quality = jax.lax.stop_gradient(scores if bias is None else scores + bias)
    keys = jax.lax.stop_gradient(logits) if bias is None else quality
    if values["groups"] > 1:
        in_groups = quality.reshape(tokens, values["groups"], -1)
        best = jax.lax.top_k(in_groups, min(values["group_top"], in_groups.shape[-1]))[0].sum(-1)
        chosen_groups = jax.lax.top_k(best, values["group_k"])[1]
        is_open = jax.nn.one_hot(chosen_groups, values["groups"]).sum(1) > 0
        keys = jnp.where(jnp.repeat(is_open, number // values["groups"], 1), keys, -jnp.inf)
    experts = jax.lax.top_k(keys, k)[1].astype(jnp.int32)
    rows = _permute({"experts": experts, "num_experts": number, "capacity": values["capacity"]})
    weights = jnp.take_along_axis(scores, experts, 1) * values["scale"]
    if values["renormalize"]:
        weights = weights / (jnp.take_along_axis(scores, experts, 1).sum(-1, keepdims=True) + _LEAST_SUM)
    share_of = rows["counts"] / max(tokens * k, 1)
    return {
        "weights": jnp.where(rows["row_of_token"] >= 0, weights, 0),
        "experts": experts,
        "aux_loss": number * (share_of * shares.sum(0)).sum() / max(tokens, 1),
        "z_loss": (jax.nn.logsumexp(logits, -1) ** 2).sum() / max(tokens, 1),
        **rows,
    }


def _grouped(x: Array, matrices: Array, ends: Array, bias: Array | None) -> Array:
    """Rows times the matrix of their group, in fp32; 0 behind the last group."""
    group = (jnp.arange(x.shape[0])[:, None] >= ends).sum(1)
    v = jax.lax.ragged_dot(
        widened(x), widened(matrices), jnp.diff(ends, prepend=0), precision=jax.lax.Precision.HIGHEST
    )
    if bias is not None:
        v = v + widened(bias)[jnp.minimum(group, matrices.shape[0] - 1)]
    return jnp.where((group < matrices.shape[0])[:, None], v, 0)


@formula("grouped_matmul")
def _grouped_matmul(values: Values) -> dict[str, Array]:
    x, gather = values["a"], values.get("gather")
    rows = x if gather is None else x[jnp.maximum(gather, 0)]
    v = _grouped(rows, values["b"], values["offsets"], values.get("bias"))
    return {"output": v.astype(values.get("output_dtype") or x.dtype)}


@formula("moe_mlp")
def _mlp(values: Values) -> dict[str, Array]:
    x, token, ends = values["x"], values["token_of_row"], values["offsets"]
    matrices = [values["gate_up"], values["down"]]
    if values["transposed"]:
        matrices = [jnp.swapaxes(one, 1, 2) for one in matrices]
    v = _grouped(x[jnp.maximum(token, 0)], matrices[0], ends, values.get("gate_up_bias")).astype(x.dtype)
    hidden = _activated(widened(v), values).astype(x.dtype)
    y = _grouped(hidden, matrices[1], ends, values.get("down_bias"))
    return {"output": _combined(y.astype(x.dtype), values["row_of_token"], values["weights"])}


def _activated(v: Array, values: Values) -> Array:
    if values["form"] == "plain":
        return activated(values["activation"], v)
    gate, up = (v[..., ::2], v[..., 1::2]) if values["form"] == "gated" else jnp.split(v, 2, -1)
    if limit := values["limit"]:
        gate, up = jnp.minimum(gate, limit), jnp.clip(up, -limit, limit)
        return gate * jax.nn.sigmoid(values["slope"] * gate) * (up + 1)
    return activated(values["activation"], gate) * up


@formula("moe_combine")
def _combine(values: Values) -> dict[str, Array]:
    return {"output": _combined(values["y"], values["row_of_token"], values.get("weights"))}


def _combined(y: Array, rows: Array, weights: Array | None) -> Array:
    factors = (rows >= 0).astype(jnp.float32) if weights is None else jnp.where(rows >= 0, widened(weights), 0)
    return (widened(y)[jnp.maximum(rows, 0)] * factors[..., None]).sum(1).astype(y.dtype)
