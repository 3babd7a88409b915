"""How the compile backend chooses: what is timed together, what the budget stops, what the host may take."""

from __future__ import annotations

import itertools
import time
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import kernel_pytorch.compile_backend as backend  # noqa: E402
from compile_models import Compiled  # noqa: E402
from kernel_pytorch.compile_backend import choice, trial  # noqa: E402
from kernel_pytorch.compile_backend.cluster import cluster  # noqa: E402
from kernel_pytorch.compile_backend.patterns import linears  # noqa: E402
from torch import nn  # noqa: E402
from torch.fx.experimental.proxy_tensor import make_fx  # noqa: E402
from torch.nn import functional  # noqa: E402

TIMED = {"kernel_pytorch.inner": "aot_eager", "kernel_pytorch.choose": "timed"}


@pytest.fixture(autouse=True)
def fresh() -> Any:
    backend.forget()
    torch._dynamo.reset()
    yield
    backend.forget()
    torch._dynamo.reset()


def test_a_part_is_timed_with_what_inductor_would_fuse() -> None:
    """Up to the next products, and not along the residual stream, which goes around them."""

    def block(x: Any, y: Any, weight: Any) -> Any:
        total = x * 2.0 + y
        row = functional.gelu(functional.layer_norm(total, (8,)))
        return total + functional.linear(row, weight).tanh()

    graph = make_fx(block, pre_dispatch=True, tracing_mode="fake")(
        torch.randn(4, 8), torch.randn(4, 8), torch.randn(8, 8)
    ).graph
    (norm,) = graph.find_nodes(op="call_function", target=torch.ops.aten.layer_norm.default)
    assert [node.target.name() for node in cluster(graph, [norm])] == [
        "aten::mul.Tensor",
        "aten::add.Tensor",
        "aten::layer_norm",
        "aten::gelu",
    ]
    (product,) = graph.find_nodes(op="call_function", target=torch.ops.aten.linear.default)
    names = [node.target.name() for node in cluster(graph, [product])]
    assert names == ["aten::linear", "aten::tanh", "aten::add.Tensor"]


def test_the_budget_ends_within_a_match(monkeypatch: pytest.MonkeyPatch) -> None:
    """A compilation that took too long is the last one, and what was not measured is not remembered."""
    compiled = []
    reference, candidate = trial.Trial.reference, trial.Trial.candidate

    def slow(self: Any, **more: Any) -> Any:
        made = reference(self, **more)
        time.sleep(0.3)
        return made

    monkeypatch.setattr(trial.Trial, "reference", slow)
    monkeypatch.setattr(trial.Trial, "candidate", lambda self, one: compiled.append(one) or candidate(self, one))
    layer, x = nn.LayerNorm(16), torch.randn(4, 16)
    found = Compiled(layer, {**TIMED, "kernel_pytorch.budget_seconds": 0.2})
    torch.testing.assert_close(found(x), layer(x))
    assert [line.reason for line in found.report.graphs[0].lines] == ["no time was left to measure it"]
    assert not compiled and not choice._remembered


@pytest.mark.parametrize(
    ("ours", "without_graphs", "with_graphs"),
    [
        (trial.Time(50e-6, 20e-6), True, True),
        (trial.Time(90e-6, 20e-6), False, True),  # 10 us of the device for 12 us of the host
        (trial.Time(99e-6, 2e-6), False, False),  # noise
    ],
)
def test_the_host_may_not_take_longer_than_the_device_gains(
    monkeypatch: pytest.MonkeyPatch, ours: Any, without_graphs: bool, with_graphs: bool
) -> None:
    """One measurement serves both modes."""
    measured: list[Any] = []

    def times(*arguments: Any) -> Any:
        measured.append(arguments)
        return {"torch": trial.Time(100e-6, 8e-6), "ours": ours}

    monkeypatch.setattr(choice, "times", times)
    x = torch.randn(4, 16)
    for graphs, expected in ((False, without_graphs), (True, with_graphs)):
        torch._dynamo.reset()
        found = Compiled(nn.LayerNorm(16), {**TIMED, "triton.cudagraphs": graphs})
        found(x)
        (line,) = found.report.graphs[0].lines
        assert bool(line.taken) is expected and "torch 100.0 us (host 8 us)" in line.reason
    assert len(measured) == 1


