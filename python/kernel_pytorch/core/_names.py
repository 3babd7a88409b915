"""Keyword arguments by more than one name, and errors for unknown ones that name the call and the nearest name."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeVar

_Class = TypeVar("_Class", bound=type)
_Forward = TypeVar("_Forward", bound=Callable[..., Any])

# What other libraries call the sizes of an attention layer.
SIZES = {"d_model": "embed_dim", "hidden_size": "embed_dim", "n_heads": "num_heads", "nhead": "num_heads"}


def renamed(call: str, options: Mapping[str, Any], aliases: Mapping[str, str]) -> dict[str, Any]:
    """The options with aliases replaced; raises where an option comes by two names."""
    result: dict[str, Any] = {}
    for name, value in options.items():
        wanted = aliases.get(name, name)
        if wanted in result:
            raise TypeError(f"{call}: {wanted} is given twice, also as {name}; give it once")
        result[wanted] = value
    return result


def check_known(call: str, options: Collection[str], known: Collection[str]) -> None:
    for name in options:
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            cure = f"did you mean {near[0]!r}?" if near else f"it takes {', '.join(known)}"
            raise TypeError(f"{call}: there is no argument {name!r}; {cure}")


def accepts_names(**aliases: str) -> Callable[[_Class], _Class]:
    """For a dataclass: its constructor takes fields by their aliases, and an unknown name is our error."""

    def decorate(cls: _Class) -> _Class:
        construct: Any = cls.__init__  # type: ignore[misc]
        known = [name for name in inspect.signature(construct).parameters if name != "self"]

        @functools.wraps(construct)
        def __init__(self: Any, *arguments: Any, **options: Any) -> None:
            options = renamed(cls.__name__, options, aliases)
            check_known(cls.__name__, options, known)
            construct(self, *arguments, **options)

        cls.__init__ = __init__  # type: ignore[misc]
        return cls

    return decorate


def accepts_mask_names(forward: _Forward) -> _Forward:
    """Lets a forward with `attention_mask` take it by its other names as well."""

    @functools.wraps(forward)
    def with_mask_names(self: Any, *arguments: Any, **options: Any) -> Any:
        for alias in ("attn_mask", "mask"):  # what other libraries call it
            if alias in options:
                if options.get("attention_mask") is not None and options[alias] is not None:
                    raise TypeError(f"{type(self).__name__}: attention_mask and {alias} are one argument; give one")
                given = options.pop(alias)
                if given is not None:
                    options["attention_mask"] = given
        return forward(self, *arguments, **options)

    # A code object of its own: torch.compile counts recompilations by it, and all layers would share one.
    with_mask_names.__code__ = with_mask_names.__code__.replace()  # type: ignore[attr-defined]
    return with_mask_names  # type: ignore[return-value]
