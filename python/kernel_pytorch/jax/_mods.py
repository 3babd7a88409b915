"""Score and mask functions of attention: jaxprs of scalars as the core's programs (kernel_pytorch/expression/text.h).

A function of jnp scalars is traced by JAX itself; its jaxpr is rewritten, operation by operation, into the text that
attention's kernels compile. Arrays that it indexes, passed or closed over, are tensors that the program loads from.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ._call import name_of_dtype

Mod = Callable[..., Any]

# Primitive -> operation of the same arguments.
_PLAIN = {
    **{name: name for name in ("add", "sub", "mul", "max", "min", "neg", "abs", "floor", "exp", "exp2", "log", "sqrt")},
    **{name: name for name in ("rsqrt", "tanh", "sin", "cos", "erf", "pow", "eq", "ne", "lt", "le")},
    **{name: name for name in ("and", "or", "xor", "not", "shift_left")},
    "logistic": "sigmoid",
    "shift_right_arithmetic": "shift_right",
}
_SWAPPED = {"gt": "lt", "ge": "le"}
# jnp's own functions of these names, which are several primitives each.
_NAMED = {"remainder": "mod", "floor_divide": "floor_div"}
_INLINED = ("jit", "pjit", "closed_call", "custom_jvp_call", "custom_vjp_call", "core_call", "remat", "checkpoint")
_UNCHANGED = ("copy", "copy_p", "stop_gradient", "reshape", "squeeze", "broadcast_in_dim", "optimization_barrier")
_CAPTURED_TYPES = ("fp32", "fp64", "bf16", "fp16", "int32", "int64", "bool")


class Programs(NamedTuple):
    score_mod: str
    mask_mod: str
    captured: tuple[Any, ...]


class _Loaded(NamedTuple):
    """An array that a program reads, with its indices once they are known."""

    number: int
    indices: tuple[int, ...] | None = None


def programs_of(score_mod: Mod | None, mask_mod: Mod | None, captured: Sequence[Any]) -> Programs:
    """The texts of both functions, "" where there is none, and the arrays that they read.

    Args:
        score_mod: (score, batch, head, query, key, *captured) -> the new score.
        mask_mod: (batch, head, query, key, *captured) -> whether the score is kept.
    """
    arrays = [jnp.asarray(one) for one in captured]
    jaxprs = {}
    for name, function, inputs in (("score_mod", score_mod, 5), ("mask_mod", mask_mod, 4)):
        if function is None:
            continue
        index = jax.ShapeDtypeStruct((), jnp.int32)
        scalars = [jax.ShapeDtypeStruct((), jnp.float32)] * (inputs == 5) + [index] * 4
        given = [] if _takes_only(function, inputs) else arrays
        jaxprs[name] = jax.make_jaxpr(function)(*scalars, *given)
    for jaxpr in jaxprs.values():
        for one in _arrays_of(jaxpr):
            if not any(one is known for known in arrays):
                arrays.append(one)
    texts = {name: _Program(name, jaxpr, arrays).text() for name, jaxpr in jaxprs.items()}
    return Programs(texts.get("score_mod", ""), texts.get("mask_mod", ""), tuple(arrays))


def _arrays_of(closed: Any) -> Iterator[Any]:
    """What a jaxpr closes over: its constants, and by jax's setting literals; those of inner functions too."""
    jaxpr = getattr(closed, "jaxpr", closed)
    yield from getattr(closed, "consts", ())
    for equation in jaxpr.eqns:
        yield from (atom.val for atom in equation.invars if hasattr(atom, "val") and np.ndim(atom.val) > 0)
        inner = _inner(equation.params)
        if inner is not None:
            yield from (one for one in _arrays_of(inner) if np.ndim(one) > 0)


def _inner(params: Any) -> Any:
    return params.get("jaxpr", params.get("call_jaxpr", params.get("fun_jaxpr")))


def _takes_only(function: Mod, count: int) -> bool:
    """Whether it takes so many arguments and no more: one that reads no captured array need not name them."""
    parameters = inspect.signature(function).parameters.values()
    has_rest = any(parameter.kind == inspect.Parameter.VAR_POSITIONAL for parameter in parameters)
    places = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return not has_rest and sum(parameter.kind in places for parameter in parameters) == count


