"""The whole model compiled by torch.compile with our backend, in place of parts that were replaced one by one.

What `optimize` put into the model is hidden from compilers (changes.py): the backend sees the original.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ..changes import Change
from ..sites import Call, Found, Proposal, Refusal, Way
from .context import Context

NAME = "torch.compile"


class Compile(Change):
    """Calls of the module run compiled, as after module.compile(); the module stays the same object."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.call: Callable[..., Any] | None = None

    def apply(self) -> None:
        if self.call is None:
            from ...compile_backend import backend  # slow to load

            module = self.module

            def call(*args: Any, **kwargs: Any) -> Any:  # a frame to begin with: torch's own are not looked into
                return module._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]

            self.call = torch.compile(call, backend=backend)
        self.module.__dict__["_compiled_call_impl"] = self.call

    def undo(self) -> None:
        self.module.__dict__.pop("_compiled_call_impl", None)

    def __deepcopy__(self, memo: dict[int, Any]) -> Compile:
        """A copied module is not compiled, as torch has it."""
        made = Compile(self.module)
        memo[id(self)] = made
        made.module = memo.get(id(self.module), self.module)
        return made


def find(context: Context, path: str, module: nn.Module, call: Call) -> Found:
    if path != "" or context.compiled:
        return None
    if module.__dict__.get("_compiled_call_impl") is not None:
        return Refusal(path, NAME, "it is compiled already, by its own compile()")
    way = Way('compiled with backend="kernel_pytorch"', lambda: Compile(module))
    return Proposal(NAME, path, module, f"{type(module).__name__}, run by Python", [way])
