"""For those who test their own kernels and models with this package: numbers compared with a reference, times by ranks.

`OptimizationValidator` compares a changed model with the original, values and gradients; `PerformanceBenchmarkSuite`
times ways in turns and keeps a history; `ComponentValidator` compares one layer with its formula in float64.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree

from .utils.performance import PerformanceHistory, SeriesChange
from .utils.profiling import Comparison, KernelProfiler
from .utils.validation_framework import ComponentValidator, ValidationResult

__all__ = [
    "ComponentValidator",
    "Difference",
    "OptimizationValidator",
    "PerformanceBenchmarkSuite",
    "PerformanceHistory",
    "ValidationResult",
    "compare_tensors",
]


@dataclass(frozen=True)
class Difference:
    """How far a tensor is from the expected one. `relative` is the norm of the difference over the expected norm."""

    name: str
    largest: float
    relative: float
    tolerance: float
    reason: str = ""  # why they cannot be compared

    @property
    def passed(self) -> bool:
        return not self.reason and self.relative <= self.tolerance

    def __str__(self) -> str:
        if self.reason:
            return f"{self.name}: {self.reason}"
        word = "ok" if self.passed else "FAILED"
        return (
            f"{self.name}: {word}, error {self.relative:.2g} (largest {self.largest:.2g}), allowed {self.tolerance:.2g}"
        )


def compare_tensors(name: str, result: Tensor, expected: Tensor, tolerance: float) -> Difference:
    """Infinities and NaN must stand at the same places; the others are compared in float64."""
    infinite = float("inf")
    if result.shape != expected.shape:
        reason = f"the shape is {tuple(result.shape)}, expected {tuple(expected.shape)}"
        return Difference(name, infinite, infinite, tolerance, reason)
    ours, theirs = result.detach().double(), expected.detach().double().to(result.device)
    finite = theirs.isfinite()
    if (
        not torch.equal(ours[~finite].nan_to_num(7.0), theirs[~finite].nan_to_num(7.0))
        or not ours[finite].isfinite().all()
    ):
        return Difference(name, infinite, infinite, tolerance, "infinities or NaN stand at other places")
    difference = (ours - theirs)[finite]
    largest = float(difference.abs().max()) if difference.numel() else 0.0
    norm = float(theirs[finite].norm()) if difference.numel() else 0.0
    relative = float(difference.norm()) / norm if norm > 0 else (0.0 if largest == 0 else infinite)
    return Difference(name, largest, relative, tolerance)


class OptimizationValidator:
    """Compares a changed model with the one it came from.

    Args:
        tolerance: of the relative error. None is 1e-4 for fp32 and wider, 2e-2 for 16 bits.
    """

    def __init__(self, tolerance: float | None = None) -> None:
        self.tolerance = tolerance

    def __repr__(self) -> str:
        return f"OptimizationValidator(tolerance={self.tolerance})"

    def validate(
        self, original: nn.Module, optimized: nn.Module, *inputs: Any, gradients: bool = False, **named: Any
    ) -> list[Difference]:
        """Outputs, and with `gradients` those of the inputs and of parameters by name, for the sum of squares of all
        floating outputs. Inputs are copied for each model; parameters' gradients are left as they were."""
        expected, result = (self._values(model, inputs, named, gradients) for model in (original, optimized))
        if expected.keys() != result.keys():
            other = ", ".join(sorted(expected.keys() ^ result.keys()))
            raise ValueError(f"validate: only one of the models has {other}")
        return [
            compare_tensors(name, result[name], expected[name], self._tolerance_for(expected[name]))
            for name in expected
        ]

    def _tolerance_for(self, tensor: Tensor) -> float:
        if self.tolerance is not None:
            return self.tolerance
        return 2e-2 if tensor.dtype in (torch.bfloat16, torch.float16) else 1e-4

    @staticmethod
    def _values(model: nn.Module, inputs: Any, named: Any, gradients: bool) -> dict[str, Tensor]:
        leaves, structure = _pytree.tree_flatten(copy.deepcopy((inputs, named)))
        for leaf in leaves:
            if isinstance(leaf, Tensor) and leaf.is_floating_point():
                leaf.requires_grad_(gradients)
        words, options = _pytree.tree_unflatten(leaves, structure)
        with torch.set_grad_enabled(gradients):
            outputs = [leaf for leaf in _pytree.tree_leaves(model(*words, **options)) if isinstance(leaf, Tensor)]
        values = {f"output {i}": output for i, output in enumerate(outputs)}
        if gradients:
            wanted = {f"gradient of input {i}": leaf for i, leaf in enumerate(leaves) if _learns(leaf)}
            wanted |= {f"gradient of {name}": value for name, value in model.named_parameters() if value.requires_grad}
            loss = torch.stack(
                [output.float().square().sum() for output in outputs if output.is_floating_point()]
            ).sum()
            found = torch.autograd.grad(loss, list(wanted.values()), allow_unused=True)
            values |= {name: value for name, value in zip(wanted, found) if value is not None}
        return values


def _learns(leaf: object) -> bool:
    return isinstance(leaf, Tensor) and leaf.requires_grad


class PerformanceBenchmarkSuite:
    """Named functions, timed in turns, with a history by which a later run is judged.

    >>> suite = PerformanceBenchmarkSuite("history.json")
    >>> suite.add("block", lambda: block(x))
    >>> suite.run()
    >>> suite.regressions()
    """

    def __init__(self, history: str | os.PathLike[str] | None = None, device: torch.device | str | None = None) -> None:
        self.history = PerformanceHistory(history) if history is not None else None
        self.device = device
        self._ways: dict[str, Callable[[], object]] = {}

    def __repr__(self) -> str:
        return f"PerformanceBenchmarkSuite({len(self._ways)} ways, history={self.history!r})"

    def add(self, name: str, function: Callable[[], object]) -> None:
        if name in self._ways:
            raise ValueError(f"benchmark suite: {name!r} is there already; name this one otherwise")
        self._ways[name] = function

    def run(self, iterations: int = 100, warmup: int = 10) -> Mapping[str, list[float]]:
        """Samples in microseconds by name; they join the history where there is one."""
        if not self._ways:
            raise ValueError("benchmark suite: nothing was added; call add(name, function) first")
        if self.history is not None:
            return self.history.measure(self._ways, self.device, iterations, warmup)
        return KernelProfiler(self.device).sample(self._ways, (), iterations, warmup)

    def compare(self, iterations: int = 100) -> Comparison:
        """The ways against each other, by medians and quartiles."""
        return KernelProfiler(self.device).compare_implementations(self._ways, iterations=iterations)

    def regressions(self, threshold: float = 0.05) -> list[SeriesChange]:
        """What the newest run has slower than those before it; empty without a history."""
        return [] if self.history is None else self.history.regressions(threshold)
