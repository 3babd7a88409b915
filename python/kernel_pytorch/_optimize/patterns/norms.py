"""LayerNorm and RMSNorm, in their many spellings: a module is what its numbers say it is.

A module without children that holds one or two parameters as long as a row, by whatever names, is tried with random
weights on rows small enough for the epsilon to count. Where it answers as rms_norm or layer_norm does, it is one.
"""

from __future__ import annotations

import copy
import inspect
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from ..._modules import HOOKS
from ..._ops.rms_norm import machine_epsilon
from ...core._shared_input import layer_norm_through, rms_norm_through
from ...functional import layer_norm, rms_norm
from ..changes import SetForward, mark
from ..sites import Call, Found, Proposal, Refusal, Way
from ..verify import row_error
from .context import Context, is_parallel, probe, single_input, undisturbed, weight_reason, why_not_plain
from .deferred.summed import Late, Summed

NAME = "norm"
_MOST_EPSILON = 1e-2
_USUAL = (1e-6, 1e-5, 1e-8, 1e-12)  # where a module's own is a constant in its code
TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}


@dataclass(frozen=True)
class Norm:
    """Which norm a module is. Weights are read from the module when it runs."""

    kind: str  # "rms_norm" or "layer_norm"
    eps: float | None  # None is torch's: the machine epsilon of the type that it computes in
    offset: float
    weight: str | None  # its name
    bias: str | None

    def parameters(self, module: Any) -> tuple[Tensor | None, Tensor | None]:
        """Weight and bias as they are now."""
        weight = None if self.weight is None else getattr(module, self.weight)
        return weight, None if self.bias is None else getattr(module, self.bias)

    def epsilon(self, dtype: torch.dtype) -> float:
        return machine_epsilon(dtype) if self.eps is None else self.eps

    def __call__(self, module: Any, x: Tensor) -> Tensor:
        if isinstance(x, Late):
            terms = x.terms() if type(x) is Summed else None
            if terms is not None:
                output, total = self.add(module, *terms)
                x.joined(total)
                return output
            x = x.compute()
        weight, bias = self.parameters(module)
        if self.kind == "rms_norm":
            return rms_norm(x, weight, self.eps, weight_offset=self.offset)
        return layer_norm(x, weight, bias, self.epsilon(x.dtype))

    def through(self, module: Any, x: Tensor, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
        """(norm(x), x), where the gradient that comes back by the second is added by the norm's backward."""
        weight, bias = self.parameters(module)
        if self.kind == "rms_norm":
            return rms_norm_through(x, weight, self.eps, self.offset, dtype)
        return layer_norm_through(x, weight, bias, self.epsilon(x.dtype), dtype)

    def add(self, module: Any, x: Tensor, residual: Tensor, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
        """(norm(x + residual), x + residual), one pass; `dtype` is the norm's, where it is not the sum's."""
        weight, bias = self.parameters(module)
        if self.kind == "rms_norm":
            return rms_norm(x, weight, self.eps, residual=residual, weight_offset=self.offset, out_dtype=dtype)
        return layer_norm(x, weight, bias, self.epsilon(x.dtype), residual=residual, out_dtype=dtype)


def find(context: Context, path: str, module: nn.Module, call: Call) -> Found:
    x = call.first()
    if x is None or len(call.tensors()) != 1 or any(True for _ in module.children()) or x.dim() < 2:
        return None
    parameters = dict(module.named_parameters())
    if not _looks_like(module, parameters, x.shape[-1]):
        return None
    reason = why_not_plain("", module) or weight_reason(module)
    if reason and not (is_parallel(module) and hasattr(x, "placements") and "forward" not in vars(module)):
        return Refusal(path, NAME, reason)
    norm = recognise(module, parameters, x)
    if norm is None:
        return Refusal(path, NAME, "it looks like a norm and computes something else")
    context.norms[module] = norm
    original = type(module).forward
    forward = mark(single_input(norm, first_name(module), original, takes_late=True))
    extra = f", weight + {norm.offset:g}" if norm.offset else ""
    return Proposal(
        norm.kind,
        path,
        module,
        f"{type(module).__name__} (eps {norm.epsilon(x.dtype):g}{extra})",
        [Way(f"kernel_pytorch {norm.kind}", lambda: SetForward(module, forward))],
        pointwise=True,
    )


def _looks_like(module: nn.Module, parameters: Mapping[str, Tensor], columns: int) -> bool:
    if isinstance(module, (nn.LayerNorm, nn.RMSNorm)):
        return len(module.normalized_shape) == 1
    named = "norm" in type(module).__name__.lower() or bool(_epsilons(module))
    return named and 1 <= len(parameters) <= 2 and all(tuple(p.shape) == (columns,) for p in parameters.values())


def _epsilons(module: nn.Module) -> list[float]:
    """Numbers of the module's own that may be its epsilon."""
    return [value for value in vars(module).values() if isinstance(value, float) and 0 < value <= _MOST_EPSILON]


def first_name(module: nn.Module) -> str:
    return next(iter(inspect.signature(module.forward).parameters), "input")


def recognise(module: nn.Module, parameters: Mapping[str, Tensor], x: Tensor) -> Norm | None:
    """The norm that the module is, or None."""
    like = next(iter(parameters.values()), x)
    if not like.is_floating_point() or like.dtype not in TOLERANCE:
        return None
    epsilons: Sequence[float | None] = _epsilons(module)
    if not epsilons:
        epsilons = (None,) if isinstance(module, nn.RMSNorm) else _USUAL
    with undisturbed():
        drawn = {name: probe(*p.shape, like=p, seed=i + 1) for i, (name, p) in enumerate(parameters.items())}
        rows = probe(3, x.shape[-1], like=like)
        inputs = torch.cat([rows, *(rows * (epsilon or machine_epsilon(like.dtype)) ** 0.5 for epsilon in epsilons)])
        try:
            expected = torch.func.functional_call(_bare(module), drawn, (inputs,))
        except Exception:  # a module that is no norm may refuse what it is tried with, in any way
            return None
        if not isinstance(expected, Tensor) or expected.shape != inputs.shape:
            return None
        for norm in (one for epsilon in epsilons for one in _candidates(epsilon, list(drawn))):
            found = norm(SimpleNamespace(**drawn), inputs)
            if row_error(found, expected)[1] <= TOLERANCE[like.dtype]:
                return norm
    return None


def _bare(module: nn.Module) -> nn.Module:
    """The module without its hooks, which would make DTensors of what it is tried with."""
    bare = copy.copy(module)
    for name in HOOKS:
        setattr(bare, name, OrderedDict())
    bare._parameters = dict(module._parameters)
    return bare


def _candidates(epsilon: float | None, names: list[str]) -> list[Norm]:
    """Every norm that parameters of these names may belong to."""
    if not names:
        return [Norm("layer_norm", epsilon, 0.0, None, None), Norm("rms_norm", epsilon, 0.0, None, None)]
    if len(names) == 1:
        rms = [Norm("rms_norm", epsilon, offset, names[0], None) for offset in (0.0, 1.0)]
        return [Norm("layer_norm", epsilon, 0.0, names[0], None), *rms]
    return [Norm("layer_norm", epsilon, 0.0, *names), Norm("layer_norm", epsilon, 0.0, *reversed(names))]
