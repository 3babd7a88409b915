"""native_sparse_attention, token by token, and lightning_indexer."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor

from .case import Case
from .draw import Draw
from .run import generates


def _attend(query: Tensor, key: Tensor, value: Tensor, scale: float, group: int) -> Tensor:
    """query [heads, size], key and value [rows, key_heads, size]."""
    if key.shape[0] == 0:
        return query.new_zeros(query.shape[0], value.shape[-1])
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    weights = (torch.einsum("hd,khd->hk", query, key) * scale).softmax(-1)
    return torch.einsum("hk,khd->hd", weights, value)


def _sparse(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    gates: Any,
    block_size: int,
    window: int,
    block_indices: Tensor,
    compress_block: int,
    compress_stride: int,
    scale: float | None = None,
    cu_seqlens: Tensor | None = None,
    **_: Any,
) -> Tensor:
    group, scale = query.shape[2] // key.shape[2], query.shape[-1] ** -0.5 if scale is None else scale
    gates = gates.unbind(-1) if isinstance(gates, Tensor) else gates
    outputs = []
    for b in range(query.shape[0]):
        ends = [0, key.shape[1]] if cu_seqlens is None else cu_seqlens.tolist()
        rows = []
        for begin, end in itertools.pairwise(ends):
            k, v = key[b, begin:end], value[b, begin:end]
            offset = key.shape[1] - query.shape[1] if cu_seqlens is None else 0
            for i in range(query.shape[1] if cu_seqlens is None else end - begin):
                place, token = i + offset, i + begin
                total = query.new_zeros(query.shape[2], value.shape[-1])
                if place < 0:
                    rows.append(total)
                    continue
                starts = range(0, place + 2 - compress_block, compress_stride)
                means = [
                    torch.stack([x[c : c + compress_block].mean(0) for c in starts]) if len(starts) else x[:0]
                    for x in (k, v)
                ]
                near = slice(max(0, place - window + 1), place + 1)
                lists = block_indices[b, token].tolist()
                by_head = []
                for h, one in enumerate(lists):
                    places = [
                        p for j in one if j >= 0 for p in range(j * block_size, min((j + 1) * block_size, place + 1))
                    ]
                    heads = query[b, token, h * group : (h + 1) * group]
                    by_head.append(_attend(heads, k[places, h : h + 1], v[places, h : h + 1], scale, group))
                branches = (
                    _attend(query[b, token], *means, scale, group),
                    torch.cat(by_head) if by_head else total,
                    _attend(query[b, token], k[near], v[near], scale, group),
                )
                for gate, branch in zip(gates, branches):
                    if gate is not None:
                        total = total + gate[b, token][:, None] * branch
                rows.append(total)
        rows += [query.new_zeros(query.shape[2], value.shape[-1])] * (query.shape[1] - len(rows))
        outputs.append(torch.stack(rows) if rows else query.new_zeros(0, query.shape[2], value.shape[-1]))
    return torch.stack(outputs)


@generates("native_sparse_attention")
def native_sparse_attention(d: Draw, name: str) -> Case:
    dtype = d.dtype()
    batch, key_heads, group = d.between(1, 2), d.between(1, 2), d.choice((1, 2, 3))
    keys, size, values = d.choice((1, 2, 9, 33, 50)), d.between(1, 20), d.between(1, 20)
    queries = d.choice((keys, keys, 0, 1, 5, 12))
    is_packed = d.maybe(0.3)
    if is_packed:
        batch, queries = 1, keys
    shapes = (queries, key_heads * group, size), (keys, key_heads, size), (keys, key_heads, values)
    stride = d.between(1, 4)
    gates = [d.tensor((batch, queries, key_heads * group), dtype) if d.maybe(0.8) else None for _ in range(3)]
    case = Case(
        tuple(d.tensor((batch, *shape), dtype) for shape in shapes),
        {
            "gates": d.normal((batch, queries, key_heads * group, 3), dtype) if d.maybe(0.3) else tuple(gates),
            "block_size": d.between(1, 9),
            "window": d.between(1, 12),
            "compress_stride": stride,
            "compress_block": stride * d.between(1, 3),
            "block_indices": torch.tensor(
                [d.between(-2, 12) for _ in range(batch * queries * key_heads * 3)], dtype=torch.int64
            ).reshape(batch, queries, key_heads, 3),
        },
        _sparse,
        terms=3 * max(keys, size),
        roundings=4,
        least_top=1.0,
    )
    if is_packed:
        ends = sorted(d.between(0, keys) for _ in range(d.between(1, 3)))
        case.options["cu_seqlens"] = torch.tensor([0, *ends], dtype=d.choice((torch.int32, torch.int64)))
    if d.maybe(0.3):
        case.options["scale"] = d.number(0.1, 1)
    if d.maybe(0.05):
        case.options["window"] = 0
        case.refused = "a window of no keys"
    return case


def _indices(query: Tensor, key: Tensor, weights: Tensor, *, top_k: int, key_scale: Tensor | None = None) -> Tensor:
    scores = (torch.einsum("bqhd,bkd->bqhk", query, key).relu() * weights[..., None]).sum(2)
    scores = scores if key_scale is None else scores * key_scale[:, None]
    queries, keys = scores.shape[1:]
    found = torch.full((*scores.shape[:2], top_k), -1, dtype=torch.int32)
    for b in range(scores.shape[0]):
        for q in range(queries):
            seen = scores[b, q, : max(0, q + 1 + keys - queries)]
            chosen = seen.sort(descending=True, stable=True).indices[:top_k].sort().values
            found[b, q, : len(chosen)] = chosen.int()
    return found


@generates("lightning_indexer")
def lightning_indexer(d: Draw, name: str) -> Case:
    """Of small whole numbers, whose sums are exact: every tie is one."""
    dtype = d.dtype(double=False)
    batch, queries, keys, heads = d.between(1, 2), d.choice((0, 1, 7, 20)), d.choice((0, 1, 9, 70)), d.between(1, 5)
    size = d.between(1, 40)

    def whole(*shape: int) -> Tensor:
        return d.laid_out(d.normal(shape, torch.float64, 2.0).round().to(dtype))

    options: dict[str, Any] = {"top_k": d.choice((0, 1, 5, 64, 100))}
    if d.maybe(0.3):
        options["key_scale"] = d.normal((batch, keys), torch.float64, 2.0).round().float()
    args = whole(batch, queries, heads, size), whole(batch, keys, size), whole(batch, queries, heads)
    return Case(args, options, _indices, gradients=False)
