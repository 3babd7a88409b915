"""The source of randomness of a call: sizes, types and tensors, drawn so that edges come often."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")
EDGES = (1, 1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129)
FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class Draw:
    """One per call, made from the run's seed, the function's name and the number of the call."""

    def __init__(self, seed: int, name: str, call: int) -> None:
        self.random = random.Random(f"{seed} {name} {call}")
        self.generator = torch.Generator().manual_seed(self.random.getrandbits(62))

    def maybe(self, probability: float = 0.5) -> bool:
        return self.random.random() < probability

    def choice(self, items: Sequence[T]) -> T:
        return self.random.choice(items)

    def between(self, low: int, high: int) -> int:
        return self.random.randint(low, high)

    def number(self, low: float, high: float) -> float:
        return self.random.uniform(low, high)

    def size(self, most: int = 200, *, empty: float = 0.03) -> int:
        if self.maybe(empty):
            return 0
        if self.maybe(0.7):
            return min(self.choice(EDGES), most)
        return self.between(1, most)

    def shape(self, least_rank: int = 1, most_rank: int = 4, elements: int = 20_000) -> list[int]:
        """Sizes whose product is at most `elements`; the last is drawn first, as the one that kernels are about."""
        sizes: list[int] = []
        room = elements
        for _ in range(self.between(least_rank, most_rank)):
            sizes.insert(0, self.size(max(1, min(room, 300 if not sizes else 40))))
            room //= max(sizes[0], 1)
        return sizes

    def dtype(self, *, double: bool = True) -> torch.dtype:
        return self.choice(FLOATS if double else FLOATS[:3])

    def normal(self, shape: Sequence[int], dtype: torch.dtype, scale: float = 1.0) -> Tensor:
        return (torch.randn(list(shape), generator=self.generator, dtype=torch.float64) * scale).to(dtype)

    def magnitude(self) -> float:
        return self.choice((1.0, 1.0, 1.0, 1.0, 0.0, 1e-3, 30.0))

    def tensor(self, shape: Sequence[int], dtype: torch.dtype, *, dense: bool = False, scale: float = 1.0) -> Tensor:
        """Normal numbers, in memory as a view may lie: contiguous, permuted, sliced, expanded or offset."""
        values = self.normal(shape, dtype, scale)
        return values if dense else self.laid_out(values)

    def laid_out(self, values: Tensor) -> Tensor:
        way = self.random.random()
        if values.dim() == 0 or way < 0.5:
            return values
        if way < 0.65:  # permuted in memory
            order = list(range(values.dim()))
            self.random.shuffle(order)
            back = sorted(range(values.dim()), key=lambda i: order[i])
            return values.permute(order).contiguous().permute(back)
        dim = self.between(0, values.dim() - 1)
        if way < 0.85:  # every second, or a range, of a larger tensor
            step, before = self.choice((1, 2)), self.between(0, 3)
            sizes = list(values.shape)
            sizes[dim] = sizes[dim] * step + before + self.between(0, 3)
            large = torch.full(sizes, 7, dtype=values.dtype)
            view = large.narrow(dim, before, values.shape[dim] * step)
            view = view[(slice(None),) * dim + (slice(None, None, step),)]
            return view.copy_(values)
        if values.shape[dim] > 0:  # stride 0
            return values.narrow(dim, 0, 1).expand(values.shape)
        return values

    def integers(self, shape: Sequence[int], low: int, high: int, dtype: torch.dtype = torch.int64) -> Tensor:
        """In [low, high)."""
        if high <= low:
            high = low + 1
        return self.laid_out(torch.randint(low, high, list(shape), generator=self.generator, dtype=dtype))

    def booleans(self, shape: Sequence[int], share: float = 0.7) -> Tensor:
        return self.laid_out(torch.rand(list(shape), generator=self.generator) < share)

    def seed(self) -> Tensor:
        return torch.tensor([self.random.getrandbits(40), self.random.getrandbits(20)])

    def probability(self) -> float:
        return self.choice((0.0, 0.0, 0.1, 0.5, 0.9, 1.0))

    def wrong_probability(self) -> float:
        return self.choice((-0.1, 1.5, float("nan"), float("inf")))

    def some(self, value: T, probability: float = 0.5) -> T | None:
        return value if self.maybe(probability) else None

    def wrong_size(self, shape: Sequence[int]) -> list[int]:
        """A shape that broadcasts to none of the given one: one size larger by 1 or 2, and no 1."""
        sizes = list(shape) or [2]
        place = self.between(0, len(sizes) - 1)
        sizes[place] += self.choice((1, 2)) if sizes[place] else 2
        if sizes[place] == 1:
            sizes[place] = 3
        return sizes


Options = dict[str, Any]
