"""Native sparse attention, and the keys of DeepSeek's sparse attention."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from .._call import Array, call
from .._gradients import differentiable
from .._plain import formula, widened

_GATES = ("gate_compressed", "gate_selected", "gate_window")
_TENSORS = ("query", "key", "value", "compressed_key", "compressed_value", *_GATES, "block_indices", "cu_seqlens")
_LSE = ("compressed_lse", "selected_lse", "window_lse")
_OPTIONS = (
    *("scale", "form", "block_size", "blocks", "window", "compress_block", "compress_stride"),
    *("first_blocks", "local_blocks"),
)


def native_sparse_attention(
    query: Array,
    key: Array,
    value: Array,
    *,
    gates: Array | Sequence[Array | float | None],
    block_size: int = 64,
    blocks: int = 16,
    window: int = 512,
    form: str = "paper",
    block_indices: Array | None = None,
    compressed_key: Array | None = None,
    compressed_value: Array | None = None,
    compress_block: int | None = None,
    compress_stride: int | None = None,
    first_blocks: int | None = None,
    local_blocks: int | None = None,
    scale: float | None = None,
    cu_seqlens: Array | None = None,
    return_indices: bool = False,
) -> Any:
    """Causal attention to means of blocks of keys, to the few blocks that these means choose, and to a window.

    Args:
        query: [batch, queries, heads, size].
        key, value: [batch, keys, key_heads, size]; key_heads divides heads.
        gates: of the compressed, the selected and the window branch: [batch, queries, heads, 3], or three of [batch,
            queries, heads], a number, or None, which leaves the branch out.
        block_size: keys of a block that can be chosen.
        blocks: how many blocks a query reads, those that it always reads included.
        window: keys of the window, the query's own included.
        form: "paper" (means of 32 keys, 16 apart; the first block and the two latest are always read) or "ejkernel"
            (means of block_size keys; the query's own block is always read). The options below change its numbers.
        block_indices: [batch, queries, key_heads, any]: blocks to read instead of choosing them; what is below 0 or
            behind the query is skipped.
        compressed_key, compressed_value: [batch, compressed, key_heads, size] instead of means.
        compress_block, compress_stride: keys of a mean, and from one mean to the next.
        first_blocks, local_blocks: how many blocks are always read from the first on, and up to the query's own.
        scale: of the scores; None: 1 / sqrt(size).
        cu_seqlens: [sequences + 1]: the batch is 1, and sequence i is tokens cu_seqlens[i] up to cu_seqlens[i + 1].
        return_indices: return (output, blocks), [batch, queries, key_heads, blocks], -1 behind the last.
    """
    query, key, value = jnp.asarray(query), jnp.asarray(key), jnp.asarray(value)
    if query.ndim != 4:
        raise ValueError(
            f"native_sparse_attention: query has shape {list(query.shape)}; it must be [batch, queries, heads, size]"
        )
    indices = None if block_indices is None else jnp.asarray(block_indices).astype(jnp.int32)
    tensors = {
        "query": query,
        "key": key,
        "value": value,
        "compressed_key": None if compressed_key is None else jnp.asarray(compressed_key),
        "compressed_value": None if compressed_value is None else jnp.asarray(compressed_value),
        **dict(zip(_GATES, _branches(gates, query))),
        "block_indices": indices,
        "cu_seqlens": None if cu_seqlens is None else jnp.asarray(cu_seqlens),
    }
    options = {
        "scale": None if scale is None else float(scale),
        "form": form,
        "block_size": block_size,
        "blocks": blocks if return_indices or indices is None else 0,
        "window": window,
        "compress_block": compress_block,
        "compress_stride": compress_stride,
        "first_blocks": first_blocks,
        "local_blocks": local_blocks,
    }
    output, selected = differentiable(
        "native_sparse_attention",
        tensors,
        options,
        _gradient,
        results=("output", "selected"),
        saves=(*_TENSORS, "selected", *_LSE),
    )
    return (output, selected) if return_indices else output


def _branches(gates: Any, query: Array) -> list[Any]:
    if not isinstance(gates, list | tuple):
        gates = jnp.asarray(gates)
        if gates.ndim != 4 or gates.shape[-1] != 3:
            raise ValueError(
                f"native_sparse_attention: gates have shape {list(gates.shape)}; "
                "they must be [batch, queries, heads, 3], or three arrays"
            )
        return [gates[..., i] for i in range(3)]
    if len(gates) != 3:
        raise ValueError(
            f"native_sparse_attention: {len(gates)} gates are given; there are three: "
            "of the compressed, the selected and the window branch (None leaves one out)"
        )
    return [
        jnp.full(query.shape[:3], gate, query.dtype)
        if isinstance(gate, int | float)
        else None
        if gate is None
        else jnp.asarray(gate)
        for gate in gates
    ]


def _gradient(values: Any, grads: Any, wanted: Any) -> Any:
    tensors = {name: values.get(name) for name in (*_TENSORS, *_LSE)}
    if tensors["block_indices"] is None and tensors["gate_selected"] is not None:
        tensors["block_indices"] = values["selected"]
    grad_output = grads.get("output")
    if grad_output is None:
        shape = (*tensors["query"].shape[:3], tensors["value"].shape[-1])
        grad_output = jnp.zeros(shape, tensors["query"].dtype)
    tensors["grad_output"] = grad_output
    options = {name: values.get(name) for name in _OPTIONS}
    of = call("native_sparse_attention_backward", tensors, options)
    return {name: of[f"grad_{name}"] for name in wanted if f"grad_{name}" in of}


def lightning_indexer(
    query: Array,
    key: Array,
    weights: Array,
    *,
    top_k: int = 2048,
    key_scale: Array | None = None,
    key_lengths: Array | None = None,
    block_tables: Array | None = None,
) -> Array:
    """The top_k keys of each query by sum over heads of weights * relu(query key^T), up to its own: int32 [batch,
    queries, top_k] in the order of the keys, -1 behind the last. No gradient.

    Args:
        query: [batch, queries, heads, size]; fp32, bf16, fp16 or e4m3. The last query stands at the last key.
        key: [batch, keys, size], one for all heads; with block_tables [pages, page_size, size].
        weights: [batch, queries, heads].
        top_k: how many keys at most; of equal scores the smaller.
        key_scale: [batch, keys] (or [pages, page_size]), of keys in e4m3.
        key_lengths: [batch], keys of each entry; None: all.
        block_tables: [batch, pages of an entry]: results are slots of the cache (page * page_size + row).
    """
    tensors = {
        "query": jnp.asarray(query),
        "key": jnp.asarray(key),
        "weights": jnp.asarray(weights, jnp.float32),
        "key_scale": None if key_scale is None else jnp.asarray(key_scale, jnp.float32),
        "key_lengths": None if key_lengths is None else jnp.asarray(key_lengths, jnp.int32),
        "block_tables": None if block_tables is None else jnp.asarray(block_tables, jnp.int32),
    }
    tensors = {name: None if x is None else jax.lax.stop_gradient(x) for name, x in tensors.items()}
    return call("lightning_indexer", tensors, {"top_k": top_k})["indices"]  # type: ignore[no-any-return]


@formula("lightning_indexer")
def _plain_lightning_indexer(values: Any) -> dict[str, Array]:
    query, key, scale = values["query"], values["key"], values.get("key_scale")
    tables, lengths, top = values.get("block_tables"), values.get("key_lengths"), values["top_k"]
    if tables is not None:
        slots = (tables[..., None] * key.shape[1] + jnp.arange(key.shape[1])).reshape(tables.shape[0], -1)
        key = key.reshape(-1, key.shape[-1])[slots]
        scale = None if scale is None else scale.reshape(-1)[slots]
    queries, keys = query.shape[1], key.shape[1]
    dots = jnp.einsum("bqhd,bkd->bqhk", query.astype(jnp.float32), key.astype(jnp.float32))
    scores = jnp.einsum("bqhk,bqh->bqk", jax.nn.relu(dots), values["weights"])
    scores = scores if scale is None else scores * scale[:, None]
    lengths = jnp.full((query.shape[0],), keys) if lengths is None else jnp.clip(lengths, 0, keys)
    seen = jnp.arange(keys) <= (jnp.arange(queries)[None] + lengths[:, None] - queries)[..., None]
    scores = jnp.where(seen, jnp.where(jnp.isnan(scores), -jnp.finfo(jnp.float32).max, scores), -jnp.inf)
    _, order = jax.lax.top_k(scores, min(top, keys))
    order = jnp.sort(jnp.where(jnp.take_along_axis(seen, order, -1), order, keys), -1)
    order = jnp.pad(order, ((0, 0), (0, 0), (0, top - order.shape[-1])), constant_values=keys)
    found = order
    if tables is not None:
        found = jnp.take_along_axis(slots[:, None], jnp.clip(order, 0, keys - 1), -1)
    return {"indices": jnp.where(order == keys, -1, found).astype(jnp.int32)}


def _chosen(importance: Array, places: Array, numbers: dict[str, int], columns: int) -> Array:
    """[..., queries, blocks] of compressed probabilities [..., queries, compressed], summed over a group."""
    strides = numbers["block_size"] // numbers["compress_stride"]
    spans = numbers["compress_block"] // numbers["compress_stride"]
    compressed = importance.shape[-1]
    padded = jnp.pad(importance, [(0, 0)] * (importance.ndim - 1) + [(spans - 1, columns * strides)])
    shared: Any = sum(padded[..., spans - 1 - n : spans - 1 - n + columns * strides] for n in range(spans))
    scores = shared.reshape(*importance.shape[:-1], columns, strides).sum(-1) if compressed else None
    scores = jnp.zeros((*importance.shape[:-1], columns), importance.dtype) if scores is None else scores
    block = jnp.arange(columns)
    candidates = (places // numbers["block_size"] + 1)[:, None]  # 0 for places before the first key
    is_local = block >= candidates - numbers["local_blocks"]
    is_first = block < numbers["first_blocks"]
    kind = jnp.where(is_local, 0, jnp.where(is_first, 1, 2))
    kind = jnp.broadcast_to(jnp.where(block < candidates, kind, 3), scores.shape)
    inside = jnp.where(
        kind == 0, -block.astype(scores.dtype), jnp.where(kind == 1, block.astype(scores.dtype), -scores)
    )
    order = jnp.lexsort((jnp.broadcast_to(block, scores.shape), inside, kind), axis=-1)[..., : numbers["blocks"]]
    order = jnp.where(jnp.take_along_axis(kind, order, -1) < 3, order, columns)
    order = jnp.pad(
        jnp.sort(order, -1),
        [(0, 0)] * (order.ndim - 1) + [(0, numbers["blocks"] - order.shape[-1])],
        constant_values=columns,
    )
    return jnp.where(order == columns, -1, order).astype(jnp.int32)


@formula("native_sparse_attention")
def _plain_native_sparse_attention(values: Any) -> dict[str, Array]:
    query, key, value = (widened(values[name]) for name in ("query", "key", "value"))
    (batch, queries, heads, size), (_, keys, key_heads, _) = query.shape, key.shape
    is_paper, block_size = values["form"] == "paper", values["block_size"]
    usual = dict(
        compress_block=32 if is_paper else block_size,
        compress_stride=16 if is_paper else block_size,
        first_blocks=1 if is_paper else 0,
        local_blocks=2 if is_paper else 1,
    )
    numbers = {name: usual[name] if values.get(name) is None else values[name] for name in usual}
    numbers |= {"block_size": block_size, "blocks": values["blocks"]}
    offsets, scale = values.get("cu_seqlens"), values.get("scale")
    if offsets is not None:
        raise NotImplementedError("native_sparse_attention: cu_seqlens has no formula here; pad the sequences")
    group, places = heads // max(key_heads, 1), jnp.arange(queries) + keys - queries
    block, stride = numbers["compress_block"], numbers["compress_stride"]
    count = (keys - block) // stride + 1 if keys >= block else 0
    rows = jnp.arange(count)[:, None] * stride + jnp.arange(block)
    means = [
        x[:, rows].mean(2) if values.get(name) is None else widened(values[name])
        for name, x in (("compressed_key", key), ("compressed_value", value))
    ]

    def attend(k: Array, v: Array, keep: Array) -> tuple[Array, Array]:
        k, v = jnp.repeat(k, group, 2), jnp.repeat(v, group, 2)
        scores = jnp.einsum("bqhd,bkhd->bhqk", query, k) * (size**-0.5 if scale is None else scale)
        weights = jax.nn.softmax(jnp.where(keep, scores, -jnp.finfo(scores.dtype).max), -1) * keep
        return jnp.einsum("bhqk,bkhd->bqhd", weights, v), weights

    compressed, weights = attend(means[0], means[1], jnp.arange(count) * stride + block - 1 <= places[:, None])
    lists = values.get("block_indices")
    selected = jnp.full((batch, queries, key_heads, numbers["blocks"]), -1, jnp.int32)
    if lists is None and values.get("gate_selected") is not None:
        importance = jax.lax.stop_gradient(weights).reshape(batch, key_heads, group, queries, count).sum(2)
        lists = selected = _chosen(importance, places, numbers, -(-keys // block_size)).swapaxes(1, 2)
    seen = jnp.arange(keys) <= places[:, None]
    outputs = [compressed]
    if values.get("gate_selected") is not None:
        of_block = jnp.arange(keys) // block_size
        times = (lists[..., None] == of_block).sum(3)  # a block that is named twice counts twice
        times = jnp.repeat(times.swapaxes(1, 2), group, 1) * seen
        k, v = jnp.repeat(key, group, 2), jnp.repeat(value, group, 2)
        scores = jnp.einsum("bqhd,bkhd->bhqk", query, k) * (size**-0.5 if scale is None else scale)
        most = jnp.max(jnp.where(times > 0, scores, -jnp.finfo(scores.dtype).max), -1, keepdims=True, initial=-1e30)
        powers = jnp.where(times > 0, jnp.exp(jnp.where(times > 0, scores - most, 0)), 0) * times
        total = powers.sum(-1, keepdims=True)
        outputs.append(jnp.einsum("bhqk,bkhd->bqhd", powers / jnp.where(total > 0, total, 1), v))
    else:
        outputs.append(compressed)
    outputs.append(attend(key, value, seen & (jnp.arange(keys) > places[:, None] - values["window"]))[0])
    output = jnp.zeros((*query.shape[:3], value.shape[-1]), query.dtype)
    for name, branch in zip(_GATES, outputs):
        if values.get(name) is not None:
            output += widened(values[name])[..., None] * branch
    return {"output": output.astype(values["query"].dtype), "selected": selected}
