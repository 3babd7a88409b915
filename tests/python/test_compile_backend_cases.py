"""What the compile backend must bear: caches, padding, changing lengths, graph breaks, autocast, failures."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import kernel_pytorch.compile_backend as backend  # noqa: E402
from compile_models import TAKE_ALL, Compiled, gradients, inputs_of, model_of, relative  # noqa: E402
from kernel_pytorch.compile_backend import patterns  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn import functional  # noqa: E402


@pytest.fixture(autouse=True)
def fresh() -> Any:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def test_the_name_is_registered_with_options_and_modes() -> None:
    assert "kernel_pytorch" in torch._dynamo.list_backends()
    layer = nn.Sequential(nn.Linear(8, 8), nn.GELU()).eval()
    x = torch.randn(4, 8)
    compiled = torch.compile(layer, backend="kernel_pytorch", options=TAKE_ALL)
    torch.testing.assert_close(compiled(x), layer(x))
    with pytest.raises(Exception, match="there is no pattern 'attentoin'"):
        torch.compile(layer, backend="kernel_pytorch", options={"kernel_pytorch.patterns": ["attentoin"]})(x)


def test_an_installed_package_needs_no_import(tmp_path: Path) -> None:
    """The entry point of pyproject.toml brings the name, and importing the module as well does not clash with it."""
    text = (Path(__file__).resolve().parents[2] / "pyproject.toml").read_text()
    found = re.search(r"\[project\.entry-points\.torch_dynamo_backends\]\n(\S+) = \"(\S+)\"", text)
    assert found is not None
    folder = tmp_path / "kernel_pytorch-0.0.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: kernel_pytorch\nVersion: 0.0.0\n")
    (folder / "entry_points.txt").write_text(f"[torch_dynamo_backends]\n{found[1]} = {found[2]}\n")
    program = """
