"""What accuracy.py compares: an op of ours, the same in torch, its inputs, and the sizes it is tried on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as torch_functional

from kernel_pytorch import functional, optim

Tensors = tuple[torch.Tensor, ...]
Random = Callable[..., torch.Tensor]  # random(*shape): normal, of the case's dtype and device


@dataclass(frozen=True)
class Case:
    name: str
    inputs: Callable[..., Tensors]  # (random, *size) -> arguments
    ours: Callable[..., Any]
    torch: Callable[..., Any]
    leaves: int  # how many of the first inputs are differentiated
    quick: tuple[tuple[int, ...], ...]
    full: tuple[tuple[int, ...], ...] = ()


def rows(count: int, scale: float = 1.0, shift: float = 0.0) -> Callable[..., Tensors]:
    """`count` matrices of [rows, columns]."""
    return lambda random, *size: tuple(random(*size) * scale + shift for _ in range(count))


def normed(scale: float = 1.0, shift: float = 0.0, bias: bool = True) -> Callable[..., Tensors]:
    """x, weight and bias. A shift leaves the columns' deviation visible in 16 bits."""

    def make(random: Random, count: int, columns: int) -> Tensors:
        x = random(count, columns) * scale + shift
        return (x, random(columns), random(columns)) if bias else (x, random(columns))

    return make


def product(random: Random, m: int, n: int, k: int) -> Tensors:
    return random(m, k), random(n, k) * k**-0.5, random(n)


def layers(random: Random, m: int, n: int, k: int) -> Tensors:
    return random(m, k), random(n, k) * k**-0.5, random(k, n) * n**-0.5


def heads(random: Random, batch: int, count: int, length: int, size: int) -> Tensors:
    return tuple(random(batch, count, length, size) for _ in range(3))


def classes(scale: float = 1.0) -> Callable[..., Tensors]:
    """With a weight for each class, and many rows: nearly all of the gradient is at the targets, where it is the weight
    times one factor. Of few different numbers the error is a draw, not an average."""

    def make(random: Random, count: int, columns: int) -> Tensors:
        logits = random(count, columns) * scale
        return logits, torch.arange(count, device=logits.device) * 7 % columns, random(columns).abs()

    return make


def hidden(random: Random, count: int, columns: int, size: int) -> Tensors:
    return random(count, size), random(columns, size) * size**-0.5, torch.arange(count) * 7 % columns


def table(random: Random, count: int, columns: int) -> Tensors:
    """Each row of the table is looked up many times: its gradient is a long sum."""
    weight = random(8, columns)
    return weight, torch.arange(count, device=weight.device) * 3 % 8


def turned(random: Random, length: int, size: int) -> Tensors:
    query = random(1, length, 3, size)
    cos, sin = functional.rope_tables(length, size, device=query.device)
    return query, cos.to(query.dtype), sin.to(query.dtype)


