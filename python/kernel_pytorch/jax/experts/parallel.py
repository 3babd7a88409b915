"""Experts on several devices of a mesh, inside jax.shard_map."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from .._call import Array
from .mixture import Routing, moe_mlp, route_chosen


def expert_parallel_mlp(
    x: Array, routing: Routing, gate_up: Array, down: Array, *, axis_name: Any, **options: Any
) -> Array:
    """`moe_mlp` where each device of a mesh's axis has some of the experts and its own tokens.

    Device i has experts i * local to (i + 1) * local - 1. Shapes are static, so tokens do not travel to their experts
    alone: every device gathers all tokens, computes its own experts' rows of them, and receives the sum of its tokens
    over the devices. Nothing is dropped. Memory between the products is for all tokens' rows; work is for those that
    chose a device's experts.

    Args:
        x: [..., size], this device's tokens.
        routing: of them, among all experts of the axis.
        gate_up, down: of this device's experts, as in `moe_mlp`.
        axis_name: the axis of the mesh.
        options: gate_up_bias, down_bias, activation, transposed, limit and slope of `moe_mlp`.
    """
    devices, local, experts = jax.lax.axis_size(axis_name), gate_up.shape[0], routing.offsets.shape[0]
    if experts != devices * local:
        raise ValueError(
            f"expert_parallel_mlp: {devices} devices with {local} experts each have {devices * local}, the routing is "
            f"among {experts}; route among all experts of the axis"
        )

    def gathered(one: Array) -> Array:
        return jax.lax.all_gather(one.reshape(-1, one.shape[-1]), axis_name, tiled=True)  # type: ignore[no-any-return]

    kept = jnp.where(routing.row_of_token >= 0, routing.experts, -1)
    chosen = gathered(kept)
    here = jnp.where(chosen < 0, -1, chosen - jax.lax.axis_index(axis_name) * local)
    there = route_chosen(here, gathered(routing.weights), local)
    sums = moe_mlp(gathered(x), there, gate_up, down, **options)
    return jax.lax.psum_scatter(sums, axis_name, scatter_dimension=0, tiled=True).reshape(x.shape)  # type: ignore[no-any-return]
