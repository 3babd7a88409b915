"""Declares an op to torch, by its list of fields in the core (kernel_pytorch/ops/<op>/<op>.h) and its gradient formula.

A differentiable op is three ops of the library: `<op>` returns the results, `<op>_forward` the results and whatever
else its gradient needs, and `<op>_backward` computes the gradient. `differentiable` and `backward` register shape
functions, gradients and batching rules for them and return functions to call. CONTRIBUTING.md has an example.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ... import _torch as _torch  # loads the library
from . import flops as flops  # registers what products count
from .autograd import (
    eager,
    last_derivative,
    make_call,
    make_function,
    needs_gradient,
    register_gradient,
    wants_gradient,
)
from .batching import BatchingRule, register_vmap
from .border import pass_autograd, refuse_lazy_writes, register_shapes
from .declared import declared, parameters_of, saves_of, shapes_of, sums_of
from .node import Node, schema_of

Call = Callable[..., Any]
Gradient = Callable[[tuple[Tensor | None, ...], tuple[Any, ...], tuple[bool, ...]], Sequence[Tensor | None]]


def differentiable(
    op: str,
    *,
    gradient: Gradient | None = None,
    gradient_call: Call | None = None,
    saves: Sequence[str] = (),
    name: str | None = None,
    instead: str | None = None,
) -> Call:
    """The function (arguments of the schema) -> results of `<op>` and `<op>_forward`, by the cheapest route.

    Args:
        op: the name of the op that returns the results alone.
        gradient: where it is more than the call of a backward op: (gradients of the results, saved values, wanted) ->
            gradients of the tensor arguments, in order. `wanted` has one entry per tensor argument; what is not wanted
            is dropped. A gradient of one of several results is None where that result was not used. A list of tensors
            has a list of both, and none (False) where no tensor of it wants a gradient.
        gradient_call: what `backward` returned for the op that computes the gradient, where that is not `<op>_backward`
            or a module needs it too. A node then calls that op itself, without a formula's Python around it: on a GPU
            backward runs on a thread of autograd's, whose caches know none of it.
        saves: arguments and outputs of `<op>_forward` that the formula needs besides those of the backward op, by name;
            an output without a name is called "output". Saved values are tensors before numbers before lists.
        name: what errors call the op, where that is not `op`.
        instead: what to use, as errors say, for derivatives that this op has not.
    """
    results_only, forward, plain = _overload(op), _overload(f"{op}_forward"), _overload(f"{op}_forward", "plain")
    if gradient is None and gradient_call is None:
        gradient_call = backward(op, name=name, instead=instead)
    gradient_op = getattr(gradient_call, "op", f"{op}_backward")
    saves = saves_of(f"{op}_forward", gradient_op, saves)
    schema = schema_of(forward, len(results_only._schema.returns))
    direct = None if gradient_call is None else (gradient_op, eager(_overload(gradient_op)), gradient_call)
    node = Node(schema, saves, eager(plain), gradient, direct)
    rule = _batching_rule(f"{op}_forward")

    def results_below_vmap(*args: Any) -> Any:
        # Below a vmap gradients may be wanted although the mapped tensor says that they are not.
        if not wants_gradient(*args):
            return results_only(*args)
        outputs = forward(*args)
        if schema.results == len(schema.outputs):
            return outputs
        return outputs[0] if schema.results == 1 else outputs[: schema.results]

    @functools.cache  # few processes transform the op
    def function() -> Any:
        return make_function(name or op, node, rule, instead)

    for overload, its_name in ((results_only, op), (forward, f"{op}_forward"), (plain, f"{op}_forward")):
        register_shapes(overload, shapes_of(its_name), name)
    pass_autograd(plain)
    register_vmap(results_only, results_below_vmap, rule)
    register_vmap(forward, forward, rule)
    register_gradient(forward, node, function)
    return make_call(name or op, node, results_only, forward, function)


def backward(op: str, *, name: str | None = None, instead: str | None = None) -> Call:
    """The function (arguments of the schema) -> outputs of `<op>_backward`; its own derivative raises.

    Args:
        op, name, instead: as for `differentiable`.
    """
    overload, rule = _overload(f"{op}_backward"), _batching_rule(f"{op}_backward")
    register_shapes(overload, shapes_of(f"{op}_backward"), f"{name} backward" if name else None)
    register_vmap(overload, overload, rule)
    call: Any = last_derivative(name or op, overload, rule, instead)
    call.op = f"{op}_backward"
    return call  # type: ignore[no-any-return]


def without_gradient(op: str, *, name: str | None = None) -> Call:
    """The function (arguments of the schema) -> outputs of an op that is no part of any graph.

    That is one whose result has no derivative, or one that writes into its arguments (`Tensor(a!) x` in its schema,
    which returns nothing). A call that would need a gradient raises: autograd would drop it silently.
    """
    overload = _overload(op)
    call = eager(overload)
    written = [i for i, argument in enumerate(overload._schema.arguments) if _is_written(argument)]
    register_shapes(overload, shapes_of(op), name)
    if written:
        refuse_lazy_writes(overload, written, name)
    else:
        register_vmap(overload, overload, _batching_rule(op))

    def refuse() -> None:
        what = "writes into its arguments" if written else "has no gradient"
        raise RuntimeError(f"{name or op}: it {what}; detach the arguments or call it under torch.no_grad()")

    def run(*args: Any) -> Any:
        if torch.compiler.is_compiling():
            return refuse() if wants_gradient(*args) else overload(*args)
        if needs_gradient(*args):
            refuse()
        outputs = call(*args)
        for i in written:  # so that autograd notices a change of what it has saved
            if args[i] is not None:
                torch.autograd.graph.increment_version(args[i])
        return outputs

    return run


def _overload(op: str, overload: str = "default") -> Any:
    return getattr(getattr(torch.ops.kernel_pytorch, op), overload)


def _is_written(argument: Any) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write


def _batching_rule(op: str) -> BatchingRule:
    # Random numbers depend on an element's position: a sample has its own call's only where it is its own call.
    arguments = [argument["name"] for argument in declared()[op]["arguments"]]
    per_sample = [*sums_of(op), *(name for name in arguments if name == "seed")]
    return BatchingRule([arguments.index(name) for name in parameters_of(op)], list(map(arguments.index, per_sample)))