def torch_rope(query: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = query.chunk(2, -1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


def our_rope(query: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    return functional.rope(query, None, cos, sin)[0]


def gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    return torch_functional.gelu(x, approximate="tanh")


ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "gelu": torch_functional.gelu,
    "gelu_tanh": gelu_tanh,
    "silu": torch_functional.silu,
    "relu_squared": lambda x: torch_functional.relu(x).square(),
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
}
GATED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "swiglu": torch_functional.silu,
    "geglu": torch_functional.gelu,
}
SMALL, WIDE = ((37, 1003),), ((5, 65536), (512, 4096))
LOSSES = ((64, 65536), (512, 4096))  # most of a gradient is at the targets: a few rows would be a few draws
PRODUCTS, LONG_PRODUCTS = ((33, 65, 127),), ((64, 64, 8192), (5, 300, 8192), (257, 129, 1024))


def adamw_step(kind: type[torch.optim.Optimizer]) -> Callable[..., torch.Tensor]:
    def step(parameter: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        leaf = torch.nn.Parameter(parameter.clone())
        optimizer = kind([leaf], lr=1e-2, weight_decay=0.1)
        for _ in range(3):
            leaf.grad = gradient.clone()
            optimizer.step()
        return leaf.detach()

    return step


def clipped(clip: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def run(gradient: torch.Tensor) -> torch.Tensor:
        leaf = torch.nn.Parameter(torch.zeros_like(gradient))
        leaf.grad = gradient.clone()
        return clip([leaf], 1e9).reshape(1)

    return run


def pointwise() -> list[Case]:
    cases = []
    for name, function in ACTIVATIONS.items():
        ours = _activation(name)
        cases.append(Case(name, rows(1), ours, function, 1, SMALL))
        cases.append(Case(f"{name}, |x| to 50", rows(1, 10), ours, function, 1, SMALL))
    for name, function in GATED.items():
        cases.append(Case(name, rows(2), getattr(functional, name), _gated(function), 2, SMALL))
    cases.append(
        Case(
            "bias+gelu+residual",
            lambda random, m, n: (random(m, n), random(n), random(m, n)),
            lambda x, bias, residual: functional.activation(x, "gelu", bias=bias, residual=residual),
            lambda x, bias, residual: torch_functional.gelu(x + bias) + residual,
            3,
            SMALL,
            ((4096, 64),),
        )
    )
    return cases


def _activation(name: str) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: functional.activation(x, name)


def _gated(function: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., torch.Tensor]:
    return lambda gate, up: function(gate) * up


def _linear(activation: str | None) -> Callable[..., torch.Tensor]:
    return lambda x, weight, bias: functional.linear(x, weight, bias, activation=activation)


def _torch_linear(activation: str | None) -> Callable[..., torch.Tensor]:
    function = ACTIVATIONS[activation] if activation else (lambda x: x)
    return lambda x, weight, bias: function(torch_functional.linear(x, weight, bias))


def products() -> list[Case]:
    cases = [
        Case(
            f"linear+{activation}" if activation else "linear",
            product,
            _linear(activation),
            _torch_linear(activation),
            3,
            PRODUCTS,
            LONG_PRODUCTS,
        )
        for activation in (None, "gelu_tanh", "gelu", "silu")
    ]
    cases.append(
        Case(
            "mlp",
            layers,
            lambda x, first, second: functional.mlp(x, first, second),
            lambda x, first, second: torch_functional.linear(
                torch_functional.gelu(torch_functional.linear(x, first)), second
            ),
            3,
            PRODUCTS,
            LONG_PRODUCTS[:1],
        )
    )
    cases.append(
        Case(
            "matmul",
            lambda random, m, n, k: (random(m, k), random(k, n)),
            functional.matmul,
            torch.matmul,
            2,
            PRODUCTS,
            LONG_PRODUCTS,
        )
    )
    return cases


def attentions() -> list[Case]:
    quick = ((2, 3, 65, 48),)
    full = ((1, 2, 1000, 64), (1, 1, 4096, 128))
    attend = torch_functional.scaled_dot_product_attention
    return [
        Case("attention", heads, functional.attention, attend, 3, quick, full),
        Case(
            "attention causal",
            heads,
            lambda q, k, v: functional.attention(q, k, v, causal=True),
            lambda q, k, v: attend(q, k, v, is_causal=True),
            3,
            quick,
            full,
        ),
    ]


def norms() -> list[Case]:
    def layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return torch_functional.layer_norm(x, x.shape[-1:], weight, bias)

    def rms_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return torch_functional.rms_norm(x, x.shape[-1:], weight, 1e-6)

    def our_rms_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return functional.rms_norm(x, weight, 1e-6)

    ours = functional.layer_norm
    return [
        Case("layer_norm", normed(), ours, layer_norm, 3, SMALL, (*WIDE, (4, 1))),
        Case("layer_norm, mean 30", normed(1, 30), ours, layer_norm, 3, SMALL, WIDE),
        Case("layer_norm, x 1000", normed(1000), ours, layer_norm, 3, SMALL),
        Case("rms_norm", normed(bias=False), our_rms_norm, rms_norm, 2, SMALL, WIDE),
        Case("rms_norm, x 1000", normed(1000, bias=False), our_rms_norm, rms_norm, 2, SMALL),
    ]


def _log_softmax(x: torch.Tensor) -> torch.Tensor:
    return torch.log_softmax(x, -1)


def _softmax(x: torch.Tensor) -> torch.Tensor:
    return torch.softmax(x, -1)


def _torch_linear_loss(x: torch.Tensor, weight: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return torch_functional.cross_entropy(torch_functional.linear(x, weight), target)


def row_sums() -> list[Case]:
    def loss(logits: torch.Tensor, target: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(logits, target, weight=weight)

    def exact(logits: torch.Tensor, target: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return torch_functional.cross_entropy(logits, target, weight)

    cases = [
        Case("softmax", rows(1), functional.softmax, _softmax, 1, SMALL, WIDE),
        Case("softmax, x 10", rows(1, 10), functional.softmax, _softmax, 1, SMALL, WIDE),
        Case("log_softmax", rows(1), functional.log_softmax, _log_softmax, 1, SMALL, WIDE),
        Case("cross_entropy", classes(), loss, exact, 1, ((509, 521),), LOSSES),
        Case("cross_entropy, x 10", classes(10), loss, exact, 1, ((509, 521),), LOSSES),
        Case("linear_cross_entropy", hidden, functional.linear_cross_entropy, _torch_linear_loss, 2, ((33, 65, 127),)),
        Case(
            "embedding",
            table,
            lambda weight, indices: functional.embedding(indices, weight),
            lambda weight, indices: torch_functional.embedding(indices, weight),
            1,
            ((67, 33),),
            ((8192, 65),),
        ),
        Case(
            "mean_pool",
            lambda random, tokens, columns: (random(2, tokens, columns),),
            functional.mean_pool,
            lambda x: x.mean(1),
            1,
            ((67, 33),),
            ((65536, 33),),
        ),
        Case("rope", turned, our_rope, torch_rope, 1, ((67, 64),), ((4096, 128),)),
        Case("adamw, 3 steps", rows(2), adamw_step(optim.AdamW), adamw_step(torch.optim.AdamW), 0, SMALL),
        Case(
            "clip_grad_norm_", rows(1), clipped(optim.clip_grad_norm_), clipped(torch.nn.utils.clip_grad_norm_), 0, WIDE
        ),
    ]
    return cases


CASES = [*pointwise(), *products(), *attentions(), *norms(), *row_sums()]
