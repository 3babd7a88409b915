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
    run_source,
    wants_gradient,
)
from ._batching import BatchingRule, register_vmap
from ._border import refuse_lazy_writes, register_shapes
from ._declared import declared, is_declared, parameters_of, saves_of, shapes_of, sums_of

Call = Callable[..., Any]
Gradient = Callable[[tuple[Tensor | None, ...], tuple[Any, ...], tuple[bool, ...]], Sequence[Tensor | None]]

# What a node does, written out for the reason given in _autograd.py: forward of the eager one, setup_context of the one
# for transforms, backward of both.
_NODE_SOURCE = """
def make(call, below_autograd, gradient, gradient_op, is_grad_enabled, split, like_list):
    def forward(ctx, {inputs}):
        with below_autograd():
            {outputs} = call({inputs})
        ctx.save_for_backward({saved_tensors})
        ctx.numbers = ({saved_numbers})
        {keep_counts}
        ctx.set_materialize_grads(False)
        return {results}

    def keep(ctx, inputs, output):
        {inputs}, = inputs
        {outputs} = output
        ctx.save_for_backward({saved_tensors})
        ctx.numbers = ({saved_numbers})
        {keep_counts}
        {mark_non_differentiable}
        ctx.set_materialize_grads(False)

    def differentiate(ctx, {grads}*_):
        needed = ctx.needs_input_grad
        if {no_grad}:
            return {no_gradients}
        {unpack}
        {gradients} = {formula}
        return ({returned})
    return forward, keep, differentiate
"""


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

    An op that the core declares by a list of fields needs `gradient_op` and one of `gradient` and `gradient_call`
    alone: shapes, saves and parameters follow from the lists.

    Args:
        op: the name of the op that returns the results alone.
        gradient_op: the declared op that `gradient` calls. What is saved is in the order of its arguments.
        gradient_call: what `backward` returned for `gradient_op`, where the gradient is that call and nothing else.
            It takes the place of `gradient`. A node then calls the op itself, without a formula's Python around it:
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
    if gradient_op is not None:
        saves = saves_of(f"{op}_forward", gradient_op, saves)
    assert shapes is not None, f"{op} is not declared by a list of fields: give its shapes"
    forward_shapes = shapes
    arguments, tensors, lists = _arguments(forward), _tensor_positions(forward), _list_positions(forward)
    results, outputs = len(results_only._schema.returns), len(forward._schema.returns)
    run, keep, differentiate = _node_functions(forward, results, saves, gradient, gradient_op, gradient_call)

    def first_shapes(*args: Any) -> Any:
        return _first(forward_shapes(*args), results, outputs)

    def results_below_vmap(*args: Any) -> Any:
        # Below a vmap gradients may be wanted although the mapped tensor says that they are not.
        return _first(forward(*args), results, outputs) if wants_gradient(*args) else results_only(*args)

    library: Any = torch.library
    register_shapes(results_only, results_shapes or first_shapes, name)
    register_shapes(forward, forward_shapes, name)
    library.register_autograd(forward, differentiate, setup_context=keep)
    rule = _batching_rule(op, arguments, parameters)
    register_vmap(results_only, results_below_vmap, rule)
    register_vmap(forward, forward, rule)
    node = make_node(name or op, run, differentiate)
    function = make_function(name or op, forward, keep, differentiate, rule, instead)
    picked = "" if results == outputs else "[0]" if results == 1 else f"[:{results}]"
    return make_call(arguments, tensors, lists, picked, results_only, forward, node, function)


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

    def run(*args: Any) -> Any:
        if wants_gradient(*args):
            what = "writes into its arguments" if written else "has no gradient"
            raise RuntimeError(f"{name or op}: it {what}; detach the arguments or call it under torch.no_grad()")
        if torch.compiler.is_compiling():
            return overload(*args)
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


def _output_names(overload: Any) -> list[str]:
    return [output.name or "output" for output in overload._schema.returns]


def _tensor_positions(overload: Any) -> list[int]:
    tensors = (torch.TensorType.get(), torch.OptionalType.ofTensor())
    return [i for i, argument in enumerate(overload._schema.arguments) if argument.type in tensors]


def _list_positions(overload: Any) -> list[int]:
    return [i for i, argument in enumerate(overload._schema.arguments) if argument.type == torch.ListType.ofTensors()]


def _is_written(argument: Any) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write


def _positions(op: str, names: Sequence[str], chosen: Sequence[str]) -> list[int]:
    unknown = [name for name in chosen if name not in names]
    if unknown:
        raise ValueError(f"{op}: its schema has no {unknown[0]!r}, only {list(names)}")
    return [names.index(name) for name in chosen]


def _batching_rule(
    op: str, arguments: Sequence[str], parameters: Sequence[str], per_sample: Sequence[str] = ()
) -> BatchingRule:
    # Random numbers depend on an element's position: a sample has its own call's only where it is its own call.
    seeds = [name for name in arguments if name == "seed"]
    return BatchingRule(_positions(op, arguments, parameters), _positions(op, arguments, [*per_sample, *seeds]))


def _first(output: Any, results: int, outputs: int) -> Any:
    if results == outputs:
        return output
    return output[0] if results == 1 else output[:results]


