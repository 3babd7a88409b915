"""What a graph's call returned, made anew for every replay: tensors are copied, and the objects that hold them (outputs
of Hugging Face models, caches of keys and values) built again, so that a caller may keep and change what it gets.

How to build them is learnt once, at the capture. Numbers and texts in them are those of the captured call: a graph is
for one set of shapes and plain arguments, on which they depend.
"""

from __future__ import annotations

import copyreg
import enum
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

__all__ = ["CONSTANTS", "Results", "is_configuration"]

# What is handed out as it is: nobody changes it, or it is the model's own.
CONSTANTS = (
    type(None), bool, int, float, complex, str, bytes, enum.Enum, range, slice, type,
    torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size,
    types.FunctionType, types.BuiltinFunctionType, types.ModuleType, nn.Module,
)  # fmt: skip
_MOST_DEPTH = 12
_Build = Callable[[list[Tensor]], Any]


def is_configuration(value: Any) -> bool:
    """Whether it is a Hugging Face model's configuration, which a call leaves alone."""
    return any(base.__name__ in ("PretrainedConfig", "PreTrainedConfig") for base in type(value).__mro__)


class Results:
    """Builds what `output` is from copies of its tensors. `refusal` says why that cannot be done, or is ""."""

    def __init__(self, output: Any, made_for: Callable[[Tensor], Callable[[], Tensor] | None] | None = None) -> None:
        """`made_for`: what makes one of its tensors anew, where a copy will not do."""
        self.tensors: list[Tensor] = []
        self.objects: list[Any] = []  # those that are built again, containers aside
        self.refusal = ""
        self._places: dict[int, int] = {}  # of tensors, by id: what is one tensor stays one
        self._made: set[int] = set()
        self._build = self._of(output, 0)
        self._makers = [made_for(tensor) if made_for else None for tensor in self.tensors]

    def copied(self) -> Any:
        """The result of a call, in memory of its own."""
        pairs = zip(self.tensors, self._makers)
        return self._build([tensor.clone() if make is None else make() for tensor, make in pairs])

    @property
    def copies(self) -> list[Tensor]:
        """Those that are copied, and not made anew."""
        return [tensor for tensor, make in zip(self.tensors, self._makers) if make is None]

    def made(self) -> list[tuple[Tensor, Tensor]]:
        """Those that are made anew, each with what stands for it in the output."""
        return [(tensor, make()) for tensor, make in zip(self.tensors, self._makers) if make is not None]

    def _of(self, value: Any, depth: int) -> _Build:
        if isinstance(value, Tensor):
            place = self._places.setdefault(id(value), len(self.tensors))
            if place == len(self.tensors):
                self.tensors.append(value)
            return lambda tensors: tensors[place]
        if isinstance(value, CONSTANTS) or is_configuration(value):
            return lambda tensors: value
        if depth == _MOST_DEPTH:
            return self._refuse(value)
        if type(value) in (list, tuple, set):
            return self._of_sequence(value, depth)
        if type(value) is dict:
            return self._of_dict(value, depth)
        leaves, spec = pytree.tree_flatten(value)
        if len(leaves) != 1 or leaves[0] is not value:
            parts = [self._of(leaf, depth + 1) for leaf in leaves]
            return lambda tensors: pytree.tree_unflatten([part(tensors) for part in parts], spec)
        return self._of_object(value, depth)

    def _of_sequence(self, value: Any, depth: int) -> _Build:
        kind, parts = type(value), [self._of(one, depth + 1) for one in value]
        return lambda tensors: kind([part(tensors) for part in parts])

    def _of_dict(self, value: dict[Any, Any], depth: int) -> _Build:
        parts = [(key, self._of(one, depth + 1)) for key, one in value.items()]
        return lambda tensors: {key: part(tensors) for key, part in parts}

    def _of_object(self, value: Any, depth: int) -> _Build:
        """An object that is its class and its attributes. One that is reached twice would become two."""
        kind: Any = type(value)
        is_plain = kind.__reduce_ex__ is object.__reduce_ex__ and kind.__reduce__ is object.__reduce__
        is_plain = is_plain and not any(hasattr(kind, name) for name in ("__deepcopy__", "__copy__", "__setstate__"))
        slots = copyreg._slotnames(kind)  # type: ignore[attr-defined]
        if not is_plain or slots or not hasattr(value, "__dict__") or id(value) in self._made:
            return self._refuse(value)
        self._made.add(id(value))
        self.objects.append(value)
        parts = self._of_dict(vars(value), depth + 1)

        def build(tensors: list[Tensor]) -> Any:
            made = kind.__new__(kind)
            made.__dict__.update(parts(tensors))
            return made

        return build

    def _refuse(self, value: Any) -> _Build:
        self.refusal = (
            self.refusal or f"it returns a {type(value).__name__}, which a graph cannot give anew in each call"
        )
        return lambda tensors: value
