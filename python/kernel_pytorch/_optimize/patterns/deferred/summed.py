"""A sum that is computed when somebody looks at it: `x * scale + other`, where the scale (a layer's, one number for each
column) and the other term (the residual stream) may be absent. A norm that looks first computes it in its own pass.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ....functional import gated_activation

__all__ = ["Summed", "plain"]

Site = tuple[int, int]  # where in the model's code a function is called: the code object's id, and the place in it
_getters: Any = Tensor
# Functions that ask about a tensor and not for its numbers.
ABOUT = {
    *(getattr(_getters, name).__get__ for name in ("shape", "dtype", "device", "ndim", "is_cuda", "layout")),
    *(getattr(_getters, name) for name in ("size", "dim", "numel", "is_floating_point", "__len__")),
}
_TYPES = (torch.float32, torch.bfloat16, torch.float16)


class Summed(Tensor):
    """x * scale + other, not computed yet."""

    x: Tensor
    scale: Tensor | None
    other: Tensor | None
    value: Tensor | None
    versions: list[tuple[Tensor, int]]
    sites: tuple[Site, ...]  # of the functions that it stands for
    is_joined: bool  # whether one pass computed it and something else

    @staticmethod
    def make(x: Tensor, scale: Tensor | None, other: Tensor | None, sites: tuple[Site, ...]) -> Summed:
        made: Summed = Tensor._make_wrapper_subclass(Summed, x.shape, dtype=x.dtype, device=x.device)
        made.x, made.scale, made.other, made.value, made.sites = x, scale, other, None, sites
        made.is_joined = False
        read = [one for one in (x, scale, other) if one is not None]
        made.versions = [] if torch.is_inference_mode_enabled() else [(one, one._version) for one in read]
        return made

    def joined(self, value: Tensor) -> None:
        """Computed by a pass that had something else to do."""
        self.value, self.is_joined = value, True

    def terms(self) -> tuple[Tensor, Tensor] | None:
        """Both, where it is a sum of two that nobody has computed."""
        if self.value is not None or self.scale is not None or self.other is None:
            return None
        self._check()
        return self.x, self.other

    def compute(self) -> Tensor:
        if self.value is None:
            self._check()
            if self.scale is None:
                self.value = self.x + self.other
            elif self.other is None:
                self.value = self.x * self.scale
            else:
                scale = self.scale.expand(self.x.shape)
                self.value = gated_activation(self.x, scale, "identity", residual=self.other)
                self.is_joined = True
        return self.value

    def _check(self) -> None:
        if any(tensor._version != version for tensor, version in self.versions):
            raise RuntimeError(
                "optimize: a residual sum is computed late, and a tensor that it is made of was changed in place "
                "before that; leave the pattern sums out (optimize(..., patterns=...))"
            )

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return of_plain(func, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return of_plain(func, args, kwargs or {})


def plain(value: Any) -> Any:
    """With every Summed in it computed."""
    if type(value) is Summed:
        return value.compute()
    if type(value) in (tuple, list):
        return type(value)(plain(one) for one in value)
    return value


def of_plain(func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
    """func of arguments with Summed among them."""
    with torch._C.DisableTorchFunctionSubclass():
        if func in ABOUT:
            return func(*args, **kwargs)
        return func(*(plain(one) for one in args), **{name: plain(one) for name, one in kwargs.items()})


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


def _is_plain(value: Any) -> bool:
    return type(value) is Tensor or type(value) is nn.Parameter


def _is_scaled(value: Any) -> bool:
    return type(value) is Summed and value.value is None and value.other is None


def _is_rows(value: Any) -> bool:
    return _is_plain(value) and value.dim() > 1 and value.dtype in _TYPES and value.is_contiguous() and value.numel() > 0


def _dims(value: Any) -> int:
    return value.dim() if isinstance(value, Tensor) else -1
