"""PyGraph: replays equal calls, weights are read where they lie, and what does not pay is not a graph.

Without a GPU its logic is driven by a small graph of our own: the ops of a call are noted and run again into the same
memory, as a CUDA graph does. Tests marked `gpu` use the real ones.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from kernel_pytorch.core.compilers import GraphDeploymentStrategy, PyGraphCUDAOptimizer
from kernel_pytorch.hardware import HardwareAbstractionLayer
from kernel_pytorch.optimization_patterns import (
    BucketingStrategy,
    DynamicShapeModule,
    PyGraph,
    capturing,
    create_optimal_bucketing_system,
    graphs,
    module,
    spared_work,
)
from kernel_pytorch.optimization_patterns.results import Results
from kernel_pytorch.optimizations import patterns
from noted_cuda import NotedCuda
from torch import Tensor, nn

import kernel_pytorch


@pytest.fixture
def noted(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for place in (graphs, module):
        monkeypatch.setattr(place, "graph_absence", lambda tensors, module=None: "")
    monkeypatch.setattr(capturing, "uncached_autocast", contextlib.nullcontext)
    monkeypatch.setattr(capturing, "eager_us", lambda call: (call(), 5000.0)[1])
    NotedCuda.install(monkeypatch)
    with torch.no_grad():
        yield


class Masked(nn.Module):
    def __init__(self, dim: int = 16) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(50, dim), nn.Linear(dim, dim)

    def forward(self, ids: Tensor, attention_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        x = self.embed(ids)
        scores = x @ x.transpose(1, 2)
        if attention_mask is not None:
            scores = scores.masked_fill(attention_mask[:, None, :] == 0, float("-inf"))
        hidden = self.out(scores.softmax(-1) @ x)
        return hidden, hidden[:, 0]


def mlp(dim: int = 8) -> nn.Module:
    return nn.Sequential(nn.Linear(dim, dim), nn.GELU(), nn.Linear(dim, dim)).eval()


def weights_by_reference(device: str) -> None:
    model = mlp().to(device)
    graph = PyGraph(model, always=True)
    x = torch.randn(4, 8, device=device)
    with torch.no_grad():
        for _ in range(3):
            torch.testing.assert_close(graph(x), model(x))
        twin = mlp().to(device)  # the same architecture, other weights: no hash may confuse them
        other = PyGraph(twin, always=True)
        torch.testing.assert_close(other(x), twin(x))
        model[0].weight.mul_(2)  # in place: seen by the next replay
        torch.testing.assert_close(graph(x), model(x))
        assert graph.statistics()["recaptures"] == 0
        model[0].weight.data = torch.randn(8, 8, device=device)
        torch.testing.assert_close(graph(x), model(x))
        model[2].bias = nn.Parameter(torch.randn(8, device=device))
        torch.testing.assert_close(graph(x), model(x))
    assert graph.statistics()["recaptures"] == 2


def bucketed_trace(device: str) -> None:
    torch.manual_seed(0)
    model = Masked().to(device).eval()
    requests = [torch.randint(50, (1, int(n)), device=device) for n in torch.randint(3, 40, (50,))]
    system = create_optimal_bucketing_system(requests, BucketingStrategy.OPTIMAL, 4)
    bucketed = DynamicShapeModule(model, system).eval()
    for graph in bucketed._graphs:
        graph.always = True
    with torch.no_grad():
        expected = [model(request) for request in requests]
        for _ in range(2):
            found = [bucketed(request) for request in requests]  # kept while others replay: outputs must be copies
            for one, other in zip(found, expected, strict=True):
                torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
        many = bucketed.run_many([request[0] for request in requests], max_tokens=128)
        for one, other in zip(many, expected, strict=True):
            torch.testing.assert_close(one, tuple(value[0] for value in other), rtol=1e-4, atol=1e-5)
    statistics = bucketed.statistics()
    assert statistics["replays"] > 50 and statistics["graphs"] > 0 and bucketed.refusals() == []


def eviction(device: str) -> None:
    model = mlp().to(device)
    graph = PyGraph(model, max_graphs=2, always=True)
    with torch.no_grad():
        for rows in (1, 2, 1, 3, 1, 2):
            x = torch.randn(rows, 8, device=device)
            torch.testing.assert_close(graph(x), model(x))
    statistics = graph.statistics()
    assert statistics["graphs"] == 2 and statistics["captures"] == 4 and statistics["evictions"] == 2
    graph.clear()
    assert graph.statistics()["graphs"] == 0


def bound_to_inputs(device: str) -> None:
    model = mlp().to(device)
    graph = PyGraph(model, always=True, bind_inputs=True)
    x, y = (torch.randn(4, 8, device=device) for _ in range(2))
    with torch.no_grad():
        for _ in range(6):
            torch.testing.assert_close(graph(x), model(x))
        assert graph.statistics()["captures"] == 2  # for the shape, and for x where it lies
        kept = graph(x)
        expected = kept.clone()
        x.mul_(2)  # what lies there is read anew
        torch.testing.assert_close(graph(x), model(x))
        assert torch.equal(kept, expected)  # outputs are the caller's own
        for one in (y, x[:, :], x.t().contiguous().t(), x.clone(), x):
            torch.testing.assert_close(graph(one), model(one))
        assert graph.statistics()["captures"] == 2
        model[0].weight.data = torch.randn(8, 8, device=device)
        for _ in range(6):
            torch.testing.assert_close(graph(x), model(x))
        statistics = graph.statistics()
        assert statistics["recaptures"] == 1 and statistics["captures"] == 4
        for _ in range(20):  # two callers in turns: no captures for either
            for one in (x, y):
                torch.testing.assert_close(graph(one), model(one))
        assert graph.statistics()["captures"] == 4
        for _ in range(60):  # callers that move on: a limited number of captures
            z = torch.randn(4, 8, device=device)
            for _ in range(5):
                torch.testing.assert_close(graph(z), model(z))
        assert graph.statistics()["captures"] <= 2 + 8
        graph.clear()
        torch.testing.assert_close(graph(x), model(x))


class WritesItsInput(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        x.add_(1)
        return x * 2


def inputs_that_are_written(device: str) -> None:
    graph = PyGraph(WritesItsInput().eval(), always=True, bind_inputs=True)
    x = torch.zeros(4, device=device)
    with torch.no_grad():
        for _ in range(8):
            graph(x)
    assert graph.statistics()["captures"] == 1


@pytest.mark.usefixtures("noted")
def test_calls_with_the_same_tensors_need_no_copies() -> None:
    bound_to_inputs("cpu")
    inputs_that_are_written("cpu")


@pytest.mark.gpu
def test_calls_with_the_same_tensors_need_no_copies_on_cuda() -> None:
    bound_to_inputs("cuda")
    inputs_that_are_written("cuda")


@pytest.mark.usefixtures("noted")
def test_weights_are_read_where_they_lie() -> None:
    weights_by_reference("cpu")


@pytest.mark.usefixtures("noted")
def test_a_bucketed_module_replays() -> None:
    bucketed_trace("cpu")


@pytest.mark.usefixtures("noted")
def test_graphs_used_longest_ago_go_first() -> None:
    eviction("cpu")
    model = mlp()
    graph = PyGraph(model, memory_limit_gb=2.5e-6, always=True)
    for rows in range(1, 6):
        graph(torch.randn(rows, 8))
    assert graph.statistics()["graphs"] == 2  # of 1000 bytes and its inputs each


@pytest.mark.usefixtures("noted")
def test_what_does_not_pay_is_called_plainly(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = mlp(), torch.randn(4, 8)
    assert PyGraph(model).explain(x).pays
    monkeypatch.setattr(capturing, "eager_us", lambda call: (call(), 3.0)[1])
    graph = PyGraph(model)
    torch.testing.assert_close(graph(x), model(x))
    assert not graph.explain(x).pays and "not worth" in graph.explain(x).reason
    assert graph.statistics()["plain_calls"] == 1 and graph.statistics()["captures"] == 1


@pytest.mark.usefixtures("noted")
def test_what_cannot_be_captured_is_called_plainly(monkeypatch: pytest.MonkeyPatch) -> None:
    class Waits(nn.Module):
        capturing = False

        def forward(self, x: Tensor) -> Tensor:
            if self.capturing:
                raise RuntimeError("operation not permitted when stream is capturing")
            return x + 1

    model = Waits()
    monkeypatch.setattr(capturing, "eager_us", lambda call: setattr(model, "capturing", True) or 5000.0)
    graph = PyGraph(model)
    decision = graph.explain(torch.ones(2))
    assert not decision.pays and "cannot be captured: operation not permitted" in decision.reason
    model.capturing = False
    torch.testing.assert_close(graph(torch.ones(2)), torch.full((2,), 2.0))


@pytest.mark.skipif(torch.cuda.is_available(), reason="shows what a machine without CUDA does")
def test_without_cuda_it_says_so_and_runs_the_module() -> None:
    model, x = mlp(), torch.randn(4, 8)
    graph = PyGraph(model)
    torch.testing.assert_close(graph(x), model(x))
    assert "no CUDA device" in graph.explain(x).reason
    optimizer = PyGraphCUDAOptimizer()
    analysis = optimizer.analyze_workload(model, [x])
    assert not analysis.is_suitable and "no CUDA device" in analysis.reason
    state = optimizer.create_cuda_graph(model, [x], "first")
    assert not state.is_captured
    torch.testing.assert_close(optimizer.execute_cuda_graph("first", [x]), model(x))
    measured = optimizer.benchmark_vs_eager(model, [x], num_runs=5)
    assert measured["speedup"] > 0 and "no CUDA device" in measured["reason"]
    assert optimizer.get_performance_stats()["graphs"] == 0
    optimizer.clear_cache()
    with pytest.raises(KeyError, match="no graph called"):
        optimizer.execute_cuda_graph("first", [x])
    assert GraphDeploymentStrategy("aggressive").least_gain < GraphDeploymentStrategy("conservative").least_gain


def test_names_at_the_top() -> None:
    assert kernel_pytorch.PyGraphCUDAOptimizer is PyGraphCUDAOptimizer
    assert kernel_pytorch.optimization_patterns.PyGraph is PyGraph
    assert kernel_pytorch.HardwareAbstractionLayer is HardwareAbstractionLayer
    assert patterns.DynamicShapeModule is DynamicShapeModule


def test_refusals_name_the_reason() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        PyGraph(mlp(), max_graphs=0)
    with pytest.raises(TypeError, match="PyGraph: module is int"):
        PyGraph(3)


@pytest.mark.gpu
def test_weights_are_read_where_they_lie_on_cuda() -> None:
    weights_by_reference("cuda")


@pytest.mark.gpu
def test_a_bucketed_module_replays_on_cuda() -> None:
    bucketed_trace("cuda")


@pytest.mark.gpu
def test_graphs_used_longest_ago_go_first_on_cuda() -> None:
    eviction("cuda")


@pytest.mark.gpu
def test_streams_and_inference_mode_on_cuda() -> None:
    model = mlp(256).cuda()
    graph = PyGraph(model, always=True)
    streams = [torch.cuda.Stream() for _ in range(3)]
    inputs = [torch.randn(64, 256, device="cuda") for _ in range(30)]
    torch.cuda.synchronize()
    outputs = []
    for index, x in enumerate(inputs):
        with torch.cuda.stream(streams[index % 3]), torch.inference_mode(index % 2 == 0), torch.no_grad():
            outputs.append(graph(x))
    torch.cuda.synchronize()
    with torch.no_grad():
        for x, output in zip(inputs, outputs, strict=True):
            torch.testing.assert_close(output, model(x))
    with torch.enable_grad():
        assert "gradients" in graph.explain(inputs[0]).reason


@pytest.mark.gpu
def test_the_cost_model_on_cuda() -> None:
    small = nn.Sequential(*[nn.Linear(64, 64) for _ in range(30)]).cuda().eval()
    large = nn.Linear(8192, 8192).cuda().eval()
    with torch.no_grad():
        decision = PyGraph(small).explain(torch.randn(8, 64, device="cuda"))
        assert decision.pays, decision.reason
        decision = PyGraph(large).explain(torch.randn(8192, 8192, device="cuda"))
        assert not decision.pays, decision.reason


class Waits(nn.Module):
    """Needs a number on the host."""

    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if x.sum().item() > 0 else x


@pytest.mark.usefixtures("noted")
def test_a_module_that_waits_for_the_device_is_not_captured() -> None:
    graph = PyGraph(Waits().eval(), always=True)
    assert torch.equal(graph(torch.ones(3)), torch.full((3,), 2.0))
    assert torch.equal(graph(-torch.ones(3)), -torch.ones(3))
    assert "waits for the device in aten::_local_scalar_dense" in graph.explain(torch.ones(3)).reason
    assert graph.statistics()["captures"] == 0


@pytest.mark.gpu
def test_a_module_that_waits_for_the_device_is_not_captured_on_cuda() -> None:
    graph = PyGraph(Waits().eval(), always=True)
    x = torch.ones(4, device="cuda")
    with torch.no_grad():
        torch.testing.assert_close(graph(x), 2 * x)
        torch.testing.assert_close(graph(-x), -x)
    assert "waits for the device" in graph.explain(x).reason


@pytest.mark.gpu
def test_a_capture_that_breaks_off_is_put_right_on_cuda() -> None:
    class Synchronizes(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = x * 2
            torch.cuda.synchronize()
            return y + 1

    stream = torch.cuda.current_stream()
    graph = PyGraph(Synchronizes().eval(), always=True)
    x = torch.ones(4, device="cuda")
    with torch.no_grad():
        for _ in range(2):
            torch.testing.assert_close(graph(x), 2 * x + 1)
        assert "cannot be captured" in graph.explain(x).reason
        assert torch.cuda.current_stream() == stream
        weights_by_reference("cuda")  # captures still work, and so does the allocator
        torch.cuda.empty_cache()
        torch.testing.assert_close(torch.full((1 << 20,), 3.0, device="cuda").sum().item(), 3.0 * (1 << 20))


@pytest.mark.gpu
def test_random_numbers_go_on_after_a_capture_that_broke_off_on_cuda() -> None:
    class Noisy(nn.Module):
        def __init__(self, synchronizes: bool) -> None:
            super().__init__()
            self.synchronizes = synchronizes

        def forward(self, x: Tensor) -> Tensor:
            y = x + torch.rand_like(x)
            if self.synchronizes:
                torch.cuda.synchronize()
            return y + 1

    x = torch.zeros(1000, device="cuda")
    with torch.no_grad():
        earlier = PyGraph(Noisy(False).eval(), always=True)
        assert not torch.equal(earlier(x), earlier(x))
        assert "cannot be captured" in PyGraph(Noisy(True).eval(), always=True).explain(x).reason
        torch.manual_seed(1)
        first = torch.rand(4, device="cuda"), earlier(x), earlier(x)
        torch.manual_seed(1)
        second = torch.rand(4, device="cuda"), earlier(x), earlier(x)
        assert not torch.equal(first[1], first[2])  # an earlier graph draws anew, and from the seed
        for one, other in zip(first, second, strict=True):
            assert torch.equal(one, other)


class Layer:
    def __init__(self, keys: Tensor) -> None:
        self.keys, self.length = keys, keys.shape[0]


class Cache:
    """As Hugging Face's: objects in a list, tensors in their attributes."""

    def __init__(self, layers: list[Layer]) -> None:
        self.layers, self.twin = layers, layers[0].keys


