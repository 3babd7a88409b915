"""What every module of a model gets on the sample: one run with hooks, one copy of the arguments for each kind of call.

Modules that do the same work share the copy, so that a deep model costs the memory of one block. Also what routers
chose in a run.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from .sites import Call, are_apart, signature_of


@dataclass
class Recording:
    """By path: the kind of call that a module gets, how often, and an example of it."""

    signatures: dict[str, tuple[Any, ...]] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    calls: dict[tuple[Any, ...], Call] = field(default_factory=dict)
    first_apart: str | None = None  # the first path that is called with rows that lie apart
    closed: dict[str, str] = field(default_factory=dict)  # paths of parts whose code is compiled, and what compiled it

    def has_closed(self, path: str) -> bool:
        """Whether some of what a module calls is compiled code."""
        return any(_is_inside(parent, path) for parent in self.closed)

    def call(self, path: str) -> Call | None:
        signature = self.signatures.get(path)
        return None if signature is None else self.calls[signature]


def compiled_by(module: nn.Module) -> str | None:
    """What has compiled the module's own code, or None. Nothing in there can be listened to or replaced: torch.jit
    refuses it, and torch.compile would compile anew for each hook and each replacement until it gives up."""
    if isinstance(module, torch.jit.ScriptModule):
        return "torch.jit"
    wrapper = sys.modules.get("torch._dynamo.eval_frame")  # slow to load, and not there before something is compiled
    if module._compiled_call_impl is not None or (wrapper and isinstance(module, wrapper.OptimizedModule)):
        return "torch.compile"
    return None


def why_closed(compiler: str) -> str:
    return f"{compiler} has compiled its code; call kernel_pytorch.optimize first and {compiler} afterwards"


def _is_inside(path: str, parent: str) -> bool:
    return parent in ("", path) or path.startswith(f"{parent}.")


def _closed_parts(model: nn.Module) -> dict[str, str]:
    """By path the outermost parts whose code is compiled, and what compiled it."""
    found: dict[str, str] = {}
    for path, module in model.named_modules():
        compiler = compiled_by(module)
        if compiler and not any(_is_inside(path, parent) for parent in found):
            found[path] = compiler
    return found


def record(model: nn.Module, run: Callable[[], object]) -> Recording:
    """Runs the sample once, listening to every module that is not inside compiled code."""
    recording = Recording(closed=_closed_parts(model))
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
            if any(_is_inside(path, parent) for parent in recording.closed):
                continue
            handles.append(module.register_forward_pre_hook(listen(path), with_kwargs=True))
        with torch.no_grad():
            run()
    finally:
        for handle in handles:
            handle.remove()
    return recording


# Where two experts score almost alike, one rounding decides which of them a token goes to, and the token's row is
# another one from there on. Such a choice says nothing about a replacement: so while parts are verified those of the
# original are repeated. What a replacement makes of the scores is compared as everything else, since weights of experts
# are made of them.
class Choices(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes what `topk` chooses; with `known` it chooses that instead, call by call."""

    def __init__(self, known: Sequence[Tensor] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.made: list[Tensor] = []
        self._known = known

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if func is not torch.ops.aten.topk.default:
            return found
        values, chosen = found
        call = len(self.made)
        if call < len(self._known) and self._known[call].shape == chosen.shape:
            chosen = self._known[call]
            dim = args[2] if len(args) > 2 else (kwargs or {}).get("dim", -1)
            values = args[0].gather(dim, chosen)
        self.made.append(chosen)
        return values, chosen


def routes(module: nn.Module) -> bool:
    """Whether it has experts, as Hugging Face's and our layers say it."""
    return any(type(getattr(one, "num_experts", None)) is int for one in module.modules())


def choosing(module: nn.Module, known: Sequence[Tensor]) -> AbstractContextManager[Choices | None]:
    """Around a run of the module: of others than those with experts nothing is noted."""
    return Choices(known) if routes(module) else nullcontext()
