"""What score and mask functions can use: functions of torch by name, as operations of a program, and operators."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

Function = Callable[..., Any]


class TraceError(TypeError):
    """A score or mask function does what a program cannot; the message names the cure."""


# Same name, same meaning, one argument or two.
_PLAIN = (
    *("abs", "floor", "exp", "exp2", "log", "log2", "sqrt", "rsqrt", "tanh", "sigmoid", "sin", "cos", "erf", "neg"),
    *("mul", "pow", "eq", "ne", "lt", "le"),
)
# Function -> operation.
_RENAMED = {
    "absolute": "abs",
    "negative": "neg",
    "multiply": "mul",
    "true_divide": "div",
    "floor_divide": "floor_div",
    "floordiv": "floor_div",
    "truediv": "div",
    "remainder": "mod",
    "minimum": "min",
    "maximum": "max",
    "not_equal": "ne",
    "less": "lt",
    "less_equal": "le",
    "bitwise_not": "not",
    "invert": "not",
    "bitwise_and": "and",
    "bitwise_or": "or",
    "bitwise_xor": "xor",
    "bitwise_left_shift": "shift_left",
    "bitwise_right_shift": "shift_right",
    "lshift": "shift_left",
    "rshift": "shift_right",
    "mod": "mod",
    "and": "and",
    "or": "or",
    "xor": "xor",
    "float": "to_float",
    "double": "to_float",
    "long": "to_int",
    "int": "to_int",
    "bool": "to_bool",
}
# Function -> operation with its arguments exchanged.
_SWAPPED = {"gt": "lt", "ge": "le", "greater": "lt", "greater_equal": "le"}
# The name of an operator's method on the right-hand side -> the operator.
REFLECTED = {
    f"__r{name}__": name
    for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor", "lshift", "rshift")
} | {"rsub": "sub", "__rdiv__": "div"}


def _plain(word: str) -> Function:
    return lambda program, *arguments: program.add(word, *arguments)


def _swapped(word: str) -> Function:
    return lambda program, a, b: program.add(word, b, a)


def _add(program: Any, a: Any, b: Any, *, alpha: Any = 1) -> Any:
    return program.add("add", a, b if alpha == 1 else program.add("mul", b, alpha))


def _sub(program: Any, a: Any, b: Any, *, alpha: Any = 1) -> Any:
    return program.add("sub", a, b if alpha == 1 else program.add("mul", b, alpha))


def _div(program: Any, a: Any, b: Any, *, rounding_mode: str | None = None) -> Any:
    if rounding_mode not in (None, "floor"):
        raise TraceError(f"torch.div with rounding_mode={rounding_mode!r} in a score or mask function: use //")
    return program.add("floor_div" if rounding_mode else "div", a, b)


def _where(program: Any, condition: Any, a: Any, b: Any) -> Any:
    return program.add("where", condition, a, b)


def _clamp(program: Any, x: Any, min: Any = None, max: Any = None) -> Any:
    # Not by minimum and maximum: at the bound itself torch hands the whole gradient to x.
    if min is not None:
        x = program.add("where", program.add("lt", x, min), min, x)
    if max is not None:
        x = program.add("where", program.add("lt", max, x), max, x)
    return x


def _relu(program: Any, x: Any, inplace: bool = False) -> Any:
    return program.add("where", program.add("le", x, 0), 0, x)


def _logical(word: str) -> Function:
    return lambda program, *arguments: program.add(word, *(program.add("to_bool", item) for item in arguments))


def _to(program: Any, x: Any, dtype: Any, *_: Any, **__: Any) -> Any:
    if not isinstance(dtype, torch.dtype):
        return x  # a device: programs run where the scores are
    if dtype == torch.bool:
        return program.add("to_bool", x)
    return program.add("to_float" if dtype.is_floating_point else "to_int", x)


FUNCTIONS: dict[str, Function] = {
    **{name: _plain(name) for name in _PLAIN},
    **{name: _plain(word) for name, word in _RENAMED.items()},
    **{name: _swapped(word) for name, word in _SWAPPED.items()},
    **{f"logical_{word}": _logical(word) for word in ("and", "or", "xor", "not")},
    "add": _add,
    "sub": _sub,
    "subtract": _sub,
    "div": _div,
    "divide": _div,
    "where": _where,
    "clamp": _clamp,
    "clip": _clamp,
    "clamp_min": lambda program, x, min: _clamp(program, x, min=min),
    "clamp_max": lambda program, x, max: _clamp(program, x, max=max),
    "relu": _relu,
    "square": lambda program, x: program.add("mul", x, x),
    "reciprocal": lambda program, x: program.add("div", 1.0, x),
    "ceil": lambda program, x: program.add("neg", program.add("floor", program.add("neg", x))),
    "to": _to,
    "type": _to,
    "zeros_like": lambda program, x, **_: program.value(0.0),
    "ones_like": lambda program, x, **_: program.value(1.0),
    "full_like": lambda program, x, fill_value, **_: program.value(fill_value),
}

_OPERATORS = (
    *("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor", "lshift", "rshift"),
    *("eq", "ne", "lt", "le", "gt", "ge", "neg", "abs", "invert"),
)


def add_operators(proxy: type) -> None:
    """Gives a class of traced values Python's operators."""
    for name in _OPERATORS:
        setattr(proxy, f"__{name}__", _method(FUNCTIONS[name], False))
        if f"__r{name}__" in REFLECTED:
            setattr(proxy, f"__r{name}__", _method(FUNCTIONS[name], True))


def _method(function: Function, reflected: bool) -> Function:
    def method(self: Any, *arguments: Any) -> Any:
        operands = (*arguments, self) if reflected else (self, *arguments)
        return function(self.program, *operands)

    return method
