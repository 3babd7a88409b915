"""Activations, gated activations, dropout, rope."""

from __future__ import annotations

import torch
import torch.nn.functional as torch_functional
from cases import Op, Random

from kernel_pytorch import functional

Tensors = tuple[torch.Tensor, ...]


def one(random: Random, rows: int, columns: int) -> Tensors:
    return (random(rows, columns),)


def two(random: Random, rows: int, columns: int) -> Tensors:
    return random(rows, columns), random(rows, columns)


def packed(random: Random, rows: int, columns: int) -> Tensors:
    return (random(rows, 2 * columns),)


def with_bias(random: Random, rows: int, columns: int) -> Tensors:
    return random(rows, columns), random(columns), random(rows, columns)


def torch_swiglu_packed(x: torch.Tensor) -> torch.Tensor:
    gate, up = x.chunk(2, -1)
    return torch_functional.silu(gate) * up


def heads(random: Random, rows: int, columns: int) -> Tensors:
    """Three quarters of the columns are queries, one quarter keys, in heads of 128; cos and sin as models keep them."""
    query, key = random(1, rows, columns // 128 * 3 // 4, 128), random(1, rows, columns // 128 // 4, 128)
    cos, sin = functional.rope_tables(rows, 128, device=query.device)
    return query, key, torch.cat([cos, cos], -1).to(query.dtype), torch.cat([sin, sin], -1).to(query.dtype)


def torch_rope(query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Tensors:
    def turn(x: torch.Tensor) -> torch.Tensor:
        first, second = x.chunk(2, -1)
        return x * cos[:, None] + torch.cat([-second, first], -1) * sin[:, None]

    return turn(query), turn(key)


def fused(kind: str) -> Op:
    function = {"gelu": torch_functional.gelu, "silu": torch_functional.silu}[kind]
    return Op(
        f"bias+{kind}+dropout+residual",
        with_bias,
        lambda x, bias, residual: functional.activation(x, kind, bias=bias, residual=residual, dropout_p=0.1),
        lambda x, bias, residual: torch_functional.dropout(function(x + bias), 0.1) + residual,
        forward=3,
        backward=3,
        checked=False,
    )


OPS = [
    Op("gelu", one, functional.gelu, torch_functional.gelu, forward=2, backward=3),
    Op(
        "gelu_tanh",
        one,
        lambda x: functional.gelu(x, "tanh"),
        lambda x: torch_functional.gelu(x, approximate="tanh"),
        forward=2,
        backward=3,
    ),
    Op("silu", one, functional.silu, torch_functional.silu, forward=2, backward=3),
    Op(
        "relu_squared", one, functional.relu_squared, lambda x: torch_functional.relu(x).square(), forward=2, backward=3
    ),
    Op(
        "bias+gelu+residual",
        with_bias,
        lambda x, bias, residual: functional.activation(x, "gelu", bias=bias, residual=residual),
        lambda x, bias, residual: torch_functional.gelu(x + bias) + residual,
        forward=3,
        backward=3,
    ),
    fused("gelu"),
    fused("silu"),
    Op("swiglu", two, functional.swiglu, lambda gate, up: torch_functional.silu(gate) * up, forward=3, backward=5),
    Op("swiglu_packed", packed, functional.swiglu_packed, torch_swiglu_packed, forward=3, backward=5),
    Op("geglu", two, functional.geglu, lambda gate, up: torch_functional.gelu(gate) * up, forward=3, backward=5),
    Op("rope", heads, functional.rope, torch_rope, forward=2, backward=1.5, leaves=1),  # backward: of the query alone
    Op(
        "dropout",
        one,
        lambda x: functional.dropout(x, 0.1),
        lambda x: torch_functional.dropout(x, 0.1),
        forward=2,
        backward=2,
        checked=False,
    ),
]
