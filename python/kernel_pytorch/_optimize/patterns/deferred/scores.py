"""A tensor that is computed when somebody looks at it: the scores of attention, and the probabilities made of them.

`Scores` remembers the functions that a model called to get it. Functions that a `Chain` knows give the next `Scores`;
the product of probabilities with values is our attention, and nothing in between is ever computed. Any other use
calls the remembered functions in their order: the very numbers that the model would have had.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .chain import Chain

__all__ = ["OF_SCORES", "Scores", "call", "settled"]

# By function: what it makes of Scores, handler(mode, function, args, kwargs), or None where it has to see numbers.
OF_SCORES: dict[Any, Callable[[Any, Any, Any, dict[str, Any]], Any]] = {}
# Functions that ask about a tensor and not for its numbers.
_getters: Any = Tensor
_ABOUT = {
    *(
        getattr(_getters, name).__get__
        for name in ("shape", "dtype", "device", "ndim", "is_cuda", "layout", "requires_grad")
    ),
    *(getattr(_getters, name) for name in ("size", "dim", "numel", "is_floating_point", "__len__")),
}


class Scores(Tensor):
    """What `function(*args, **kwargs)` gives, not computed yet."""

    is_deferred = True
    chain: Chain
    made_by: tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]
    value: Tensor | None
    versions: list[tuple[Tensor, int]]

    @staticmethod
    def make(
        chain: Chain, dtype: torch.dtype, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Scores:
        made: Scores = Tensor._make_wrapper_subclass(
            Scores, chain.shape, dtype=dtype, device=chain.query.device, requires_grad=False
        )
        made.chain, made.made_by, made.value = chain, (function, args, kwargs), None
        read = [one for one in (*args, *kwargs.values()) if isinstance(one, Tensor) and type(one) is not Scores]
        made.versions = [] if torch.is_inference_mode_enabled() else [(one, one._version) for one in read]
        return made

    def check(self) -> None:
        """Raises where a tensor that it is made of was written to since."""
        if any(tensor._version != version for tensor, version in self.versions):
            raise RuntimeError(
                "optimize: attention's scores are computed late, and a tensor that they are made of was changed in "
                "place before that; leave the pattern deferred_attention out (optimize(..., patterns=...))"
            )
        for parent in self.made_by[1]:
            if type(parent) is Scores and parent.value is None:
                parent.check()

    def compute(self) -> Tensor:
        if self.value is None:
            self.check()
            function, args, kwargs = self.made_by
            self.value = as_function_of_plain(function, args, kwargs)
        return self.value

    def become(self, other: Scores) -> Scores:
        """What a function that writes into its argument does."""
        self.chain, self.made_by, self.value, self.versions = other.chain, other.made_by, other.value, other.versions
        return self

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return call(func, args, kwargs or {}, None)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return as_function_of_plain(func, args, kwargs or {})


def call(func: Any, args: Any, kwargs: dict[str, Any], mode: Any) -> Any:
    """func of arguments with Scores among them."""
    if func in _ABOUT:
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)
    handler = OF_SCORES.get(func)
    found = None if handler is None else handler(mode, func, args, kwargs)
    return as_function_of_plain(func, args, kwargs) if found is None else found


def settled(value: Any) -> Any:
    """What a module gives back. Its probabilities stay to be computed when somebody looks at them, which is mostly
    never; not in inference mode, whose tensors do not say that they were written to. Anything else is computed now."""
    if type(value) is Scores:
        return value if value.chain.is_normed and not torch.is_inference_mode_enabled() else value.compute()
    if type(value) in (tuple, list):
        return type(value)(settled(one) for one in value)
    if isinstance(value, dict):
        for key, one in value.items():
            if type(one) in (Scores, tuple, list):
                value[key] = settled(one)
    return value


def plain(value: Any) -> Any:
    """With every Scores in it computed."""
    if type(value) is Scores:
        return value.compute()
    if type(value) in (tuple, list):
        return type(value)(plain(one) for one in value)
    return value


def as_function_of_plain(function: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
    with torch._C.DisableTorchFunctionSubclass():
        return function(*(plain(one) for one in args), **{name: plain(one) for name, one in kwargs.items()})
