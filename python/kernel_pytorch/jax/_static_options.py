"""Options of public functions, which are known while tracing: a traced one is refused by name, whatever the function
would have done with it first."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Iterable
from typing import Any

import jax

_STATIC = {"bool", "int", "float", "str", "tuple", "None"}


def check_options(namespace: dict[str, Any], names: Iterable[str]) -> None:
    """Puts the check before the functions among these names, where it has something to look at."""
    for name in names:
        if inspect.isfunction(namespace[name]) and (options := _options_of(namespace[name])):
            namespace[name] = _checked(namespace[name], options)


def _options_of(function: Callable[..., Any]) -> dict[str, int]:
    """Parameters that hold no arrays, by annotation, and their places among positional ones (-1: by name alone)."""
    options = {}
    for place, one in enumerate(inspect.signature(function).parameters.values()):
        if set(re.findall(r"\w+", str(one.annotation))) <= _STATIC:
            options[one.name] = -1 if one.kind is one.KEYWORD_ONLY else place
    return options


def _checked(function: Callable[..., Any], options: dict[str, int]) -> Callable[..., Any]:
    name_at = {place: name for name, place in options.items() if place >= 0}

    @functools.wraps(function)
    def checked(*given: Any, **named: Any) -> Any:
        if any(isinstance(one, jax.Array) for one in named.values()) or any(
            isinstance(one, jax.Array) for one in given[min(name_at, default=len(given)) :]
        ):
            given = tuple(
                _known(function, name_at[place], one) if place in name_at else one for place, one in enumerate(given)
            )
            named = {name: _known(function, name, one) if name in options else one for name, one in named.items()}
        return function(*given, **named)

    return checked


def _known(function: Callable[..., Any], name: str, value: Any) -> Any:
    """The number that an array holds."""
    if isinstance(value, jax.core.Tracer):
        raise TypeError(
            f"{function.__name__}: {name} is traced ({value.aval.str_short()}); it must be known while tracing, make "
            f'it a static argument: jax.jit(..., static_argnames=("{name}",))'
        )
    if isinstance(value, jax.Array):
        if value.size != 1:
            raise TypeError(f"{function.__name__}: {name} is an array of shape {list(value.shape)}; give one number")
        return value.item()
    return value
