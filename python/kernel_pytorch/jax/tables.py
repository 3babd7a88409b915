"""Embedding and mean pooling."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from ._call import Array, call
from ._gradients import differentiable


def embedding(input: Array, weight: Array, padding_idx: int | None = None) -> Array:
    """weight[input]: rows of a table by their index. The weight's gradient is summed in a fixed order.

    Args:
        input: indices of any shape. One outside the table raises on the CPU; on a GPU its row is NaN.
        weight: [rows, columns].
        padding_idx: a row whose gradient is zero; negative counts from the last.
    """
    indices, weight = jnp.asarray(input), jnp.asarray(weight)
    rows = weight.shape[0]
    if padding_idx is not None and not -rows <= padding_idx < rows:
        raise ValueError(f"embedding: padding_idx is {padding_idx}, the table has {rows} rows; it must be one")
    options = {"rows": rows, "padding_index": -1 if padding_idx is None else padding_idx % rows}
    if indices.dtype not in (jnp.int32, jnp.int64):
        indices = indices.astype(jnp.int32)
    tensors = {"indices": indices, "weight": weight}
    return differentiable("embedding", tensors, options, _embedding_gradient, saves=("indices",))[0]  # type: ignore[no-any-return]


def mean_pool(x: Array, cu_seqlens: Array | None = None) -> Array:
    """The mean of whole sequences.

    Args:
        x: [batch, tokens, ..., columns], or with cu_seqlens packed as [tokens, ..., columns].
        cu_seqlens: [sequences + 1]: sequence i is tokens cu_seqlens[i] up to cu_seqlens[i + 1].
    """
    x = jnp.asarray(x)
    axis = 1 if cu_seqlens is None else 0
    tokens = x.shape[axis] if x.ndim > axis else 0
    tensors = {"x": x, "offsets": None if cu_seqlens is None else jnp.asarray(cu_seqlens)}
    return differentiable("mean_pool", tensors, {"tokens": tokens}, _pool_gradient, saves=("offsets",))[0]  # type: ignore[no-any-return]


def chunk_mean_pool(x: Array, chunk_size: int) -> Array:
    """The means of chunks of chunk_size tokens of x [batch, tokens, ..., columns]; the last by its own length."""
    x = jnp.asarray(x)
    options = {"chunk_size": int(chunk_size), "tokens": x.shape[1] if x.ndim > 1 else 0}
    return differentiable("chunk_mean_pool", {"x": x}, options, _chunk_gradient)[0]  # type: ignore[no-any-return]


def _first(outputs: Any) -> Any:
    return next(iter(outputs.values()))


def _embedding_gradient(values: Any, grads: Any, wanted: Any) -> Any:
    options = {"rows": values["rows"], "padding_index": values["padding_index"]}
    tensors = {"grad_output": grads["output"], "indices": values["indices"]}
    return {"weight": _first(call("embedding_backward", tensors, options))}


def _pool_gradient(values: Any, grads: Any, wanted: Any) -> Any:
    tensors = {"grad_output": grads["output"], "offsets": values.get("offsets")}
    return {"x": _first(call("mean_pool_backward", tensors, {"tokens": values["tokens"]}))}


def _chunk_gradient(values: Any, grads: Any, wanted: Any) -> Any:
    options = {"chunk_size": values["chunk_size"], "tokens": values["tokens"]}
    return {"x": _first(call("chunk_mean_pool_backward", {"grad_output": grads["output"]}, options))}
