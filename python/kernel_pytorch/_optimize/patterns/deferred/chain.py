"""Attention's scores before anybody computed them: their factors, a softcap, what was added and what was masked.

Models split and join the dimensions before the last two as they like: Swin adds a bias of heads to [batch * windows,
heads, ...] and a mask of windows to [batch, windows, heads, ...]. So `groups` holds each of these dimensions as its
smallest parts, and what was added is kept over the parts, with ones where it does not vary: nothing is expanded.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch
from torch import Tensor

from ....functional import attention
from ..calls import runs_attention

Groups: TypeAlias = "tuple[tuple[int, ...], ...]"  # of each dimension before the last two, its parts


@dataclass(frozen=True)
class Chain:
    """factor * query key', maybe softcapped, plus bias, where `mask` is True; after softmax with `is_normed`."""

    query: Tensor  # [..., queries, size]
    key: Tensor  # [..., keys, size]
    groups: Groups
    factor: float = 1.0
    softcap: float | None = None  # of tanh, which the factor is inside of
    bias: Tensor | None = None  # [parts or ones..., queries or 1, keys or 1]
    mask: Tensor | None = None  # the same, True keeps
    hidden: Tensor | None = None  # where the model filled in next to nothing last, as it gave it
    is_normed: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        leading = (math.prod(group) for group in self.groups)
        return (*leading, self.query.shape[-2], self.key.shape[-2])

    def viewed(self, shape: Sequence[int]) -> Chain | None:
        """With other dimensions before the last two, or None for another view."""
        total, last = math.prod(self.shape), self.shape[-2:]
        if -1 in shape:
            known = -math.prod(shape)
            shape = [total // max(known, 1) if one == -1 else one for one in shape]
        if len(shape) < 3 or tuple(shape[-2:]) != last or math.prod(shape) != total or total == 0:
            return None
        parts = _common_parts([part for group in self.groups for part in group], shape[:-2])
        if parts is None:
            return None
        old = [part for group in self.groups for part in group]
        bias, mask = (None if one is None else _split(one, old, parts) for one in (self.bias, self.mask))
        return replace(self, groups=_grouped(parts, shape[:-2]), bias=bias, mask=mask)

    def times(self, number: float) -> Chain | None:
        if self.is_normed:
            return None
        bias = None if self.bias is None else self.bias * number
        if self.softcap is None:
            return replace(self, factor=self.factor * number, bias=bias)
        return replace(self, softcap=self.softcap * number, bias=bias) if number > 0 else None

    def times_rows(self, rows: Tensor) -> Chain | None:
        """With each query's scores times a number of its own (a learnt temperature of heads)."""
        leading = self.query.shape[:-2]
        if self.is_normed or self.softcap is not None or self.bias is not None or rows.dim() > self.query.dim():
            return None
        if rows.dim() and rows.shape[-1] != 1:
            return None
        if tuple(math.prod(group) for group in self.groups) != tuple(leading):
            return None
        query = self.query * rows
        same = query.shape == self.query.shape and query.dtype is self.query.dtype
        return replace(self, query=query) if same else None

    def plus(self, other: Tensor) -> Chain | None:
        spread = None if self.is_normed or not other.is_floating_point() else self._spread(other)
        if spread is None:
            return None
        return replace(self, bias=spread if self.bias is None else self.bias + spread)

    def filled(self, hidden: Tensor, value: float, dtype: torch.dtype) -> Chain | None:
        """With `value` where `hidden` is True: minus infinity, or so little that nothing of a score is left in it."""
        spread = None if self.is_normed or hidden.dtype is not torch.bool else self._spread(hidden)
        if spread is None or value > _NOTHING_LEFT:
            return None
        if value == -math.inf:
            return replace(self, mask=~spread if self.mask is None else self.mask & ~spread, hidden=hidden)
        # Rows that are hidden as a whole are then equal scores, as in the model, and not zeros as with a mask. A sum
        # lets their gradients through, where the model's do not come from scores that it filled.
        if torch.is_grad_enabled() and (self.query.requires_grad or self.key.requires_grad):
            return None
        bias = torch.zeros((), dtype=dtype, device=hidden.device) if self.bias is None else self.bias
        return replace(self, bias=torch.where(spread, max(torch.finfo(dtype).min, _FILL), bias), hidden=hidden)

    def hidden_again(self, hidden: Tensor) -> Chain | None:
        """With zeros among the probabilities where the scores were filled before: rows that see nothing are zeros, and
        no other number changes. None where that is another place, or one that only a GPU could compare."""
        before = self.hidden
        is_same = before is hidden or (
            before is not None
            and hidden.device.type == "cpu"
            and before.shape == hidden.shape
            and torch.equal(before, hidden)
        )
        spread = self._spread(hidden) if self.is_normed and is_same else None
        if spread is None:
            return None
        return replace(self, mask=~spread if self.mask is None else self.mask & ~spread)

    def capped(self) -> Chain | None:
        """Its tanh."""
        if self.is_normed or self.softcap is not None or self.bias is not None or self.mask is not None:
            return None
        return replace(self, softcap=1.0)

    def normed(self) -> Chain | None:
        return None if self.is_normed else replace(self, is_normed=True)

    def attend(self, value: Tensor) -> Tensor | None:
        """The product with `value`, whose first dimensions are the chain's; None where our kernels do not take it."""
        leading, sizes = self.shape[:-2], (self.query.shape[-1], value.shape[-1])
        if not self.is_normed or value.shape[:-2] != leading or value.shape[-2] != self.shape[-1] or 0 in self.shape:
            return None
        dtype = torch.promote_types(torch.promote_types(self.query.dtype, self.key.dtype), value.dtype)
        first = self._heads_begin()
        parts = [part for group in self.groups for part in group]
        batch, heads = math.prod(parts[:first]), math.prod(parts[first:])
        query, key = (one.to(dtype).reshape(batch, heads, -1, sizes[0]) for one in (self.query, self.key))
        values = value.to(dtype).reshape(batch, heads, -1, sizes[1])
        if not runs_attention(query, key, values):
            return None
        bias, mask = (None if one is None else _joined(one, parts, first) for one in (self.bias, self.mask))
        cap = self.softcap
        scale = self.factor if cap is None else self.factor * cap
        output: Tensor = attention(query, key, values, scale=scale, softcap=cap, bias=bias, mask=mask)
        return output.to(value.dtype).view(*leading, self.shape[-2], sizes[1])

    def _spread(self, other: Tensor) -> Tensor | None:
        """A tensor that broadcasts to the scores, over the parts of their dimensions."""
        shape = self.shape
        if other.dim() > len(shape):
            return None
        sizes = (1,) * (len(shape) - other.dim()) + tuple(other.shape)
        if any(size not in (1, full) for size, full in zip(sizes, shape)):
            return None
        parts: list[int] = []
        for size, full, group in zip(sizes, shape, self.groups):
            parts.extend(group if size == full else (1,) * len(group))
        return other.reshape(*parts, *sizes[-2:])

    def _heads_begin(self) -> int:
        """Which part is the first of the heads: where what was added is expanded least."""
        parts = [part for group in self.groups for part in group]
        added = [one for one in (self.bias, self.mask) if one is not None]

        def size(first: int) -> int:
            return sum(_joined_size(one, parts, first) for one in added)

        # The last part are heads if nothing else is better.
        return min(range(len(parts), -1, -1), key=lambda first: (size(first), first != max(len(parts) - 1, 0)))


_NOTHING_LEFT = -9e3
_FILL = -1e30  # a kernel's base-2 logarithm of it is finite, and it swallows any score


def _common_parts(one: Sequence[int], other: Sequence[int]) -> list[int] | None:
    """The largest parts that both are made of, ones left out; None where there are none."""
    cuts = sorted({*_cuts(one), *_cuts(other)})
    if any(after % before for before, after in itertools.pairwise(cuts)):
        return None
    return [after // before for before, after in itertools.pairwise(cuts)]


def _cuts(parts: Sequence[int]) -> list[int]:
    cuts = [1]
    for part in parts:
        cuts.append(cuts[-1] * part)
    return cuts


def _grouped(parts: Sequence[int], sizes: Sequence[int]) -> Groups:
    left, groups = list(parts), []
    for size in sizes:
        group: list[int] = []
        while math.prod(group) < size:
            group.append(left.pop(0))
        groups.append(tuple(group))
    return tuple(groups)


def _split(tensor: Tensor, old: Sequence[int], new: Sequence[int]) -> Tensor:
    """A tensor over the parts `old`, or ones, over the smaller parts `new`."""
    left, sizes = list(new), []
    for part, size in zip(old, tensor.shape):
        inside: list[int] = []
        while math.prod(inside) < part:
            inside.append(left.pop(0))
        sizes.extend(inside if size == part else [1] * len(inside))
    return tensor.reshape(*sizes, *tensor.shape[-2:])


def _joined_size(tensor: Tensor, parts: Sequence[int], first: int) -> int:
    """Elements of what `_joined` gives."""
    size = math.prod(tensor.shape[-2:])
    for begin, end in ((0, first), (first, len(parts))):
        if any(one != 1 for one in tensor.shape[begin:end]):
            size *= math.prod(parts[begin:end])
    return size


def _joined(tensor: Tensor, parts: Sequence[int], first: int) -> Tensor:
    """[batch or 1, heads or 1, queries or 1, keys or 1] of a tensor over the parts."""
    sizes: list[int] = []
    joined: list[int] = []
    for begin, end in ((0, first), (first, len(parts))):
        varies = any(one != 1 for one in tensor.shape[begin:end])
        sizes.extend(parts[begin:end] if varies else (1,) * (end - begin))
        joined.append(math.prod(parts[begin:end]) if varies else 1)
    return tensor.expand(*sizes, *tensor.shape[-2:]).reshape(*joined, *tensor.shape[-2:])
