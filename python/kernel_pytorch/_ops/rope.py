"""Rotary position embedding: casts, gradients, tables."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .support.casting import MaybeTensor, parameter_for, same_type, statistics_dtype
from .support.declare import backward, differentiable, without_gradient


def rope(
    query: Tensor,
    key: MaybeTensor,
    cos: Tensor,
    sin: Tensor,
    *,
    interleaved: bool = False,
    positions: Tensor | None = None,
    heads_first: bool = False,
    rotary_dim: int | None = None,
) -> tuple[Tensor, MaybeTensor]:
    """Queries and keys with the pairs of each head turned by their positions' angles, in one launch.

    Args:
        query, key: [batch, sequence, heads, head_dim], with or without the batch, any strides (slices of a packed QKV
            are not copied); they may differ in heads. With heads_first: [batch, heads, sequence, head_dim].
        cos, sin: [rows, width] or [batch, sequence, width], of the query's type or fp32. The width is rotary_dim / 2,
            or rotary_dim with each value twice: as two halves, or as neighbours where interleaved.
        interleaved: pairs are neighbours (GPT-J) and not elements half of rotary_dim apart (Llama).
        positions: rows of cos and sin, [sequence] or [batch, sequence], int64 or int32; None: 0, 1, 2 and so on.
        rotary_dim: how many columns of a head are turned, the others being copied. None: all of head_dim where the
            table is as wide, else twice the width where head_dim is at least that, else the width.

    Returns:
        The turned query and key (None for None), contiguous.
    """
    cos, sin = parameter_for(query, cos), parameter_for(query, sin)
    return _rotate(query, key, cos, sin, None, positions, 1.0, rotary_dim or 0, interleaved, heads_first)  # type: ignore[no-any-return]


def rope_(
    query: Tensor,
    key: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    *,
    interleaved: bool = False,
    positions: Tensor | None = None,
    heads_first: bool = False,
    rotary_dim: int | None = None,
    inverse: bool = False,
) -> None:
    """`rope` in place, outside autograd; `inverse` turns back. Expanded tensors, and those that share memory, raise."""
    cos, sin = parameter_for(query, cos), parameter_for(query, sin)
    _in_place(query, key, cos, sin, None, positions, 1.0, rotary_dim or 0, interleaved, heads_first, inverse)


def rope_from_frequencies(
    query: Tensor,
    key: MaybeTensor,
    inverse_frequencies: Tensor,
    *,
    scale: float = 1.0,
    interleaved: bool = False,
    positions: Tensor | None = None,
    heads_first: bool = False,
) -> tuple[Tensor, MaybeTensor]:
    """`rope` whose cos and sin are computed in the kernel, times `scale`, from [rotary_dim / 2] inverse frequencies.

    These are fp32 (fp64 for fp64); `rope_frequencies` returns them and the scale.
    """
    inverse_frequencies = inverse_frequencies.to(statistics_dtype(query)).contiguous()
    return _rotate(query, key, None, None, inverse_frequencies, positions, scale, 0, interleaved, heads_first)  # type: ignore[no-any-return]


def rope_frequencies(
    rotary_dim: int,
    *,
    base: float = 10000.0,
    scaling: str = "none",
    factor: float = 1.0,
    original_positions: float = 0.0,
    sequence: float = 0.0,
    beta_fast: float = 32.0,
    beta_slow: float = 1.0,
    attention_factor: float = 0.0,
    low_frequency_factor: float = 1.0,
    high_frequency_factor: float = 4.0,
    device: torch.device | str | None = None,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, float]:
    """The inverse frequencies [rotary_dim / 2] of a model, and what its cos and sin are multiplied by.

    Args:
        scaling: none, linear, ntk, dynamic (NTK by how far `sequence` exceeds original_positions), yarn or llama3.
        factor: by which the context is stretched beyond original_positions, the length that the model was trained on.
        beta_fast, beta_slow, attention_factor: YaRN's; an attention_factor of 0 stands for 0.1 ln(factor) + 1.
        low_frequency_factor, high_frequency_factor: Llama 3's.
    """
    table = torch.empty(rotary_dim // 2 + 1, dtype=torch.float64)
    if rotary_dim <= 0 or rotary_dim % 2:
        raise ValueError(f"rope_frequencies: rotary_dim is {rotary_dim}; it must be even and positive")
    numbers = (factor, original_positions, sequence, beta_fast, beta_slow, attention_factor)
    _fill(table, base, scaling, *numbers, low_frequency_factor, high_frequency_factor)
    return table[:-1].to(device=device, dtype=dtype), float(table[-1])


def rope_tables(
    positions: int | Tensor,
    rotary_dim: int,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str | None = None,
    **frequencies: Any,
) -> tuple[Tensor, Tensor]:
    """cos and sin [positions, rotary_dim / 2] for `rope`; positions are 0 to n - 1 for a number n.

    Angles are taken in fp64. The other arguments are `rope_frequencies`'.
    """
    if isinstance(positions, int):
        positions = torch.arange(positions, device=device)
    inverse, scale = rope_frequencies(rotary_dim, device=positions.device, dtype=torch.float64, **frequencies)
    angles = positions.to(torch.float64)[..., None] * inverse
    return (angles.cos() * scale).to(dtype), (angles.sin() * scale).to(dtype)


def _rotate(query: Tensor, key: Any, *arguments: Any) -> Any:
    if key is not None and key.dtype is not query.dtype:
        query, key = same_type(query, key)
    rotated_query, rotated_key = _rope(query, key, *arguments)
    return rotated_query, None if key is None else rotated_key


def _gradient(grads: Any, saved: Any, wanted: Any) -> Any:
    grad_query, grad_key = grads
    constants = (None,) * 4
    if grad_query is None:
        return None, _backward(grad_key, None, *saved)[0], *constants
    if grad_key is None or not wanted[1]:
        return _backward(grad_query, None, *saved)[0], None, *constants
    return *_backward(grad_query, grad_key, *saved), *constants


_INSTEAD = "products with cos and sin"

# Turning back is linear as well, but its own derivative is not declared.
_backward = backward("rope", instead=_INSTEAD)
_rope = differentiable("rope", gradient=_gradient, instead=_INSTEAD)
_in_place = without_gradient("rope_in_place", name="rope_")
_fill = without_gradient("rope_frequencies")
