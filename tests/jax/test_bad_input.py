"""What is wrong is said while tracing: op, argument, what it is and what it must be."""

from __future__ import annotations

import inspect
import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from cases import CASES, Case

import kernel_pytorch.jax as kp
from kernel_pytorch.jax import ej


def changes(shape: tuple[int, ...]) -> dict[str, Any]:
    """An argument of this shape that was given wrongly in one way."""
    return {
        "a dimension less": jax.ShapeDtypeStruct(shape[1:], jnp.float32),
        "a dimension more": jax.ShapeDtypeStruct((3, *shape), jnp.float32),
        "a column more": jax.ShapeDtypeStruct((*shape[:-1], shape[-1] + 1), jnp.float32),
        "none": jax.ShapeDtypeStruct((), jnp.float32),
        "integers": jax.ShapeDtypeStruct(shape, jnp.int32),
    }


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_arguments_of_another_shape_or_type(case: Case) -> None:
    """Some are another call that is right (a vector, a batch). Others are refused by a sentence, not by accident."""
    arrays = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in case.shapes]
    refused = 0
    for place, shape in enumerate(case.shapes):
        for change in changes(shape).values():
            try:
                jax.eval_shape(case.ours, *arrays[:place], change, *arrays[place + 1 :], *case.constants)
            except (RuntimeError, TypeError, ValueError) as error:
                refused += 1
                assert re.match(r"[a-z_0-9]+: .*(;|, give|, convert)", str(error)), str(error)
    assert refused > 0


def test_types_that_no_op_takes() -> None:
    x = jax.ShapeDtypeStruct((2, 4, 6, 8), jnp.complex64)
    for call, words in [
        (kp.silu, "activation: x is complex64"),
        (lambda x: kp.attention(x, x, x), "attention: query is complex64"),
        (lambda x: kp.attention_packed(x, heads=2), "attention_packed: qkv is complex64"),
    ]:
        with pytest.raises(TypeError, match=words):
            jax.eval_shape(call, x)
    with pytest.raises(TypeError, match="embedding: input has the type float32"):
        kp.embedding(jnp.ones(3), jnp.ones((4, 2)))


OPTION = re.compile(r"(bool|int|float|str|tuple|None|[\[\], |])+")
FUNCTIONS = [
    getattr(module, name) for module in (kp, ej) for name in module.__all__ if inspect.isfunction(getattr(module, name))
]


def test_traced_options_are_named() -> None:
    """Every option of every function: it is looked at before the arguments are."""
    seen = 0
    for function in FUNCTIONS:
        name = function.__name__
        parameters = inspect.signature(function).parameters.values()
        required = [one for one in parameters if one.default is one.empty and one.kind is not one.VAR_KEYWORD]
        front = [1 for one in required if one.kind is one.POSITIONAL_ONLY]
        named = {one.name: 1 for one in required if one.kind is not one.POSITIONAL_ONLY}
        for one in parameters:
            if not OPTION.fullmatch(str(one.annotation)):
                continue
            with pytest.raises(TypeError, match=rf"{name}: {one.name} is traced"):
                jax.eval_shape(lambda value: function(*front, **{**named, one.name: value}), 1.0)  # noqa: B023
            seen += 1
    assert seen > 100
    x, eps = jnp.ones((2, 4)), jnp.float32(1e-3)
    assert (kp.rms_norm(x, None, eps) == kp.rms_norm(x, eps=float(eps))).all()
    with pytest.raises(TypeError, match=r"attention: window is an array of shape \[2\]"):
        kp.attention(x[None, None], x[None, None], x[None, None], window=jnp.array([1, 2]))
