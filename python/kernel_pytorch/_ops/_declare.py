"""Declares an op to torch: what follows from its schema, its shapes, what it saves and its gradient formula.

A differentiable op is three ops of the library: `<op>` returns the results, `<op>_forward` the results and whatever
else its gradient needs, and `<op>_backward` computes the gradient. `differentiable` and `backward` register shape
functions, gradients and batching rules for them and return functions to call. Of an op that the core declares by a list
of fields (kernel_pytorch/ops/<op>/<op>.h) shapes, parameters and what is saved follow from the list.
CONTRIBUTING.md has an example.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .. import _torch as _torch  # loads the library
from . import _flops as _flops  # registers what products count
from ._autograd import (
    eager,
    last_derivative,
    make_call,
    make_function,
    make_node,
    needs_gradient,
    plain_overload,
    register_gradient,
    wants_gradient,
    without_autograd,
)
from ._batching import BatchingRule, register_vmap
from ._border import pass_autograd, refuse_lazy_writes, register_shapes
from ._declared import is_declared, parameters_of, saves_of, shapes_of, sums_of
from ._node import Node, Schema, positions, schema_of

Call = Callable[..., Any]
Gradient = Callable[[tuple[Tensor | None, ...], tuple[Any, ...], tuple[bool, ...]], Sequence[Tensor | None]]


def differentiable(
    op: str,
    *,
    gradient: Gradient | None = None,
    gradient_op: str | None = None,
    gradient_call: Call | None = None,
    shapes: Call | None = None,
    saves: Sequence[str] = (),
    parameters: Sequence[str] = (),
    results_shapes: Call | None = None,
    name: str | None = None,
    instead: str | None = None,
) -> Call:
    """The function (arguments of the schema) -> results of `<op>` and `<op>_forward`, by the cheapest route.

    Of an op that the core declares by a list of fields everything follows from the lists. If its gradient is more than
    the call of `<op>_backward` it needs `gradient`.

    Args:
        op: the name of the op that returns the results alone.
        gradient_op: the declared op that `gradient` calls; None is `<op>_backward`. What is saved is in the order of
            its arguments.
        gradient_call: what `backward` returned for `gradient_op`, where a module needs it too and the gradient is that
            call and nothing else. A node then calls the op itself, without a formula's Python around it:
            on a GPU backward runs on a thread of autograd's, whose caches know none of it.
        shapes: (arguments) -> empty tensors like the outputs of `<op>_forward`, of which the results are the first.
        saves: arguments and outputs of `<op>_forward` that the gradient needs, by name, tensors before numbers before
            lists of tensors; an output without a name is called "output". With gradient_op: those besides its own.
        gradient: (gradients of the results, saved values, wanted) -> gradients of the tensor arguments, in order.
            `wanted` has one entry per tensor argument; what is not wanted is dropped. A gradient of one of several
            results is None where that result was not used. A list of tensors has a list of both, and none (False) where
            no tensor of it wants a gradient.
        parameters: tensor arguments without a batch dimension, which vmap may not fold into (weights, tables). With a
            batch of its own, one of these makes vmap call the op once per sample.
        results_shapes: the same of `<op>`, where its results are not those of `<op>_forward`.
        name: what errors call the op, where that is not `op`.
        instead: what to use, as errors say, for derivatives that this op has not.
    """
    results_only, forward = _overload(op), _overload(f"{op}_forward")
    if is_declared(op):
        shapes, results_shapes = shapes or shapes_of(f"{op}_forward"), results_shapes or shapes_of(op)
        parameters = parameters_of(f"{op}_forward")
    if gradient_op is None and is_declared(f"{op}_backward"):
        gradient_op = f"{op}_backward"
    if gradient_op is not None:
        saves = saves_of(f"{op}_forward", gradient_op, saves)
        if gradient is None and gradient_call is None:
            gradient_call = backward(op, name=name, instead=instead)
    assert shapes is not None, f"{op} is not declared by a list of fields: give its shapes"
    forward_shapes = shapes
    schema = schema_of(forward, len(results_only._schema.returns))
    direct = None if gradient_call is None else (gradient_op, eager(_overload(str(gradient_op))), gradient_call)
    run = without_autograd(forward)
    made = Node(schema, saves, run, gradient, direct)

    def first_shapes(*args: Any) -> Any:
        return _first(forward_shapes(*args), schema)

    def results_below_vmap(*args: Any) -> Any:
        # Below a vmap gradients may be wanted although the mapped tensor says that they are not.
        return _first(forward(*args), schema) if wants_gradient(*args) else results_only(*args)

    register_shapes(results_only, results_shapes or first_shapes, name)
    register_shapes(forward, forward_shapes, name)
    if (plain := plain_overload(forward)) is not None:
        register_shapes(plain, forward_shapes, name)
        pass_autograd(plain)
    rule = _batching_rule(op, schema.arguments, parameters)
    register_vmap(results_only, results_below_vmap, rule)
    register_vmap(forward, forward, rule)

    def eager_node() -> Any:
        return make_node(name or op, *made.eager())

    keep, differentiate = made.keep(), made.backward()
    function = make_function(name or op, run, keep, differentiate, rule, instead)
    register_gradient(forward, schema, run, function, keep, differentiate)
    return make_call(schema, results_only, forward, eager_node, function)


def backward(
    op: str,
    *,
    shapes: Call | None = None,
    parameters: Sequence[str] = (),
    per_sample: Sequence[str] = (),
    name: str | None = None,
    instead: str | None = None,
) -> Call:
    """The function (arguments of the schema) -> outputs of `<op>_backward`; its own derivative raises.

    Args:
        op, shapes, parameters, name, instead: as for `differentiable`; all but `op` and `instead` follow from the list
            of fields of an op that the core declares.
        per_sample: flags of the schema that ask for a sum over all rows (a parameter's gradient). Under vmap each
            sample has a sum of its own: where a flag is set the op is called once per sample.
    """
    overload = _overload(f"{op}_backward")
    if is_declared(f"{op}_backward"):
        shapes, parameters = shapes or shapes_of(f"{op}_backward"), parameters_of(f"{op}_backward")
        per_sample = sums_of(f"{op}_backward")
    assert shapes is not None, f"{op}_backward is not declared by a list of fields: give its shapes"
    rule = _batching_rule(f"{op}_backward", _arguments(overload), parameters, per_sample)
    register_shapes(overload, shapes, f"{name} backward" if name else None)
    register_vmap(overload, overload, rule)
    return last_derivative(name or op, overload, rule, instead)


def without_gradient(
    op: str, *, shapes: Call | None = None, parameters: Sequence[str] = (), name: str | None = None
) -> Call:
    """The function (arguments of the schema) -> outputs of an op that is no part of any graph.

    That is one whose result has no derivative, or one that writes into its arguments (`Tensor(a!) x` in its schema,
    which returns nothing). A call that would need a gradient raises: autograd would drop it silently.
    """
    overload = _overload(op)
    call = eager(overload)
    written = [i for i, argument in enumerate(overload._schema.arguments) if _is_written(argument)]
    if is_declared(op):
        shapes, parameters = shapes or shapes_of(op), parameters_of(op)
    register_shapes(overload, shapes or (lambda *_: None), name)
    if written:
        refuse_lazy_writes(overload, written, name)
    else:
        register_vmap(overload, overload, _batching_rule(op, _arguments(overload), parameters))

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


def _overload(op: str) -> Any:
    return getattr(torch.ops.kernel_pytorch, op).default


def _arguments(overload: Any) -> list[str]:
    return [argument.name for argument in overload._schema.arguments]


def _is_written(argument: Any) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write


def _batching_rule(
    op: str, arguments: Sequence[str], parameters: Sequence[str], per_sample: Sequence[str] = ()
) -> BatchingRule:
    # Random numbers depend on an element's position: a sample has its own call's only where it is its own call.
    seeds = [name for name in arguments if name == "seed"]
    return BatchingRule(positions(op, arguments, parameters), positions(op, arguments, [*per_sample, *seeds]))


def _first(output: Any, schema: Schema) -> Any:
    if schema.results == len(schema.outputs):
        return output
    return output[0] if schema.results == 1 else output[: schema.results]
