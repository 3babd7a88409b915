"""Work of the runtime that no dispatch mode is to see, neither its own nor another's."""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

_NOTHING: AbstractContextManager[None] = contextlib.nullcontext()


def without_modes() -> AbstractContextManager[object]:
    """In backward, and inside a mode's own handler, there is none: torch's way of leaving none takes 13 us."""
    return _disable_current_modes() if torch._C._len_torch_dispatch_stack() else _NOTHING


def alias_of(tensor: Tensor) -> Tensor:
    """The tensor without its graph. Of plain ones no mode is even asked, which costs more than the alias."""
    if type(tensor) in (Tensor, torch.nn.Parameter):
        with torch._C._DisableTorchDispatch():
            return tensor.detach()
    with without_modes():
        return tensor.detach()