import sys, torch
assert "kernel_pytorch" in torch._dynamo.list_backends()
layer = torch.compile(torch.nn.Linear(4, 4), backend="kernel_pytorch", options={"kernel_pytorch.inner": "eager"})
layer(torch.ones(2, 4))
assert "kernel_pytorch.compile_backend" in sys.modules
import kernel_pytorch.compile_backend
"""
    paths = [str(tmp_path), str(Path(backend.__file__).resolve().parents[2])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_inductor_gets_the_rewritten_graph_and_its_options() -> None:
    layer = nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 16))
    x = torch.randn(4, 16, requires_grad=True)
    expected = gradients(layer, layer(x).sum())
    report = backend.explain_compile(
        layer, x, options={"kernel_pytorch.choose": "always", "max_autotune": False}, measure=False
    )
    assert report.replaced == {"mlp": 1, "norm": 1}, str(report)
    found = gradients(
        layer, torch.compile(layer, backend="kernel_pytorch", options={"kernel_pytorch.choose": "always"})(x).sum()
    )
    for name, one in expected.items():
        assert relative(found[name], one) < 1e-5


def test_a_choice_is_measured_and_explained() -> None:
    """With a budget both ways are timed as they would run; without one nothing is replaced."""
    layer = nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 32)).eval()
    x = torch.randn(8, 32)
    backend.forget()
    options = {"kernel_pytorch.inner": "aot_eager"}
    with torch.no_grad():
        report = backend.explain_compile(layer, x, options=options, seconds=0.1)
        lines = [line for graph in report.graphs for line in graph.lines]
        assert all("us" in line.reason for line in lines) and lines, str(report)
        assert report.measured_gain_us is not None and "measured gain" in str(report)
        (graph,) = report.graphs
        left = Counter({"linear": 2, "gelu": 1}) if not report.replaced else Counter()
        assert graph.left == left and graph.replaced_nodes == 3 * report.replaced["mlp"], str(report)
        backend.forget()
        torch._dynamo.reset()
        hurried = backend.explain_compile(layer, x, options={**options, "kernel_pytorch.budget_seconds": 0.0})
    reasons = {line.reason for graph in hurried.graphs for line in graph.lines}
    assert not hurried.replaced and reasons == {"no time was left to measure it"}
    backend.forget()


def test_generate_with_growing_and_static_caches() -> None:
    model = model_of("qwen3")
    inputs = inputs_of("qwen3")["input_ids"][:, :6]
    arguments = {"max_new_tokens": 5, "do_sample": False, "eos_token_id": None}
    expected = model.generate(inputs, **arguments)
    compiled = Compiled(model.forward)
    plain, model.forward = model.forward, compiled
    try:
        assert model.generate(inputs, **arguments).equal(expected)
    finally:
        model.forward = plain
    assert compiled.problems == [] and compiled.replaced["attention"] > 1
    config = transformers.CompileConfig(backend="kernel_pytorch", mode=None, options=TAKE_ALL, dynamic=False)
    config._compile_all_devices = True  # transformers compiles by itself on GPUs only
    found = model.generate(inputs, cache_implementation="static", compile_config=config, **arguments)
    assert hasattr(model, "_compiled_call") and found.equal(expected)


@pytest.mark.parametrize("family", ["qwen3", "gemma3"])
def test_static_caches_are_written_in_order(family: str) -> None:
    model = model_of(family)
    ids = inputs_of(family, length=9)["input_ids"]
    compiled = Compiled(model)

    def steps(call: Any) -> list[Any]:
        cache = transformers.StaticCache(config=model.config, max_cache_len=16)
        found = [model(input_ids=ids[:, :6], past_key_values=cache).logits]
        return found + [call(input_ids=ids[:, i : i + 1], past_key_values=cache).logits for i in range(6, 9)]

    with torch.no_grad():
        for found, expected in zip(steps(compiled), steps(model)):
            assert relative(found, expected) < 1e-5
    assert compiled.problems == [] and compiled.replaced["attention"] >= 1
    details = [line.detail for graph in compiled.report.graphs for line in graph.lines]
    assert family != "qwen3" or "key lengths" in details


def test_padding_stays_a_mask_beside_the_causal_flag() -> None:
    model, inputs = model_of("llama"), inputs_of("llama")
    mask = torch.ones_like(inputs["input_ids"])
    mask[0, :5] = 0
    with torch.no_grad():
        expected = model(**inputs, attention_mask=mask).logits
        compiled = Compiled(model)
        found = compiled(**inputs, attention_mask=mask).logits
    assert [line.detail for line in compiled.report.graphs[0].lines if line.pattern == "attention"] == [
        "causal + padding"
    ]
    kept = mask.bool()
    assert relative(found[kept], expected[kept]) < 1e-5


def test_dynamic_lengths_and_their_masks() -> None:
    model = model_of("gemma3")
    compiled = Compiled(model, dynamic=True)
    with torch.no_grad():
        for length in (12, 7, 19, 30):
            inputs = inputs_of("gemma3", length=length)
            expected = model(**inputs, use_cache=False).logits
            assert relative(compiled(**inputs, use_cache=False).logits, expected) < 1e-5
    assert compiled.problems == [] and len(compiled.report.graphs) == 1
    details = [line.detail for line in compiled.report.graphs[0].lines if line.pattern == "attention"]
    assert (
        details == ["causal + window", "causal"] and compiled.replaced["norm"] + 2 * compiled.replaced["norm_rope"] >= 9
    )


def test_a_graph_break_divides_the_work() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.first, self.second = nn.RMSNorm(16, eps=1e-6), nn.Linear(16, 16), nn.Linear(16, 16)

        def forward(self, x: Any) -> Any:
            x = functional.gelu(self.first(self.norm(x)))
            torch._dynamo.graph_break()
            return functional.silu(self.second(x)) * x

    block, x = Block(), torch.randn(2, 5, 16)
    compiled = Compiled(block)
    torch.testing.assert_close(compiled(x), block(x))
    assert len(compiled.report.graphs) == 2
    assert compiled.replaced == {"norm": 1, "linear_activation": 1, "gated_activation": 1}


@pytest.mark.parametrize("inside", [False, True])
def test_autocast_around_and_inside(inside: bool) -> None:
    model, inputs = model_of("qwen3"), inputs_of("qwen3")
    context = torch.autocast("cpu", torch.bfloat16)

    def run(**given: Any) -> Any:
        with context if inside else contextlib.nullcontext():
            return model(**given, use_cache=False).logits

    outside = contextlib.nullcontext() if inside else context
    with torch.no_grad():
        exact = model(**inputs, use_cache=False).logits
        with outside:
            plain = run(**inputs)
            compiled = Compiled(run, {"kernel_pytorch.inner": "aot_eager"})
            found = compiled(**inputs)
    assert compiled.problems == [] and compiled.replaced["attention"] == 1, str(compiled.report)
    assert found.dtype is plain.dtype
    assert relative(found, exact) < 1.5 * relative(plain, exact)


def test_bodies_of_gradient_checkpointing_are_rewritten() -> None:
    model, inputs = model_of("llama"), inputs_of("llama")
    model.train()
    expected = gradients(model, model(**inputs, use_cache=False).loss)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    compiled = Compiled(model, {"kernel_pytorch.inner": "aot_eager"})
    found = gradients(model, compiled(**inputs, use_cache=False).loss)
    assert compiled.problems == [] and compiled.replaced["attention"] == 1, str(compiled.report)
    for name, one in expected.items():
        assert relative(found[name], one) < 1e-4, name


def test_a_loss_alone_has_no_logits() -> None:
    model, inputs = model_of("llama"), inputs_of("llama")

    def loss(given: dict[str, Any]) -> Any:
        return model(**given, use_cache=False).loss

    expected = gradients(model, loss(inputs))
    compiled = Compiled(loss)
    found = gradients(model, compiled(inputs))
    assert compiled.replaced["linear_cross_entropy"] == 1, str(compiled.report)
    for name, one in expected.items():
        assert relative(found[name], one) < 1e-4, name


def test_a_pattern_that_raises_is_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    def raises(region: Any) -> Any:
        raise KeyError("a mistake")

    monkeypatch.setitem(patterns.PATTERNS, "mlp", raises)
    layer = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))
    x = torch.randn(4, 8)
    compiled = Compiled(layer)
    torch.testing.assert_close(compiled(x), layer(x))
    lines = compiled.report.graphs[0].lines
    assert any("a mistake" in line.reason for line in lines) and compiled.replaced == {"linear_activation": 1}


def test_a_wrong_candidate_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A way that computes something else is found by its values, and never taken."""
    find = patterns.PATTERNS["norm"]

    def wrong(region: Any) -> Any:
        for match in find(region):
            emit = match.candidates[0].emit
            match.candidates[0].name = "wrong"
            match.candidates[0].emit = lambda add, at, emit=emit: [
                add.call(torch.ops.aten.mul.Tensor, one, 1.05) for one in emit(add, at)
            ]
            yield match

    monkeypatch.setitem(patterns.PATTERNS, "norm", wrong)
    for kind in (torch.float32, torch.bfloat16):
        layer, x = nn.LayerNorm(64).to(kind), torch.randn(8, 64, dtype=kind)
        compiled = Compiled(layer)
        torch.testing.assert_close(compiled(x), layer(x))
        assert not compiled.replaced and "differs by" in compiled.report.graphs[0].lines[0].reason


