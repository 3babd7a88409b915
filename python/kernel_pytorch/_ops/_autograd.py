"""How a call reaches its gradient: autograd Functions made from an op and its formulas, and the choice between routes.

The stable ABI has no autograd, so it lives here. Three routes, by cost and by what they support: the plain op where no
gradient is wanted; the registered op where a compiler traces; otherwise an autograd.Function, which takes half the time
of the registered op and is the only one that torch.func understands.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.autograd import forward_ad

from ._batching import Dims, fold


def eager(op: Any) -> Callable[..., Any]:
    """What OpOverload.__call__ calls, without that detour of 0.6 us. Compilers do not know it: never while tracing."""
    return getattr(op, "_op", op)  # type: ignore[no-any-return]


def differentiable(
    op: str,
    forward: Any,
    setup_context: Callable[..., None],
    backward: Callable[..., Any],
    parameters: Sequence[int],
) -> Any:
    """An autograd.Function of a registered op. `parameters` are the positions that fold() may not batch."""
    call = eager(forward)
    below_autograd: Any = torch._C._AutoDispatchBelowAutograd  # the op's own autograd would take another 10 us

    def run(*args: Any) -> Any:
        with below_autograd():
            return call(*args)

    def batch(info: Any, in_dims: Dims, *args: Any) -> tuple[Any, Any]:
        return fold(made.apply, info.batch_size, in_dims, args, parameters)

    def push_forward(ctx: Any, *tangents: Any) -> None:
        raise NotImplementedError(
            f"{op}: forward-mode derivatives (jvp, jacfwd, dual tensors) are not supported; "
            f"use reverse mode (vjp, jacrev) or torch.nn.functional.{op}"
        )

    made: Any = _make_function(op, run, setup_context, backward, batch, push_forward)
    return made


def last_derivative(op: str, backward: Any, parameters: Sequence[int], wants_parameters: Callable[..., bool]) -> Any:
    """A backward as a node of its own, so that differentiating it raises: autograd would drop the term silently."""
    call = eager(backward)

    def run(*args: Any) -> Any:
        return call(*args)

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        pass

    def batch(info: Any, in_dims: Dims, *args: Any) -> tuple[Any, Any]:
        return fold(made.apply, info.batch_size, in_dims, args, parameters, per_sample=wants_parameters(*args))

    def refuse(ctx: Any, *grads: Any) -> None:
        raise RuntimeError(
            f"{op}: its gradient has no derivative of its own (a second derivative was asked for); "
            f"use torch.nn.functional.{op} where create_graph=True is differentiated through"
        )

    made: Any = _make_function(f"{op}_backward", run, setup_context, refuse, batch, refuse)
    return made


def _make_function(name: str, forward: Any, setup_context: Any, backward: Any, vmap: Any, jvp: Any) -> Any:
    members = dict(forward=forward, setup_context=setup_context, backward=backward, vmap=vmap, jvp=jvp)
    return type(name, (torch.autograd.Function,), {key: staticmethod(value) for key, value in members.items()})


def eager_apply(function: Any) -> Callable[..., Any]:
    """`function.apply` less what it does for default arguments and the transforms of torch.func, 37 us a call.

    Not for use while a transform is active. Tensors that escaped from one are unwrapped, as Function.apply does, or
    their gradients would be lost.
    """
    apply: Any = super(torch.autograd.Function, function).apply
    unwrap: Any = torch._C._functorch.unwrap_if_dead

    def call(*args: Any) -> Any:
        return apply(*[unwrap(arg) if isinstance(arg, Tensor) else arg for arg in args])

    return call


def transformed_apply(function: Any) -> Callable[..., Any]:
    """`function.apply` for torch.func's transforms and forward mode, never compiled.

    A compiler that traces a transform takes a registered op's gradient for zero, and loses batches inside a Function's
    vmap: it gets a graph break here, and with fullgraph=True an error.
    """

    @_disable_dynamo  # torch.compiler.disable would import the compiler, a second, in every process
    def call(*args: Any) -> Any:
        return function.apply(*args)

    return call


def transforms_active() -> bool:
    """Whether torch.func is at work. To be asked while tracing: tensors say there that they want no gradient."""
    return torch._C._are_functorch_transforms_active()


# What torch._dynamo.assume_constant_result sets, without importing the compiler: the answer is taken while tracing (and
# guarded by the compiler) and leaves no call in the graph, which would keep it out of AOTAutograd's cache.
transforms_active._dynamo_marked_constant = True  # type: ignore[attr-defined]


def route(transformed: Callable[..., Any], op: Any, apply: Callable[..., Any]) -> Any:
    """Which of three equal calls to make where gradients are wanted: through torch.func, a compiler, or straight."""
    if forward_ad._current_level >= 0 or transforms_active():
        return transformed
    return op if torch.compiler.is_compiling() else apply


def wants_gradient(*args: Any) -> bool:
    return torch.is_grad_enabled() and any(isinstance(arg, Tensor) and arg.requires_grad for arg in args)
