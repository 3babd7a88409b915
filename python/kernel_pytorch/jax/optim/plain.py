"""Steps of plain states in plain jnp, for platforms without kernels (see _plain.py)."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from .._plain import NoFormula, Values, formula, widened


@formula("reduce_norm")
def _norm(values: Values) -> dict[str, Any]:
    return {"output": jnp.sqrt(sum(jnp.square(widened(one)).sum() for one in values["tensors"]))}


@formula("optimizer_step_")
def _step(values: Values) -> dict[str, Any]:
    """Parameters and states after a step, as ops/optimizer_step/optimizer_step.h has the rules."""
    if values["storage"] != "plain" or "seed" in values:
        raise NoFormula
    lists = [name for name in ("parameters", "masters", "firsts", "seconds", "maxima") if name in values]
    factor: Any = 1.0
    if "total_norm" in values:
        factor = jnp.minimum(1.0, values["max_norm"] / (values["total_norm"] + 1e-6))
    made: dict[str, list[Any]] = {name: [] for name in lists}
    for place, gradient in enumerate(values["gradients"]):
        one = {name: values[name][place] for name in lists}
        wide = {name: widened(value) for name, value in one.items()}
        sign = -1.0 if values["maximize"] else 1.0
        changed = _RULES[values["rule"]](values, wide, sign * factor * widened(gradient), values["steps"][place])
        for name in lists:
            source = changed["parameters"] if name == "masters" else changed[name]
            made[name].append(source.astype(one[name].dtype))
    return made


def _rate(values: Values) -> Any:
    return values.get("lr_tensor", values.get("lr"))


def _adamw(values: Values, wide: dict[str, Any], gradient: Any, taken: Any) -> dict[str, Any]:
    beta1, beta2, rate = values["beta1"], values["beta2"], _rate(values)
    first = wide["firsts"] + (1 - beta1) * (gradient - wide["firsts"])
    second = beta2 * wide["seconds"] + (1 - beta2) * gradient * gradient
    changed = {"firsts": first, "seconds": second}
    if "maxima" in wide:
        changed["maxima"] = jnp.maximum(wide["maxima"], second)
    root = jnp.sqrt(changed.get("maxima", second)) / jnp.sqrt(1 - beta2 ** (taken + 1))
    parameter = wide.get("masters", wide["parameters"]) * (1 - rate * values["weight_decay"])
    changed["parameters"] = parameter - rate / (1 - beta1 ** (taken + 1)) * first / (root + values["eps"])
    return changed


def _lion(values: Values, wide: dict[str, Any], gradient: Any, taken: Any) -> dict[str, Any]:
    first, rate = wide["firsts"], _rate(values)
    direction = jnp.sign(first + (1 - values["beta1"]) * (gradient - first))
    parameter = wide["parameters"] * (1 - rate * values["weight_decay"]) - rate * direction
    return {"parameters": parameter, "firsts": first + (1 - values["beta2"]) * (gradient - first)}


def _sgd(values: Values, wide: dict[str, Any], gradient: Any, taken: Any) -> dict[str, Any]:
    gradient = gradient + values["weight_decay"] * wide["parameters"]
    if "firsts" not in wide:
        return {"parameters": wide["parameters"] - _rate(values) * gradient}
    later = values["beta1"] * wide["firsts"] + (1 - values["dampening"]) * gradient
    first = jnp.where(taken == 0, gradient, later)
    direction = gradient + values["beta1"] * first if values["nesterov"] else first
    return {"parameters": wide["parameters"] - _rate(values) * direction, "firsts": first}


_RULES = {"adamw": _adamw, "lion": _lion, "sgd": _sgd}
