"""Embedding, mean pooling and rotary position embedding with its tables."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._shape_rules import declared
from ._call import Array, attribute, call, parameter_for, same_type
from ._gradients import differentiable
from ._workspace import call_on_host


def embedding(input: Array, weight: Array, padding_idx: int | None = None) -> Array:
    """weight[input]: rows of a table by their index. The weight's gradient is summed in a fixed order.

    Args:
        input: indices of any shape. One outside the table raises on the CPU; on a GPU its row is NaN.
        weight: [rows, columns].
        padding_idx: a row whose gradient is zero; negative counts from the last.
    """
    indices, weight = jnp.asarray(input), jnp.asarray(weight)
    if not jnp.issubdtype(indices.dtype, jnp.integer):
        raise TypeError(f"embedding: input has the type {indices.dtype}; it must be integers")
    if weight.ndim != 2:
        raise ValueError(f"embedding: weight has shape {list(weight.shape)}; it must be [rows, columns]")
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


def rope(
    query: Array,
    key: Array | None,
    cos: Array,
    sin: Array,
    *,
    interleaved: bool = False,
    positions: Array | None = None,
    heads_first: bool = False,
    rotary_dim: int | None = None,
) -> tuple[Array, Array | None]:
    """Queries and keys with the pairs of each head turned by their positions' angles.

    Args:
        query, key: [batch, sequence, heads, head_dim], with or without the batch; with heads_first
            [batch, heads, sequence, head_dim].
        cos, sin: [rows, width] or [batch, sequence, width]; the width is rotary_dim / 2, or rotary_dim with each value
            twice.
        interleaved: pairs are neighbours (GPT-J) and not elements half of rotary_dim apart (Llama).
        positions: rows of cos and sin, [sequence] or [batch, sequence]; None: 0, 1, 2 and so on.
        rotary_dim: how many columns of a head are turned. None: as the table's width says.
    """
    query = jnp.asarray(query)
    angles = {"cos": parameter_for(query, cos), "sin": parameter_for(query, sin)}
    options = {"rotary_dim": rotary_dim or 0, "interleaved": bool(interleaved), "heads_first": bool(heads_first)}
    return _turned(query, key, angles, positions, options)


def rope_from_frequencies(
    query: Array,
    key: Array | None,
    inverse_frequencies: Array,
    *,
    scale: float = 1.0,
    interleaved: bool = False,
    positions: Array | None = None,
    heads_first: bool = False,
) -> tuple[Array, Array | None]:
    """`rope` whose cos and sin are computed in the kernel, times `scale`, from [rotary_dim / 2] inverse frequencies.

    `rope_frequencies` returns them and the scale.
    """
    query = jnp.asarray(query)
    statistic = jnp.float64 if query.dtype == jnp.float64 else jnp.float32
    angles = {"inverse_frequencies": jnp.asarray(inverse_frequencies, statistic)}
    options = {"scale": float(scale), "interleaved": bool(interleaved), "heads_first": bool(heads_first)}
    return _turned(query, key, angles, positions, options)


def norm_rope(
    x: Array,
    weight: Array | None,
    cos: Array,
    sin: Array,
    *,
    eps: float = 1e-6,
    weight_offset: float = 0.0,
    rotary_dim: int | None = None,
    heads_first: bool = False,
) -> Array:
    """RMS norm of each head, then its rotary embedding (`rope`, pairs half of rotary_dim apart).

    Args:
        x: [batch, sequence, heads, head_dim]; with heads_first [batch, heads, sequence, head_dim].
        weight: [head_dim], x's type or fp32; None: ones.
        cos, sin: [rows, width] or [batch or 1, sequence, width]; the width is rotary_dim, or half of that. They have no
            gradient.
        weight_offset: added to the weight; 1.0 for models that store weight - 1.
        rotary_dim: how many columns of a head are turned, the others being normed only. None: all.
    """
    x = jnp.asarray(x)
    tensors = {name: parameter_for(x, one) for name, one in (("weight", weight), ("cos", cos), ("sin", sin))}
    options = {
        "eps": float(eps),
        "weight_offset": float(weight_offset),
        "rotary_dim": rotary_dim or 0,
        "heads_first": bool(heads_first),
    }
    saves = ("x", *tensors)
    return differentiable("norm_rope", {"x": x, **tensors}, options, _norm_rope_gradient, saves=saves)[0]  # type: ignore[no-any-return]


def rope_frequencies(rotary_dim: int, *, dtype: Any = jnp.float32, **options: Any) -> tuple[Array, float]:
    """The inverse frequencies [rotary_dim / 2] of a model, and what its cos and sin are multiplied by.

    Args:
        options: base (10000), scaling ("none", "linear", "ntk", "dynamic", "yarn" or "llama3"), factor,
            original_positions, sequence, beta_fast, beta_slow, attention_factor, low_frequency_factor,
            high_frequency_factor: as kernel_pytorch.functional.rope_frequencies has them.
    """
    inverse, scale = _frequencies(rotary_dim, options)
    return jnp.asarray(inverse, dtype), scale


def rope_tables(
    positions: int | Array, rotary_dim: int, *, dtype: Any = jnp.float32, **frequencies: Any
) -> tuple[Array, Array]:
    """cos and sin [positions, rotary_dim / 2] for `rope`; positions are 0 to n - 1 for a number n.

    Angles are taken in fp64, so positions are known while tracing. The other arguments are `rope_frequencies`'.
    """
    if isinstance(positions, jax.core.Tracer):
        raise TypeError("rope_tables: positions are traced; make tables outside jit, or use rope_from_frequencies")
    places = np.arange(positions) if isinstance(positions, int) else np.asarray(positions)
    inverse, scale = _frequencies(rotary_dim, frequencies)
    angles = places.astype(np.float64)[..., None] * inverse
    return jnp.asarray(np.cos(angles) * scale, dtype), jnp.asarray(np.sin(angles) * scale, dtype)


def _frequencies(rotary_dim: int, options: Any) -> tuple[Any, float]:
    if rotary_dim <= 0 or rotary_dim % 2:
        raise ValueError(f"rope_frequencies: rotary_dim is {rotary_dim}; it must be even and positive")
    table = np.empty(rotary_dim // 2 + 1, np.float64)
    fields = {argument["name"]: argument for argument in declared()["rope_frequencies"]["arguments"]}
    for name in options:
        if name not in fields or name == "output":
            known = ", ".join(one for one in fields if one != "output")
            raise TypeError(f"rope_frequencies: it has no argument {name!r}; it has {known}")
    given = tuple(
        (name, attribute("rope_frequencies", name, fields[name]["kind"], one)) for name, one in options.items()
    )
    call_on_host("rope_frequencies", {"output": table}, given)
    return table[:-1], float(table[-1])


def _turned(query: Array, key: Any, angles: Any, positions: Any, options: Any) -> tuple[Array, Array | None]:
    if key is not None:
        query, key = same_type(query, jnp.asarray(key))
    places = None if positions is None else jnp.asarray(positions)
    tensors = {"query": query, "key": key, **angles, "positions": places}
    results = ("rotated_query",) if key is None else ("rotated_query", "rotated_key")
    saves = (*angles, "positions")
    turned = differentiable("rope", tensors, options, _rope_gradient, results=results, saves=saves)
    return turned[0], None if key is None else turned[1]


def _rope_gradient(values: Any, grads: Any, wanted: Any) -> Any:
    """Turning back; the one op takes the query's gradient first, whichever of the two there is."""
    turned = [name for name in ("query", "key") if name in wanted and f"rotated_{name}" in grads]
    given = [grads[f"rotated_{name}"] for name in turned]
    gradients = {name: jnp.zeros_like(grads[f"rotated_{name}"]) for name in wanted if f"rotated_{name}" in grads}
    if given:
        tensors = {"grad_query": given[0], "grad_key": given[1] if len(given) > 1 else None}
        tensors |= {name: values.get(name) for name in ("cos", "sin", "inverse_frequencies", "positions")}
        names = ("scale", "rotary_dim", "interleaved", "heads_first")
        options = {name: values[name] for name in names if name in values}
        outputs = call("rope_backward", tensors, options)
        gradients |= {name: outputs[one] for name, one in zip(turned, ("rotated_query", "rotated_key"))}
    return gradients


def _norm_rope_gradient(values: Any, grads: Any, wanted: Any) -> Any:
    tensors = {name: values.get(name) for name in ("x", "weight", "cos", "sin")}
    options = {name: values[name] for name in ("eps", "weight_offset", "rotary_dim", "heads_first")}
    flags = [f"{name}_grad" for name in ("x", "weight") if name in wanted]
    outputs = call("norm_rope_backward", {"grad_output": grads["output"], **tensors}, options, wanted=flags)
    return {name.removeprefix("grad_"): one for name, one in outputs.items()}
