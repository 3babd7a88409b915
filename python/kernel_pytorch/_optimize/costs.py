"""What a piece of work asks of the device: bytes moved, operations, launches, counted while it runs once.

Every operation that reaches torch's dispatcher and is no view counts as one launch that reads its tensor arguments and
writes its results. So both the original, however it is spelled, and what replaces it are counted alike, and a new op of
this library needs no formula here. Operations of products are torch's own count; those of our ops are not known to it
and are taken to be the original's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from .flops import by_torch, flops_of

_NOT_RUN = (
    "detach",
    "lift_fresh",
    "empty",
    "new_empty",
    "empty_like",
    "empty_strided",
    "_local_scalar_dense",
    "alias",
    "_unsafe_view",
)


@dataclass
class Cost:
    """Of one call."""

    bytes: float = 0.0
    flops: float = 0.0
    launches: int = 0

    def as_request(self) -> dict[str, float]:
        return asdict(self)


class _Counter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.cost = Cost()
        self.by_op: dict[str, list[tuple[float, float]]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func._schema.name.split("::")[-1]
        if func.is_view or name in _NOT_RUN or name.startswith(("sym_", "is_")):
            return result
        moved = float(sum(_bytes(leaf) for leaf in pytree.tree_leaves((args, kwargs or {}, result))))
        flops = by_torch(func, args, kwargs or {}, result) or 0.0
        self.cost.bytes += moved
        self.cost.flops += flops
        self.cost.launches += 1
        shown = flops_of(func, args, kwargs or {}, result)
        self.by_op.setdefault(func._schema.name, []).append((moved, shown))
        return result


def _bytes(leaf: Any) -> int:
    if not isinstance(leaf, Tensor):
        return 0
    stored = 1
    for size, stride in zip(leaf.shape, leaf.stride()):
        stored *= size if stride else 1  # what is expanded is read once
    return stored * leaf.element_size()


def count(run: Callable[[], object]) -> Cost:
    """Of what `run` does, backward included."""
    return counted(run)[0]


def counted(run: Callable[[], object]) -> tuple[Cost, dict[str, list[tuple[float, float]]]]:
    """The cost, and by op the bytes and operations of each call, in order."""
    counter = _Counter()
    with counter:
        run()
    return counter.cost, counter.by_op


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
