"""`kernel_pytorch.explain_compile`: what the backend would do with a model, and what that gains."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from .entry import compile_graph
from .report import CompileReport
from .settings import settings_of
from .trial import times

__all__ = ["explain_compile"]


def explain_compile(
    model: Callable[..., Any],
    inputs: Any,
    *,
    mode: str | None = None,
    options: dict[str, Any] | None = None,
    dynamic: bool | None = None,
    measure: bool = True,
    seconds: float = 1.0,
) -> CompileReport:
    """Compiles the model with this backend, runs it, and says which nodes were replaced, which not and why.

    Args:
        model: a module or function.
        inputs: a tensor, a tuple of positional or a dict of named arguments. A cache among them is changed.
        mode, options, dynamic: torch.compile's.
        measure: also compiles the model without replacements and times both, with gradients where they are on;
            arguments must then bear repeated calls.
        seconds: how long the timing may take.

    Returns:
        A report to print: `.graphs`, `.replaced`, `.predicted_gain_us`, `.measured_gain_us`.
    """
    report = CompileReport()
    compiled = {"kernel_pytorch": _compiled(model, mode, options, dynamic, report)}
    _call(compiled["kernel_pytorch"], inputs)
    if measure:
        plain = {**(options or {}), "kernel_pytorch.choose": "never"}
        compiled["torch"] = _compiled(model, mode, plain, dynamic, CompileReport())
        parameters = [one for one in getattr(model, "parameters", list)() if one.requires_grad]
        runs = {name: _run(one, inputs, parameters) for name, one in compiled.items()}
        report.seconds = {name: one.device for name, one in times(runs, torch.device("cpu"), seconds).items()}
    return report


def _compiled(
    model: Callable[..., Any], mode: str | None, options: Any, dynamic: bool | None, report: CompileReport
) -> Callable[..., Any]:
    settings = settings_of(mode, options)

    def compiler(module: Any, examples: Any) -> Callable[..., Any]:
        return compile_graph(module, examples, settings, report)

    return torch.compile(model, backend=compiler, dynamic=dynamic)


def _call(model: Callable[..., Any], inputs: Any) -> Any:
    if isinstance(inputs, dict):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, tuple | list) else model(inputs)


def _run(model: Callable[..., Any], inputs: Any, parameters: list[Tensor]) -> Callable[[], None]:
    """One call, and the gradients of its loss (or of all that it returns) where gradients are on."""

    def run(turn: int = 0) -> None:
        found = _call(model, inputs)
        wanted = _differentiable(found)
        if wanted and parameters:
            torch.autograd.grad(wanted, parameters, [torch.ones_like(one) for one in wanted], allow_unused=True)
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    return run


def _differentiable(found: Any) -> list[Tensor]:
    loss = getattr(found, "loss", None)
    tensors = [loss] if isinstance(loss, Tensor) else tree_leaves(found)
    return [one for one in tensors if isinstance(one, Tensor) and one.requires_grad]
