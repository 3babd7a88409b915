"""AdamW, Lion and SGD over a tree of parameters: the core steps all parameters of a type and format in one call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ...utils.state_formats import GROUP, STORAGE, check_state, format_of_size, zero_code
from .._call import call, int64_words

Rate = float | Callable[[Any], Any]


class OptimizerState(NamedTuple):
    """Trees like the parameters. A parameter that has no such state has an empty array there; None: none has."""

    count: Any  # steps taken, int32
    exp_avg: Any = None  # SGD's momentum too
    exp_avg_sq: Any = None
    max_exp_avg_sq: Any = None  # with amsgrad
    masters: Any = None  # fp32 copies of 16-bit parameters
    exp_avg_scale: Any = None  # of codes
    exp_avg_sq_scale: Any = None
    corrections: Any = None  # what bf16 parameters lack of 24 bits


# The op's names of them.
_LISTS = {
    "exp_avg": "firsts",
    "exp_avg_sq": "seconds",
    "max_exp_avg_sq": "maxima",
    "masters": "masters",
    "exp_avg_scale": "first_scales",
    "exp_avg_sq_scale": "second_scales",
    "corrections": "corrections",
}


class Optimizer(NamedTuple):
    """`init` and `update` are optax's GradientTransformation; `step` returns the parameters themselves."""

    init: Callable[[Any], Any]
    update: Callable[..., tuple[Any, Any]]
    step: Callable[[Any, Any, Any], tuple[Any, Any]]


