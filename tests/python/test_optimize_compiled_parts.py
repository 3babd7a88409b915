"""`optimize` on models that another compiler has compiled, in part or as a whole: compiled parts stay as they are, are
named with the cure and compile no further time; the others are optimised."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from forced_clock import everything_is_kept
from torch import Tensor, nn

import kernel_pytorch

DIM = 32


@pytest.fixture(autouse=True)
def everything_pays() -> Iterator[None]:
    with everything_is_kept():
        yield


def block() -> nn.Sequential:
    return nn.Sequential(nn.Linear(DIM, 48), nn.GELU(), nn.Linear(48, DIM), nn.LayerNorm(DIM))


class Counting:
    """A backend for torch.compile that counts what it is given."""

    def __init__(self) -> None:
        self.graphs = 0

    def __call__(self, graph: torch.fx.GraphModule, example_inputs: list[Tensor]) -> Callable[..., object]:
        self.graphs += 1
        return graph.forward


def in_place(module: nn.Module, backend: Counting) -> nn.Module:
    module.compile(backend=backend)
    return module


def wrapped(module: nn.Module, backend: Counting) -> nn.Module:
    return torch.compile(module, backend=backend)  # type: ignore[return-value]


def scripted(module: nn.Module, backend: Counting) -> nn.Module:
    return torch.jit.script(module)  # type: ignore[no-any-return]


def frozen(module: nn.Module, backend: Counting) -> nn.Module:
    return torch.jit.freeze(torch.jit.trace(module.eval(), torch.randn(2, 5, DIM)))  # type: ignore[no-any-return]


COMPILERS = [in_place, wrapped, scripted, frozen]


@pytest.mark.parametrize("goal", ["inference", "train"])
@pytest.mark.parametrize("compiler", COMPILERS)
def test_compiled_parts_stay_as_they_are(compiler: Callable[..., nn.Module], goal: str) -> None:
    torch._dynamo.reset()
    backend = Counting()
    model = nn.Sequential(block(), compiler(block(), backend), block()).train(goal == "train")
    x = torch.randn(2, 5, DIM)
    expected = model(x)
    if goal == "train":
        model(x).sum().backward()
    before = backend.graphs
    result = kernel_pytorch.optimize(model, x, goal=goal, budget_seconds=10)
    report = result.report.data
    replaced = [one["path"] for one in report["replacements"]]
    assert replaced and all(path.split(".")[0] in ("0", "2") for path in replaced)
    left = [one for one in report["refusals"] if one["path"] == "1"]
    name = "torch.compile" if compiler in (in_place, wrapped) else "torch.jit"
    assert [one["reason"] for one in left] == [
        f"{name} has compiled its code; call kernel_pytorch.optimize first and {name} afterwards"
    ]
    # Forward with and without gradients are two graphs; no hook and no replacement makes another one.
    assert backend.graphs - before <= 2
    torch.testing.assert_close(model(x), expected, rtol=2e-4, atol=2e-4)
    result.restore()
    torch.testing.assert_close(model(x), expected, rtol=0, atol=0)


@pytest.mark.parametrize("goal", ["inference", "train"])
@pytest.mark.parametrize("compiler", [in_place, scripted])
def test_a_model_that_is_compiled_as_a_whole_says_so(compiler: Callable[..., nn.Module], goal: str) -> None:
    torch._dynamo.reset()
    model = compiler(block(), Counting())
    result = kernel_pytorch.optimize(model, torch.randn(2, 5, DIM), goal=goal, budget_seconds=5)
    assert not result.report.data["replacements"]
    assert "call kernel_pytorch.optimize first" in str(result.report)


def test_an_exported_program_has_one_mode() -> None:
    x = torch.randn(2, 5, DIM)
    model = torch.export.export(block(), (x,)).module()
    expected = model(x)
    kernel_pytorch.optimize(model, x, budget_seconds=5)
    torch.testing.assert_close(model(x), expected, rtol=2e-4, atol=2e-4)
