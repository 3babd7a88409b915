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

from ._call import call, int64_words

__all__ = ["AdamW", "AdamWState", "adamw"]


class AdamWState(NamedTuple):
    count: Any  # steps taken, int32
    exp_avg: Any  # trees like the parameters
    exp_avg_sq: Any
    max_exp_avg_sq: Any = None  # with amsgrad
    masters: Any = None  # with master_weights: fp32 copies of 16-bit parameters, scalars in place of the others


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
    amsgrad: bool = False,
    maximize: bool = False,
    state_dtype: Any = jnp.float32,
    master_weights: bool = False,
    stochastic_rounding: bool = False,
    seed: int = 0,
) -> AdamW:
    """AdamW: parameter -= rate * (corrected average / (sqrt(corrected average of squares) + eps) + decay * parameter).

    Args:
        learning_rate: a number, or a function of the step's number from 0 on, as optax's schedules are.
        weight_decay: of every parameter; optax's default is 1e-4, torch's and this one 1e-2.
        max_norm: gradients are scaled so that the norm of all of them is at most this.
        amsgrad: the largest average of squares so far is used. maximize: steps go up the gradients.
        state_dtype: type of the averages: fp32 (fp64 for fp64), bf16 or fp16; None: the parameter's.
        master_weights: 16-bit parameters have fp32 copies in the state, which are updated and rounded to them.
        stochastic_rounding: 16-bit parameters are rounded up or down by chance, as the seed and the step's number say,
            so that small steps count on average; without copies.

    In a program that is donated parameters and state, in this order, and returns
    them in it, `step` works in place: JAX pairs donated arrays with results of their shape in order.
    """

    if master_weights and stochastic_rounding:
        raise ValueError(
            "adamw: master_weights and stochastic_rounding are given; masters are never rounded, choose one"
        )

    def init(parameters: Any) -> AdamWState:
        def zeros() -> Any:
            return jax.tree.map(lambda one: jnp.zeros(one.shape, _average_type(one, state_dtype)), parameters)

        def master(one: Any) -> Any:
            return one.astype(jnp.float32) if _is_narrow(one) else jnp.zeros((), jnp.float32)

        masters = jax.tree.map(master, parameters) if master_weights else None
        return AdamWState(jnp.zeros((), jnp.int32), zeros(), zeros(), zeros() if amsgrad else None, masters)

    def step(parameters: Any, gradients: Any, state: AdamWState) -> tuple[Any, AdamWState]:
        leaves, tree = jax.tree.flatten(parameters)
        grads = _leaves_like(tree, gradients, "gradients")
        lists = {"parameters": leaves}
        trees = {"firsts": state.exp_avg, "seconds": state.exp_avg_sq, "maxima": state.max_exp_avg_sq}
        for name, one in (trees | {"masters": state.masters}).items():
            if one is not None:
                lists[name] = _leaves_like(tree, one, "the state")
        tensors: dict[str, Any] = {}
        options = {"beta1": b1, "beta2": b2, "eps": eps, "weight_decay": weight_decay, "max_norm": max_norm or 0.0}
        options["maximize"] = maximize
        if callable(learning_rate):
            tensors["lr_tensor"] = jnp.asarray(learning_rate(state.count), jnp.float32).reshape(())
        else:
            options["lr"] = float(learning_rate)
        if max_norm is not None and leaves:
            tensors["total_norm"] = call("reduce_norm", {"tensors": grads})["output"].astype(jnp.float32)
        for group, places in enumerate(_by_type(leaves)):
            is_narrow = _is_narrow(leaves[places[0]])
            taken = {
                name: [one[place] for place in places] for name, one in lists.items() if name != "masters" or is_narrow
            }
            if stochastic_rounding and is_narrow:
                tensors["seed"] = int64_words(jnp.stack([jnp.int32(seed + group), state.count]))
            narrow = [grads[place].astype(leaves[place].dtype) for place in places]
            steps = [state.count.astype(jnp.float32)] * len(places)
            made = call("optimizer_step_", {**taken, "gradients": narrow, "steps": steps, **tensors}, options)
            tensors.pop("seed", None)
            for name in taken:
                for place, value in zip(places, made[name]):
                    lists[name][place] = value
        changed, *others = (
            jax.tree.unflatten(tree, lists[name]) if name in lists else None
            for name in ("parameters", *trees, "masters")
        )
        return changed, AdamWState(state.count + 1, *others)

    def update(gradients: Any, state: AdamWState, params: Any = None, **_: Any) -> tuple[Any, AdamWState]:
        if params is None:
            raise ValueError(
                "adamw: update needs the parameters, since they decay; call update(gradients, state, params)"
            )
        changed, state = step(params, gradients, state)
        return jax.tree.map(lambda new, old: new - old, changed, params), state

    return AdamW(init, update, step)


def _is_narrow(parameter: Any) -> bool:
    return parameter.dtype in (jnp.bfloat16, jnp.float16)


def _average_type(parameter: Any, state_dtype: Any) -> Any:
    return parameter.dtype if state_dtype is None or parameter.dtype == jnp.float64 else state_dtype


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
