"""The products of a decoder for batches of any size: by our kernels with what surrounds them inside, or by torch's
library with it behind. On a GPU the faster one for a number of rows is found by timing it over all layers, so that
weights come from memory as they do in a step; on a CPU ours are taken."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
import torch.nn.functional as torch_functional
from torch import Tensor

from ..functional import gated_activation, linear

_FEW_ROWS = 256  # up to which weights have to come from memory in a timing as in a step


def bucket(rows: int) -> int:
    """Rows that share a choice: the next power of two."""
    return 1 << max(0, rows - 1).bit_length()


class Product:
    """x @ weight.T + bias (+ residual)."""

    def __init__(self, weight: Tensor | None, bias: Tensor | None) -> None:
        assert weight is not None
        self.weight, self.bias = weight.detach(), None if bias is None else bias.detach()
        self.by_torch: dict[int, bool] = {}

    @property
    def key(self) -> tuple[object, ...]:
        return (type(self), *self.weight.shape, self.bias is None)

    def ways(self) -> tuple[Callable[..., Tensor], Callable[..., Tensor]]:
        return self.ours, self.torchs

    def ours(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        return linear(x, self.weight, self.bias, residual=residual)

    def torchs(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        product = torch_functional.linear(x, self.weight, self.bias)
        return product if residual is None else product.add_(residual)

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        return self.ways()[self.by_torch.get(bucket(x.shape[0]), False)](x, residual)


class Gate(Product):
    """activation(x @ weight.T) * (x @ up.T)."""

    def __init__(self, weight: Tensor, up: Tensor, activation: str) -> None:
        super().__init__(weight, None)
        self.up, self.activation = up.detach(), activation

    def ours(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        return linear(x, self.weight, activation=self.activation, weight_up=self.up)

    def torchs(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        gate, up = torch_functional.linear(x, self.weight), torch_functional.linear(x, self.up)
        return gated_activation(gate, up, self.activation)


class Products:
    """All products of a model; those of one shape share their choices."""

    def __init__(self) -> None:
        self.all: list[Product] = []

    def add(self, product: Product) -> Product:
        self.all.append(product)
        return product

    def _alike(self) -> Iterator[list[Product]]:
        found: dict[tuple[object, ...], list[Product]] = {}
        for product in self.all:
            found.setdefault(product.key, []).append(product)
        yield from found.values()

    def choose(self, rows: int) -> None:
        weight = self.all[0].weight
        number = bucket(rows)
        if not weight.is_cuda or number in self.all[0].by_torch:
            return
        for alike in self._alike():
            first = alike[0]
            timed = alike if rows <= _FEW_ROWS else alike[:2]
            x = torch.randn(rows, first.weight.shape[1], dtype=weight.dtype, device=weight.device)
            times = [_milliseconds([product.ways()[way] for product in timed], x) for way in (0, 1)]
            for product in alike:
                product.by_torch[number] = times[1] < 0.97 * times[0]


def _milliseconds(products: Sequence[Callable[..., Tensor]], x: Tensor) -> float:
    """Of GPU time, launches hidden by a graph; the best of five."""

    def run() -> None:
        for product in products:
            product(x)

    run()
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        run()
    best = float("inf")
    for _ in range(5):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        best = min(best, start.elapsed_time(end))
    return best
