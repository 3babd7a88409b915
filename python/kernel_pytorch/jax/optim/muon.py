"""Muon (Jordan, 2024): momentum made orthogonal by products of our GEMM."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ..products import matmul
from .lists import Optimizer, Rate, leaves_like, update_of


class MuonState(NamedTuple):
    count: Any  # steps taken, int32
    momentum: Any  # a tree like the parameters


def muon(
    learning_rate: Rate = 1e-3,
    weight_decay: float = 0.1,
    momentum: float = 0.95,
    nesterov: bool = True,
    *,
    ns_coefficients: tuple[float, float, float] = (3.4445, -4.7750, 2.0315),
    eps: float = 1e-7,
    ns_steps: int = 5,
    adjust_lr_fn: str | None = None,
) -> Optimizer:
    """Muon, as `kernel_pytorch.optim.Muon` and torch.optim.Muon, for a tree of matrices: embeddings, heads, norms and
    biases belong to another optimizer (`optax.multi_transform`).

    Args:
        learning_rate: a number, or a function of the step's number from 0 on.
        ns_coefficients: of x, x^3 and x^5 in a Newton-Schulz step, which act on singular values.
        adjust_lr_fn: "original" (None is the same) multiplies the rate by sqrt(max(1, rows / columns)),
            "match_rms_adamw" by 0.2 * sqrt(max(rows, columns)), for AdamW's rates.
    """
    if len(ns_coefficients) != 3:
        raise ValueError(f"muon: ns_coefficients has {len(ns_coefficients)} numbers; it must have three")
    if adjust_lr_fn not in (None, "original", "match_rms_adamw"):
        raise ValueError(f'muon: adjust_lr_fn is "{adjust_lr_fn}"; it must be "original" or "match_rms_adamw"')

    def init(parameters: Any) -> MuonState:
        for leaf in jax.tree.leaves(parameters):
            if leaf.ndim != 2:
                raise ValueError(
                    f"muon: a parameter has shape {list(leaf.shape)}; it takes matrices, give others to adamw"
                )
        return MuonState(jnp.zeros((), jnp.int32), jax.tree.map(jnp.zeros_like, parameters))

    def step(parameters: Any, gradients: Any, state: MuonState) -> tuple[Any, MuonState]:
        leaves, tree = jax.tree.flatten(parameters)
        grads = leaves_like("muon", tree, gradients, "gradients")
        momenta = leaves_like("muon", tree, state.momentum, "the state")
        rate = learning_rate(state.count) if callable(learning_rate) else learning_rate
        alike: dict[Any, list[int]] = {}
        for place, leaf in enumerate(leaves):
            alike.setdefault((leaf.shape, leaf.dtype), []).append(place)
        for ((rows, columns), dtype), places in alike.items():
            mixed = [_mixed(momenta[i], grads[i].astype(dtype), 1 - momentum) for i in places]
            directions = [_mixed(grads[i].astype(dtype), one, momentum) for i, one in zip(places, mixed)]
            stacked = jnp.stack(directions if nesterov else mixed)
            updates = _orthogonalized(stacked, ns_coefficients, ns_steps, eps).astype(dtype)
            if adjust_lr_fn == "match_rms_adamw":
                factor = 0.2 * math.sqrt(max(rows, columns))
            else:
                factor = math.sqrt(max(1, rows / columns)) if columns else 1.0
            for place, average, change in zip(places, mixed, updates):
                decayed = leaves[place] * jnp.asarray(1 - rate * weight_decay, dtype)
                leaves[place] = decayed - jnp.asarray(rate * factor, dtype) * change
                momenta[place] = average
        return jax.tree.unflatten(tree, leaves), MuonState(state.count + 1, jax.tree.unflatten(tree, momenta))

    return Optimizer(init, update_of("muon", step), step)


def _mixed(start: Any, end: Any, weight: float) -> Any:
    return start + jnp.asarray(weight, start.dtype) * (end - start)


def _sum(a: float, x: Any, b: float, y: Any) -> Any:
    """a x + b y, rounded once."""
    return (a * x.astype(jnp.float32) + b * y.astype(jnp.float32)).astype(x.dtype)


def _orthogonalized(matrices: Any, coefficients: tuple[float, float, float], steps: int, eps: float) -> Any:
    """Matrices [count, rows, columns] with singular values near 1, in bf16: `steps` Newton-Schulz steps
    x -> a x + (b x x^T + c (x x^T)^2) x from x over its norm."""
    a, b, c = coefficients
    x = matrices.astype(jnp.bfloat16)
    is_tall = x.shape[-2] > x.shape[-1]
    if is_tall:
        x = jnp.swapaxes(x, -1, -2)  # the product of the short side with itself is the smaller one
    norm = jnp.sqrt(jnp.square(x.astype(jnp.float32)).sum((-2, -1), keepdims=True))
    x = (x / jnp.maximum(norm, eps)).astype(jnp.bfloat16)
    for _ in range(steps):
        gram = matmul(x, jnp.swapaxes(x, -1, -2))
        polynomial = _sum(b, gram, c, matmul(gram, gram))
        x = _sum(1.0, matmul(polynomial, x), a, x)
    return jnp.swapaxes(x, -1, -2) if is_tall else x
