"""torch.nn's own layers, and modules as people write them: shared, called twice, with buffers, hooks, odd outputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from .case import Case, seeded

SIZE = 32


def _rows(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def _sequences(model: nn.Module) -> Case:
    return Case(model.eval(), (_rows(2, 12, SIZE),), (_rows(3, 9, SIZE),))


class _Block(nn.Module):
    def __init__(self, size: int = SIZE) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(size), nn.LayerNorm(size)
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(size, size) for _ in range(3))
        self.mlp = nn.Sequential(nn.Linear(size, 2 * size), nn.GELU(), nn.Dropout(0.1), nn.Linear(2 * size, size))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        heads = [one(y).view(*y.shape[:2], 4, -1).transpose(1, 2) for one in (self.q_proj, self.k_proj, self.v_proj)]
        attended = nn.functional.scaled_dot_product_attention(heads[0], heads[1], heads[2], is_causal=True)
        x = x + attended.transpose(1, 2).flatten(2)
        return x + self.mlp(self.norm2(x))


class _Twice(nn.Module):
    """One block, two calls; a counter; a branch on the data."""

    def __init__(self) -> None:
        super().__init__()
        self.block = _Block()
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        x = self.block(self.block(x))
        return x * 2 if x.sum() > 0 else x


@dataclass
class _Output:
    last: Tensor
    nothing: None = None


class _Odd(nn.Module):
    """A dataclass out, named arguments alone in, tied weights."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, SIZE)
        self.block = _Block()
        self.head = nn.Linear(SIZE, 50, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, *, tokens: Tensor) -> _Output:
        return _Output(self.head(self.block(self.embedding(tokens))))


class _Parametrized(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = _Block()
        self.last = nn.utils.parametrizations.weight_norm(nn.Linear(SIZE, SIZE))
        self.spectral = nn.utils.parametrizations.spectral_norm(nn.Linear(SIZE, SIZE))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"x": self.spectral(self.last(self.block(x)))}


class _Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.LSTM(SIZE, SIZE, batch_first=True), nn.LayerNorm(SIZE)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.layer(x)[0])


def _odd() -> Case:
    ids = torch.arange(24).view(2, 12)
    return Case(_Odd().eval(), {"tokens": ids}, {"tokens": ids[:, :7]})


def _encoder(norm_first: bool) -> Case:
    layer = nn.TransformerEncoderLayer(SIZE, 4, 2 * SIZE, batch_first=True, norm_first=norm_first)
    return _sequences(nn.TransformerEncoder(layer, 2, enable_nested_tensor=not norm_first))


def _decoder() -> Case:
    model = nn.TransformerDecoder(nn.TransformerDecoderLayer(SIZE, 4, 2 * SIZE, batch_first=True), 2)
    return Case(model.eval(), (_rows(2, 12, SIZE), _rows(2, 7, SIZE)), (_rows(1, 5, SIZE), _rows(1, 6, SIZE)))


def _transformer() -> Case:
    model = nn.Transformer(SIZE, 4, 1, 1, 2 * SIZE, batch_first=True)
    return Case(model.eval(), (_rows(2, 12, SIZE), _rows(2, 7, SIZE)), (_rows(1, 5, SIZE), _rows(1, 6, SIZE)))


def _attention() -> Case:
    x, other = _rows(2, 12, SIZE), _rows(1, 9, SIZE)
    return Case(nn.MultiheadAttention(SIZE, 4, batch_first=True).eval(), (x, x, x), (other, other, other))


def _convolutions() -> Case:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.AdaptiveAvgPool2d(1), nn.Flatten()
    )
    return Case(model.append(nn.Linear(8, 4)).eval(), (_rows(2, 3, 16, 16),), (_rows(3, 3, 12, 12),))


def _lazy() -> Case:
    return _sequences(nn.Sequential(nn.LazyLinear(SIZE), nn.SiLU(), nn.LazyLinear(SIZE), nn.LayerNorm(SIZE)))


MODELS: dict[str, Callable[[], Case]] = {
    "encoder": lambda: _encoder(False),
    "encoder_norm_first": lambda: _encoder(True),
    "decoder": _decoder,
    "transformer": _transformer,
    "multihead_attention": _attention,
    "convolutions": _convolutions,
    "recurrent": lambda: _sequences(_Recurrent()),
    "mlp": lambda: _sequences(nn.Sequential(nn.Linear(SIZE, 64), nn.GELU(), nn.Linear(64, SIZE))),
    "lazy": _lazy,
    "block": lambda: _sequences(_Block()),
    "twice": lambda: _sequences(_Twice()),
    "odd": _odd,
    "parametrized": lambda: _sequences(_Parametrized()),
}


def names() -> list[str]:
    return [f"torch/{name}" for name in MODELS]


def build(name: str) -> Case:
    with seeded():
        return MODELS[name.partition("/")[2]]()
