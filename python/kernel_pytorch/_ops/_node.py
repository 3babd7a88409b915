"""What a node of autograd does for an op: what its forward keeps, and how its backward reaches the gradient formula.

Eager calls and the two other users of a gradient (torch.func, registered ops) give the node other arguments. An eager
node has the tensors and, as one tuple, everything else: autograd looks at every argument of a node, 0.2 us each, and
builds a gradient for it. The others have the arguments of the schema.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ._declared import declared

Call = Callable[..., Any]


class Schema(NamedTuple):
    """An op's arguments and outputs, by name and by place."""

    op: str
    arguments: list[str]
    outputs: list[str]  # one without a name is called "output"
    tensors: list[int]  # places of arguments
    lists: list[int]  # of tensors
    results: int  # outputs that callers get; the others are kept for backward

    @property
    def others(self) -> list[int]:
        return [i for i in range(len(self.arguments)) if i not in self.tensors]

    @property
    def differentiated(self) -> list[int]:
        return sorted([*self.tensors, *self.lists])


def schema_of(overload: Any, results: int) -> Schema:
    tensor_types = (torch.TensorType.get(), torch.OptionalType.ofTensor())
    arguments = overload._schema.arguments
    return Schema(
        op=overload._schema.name,
        arguments=[argument.name for argument in arguments],
        outputs=[output.name or "output" for output in overload._schema.returns],
        tensors=[i for i, argument in enumerate(arguments) if argument.type in tensor_types],
        lists=[i for i, argument in enumerate(arguments) if argument.type == torch.ListType.ofTensors()],
        results=results,
    )


def positions(op: str, names: Sequence[str], chosen: Sequence[str]) -> list[int]:
    unknown = [name for name in chosen if name not in names]
    if unknown:
        raise ValueError(f"{op}: its schema has no {unknown[0]!r}, only {list(names)}")
    return [names.index(name) for name in chosen]


def picker(places: Sequence[int]) -> Call:
    """A function of a tuple: its entries at these places, as a tuple. It runs no Python."""
    first = places[0] if places else 0
    if list(places) == list(range(first, first + len(places))):
        return itemgetter(slice(first, first + len(places)))
    return itemgetter(*places)


# What runs in every eager call with a gradient is written out for the op's own arguments, as in _autograd.py.
_EAGER_SOURCE = """
def make(run, formula, op, call, split, is_grad_enabled):
    def forward(ctx, {inputs}others):
        {others} = others
        {outputs} = run({arguments})
        ctx.save_for_backward({kept})
        ctx.numbers = {numbers}
        {counts}
        ctx.set_materialize_grads(False)
        return {results}

    def backward(ctx, {grads}):
        if {no_grad}:
            return {none}
        {needs} = ctx.needs_input_grad
        {unpack}
        {gradient_names} = {gradients}
        return {returned}
    return forward, backward
"""