def _direct_call(forward: Any, gradient_op: str, results: int, saves: Sequence[str]) -> str:
    """The call of a declared backward op, as source text; its outputs are the gradients of forward's tensors, in order.

    Its arguments are gradients of results (grad_<result>, None where forward has no such result), what was saved, and a
    flag for each output.
    """
    grads = {f"grad_{name}": f"grad_{i}" for i, name in enumerate(_output_names(forward)[:results])}
    flags = iter([f"needed[{i}]" for i in _tensor_positions(forward)])
    values = []
    for argument in declared()[gradient_op]["arguments"]:
        names = argument.get("from", argument["name"]).split(" or ")
        saved = next((name for name in names if name in saves), "None")
        values.append(next(flags) if argument["kind"] == "wanted" else grads.get(argument["name"], saved))
    if next(flags, None) is not None:
        raise ValueError(f"{gradient_op}: it has fewer flags than {forward._schema.name} has tensors")
    return f"(gradient if is_grad_enabled() else gradient_op)({', '.join(values)})"


def _node_functions(
    forward: Any,
    results: int,
    saves: Sequence[str],
    gradient: Gradient | None,
    gradient_op: str | None,
    gradient_call: Call | None,
) -> tuple[Call, Call, Call]:
    """The functions of _NODE_SOURCE, from what the op saves and its formula or its backward op."""
    op = forward._schema.name
    inputs, outputs, tensors = _arguments(forward), _output_names(forward), _tensor_positions(forward)
    lists = _list_positions(forward)
    _positions(op, [*inputs, *outputs], saves)
    if set(inputs) & set(outputs):
        raise ValueError(
            f"{op}: its schema uses {sorted(set(inputs) & set(outputs))[0]!r} for an argument and an output"
        )
    saved_lists = [name for name in saves if name in inputs and inputs.index(name) in lists]
    numbers = [name for name in saves if name in inputs and inputs.index(name) not in [*tensors, *lists]]
    saved_tensors = [name for name in saves if name not in numbers and name not in saved_lists]
    if [*saved_tensors, *numbers, *saved_lists] != list(saves):
        raise ValueError(f"{op}: saves {list(saves)}, tensors must come before numbers")
    grads = [f"grad_{i}" for i in range(results)]
    differentiated = sorted([*tensors, *lists])
    if gradient_call is None:
        unpack = (
            f"saved = split(ctx.saved_tensors, {len(saved_tensors)}, ctx.numbers, ctx.counts)"
            if saved_lists
            else "saved = (*ctx.saved_tensors, *ctx.numbers)"
        )
        wanted = _tuple([f"needed[{i}]" for i in differentiated])
        formula = f"gradient(({_tuple(grads)}), saved, ({wanted}))"
        backward_op = None
    else:
        if gradient is not None or gradient_op is None or saved_lists:
            raise ValueError(f"{op}: gradient_call takes gradient's place, needs gradient_op and saves no lists")
        unpack = f"{_tuple(saved_tensors)}= ctx.saved_tensors; ({_tuple(numbers)}) = ctx.numbers"
        formula = _direct_call(forward, gradient_op, results, saves)
        backward_op = eager(_overload(gradient_op))
    source = _NODE_SOURCE.format(
        inputs=", ".join(inputs),
        outputs=outputs[0] if len(outputs) == 1 else ", ".join(outputs),
        saved_tensors=", ".join([*saved_tensors, *(f"*{name}" for name in saved_lists)]),
        saved_numbers=_tuple(numbers),
        keep_counts=f"ctx.counts = ({_tuple([f'len({name})' for name in saved_lists])})" if saved_lists else "",
        unpack=unpack,
        formula=formula,
        results=", ".join(outputs[:results]),
        mark_non_differentiable=f"ctx.mark_non_differentiable({', '.join(outputs[results:])})"
        * (results < len(outputs)),
        no_grad=" and ".join(f"{grad} is None" for grad in grads),
        no_gradients="("
        + _tuple([f"like_list(needed[{i}])" if i in lists else "None" for i in range(len(inputs))])
        + ")",
        gradients=_tuple([f"of_{i}" for i in differentiated]),
        grads=_tuple(grads),
        returned=_tuple(
            [
                f"of_{i} if needed[{i}] else None"
                if i in tensors
                else f"of_{i} if needed[{i}] and of_{i} else like_list(needed[{i}])"
                if i in lists
                else "None"
                for i in range(len(inputs))
            ]
        ),
    )
    make = run_source(f"node of {op}", source)
    return make(  # type: ignore[no-any-return]
        call=eager(forward),
        below_autograd=torch._C._AutoDispatchBelowAutograd,
        gradient=gradient_call or gradient,
        gradient_op=backward_op,
        is_grad_enabled=torch.is_grad_enabled,
        split=_split,
        like_list=_like_list,
    )


def _split(saved: Sequence[Tensor], tensors: int, numbers: tuple[Any, ...], counts: tuple[int, ...]) -> tuple[Any, ...]:
    """Tensors, numbers and lists, from what was saved as one row of tensors."""
    lists, begin = [], tensors
    for count in counts:
        lists.append(list(saved[begin : begin + count]))
        begin += count
    return (*saved[:tensors], *numbers, *lists)


def _like_list(needed: Any) -> list[None] | None:
    """No gradients of a list: autograd asks a registered op for a list of None, and a Function for None."""
    return [None] * len(needed) if isinstance(needed, list | tuple) else None


def _tuple(items: Sequence[str]) -> str:
    return "".join(f"{item}, " for item in items)
