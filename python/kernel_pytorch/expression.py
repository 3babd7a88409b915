"""Score and mask functions of attention, traced into small programs.

A score function is `score_mod(score, batch, head, query, key, *captured)`, a mask function
`mask_mod(batch, head, query, key, *captured)`: Python over single numbers, with operators or functions of torch, that
indexes tensors (`bias[head, query - key]`). It is run once, with values that write down what is done to them; what
comes out is a text (kernel_pytorch/expression/text.h) that is compiled into the GPU kernel, evaluated on tiles by the
CPU and differentiated by the core. The tensors it reads are those passed as `captured`, and those it finds around it.
"""

from __future__ import annotations

import difflib
import inspect
import numbers
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ._expression_cache import TraceCache
from ._expression_functions import FUNCTIONS, REFLECTED, TraceError, add_operators

__all__ = ["Trace", "TraceError", "evaluate", "trace"]

_DTYPES = {
    torch.float32: "fp32",
    torch.float64: "fp64",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.int32: "int32",
    torch.int64: "int64",
    torch.bool: "bool",
}


class Trace(NamedTuple):
    """Texts of the functions ("" where there is none), and the tensors that both read, in order."""

    score_mod: str
    mask_mod: str
    captured: tuple[Tensor, ...]


def trace(
    score_mod: Callable[..., Any] | None = None,
    mask_mod: Callable[..., Any] | None = None,
    captured: Sequence[Tensor] = (),
) -> Trace:
    """The programs of a score function, a mask function, or both.

    Args:
        score_mod: (score, batch, head, query, key, *captured) -> the new score.
        mask_mod: (batch, head, query, key, *captured) -> whether the score is kept.
        captured: tensors that the functions are given as further arguments, where they take them. Tensors that they
            close over are found.

    A function is traced once for each set of constants, and shapes of tensors, that it closes over. Under torch.compile
    the texts are constants of the graph, so tensors must come as `captured`, and their shapes are not known.
    """
    if torch.compiler.is_compiling():
        score_text, mask_text = _constant_texts(
            score_mod, mask_mod, tuple((item.dtype, item.ndim) for item in captured)
        )
        return Trace(score_text, mask_text, tuple(captured))
    result: Trace = _cache.get(score_mod, mask_mod, tuple(captured), _trace)
    return result


def evaluate(program: str, score: Tensor, captured: Sequence[Tensor] = (), *, derivative: bool = False) -> Tensor:
    """A program on every element of `score` [batch, heads, queries, keys], on the CPU: scores, or a mask of bools.

    With `derivative`, that of the new score by the old one.
    """
    from . import _torch as _torch  # loads the library, which tracing does without

    scores = score.detach().to(torch.float32).contiguous()
    tensors = [tensor.detach() for tensor in captured]
    result: Tensor = torch.ops.kernel_pytorch.evaluate_expression(program, scores, tensors, derivative)
    return result


def _constant_texts(score_mod: Any, mask_mod: Any, kinds: tuple[tuple[torch.dtype, int], ...]) -> tuple[str, str]:
    placeholders = tuple(torch.empty((1,) * ndim, dtype=dtype, device="meta") for dtype, ndim in kinds)
    traced: Trace = _cache.get(score_mod, mask_mod, placeholders, _trace)
    if len(traced.captured) != len(kinds):
        raise TraceError(
            "a score or mask function closes over a tensor; under torch.compile pass it as captured=(...), and take it "
            "as a further argument"
        )
    return traced.score_mod, traced.mask_mod


# What torch.compiler.assume_constant_result sets, without importing the compiler, which takes a second.
_constant_texts._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _trace(
    score_mod: Callable[..., Any] | None, mask_mod: Callable[..., Any] | None, captured: tuple[Tensor, ...]
) -> tuple[Trace, bool]:
    """The trace, and whether it holds for other tensors of these shapes."""
    captures = _Captures(captured)
    programs = [
        _Program(function, names, captures) if function else None
        for function, names in ((score_mod, _SCORE_INPUTS), (mask_mod, _SCORE_INPUTS[1:]))
    ]
    texts = [program.text() if program else "" for program in programs]
    return Trace(texts[0], texts[1], tuple(captures.tensors)), captures.are_all_that_was_read