class _Program:
    """Lines of one program. A value is the number of its line, or an array that is not an element yet."""

    def __init__(self, name: str, closed: Any, arrays: Sequence[Any]) -> None:
        self.name = name
        self.arrays = arrays
        self.lines: dict[str, int] = {}
        inputs = ("score", "batch", "head", "query", "key")[0 if name == "score_mod" else 1 :]
        values: list[Any] = [self.add(word) for word in inputs]
        values += [_Loaded(number) for number in range(len(closed.jaxpr.invars) - len(inputs))]
        constants = [_Loaded(next(i for i, known in enumerate(arrays) if known is one)) for one in closed.consts]
        results = self.run(closed.jaxpr, constants, values)
        if len(results) != 1 or closed.out_avals[0].shape != ():
            shapes = [list(aval.shape) for aval in closed.out_avals]
            raise TypeError(f"attention: {name} returns arrays of the shapes {shapes}; it must return one scalar")
        self.result = self.scalar(results[0])

    def text(self) -> str:
        captures = [f"capture {self._type(one)} {one.ndim}" for one in self.arrays]
        lines = [f"%{number} = {line}" for line, number in self.lines.items()]
        return "\n".join(["expression 1", *captures, *lines, f"return %{self.result}", ""])

    def add(self, word: str, *arguments: int) -> int:
        line = " ".join([word, *(f"%{number}" for number in arguments)])
        return self.lines.setdefault(line, len(self.lines))

    def constant(self, value: Any) -> int:
        value = np.asarray(value)[()]
        if isinstance(value, np.bool_):
            return self.add(f"bool {str(bool(value)).lower()}")
        if isinstance(value, np.integer):
            return self.add(f"int {int(value)}")
        return self.add(f"float {float(value)!r}")

    def scalar(self, value: Any) -> int:
        if not isinstance(value, _Loaded):
            return value  # type: ignore[no-any-return]
        indices = () if value.indices is None and self.arrays[value.number].ndim == 0 else value.indices
        if indices is None:
            shape = list(self.arrays[value.number].shape)
            raise TypeError(f"attention: {self.name} computes with an array of shape {shape}; read one element of it")
        return self.add(f"load {value.number}", *indices)

    def run(self, jaxpr: Any, constants: Sequence[Any], inputs: Sequence[Any]) -> list[Any]:
        known: dict[Any, Any] = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*constants, *inputs)))

        def read(atom: Any) -> Any:
            return self._met(atom.val) if hasattr(atom, "val") else known[atom]

        for equation in jaxpr.eqns:
            results = self.step(equation, [read(atom) for atom in equation.invars])
            known.update(zip(equation.outvars, results))
        return [read(atom) for atom in jaxpr.outvars]

    def step(self, equation: Any, values: list[Any]) -> list[Any]:
        primitive, params = equation.primitive.name, equation.params
        if primitive in _INLINED:
            if params.get("name") in _NAMED:
                return [self.add(_NAMED[params["name"]], *map(self.scalar, values))]
            inner = _inner(params)
            consts = [self._met(one) for one in getattr(inner, "consts", ())]
            return self.run(getattr(inner, "jaxpr", inner), consts, values)
        if primitive == "dynamic_slice" and set(params["slice_sizes"]) <= {1} and isinstance(values[0], _Loaded):
            return [_Loaded(values[0].number, tuple(map(self.scalar, values[1:])))]
        if primitive in _UNCHANGED and equation.outvars[0].aval.size == 1:
            return [values[0]]
        return [self.operation(primitive, params, equation, [self.scalar(value) for value in values])]

    def operation(self, primitive: str, params: Any, equation: Any, values: list[int]) -> int:
        if primitive in _PLAIN:
            return self.add(_PLAIN[primitive], *values)
        if primitive in _SWAPPED:
            return self.add(_SWAPPED[primitive], values[1], values[0])
        is_float = jnp.issubdtype(equation.invars[0].aval.dtype, jnp.floating)
        if primitive == "div" and is_float:
            return self.add("div", *values)
        if primitive == "select_n" and len(values) == 3:
            return self.add("where", values[0], values[2], values[1])
        if primitive == "convert_element_type":
            to = params["new_dtype"]
            word = "to_bool" if to == jnp.bool_ else "to_float" if jnp.issubdtype(to, jnp.floating) else "to_int"
            return self.add(word, values[0])
        if primitive == "integer_pow" and params["y"] in (2, 3):
            square = self.add("mul", values[0], values[0])
            return square if params["y"] == 2 else self.add("mul", square, values[0])
        if primitive == "integer_pow":
            return self.add("pow", values[0], self.constant(float(params["y"])))
        if primitive == "square":
            return self.add("mul", values[0], values[0])
        if primitive == "ceil":
            return self.add("neg", self.add("floor", self.add("neg", values[0])))
        if primitive == "log1p":
            return self.add("log", self.add("add", values[0], self.constant(1.0)))
        if primitive == "sign":
            zero, one = (self.constant(float(i) if is_float else i) for i in (0, 1))
            above = self.add("where", self.add("lt", zero, values[0]), one, zero)
            return self.add("where", self.add("lt", values[0], zero), self.add("neg", one), above)
        raise TypeError(
            f"attention: {self.name} uses {primitive}, which a kernel does not compute for a single score; it may use "
            "arithmetic, comparisons, jnp.where, exp, log, tanh, sigmoid, sin, cos, erf, sqrt, floor, //, % and "
            "elements of arrays; otherwise pass what it computes as bias or mask"
        )

    def _met(self, array: Any) -> Any:
        """A constant: an array is one of those found, a number is written down."""
        for number, known in enumerate(self.arrays):
            if known is array:
                return _Loaded(number)
        return self.constant(array)

    def _type(self, array: Any) -> str:
        name = name_of_dtype(array.dtype)
        if name not in _CAPTURED_TYPES or array.dtype == jnp.uint32:
            raise TypeError(f"attention: a captured array is {array.dtype}; convert it to {', '.join(_CAPTURED_TYPES)}")
        return name