def test_a_graph_that_the_inner_compiler_refuses_goes_there_unchanged() -> None:
    calls = []

    def inner(module: Any, inputs: Any) -> Any:
        calls.append(module)
        if len(calls) == 1:
            raise NotImplementedError("not this one")
        return module

    layer, x = nn.Sequential(nn.Linear(8, 8), nn.GELU()), torch.randn(4, 8)
    compiled = Compiled(layer, {"kernel_pytorch.inner": inner})
    torch.testing.assert_close(compiled(x), layer(x))
    assert len(calls) == 2 and "not this one" in compiled.problems[0]


def test_another_torch_is_refused_softly(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(torch, "__version__", "2.99.0")
    layer, x = nn.Sequential(nn.Linear(8, 8), nn.GELU()), torch.randn(4, 8)
    compiled = Compiled(layer)
    torch.testing.assert_close(compiled(x), layer(x))
    assert "torch 2.99.0" in compiled.problems[0] and "torch 2.99.0" in caplog.text


def test_weights_changed_later_are_seen() -> None:
    layer, x = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)), torch.randn(4, 8)
    compiled = Compiled(layer)
    compiled(x)
    assert compiled.replaced
    for parameter in layer.parameters():
        parameter.data.copy_(torch.randn_like(parameter))
    torch.testing.assert_close(compiled(x), layer(x))


