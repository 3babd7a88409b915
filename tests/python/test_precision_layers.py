"""convert_model_to_fp8 over every layer of the package that has a product: what is converted, and the way back."""

from __future__ import annotations

import copy
import inspect
import io
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from kernel_pytorch.precision import FP8Config, FP8LinearLayer
from torch import Tensor, nn

from kernel_pytorch import attention, core, precision
from kernel_pytorch import precision as package

D = 32
SIZES: dict[str, Callable[[], nn.Module]] = {
    "OptimizedLinear": lambda: core.OptimizedLinear(D, 48),
    "FusedLinearActivation": lambda: core.FusedLinearActivation(D, 48, "gelu"),
    "AttentionLayer": lambda: core.AttentionLayer(D, 4, dropout=0.0),
    "OptimizedMultiHeadAttention": lambda: core.OptimizedMultiHeadAttention(D, 4, dropout=0.0, bias=False),
    "CompilerOptimizedMultiHeadAttention": lambda: core.CompilerOptimizedMultiHeadAttention(D, 4),
    "FusedSwiGLU": lambda: core.FusedSwiGLU(D, 64),
    "OptimizedMLP": lambda: core.OptimizedMLP(D, 64, bias=True),
    "OptimizedTransformerBlock": lambda: core.OptimizedTransformerBlock(D, 4, dropout=0.0),
    "FlashAttention3": lambda: attention.create_attention(D, 4),
    "FlexAttentionLayer": lambda: attention.create_flex_attention(D, 4, pattern="causal"),
    "RingAttentionLayer": lambda: attention.create_ring_attention(D, 4),
    # Dense: a rounded score may choose another block, which is no error of a product.
    "DynamicSparseAttention": lambda: attention.create_sparse_attention(D, 4, sparsity_ratio=0.0),
}


@pytest.fixture(autouse=True)
def seed() -> Iterator[None]:
    torch.manual_seed(0)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def relative(actual: Tensor, expected: Tensor) -> float:
    return float((actual.detach() - expected.detach()).norm() / expected.detach().norm())


def loaded(value: Any) -> Any:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


def test_no_layer_of_core_that_multiplies_is_missing_here() -> None:
    multiply = {
        name
        for name, value in vars(core).items()
        if inspect.isclass(value)
        and issubclass(value, nn.Module)
        and ("product(" in inspect.getsource(inspect.getmodule(value)) and "Linear" in inspect.getsource(value))
    }
    assert multiply - {"FusedLayerNormActivation"} <= set(SIZES), multiply - set(SIZES)


@pytest.mark.parametrize("name", SIZES)
def test_every_layer_is_converted_and_restored(name: str) -> None:
    layer = SIZES[name]()
    plain = copy.deepcopy(layer)
    x = torch.randn(2, 64, D)
    keys, parameters = list(layer.state_dict()), [id(p) for p in layer.parameters()]
    types = [type(module) for module in layer.modules()]
    model = precision.convert_model_to_fp8(layer, FP8Config(scaling_strategy="delayed"))
    assert all(plan.converts for plan in model.fp8_plan) and model.fp8_plan
    matrices = sum(p.numel() for p in plain.parameters() if p.dim() == 2)
    assert sum(one.weight.numel() for one in precision.fp8_layers(model).values()) == matrices
    assert list(model.state_dict()) == keys and [id(p) for p in model.parameters()] == parameters
    expected = plain(x)
    for _ in range(2):  # the second by the scales of the first
        model.zero_grad()
        output = model(x)
        output.square().sum().backward()
        assert precision.update_fp8_scales(model) == len(precision.fp8_layers(model))
    assert 1e-4 < relative(output, expected) < 0.2, relative(output, expected)
    expected.square().sum().backward()
    assert all(p.grad is not None for p in model.parameters() if p.dim() == 2)
    for converted, wanted in zip(model.parameters(), plain.parameters()):
        assert wanted.grad is None or relative(converted.grad, wanted.grad) < 0.4
    again = copy.deepcopy(model)  # scales are no part of a state_dict, but of a copied and saved model
    if name in vars(core):
        again = loaded(again)
    assert torch.equal(again.eval()(x), model.eval()(x)) and repr(again) == repr(model)
    plain.load_state_dict(model.state_dict())
    model.load_state_dict(plain.state_dict())
    restored = precision.restore_from_fp8(model.train())
    assert [type(module) for module in restored.modules()] == types
    assert list(restored.state_dict()) == keys and [id(p) for p in restored.parameters()] == parameters
    assert torch.equal(restored(x), plain(x)) and not precision.fp8_layers(restored)
    twice = precision.convert_model_to_fp8(restored)
    assert precision.fp8_layers(twice)


