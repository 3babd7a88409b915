"""What a piece of work asks of the device: bytes moved, operations, launches, counted while it runs once.

Every operation that reaches torch's dispatcher and is no view counts as one launch that reads its tensor arguments and
writes its results. So both the original, however it is spelled, and what replaces it are counted alike, and a new op of
this library needs no formula here; products have theirs in flops.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from .flops import flops_of

_NOT_RUN = (
    "detach",
    "lift_fresh",
    "empty",
    "new_empty",
    "empty_like",
    "empty_strided",
    "new_empty_strided",
    "_local_scalar_dense",
    "alias",
    "_unsafe_view",
)


@dataclass
class Cost:
    """The cost of one call: bytes of the memory-bound launches, operations of the compute-bound ones, with FP8 counted
    separately."""

    bytes: float = 0.0
    flops: float = 0.0
    float8_flops: float = 0.0
    launches: int = 0

    def as_request(self) -> dict[str, float]:
        return asdict(self)


class _Counter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, ridge: float) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ridge = ridge
        self.cost = Cost()
        self.by_op: dict[str, list[tuple[float, float]]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not runs(func):
            return result
        moved = moved_bytes(args, kwargs or {}, result)
        shown = flops_of(func, args, kwargs or {}, result)
        if shown > self.ridge * moved and _multiplies_float8(args):
            self.cost.float8_flops += shown
        elif shown > self.ridge * moved:
            self.cost.flops += shown
        else:
            self.cost.bytes += moved
        self.cost.launches += 1
        self.by_op.setdefault(func._schema.name, []).append((moved, shown))
        return result


def runs(function: Any) -> bool:
    """Whether a call of this op does something: views and empty memory do not."""
    name = function._schema.name.split("::")[-1]
    return not (function.is_view or name in _NOT_RUN or name.startswith(("sym_", "is_")))


def moved_bytes(*values: Any) -> float:
    """Bytes of all tensors in the values."""
    return float(sum(_bytes(leaf) for leaf in pytree.tree_leaves(values)))


def _multiplies_float8(args: Any) -> bool:
    first = args[0] if args else None
    return isinstance(first, Tensor) and first.dtype in (torch.float8_e4m3fn, torch.float8_e5m2)


def _bytes(leaf: Any) -> int:
    if not isinstance(leaf, Tensor):
        return 0
    if leaf.is_nested:  # it has no sizes to ask for
        return leaf.numel() * leaf.element_size()
    stored = 1
    for size, stride in zip(leaf.shape, leaf.stride()):
        stored *= size if stride else 1  # what is expanded is read once
    return stored * leaf.element_size()


def count(run: Callable[[], object], ridge: float = math.inf) -> Cost:
    """The cost of `run`, backward included, on a device with `ridge` operations per byte; without it, all is bytes."""
    return counted(run, ridge)[0]


def counted(run: Callable[[], object], ridge: float = math.inf) -> tuple[Cost, dict[str, list[tuple[float, float]]]]:
    """The cost, and by op the bytes and operations of each call, in order."""
    counter = _Counter(ridge)
    with counter:
        run()
    return counter.cost, counter.by_op


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