@pytest.mark.parametrize(
    ("gain_us", "noise_us", "expected"),
    [(100, 60, True), (20, 2, True), (20, 6, False), (4, 0.1, False), (-20, 1, False)],
)
def test_a_small_share_of_a_long_part_is_a_gain_where_it_is_no_noise(
    gain_us: float, noise_us: float, expected: bool
) -> None:
    found = trial.Time(3000e-6 - gain_us * 1e-6, noise=noise_us * 1e-6)
    assert choice._is_faster(trial.Time(3000e-6), found) is expected


def test_the_error_of_a_median_is_its_deviation_between_measurements() -> None:
    values = torch.randn(2000, 25, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    errors = torch.tensor([trial._error(row) for row in values.tolist()], dtype=torch.float64)
    assert 0.85 < errors.median() / values.median(1).values.std() < 1.15


def test_a_gain_that_noise_hides_is_measured_for_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds: list[float] = []
    asked: list[int] = []

    def times(runs: Any, device: Any, given: float, turns: int = 11) -> Any:
        seconds.append(given)
        asked.append(turns)
        noise = 1e-6 if len(seconds) > 1 else 10e-6
        return {"torch": trial.Time(2038e-6), "ours": trial.Time(2020e-6, noise=noise)}

    monkeypatch.setattr(choice, "times", times)
    found = Compiled(nn.LayerNorm(16), TIMED)
    found(torch.randn(4, 16))
    assert found.report.graphs[0].lines[0].taken == "ours"
    assert seconds[1:] == [choice._LONGER * seconds[0]] and asked == [11, choice._TURNS]


def test_what_slows_a_turn_down_is_no_noise() -> None:
    """Two ways that drift together: their difference is known better than either."""

    def drifting(extra: float) -> Any:
        turns = itertools.count()

        def measure() -> float:
            turn = next(turns)
            return 1.0 + 0.01 * turn + extra * (1.0 + 1e-2 * (turn % 4))

        return measure

    found = trial._medians({"torch": drifting(0.0), "ours": drifting(-0.02)}, 0.0)
    assert found["torch"][1] == 0.0 and 0 < found["ours"][1] < 1e-3


def test_what_was_refused_is_in_the_report(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where another way of the same match is taken: otherwise a kernel that fails would only look slow."""

    def fails(expected: Any, found: Any, narrowest: Any) -> None:
        if not calls:
            calls.append(found)
            raise trial.Rejected("differs by 7")

    calls: list[Any] = []
    monkeypatch.setattr(choice, "check_agreement", fails)
    x = torch.randn(2, 3, 8, 16)
    mask = torch.ones(8, 8, dtype=torch.bool).tril()[None, None]

    def attend(q: Any) -> Any:
        place = torch.arange(8)
        return functional.scaled_dot_product_attention(q, q, q, (place <= place[:, None])[None, None])

    found = Compiled(attend)
    expected = functional.scaled_dot_product_attention(x, x, x, mask)
    torch.testing.assert_close(found(x), expected)
    (line,) = found.report.graphs[0].lines
    assert line.taken == "torch, causal" and "ours, causal differs by 7" in line.reason


def test_products_of_few_rows_and_large_ones_on_a_cpu_are_ours() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(16, 24), nn.Linear(24, 16, bias=False)

        def forward(self, x: Any) -> Any:
            return x + self.second(self.first(x).sin())

    block, both = Block(), {"linear": 1, "linear_residual": 1}
    for rows, replaced in ((3, both), (17, {}), (linears._LARGE_ON_CPU // (16 * 24), {}), (11000, both)):
        torch._dynamo.reset()
        found, x = Compiled(block, dynamic=False), torch.randn(rows, 16)
        with torch.no_grad():
            torch.testing.assert_close(found(x), block(x))
        assert found.replaced == replaced, str(found.report)
    trained = Compiled(block)
    trained(torch.randn(3, 16)).sum().backward()
    assert not trained.replaced


def test_rope_keeps_the_order_of_memory_of_a_projection() -> None:
    """Queries that lie by positions stay so, and so does the output of attention: no copy before the projection."""

    def attend(q: Any, k: Any, angles: Any) -> Any:
        both = torch.cat((angles, angles), -1)
        cos, sin = both.cos().unsqueeze(1), both.sin().unsqueeze(1)

        def turned(x: Any) -> Any:
            first, second = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
            return x * cos + torch.cat((-second, first), -1) * sin

        q, k = q.transpose(1, 2), k.transpose(1, 2)
        q, k = turned(q), turned(k)
        return functional.scaled_dot_product_attention(q, k, k).transpose(1, 2)

    arguments = torch.randn(2, 6, 4, 16), torch.randn(2, 6, 4, 16), torch.randn(1, 6, 8)
    found = Compiled(attend)
    output = found(*arguments)
    torch.testing.assert_close(output, attend(*arguments))
    assert found.replaced == {"attention": 1, "rope": 1}, str(found.report)
    assert output.is_contiguous()


@pytest.mark.parametrize("kind", ["silu", "gelu", "relu"])
def test_gated_layers_take_their_two_weights_as_they_are(kind: str) -> None:
    """Either order of the product; training keeps two products, since no second layer follows."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate, self.up = nn.Linear(16, 24, bias=kind == "gelu"), nn.Linear(16, 24, bias=False)

        def forward(self, x: Any) -> Any:
            gate = getattr(functional, kind)(self.gate(x))
            return gate * self.up(x) if kind == "silu" else self.up(x) * gate

    layer, x = Layer(), torch.randn(5, 7, 16)
    found = Compiled(layer)
    with torch.no_grad():
        torch.testing.assert_close(found(x), layer(x), atol=1e-5, rtol=1e-5)
    assert found.replaced == {"gated_linear": 1}, str(found.report)
    torch._dynamo.reset()
    trained = Compiled(layer)
    trained(x).sum().backward()
    assert trained.replaced == {"gated_activation": 1}, str(trained.report)


@pytest.mark.parametrize("kind", ["plain", "mask of numbers", "softmax in fp32", "scores read elsewhere"])
def test_attention_written_out(kind: str) -> None:
    """With gradients; where somebody reads the probabilities it stays as it is."""

    def attend(q: Any, k: Any, v: Any, mask: Any) -> Any:
        scores = torch.matmul(q, k.transpose(2, 3)) * 0.25
        if kind == "mask of numbers":
            scores = scores + mask
        to = torch.float32 if kind == "softmax in fp32" else None
        chances = functional.softmax(scores, dim=-1, dtype=to).to(q.dtype)
        output = torch.matmul(chances, v).transpose(1, 2)
        return (output, chances) if kind == "scores read elsewhere" else output

    dtype = torch.bfloat16 if kind == "softmax in fp32" else torch.float32
    arguments = [torch.randn(2, 3, 9, 16, dtype=dtype, requires_grad=True) for _ in range(3)]
    arguments.append(torch.randn(2, 1, 9, 9, dtype=dtype))
    found = Compiled(attend)
    outputs = [call(*arguments) for call in (found, attend)]
    if kind == "scores read elsewhere":
        torch.testing.assert_close(*outputs)
        assert not found.replaced
        return
    assert found.replaced == {"attention": 1}, str(found.report)
    gradients = [torch.autograd.grad(one.float().square().sum(), arguments[:3]) for one in outputs]
    tolerance = 5e-2 if dtype is torch.bfloat16 else 1e-5
    torch.testing.assert_close(outputs[0], outputs[1], atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(*gradients, atol=tolerance, rtol=tolerance)
