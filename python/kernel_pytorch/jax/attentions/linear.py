"""Linear attention with gates."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from .._call import Array, call
from .._gradients import differentiable
from .._plain import formula, widened

_LEAST = 1e-6  # a normaliser closer to zero is taken for it


def linear_attention(
    query: Array,
    key: Array,
    value: Array,
    *,
    gate: Array | None = None,
    decay: Array | None = None,
    scale: float | None = None,
    normalize: bool = False,
    initial_state: Array | None = None,
    return_state: bool = False,
    cu_seqlens: Array | None = None,
    mode: str = "auto",
) -> Any:
    """S_t = e^(gate_t + decay) S_(t-1) + key_t value_t^T, output_t = scale * query_t^T S_t, for each head.

    Args:
        query, key: [batch, tokens, heads, columns]; their heads may divide those of the value.
        value: [batch, tokens, heads, values].
        gate: logarithms, [batch, tokens, heads], or [batch, tokens, heads, columns] for a gate of each channel.
        decay: [heads], a logarithm added to every gate.
        scale: of the output; None: 1 / sqrt(columns).
        normalize: divide by query_t^T z_t, z being what S would be for values of 1; a state then has one more value.
        initial_state: [sequences, heads, columns, values], fp32; None: zeros.
        return_state: return (output, final state).
        cu_seqlens: [sequences + 1]: the batch is 1, and sequence i is tokens cu_seqlens[i] up to cu_seqlens[i + 1].
        mode: "chunk", "recurrent" or "auto"; the results are the same up to rounding.
    """
    query, key, value = jnp.asarray(query), jnp.asarray(key), jnp.asarray(value)
    if query.ndim != 4:
        raise ValueError(
            f"linear_attention: query has shape {list(query.shape)}; it must be [batch, tokens, heads, columns]"
        )
    tensors = {"query": query, "key": key, "value": value, "decay": as_wide(decay, query)}
    tensors |= named_gate("linear_attention", gate)
    tensors |= {
        "cu_seqlens": None if cu_seqlens is None else jnp.asarray(cu_seqlens),
        "initial_state": as_wide(initial_state, query),
    }
    options = {"scale": float(query.shape[-1] ** -0.5 if scale is None else scale), "mode": mode}
    if not normalize:
        output, state = _results(tensors, options)
        return (output, state) if return_state else output
    values, start = value.shape[-1], tensors["initial_state"]
    ones = jnp.ones((*value.shape[:-1], 1), value.dtype)
    parts = [
        tensors | {"initial_state": None if start is None else start[..., :values]},
        tensors | {"value": ones, "initial_state": None if start is None else start[..., values:]},
    ]
    (output, state), (sums, sum_state) = (_results(part, options) for part in parts)
    sums = widened(sums)
    output = (widened(output) / jnp.where(jnp.abs(sums) < _LEAST, _LEAST, sums)).astype(query.dtype)
    return (output, jnp.concatenate([state, sum_state], -1)) if return_state else output


def named_gate(op: str, gate: Any) -> dict[str, Any]:
    """A gate under the name that the core has for its rank."""
    if gate is None:
        return {}
    gate = jnp.asarray(gate)
    if gate.ndim not in (3, 4):
        raise ValueError(
            f"{op}: gate has shape {list(gate.shape)}; "
            "it must be [batch, tokens, heads] or [batch, tokens, heads, columns]"
        )
    return {"gate" if gate.ndim == 3 else "channel_gate": gate}


def as_wide(x: Any, like: Array) -> Any:
    """In the type of states."""
    return None if x is None else jnp.asarray(x, jnp.float64 if like.dtype == jnp.float64 else jnp.float32)


_TENSORS = ("query", "key", "value", "gate", "channel_gate", "decay", "cu_seqlens", "initial_state")


def _results(tensors: Any, options: Any) -> tuple[Array, Array]:
    return differentiable(
        "linear_attention",
        {name: tensors.get(name) for name in _TENSORS},
        options,
        _gradient,
        results=("output", "final_state"),
        saves=_TENSORS,
        wanted=("return_state",),
    )


def _gradient(values: Any, grads: Any, wanted: Any) -> Any:
    tensors = {name: values.get(name) for name in _TENSORS}
    grad_output = grads.get("output")  # of a result that is not used there is none
    grad_output = jnp.zeros_like(tensors["value"]) if grad_output is None else grad_output
    tensors |= {"grad_output": grad_output, "grad_final_state": grads.get("final_state")}
    flags = [f"{name}_grad" for name in ("gate", "channel_gate", "decay", "initial_state") if name in wanted]
    options = {"scale": values["scale"], "mode": values["mode"]}
    of = call("linear_attention_backward", tensors, options, wanted=flags)
    made = {name: of[f"grad_{name}"] for name in wanted if f"grad_{name}" in of}
    return sums_of_groups(made, tensors)


def sums_of_groups(gradients: dict[str, Array], tensors: Any) -> dict[str, Array]:
    """Gradients of query and key, summed over the heads of the value that one of theirs serves."""
    for name in ("query", "key"):
        heads = tensors[name].shape[2]
        if name in gradients and gradients[name].shape[2] != heads:
            batch, tokens, all_heads, columns = gradients[name].shape
            gradients[name] = gradients[name].reshape(batch, tokens, heads, all_heads // heads, columns).sum(3)
    return gradients


@formula("linear_attention")
def _plain_linear_attention(values: Any) -> dict[str, Array]:
    query, value, offsets = values["query"], widened(values["value"]), values.get("cu_seqlens")
    (batch, tokens, heads), columns = value.shape[:3], query.shape[-1]
    q, k = (jnp.repeat(widened(x), heads // x.shape[2], 2) for x in (query, values["key"]))
    gates = jnp.zeros((batch, tokens, heads, columns), value.dtype)
    if values.get("gate") is not None:
        gates += widened(values["gate"])[..., None]
    if values.get("channel_gate") is not None:
        gates += widened(values["channel_gate"])
    if values.get("decay") is not None:
        gates += values["decay"][:, None]
    sequences = batch if offsets is None else offsets.shape[0] - 1
    starts = values.get("initial_state")
    if starts is None:
        starts = jnp.zeros((sequences, heads, columns, value.shape[-1]), value.dtype)

    def step(carry: Any, token: Any) -> Any:
        state, ends = carry
        t, q_t, k_t, v_t, gate = token
        if offsets is not None:
            owner = jnp.clip(jnp.searchsorted(offsets, t, side="right") - 1, 0, sequences - 1)
            state = jnp.where(t == offsets[owner], starts[owner][None], state)
        state = state * jnp.exp(gate)[..., None] + k_t[..., None] * v_t[..., None, :]
        output = values["scale"] * jnp.einsum("bhi,bhij->bhj", q_t, state)
        if offsets is None:
            return (state, state), output
        inside = t < offsets[-1]
        ends = jnp.where(inside, ends.at[owner].set(state[0]), ends)
        return (state, ends), jnp.where(inside, output, 0)

    first = starts if offsets is None else jnp.zeros_like(starts[:1])
    by_token = [jnp.moveaxis(x, 1, 0) for x in (q, k, value, gates)]
    (_, ends), outputs = jax.lax.scan(step, (first, starts), (jnp.arange(tokens), *by_token))
    return {"output": jnp.moveaxis(outputs, 0, 1).astype(query.dtype), "final_state": ends}
