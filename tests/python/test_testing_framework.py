"""testing_framework: differences are found and named; times have a history."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from kernel_pytorch.testing_framework import (
    OptimizationValidator,
    PerformanceBenchmarkSuite,
    compare_tensors,
)
from torch import nn

from kernel_pytorch import collect_env


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))


def test_the_same_model_passes_and_gradients_stay_its_own() -> None:
    first, x = model(), torch.randn(3, 8)
    differences = OptimizationValidator().validate(first, copy.deepcopy(first), x, gradients=True)
    names = [each.name for each in differences]
    assert names[0] == "output 0" and "gradient of input 0" in names and "gradient of 2.weight" in names
    assert all(each.passed for each in differences)
    assert all(parameter.grad is None for parameter in first.parameters()) and not x.requires_grad


def test_a_changed_weight_is_found_where_it_is() -> None:
    first = model()
    second = copy.deepcopy(first)
    with torch.no_grad():
        second[0].weight[3, 5] += 0.5
    differences = {each.name: each for each in OptimizationValidator().validate(first, second, torch.randn(3, 8))}
    assert not differences["output 0"].passed and "FAILED" in str(differences["output 0"])
    assert OptimizationValidator(tolerance=10.0).validate(first, second, torch.randn(3, 8))[0].passed


@pytest.mark.parametrize(
    ("result", "expected", "passes"),
    [
        ([1.0, float("inf")], [1.0, float("inf")], True),
        ([1.0, float("nan")], [1.0, float("nan")], True),
        ([1.0, float("nan")], [1.0, 2.0], False),
        ([1.0, float("-inf")], [1.0, float("inf")], False),
        ([1.0, 2.0], [1.0, float("nan")], False),
        ([0.0, 0.0], [0.0, 0.0], True),
        ([0.0, 1e-9], [0.0, 0.0], False),
        ([], [], True),
    ],
)
def test_what_is_not_finite_must_be_at_its_place(result: list[float], expected: list[float], passes: bool) -> None:
    assert compare_tensors("x", torch.tensor(result), torch.tensor(expected), 1e-6).passed is passes


def test_shapes_are_compared_first() -> None:
    difference = compare_tensors("x", torch.zeros(2, 3), torch.zeros(3, 2), 1.0)
    assert not difference.passed and "(2, 3)" in str(difference)


def test_models_with_other_outputs_are_refused() -> None:
    class Two(nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return x, x

    with pytest.raises(ValueError, match="output 1"):
        OptimizationValidator().validate(nn.Identity(), Two(), torch.ones(2))


def test_a_suite_keeps_a_history(tmp_path: Path) -> None:
    suite, x = PerformanceBenchmarkSuite(tmp_path / "history.json", "cpu"), torch.ones(64)
    with pytest.raises(ValueError, match="add"):
        suite.run()
    suite.add("add", lambda: x + x)
    with pytest.raises(ValueError, match="already"):
        suite.add("add", lambda: x)
    assert len(suite.run(10)["add"]) == 10 and suite.regressions() == []
    suite.run(10)
    assert len(suite.history.runs) == 2  # type: ignore[union-attr]
    assert PerformanceBenchmarkSuite(device="cpu").regressions() == []


def test_collect_env_tells_of_torch_and_the_machine() -> None:
    text = collect_env()
    assert torch.__version__ in text and "kernel_pytorch" in text and "NVRTC" in text