_SCORE_INPUTS = ("score", "batch", "head", "query", "key")


class _Captures:
    """The tensors of a trace: those given, then those met."""

    def __init__(self, given: Iterable[Tensor]) -> None:
        self.given = tuple(given)
        self.tensors: list[Tensor] = []
        self.made: list[Tensor] = []  # by the function itself, of constants
        self.are_all_that_was_read = True
        for tensor in self.given:
            self.number_of(tensor)

    def number_of(self, tensor: Tensor) -> int:
        if tensor.dtype not in _DTYPES:
            raise TraceError(f"a captured tensor is {tensor.dtype}; convert it to one of {sorted(_DTYPES.values())}")
        for number, known in enumerate(self.tensors):
            if known is tensor:
                return number
        self.tensors.append(tensor)
        return len(self.tensors) - 1

    def has_constant(self, tensor: Tensor) -> bool:
        return any(tensor is made for made in self.made)


class _Program:
    """Lines of one program, written while its function runs."""

    def __init__(self, function: Callable[..., Any], names: Sequence[str], captures: _Captures) -> None:
        self.captures = captures
        self.lines: dict[str, int] = {}  # operation -> its number
        given = [Captured(self, tensor, ()) for tensor in captures.given]
        inputs = [self.add(name) for name in names]
        with _Interception(self):
            result = function(*inputs, *([] if _takes_only(function, len(inputs)) else given))
        self.result = self.value(result)

    def text(self) -> str:
        captures = [f"capture {_DTYPES[tensor.dtype]} {tensor.ndim}" for tensor in self.captures.tensors]
        lines = [f"%{number} = {line}" for line, number in self.lines.items()]
        return "\n".join(["expression 1", *captures, *lines, f"return %{self.result.number}", ""])

    def add(self, word: str, *arguments: Any) -> Value:
        line = " ".join([word, *(f"%{self.value(argument).number}" for argument in arguments)])
        return Value(self, self.lines.setdefault(line, len(self.lines)))

    def value(self, given: Any) -> Value:
        """A number, a value, or a tensor without dimensions, as a value."""
        if isinstance(given, Value):
            if given.program is not self:
                raise TraceError("a value of another trace: a score or mask function must not keep its arguments")
            return given
        if isinstance(given, bool):
            return self.add(f"bool {str(given).lower()}")
        if isinstance(given, numbers.Integral):
            return self.add(f"int {int(given)}")
        if isinstance(given, numbers.Real):
            return self.add(f"float {float(given)!r}")
        if isinstance(given, Tensor):
            if given.ndim == 0 and self.captures.has_constant(given):
                return self.value(given.item())
            given = Captured(self, given, ())
        if isinstance(given, Captured):
            return given.element()
        raise TraceError(f"a score or mask function computes with numbers and tensor elements, not with {given!r}")


def _takes_only(function: Callable[..., Any], count: int) -> bool:
    """Whether it takes so many arguments and no more: one that reads no captured tensor need not name them."""
    places = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(function).parameters.values()
    has_rest = any(parameter.kind == inspect.Parameter.VAR_POSITIONAL for parameter in parameters)
    return not has_rest and sum(parameter.kind in places for parameter in parameters) == count


class Value:
    """A number that a program computes. Operators and functions of torch on it add to the program."""

    __slots__ = ("number", "program")
    __hash__ = object.__hash__

    def __init__(self, program: _Program, number: int) -> None:
        self.program = program
        self.number = number

    def __repr__(self) -> str:
        return f"<traced value %{self.number}>"

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _call(_program_in((args, kwargs)), function, args, kwargs or {})

    def __getattr__(self, name: str) -> Any:
        function = FUNCTIONS.get(name)
        if function is None:
            if name in ("item", "tolist", "numpy"):
                self._refuse()
            raise AttributeError(f"a traced value has no {name!r}; {_instead_of(name)}")
        return lambda *args, **kwargs: function(self.program, self, *args, **kwargs)

    def _refuse(self, *_: Any) -> Any:
        raise TraceError(
            "a score or mask function is traced, so its values cannot be looked at: write torch.where(condition, a, b) "
            "for `if`, `&`, `|`, `~` for `and`, `or`, `not` and for chained comparisons, torch.minimum and "
            "torch.maximum for min and max, and torch's functions for those of math"
        )

    __bool__ = __int__ = __float__ = __index__ = __iter__ = __len__ = __contains__ = _refuse


