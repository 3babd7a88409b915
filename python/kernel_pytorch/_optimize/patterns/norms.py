"""LayerNorm and RMSNorm, in their many spellings: a module is what its numbers say it is.

A module without children that holds a weight (and a bias) as long as a row, and an epsilon, is tried with random
weights on rows small enough for the epsilon to count. Where it answers as rms_norm or layer_norm does, it is one.
"""

from __future__ import annotations

import copy
import inspect
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..._ops.shared_input import layer_norm_through, rms_norm_through
from ...functional import layer_norm, rms_norm
from ..changes import SetForward, mark
from ..sites import Call, Found, Proposal, Refusal, Way
from ..verify import row_error
from .context import HOOKS, Context, is_parallel, probe, single_input, undisturbed, weight_reason, why_not_plain

NAME = "norm"
_EPSILONS = ("eps", "variance_epsilon", "epsilon", "norm_eps", "layer_norm_eps", "layernorm_epsilon")
TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}


@dataclass(frozen=True)
class Norm:
    """Which norm a module is. Weights are read from the module when it runs."""

    kind: str  # "rms_norm" or "layer_norm"
    eps: float
    offset: float
    has_weight: bool
    has_bias: bool

    def __call__(self, module: Any, x: Tensor) -> Tensor:
        weight = module.weight if self.has_weight else None
        if self.kind == "rms_norm":
            return rms_norm(x, weight, self.eps, weight_offset=self.offset)
        return layer_norm(x, weight, module.bias if self.has_bias else None, self.eps)

    def through(self, module: Any, x: Tensor, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
        """(norm(x), x), where the gradient that comes back by the second is added by the norm's backward."""
        weight = module.weight if self.has_weight else None
        if self.kind == "rms_norm":
            return rms_norm_through(x, weight, self.eps, self.offset, dtype)
        return layer_norm_through(x, weight, module.bias if self.has_bias else None, self.eps, dtype)

    def add(self, module: Any, x: Tensor, residual: Tensor, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
        """(norm(x + residual), x + residual), one pass; `dtype` is the norm's, where it is not the sum's."""
        weight = module.weight if self.has_weight else None
        if self.kind == "rms_norm":
            return rms_norm(x, weight, self.eps, residual=residual, weight_offset=self.offset, out_dtype=dtype)
        bias = module.bias if self.has_bias else None
        return layer_norm(x, weight, bias, self.eps, residual=residual, out_dtype=dtype)


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
    forward = mark(single_input(norm, first_name(module), original))
    extra = f", weight + {norm.offset:g}" if norm.offset else ""
    return Proposal(
        norm.kind,
        path,
        module,
        f"{type(module).__name__} (eps {norm.eps:g}{extra})",
        [Way(f"kernel_pytorch {norm.kind}", lambda: SetForward(module, forward))],
        pointwise=True,
    )


def _looks_like(module: nn.Module, parameters: Mapping[str, Tensor], columns: int) -> bool:
    if isinstance(module, (nn.LayerNorm, nn.RMSNorm)):
        return len(module.normalized_shape) == 1
    if not parameters or not set(parameters) <= {"weight", "bias"} or "weight" not in parameters:
        return False
    has_row_length = all(tuple(p.shape) == (columns,) for p in parameters.values())
    return has_row_length and any(isinstance(getattr(module, name, None), float) for name in _EPSILONS)


def first_name(module: nn.Module) -> str:
    return next(iter(inspect.signature(module.forward).parameters), "input")


def recognise(module: nn.Module, parameters: Mapping[str, Tensor], x: Tensor) -> Norm | None:
    """The norm that the module is, or None."""
    like = next(iter(parameters.values()), x)
    if not like.is_floating_point() or like.dtype not in TOLERANCE:
        return None
    epsilon = next(
        (getattr(module, name) for name in _EPSILONS if isinstance(getattr(module, name, None), float)), None
    )
    if epsilon is None:  # nn.RMSNorm's default
        epsilon = torch.finfo(x.dtype).eps
    with undisturbed():
        drawn = {name: probe(*p.shape, like=p, seed=i + 1) for i, (name, p) in enumerate(parameters.items())}
        inputs = torch.cat([probe(3, x.shape[-1], like=like), probe(3, x.shape[-1], like=like) * epsilon**0.5])
        try:
            expected = torch.func.functional_call(_bare(module), drawn, (inputs,))
        except Exception:  # a module that is no norm may refuse what it is tried with, in any way
            return None
        if not isinstance(expected, Tensor) or expected.shape != inputs.shape:
            return None
        for norm in _candidates(float(epsilon), drawn):
            found = norm(_Holder(drawn), inputs)
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


class _Holder:
    """Drawn parameters by attribute."""

    def __init__(self, values: dict[str, Tensor]) -> None:
        self.weight = values.get("weight")
        self.bias = values.get("bias")


def _candidates(epsilon: float, drawn: dict[str, Tensor]) -> list[Norm]:
    has_weight, has_bias = "weight" in drawn, "bias" in drawn
    rms = [Norm("rms_norm", epsilon, offset, has_weight, False) for offset in ((0.0, 1.0) if has_weight else (0.0,))]
    return [Norm("layer_norm", epsilon, 0.0, has_weight, has_bias), *([] if has_bias else rms)]
