"""Tensors that are computed when somebody looks at them.

A sum `x * scale + other`, where the scale (a layer's, one number for each column) and the other term (the residual
stream) may be absent: a norm that looks first computes it in its own pass. And a contiguous copy of heads, which
attention does not need.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ....functional import gated_activation

__all__ = ["Copied", "Late", "Summed", "plain"]

Site = tuple[int, int]  # where in the model's code a function is called: the code object's id, and the place in it
_getters: Any = Tensor
# Functions that ask about a tensor and not for its numbers.
ABOUT = {
    *(
        getattr(_getters, name).__get__
        for name in ("shape", "dtype", "device", "ndim", "is_cuda", "layout", "requires_grad", "is_nested")
    ),
    *(getattr(_getters, name) for name in ("size", "dim", "numel", "is_floating_point", "__len__")),
}
_TYPES = (torch.float32, torch.bfloat16, torch.float16)


class Late(Tensor):
    """A tensor that somebody asked for, not computed yet."""

    value: Tensor | None
    versions: list[tuple[Tensor, int]]
    sites: tuple[Site, ...]  # of the functions that it stands for
    is_joined: bool  # whether a pass that had something else to do computed it, or made it unnecessary

    def begin(self, sites: tuple[Site, ...], *read: Tensor | None) -> None:
        self.value, self.sites, self.is_joined = None, sites, False
        tensors = [one for one in read if one is not None]
        self.versions = [] if torch.is_inference_mode_enabled() else [(one, one._version) for one in tensors]

    def joined(self, value: Tensor) -> None:
        self.value, self.is_joined = value, True

    def check(self) -> None:
        if any(tensor._version != version for tensor, version in self.versions):
            raise RuntimeError(
                "optimize: a residual sum or a copy is computed late, and a tensor that it is made of was changed in "
                "place before that; leave the pattern sums out (optimize(..., patterns=...))"
            )

    def compute(self) -> Tensor:
        if self.value is None:
            self.check()
            self.value = self.computed()
        return self.value

    def computed(self) -> Tensor:
        raise NotImplementedError

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return of_plain(func, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return of_plain(func, args, kwargs or {})


class Summed(Late):
    """x * scale + other."""

    x: Tensor
    scale: Tensor | None
    other: Tensor | None

    @staticmethod
    def make(x: Tensor, scale: Tensor | None, other: Tensor | None, sites: tuple[Site, ...]) -> Summed:
        made: Summed = Tensor._make_wrapper_subclass(Summed, x.shape, dtype=x.dtype, device=x.device)
        made.x, made.scale, made.other = x, scale, other
        made.begin(sites, x, scale, other)
        return made

    def terms(self) -> tuple[Tensor, Tensor] | None:
        """Both, where it is a sum of two that nobody has computed."""
        if self.value is not None or self.scale is not None or self.other is None:
            return None
        self.check()
        return self.x, self.other

    def computed(self) -> Tensor:
        if self.other is None:
            return self.x if self.scale is None else self.x * self.scale
        if self.scale is None:
            return self.x + self.other
        self.is_joined = True
        return gated_activation(self.x, self.scale.expand(self.x.shape), "identity", residual=self.other)


class Copied(Late):
    """x.contiguous(), of heads that lie behind their sequence in memory."""

    x: Tensor

    @staticmethod
    def make(x: Tensor, sites: tuple[Site, ...]) -> Copied:
        made: Copied = Tensor._make_wrapper_subclass(Copied, x.shape, dtype=x.dtype, device=x.device)
        made.x = x
        made.begin(sites, x)
        return made

    def computed(self) -> Tensor:
        return self.x.contiguous()

    def where_it_lies(self) -> Tensor:
        """For a function to which strides make no difference."""
        if self.value is not None:
            return self.value
        self.check()
        self.is_joined = True
        return self.x


def plain(value: Any) -> Any:
    """With everything in it computed."""
    if isinstance(value, Late):
        return value.compute()
    if type(value) in (tuple, list):
        return type(value)(plain(one) for one in value)
    return value


def of_plain(func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
    """func of arguments that may not be computed yet."""
    with torch._C.DisableTorchFunctionSubclass():
        if func in ABOUT:
            return func(*args, **kwargs)
        return func(*(plain(one) for one in args), **{name: plain(one) for name, one in kwargs.items()})


def is_elsewhere() -> bool:
    """Where functions are not what they seem: tracing, transforms of torch.func, autocast, which gives other types."""
    is_autocast = torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")
    return is_autocast or torch._C._get_tracing_state() is not None or torch._C._are_functorch_transforms_active()


def scaled(one: Any, other: Any, site: Site) -> Summed | None:
    """one * other, where one of them is a number for each column of the other."""
    x, scale = (other, one) if _dims(one) == 1 else (one, other)
    x = x.compute() if type(x) is Summed else x
    if not _is_rows(x) or not _is_plain(scale) or scale.shape != x.shape[-1:] or scale.dtype is not x.dtype:
        return None
    return Summed.make(x, scale, None, (site,)) if scale.device == x.device and scale.is_contiguous() else None


def added(one: Any, other: Any, site: Site) -> Summed | None:
    """one + other, of one shape."""
    if not _is_scaled(one) and _is_scaled(other):
        one, other = other, one
    other = other.compute() if type(other) is Summed else other
    if not _is_rows(other):
        return None
    if _is_scaled(one):
        fits = one.x.shape == other.shape and one.dtype is other.dtype and one.device == other.device
        return Summed.make(one.x, one.scale, other, (*one.sites, site)) if fits else None
    one = one.compute() if type(one) is Summed else one
    if not _is_rows(one) or one.shape != other.shape or one.dtype is not other.dtype or one.device != other.device:
        return None
    return Summed.make(one, None, other, (site,))


def copied(x: Any, site: Site) -> Copied | None:
    """x.contiguous() of [batch, heads, sequence, size] that lie in another order, each head's numbers together."""
    if not _is_plain(x) or x.dim() != 4 or x.dtype not in _TYPES or x.is_contiguous() or x.numel() == 0:
        return None
    return Copied.make(x, (site,)) if x.stride(-1) == 1 else None


def _is_plain(value: Any) -> bool:
    return type(value) is Tensor or type(value) is nn.Parameter


def _is_scaled(value: Any) -> bool:
    return type(value) is Summed and value.value is None and value.other is None


def _is_rows(value: Any) -> bool:
    return (
        _is_plain(value) and value.dim() > 1 and value.dtype in _TYPES and value.is_contiguous() and value.numel() > 0
    )


def _dims(value: Any) -> int:
    return value.dim() if isinstance(value, Tensor) else -1
