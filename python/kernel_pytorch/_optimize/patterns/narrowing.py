"""Under autocast: which parts take a norm's output in autocast's type as they take it in fp32.

A product casts its input anyway, so a norm may write the cast itself: the same rounding, once. Whether a part does
nothing else with its input is seen on the sample: given the narrower input it answers with the same bits.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode


def narrow_type(x: Any) -> torch.dtype | None:
    """Autocast's type, where x is fp32 and that type has 16 bits."""
    if not isinstance(x, Tensor) or x.dtype is not torch.float32 or not torch.is_autocast_enabled(x.device.type):
        return None
    dtype = torch.get_autocast_dtype(x.device.type)
    return dtype if dtype in (torch.bfloat16, torch.float16) else None


def takes_narrow(
    part: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any, normed: Any, trains: bool
) -> bool:
    """Whether `part`, which gave `output` for these arguments, gives the same for `normed` in autocast's type.

    In training one cast at most: the gradients of several are added in fp32, and would be in the narrower type.
    """
    dtype = narrow_type(normed)
    if dtype is None:
        return False
    if trains:
        with _Casts(normed) as casts:
            part(*args, **kwargs)
        if casts.count != 1:
            return False
    narrow = normed.to(dtype)
    args, kwargs = pytree.tree_map(lambda leaf: narrow if leaf is normed else leaf, (args, kwargs))
    try:
        again = part(*args, **kwargs)
    except (RuntimeError, TypeError, ValueError):  # made for fp32 alone: it stays with that
        return False
    found, expected = pytree.tree_leaves(again), pytree.tree_leaves(output)
    return len(found) == len(expected) and all(map(_is_same, found, expected))


def _is_same(found: Any, expected: Any) -> bool:
    if isinstance(expected, Tensor):
        return isinstance(found, Tensor) and found.dtype is expected.dtype and torch.equal(found, expected)
    return type(found) is type(expected)


class _Casts(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the casts of a tensor, of its views too."""

    def __init__(self, tensor: Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.memory, self.count = tensor.untyped_storage().data_ptr(), 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._to_copy.default and args[0].untyped_storage().data_ptr() == self.memory:
            self.count += 1
        return func(*args, **(kwargs or {}))
