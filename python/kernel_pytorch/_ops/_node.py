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
        self.schema, self.run, self.formula = schema, run, formula
        self.saved_lists = [i for i in places if i in schema.lists]
        self.numbers = [i for i in places if i < len(inputs) and i not in [*schema.tensors, *schema.lists]]
        self.saved_tensors = [i for i in places if i not in [*self.numbers, *self.saved_lists]]
        if [*self.saved_tensors, *self.numbers, *self.saved_lists] != places:
            raise ValueError(f"{schema.op}: saves {list(saves)}, tensors must come before numbers")
        if (formula is None) is (direct is None) or (direct is not None and self.saved_lists):
            raise ValueError(f"{schema.op}: give a formula, or else a backward op, for which no lists are saved")
        self.direct = direct
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

    def eager_forward(self) -> Call:
        """forward of the eager node: the results are its only outputs. The usual op has a way with fewer calls."""
        schema, run, save = self.schema, self.run, self.save
        order = [*schema.tensors, *schema.others]
        arrange = picker([order.index(i) for i in range(len(order))])
        has_one_output, results = len(schema.outputs) == 1, schema.results
        pick_tensors, pick_numbers = picker(self.saved_tensors), picker(self.numbers)

        def first_result(ctx: Any, *inputs: Any) -> Any:
            args = inputs[:-1] + inputs[-1]
            outputs = run(*args)
            ctx.save_for_backward(*pick_tensors(args + outputs))
            ctx.numbers = pick_numbers(args)
            ctx.set_materialize_grads(False)
            return outputs[0]

        def forward(ctx: Any, *inputs: Any) -> Any:
            args = arrange(inputs[:-1] + inputs[-1])
            outputs = run(*args)
            if has_one_output:
                save(ctx, args, (outputs,))
                return outputs
            save(ctx, args, outputs)
            return outputs[0] if results == 1 else outputs[:results]

        is_usual = order == sorted(order) and results == 1 and not has_one_output and not self.saved_lists
        return first_result if is_usual else forward

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

    def eager_backward(self) -> Call:
        schema = self.schema
        tensors, differentiated = schema.tensors, schema.differentiated
        everything = (*(True for _ in tensors), False)
        none = (None,) * len(everything)
        if self.direct is not None and schema.results == 1:
            arrange, op, call = self._backward_call(range(len(tensors)))
            is_grad_enabled = torch.is_grad_enabled

            def backward_of_one(ctx: Any, grad: Tensor | None) -> Any:
                if grad is None:
                    return none
                needed = ctx.needs_input_grad
                args = arrange((None, grad, *ctx.saved_tensors, *ctx.numbers, *needed))
                gradients = call(*args) if is_grad_enabled() else op(*args)
                if needed == everything:
                    return (*gradients, None)
                return (*(one if is_needed else None for one, is_needed in zip(gradients, needed)), None)

            return backward_of_one
        # A list has no gradient here, like the tuple of everything else: calls with one in a list take another route.
        wanted = [tensors.index(i) if i in tensors else len(tensors) for i in differentiated]
        gradients_of = self._gradients(wanted, range(len(tensors)))
        pick = picker([differentiated.index(i) for i in tensors])

        def backward(ctx: Any, *grads: Any) -> Any:
            if all(grad is None for grad in grads):
                return none
            needed = ctx.needs_input_grad
            gradients = pick(gradients_of(ctx, grads, needed))
            return (*(one if is_needed else None for one, is_needed in zip(gradients, needed)), None)

        return backward

    def backward(self) -> Call:
        """backward of a Function and of a registered op: a gradient, or None, for every argument of the schema."""
        schema = self.schema
        gradients_of = self._gradients(schema.differentiated, schema.tensors)

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

    def _gradients(self, wanted: Sequence[int], flags: Sequence[int]) -> Call:
        """(ctx, gradients of results, what is needed) -> gradients, as a tuple."""
        pick_wanted = picker(wanted)
        formula, lists, count = self.formula, self.saved_lists, len(self.saved_tensors)
        if formula is None:
            arrange, op, call = self._backward_call(flags)
            pick_flags = picker(flags)

            def gradients_of_op(ctx: Any, grads: tuple[Any, ...], needed: Any) -> Any:
                args = arrange((None, *grads, *ctx.saved_tensors, *ctx.numbers, *pick_flags(needed)))
                return call(*args) if torch.is_grad_enabled() else op(*args)

            return gradients_of_op

        def gradients(ctx: Any, grads: tuple[Any, ...], needed: Any) -> Any:
            saved = ctx.saved_tensors
            saved = _split(saved, count, ctx.numbers, ctx.counts) if lists else saved + ctx.numbers
            return tuple(formula(grads, saved, pick_wanted(needed)))

        return gradients

    def _backward_call(self, flags: Sequence[int]) -> tuple[Call, Call, Call]:
        """How the arguments of the declared backward op are picked, the op, and its call where graphs are made.

        Its arguments are gradients of results (grad_<result>, None where forward has no such result), what was saved,
        and a flag for each output. The outputs are the gradients of forward's tensors, in order.
        """
        schema = self.schema
        name, op, call = self.direct
        kept = [[*schema.arguments, *schema.outputs][i] for i in [*self.saved_tensors, *self.numbers]]
        names = ["", *(f"grad_{one}" for one in schema.outputs[: schema.results]), *kept]
        free_flags = iter(range(len(names), len(names) + len(flags)))
        places = []
        for argument in declared()[name]["arguments"]:
            sources = argument.get("from", argument["name"]).split(" or ")
            found = next((names.index(one) for one in sources if one in names), 0)
            places.append(next(free_flags) if argument["kind"] == "wanted" else found)
        if next(free_flags, None) is not None:
            raise ValueError(f"{name}: it has fewer flags than {schema.op} has tensors")
        return picker(places), op, call


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
