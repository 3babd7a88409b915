"""The delta rule with gates."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from .._call import Array, call
from .._gradients import differentiable
from .._plain import formula, widened
from .linear import as_wide, named_gate, sums_of_groups

_EPSILON = 1e-6  # under the root of normalize_qk


def delta_rule(
    query: Array,
    key: Array,
    value: Array,
    beta: Array,
    *,
    gate: Array | None = None,
    scale: float | None = None,
    normalize_qk: bool = False,
    initial_state: Array | None = None,
    return_state: bool = False,
    cu_seqlens: Array | None = None,
    mode: str = "auto",
) -> Any:
    """S' = e^gate_t S_(t-1), S_t = S' + key_t (beta_t (value_t - S'^T key_t))^T, output_t = scale * S_t^T query_t.

    Args:
        query, key: [batch, tokens, heads, columns]; their heads may divide those of the value.
        value: [batch, tokens, heads, values].
        beta: [batch, tokens, heads].
        gate: logarithms, [batch, tokens, heads], or [batch, tokens, heads, columns] for a gate of each channel.
        scale: of the output; None: 1 / sqrt(columns).
        normalize_qk: first divide each row of query and key by sqrt(its sum of squares + 1e-6).
        initial_state: [sequences, heads, columns, values], fp32; None: zeros.
        return_state: return (output, final state).
        cu_seqlens: [sequences + 1]: the batch is 1, and sequence i is tokens cu_seqlens[i] up to cu_seqlens[i + 1].
        mode: "chunk", "recurrent" or "auto"; the results are the same up to rounding.
    """
    query, key, value = jnp.asarray(query), jnp.asarray(key), jnp.asarray(value)
    if query.ndim != 4:
        raise ValueError(f"delta_rule: query has shape {list(query.shape)}; it must be [batch, tokens, heads, columns]")
    tensors: dict[str, Any] = {"query": query, "key": key, "value": value, "beta": jnp.asarray(beta)}
    tensors |= named_gate("delta_rule", gate)
    tensors |= {
        "cu_seqlens": None if cu_seqlens is None else jnp.asarray(cu_seqlens),
        "initial_state": as_wide(initial_state, query),
    }
    output, state = differentiable(
        "delta_rule",
        {name: tensors.get(name) for name in _TENSORS},
        {
            "scale": float(query.shape[-1] ** -0.5 if scale is None else scale),
            "normalize_qk": normalize_qk,
            "mode": mode,
        },
        _gradient,
        results=("output", "final_state"),
        saves=_TENSORS,
        wanted=("return_state",),
    )
    return (output, state) if return_state else output


_TENSORS = ("query", "key", "value", "beta", "gate", "channel_gate", "cu_seqlens", "initial_state")


def _gradient(values: Any, grads: Any, wanted: Any) -> Any:
    tensors = {name: values.get(name) for name in _TENSORS}
    grad_output = grads.get("output")  # of a result that is not used there is none
    grad_output = jnp.zeros_like(tensors["value"]) if grad_output is None else grad_output
    given = tensors | {"grad_output": grad_output, "grad_final_state": grads.get("final_state")}
    flags = [f"{name}_grad" for name in ("gate", "channel_gate", "initial_state") if name in wanted]
    options = {"scale": values["scale"], "normalize_qk": values["normalize_qk"]}
    of = call("delta_rule_backward", given, options, wanted=flags)
    return sums_of_groups({name: of[f"grad_{name}"] for name in wanted if f"grad_{name}" in of}, tensors)


@formula("delta_rule")
def _plain_delta_rule(values: Any) -> dict[str, Array]:
    query, value, offsets = values["query"], widened(values["value"]), values.get("cu_seqlens")
    (batch, tokens, heads), columns = value.shape[:3], query.shape[-1]
    q, k = (jnp.repeat(widened(x), heads // x.shape[2], 2) for x in (query, values["key"]))
    if values["normalize_qk"]:
        q, k = (x * jax.lax.rsqrt(jnp.sum(x * x, -1, keepdims=True) + _EPSILON) for x in (q, k))
    gates = jnp.zeros((batch, tokens, heads, columns), value.dtype)
    if values.get("gate") is not None:
        gates += widened(values["gate"])[..., None]
    if values.get("channel_gate") is not None:
        gates += widened(values["channel_gate"])
    sequences = batch if offsets is None else offsets.shape[0] - 1
    starts = values.get("initial_state")
    if starts is None:
        starts = jnp.zeros((sequences, heads, columns, value.shape[-1]), value.dtype)

    def step(carry: Any, token: Any) -> Any:
        state, ends = carry
        t, q_t, k_t, v_t, beta, gate = token
        if offsets is not None:
            owner = jnp.clip(jnp.searchsorted(offsets, t, side="right") - 1, 0, sequences - 1)
            state = jnp.where(t == offsets[owner], starts[owner][None], state)
        state = state * jnp.exp(gate)[..., None]
        change = beta[..., None] * (v_t - jnp.einsum("bhi,bhij->bhj", k_t, state))
        state = state + k_t[..., None] * change[..., None, :]
        output = values["scale"] * jnp.einsum("bhi,bhij->bhj", q_t, state)
        if offsets is None:
            return (state, state), output
        inside = t < offsets[-1]
        ends = jnp.where(inside, ends.at[owner].set(state[0]), ends)
        return (state, ends), jnp.where(inside, output, 0)

    first = starts if offsets is None else jnp.zeros_like(starts[:1])
    by_token = [jnp.moveaxis(x, 1, 0) for x in (q, k, value, widened(values["beta"]), gates)]
    (_, ends), outputs = jax.lax.scan(step, (first, starts), (jnp.arange(tokens), *by_token))
    return {"output": jnp.moveaxis(outputs, 0, 1).astype(query.dtype), "final_state": ends}
