"""How a call reaches its gradient: autograd Functions made from an op and its formulas, and the choice between routes.

The stable ABI has no autograd, so it lives here. Three routes, by cost and by what they support: the plain op where no
gradient is wanted; the registered op where a compiler traces; otherwise an autograd.Function, which takes half the time
of the registered op and is the only one that torch.func understands.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.autograd import forward_ad

from .batching import BatchingRule, Dims, fold
from .border import library
from .node import Node
from .sharding import call_with_rules, register

# What runs in every call is written out for the op's own arguments, as dataclasses write __init__: loops over arguments
# that are tensors or not would add a tenth to the time of a tiny call.
_CALL_SOURCE = """
def make(is_compiling, is_grad_enabled, transforms_active, in_transform, forward_ad, unwrap, results_only,
         results_only_eager, forward, make_apply, transformed, give_rules, call_with_rules):
    apply = None

    def call({arguments}):
        nonlocal apply
        if is_compiling():
            give_rules()
            if forward_ad._current_level >= 0 or transforms_active():
                return transformed({arguments}){results}
            if is_grad_enabled() and ({any_requires_grad}):
                return forward({arguments}){results}
            return results_only({arguments})
        if in_transform() or forward_ad._current_level >= 0:
            return transformed({arguments}){results}
        try:
            if ({any_requires_grad}) and is_grad_enabled():
                if apply is None:
                    apply = make_apply()
                {list_route}
                return apply({unwrapped}({others}))
            return results_only_eager({arguments})
        except NotImplementedError as error:  # DTensors, before torch has rules for them
            return call_with_rules(call, error, ({arguments},))
    return call
"""


def make_call(name: str, node: Node, results_only: Any, forward: Any, function: Any) -> Callable[..., Any]:
    """The function that takes one of the routes. `function()` is the Function that transforms take.

    The eager route is `apply` of a Function whose only outputs are the results, less what it does for default arguments
    and torch.func's transforms, 37 us a call. Tensors that escaped from a transform are unwrapped, as Function.apply
    does, or their gradients would be lost. A Function does not look into lists of tensors: with a gradient in one the
    op itself runs.
    """
    schema, outputs, count = node.schema, node.schema.outputs, node.schema.results
    results = "" if count == len(outputs) else "[0]" if count == 1 else f"[:{count}]"
    arguments = ", ".join(schema.arguments)
    any_in_lists = [f"({name} and any(t.requires_grad for t in {name}))" for name in schema.lists]
    any_requires_grad = [f"({name} is not None and {name}.requires_grad)" for name in schema.tensors]
    source = _CALL_SOURCE.format(
        arguments=arguments,
        any_requires_grad=" or ".join([*any_requires_grad, *any_in_lists]),
        list_route=f"if {' or '.join(any_in_lists)}: return forward({arguments}){results}" if schema.lists else "",
        unwrapped="".join(f"{name} if {name} is None else unwrap({name}), " for name in schema.tensors),
        others="".join(f"{name}, " for name in schema.others),
        results=results,
    )

    def make_apply() -> Any:
        members = dict(forward=node.functions["forward"], backward=node.functions["eager_backward"])
        made = _function(name, **members)
        made._backward_cls.apply = members["backward"]  # what autograd calls: by default two functions that look for it
        return super(torch.autograd.Function, made).apply

    scope: dict[str, Any] = {}
    exec(compile(source, f"<call of {schema.op}>", "exec"), scope)
    call: Callable[..., Any] = scope["make"](
        make_apply=make_apply,
        is_compiling=torch.compiler.is_compiling,
        is_grad_enabled=torch.is_grad_enabled,
        transforms_active=transforms_active,
        in_transform=torch._C._are_functorch_transforms_active,
        forward_ad=forward_ad,
        unwrap=torch._C._functorch.unwrap_if_dead,
        results_only=results_only,
        results_only_eager=eager(results_only),
        forward=forward,
        transformed=transformed_apply(function),
        give_rules=register,
        call_with_rules=call_with_rules,
    )
    return call


def eager(op: Any) -> Callable[..., Any]:
    """What OpOverload.__call__ calls, without that detour of 0.6 us. Compilers do not know it: never while tracing."""
    return getattr(op, "_op", op)  # type: ignore[no-any-return]


def make_function(op: str, node: Node, rule: BatchingRule, instead: str | None) -> Any:
    """The autograd.Function that torch.func's transforms take: all outputs, setup_context, a batching rule."""

    def call(*args: Any) -> Any:  # torch asks it for a signature, which an op has not
        return node.run(*args)

    def batch(info: Any, in_dims: Dims, *args: Any) -> tuple[Any, Any]:
        return fold(made.apply, info.batch_size, in_dims, args, rule)

    def push_forward(ctx: Any, *tangents: Any) -> None:
        raise NotImplementedError(
            f"{op}: forward-mode derivatives (jvp, jacfwd, dual tensors) are not supported; "
            f"use reverse mode (vjp, jacrev) or {_other_way(instead)}"
        )

    keep, backward = node.functions["keep"], node.functions["backward"]
    made = _function(op, forward=call, setup_context=keep, backward=backward, vmap=batch, jvp=push_forward)
    return made


