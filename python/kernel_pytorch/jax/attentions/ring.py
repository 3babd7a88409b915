"""Attention in parts: merging what parts of the keys gave, and one sequence over the devices of a mesh's axis."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from .._call import Array, call


def merge_attention(
    o1: Array, lse1: Array, o2: Array, lse2: Array, *, return_lse: bool = True, layout: str = "bshd"
) -> Any:
    """Attention to all keys from attention to two parts of them.

    Args:
        o1, o2: as `attention(..., return_lse=True)` returns them, in the layout, with lse [batch, heads, queries]: it
            has gradients. Or as `paged_attention` does, [tokens, heads, size] with lse [heads, tokens]: without.
        return_lse: also the merged lse.
    """
    if layout not in ("bshd", "bhsd"):
        raise ValueError(f'merge_attention: layout is "{layout}"; it is "bshd" or "bhsd"')
    if o1.ndim == 3:
        tensors = {"output1": o1, "lse1": lse1, "output2": o2, "lse2": lse2}
        made = call("merge_attention", tensors, wanted=("return_lse",) if return_lse else ())
        return (made["output"], made["lse"]) if return_lse else made["output"]
    total = jnp.logaddexp(lse1, lse2)

    def weighed(part: Array, of: Array) -> Array:
        # A row without any key has -inf in both: its weights are 0.
        weight = jnp.exp(jnp.where(of == -jnp.inf, -jnp.inf, of - total))[..., None]
        return part.astype(weight.dtype) * (jnp.swapaxes(weight, 1, 2) if layout == "bshd" else weight)

    output = (weighed(o1, lse1) + weighed(o2, lse2)).astype(o1.dtype)
    return (output, total) if return_lse else output


def ring_attention(
    query: Array,
    key: Array,
    value: Array,
    *,
    axis_name: str,
    causal: bool = False,
    scale: float | None = None,
    softcap: float | None = None,
    layout: str = "bshd",
) -> Array:
    """Attention of one sequence that lies in equal parts on the devices of a mesh's axis, inside jax.shard_map.

    Keys and values go round the ring, one hop per step, while each device attends to what it has. Backward goes round
    again, with the gradients of keys and values travelling along: no device holds more than two parts.

    Args:
        query, key, value: this device's part, in the axis's order; as for `attention`.
        axis_name: the axis of the mesh.
    """
    if layout not in ("bshd", "bhsd"):
        raise ValueError(f'ring_attention: layout is "{layout}"; it is "bshd" or "bhsd"')
    sequence = 1 if layout == "bshd" else 2
    if query.shape[sequence] != key.shape[sequence]:
        raise ValueError(
            f"ring_attention: a part has {query.shape[sequence]} queries and {key.shape[sequence]} keys; they must be "
            "as many"
        )
    options = (
        ("heads_first", layout == "bhsd"),
        ("scale", None if scale is None else float(scale)),
        ("softcap", float(softcap or 0.0)),
    )
    return _ring(axis_name, causal, options)(query, key, value)  # type: ignore[no-any-return]


@functools.lru_cache(maxsize=256)
def _ring(axis: str, causal: bool, options: Any) -> Any:
    layout = "bhsd" if dict(options)["heads_first"] else "bshd"

    def shifted(*arrays: Array) -> list[Array]:
        size = jax.lax.axis_size(axis)
        onward = [(i, (i + 1) % size) for i in range(size)]
        return [jax.lax.ppermute(array, axis, onward) for array in arrays]

    def is_seen(step: int) -> Any:
        """Whether the part that came `step` hops lies before this device's own."""
        return True if not causal or step == 0 else jax.lax.axis_index(axis) >= step

    def part(query: Array, key: Array, value: Array, step: int) -> tuple[Array, Array]:
        tensors = {"query": query, "key": key, "value": value}
        static = {**dict(options), "causal": causal and step == 0}
        made = call("attention_forward", tensors, static, wanted=("return_lse",))
        return made["output"], made["lse"]

    def whole(query: Array, key: Array, value: Array) -> tuple[Array, Array]:
        output, lse = part(query, key, value, 0)
        for step in range(1, jax.lax.axis_size(axis)):
            key, value = shifted(key, value)
            both = merge_attention(output, lse, *part(query, key, value, step), layout=layout)
            seen = is_seen(step)
            output, lse = (jnp.where(seen, new, old) for new, old in zip(both, (output, lse)))
        return output, lse

    @jax.custom_vjp
    def run(query: Array, key: Array, value: Array) -> Array:
        return whole(query, key, value)[0]

    def forward(query: Array, key: Array, value: Array) -> tuple[Array, Any]:
        output, lse = whole(query, key, value)
        return output, (query, key, value, output, lse)

    def backward(saved: Any, grad: Array) -> Any:
        query, key, value, output, lse = saved
        of_query = jnp.zeros_like(query, jnp.float32)
        of_key, of_value = jnp.zeros_like(key, jnp.float32), jnp.zeros_like(value, jnp.float32)
        size = jax.lax.axis_size(axis)
        for step in range(size):
            tensors = {"query": query, "key": key, "value": value, "output": output, "lse": lse, "grad_output": grad}
            made = call("attention_backward", tensors, {**dict(options), "causal": causal and step == 0})
            seen = is_seen(step)
            parts = (jnp.where(seen, made[f"grad_{name}"], 0) for name in ("query", "key", "value"))
            of_query, of_key, of_value = (sum_ + one for sum_, one in zip((of_query, of_key, of_value), parts))
            if size > 1:  # after the last step the gradients are at home
                key, value, of_key, of_value = shifted(key, value, of_key, of_value)
        return of_query.astype(query.dtype), of_key.astype(key.dtype), of_value.astype(value.dtype)

    run.defvjp(forward, backward)
    return run
