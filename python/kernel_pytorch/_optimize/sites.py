"""The values that go from one step of `optimize` to the next: calls seen, ways to replace a part, and refusals."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from .changes import Change
from .state import copied


@dataclass(frozen=True)
class Call:
    """Arguments of a module on the sample, copies of their own."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    of_model: bool = False  # the user's own, and not of a part inside

    def run(self, module: Callable[..., Any]) -> Any:
        return module(*self.args, **self.kwargs)

    def fresh(self) -> Call:
        """The same call on copies of everything that it may change."""
        return self.of(*copied((self.args, self.kwargs)))

    def of(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        """With other arguments."""
        return Call(args, kwargs, self.of_model)

    def tensors(self) -> list[Tensor]:
        return [leaf for leaf in pytree.tree_leaves((self.args, self.kwargs)) if isinstance(leaf, Tensor)]

    def first(self) -> Tensor | None:
        """The activation that goes in: the first tensor of a floating type."""
        return next((tensor for tensor in self.tensors() if tensor.is_floating_point()), None)

    def differentiated(self) -> Tensor | None:
        """That activation with a gradient wanted, as in training it is of a part's; of the model's own input only where
        the user wants it. Code may set that itself, which only a leaf allows."""
        first = self.first()
        return None if first is None or (self.of_model and not first.requires_grad) else first.requires_grad_()


@dataclass(frozen=True)
class Way:
    """One way to replace a part. `change` is made anew for each module; nothing happens before it is applied."""

    name: str
    change: Callable[[], Change]
    covers: tuple[str, ...] = ()  # paths of modules that are no longer called, besides the proposal's
    narrow: bool = False  # multiplies in a narrower type, so that narrow layers below are covered too


@dataclass
class Proposal:
    """A part that could be replaced, with the ways to do it."""

    pattern: str
    path: str
    module: nn.Module
    source: str  # what it is, in words
    ways: list[Way]
    pointwise: bool = False  # bound by memory: under torch.compile Inductor would have fused it
    approximate: bool = False  # rounds more than the model does: only with accuracy="tolerant"
    opaque: bool = False  # the original may be one op that hides many: counting it says too little
    covers: list[str] = field(default_factory=list)  # paths of modules that are no longer called, in any way
    timed: str | None = None  # path of what shows the gain, if not the part itself: one inside it, or the model ("")
    signature: tuple[Any, ...] = ()


@dataclass(frozen=True)
class Refusal:
    """A part that looks like a pattern and stays as it is."""

    path: str
    pattern: str
    reason: str


def are_apart(value: Any) -> bool:
    """Whether the value is rows [batch, length, channels] of a dense tensor that are not contiguous, as those of a
    transposed view."""
    if type(value) is not Tensor or value.is_nested or value.dim() != 3 or not value.is_floating_point():
        return False
    return value.numel() > 0 and value.stride(-1) != 1 and value.transpose(-1, -2).is_contiguous()


def raised(what: str, error: Exception) -> str:
    """A failure of one part in words, for its refusal: the call goes on."""
    text = str(error).strip().splitlines()
    return f"{what} raised {type(error).__name__}{': ' + text[0][:200] if text else ''}"


Found: TypeAlias = "Proposal | Refusal | None"


def describe(tensor: Tensor) -> tuple[Any, ...]:
    if tensor.is_nested or nn.parameter.is_lazy(tensor):  # it has no sizes to ask for
        return (type(tensor).__name__, tensor.is_nested, tensor.dtype, tensor.device.type)
    return (tuple(tensor.shape), tensor.dtype, tensor.device.type)


def signature_of(module: nn.Module, call: Call) -> tuple[Any, ...]:
    """Equal for modules that do the same work: class, plain attributes, parameters and arguments alike."""
    leaves, structure = pytree.tree_flatten((call.args, call.kwargs))
    arguments = tuple(describe(leaf) if isinstance(leaf, Tensor) else type(leaf).__name__ for leaf in leaves)
    parameters = tuple((name, *describe(value)) for name, value in module.named_parameters())
    plain = (int, float, str, bool, torch.dtype)
    attributes = tuple(
        (name, value)
        for name, value in sorted(vars(module).items())
        if isinstance(value, plain) and name not in ("layer_idx", "layer_id", "layer_index", "training")
    )
    return (type(module), attributes, parameters, arguments, str(structure))