def test_values_are_not_moved_across_a_write() -> None:
    def function(x: Any, weight: Any, y: Any) -> Any:
        row = functional.linear(x, weight)
        x.add_(1.0)
        y.copy_(x)
        return functional.gelu(row) + functional.silu(x) * y

    def arguments() -> tuple[Any, ...]:
        torch.manual_seed(3)
        return torch.randn(4, 8), torch.randn(8, 8), torch.empty(4, 8)

    compiled = Compiled(function)
    ours, plain = arguments(), arguments()
    torch.testing.assert_close(compiled(*ours), function(*plain))
    torch.testing.assert_close(ours, plain)
    reasons = {line.pattern: line.reason for line in compiled.report.graphs[0].lines}
    assert reasons["linear_activation"] == "a tensor is written in between"
    assert compiled.replaced == {"gated_activation": 1, "linear": 1}


@pytest.mark.parametrize("way", ["complex", "write"])
def test_gradients_pass_through_complex_numbers_and_writes(way: str) -> None:
    """What reads them further on must be an op with a gradient."""

    def function(x: Any, weight: Any) -> Any:
        if way == "complex":
            turned = torch.view_as_real(torch.view_as_complex(x.view(4, 8, 2)) * 1j).view(4, 16)
        else:
            turned = torch.zeros(5, 16)
            turned[:4].copy_(x)
        return functional.silu(functional.layer_norm(turned, (16,))) * weight

    x, weight = torch.randn(4, 16), torch.randn(16)
    expected = torch.autograd.functional.jacobian(lambda one: function(one, weight), x)
    compiled = Compiled(function)
    leaf = x.clone().requires_grad_()
    output = compiled(leaf, weight)
    found = torch.stack([torch.autograd.grad(one, leaf, retain_graph=True)[0] for one in output.flatten()])
    assert compiled.replaced["norm"] == 1, str(compiled.report)
    torch.testing.assert_close(found.view(expected.shape), expected, atol=1e-5, rtol=1e-4)


def test_cond_and_flex_attention_are_left_alone() -> None:
    from torch.nn.attention.flex_attention import flex_attention

    def branches(x: Any) -> Any:
        return torch.cond(x.sum() > 0, lambda y: functional.gelu(y), lambda y: y - 1, (x,))

    x = torch.randn(4, 8)
    compiled = Compiled(branches)
    torch.testing.assert_close(compiled(x), branches(x))
    assert "cond" in compiled.problems[0]
    q = torch.randn(1, 2, 8, 16)
    compiled = Compiled(lambda t: flex_attention(t, t, t))
    expected = functional.scaled_dot_product_attention(q, q, q)
    torch.testing.assert_close(compiled(q), expected, atol=1e-5, rtol=1e-5)
    assert "flex_attention" in compiled.problems[0]


def test_a_number_that_changes_is_traced_anew_without_a_word() -> None:
    """Dynamo asks for that by an exception of the inner compiler, which is no refusal of ours."""

    def scaled(x: torch.Tensor, scale: float) -> torch.Tensor:
        return functional.layer_norm(x * scale, (16,)) * scale

    found = Compiled(scaled, {**TAKE_ALL, "kernel_pytorch.inner": "aot_eager"})
    for scale in (0.5, 0.7, 0.9):
        x = torch.randn(4, 16)
        torch.testing.assert_close(found(x, scale), scaled(x, scale))
    assert not any(one.problem for one in found.report.graphs) and found.report.graphs[-1].replaced
