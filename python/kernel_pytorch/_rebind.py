"""A function's own code with other functions under the names that it calls.

`rebind(forward, {F.gelu: ours})` is forward, line for line, except that wherever it reaches F.gelu, by whatever name
(`F.gelu`, `torch.nn.functional.gelu`, an imported `gelu`), it finds ours. Nothing outside the returned function
changes. Names are resolved as Python does: globals of the function, attributes of modules; helpers that reach
one of them are rebound as well. What is looked up otherwise (methods of tensors, closures) stays.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping
from typing import Any

_DEPTH = 3  # of helpers that call helpers
_NOT_CALLED = ("eager_attention_forward",)  # transformers' fallback, which every forward names and hardly any calls


def rebind(function: Any, table: Mapping[Any, Any]) -> Any:
    """The rebound function, or None where it reaches nothing of the table."""
    return _rebind(function, table, _DEPTH, {})


def reached(function: Any, table: Mapping[Any, Any]) -> list[str]:
    """Names under which the function reaches entries of the table."""
    names: list[str] = []
    _replaced_globals(function, table, _DEPTH, {}, names)
    return sorted(set(names))


def _rebind(function: Any, table: Mapping[Any, Any], depth: int, seen: dict[int, Any]) -> Any:
    if not isinstance(function, types.FunctionType):
        return None
    replaced = _replaced_globals(function, table, depth, seen, [])
    if not replaced:
        return None
    scope = {**function.__globals__, **replaced}  # as they are now
    scope.pop("__name__", None)  # torch.compile would look names up in the module of that name
    # A code object of its own: torch.compile keeps what it made of one, together with the globals of that time.
    code = function.__code__.replace()
    made = types.FunctionType(code, scope, function.__name__, function.__defaults__, function.__closure__)
    # It knows itself by the same name: torch's own functions hand themselves to whatever mode is active.
    if scope.get(made.__name__) is function:
        scope[made.__name__] = made
    made.__kwdefaults__ = function.__kwdefaults__
    made.__dict__.update({key: value for key, value in vars(function).items() if key != "__wrapped__"})
    made.__qualname__, made.__module__, made.__doc__ = function.__qualname__, function.__module__, function.__doc__
    made.__annotations__ = function.__annotations__
    return made


def _replaced_globals(
    function: Any, table: Mapping[Any, Any], depth: int, seen: dict[int, Any], names: list[str]
) -> dict[str, Any]:
    """New values of the function's globals, of those that change."""
    replaced: dict[str, Any] = {}
    if not isinstance(function, types.FunctionType) or depth == 0:
        return replaced
    used = _names_of(function.__code__)
    for name in used:
        value = function.__globals__.get(name)
        if value is None or name in _NOT_CALLED:
            continue
        new = _replacement(value, table, used, depth, seen, names)
        if new is not None:
            replaced[name] = new
    return replaced


def _names_of(code: types.CodeType) -> set[str]:
    """Names that code looks up, in functions inside it too."""
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= _names_of(constant)
    return names


def _replacement(
    value: Any, table: Mapping[Any, Any], used: set[str], depth: int, seen: dict[int, Any], names: list[str]
) -> Any:
    """What stands for a value: the table's, a module with some attributes replaced, a rebound helper, or None."""
    try:
        if value in table:
            names.append(getattr(value, "__name__", "?"))
            return table[value]
    except TypeError:  # not hashable, so not a function
        return None
    if id(value) in seen:
        return seen[id(value)]
    if isinstance(value, types.ModuleType) and value.__name__.split(".")[0] == "torch":
        seen[id(value)] = None  # modules refer to one another
        seen[id(value)] = _module_proxy(value, table, used, depth, seen, names)
        return seen[id(value)]
    if isinstance(value, types.FunctionType):
        seen[id(value)] = None  # recursion
        inner: list[str] = []
        if _replaced_globals(value, table, depth - 1, dict(seen), inner):
            names.extend(inner)
            seen[id(value)] = _rebind(value, table, depth - 1, dict(seen))
        return seen[id(value)]
    return None


def _module_proxy(
    module: types.ModuleType,
    table: Mapping[Any, Any],
    used: set[str],
    depth: int,
    seen: dict[int, Any],
    names: list[str],
) -> Any:
    replaced: dict[str, Any] = {}
    for attribute in used & vars(module).keys():
        value = vars(module)[attribute]
        is_module = isinstance(value, types.ModuleType) and attribute in ("nn", "functional")
        in_table = isinstance(value, Callable) and _is_hashable(value) and value in table  # type: ignore[arg-type]
        if is_module or in_table or attribute == "multi_head_attention_forward":
            new = _replacement(value, table, used, depth, seen, names)
            if new is not None:
                replaced[attribute] = new
    if not replaced:
        return None
    proxy = types.ModuleType(module.__name__, module.__doc__)
    vars(proxy).update(replaced)
    proxy.__getattr__ = lambda name: getattr(module, name)  # type: ignore[method-assign]
    return proxy


def _is_hashable(value: Any) -> bool:
    return getattr(type(value), "__hash__", None) is not None
