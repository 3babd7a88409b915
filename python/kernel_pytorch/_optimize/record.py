"""What every module of a model gets on the sample: one run with hooks, one copy of the arguments for each kind of call.

Modules that do the same work share the copy, so that a deep model costs the memory of one block.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from .sites import Call, are_apart, signature_of


@dataclass
class Recording:
    """By path: the kind of call that a module gets, how often, and an example of it."""

    signatures: dict[str, tuple[Any, ...]] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    calls: dict[tuple[Any, ...], Call] = field(default_factory=dict)
    first_apart: str | None = None  # the first path that is called with rows that lie apart

    def call(self, path: str) -> Call | None:
        signature = self.signatures.get(path)
        return None if signature is None else self.calls[signature]


def record(model: nn.Module, run: Callable[[], object]) -> Recording:
    """Runs the sample once, listening to every module."""
    recording = Recording()
    handles = []

    def listen(path: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            recording.counts[path] = recording.counts.get(path, 0) + 1
            if recording.counts[path] > 1:
                return
            if recording.first_apart is None and any(map(are_apart, (*args, *kwargs.values()))):
                recording.first_apart = path
            call = Call(args, kwargs, of_model=path == "")
            signature = signature_of(module, call)
            recording.signatures[path] = signature
            if signature not in recording.calls:
                recording.calls[signature] = call.fresh()

        return hook

    try:
        for path, module in model.named_modules():
            handles.append(module.register_forward_pre_hook(listen(path), with_kwargs=True))
        with torch.no_grad():
            run()
    finally:
        for handle in handles:
            handle.remove()
    return recording
