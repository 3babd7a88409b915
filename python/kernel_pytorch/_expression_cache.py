"""Remembers traces by what a function is made of, so that a new closure over the same constants is no new trace.

The key of a function is its code and what that code can reach by name: constants by value, tensors by type and shape,
other functions, and functools.partial of them, by their own keys. What is reached in any other way (an attribute of an
object) makes a function one that is traced at each call. Tensors are no part of a key, but found again at the same
places.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

from torch import Tensor

_CONSTANTS = frozenset({bool, int, str, bytes, type(None), type(Ellipsis)})
# What they hold is taken not to change.
_FIXED = (types.ModuleType, types.BuiltinFunctionType, type)
_DEEPEST = 8


class _NotKnown(Exception):
    """Something that has no key."""


class TraceCache:
    """(score_mod, mask_mod, captured) -> the trace of both."""

    def __init__(self, most: int = 1024) -> None:
        self._traces: dict[Any, tuple[Any, list[int]]] = {}
        self._most = most

    def get(self, score_mod: Any, mask_mod: Any, captured: tuple[Tensor, ...], trace: Callable[..., Any]) -> Any:
        tensors: list[Tensor] = []
        try:
            key = (_key(captured, tensors, 0), _key(score_mod, tensors, 0), _key(mask_mod, tensors, 0))
        except _NotKnown:
            return trace(score_mod, mask_mod, captured)[0]
        known = self._traces.get((key, _aliases(tensors)))
        if known is not None:
            return known[0]._replace(captured=tuple([tensors[place] for place in known[1]]))
        result, is_general = trace(score_mod, mask_mod, captured)
        ids = [id(tensor) for tensor in tensors]
        if is_general and all(id(tensor) in ids for tensor in result.captured):
            if len(self._traces) >= self._most:
                self._traces.clear()
            places = [ids.index(id(tensor)) for tensor in result.captured]
            self._traces[key, _aliases(tensors)] = (result._replace(captured=()), places)
        return result


def _aliases(tensors: list[Tensor]) -> tuple[int, ...]:
    """Which tensors are one: in the next call they may be two."""
    first: dict[int, int] = {}
    return tuple([first.setdefault(id(tensor), place) for place, tensor in enumerate(tensors)])


def _key(item: Any, tensors: list[Tensor], depth: int) -> Any:
    kind = type(item)
    if kind in _CONSTANTS:
        return kind, item  # with its type: 1 and True are different constants
    if kind is float:
        return kind, item.hex()  # so are 0.0 and -0.0, and NaN is equal to itself
    if isinstance(item, Tensor):
        tensors.append(item)
        return item.dtype, item.shape
    if isinstance(item, (tuple, list)):
        return kind, tuple([_key(part, tensors, depth) for part in item])
    if isinstance(item, types.FunctionType) and depth < _DEEPEST:
        return _function_key(item, tensors, depth + 1)
    if kind is functools.partial and depth < _DEEPEST:
        parts = (item.func, item.args, *item.keywords.items())
        return kind, tuple([_key(part, tensors, depth + 1) for part in parts])
    if isinstance(item, _FIXED):
        return id(item)
    raise _NotKnown


def _function_key(function: types.FunctionType, tensors: list[Tensor], depth: int) -> Any:
    """Its code, and what that can name: defaults, cells, globals."""
    if (function.__module__ or "").startswith("torch."):
        return function
    parts: list[Any] = [function.__defaults__, *(function.__kwdefaults__ or {}).items()]
    for cell in function.__closure__ or ():
        try:
            parts.append(cell.cell_contents)
        except ValueError:  # not assigned yet
            raise _NotKnown from None
    known = function.__globals__
    parts += [known[name] for name in _names(function.__code__) if name in known]
    return function.__code__, tuple([_key(part, tensors, depth) for part in parts])


@functools.lru_cache(maxsize=4096)
def _names(code: types.CodeType) -> tuple[str, ...]:
    """Names that the code, or a function inside of it, may look up among globals."""
    inner = [_names(constant) for constant in code.co_consts if isinstance(constant, types.CodeType)]
    return tuple(dict.fromkeys([*code.co_names, *(name for names in inner for name in names)]))
