"""Forward mode: ops have none, and say so with their name, eagerly, under jit and in what jax.linearize returns.

jax.custom_vjp refuses it too, but after our functions have returned, and without an op's name. So an argument with a
gradient passes through an identity whose tangent is an operation of ours. Reverse mode transposes that operation, which
is the identity again; whoever computes it, or compiles it, is in forward mode.
"""

from __future__ import annotations

import functools
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
from jax.interpreters import ad, batching, mlir

NO_DERIVATIVE = (
    "{op}: this call has no derivative. Ops of kernel_pytorch.jax have first derivatives in reverse mode (jax.grad, "
    "jax.vjp); for second ones and forward mode (jax.jvp, jax.jacfwd, jax.hessian) write the op in jax.numpy"
)


def guarded(op: str, array: Any) -> Any:
    """The array, whose tangent nothing may compute. Arrays that are not traced have no tangent."""
    if isinstance(array, jax.core.Tracer) and jnp.issubdtype(array.dtype, jnp.inexact):
        return _argument().bind(array, op=op)
    return array


def refuse(*_: Any, op: str, **__: Any) -> NoReturn:
    raise NotImplementedError(NO_DERIVATIVE.format(op=op))


def _identity(name: str) -> Any:
    from jax.extend.core import Primitive  # it brings Pallas with it, which takes as long as all of this package

    primitive = Primitive(name)
    primitive.def_abstract_eval(lambda array, *, op: array)
    batching.defvectorized(primitive)
    return primitive


@functools.cache
def _argument() -> Any:
    argument, tangent_of = _identity("kernel_pytorch_argument"), _identity("kernel_pytorch_tangent")
    argument.def_impl(lambda array, *, op: array)
    mlir.register_lowering(argument, lambda context, array, *, op: [array])
    ad.defjvp(argument, lambda tangent, array, *, op: tangent_of.bind(tangent, op=op))
    tangent_of.def_impl(refuse)
    mlir.register_lowering(tangent_of, refuse)
    ad.deflinear2(tangent_of, lambda cotangent, tangent, *, op: [cotangent])
    return argument
