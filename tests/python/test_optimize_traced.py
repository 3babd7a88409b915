"""torch.compile on top of an optimised model: the ways are tried on the first call, the fastest stays, without a break
of the graph, and what a trial runs leaves no traces."""

from __future__ import annotations

import copy
import inspect
import pickle
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from kernel_pytorch._optimize.traced import compiled_call  # noqa: E402
from kernel_pytorch._optimize.traced.traced import COMPILED, OPTIMIZED, PARTS, choice_of  # noqa: E402
from test_optimize import always, one_thread  # noqa: E402, F401
from torch import nn  # noqa: E402
from torch.nn import functional  # noqa: E402

import kernel_pytorch  # noqa: E402

WAYS = (OPTIMIZED, COMPILED, PARTS)


@pytest.fixture(autouse=True)
def fresh() -> Any:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = (nn.Linear(*sizes, bias=False) for sizes in ((32, 48), (32, 48), (48, 32)))

    def forward(self, x: Any) -> Any:
        return self.down(functional.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp, self.dropout = nn.RMSNorm(32, eps=1e-6), Mlp(), nn.Dropout(0.1)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Any, cache: list[Any] | None = None) -> Any:
        self.calls += 1
        if cache is not None:
            cache.append(x)
        return x + self.dropout(self.mlp(self.norm(x)))


def model_of(kind: type[nn.Module] = Block) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(kind(), kind())


class Graphs:
    """A backend that notes the ops of each graph and runs it as it is."""

    def __init__(self) -> None:
        self.seen: list[list[str]] = []

    def __call__(self, module: Any, inputs: Any) -> Any:
        self.seen.append([str(node.target) for node in module.graph.nodes if node.op == "call_function"])
        return module

    def ours(self) -> list[int]:
        return [sum("kernel_pytorch" in one for one in graph) for graph in self.seen]


def prefer(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock by which one way is the fastest."""
    real = compiled_call._done

    def done(trial: Any, output: Any) -> None:
        real(trial, output)
        if trial.left == 0:
            trial.samples[trial.way][-1] = 1.0 if trial.way == way else 2.0

    monkeypatch.setattr(compiled_call, "_done", torch.compiler.disable(done))


@pytest.mark.parametrize("way", WAYS)
def test_the_fastest_way_stays(way: str, always: Any, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    prefer(way, monkeypatch)
    model, x = model_of().eval(), torch.randn(4, 32)
    expected = model(x)
    kernel_pytorch.optimize(model, x, budget_seconds=5.0, tune="off")
    graphs = Graphs()
    compiled = torch.compile(model, backend=graphs)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), expected, rtol=1e-5, atol=1e-5)
        choice = choice_of(model)
        assert choice is not None and list(choice.chosen.values()) == [way] and not choice.failures
        assert len(graphs.seen) == 2, "each way is one graph"
        assert graphs.ours()[0] == 0 and graphs.ours()[1] > 0
        torch.testing.assert_close(compiled(x), expected, rtol=1e-5, atol=1e-5)
        assert len(graphs.seen) == 2
        # Another shape of about that size: the same way, compiled once more where it is compiled.
        larger = torch.randn(6, 32)
        torch.testing.assert_close(compiled(larger), model(larger), rtol=1e-5, atol=1e-5)
        assert len(graphs.seen) == 2 + (way != OPTIMIZED)
        assert way == OPTIMIZED or (graphs.ours()[-1] > 0) == (way == PARTS)


@pytest.mark.parametrize("way", WAYS)
def test_training(way: str, always: Any, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    """Gradients are the step's own; buffers, random numbers and gradients that were there are as after one call."""
    prefer(way, monkeypatch)
    model, x = model_of().train(), torch.randn(4, 32)
    for part in model:
        part.dropout.p = 0.0
    plain = copy.deepcopy(model)
    kernel_pytorch.optimize(model, x, "train", budget_seconds=5.0, tune="off")
    compiled = torch.compile(model, backend="aot_eager")
    assert model[0].calls == 0
    state = torch.get_rng_state()
    loss = compiled(x).square().sum()
    assert torch.equal(torch.get_rng_state(), state)
    choice = choice_of(model)
    assert choice is not None and list(choice.chosen.values()) == [way], choice.failures
    assert model[0].calls == 1 and all(p.grad is None for p in model.parameters())
    loss.backward()
    plain(x).square().sum().backward()
    for one, other in zip(model.parameters(), plain.parameters()):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=1e-5)


