"""Ops with gradients: a jax.custom_vjp for each set of static arguments, from the lists of forward and backward."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import SymbolicZero

from .._shape_rules import declared
from . import _plain
from ._call import call, kernels_in_use, made_once, using_kernels
from ._forward_mode import guarded
from ._sharding import placed, spec_of

# (saved values by name, gradients of the results by name, names of the tensors whose gradient is wanted)
# -> gradients by name
Formula = Callable[[Mapping[str, Any], Mapping[str, Any], Sequence[str]], Mapping[str, Any]]

# What forward keeps for backward has this name for jax.checkpoint's policies.
RESIDUALS = "kernel_pytorch_residuals"


@jax.tree_util.register_pytree_node_class
class _Saved:
    """Arrays for backward; what else it needs to know is static."""

    def __init__(self, arrays: dict[str, Any], wanted: dict[str, Any]) -> None:
        self.arrays = arrays
        self.wanted = wanted  # tensors whose gradient is wanted, with their types and places on a mesh

    def tree_flatten(self) -> tuple[Any, Any]:
        return list(self.arrays.values()), (tuple(self.arrays), tuple(self.wanted.items()))

    @classmethod
    def tree_unflatten(cls, static: Any, arrays: Any) -> _Saved:
        names, wanted = static
        return cls(dict(zip(names, arrays)), dict(wanted))


def differentiable(
    op: str,
    tensors: Mapping[str, Any],
    options: Mapping[str, Any],
    formula: Formula,
    *,
    results: Sequence[str] = ("output",),
    saves: Sequence[str] = (),
    types: Mapping[str, Any] | None = None,
    wanted: Sequence[str] = (),
    forward_flags: Sequence[str] = (),
    forward_wanted: Sequence[str] = (),
) -> tuple[Any, ...]:
    """Results of `<op>`, whose gradient is `formula` of what `<op>_forward` took and returned.

    Args:
        tensors, options, types, wanted: as for `call`.
        results: outputs to return, in order; an argument's name returns that argument.
        saves: arguments and outputs that the formula reads.
        forward_flags, forward_wanted: options and flags that ask for outputs, set where there is a gradient: what
            forward computes for it.
    """
    values = {**tensors, **options, **(types or {}), "op": op}
    plain = _plain.computed(op, values)
    if plain is not None:
        known = {**values, **plain}
        return tuple(known[name] for name in results)
    given: dict[str, Any] = {}
    for name, value in tensors.items():
        if isinstance(value, list | tuple):
            given |= {f"{name}:{i}": one for i, one in enumerate(value)}
        elif value is not None:
            given[name] = value
    function = _function(
        op,
        tuple(given),
        tuple(sorted((name, value) for name, value in options.items() if value is not None)),
        tuple(sorted((name, jnp.dtype(value)) for name, value in (types or {}).items() if value is not None)),
        tuple(wanted),
        tuple(forward_flags),
        tuple(forward_wanted),
        tuple(results),
        tuple(saves),
        formula,
        kernels_in_use(),
    )
    return function(*(guarded(op, one) for one in given.values()))  # type: ignore[no-any-return]


def _with_lists(values: Mapping[str, Any]) -> dict[str, Any]:
    """Arrays by name, those of a list, "name:0" and so on, together."""
    grouped: dict[str, Any] = {}
    for name, value in values.items():
        name, colon, _ = name.partition(":")
        if colon:
            grouped.setdefault(name, []).append(value)
        else:
            grouped[name] = value
    return grouped


@made_once
def _function(
    op: str,
    names: Any,
    options: Any,
    types: Any,
    wanted: Any,
    forward_flags: Any,
    forward_wanted: Any,
    results: Any,
    saves: Any,
    formula: Formula,
    kernels: Any,
) -> Any:
    static = dict(options)
    computed = {output["name"] for output in declared()[f"{op}_forward"]["outputs"]}

    def outputs_of(which: str, arrays: Sequence[Any], flags: Sequence[str], asked: Sequence[str]) -> dict[str, Any]:
        set_flags = dict.fromkeys(flags, True)
        with using_kernels(dict(kernels)):
            tensors = _with_lists(dict(zip(names, arrays)))
            return call(which, tensors, static | set_flags, types=dict(types), wanted=asked)

    @jax.custom_vjp
    def function(*arrays: Any) -> tuple[Any, ...]:
        known = {**dict(zip(names, arrays)), **outputs_of(op, arrays, (), wanted)}
        return tuple(known[name] for name in results)

    def forward(*primals: Any) -> tuple[Any, _Saved]:
        arrays = [primal.value for primal in primals]
        needed = {
            name: (primal.value.dtype, spec_of(primal.value))
            for name, primal in zip(names, primals)
            if primal.perturbed
            and jnp.issubdtype(primal.value.dtype, jnp.inexact)  # what another op returned may be integers
        }
        if not computed.intersection(saves):  # nothing is computed for backward: this call may be differentiated again
            kept = {name: one for name, one in zip(names, arrays) if name.partition(":")[0] in saves}
            return function(*arrays), _Saved(kept, needed)
        asked = tuple(dict.fromkeys((*wanted, *forward_wanted)))
        outputs = outputs_of(f"{op}_forward", arrays, forward_flags, asked)
        known = {**dict(zip(names, arrays)), **outputs}
        kept = {
            name: checkpoint_name(known[name], RESIDUALS) if name in outputs else known[name]
            for name in known
            if name.partition(":")[0] in saves
        }
        return tuple(known[name] for name in results), _Saved(kept, needed)

    def backward(saved: _Saved, grads: Sequence[Any]) -> tuple[Any, ...]:
        present = {name: grad for name, grad in zip(results, grads) if not isinstance(grad, SymbolicZero)}
        if not present or not saved.wanted:
            return (None,) * len(names)
        values = {**static, **_with_lists(saved.arrays)}
        with using_kernels(dict(kernels)):
            gradients = formula(values, present, tuple(saved.wanted))
        for name in saved.wanted:
            if gradients.get(name) is None:
                raise NotImplementedError(
                    f"{op}: {name} has no gradient, and one is asked for; give jax.lax.stop_gradient({name})"
                )

        def finished(name: str) -> Any:
            dtype, spec = saved.wanted[name]
            return placed(gradients[name].astype(dtype), spec)

        return tuple(finished(name) if name in saved.wanted else None for name in names)

    function.defvjp(forward, backward, symbolic_zeros=True)
    return function