def test_cross_attention_projects_by_rows_of_one_weight() -> None:
    layer = core.AttentionLayer(D, 4, dropout=0.0)
    plain = copy.deepcopy(layer)
    precision.convert_model_to_fp8(layer, FP8Config(scaling_strategy="current"))
    query, key, value = torch.randn(3, 2, 9, D).unbind(0)
    for arguments in ((query,), (query, key), (query, key, value)):
        assert 1e-4 < relative(layer(*arguments), plain(*arguments)) < 0.2
    report = precision.fp8_numerics_report(layer, lambda: layer(query, key, value).square().sum())
    assert list(report) == ["out_proj", "in_proj"]
    assert all(set(entry.tensors) == {"input", "weight", "gradient"} for entry in report.values())
    assert all(0 < entry.output_error < 0.1 for entry in report.values())
    assert "(in_proj): FP8PackedProjection(in_features=32, out_features=96" in repr(layer)


def test_activation_layers_report_their_product() -> None:
    layer = precision.convert_model_to_fp8(core.FusedLinearActivation(D, 48, "relu"), FP8Config())
    residual = torch.randn(4, 48)
    x = torch.randn(4, D)
    plain = torch.relu(nn.functional.linear(x, layer.weight, layer.bias)) + residual
    assert relative(layer(x, residual), plain) < 0.1
    report = precision.fp8_numerics_report(layer, lambda: layer(x).square().sum())
    assert report[""].output_error < 0.1 and "activation='relu'" in repr(layer)


def test_hooks_and_parametrized_layers_survive() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.utils.parametrizations.weight_norm(nn.Linear(8, 8)), nn.Linear(0, 4))
    calls: list[str] = []
    handle = model[0].register_forward_hook(lambda *_: calls.append("before"))
    precision.convert_model_to_fp8(model)
    reasons = {plan.name: plan.reason for plan in model.fp8_plan if not plan.converts}
    assert "computed from other parameters" in reasons["1"] and "nothing is multiplied" in reasons["2"]
    other = model[0].register_forward_hook(lambda *_: calls.append("after"))
    model[:2](torch.randn(2, 8)).sum().backward()
    assert calls == ["before", "after"]
    handle.remove()
    precision.restore_from_fp8(model)
    model[0](torch.randn(2, 8))
    assert calls == ["before", "after", "after"]
    other.remove()
    model[0](torch.randn(2, 8))
    assert len(calls) == 3


@pytest.mark.parametrize("convert", ["profitable", "all"])
def test_what_does_not_run_is_not_converted(convert: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan over capabilities is C++ (float8_plan_test.cpp); this is what conversion makes of its answers."""
    answers = iter(
        [
            {"runs": False, "pays": False, "bf16_us": 0.0, "float8_us": 0.0, "reason": "needs 8.9"},
            {"runs": True, "pays": False, "bf16_us": 0.0, "float8_us": 0.0, "reason": "decoded"},
            {"runs": True, "pays": True, "bf16_us": 2.0, "float8_us": 1.0, "reason": "faster"},
        ]
    )
    monkeypatch.setattr(package.convert._library, "call", lambda *_, **__: next(answers))
    monkeypatch.setattr(package.convert, "_planned_device", lambda _: torch.device("cuda", 0))
    plan = precision.plan_fp8(nn.Sequential(*(nn.Linear(8, 8) for _ in range(3))), FP8Config(convert=convert))
    assert [entry.converts for entry in plan] == [False, convert == "all", True]
    assert [entry.reason for entry in plan] == ["needs 8.9", "decoded", "faster"]


def test_weights_without_memory_and_elsewhere() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(8, 8))
    assert precision.plan_fp8(model)[0].reason  # of the device that it will go to
    assert package.convert._planned_device(torch.device("meta")).type in ("cpu", "cuda")
    layer = precision.convert_model_to_fp8(model, FP8Config(convert="all"))[0]
    assert isinstance(layer, FP8LinearLayer) and layer.fp8_scale.is_meta
