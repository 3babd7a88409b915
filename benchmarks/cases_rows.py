"""Softmax and cross entropy. A row of cross entropy is loss and gradient together: ours computes them in one visit."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as torch_functional
from cases import Op, Random

from kernel_pytorch import functional

Tensors = tuple[torch.Tensor, ...]


def one(random: Random, rows: int, columns: int) -> Tensors:
    return (random(rows, columns),)


def with_mask(random: Random, rows: int, columns: int) -> Tensors:
    """Scores of heads that share a boolean mask of queries and keys."""
    queries = 64
    scores = random(rows // queries, queries, columns)
    return scores, torch.rand(queries, columns, device=scores.device) > 0.1


def classes(random: Random, rows: int, columns: int) -> Tensors:
    logits = random(rows, columns)
    return logits, torch.randint(0, columns, (rows,), device=logits.device)


def loss_and_gradient(loss: Callable[..., torch.Tensor]) -> Callable[..., Tensors]:
    def run(logits: torch.Tensor, target: torch.Tensor) -> Tensors:
        with torch.enable_grad():
            leaf = logits.detach().requires_grad_()
            value = loss(leaf, target)
            (gradient,) = torch.autograd.grad(value, leaf)
        return value.detach().float(), gradient

    return run


def torch_capped(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    capped = 30.0 * torch.tanh(logits / 30.0)
    return torch_functional.cross_entropy(capped, target) + 1e-4 * torch.logsumexp(capped, -1).square().mean()


def losses(name: str, shape_cpu: tuple[int, int]) -> list[Op]:
    shapes = {"shape_cpu": shape_cpu, "shape_cuda": (8192, 128256)}
    return [
        Op(
            f"cross_entropy{name}",
            classes,
            loss_and_gradient(functional.cross_entropy),
            loss_and_gradient(torch_functional.cross_entropy),
            forward=2,
            **shapes,
        ),
        Op(
            f"softcap+cross_entropy+z_loss{name}",
            classes,
            loss_and_gradient(lambda x, t: functional.cross_entropy(x, t, softcap=30.0, z_loss=1e-4)),
            loss_and_gradient(torch_capped),
            forward=2,
            **shapes,
        ),
    ]


OPS = [
    Op("softmax", one, functional.softmax, lambda x: torch.softmax(x, -1), forward=2, backward=3),
    Op("log_softmax", one, functional.log_softmax, lambda x: torch.log_softmax(x, -1), forward=2, backward=3),
    Op(
        "scale+mask+softmax",
        with_mask,
        lambda x, mask: functional.softmax(x, scale=0.125, mask=mask),
        lambda x, mask: torch.softmax((x * 0.125).masked_fill(~mask, -torch.inf), -1),
        forward=2,
        backward=3,
    ),
    *losses("", (1024, 4096)),
    *losses(" 32k", (1024, 32000)),
]