def register_gradient(forward: Any, node: Node, function: Callable[[], Any]) -> None:
    """Gives `<op>_forward` its gradient, for compilers and for those who call the op itself.

    torch.library.register_autograd is needed for lists of tensors alone; it takes 1.5 ms of every import for an op.
    """
    if node.schema.lists:
        register: Any = torch.library.register_autograd
        keep, backward = node.functions["keep"], node.functions["backward"]
        register(forward, backward, setup_context=keep, lib=library)
        return
    defaults = tuple(argument.default_value for argument in forward._schema.arguments)

    def differentiable(*args: Any) -> Any:
        args += defaults[len(args) :]  # torch leaves out what is at its default at the end
        return function().apply(*args) if needs_gradient(*args) else node.run(*args)

    library.impl(forward, differentiable, "Autograd")


def last_derivative(op: str, backward: Any, rule: BatchingRule, instead: str | None) -> Callable[..., Any]:
    """A call of a backward; where graphs are made it is a node of its own, so that differentiating it raises: autograd
    would drop the term silently.
    """
    call = eager(backward)
    is_grad_enabled = torch.is_grad_enabled

    def forward(_: Tensor, *args: Any) -> Any:
        return call(*args)

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        pass

    def batch(info: Any, in_dims: Dims, _: Tensor, *args: Any) -> tuple[Any, Any]:
        return fold(run, info.batch_size, in_dims[1:], args, rule)

    def refuse(ctx: Any, *grads: Any) -> None:
        raise RuntimeError(
            f"{op}: its gradient has no derivative of its own (a second derivative was asked for); "
            f"use {_other_way(instead)} where create_graph=True is differentiated through"
        )

    def run(*args: Any) -> Any:
        if not is_grad_enabled():
            return call(*args)
        # The leaf makes it a node also where no argument leads back to the op's inputs.
        return made().apply(torch.empty((), device="cpu", requires_grad=True), *args)

    @functools.cache  # few processes make graphs of backwards
    def made() -> Any:
        members = dict(forward=forward, setup_context=setup_context, backward=refuse, vmap=batch, jvp=refuse)
        return _function(f"{op}_backward", **members)

    return run


def _other_way(instead: str | None) -> str:
    return instead or "the same formula in torch's own operations"


def _function(name: str, **members: Any) -> Any:
    return type(name, (torch.autograd.Function,), {key: staticmethod(value) for key, value in members.items()})


def transformed_apply(function: Callable[[], Any]) -> Callable[..., Any]:
    """`function().apply` for torch.func's transforms and forward mode, never compiled.

    A compiler that traces a transform takes a registered op's gradient for zero, and loses batches inside a Function's
    vmap: it gets a graph break here, and with fullgraph=True an error.
    """

    @_disable_dynamo  # torch.compiler.disable would import the compiler, a second, in every process
    def call(*args: Any) -> Any:
        return function().apply(*args)

    return call


def transforms_active() -> bool:
    """Whether torch.func is at work. To be asked while tracing: tensors say there that they want no gradient."""
    return torch._C._are_functorch_transforms_active()


# What torch._dynamo.assume_constant_result sets, without importing the compiler: the answer is taken while tracing (and
# guarded by the compiler) and leaves no call in the graph, which would keep it out of AOTAutograd's cache.
transforms_active._dynamo_marked_constant = True  # type: ignore[attr-defined]


def adds_gradients(*tensors: Tensor | None) -> bool:
    """Whether autograd of eager calls is at work on them, and nothing else."""
    if torch.compiler.is_compiling() or transforms_active() or forward_ad._current_level >= 0:
        return False
    return wants_gradient(*tensors)


def needs_gradient(*args: Any) -> bool:
    """The same as `wants_gradient` of arguments and lists of them, in C++: never while tracing."""
    return torch.is_grad_enabled() and torch._C._any_requires_grad(*args)


def wants_gradient(*args: Any) -> bool:
    """Whether a graph is being made of any of the arguments, which may be lists of tensors too."""
    return torch.is_grad_enabled() and any(
        tensor.requires_grad
        for arg in args
        for tensor in (arg if isinstance(arg, list | tuple) else (arg,))
        if isinstance(tensor, Tensor)
    )