class Captured:
    """A tensor that a function reads, with the indices given so far: bias[head][query] is bias[head, query]."""

    __slots__ = ("indices", "program", "tensor")

    def __init__(self, program: _Program, tensor: Tensor, indices: tuple[Any, ...]) -> None:
        self.program = program
        self.tensor = tensor
        self.indices = indices

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _call(_program_in((args, kwargs)), function, args, kwargs or {})

    def __getitem__(self, index: Any) -> Any:
        added = index if isinstance(index, tuple) else (index,)
        if any(item is None or item is Ellipsis or isinstance(item, (slice, list)) for item in added):
            raise TraceError("a captured tensor is read one element at a time: give one integer for each dimension")
        indices = (*self.indices, *added)
        whole = Captured(self.program, self.tensor, indices)
        return whole.element() if len(indices) == self.tensor.ndim else whole

    def element(self) -> Value:
        if len(self.indices) != self.tensor.ndim:
            raise TraceError(
                f"a captured tensor of shape {list(self.tensor.shape)} is used with {len(self.indices)} indices; "
                "index it with one integer for each dimension, such as bias[head, query - key]"
            )
        return self.program.add(f"load {self.program.captures.number_of(self.tensor)}", *self.indices)

    def __getattr__(self, name: str) -> Any:
        if name in ("shape", "size", "numel") and self.tensor.is_meta:
            raise TraceError(
                "under torch.compile a captured tensor's shape is not known: close over the number instead"
            )
        if name in ("shape", "size", "numel", "ndim", "dim", "dtype"):
            return getattr(self.tensor, name)
        return getattr(self.element(), name)


class _Interception(TorchFunctionMode):
    """Sees every call of torch while a function is traced, so that a real tensor can be indexed by traced values."""

    def __init__(self, program: _Program) -> None:
        super().__init__()
        self.program = program

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if _program_in((args, kwargs)) is not None:
            return _call(self.program, function, args, kwargs)
        captures = self.program.captures
        tensors = [item for item in args if isinstance(item, Tensor)]
        if any(not captures.has_constant(tensor) for tensor in tensors) and function not in _SHAPE_FUNCTIONS:
            captures.are_all_that_was_read = False  # what it computes with may be other numbers at the next call
        result = function(*args, **kwargs)
        if isinstance(result, Tensor) and all(captures.has_constant(tensor) for tensor in tensors):
            captures.made.append(result)
        return result


_SHAPE_FUNCTIONS = {
    Tensor.size,
    Tensor.dim,
    Tensor.numel,
    *(getattr(Tensor, name).__get__ for name in ("shape", "ndim", "dtype", "device", "requires_grad")),
}


def _program_in(given: Any) -> _Program | None:
    """That of the first traced value among arguments, also inside of tuples."""
    if isinstance(given, (Value, Captured)):
        return given.program
    items = given.values() if isinstance(given, dict) else given if isinstance(given, (tuple, list)) else ()
    return next((found for found in map(_program_in, items) if found is not None), None)


def _instead_of(name: str) -> str:
    near = difflib.get_close_matches(name, FUNCTIONS, 3)
    listed = 'docs/expression.md has what score and mask functions can use, under "What they can use"'
    return f"did you mean {' or '.join(near)}? {listed}" if near else listed


def _call(program: _Program | None, function: Any, args: Any, kwargs: Any) -> Any:
    assert program is not None
    name = getattr(function, "__name__", str(function))
    if name == "__getitem__":
        return Captured(program, args[0], ())[args[1]]
    implementation = FUNCTIONS.get(REFLECTED.get(name, name.strip("_")))
    if implementation is None:
        raise TraceError(f"score and mask functions cannot use torch's {name!r}; {_instead_of(name)}")
    if name in REFLECTED:
        args = (args[1], args[0], *args[2:])
    return implementation(program, *args, **kwargs)


add_operators(Value)
add_operators(Captured)
_cache: TraceCache = TraceCache()
