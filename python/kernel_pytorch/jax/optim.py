"""AdamW over a whole tree of parameters in one call, as a gradient transformation of optax's form. optax is not needed.

optimizer = adamw(3e-4)
state = optimizer.init(parameters)
parameters, state = optimizer.step(parameters, gradients, state)   # one pass; donate parameters and state
updates, state = optimizer.update(gradients, state, parameters)    # for optax.chain and apply_updates
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ._call import call

__all__ = ["AdamW", "AdamWState", "adamw"]


class AdamWState(NamedTuple):
    count: Any  # steps taken, int32
    exp_avg: Any  # trees like the parameters
    exp_avg_sq: Any


class AdamW(NamedTuple):
    """`init` and `update` are optax's GradientTransformation; `step` returns the parameters themselves."""

    init: Callable[[Any], AdamWState]
    update: Callable[..., tuple[Any, AdamWState]]
    step: Callable[[Any, Any, AdamWState], tuple[Any, AdamWState]]


def adamw(
    learning_rate: float | Callable[[Any], Any] = 1e-3,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 1e-2,
    *,
    max_norm: float | None = None,
) -> AdamW:
    """AdamW: parameter -= rate * (corrected average / (sqrt(corrected average of squares) + eps) + decay * parameter).

    Args:
        learning_rate: a number, or a function of the step's number from 0 on, as optax's schedules are.
        weight_decay: of every parameter; optax's default is 1e-4, torch's and this one 1e-2.
        max_norm: gradients are scaled so that the norm of all of them is at most this.

    Averages are fp32, and fp64 for fp64. In a program that is donated parameters and state, in this order, and returns
    them in it, `step` works in place: JAX pairs donated arrays with results of their shape in order.
    """

    def init(parameters: Any) -> AdamWState:
        def zeros() -> Any:
            return jax.tree.map(lambda one: jnp.zeros(one.shape, _average_type(one)), parameters)

        return AdamWState(jnp.zeros((), jnp.int32), zeros(), zeros())

    def step(parameters: Any, gradients: Any, state: AdamWState) -> tuple[Any, AdamWState]:
        leaves, tree = jax.tree.flatten(parameters)
        grads = _leaves_like(tree, gradients, "gradients")
        averages, squares = (_leaves_like(tree, one, "the state") for one in (state.exp_avg, state.exp_avg_sq))
        tensors: dict[str, Any] = {}
        options = {"beta1": b1, "beta2": b2, "eps": eps, "weight_decay": weight_decay, "max_norm": max_norm or 0.0}
        if callable(learning_rate):
            tensors["lr_tensor"] = jnp.asarray(learning_rate(state.count), jnp.float32).reshape(())
        else:
            options["lr"] = float(learning_rate)
        if max_norm is not None and leaves:
            tensors["total_norm"] = call("reduce_norm", {"tensors": grads})["output"].astype(jnp.float32)
        for places in _by_type(leaves):

            def part(of: list[Any], places: list[int] = places) -> list[Any]:
                return [of[place] for place in places]

            made = call(
                "adamw_",
                {
                    "parameters": part(leaves),
                    "gradients": [grad.astype(leaf.dtype) for grad, leaf in zip(part(grads), part(leaves))],
                    "exp_avgs": part(averages),
                    "exp_avg_sqs": part(squares),
                    "steps": [state.count.astype(jnp.float32)] * len(places),
                    **tensors,
                },
                options,
            )
            for which, names in ((leaves, "parameters"), (averages, "exp_avgs"), (squares, "exp_avg_sqs")):
                for place, value in zip(places, made[names]):
                    which[place] = value
        changed, average, square = (jax.tree.unflatten(tree, one) for one in (leaves, averages, squares))
        return changed, AdamWState(state.count + 1, average, square)

    def update(gradients: Any, state: AdamWState, params: Any = None, **_: Any) -> tuple[Any, AdamWState]:
        if params is None:
            raise ValueError(
                "adamw: update needs the parameters, since they decay; call update(gradients, state, params)"
            )
        changed, state = step(params, gradients, state)
        return jax.tree.map(lambda new, old: new - old, changed, params), state

    return AdamW(init, update, step)


def _average_type(parameter: Any) -> Any:
    return jnp.float64 if parameter.dtype == jnp.float64 else jnp.float32


def _leaves_like(tree: Any, other: Any, name: str) -> list[Any]:
    leaves, own = jax.tree.flatten(other)
    if own != tree:
        raise ValueError(f"adamw: {name} are the tree {own}, the parameters {tree}; they must be alike")
    return leaves


def _by_type(leaves: list[Any]) -> list[list[int]]:
    """Places of the leaves, those of one type together, as the op takes them."""
    places: dict[Any, list[int]] = {}
    for place, leaf in enumerate(leaves):
        places.setdefault(leaf.dtype, []).append(place)
    return list(places.values())
