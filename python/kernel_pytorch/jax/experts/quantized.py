"""Products of groups of rows with weights in few bits."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from .._call import Array, call, parameter_for
from .._gradients import differentiable
from ..few_bits import QuantizedWeight, dequantize_weight, tensors_of
from .grouped import activated, activation_of, gradient_of_rows


def quantized_grouped_matmul(
    x: Array,
    weight: QuantizedWeight,
    offsets: Array,
    *,
    groups: int | None = None,
    bias: Array | None = None,
    activation: str | None = None,
    gather: Array | None = None,
    limit: float = 7.0,
    slope: float = 1.702,
) -> Array:
    """Row r of x times the matrix of r's group, which is kept in few bits; rows behind the last group are zeros.

    Args:
        x: [rows, k], or with gather [any, k]; fp32, bf16 or fp16. Gradients of x and bias exist.
        weight: what `quantize_weight` made of [groups * n, k]: the groups' matrices behind each other.
        offsets: [groups], where each group ends, or [groups + 1] with a 0 in front.
        groups: how many there are; None: as many as offsets has elements.
        bias: [groups, n].
        activation: as in `grouped_matmul`: an activation, or a gate of the columns.
        gather: [rows]: row r is x[gather[r]].
        limit, slope: of swiglu_clamped.
    """
    x, offsets = jnp.asarray(x), jnp.asarray(offsets)
    if x.ndim != 2 or x.shape[1] != weight.shape[1]:
        raise ValueError(
            f"quantized_grouped_matmul: x has shape {list(x.shape)}, the weight has {list(weight.shape)}; their last "
            "sizes must be equal"
        )
    count = offsets.shape[0] if groups is None else groups
    if count <= 0 or weight.shape[0] % count:
        raise ValueError(
            f"quantized_grouped_matmul: the weight has {weight.shape[0]} rows, and there are {count} groups; each has "
            "as many rows"
        )
    ends = (offsets[1:] if offsets.shape == (count + 1,) else offsets).astype(jnp.int32)
    gather = None if gather is None else jnp.asarray(gather).astype(jnp.int32)
    rows = x.shape[0] if gather is None else gather.shape[0]
    if missing := weight.held_columns - weight.shape[1]:  # the gradient knows a row's bytes alone
        x = jnp.pad(x, [(0, 0), (0, missing)])
    tensors = {
        "x": x, **tensors_of(weight), "offsets": ends, "gather": gather,
        "bias": None if bias is None else parameter_for(x, bias),
    }  # fmt: skip
    if weight.format.startswith("int"):
        tensors["scales"] = tensors["scales"].astype(x.dtype)
    chosen = activation_of("quantized_grouped_matmul", activation, limit, slope)
    options = {"format": weight.format, "group": weight.group, "activation": "identity", "rows": rows}
    saves = [name for name, value in tensors.items() if value is not None]
    v = differentiable("quantized_grouped_matmul", tensors, options, _gradient, saves=saves)[0]
    return activated(v, chosen)


def _gradient(values: Any, grads: Any, wanted: Any) -> Any:
    x, offsets, grad = values["x"], values["offsets"], grads["output"]
    gradients = {}
    if "x" in wanted:
        weight = QuantizedWeight(
            values["codes"], values["scales"], values.get("zeros"), values.get("tensor_scale"), values["format"],
            values["group"],
        )  # fmt: skip
        matrices = dequantize_weight(weight, x.dtype).reshape(offsets.shape[0], -1, x.shape[1])
        gradients["x"] = gradient_of_rows(grad, matrices, offsets, values.get("gather"), x.shape[0])
    if "bias" in wanted:
        tensors = {"x": grad, "offsets": offsets, "gather": None, "factors": None}
        gradients["bias"] = call("group_sums", tensors, {})["output"].astype(values["bias"].dtype)
    return gradients
