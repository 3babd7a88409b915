"""Rotary embeddings and tables of rows, by torch operations."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .numbers import rows_at, wide
from .rows import rms_norm_backward, rms_norm_forward

MaybeTensor = Tensor | None


def _angles(
    x: Tensor, cos: MaybeTensor, sin: MaybeTensor, frequencies: MaybeTensor, positions: MaybeTensor, scale: float,
    rotary_dim: int, interleaved: bool, heads_first: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """cos and sin of each pair, [batch or 1, sequence, 1, pairs], of a query [batch, sequence, heads, size]."""
    sequence = x.shape[-2] if heads_first else x.shape[-3]
    place = torch.arange(sequence, device=x.device) if positions is None else positions
    place = place if place.dim() > 1 else place.unsqueeze(0)
    if cos is None or sin is None:
        assert frequencies is not None
        angle = place.unsqueeze(-1) * wide(frequencies)
        return angle.cos().unsqueeze(2) * scale, angle.sin().unsqueeze(2) * scale
    pairs = _rotary_dim(cos, rotary_dim, x.shape[-1]) // 2
    tables = []
    for table in (cos, sin):
        each = wide(table)
        if table.shape[-1] == 2 * pairs:  # each value stands twice
            each = each[..., ::2] if interleaved else each[..., :pairs]
        rows = rows_at(each, place) if table.dim() == 2 else each
        tables.append(rows.unsqueeze(2))
    return tables[0], tables[1]


def _rotary_dim(cos: Tensor, rotary_dim: int, size: int) -> int:
    width = cos.shape[-1]
    return rotary_dim or (2 * width if 2 * width <= size else width)


def _turned(x: MaybeTensor, cos: Tensor, sin: Tensor, interleaved: bool, heads_first: bool) -> MaybeTensor:
    if x is None:
        return None
    value, pairs = wide(x), cos.shape[-1]
    if heads_first:
        value = value.transpose(-3, -2)
    batched = value if value.dim() == 4 else value.unsqueeze(0)
    turning, rest = batched[..., : 2 * pairs], batched[..., 2 * pairs :]
    first, second = (
        (turning[..., ::2], turning[..., 1::2]) if interleaved else (turning[..., :pairs], turning[..., pairs:])
    )
    cos, sin = cos.to(value.dtype), sin.to(value.dtype)
    one, two = first * cos - second * sin, second * cos + first * sin
    turned = torch.stack([one, two], -1).flatten(-2) if interleaved else torch.cat([one, two], -1)
    out = torch.cat([turned, rest], -1).reshape(value.shape)
    return out.transpose(-3, -2) if heads_first else out


def _rope(
    inverse: bool, query: Tensor, key: MaybeTensor, cos: MaybeTensor, sin: MaybeTensor, frequencies: MaybeTensor,
    positions: MaybeTensor, scale: float, rotary_dim: int, interleaved: bool, heads_first: bool,
) -> tuple[MaybeTensor, MaybeTensor]:  # fmt: skip
    c, s = _angles(query, cos, sin, frequencies, positions, scale, rotary_dim, interleaved, heads_first)
    s = -s if inverse else s
    return _turned(query, c, s, interleaved, heads_first), _turned(key, c, s, interleaved, heads_first)


def rope_forward(*args: Any) -> tuple[MaybeTensor, MaybeTensor]:
    return _rope(False, *args)


def rope_backward(*args: Any) -> tuple[MaybeTensor, MaybeTensor]:
    return _rope(True, *args)


def rope_in_place(query: Tensor, key: MaybeTensor, *options: Any) -> None:
    *options_of_rope, inverse = options
    for x, turned in zip((query, key), _rope(inverse, query, key, *options_of_rope)):
        if x is not None and turned is not None:
            x.copy_(turned)


def _norm_angles(x: Tensor, cos: Tensor, sin: Tensor, rotary_dim: int, heads_first: bool) -> tuple[Tensor, Tensor]:
    return _angles(x, cos, sin, None, None, 1.0, rotary_dim or x.shape[-1], False, heads_first)


def norm_rope_forward(
    x: Tensor, weight: MaybeTensor, cos: Tensor, sin: Tensor, eps: float, weight_offset: float, rotary_dim: int,
    heads_first: bool,
) -> MaybeTensor:  # fmt: skip
    normal = rms_norm_forward(x, weight, eps, weight_offset)[0]
    return _turned(normal, *_norm_angles(x, cos, sin, rotary_dim, heads_first), False, heads_first)


def norm_rope_backward(
    grad_output: Tensor, x: Tensor, weight: MaybeTensor, cos: Tensor, sin: Tensor, eps: float, weight_offset: float,
    rotary_dim: int, heads_first: bool, x_grad: bool, weight_grad: bool,
) -> tuple[MaybeTensor, ...]:  # fmt: skip
    c, s = _norm_angles(x, cos, sin, rotary_dim, heads_first)
    grad, rstd = _turned(grad_output, c, -s, False, heads_first), rms_norm_forward(x, weight, eps, weight_offset)[1]
    assert grad is not None and rstd is not None
    return rms_norm_backward(grad, x, weight, rstd, None, weight_offset, x_grad, weight_grad)


def embedding_forward(indices: Tensor, weight: Tensor, rows: int, padding_index: int) -> Tensor:
    return rows_at(weight, indices)


def embedding_backward(grad_output: Tensor, indices: Tensor, rows: int, padding_index: int) -> Tensor:
    grad = wide(grad_output).reshape(indices.numel(), grad_output.shape[-1])
    index = indices.long().reshape(-1)
    counts = (index >= 0) & (index < rows) & (index != padding_index)
    return grad.new_zeros(rows, grad.shape[-1]).index_add_(0, index[counts], grad[counts])
