"""What a node of autograd does for an op: what its forward keeps, and how its backward reaches the gradient.

Eager calls and the two other users of a gradient (torch.func, registered ops) give the node other arguments. An eager
node has the tensors and, as one tuple, everything else: autograd looks at every argument of a node, 0.2 us each, and
builds a gradient for it. The others have the arguments of the schema.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .declared import declared

Call = Callable[..., Any]


class Schema(NamedTuple):
    """An op's arguments and outputs, by name and by place."""

    op: str
    arguments: list[str]
    outputs: list[str]  # one without a name is called "output"
    tensors: list[str]
    lists: list[str]  # of tensors
    results: int  # outputs that callers get; the others are kept for backward

    @property
    def others(self) -> list[str]:
        return [name for name in self.arguments if name not in self.tensors]

    @property
    def differentiated(self) -> list[str]:
        return [name for name in self.arguments if name in (*self.tensors, *self.lists)]


def schema_of(overload: Any, results: int) -> Schema:
    tensor_types = (torch.TensorType.get(), torch.OptionalType.ofTensor())
    arguments = overload._schema.arguments
    return Schema(
        op=overload._schema.name,
        arguments=[argument.name for argument in arguments],
        outputs=[output.name or "output" for output in overload._schema.returns],
        tensors=[argument.name for argument in arguments if argument.type in tensor_types],
        lists=[argument.name for argument in arguments if argument.type == torch.ListType.ofTensors()],
        results=results,
    )


# What runs in every call with a gradient is written out for the op's own arguments, as in autograd.py.
_SAVE_SOURCE = """
def forward(ctx, {tensors}others):
    {others} = others
    {outputs} = _run({arguments})
    {save}
    return {results}

def keep(ctx, inputs, output):
    {arguments}, = inputs
    {outputs} = output
    {save}
    {mark}
"""
_BACKWARD_SOURCE = """
def {name}(ctx, {grads}):
    {needs}, = ctx.needs_input_grad
    if {no_grad}:
        return {none}
    {unpack}
    {gradient_names} = {gradients}
    return {returned}
"""


