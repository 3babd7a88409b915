"""Mamba-2's state space model, a spelling of linear attention with a gate for each token and head."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from .._call import Array
from .._plain import widened
from .linear import linear_attention


def ssd(
    x: Array,
    dt: Array,
    A: Array,
    B: Array,
    C: Array,
    *,
    D: Array | None = None,
    dt_bias: Array | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    initial_state: Array | None = None,
    return_state: bool = False,
    cu_seqlens: Array | None = None,
    mode: str = "auto",
) -> Any:
    """h_t = e^(dt_t A) h_(t-1) + dt_t x_t B_t^T, output_t = h_t C_t + D x_t, for each head.

    Args:
        x: [batch, tokens, heads, size].
        dt: [batch, tokens, heads]: the step of each token.
        A: [heads], negative.
        B, C: [batch, tokens, groups, states]; groups divide the heads.
        D: [heads] or [heads, size]: how much of x is added to the output.
        dt_bias: [heads], added to dt.
        dt_softplus: take softplus of dt (and its bias).
        dt_limit: between which dt is clamped then.
        initial_state: [sequences, heads, size, states]; None: zeros.
        return_state: return (output, final state).
        cu_seqlens: [sequences + 1]: the batch is 1, and sequence i is tokens cu_seqlens[i] up to cu_seqlens[i + 1].
        mode: "chunk", "recurrent" or "auto"; the results are the same up to rounding.
    """
    x, dt = jnp.asarray(x), widened(jnp.asarray(dt))
    if dt_bias is not None:
        dt = dt + dt_bias
    if dt_softplus:
        dt = jax.nn.softplus(dt)
    dt = jnp.clip(dt, *dt_limit)
    output, state = linear_attention(
        jnp.asarray(C).astype(dt.dtype),
        jnp.asarray(B).astype(dt.dtype),
        x * dt[..., None],
        gate=dt * jnp.asarray(A).astype(dt.dtype),
        scale=1.0,
        initial_state=None if initial_state is None else jnp.swapaxes(jnp.asarray(initial_state), 2, 3),
        return_state=True,
        cu_seqlens=cu_seqlens,
        mode=mode,
    )
    if D is not None:
        D = jnp.asarray(D)
        output = output + x * (D if D.ndim == 2 else D[:, None])
    output = output.astype(x.dtype)
    return (output, jnp.swapaxes(state, 2, 3)) if return_state else output
