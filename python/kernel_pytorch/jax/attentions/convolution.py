"""The causal depthwise convolution in front of linear attention."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from .._call import Array, call
from .._gradients import differentiable
from .._plain import formula, widened

_TENSORS = ("x", "weight", "bias", "cu_seqlens", "initial_state")


def causal_conv1d(
    x: Array,
    weight: Array,
    bias: Array | None = None,
    *,
    activation: str | None = None,
    initial_state: Array | None = None,
    return_state: bool = False,
    cu_seqlens: Array | None = None,
) -> Any:
    """output[t] = activation(bias + sum of weight[:, i] * x[t - width + 1 + i] over i < width), for each channel.

    Args:
        x: [batch, tokens, channels].
        weight: [channels, width], the width 2, 3 or 4.
        bias: [channels].
        activation: "silu", or None.
        initial_state: [sequences, width - 1, channels]: the inputs in front of each sequence; None: zeros.
        return_state: return (output, final state).
        cu_seqlens: [sequences + 1]: the batch is 1, and sequence i is tokens cu_seqlens[i] up to cu_seqlens[i + 1].
    """
    x = jnp.asarray(x)
    given = {"x": x, "weight": weight, "bias": bias, "cu_seqlens": cu_seqlens, "initial_state": initial_state}
    output, state = differentiable(
        "causal_conv1d",
        {name: None if tensor is None else jnp.asarray(tensor) for name, tensor in given.items()},
        {"activation": activation or "none"},
        _gradient,
        results=("output", "final_state"),
        saves=_TENSORS,
        wanted=("return_state",),
    )
    return (output, state) if return_state else output


def _gradient(values: Any, grads: Any, wanted: Any) -> Any:
    tensors = {name: values.get(name) for name in _TENSORS}
    grad_output = grads.get("output")  # of a result that is not used there is none
    grad_output = jnp.zeros_like(tensors["x"]) if grad_output is None else grad_output
    tensors |= {"grad_output": grad_output, "grad_final_state": grads.get("final_state")}
    flags = [f"{name}_grad" for name in ("bias", "initial_state") if name in wanted]
    of = call("causal_conv1d_backward", tensors, {"activation": values["activation"]}, wanted=flags)
    return {name: of[f"grad_{name}"] for name in wanted if f"grad_{name}" in of}


@formula("causal_conv1d")
def _plain_causal_conv1d(values: Any) -> dict[str, Array]:
    x, weight, offsets = widened(values["x"]), widened(values["weight"]), values.get("cu_seqlens")
    (batch, tokens, channels), width = x.shape, weight.shape[1]
    starts = values.get("initial_state")
    sequences = batch if offsets is None else offsets.shape[0] - 1
    starts = jnp.zeros((sequences, width - 1, channels), x.dtype) if starts is None else widened(starts)
    # Where the input i tokens in front of a token lies: in x, or in the state of its sequence.
    places = jnp.arange(tokens)
    if offsets is None:
        owners, begins, ends = None, jnp.zeros((tokens,), jnp.int32), jnp.full((1,), tokens)
    else:
        owners = jnp.clip(jnp.searchsorted(offsets, places, side="right") - 1, 0, sequences - 1)
        begins, ends = offsets[owners], offsets[1:]
    total = jnp.zeros_like(x)
    for i in range(width):
        back = width - 1 - i
        earlier = jnp.roll(x, back, 1)
        rows = jnp.clip(places - back - begins + width - 1, 0, width - 2)
        kept = starts[:, rows] if owners is None else starts[owners, rows][None]
        total += weight[:, i] * jnp.where((places - back >= begins)[None, :, None], earlier, kept)
    if values.get("bias") is not None:
        total += widened(values["bias"])
    if values["activation"] == "silu":
        total = jax.nn.silu(total)
    if offsets is not None:
        total = jnp.where((places < offsets[-1])[None, :, None], total, 0)
    rows = ends[:, None] - (width - 1) + jnp.arange(width - 1)  # of the last inputs
    first = jnp.zeros((1,), jnp.int32) if offsets is None else offsets[:-1]
    in_state = jnp.clip(rows - first[:, None] + width - 1, 0, width - 2)
    if offsets is None:
        old = starts[:, in_state[0]]
        new = x[:, jnp.clip(rows[0], 0, max(tokens - 1, 0))] if tokens else old
    else:
        old = jnp.take_along_axis(starts, in_state[..., None], 1)
        new = x[0][jnp.clip(rows, 0, max(tokens - 1, 0))] if tokens else old
    final = jnp.where((rows >= first[:, None])[..., None], new, old)
    dtype = values["x"].dtype
    return {"output": total.astype(dtype), "final_state": final.astype(dtype)}