class Cached(nn.Module):
    """Makes a cache, or adds to the one it gets."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor, cache: Cache | None = None) -> dict[str, object]:
        y = self.linear(x)
        if cache is None:
            cache = Cache([Layer(y + 1), Layer(y + 2)])
        else:
            cache.layers.append(Layer(y))
        return {"y": y, "cache": cache, "none": None}


def check_caches_in_results(device: str) -> None:
    model = Cached().eval().to(device)
    graph = PyGraph(model, always=True)
    x = torch.randn(4, 8, device=device)
    with torch.no_grad():
        graph(x)
        first, second = graph(x), graph(2 * x)
        expected = model(x)
        assert graph.statistics()["graphs"] == 1 and graph.statistics()["replays"] == 3
        cache = first["cache"]
        assert (
            type(cache) is Cache and cache is not second["cache"] and cache.layers[0] is not second["cache"].layers[0]
        )
        assert cache.twin is cache.layers[0].keys and cache.layers[1].length == 4  # one tensor stays one
        cache.layers[1].keys.zero_()
        torch.testing.assert_close(first["y"], expected["y"])
        torch.testing.assert_close(cache.layers[0].keys, expected["cache"].layers[0].keys)
        torch.testing.assert_close(second["cache"].layers[1].keys, model(2 * x)["cache"].layers[1].keys)
        # A cache that is given is the caller's: nothing is captured, and it is changed once.
        graph(x, cache)
        assert len(cache.layers) == 3 and graph.statistics()["graphs"] == 1


@pytest.mark.usefixtures("noted")
def test_caches_are_given_anew() -> None:
    check_caches_in_results("cpu")


@pytest.mark.gpu
def test_caches_are_given_anew_on_cuda() -> None:
    check_caches_in_results("cuda")


@pytest.mark.parametrize("value", [iter([1]), threading.Lock()])
def test_results_that_cannot_be_given_anew_say_so(value: object) -> None:
    found = Results((torch.ones(2), {"held": value}))
    assert type(value).__name__ in found.refusal


def test_results_reached_twice_are_refused() -> None:
    layer = Layer(torch.ones(2))
    assert "Layer" in Results([layer, layer]).refusal and not Results([layer]).refusal


class Sends(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * torch.tensor([3.0]).to(x.device).mul_(2)


@pytest.mark.gpu
def test_numbers_of_the_host_are_sent_once_on_cuda() -> None:
    graph, x = PyGraph(Sends().eval(), always=True), torch.randn(4, device="cuda")
    with torch.no_grad():
        for _ in range(3):
            torch.testing.assert_close(graph(x), 6 * x)
    assert graph.statistics()["graphs"] == 1


def test_a_capture_sends_what_was_sent_before() -> None:
    number = torch.tensor([3.0])
    with capturing.uploaded([(number, torch.tensor([7.0]))]):
        assert torch.tensor([3.0]).to("meta").item() == 7.0  # what the earlier run had made
    with pytest.raises(RuntimeError, match="other numbers"), capturing.uploaded([(number, number)]):
        torch.tensor([4.0]).to("meta")


class Asking(nn.Module):
    """As transformers with its masks: asks for a number that is always the same, unless a stream captures."""

    def forward(self, x: Tensor) -> Tensor:
        if torch.cuda.is_current_stream_capturing():
            return x * 1000
        return x + 1 if bool((torch.arange(3, device=x.device) >= 0).all()) else x


def check_the_same_way(device: str) -> None:
    graph, x = PyGraph(Asking().eval(), always=True), torch.randn(4, device=device)
    with torch.no_grad():
        for _ in range(3):
            torch.testing.assert_close(graph(x), x + 1)
    assert graph.statistics()["graphs"] == 1


@pytest.mark.usefixtures("noted")
def test_a_capture_goes_the_way_of_the_call_before() -> None:
    check_the_same_way("cpu")


@pytest.mark.gpu
def test_a_capture_goes_the_way_of_the_call_before_on_cuda() -> None:
    check_the_same_way("cuda")


@pytest.mark.usefixtures("noted")
def test_captures_are_known_to_us_alone() -> None:
    with capturing.knowing([]):
        assert not torch.cuda.is_current_stream_capturing() and capturing.is_capturing()
    assert not capturing.is_capturing()


class Joining(nn.Module):
    """As a model with a cache that is empty at first: keys are joined to it, and logits are the last that it makes."""

    def __init__(self, changes: str = "", is_viewed: bool = False) -> None:
        super().__init__()
        self.keys, self.head = nn.Linear(8, 8), nn.Linear(8, 16, bias=False)
        self.changes, self.is_viewed = changes, is_viewed

    def forward(self, x: Tensor) -> dict[str, object]:
        keys = self.keys(x).view(2, -1, 2, 4).transpose(1, 2)
        joined = torch.cat([keys.new_empty(0), keys], dim=-2)
        if self.changes:
            (keys if self.changes == "source" else joined).mul_(2)
        flat = joined.view(2, -1) if self.is_viewed else joined.reshape(2, -1)
        positions = torch.arange(8, device=x.device).to(x.dtype).mul(0.1)
        logits = self.head(torch.cat([x, x]).view(2, 2, -1, 8)[0] + flat.sum() + keys.sum() + positions)
        return {"logits": logits, "cache": Cache([Layer(joined), Layer(keys)])}


def check_spared_work(device: str, **options: Any) -> None:
    model = Joining(**options).eval().to(device)
    graph = PyGraph(model, always=True, bind_inputs=True, spares=True)
    x = torch.randn(2, 6, 8, device=device)
    with torch.no_grad():
        kept = []
        for turn in range(8):
            x.fill_(turn)
            kept.append((graph(x), model(x)))
        for found, expected in kept:
            torch.testing.assert_close(found["logits"], expected["logits"])
            for one, other in zip(found["cache"].layers, expected["cache"].layers, strict=True):
                torch.testing.assert_close(one.keys, other.keys)
        storages = {t.untyped_storage().data_ptr() for found, _ in kept for t in Results(found).tensors}
        assert len(storages) == 3 * len(kept)  # nobody's memory is another's
        binder = graph._binder
        assert binder is not None and binder.bound is not None and len(binder.bound.results.copies) == 2
    assert graph.statistics()["plain_calls"] == 0 and graph.statistics()["captures"] == 2


@pytest.mark.usefixtures("noted")
@pytest.mark.parametrize("options", [{}, {"changes": "source"}, {"changes": "result"}, {"is_viewed": True}])
def test_captures_are_spared_work(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spared_work, "LARGE_BYTES", 1)
    check_spared_work("cpu", **options)


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{}, {"changes": "source"}, {"changes": "result"}, {"is_viewed": True}])
def test_captures_are_spared_work_on_cuda(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spared_work, "LARGE_BYTES", 1)
    check_spared_work("cuda", **options)


def spared(call: Callable[[], Any]) -> tuple[int, int]:
    """How many joins and how many makers of results a capture of the call leaves out."""
    plan = capturing.looked_at(call, spares=True).spared
    return (0, 0) if plan is None else (len(plan.joins), len(plan.last))


def constants(call: Callable[[], Any]) -> int:
    plan = capturing.looked_at(call, spares=True).spared
    return 0 if plan is None else len(plan.constants)


def test_constants_are_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    x, table = torch.randn(4, 4), nn.Parameter(torch.randn(4, 4))

    def masked(changes: bool = False) -> Tensor:
        rows = torch.arange(4)
        seen = (rows[:, None] >= rows).float()
        if changes:
            seen.mul_(2)
        return x * (seen + 1)

    with torch.no_grad():
        assert constants(masked) == 4  # arange, >=, float, + 1
        assert constants(lambda: masked(changes=True)) == 2  # neither what is changed nor what is made of it
        assert constants(lambda: x + torch.rand(4)) == 0 and constants(lambda: table * 2 + x) == 0
        expected, looked = masked(), capturing.looked_at(masked, spares=True)
        assert looked.spared is not None
        with spared_work.Sparing(looked.spared):
            found = masked()
        torch.testing.assert_close(found, expected)
        monkeypatch.setattr(spared_work, "MOST_KEPT_BYTES", 40)
        assert constants(masked) == 1


def test_which_copies_are_spared(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(2, 6, 8)
    with torch.no_grad():
        assert spared(lambda: Joining()(x)) == (1, 0)  # the logits are small
        monkeypatch.setattr(spared_work, "LARGE_BYTES", 1)
        assert spared(lambda: Joining()(x)) == (1, 1)
        for changes in ("source", "result"):
            assert spared(lambda changes=changes: Joining(changes)(x)) == (0, 1)
        assert spared(lambda: Joining(is_viewed=True)(x)) == (0, 1)  # keys as they are cannot be viewed so
        assert spared(lambda: torch.cat([x.new_empty(0), x])) == (0, 1)  # an input is the caller's own
        assert spared(lambda: torch.cat([x.new_empty(0, dtype=torch.float64), x + 1])) == (0, 1)  # it casts
        assert spared(lambda: torch.rand_like(x)) == (0, 0)
        assert spared(lambda: (x + 1).mul_(2)) == (0, 0)
        assert spared(lambda: (lambda y: (y, y + 1))(x + 1)) == (0, 1)  # only the second is read by nothing
        assert spared(lambda: (lambda y: (y[0], y[1]))(x + 1)) == (0, 0)  # two results in one memory
        assert spared(lambda: x.view(-1)) == (0, 0)

        def changed_behind() -> Tensor:
            y = x + 1
            z = y * 2
            y.zero_()
            return z

        assert spared(changed_behind) == (0, 0)


def test_what_a_capture_leaves_out_runs_behind_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spared_work, "LARGE_BYTES", 1)
    model, x = Joining().eval(), torch.randn(2, 6, 8)
    with torch.no_grad():
        looked = capturing.looked_at(lambda: model(x), spares=True)
        assert looked.spared is not None
        with spared_work.Sparing(looked.spared) as sparing:
            output = model(x)
        results = Results(output, sparing.made_for)
        output["logits"].fill_(float("nan"))  # what stands for them is never read
        torch.testing.assert_close(results.copied()["logits"], model(x)["logits"])
        ((stands, made),) = results.made()
        assert stands is output["logits"]
        torch.testing.assert_close(made, model(x)["logits"])
        with pytest.raises(RuntimeError, match="another way"), spared_work.Sparing(looked.spared):
            x + 1
        with pytest.raises(RuntimeError, match="another way"), spared_work.Sparing(looked.spared):
            model(x)["logits"].sum()


def test_a_result_made_behind_a_replay_is_not_cast_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spared_work, "LARGE_BYTES", 1)
    weight, x = torch.randn(16, 8), torch.randn(4, 8)

    def call() -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return x @ weight.t()

    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        looked = capturing.looked_at(call, spares=True)
        assert looked.spared is not None
        with spared_work.Sparing(looked.spared) as sparing:
            output = call()
        found = Results(output, sparing.made_for).copied()
    assert found.dtype == torch.float32 and torch.equal(found, x @ weight.t())


def test_a_storage_that_is_gone_is_no_others() -> None:
    """What torch makes unseen may lie where an op's result was."""
    watching = spared_work.Watching()
    with torch.no_grad(), watching:
        gone = [torch.arange(1000) for _ in range(8)]
        known = {spared_work.storage_of(one) for one in gone}
        del gone
        with torch.utils._python_dispatch._disable_current_modes():
            unseen = [torch.ones(1000) for _ in range(64)]
    assert not known & {spared_work.storage_of(one) for one in unseen}
    assert watching.plan(unseen).constants.keys() <= set(range(8)) and watching.plan(unseen).last == {}