def adamw(
    learning_rate: Rate = 1e-3,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 1e-2,
    *,
    max_norm: float | None = None,
    amsgrad: bool = False,
    maximize: bool = False,
    state: str = "fp32",
    state_dtype: Any = jnp.float32,
    master_weights: bool = False,
    stochastic_rounding: bool = False,
    seed: int = 0,
) -> Optimizer:
    """AdamW: parameter -= rate * (corrected average / (sqrt(corrected average of squares) + eps) + decay * parameter).

    Args:
        learning_rate: a number, or a function of the step's number from 0 on, as optax's schedules are.
        weight_decay: of every parameter; optax's default is 1e-4, torch's and this one 1e-2.
        max_norm: gradients are scaled so that the norm of all of them is at most this.
        amsgrad: the largest average of squares so far is used. maximize: steps go up the gradients.
        state: "fp32": averages are of state_dtype. "compact": one byte for each average, and 8 more bits of each bf16
            weight. "8bit": averages as bitsandbytes has them; those of fewer than 4096 elements are fp32.
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
    given = {"amsgrad": amsgrad, "master_weights": master_weights, "stochastic_rounding": stochastic_rounding}
    given["state_dtype"] = state_dtype is None or jnp.dtype(state_dtype) != jnp.float32
    refused = [name for name, is_set in given.items() if is_set]
    if state != "fp32" and refused:
        raise ValueError(f'adamw: {refused[0]} is for state="fp32"; state is "{state}"')
    return _optimizer(
        _Rule(
            "adamw",
            ("exp_avg", "exp_avg_sq", "max_exp_avg_sq") if amsgrad else ("exp_avg", "exp_avg_sq"),
            {"beta1": b1, "beta2": b2, "eps": eps, "weight_decay": weight_decay, "maximize": maximize},
            learning_rate,
            max_norm,
            state,
            state_dtype=state_dtype,
            master_weights=master_weights,
            seed=seed if stochastic_rounding else None,
        )
    )


def lion(
    learning_rate: Rate = 1e-4,
    b1: float = 0.9,
    b2: float = 0.99,
    weight_decay: float = 0.0,
    *,
    max_norm: float | None = None,
    maximize: bool = False,
    state: str = "fp32",
) -> Optimizer:
    """Lion: parameter -= rate * (sign(b1 * average + (1 - b1) * gradient) + decay * parameter), half of AdamW's states.

    Args: as of `adamw`. The rate is three to ten times smaller than AdamW's, the decay larger.
    """
    options = {"beta1": b1, "beta2": b2, "weight_decay": weight_decay, "maximize": maximize}
    return _optimizer(_Rule("lion", ("exp_avg",), options, learning_rate, max_norm, state))


def sgd(
    learning_rate: Rate = 1e-3,
    momentum: float = 0.0,
    nesterov: bool = False,
    *,
    dampening: float = 0.0,
    weight_decay: float = 0.0,
    max_norm: float | None = None,
    maximize: bool = False,
    state: str = "fp32",
) -> Optimizer:
    """SGD with momentum, as torch.optim.SGD: decay is added to the gradient.

    Args: as of `adamw`; momentum, nesterov and dampening as torch's.
    """
    if nesterov and (momentum == 0 or dampening != 0):
        raise ValueError(
            f"sgd: nesterov needs momentum and no dampening; momentum is {momentum}, dampening {dampening}"
        )
    if state != "fp32" and momentum == 0:
        raise ValueError(f'sgd: state is "{state}" without momentum, which has no state; leave it out')
    options = {"beta1": momentum, "weight_decay": weight_decay, "maximize": maximize}
    options |= {"dampening": dampening, "nesterov": nesterov}
    return _optimizer(_Rule("sgd", ("exp_avg",) if momentum else (), options, learning_rate, max_norm, state))


@dataclass(frozen=True)
class _Rule:
    name: str
    averages: tuple[str, ...]
    options: dict[str, Any] = field(hash=False)
    learning_rate: Rate
    max_norm: float | None
    state: str
    state_dtype: Any = jnp.float32
    master_weights: bool = False
    seed: int | None = None  # of stochastic rounding

    def format_of(self, parameter: Any) -> str:
        return format_of_size(parameter.size, self.state)

    def beginnings(self, parameter: Any) -> dict[str, Callable[[], Any]]:
        """The states that this parameter has, and what makes the first of each."""
        form = self.format_of(parameter)
        made: dict[str, Callable[[], Any]] = {}
        for name in self.averages:
            if form == "fp32":
                made[name] = lambda: jnp.zeros(parameter.shape, self.average_type(parameter))
            else:
                code = zero_code(name, form)
                made[name] = lambda code=code: jnp.full(parameter.shape, code, jnp.int8)  # type: ignore[misc]
                made[f"{name}_scale"] = lambda: jnp.zeros(-(-parameter.size // GROUP[form]), jnp.float32)
        if self.master_weights and _is_narrow(parameter):
            made["masters"] = lambda: parameter.astype(jnp.float32)
        if self.state == "compact" and parameter.dtype == jnp.bfloat16:
            made["corrections"] = lambda: jnp.zeros(parameter.shape, jnp.int8)
        return made

    def average_type(self, parameter: Any) -> Any:
        is_own = self.state_dtype is None or parameter.dtype == jnp.float64
        return parameter.dtype if is_own else self.state_dtype


def _optimizer(rule: _Rule) -> Optimizer:
    check_state(rule.name, rule.state)

    def init(parameters: Any) -> OptimizerState:
        leaves, tree = jax.tree.flatten(parameters)
        made = [rule.beginnings(_checked(rule, leaf)) for leaf in leaves]
        names = [name for name in _LISTS if any(name in one for one in made)]
        nothing = jnp.zeros((0,), jnp.float32)
        trees = {
            name: jax.tree.unflatten(tree, [one[name]() if name in one else nothing for one in made]) for name in names
        }
        return OptimizerState(jnp.zeros((), jnp.int32), **trees)

    def step(parameters: Any, gradients: Any, state: OptimizerState) -> tuple[Any, OptimizerState]:
        leaves, tree = jax.tree.flatten(parameters)
        grads = leaves_like(rule.name, tree, gradients, "gradients")
        states = {
            name: leaves_like(rule.name, tree, getattr(state, name), "the state")
            for name in _LISTS
            if getattr(state, name) is not None
        }
        tensors: dict[str, Any] = {}
        options = {**rule.options, "rule": rule.name, "max_norm": rule.max_norm or 0.0}
        if callable(rule.learning_rate):
            tensors["lr_tensor"] = jnp.asarray(rule.learning_rate(state.count), jnp.float32).reshape(())
        else:
            options["lr"] = float(rule.learning_rate)
        if rule.max_norm is not None and leaves:
            tensors["total_norm"] = call("reduce_norm", {"tensors": grads})["output"].astype(jnp.float32)
        for group, places in enumerate(_alike(rule, leaves)):
            first = leaves[places[0]]
            own = {name: states[name] for name in rule.beginnings(first)}
            taken: dict[str, Any] = {_LISTS[name]: [one[place] for place in places] for name, one in own.items()}
            taken["parameters"] = [leaves[place] for place in places]
            taken["gradients"] = [grads[place].astype(first.dtype) for place in places]
            taken["steps"] = [state.count.astype(jnp.float32)] * len(places)
            if rule.seed is not None and _is_narrow(first):
                taken["seed"] = int64_words(jnp.stack([jnp.int32(rule.seed + group), state.count]))
            storage = STORAGE[rule.format_of(first)]
            made = call("optimizer_step_", {**taken, **tensors}, {**options, "storage": storage})
            for name, one in {"parameters": leaves, **{_LISTS[name]: one for name, one in own.items()}}.items():
                for place, value in zip(places, made[name]):
                    one[place] = value
        trees = {name: jax.tree.unflatten(tree, one) for name, one in states.items()}
        return jax.tree.unflatten(tree, leaves), OptimizerState(state.count + 1, **trees)

    return Optimizer(init, update_of(rule.name, step), step)


def update_of(name: str, step: Callable[[Any, Any, Any], tuple[Any, Any]]) -> Callable[..., tuple[Any, Any]]:
    """optax's form: the parameters' changes."""

    def update(gradients: Any, state: Any, params: Any = None, **_: Any) -> tuple[Any, Any]:
        if params is None:
            raise ValueError(
                f"{name}: update needs the parameters, since they decay; call update(gradients, state, params)"
            )
        changed, state = step(params, gradients, state)
        return jax.tree.map(lambda new, old: new - old, changed, params), state

    return update


def leaves_like(owner: str, tree: Any, other: Any, name: str) -> list[Any]:
    leaves, own = jax.tree.flatten(other)
    if own != tree:
        raise ValueError(f"{owner}: {name} are the tree {own}, the parameters {tree}; they must be alike")
    return leaves


def _checked(rule: _Rule, parameter: Any) -> Any:
    wide = (jnp.float64,) if rule.name == "adamw" and rule.state == "fp32" else ()
    if parameter.dtype not in (jnp.float32, jnp.bfloat16, jnp.float16, *wide):
        raise TypeError(
            f'{rule.name}: a parameter is {parameter.dtype}; with state="{rule.state}" it must be fp32, bf16 or fp16'
        )
    return parameter


def _is_narrow(parameter: Any) -> bool:
    return parameter.dtype in (jnp.bfloat16, jnp.float16)


def _alike(rule: _Rule, leaves: list[Any]) -> list[list[int]]:
    """Places of the leaves, those of one type and format together, as the op takes them."""
    places: dict[Any, list[int]] = {}
    for place, leaf in enumerate(leaves):
        places.setdefault((leaf.dtype, rule.format_of(leaf)), []).append(place)
    return list(places.values())