class Caching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, x: Any, cache: list[Any]) -> Any:
        return self.block(x, cache)


def test_arguments_with_state_are_changed_once(always: Any, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    prefer(OPTIMIZED, monkeypatch)
    model, x = Caching().eval(), torch.randn(4, 32)
    kernel_pytorch.optimize(model, (x, []), budget_seconds=5.0, tune="off")
    cache: list[Any] = []
    with torch.no_grad():
        torch.compile(model, backend="eager")(x, cache)
    assert len(cache) == 1


def test_no_graph_may_break(always: Any) -> None:  # noqa: F811
    """With fullgraph=True, and inside of a compiled function, nothing is tried: the compiler sees the model as it was,
    or what was the fastest before."""
    model, x = model_of().eval(), torch.randn(4, 32)
    expected = model(x)
    kernel_pytorch.optimize(model, x, budget_seconds=5.0, tune="off")
    choice = choice_of(model)
    assert choice is not None
    for way in (COMPILED, PARTS):
        torch._dynamo.reset()
        choice.show(way)
        graphs = Graphs()
        whole = torch.compile(model, backend=graphs, fullgraph=True)
        with torch.no_grad():
            torch.testing.assert_close(whole(x), expected, rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(
                torch.compile(lambda x: model(x) + 1, backend=graphs)(x), expected + 1, rtol=1e-5, atol=1e-5
            )
        assert not choice.chosen and len(graphs.seen) == 2
        assert all((count > 0) == (way == PARTS) for count in graphs.ours())


def test_a_way_that_fails_is_left_out(always: Any, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    model, x = model_of().eval(), torch.randn(4, 32)
    expected = model(x)
    kernel_pytorch.optimize(model, x, budget_seconds=5.0, tune="off")

    def refuse(module: Any, inputs: Any) -> Any:
        raise RuntimeError("no compiler today")

    choice = choice_of(model)
    with torch.no_grad():
        compiled = torch.compile(model, backend=refuse)
        for _ in range(3):  # after a failure a call compiles nothing more, so that each finds one of them
            torch.testing.assert_close(compiled(x), expected, rtol=1e-5, atol=1e-5)
    assert choice is not None and list(choice.chosen.values()) == [OPTIMIZED]
    assert set(choice.failures) == {COMPILED, PARTS} and "no compiler" in choice.failures[COMPILED]
    with torch.no_grad(), pytest.raises(RuntimeError, match=r"shape|size"):
        compiled(torch.randn(4, 64, 7))


def test_the_forward_looks_as_it_did(always: Any) -> None:  # noqa: F811
    """transformers asks a model's forward for its arguments."""
    model, x = Caching().eval(), torch.randn(4, 32)
    before = inspect.signature(model.forward)
    kernel_pytorch.optimize(model, (x, []), budget_seconds=5.0, tune="off")
    assert "forward" in vars(model) and inspect.signature(model.forward) == before


def test_copies_restore_and_pickle(always: Any, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    prefer(PARTS, monkeypatch)
    model, x = model_of().eval(), torch.randn(4, 32)
    expected = model(x)
    kernel_pytorch.optimize(model, x, budget_seconds=5.0, tune="off")
    with torch.no_grad():
        torch.compile(model, backend="eager")(x)
        twin = copy.deepcopy(model)
        assert choice_of(twin) is not choice_of(model) and not choice_of(twin).chosen
        torch.testing.assert_close(torch.compile(twin, backend="eager")(x), expected, rtol=1e-5, atol=1e-5)
        again = pickle.loads(pickle.dumps(model))
        assert choice_of(again) is None and again(x).equal(expected)
        kernel_pytorch.restore(model)
        assert choice_of(model) is None and "forward" not in vars(model) and model(x).equal(expected)
        graphs = Graphs()
        torch._dynamo.reset()
        torch.compile(model, backend=graphs)(x)
        assert graphs.ours() == [0]
