"""`optimize` and torch.compile together: a compiler sees the model as it was, or replaces what optimize does."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from compile_models import TAKE_ALL  # noqa: E402
from kernel_pytorch._optimize.changes import changes_of  # noqa: E402
from kernel_pytorch.compile_backend import entry  # noqa: E402
from kernel_pytorch.compile_backend.settings import settings_of  # noqa: E402
from test_optimize import always, one_thread  # noqa: E402, F401
from torch import nn  # noqa: E402
from torch.nn import functional  # noqa: E402

import kernel_pytorch  # noqa: E402


@pytest.fixture(autouse=True)
def fresh() -> Any:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.first, self.second = nn.RMSNorm(32, eps=1e-6), nn.Linear(32, 48), nn.Linear(48, 32)

    def forward(self, x: Any) -> Any:
        return x + self.second(functional.gelu(self.first(self.norm(x))))


def traced_by(model: nn.Module, x: Any) -> list[str]:
    """What a compiler is given of the model, which is called once."""
    seen: list[str] = []

    def backend(module: Any, inputs: Any) -> Any:
        seen.extend(str(node.target) for node in module.graph.nodes if node.op == "call_function")
        return module

    torch._dynamo.reset()
    torch.compile(model, backend=backend, fullgraph=True)(x)
    return seen


@pytest.mark.parametrize("make", [lambda: nn.Sequential(Block(), Block()), lambda: nn.RMSNorm(32, eps=1e-6)])
def test_a_compiler_sees_the_model_as_it_was(make: Any, always: Any) -> None:  # noqa: F811
    """Also of a model that is itself a part, and again after restore."""
    model, x = make().eval(), torch.randn(4, 32)
    expected = traced_by(model, x)
    kernel_pytorch.optimize(model, x, budget_seconds=5.0, tune="off")
    assert any("forward" in vars(part) for part in model.modules())
    assert traced_by(model, x) == expected and not any("kernel_pytorch" in one for one in expected)
    assert traced_by(copy.deepcopy(model), x) == expected
    kernel_pytorch.restore(model)
    assert traced_by(model, x) == expected


def test_a_model_optimised_as_compiled_keeps_what_was_chosen(always: Any, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    from kernel_pytorch._optimize import compiled as sets

    monkeypatch.setattr(sets, "_best", lambda timings: list(timings)[-1])
    model, x = nn.Sequential(Block(), Block()).eval(), torch.randn(4, 32)
    result = kernel_pytorch.optimize(torch.compile(model, backend="aot_eager"), x, budget_seconds=10.0, tune="off")
    assert result.model._orig_mod is model
    assert any("kernel_pytorch" in one for one in traced_by(model, x))


def test_optimize_may_compile(always: Any, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    """Calls of the same object run compiled code of our backend, and restore takes it away."""
    monkeypatch.setattr(entry, "settings_of", lambda *_: settings_of(None, TAKE_ALL))  # Inductor takes half a minute
    model, x = nn.Sequential(Block(), Block()).eval(), torch.randn(4, 32)
    expected = model(x)
    result = kernel_pytorch.optimize(model, x, budget_seconds=30.0, tune="off", compile=True)
    assert result.model is model and model._compiled_call_impl is not None
    kept = [row["pattern"] for row in result.report.data["replacements"]]
    assert "torch.compile" in kept, kept
    with torch.no_grad():
        torch.testing.assert_close(model(x), expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(copy.deepcopy(model)(x), expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(pickle.loads(pickle.dumps(model))(x), expected)
    kernel_pytorch.restore(model)
    assert model._compiled_call_impl is None and changes_of(model) is None
    assert model(x).equal(expected)


def test_nothing_is_compiled_unless_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda *_, **__: pytest.fail("it was compiled"))
    kernel_pytorch.optimize(Block().eval(), torch.randn(4, 32), budget_seconds=3.0, tune="off")


def test_parts_that_are_compiled_one_by_one(always: Any) -> None:  # noqa: F811
    """Forwards that share their code and not their globals: a compiler keeps what it made per code object."""
    model, x = nn.Sequential(Block(), Block()).eval(), torch.randn(4, 32)
    expected = model(x)
    result = kernel_pytorch.optimize(model, x, budget_seconds=5.0, tune="off", patterns=["calls"])
    assert len(result.report.data["replacements"]) == 2
    model.compile(backend="eager")
    torch.testing.assert_close(model(x), expected, rtol=1e-5, atol=1e-5)
