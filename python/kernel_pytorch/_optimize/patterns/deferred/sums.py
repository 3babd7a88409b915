"""Residual sums inside norms, however a model spells its blocks: x + f(x), or x + f(x) * scale, is computed when
somebody looks at it (summed.py). If that is a norm, one pass computes both; a layer's scale and the sum are one pass as
well. Contiguous copies of heads wait likewise: attention does not need them. Rolls are one pass (rolled.py).

The model's forward runs under a mode that sees its sums. One run of the sample says which of them, by their places in
the model's code, are part of a norm, a scale or attention; only those wait. For inference.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as torch_functional
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ...._modules import evaluating, has_hooks
from ....functional import layer_norm
from ...changes import SetForward, mark, ours
from ...sites import Call, Found, Proposal, Refusal, Way
from ..context import Context, why_not_around
from .rolled import rolled
from .summed import Copied, Late, Site, Summed, added, copied, is_elsewhere, of_plain, plain, scaled

NAME = "residual sums"
_DONE = "has_sums"  # of a forward that is one of these
# By function: what makes a late tensor of its arguments, and how many those are.
_BEGIN: dict[Any, tuple[Callable[..., Late | None], int]] = {
    **dict.fromkeys((torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__), (added, 2)),
    **dict.fromkeys((torch.mul, Tensor.mul, Tensor.__mul__, Tensor.__rmul__), (scaled, 2)),
    Tensor.contiguous: (copied, 1),
}


class Summing(TorchFunctionMode):
    """Sums from these places in the model's code wait to be looked at; from all of them where `sites` is None."""

    def __init__(self, sites: frozenset[Site] | None = None) -> None:
        super().__init__()
        self.sites = sites
        self.made: list[Late] = []
        self.rolls: list[Site] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        begin, count = _BEGIN.get(func, (None, 0))
        if begin is not None and len(args) == count and not kwargs:
            frame = sys._getframe(1)
            site = (id(frame.f_code), frame.f_lasti)
            made = begin(*args, site) if self.sites is None or site in self.sites else None
            if made is not None:
                if self.sites is None:
                    self.made.append(made)
                return made
        if func is torch.roll:
            return self._roll(sys._getframe(1), [plain(one) for one in args], kwargs)
        if not types or not any(issubclass(one, Late) for one in types):
            return func(*args, **kwargs)
        if func is torch_functional.layer_norm and type(args[0]) is Summed:
            return _layer_norm(*args, **kwargs)
        if func is Tensor.transpose and type(args[0]) is Copied and args[1:] in ((1, 2), (2, 1)) and not kwargs:
            return args[0].where_it_lies().transpose(1, 2)  # attention's other layout
        if func is torch_functional.scaled_dot_product_attention or _attends(func):
            args = [one.where_it_lies() if type(one) is Copied else one for one in args]
            kwargs = {name: one.where_it_lies() if type(one) is Copied else one for name, one in kwargs.items()}
        return of_plain(func, args, kwargs)

    def _roll(self, frame: Any, args: list[Any], kwargs: dict[str, Any]) -> Tensor:
        site = (id(frame.f_code), frame.f_lasti)
        found = rolled(*args, **kwargs) if self.sites is None or site in self.sites else None
        if found is None:
            return torch.roll(*args, **kwargs)
        self.rolls.append(site)
        return found


def _attends(func: Any) -> bool:
    """Whether it is our attention, which takes any strides."""
    return getattr(func, "namespace", "") == "kernel_pytorch" and func._schema.name.startswith(_ATTENTION)


_ATTENTION = "kernel_pytorch::attention"


def _layer_norm(
    input: Summed, normalized_shape: Any, weight: Any = None, bias: Any = None, eps: float = 1e-5
) -> Tensor:
    terms = input.terms() if tuple(normalized_shape) == input.x.shape[-1:] else None
    if terms is None:
        return torch_functional.layer_norm(input.compute(), normalized_shape, weight, bias, eps)
    output, total = layer_norm(terms[0], weight, bias, eps, residual=terms[1])
    input.joined(total)
    return output


def find(context: Context, path: str, module: nn.Module, call: Call) -> Found:
    method = vars(module).get("forward")
    is_done = getattr(getattr(method, "__func__", None), _DONE, False)
    if path != "" or context.trains or context.compiled or is_elsewhere() or is_done:
        return None
    sites, count = _places(context, call)
    if not sites:
        return None
    reason = why_not_around(module)
    if any(map(has_hooks, module.modules())):
        reason = "parts of it have hooks, which would get sums that are not computed yet"
    if reason:
        return Refusal(path, NAME, reason)
    forward = _summing(method.__func__ if method is not None and ours(module) else type(module).forward, sites)
    source = f"{type(module).__name__}, {count} sums, copies and shifts of its residual stream"
    way = Way("the same forward, those inside norms, scales and attention", lambda: SetForward(module, mark(forward)))
    return Proposal(NAME, path, module, source, [way])


def _summing(function: Any, sites: frozenset[Site]) -> Any:
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if self.training or torch.is_grad_enabled() or torch.compiler.is_compiling() or is_elsewhere():
            return function(self, *args, **kwargs)
        with Summing(sites):
            output = function(self, *args, **kwargs)
        return _settled(output)

    setattr(forward, _DONE, True)
    return forward


def _settled(output: Any) -> Any:
    """What the model gives back, computed."""
    if type(output) is Summed or type(output) in (tuple, list):
        return plain(output)
    held = output if isinstance(output, dict) else getattr(output, "__dict__", None)
    if held is not None and not isinstance(output, Tensor):
        for name, value in list(held.items()):
            if type(value) is Summed or type(value) in (tuple, list):
                held[name] = plain(value)
    return output


def _places(context: Context, call: Call) -> tuple[frozenset[Site], int]:
    """The places of sums that become one pass with something, and how many of them a run has."""
    mode = Summing()
    with torch.no_grad(), evaluating(context.model), mode:
        call.fresh().run(context.model)
    joined = [one for one in mode.made if one.is_joined]
    return frozenset([*mode.rolls, *(site for one in joined for site in one.sites)]), len(joined) + len(mode.rolls)