class Node:
    """The functions of an op's nodes, made where a gradient is wanted for the first time.

    `formula` is (gradients of results, saved values, wanted) -> gradients of tensors and lists. Where the gradient is
    the call of a backward op and nothing else, `direct` takes its place: name, op, and the op's call for graphs.
    """

    def __init__(self, schema: Schema, saves: Sequence[str], run: Call, formula: Call | None, direct: Any) -> None:
        known = [*schema.arguments, *schema.outputs]
        if len(set(known)) < len(known):
            both = sorted(set(schema.arguments) & set(schema.outputs))[0]
            raise ValueError(f"{schema.op}: its schema uses {both!r} for an argument and an output")
        if unknown := [name for name in saves if name not in known]:
            raise ValueError(f"{schema.op}: its schema has no {unknown[0]!r}, only {known}")
        self.lists = [name for name in saves if name in schema.lists]
        self.numbers = [name for name in saves if name in schema.others and name not in schema.lists]
        self.tensors = [name for name in saves if name in (*schema.tensors, *schema.outputs)]
        if (formula is None) is (direct is None) or (direct is not None and self.lists):
            raise ValueError(f"{schema.op}: give a formula, or else a backward op, for which no lists are saved")
        self.schema, self.run, self.formula, self.direct = schema, run, formula, direct

    @functools.cached_property
    def functions(self) -> dict[str, Call]:
        """forward and eager_backward of the eager node, whose only outputs are the results; keep (setup_context) and
        backward, which has a gradient or None for every argument of the schema, of a Function and of a registered op.
        """
        schema = self.schema
        save = f"ctx.save_for_backward({', '.join([*self.tensors, *(f'*{name}' for name in self.lists)])})"
        save += f"; ctx.numbers = {_row(self.numbers)}; ctx.set_materialize_grads(False)"
        if self.lists:
            save += f"; ctx.counts = {_row([f'len({name})' for name in self.lists])}"
        kept = schema.outputs[schema.results :]
        source = _SAVE_SOURCE.format(
            tensors="".join(f"{name}, " for name in schema.tensors),
            others=_row(schema.others),
            arguments=", ".join(schema.arguments),
            outputs=", ".join(schema.outputs),
            save=save,
            results=", ".join(schema.outputs[: schema.results]),
            mark=f"ctx.mark_non_differentiable({', '.join(kept)})" if kept else "",
        )
        # A list has no gradient in an eager node: calls with one in a list take another route.
        source += self._backward_source("eager_backward", [*schema.tensors, "others"], schema.outputs[: schema.results])
        source += self._backward_source("backward", schema.arguments, schema.outputs)
        _, op, call = self.direct or ("", None, None)
        scope: dict[str, Any] = dict(
            _run=self.run, _formula=self.formula, _op=op, _call=call, _split=_split, _like_list=_like_list,
            _is_grad_enabled=torch.is_grad_enabled,
        )  # fmt: skip
        exec(compile(source, f"<node of {schema.op}>", "exec"), scope)
        return scope

    def _backward_source(self, name: str, inputs: Sequence[str], outputs: Sequence[str]) -> str:
        """A backward that gets the gradients of these outputs and returns those of these inputs."""
        schema = self.schema
        grads = [f"grad_{output}" for output in schema.outputs[: schema.results]]
        unpack = f"{_row(self.tensors)} = ctx.saved_tensors; {_row(self.numbers)} = ctx.numbers"
        if self.direct is not None:
            gradient_names, gradients, sources = self._call_of_backward()
        else:
            if self.lists:
                unpack = f"saved = _split(ctx.saved_tensors, {len(self.tensors)}, ctx.numbers, ctx.counts)"
            else:
                unpack = "saved = ctx.saved_tensors + ctx.numbers"
            wanted = [f"needs_{one}" if one in inputs else "False" for one in schema.differentiated]
            gradient_names = _row([f"gradient_{one}" for one in schema.differentiated])
            gradients = f"_formula({_row(grads)}, saved, {_row(wanted)})"
            sources = {one: f"gradient_{one}" for one in schema.differentiated}
        returned = {one: f"{sources[one]} if needs_{one} else None" for one in schema.tensors}
        # autograd asks a registered op for a list of None where a list has no gradients.
        none = {one: f"_like_list(needs_{one})" for one in schema.lists}
        returned |= {one: f"gradient_{one} if needs_{one} and gradient_{one} else {none[one]}" for one in schema.lists}
        return _BACKWARD_SOURCE.format(
            name=name,
            grads=", ".join(f"grad_{output}" for output in outputs),
            needs=", ".join(f"needs_{one}" for one in inputs),
            no_grad=" and ".join(f"{grad} is None" for grad in grads),
            none=_row([none.get(one, "None") for one in inputs]),
            unpack=unpack,
            gradient_names=gradient_names,
            gradients=gradients,
            returned=_row([returned.get(one, "None") for one in inputs]),
        )

    def _call_of_backward(self) -> tuple[str, str, dict[str, str]]:
        """The call of a declared backward op: names of its outputs, the call, and the gradient of each tensor.

        By name: a gradient of a result is grad_<result>, a flag is <tensor>_grad (input_grad: of the first), and None
        stands for what forward has not. An output is grad_<tensor>, or else of the first tensor. The gradient of a
        residual is that of the result, or of the first tensor where their sum is a result; other tensors have none.
        """
        schema, backward = self.schema, declared()[self.direct[0]]
        first, results = schema.tensors[0], schema.outputs[: schema.results]
        outputs = [output["name"] for output in backward["outputs"]]
        sources = {one: f"grad_{one}" for one in schema.tensors if f"grad_{one}" in outputs}
        if unnamed := [output for output in outputs if output not in sources.values()]:
            sources[first] = unnamed[0]
        if len(unnamed) > 1 or len(sources) != len(outputs):
            raise ValueError(f"{schema.op}: outputs {outputs} of its backward are not gradients of {schema.tensors}")
        flags = {f"{one}_grad": f"needs_{one}" for one in schema.tensors}
        of_op = [f"needs_{one}" for one in sources]
        flags["input_grad"] = f"needs_{first}"
        known = [*(f"grad_{result}" for result in results), *self.tensors, *self.numbers]
        if "sum" in results:
            flags["input_grad"] = f"needs_{first} or needs_residual"
        values = []
        for argument in backward["arguments"]:
            candidates = argument.get("from", argument["name"]).split(" or ")
            found = next((one for one in candidates if one in known), "None")
            values.append(flags[argument["name"]] if argument["kind"] == "wanted" else found)
        made = [f"gradient_{i}" for i in range(len(outputs))]
        names, absent = (made[0], "None") if len(made) == 1 else (_row(made), _row(["None"] * len(made)))
        call = f"(_call if _is_grad_enabled() else _op)({', '.join(values)})"
        gradients = {one: made[outputs.index(source)] for one, source in sources.items()}
        if "sum" in results:
            gradients["residual"] = gradients[first]
            alone = _row(["grad_sum" if output == sources[first] else "None" for output in outputs])
            call += f" if grad_{results[0]} is not None else {alone}"  # where the sum alone was used
        elif "residual" in schema.tensors:
            gradients["residual"] = f"grad_{results[0]}"
            call += f" if {' or '.join(of_op)} else {absent}"  # where the residual's alone is wanted
        return names, call, {one: gradients.get(one, "None") for one in schema.tensors}


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