class Node:
    """The functions of an op's nodes.

    `formula` is (gradients of results, saved values, wanted) -> gradients of tensors and lists. Where the gradient is
    the call of a backward op and nothing else, `direct` takes its place: name, op, and the op's call for graphs.
    """

    def __init__(self, schema: Schema, saves: Sequence[str], run: Call, formula: Call | None, direct: Any) -> None:
        inputs, outputs = schema.arguments, schema.outputs
        places = positions(schema.op, [*inputs, *outputs], saves)
        if set(inputs) & set(outputs):
            both = sorted(set(inputs) & set(outputs))[0]
            raise ValueError(f"{schema.op}: its schema uses {both!r} for an argument and an output")
        self.schema, self.run = schema, run
        self.saved_lists = [i for i in places if i in schema.lists]
        self.numbers = [i for i in places if i < len(inputs) and i not in [*schema.tensors, *schema.lists]]
        self.saved_tensors = [i for i in places if i not in [*self.numbers, *self.saved_lists]]
        if [*self.saved_tensors, *self.numbers, *self.saved_lists] != places:
            raise ValueError(f"{schema.op}: saves {list(saves)}, tensors must come before numbers")
        if (formula is None) is (direct is None) or (direct is not None and self.saved_lists):
            raise ValueError(f"{schema.op}: give a formula, or else a backward op, for which no lists are saved")
        self.direct = direct
        self.formula = self._derived_formula() if formula is None else formula
        self.save = self._save()

    def _save(self) -> Call:
        pick_tensors, pick_numbers = picker(self.saved_tensors), picker(self.numbers)
        lists = self.saved_lists

        def save(ctx: Any, args: tuple[Any, ...], outputs: tuple[Any, ...]) -> None:
            if lists:
                kept = [args[i] for i in lists]
                ctx.counts = [len(one) for one in kept]
                ctx.save_for_backward(*pick_tensors(args + outputs), *(tensor for one in kept for tensor in one))
            else:
                ctx.save_for_backward(*pick_tensors(args + outputs))
            ctx.numbers = pick_numbers(args)
            ctx.set_materialize_grads(False)

        return save

    def eager(self) -> tuple[Call, Call]:
        """forward and backward of the eager node, whose only outputs are the results."""
        schema, lists = self.schema, self.saved_lists
        arguments = schema.arguments
        names = [*arguments, *schema.outputs]
        tensors, kept = [arguments[i] for i in schema.tensors], [names[i] for i in self.saved_tensors]
        numbers = [names[i] for i in self.numbers]
        grads = [f"grad_{name}" for name in schema.outputs[: schema.results]]
        # A list has no gradient here: calls with one in a list take another route.
        wanted = [f"needs_{arguments[i]}" if i in schema.tensors else "False" for i in schema.differentiated]
        gradient_names = _row([f"gradient_{arguments[i]}" for i in schema.differentiated])
        sources = {name: f"gradient_{name}" for name in tensors}
        if self.direct is not None:
            places, found = self._backward_call()
            unpack = f"{_row(kept)} = ctx.saved_tensors; {_row(numbers)} = ctx.numbers"
            values = ["None", *grads, *kept, *numbers, *wanted]
            gradients = f"(call if is_grad_enabled() else op)({', '.join(values[i] for i in places)})"
            count = self._output_count()
            gradient_names = "gradient_0" if count == 1 else _row([f"gradient_{i}" for i in range(count)])
            sources = {name: "None" if i is None else grads[0] if i < 0 else f"gradient_{i}" for name, i in found}
            of_op = [f"needs_{name}" for name, i in found if i is not None and i >= 0]
            if len(of_op) < len([name for name, i in found if i is not None]):  # the residual alone may be wanted
                gradients += f" if {' or '.join(of_op)} else {_row(['None'] * count) if count > 1 else 'None'}"
        else:
            split = f"split(ctx.saved_tensors, {len(kept)}, ctx.numbers, ctx.counts)"
            unpack = f"saved = {split if lists else 'ctx.saved_tensors + ctx.numbers'}"
            gradients = f"formula({_row(grads)}, saved, {_row(wanted)})"
        source = _EAGER_SOURCE.format(
            inputs="".join(f"{name}, " for name in tensors),
            others=_row([arguments[i] for i in schema.others]),
            outputs=", ".join(schema.outputs),
            arguments=", ".join(arguments),
            kept=", ".join([*kept, *(f"*{names[i]}" for i in lists)]),
            numbers=_row(numbers),
            counts=f"ctx.counts = {_row([f'len({names[i]})' for i in lists])}" if lists else "",
            results=", ".join(schema.outputs[: schema.results]),
            grads=", ".join(grads),
            no_grad=" and ".join(f"{grad} is None" for grad in grads),
            none=_row(["None"] * (len(tensors) + 1)),
            needs=_row([*(f"needs_{name}" for name in tensors), "_"]),
            unpack=unpack,
            gradients=gradients,
            gradient_names=gradient_names,
            returned=_row([*(f"{sources[name]} if needs_{name} else None" for name in tensors), "None"]),
        )
        scope: dict[str, Any] = {}
        exec(compile(source, f"<node of {schema.op}>", "exec"), scope)
        _, op, call = self.direct or ("", None, None)
        made: tuple[Call, Call] = scope["make"](self.run, self.formula, op, call, _split, torch.is_grad_enabled)
        return made

    def keep(self) -> Call:
        """setup_context, of a Function and of a registered op."""
        schema, save = self.schema, self.save
        has_one_output, results = len(schema.outputs) == 1, schema.results

        def keep(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
            outputs = (output,) if has_one_output else tuple(output)
            save(ctx, tuple(inputs), outputs)
            if results < len(outputs):
                ctx.mark_non_differentiable(*outputs[results:])

        return keep

    def backward(self) -> Call:
        """backward of a Function and of a registered op: a gradient, or None, for every argument of the schema."""
        schema = self.schema
        gradients_of = self._gradients(schema.differentiated)

        def backward(ctx: Any, *all_grads: Any) -> Any:
            needed, grads = ctx.needs_input_grad, all_grads[: schema.results]
            returned: list[Any] = [None] * len(schema.arguments)
            for i in schema.lists:
                returned[i] = _like_list(needed[i])
            if any(grad is not None for grad in grads):
                gradients = gradients_of(ctx, grads, needed)
                for i, gradient in zip(schema.differentiated, gradients, strict=True):
                    if needed[i] and (gradient if i in schema.lists else True):
                        returned[i] = gradient
            return tuple(returned)

        return backward

    def _gradients(self, wanted: Sequence[int]) -> Call:
        """(ctx, gradients of results, what is needed) -> gradients, as a tuple."""
        pick_wanted = picker(wanted)
        formula, lists, count = self.formula, self.saved_lists, len(self.saved_tensors)

        def gradients(ctx: Any, grads: tuple[Any, ...], needed: Any) -> Any:
            saved = ctx.saved_tensors
            saved = _split(saved, count, ctx.numbers, ctx.counts) if lists else saved + ctx.numbers
            return tuple(formula(grads, saved, pick_wanted(needed)))

        return gradients

    def _derived_formula(self) -> Call:
        """The formula of a gradient that is the call of a declared backward op."""
        places, found = self._backward_call()
        arrange, of_op = picker(places), [i is not None and i >= 0 for _, i in found]
        _, _, call = self.direct

        def formula(grads: tuple[Any, ...], saved: tuple[Any, ...], wanted: tuple[bool, ...]) -> Any:
            outputs: Any = ()
            if any(is_wanted for is_wanted, is_of_op in zip(wanted, of_op) if is_of_op):
                outputs = call(*arrange((None, *grads, *saved, *wanted)))
            outputs = (outputs,) if isinstance(outputs, Tensor) else outputs
            return [None if i is None or i >= len(outputs) else grads[0] if i < 0 else outputs[i] for _, i in found]

        return formula

    def _output_count(self) -> int:
        return len(declared()[self.direct[0]]["outputs"])

    def _backward_call(self) -> tuple[list[int], list[tuple[str, int | None]]]:
        """How a declared backward op is called, and which of its outputs is the gradient of which tensor.

        The first are the places of its arguments in (None, gradients of results, saved values, wanted). By name: a
        gradient of a result is grad_<result>, a flag is <tensor>_grad (input_grad: of the first), and None stands for
        what forward has not. An output is grad_<tensor>, or else of the first tensor. The gradient of a residual is
        that of the result, written as -1; a tensor without any has None.
        """
        schema = self.schema
        backward = declared()[self.direct[0]]
        tensors = [schema.arguments[i] for i in schema.tensors]
        kept = [[*schema.arguments, *schema.outputs][i] for i in [*self.saved_tensors, *self.numbers]]
        names = ["", *(f"grad_{one}" for one in schema.outputs[: schema.results]), *kept]
        flags = {f"{name}_grad": len(names) + i for i, name in enumerate(tensors)}
        flags["input_grad"] = len(names)
        places = []
        for argument in backward["arguments"]:
            candidates = argument.get("from", argument["name"]).split(" or ")
            found = next((names.index(one) for one in candidates if one in names), 0)
            places.append(flags[argument["name"]] if argument["kind"] == "wanted" else found)
        outputs = [output["name"] for output in backward["outputs"]]
        by_name = {name: outputs.index(f"grad_{name}") for name in tensors if f"grad_{name}" in outputs}
        unnamed = [i for i in range(len(outputs)) if i not in by_name.values()]
        if unnamed:
            by_name[tensors[0]] = unnamed[0]
        if len(unnamed) > 1 or len(by_name) != len(outputs):
            raise ValueError(f"{schema.op}: outputs {outputs} of its backward are not gradients of {tensors}")
        return places, [(name, by_name.get(name, -1 if name == "residual" else None)) for name in tensors]


def _row(items: Sequence[str]) -> str:
    """A tuple, as source."""
    return "(" + "".join(f"{item}, " for item in items) + ")"


def _split(saved: Sequence[Tensor], tensors: int, numbers: tuple[Any, ...], counts: Sequence[int]) -> tuple[Any, ...]:
    """Tensors, numbers and lists, from what was saved as one row of tensors."""
    lists, begin = [], tensors
    for count in counts:
        lists.append(list(saved[begin : begin + count]))
        begin += count
    return (*saved[:tensors], *numbers, *lists)


def _like_list(needed: Any) -> list[None] | None:
    """No gradients of a list: autograd asks a registered op for a list of None, and a Function for None."""
    return [None] * len(needed) if isinstance(needed, list | tuple) else None
