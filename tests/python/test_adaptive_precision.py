"""Adaptive precision: bytes, plans within budgets, strategies, GPTQ, modes, the seeds' calls."""

from __future__ import annotations

import copy

import pytest
import torch
from kernel_pytorch.optimizations.next_gen import FP4Quantizer
from kernel_pytorch.precision import (
    AdaptivePrecisionAllocator,
    AllocationStrategy,
    PrecisionConfig,
    PrecisionFormat,
    QuantizationMode,
    QuantizedLinear,
    RoundedLinear,
    UltraPrecisionModule,
    WeightFormat,
    analyze_precision_opportunities,
    clipped_quantize,
    create_ultra_precision_module,
    gptq_quantize,
)
from kernel_pytorch.precision.allocation import MENU
from torch import Tensor, nn

from kernel_pytorch import functional as F


def network(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """Layers of different sensitivity: outliers in the first, the last one scaled down."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 128), nn.GELU(), nn.Linear(128, 32))
    with torch.no_grad():
        model[0].weight[:, 0] *= 30
        model[4].weight *= 0.1
    return model.to(dtype)


def samples(count: int = 2, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(24, 64, generator=generator).to(dtype) for _ in range(count)]


@pytest.mark.parametrize("choice", MENU, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bytes_are_those_of_the_codes(choice, dtype) -> None:
    weight = torch.randn(6, 70).to(dtype)
    expected = weight.nbytes
    if choice.format is not None:
        made = F.quantize_weight(weight, choice.format, group=choice.group, asymmetric=choice.asymmetric)
        expected = made.nbytes
    assert choice.nbytes(weight) == expected


@pytest.mark.parametrize("strategy", AllocationStrategy)
def test_plans_keep_the_budget_and_spend_it_well(strategy) -> None:
    model, data = network(), samples()
    config = PrecisionConfig(base_precision=None, allocation_strategy=strategy)
    allocator = AdaptivePrecisionAllocator(config)
    rows = allocator.analyze(model, data if strategy.needs_data else None)
    assert [row.name for row in rows] == ["0", "2", "4"]
    errors = []
    least = sum(min(row.nbytes) for row in rows)
    for budget in (least, least * 6 // 5, least * 2, sum(row.base_bytes for row in rows)):
        plan = allocator.choose(rows, budget)
        assert plan.fits and plan.is_exact and plan.nbytes <= budget
        errors.append(plan.error)
    assert errors == sorted(errors, reverse=True) and errors[-1] == 0.0
    assert not allocator.choose(rows, 10).fits
    if strategy.needs_data:
        with pytest.raises(ValueError, match="calibration data"):
            allocator.analyze(model)


def test_measured_choices_beat_one_format_at_the_same_bytes() -> None:
    model, data = network(), samples()
    uniform = [WeightFormat("nvfp4")]
    same = PrecisionConfig(quantization_mode=QuantizationMode.STATIC, formats=uniform, target_memory_reduction=0)
    one = create_ultra_precision_module(model, same)
    budget = one.get_precision_stats().nbytes
    config = PrecisionConfig(
        allocation_strategy=AllocationStrategy.LAYER_ADAPTIVE, quantization_mode=QuantizationMode.STATIC,
        budget_bytes=budget,
    )  # fmt: skip
    chosen = create_ultra_precision_module(model, config, calibration=data)
    assert chosen.get_precision_stats().nbytes <= budget
    other = torch.randn(200, 64)
    errors = [float((made(other) - model(other)).square().mean().detach()) for made in (chosen, one)]
    assert errors[0] < 0.7 * errors[1]


@pytest.mark.parametrize(
    "choice", [WeightFormat("int4", 32), WeightFormat("int4", 64, True), WeightFormat("nvfp4"), WeightFormat("mxfp4"),
               WeightFormat("int8", 128)], ids=str,
)  # fmt: skip
def test_gptq_changes_outputs_less(choice) -> None:
    torch.manual_seed(0)
    weight = torch.randn(16, 192)
    x = torch.randn(400, 192) @ (torch.eye(192) + 0.3 * torch.randn(192, 192))  # correlated, as inputs are
    x[:, 7] = 0
    options = {"group": choice.group, "asymmetric": choice.asymmetric}
    nearest = F.quantize_weight(weight, choice.format, **options)
    better = gptq_quantize(weight, x.t() @ x, choice.format, **options)
    assert torch.equal(better.scales.float(), nearest.scales.float())
    errors = [float((x @ (made.dequantize(torch.float32) - weight).t()).norm()) for made in (better, nearest)]
    assert errors[0] < 0.8 * errors[1]
    clipped = clipped_quantize(weight, choice.format, importance=x.square().sum(0), **options)
    both = gptq_quantize(weight, x.t() @ x, choice.format, ranges=clipped, **options)
    assert torch.equal(both.scales.float(), clipped.scales.float())
    errors += [float((x @ (made.dequantize(torch.float32) - weight).t()).norm()) for made in (clipped, both)]
    assert errors[3] < 1.05 * errors[0] and errors[2] < 1.02 * errors[1]
    # With uncorrelated inputs there is nothing to make up for.
    alone = gptq_quantize(weight, torch.eye(192), choice.format, damping=0.0, **options)
    assert (alone.codes == nearest.codes).float().mean() > 0.999


@pytest.mark.parametrize("choice", [one for one in MENU if one.format is not None], ids=str)
def test_ranges_of_groups_have_no_larger_error(choice) -> None:
    torch.manual_seed(0)
    weight = torch.randn(9, 200)
    importance = torch.rand(200) ** 4
    options = {"group": choice.group, "asymmetric": choice.asymmetric}
    made = [F.quantize_weight(weight, choice.format, **options)]
    made += [clipped_quantize(weight, choice.format, importance=one, **options) for one in (None, importance)]
    errors = [(one.dequantize(torch.float32) - weight).square() for one in made]
    assert errors[1].sum() <= errors[0].sum() and (errors[2] * importance).sum() <= (errors[0] * importance).sum()
    if choice.format == "int4":
        assert errors[1].sum() < 0.97 * errors[0].sum()


def test_the_first_forward_is_the_calibration_of_the_dynamic_mode() -> None:
    model, data = network(torch.bfloat16), samples(1, torch.bfloat16)
    made = UltraPrecisionModule(
        copy.deepcopy(model),
        PrecisionConfig(allocation_strategy=AllocationStrategy.ACTIVATION_AWARE, target_memory_reduction=0.7),
    )
    assert made.current_allocation == {}
    with pytest.raises(RuntimeError, match="first forward"):
        made.get_precision_stats()
    output = made(data[0])
    stats = made.get_precision_stats()
    assert 0.7 <= stats.memory_savings_ratio < 0.75 and stats.precision_diversity >= 1
    assert any(isinstance(layer, QuantizedLinear) for layer in made.modules())
    expected = model(data[0]).detach()
    assert float((output.detach() - expected).norm() / expected.norm()) < 0.2
    assert "bits on average" in str(made.allocation) and len(made.get_precision_analysis()) == 3


@pytest.mark.parametrize("mode", [QuantizationMode.TRAINING, QuantizationMode.HYBRID])
def test_training_modes_round_in_each_forward_and_choose_again(mode) -> None:
    config = PrecisionConfig(
        allocation_strategy=AllocationStrategy.GRADIENT_WEIGHTED, quantization_mode=mode, update_frequency=2,
        target_memory_reduction=0.7,
    )  # fmt: skip
    made = create_ultra_precision_module(network(), config, calibration=samples())
    x = samples(1)[0]
    optimizer = torch.optim.SGD(made.parameters(), lr=0.05)
    before = float(made(x).square().mean().detach())
    for _ in range(6):
        loss = made(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert all(parameter.grad is not None for parameter in made.parameters())
    layers = [layer for layer in made.modules() if isinstance(layer, RoundedLinear)]
    assert layers and float(made(x).square().mean().detach()) < before
    trained = made(x)
    made.eval()
    torch.testing.assert_close(made(x), trained, rtol=1e-4, atol=1e-5)
    for layer in layers:
        expected = nn.functional.linear(
            torch.eye(layer.in_features), layer.quantized().dequantize(torch.float32), layer.bias
        )
        torch.testing.assert_close(layer(torch.eye(layer.in_features)), expected)


def test_low_entropy_keeps_eight_bits() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(128, 64), nn.Linear(64, 64))
    with torch.no_grad():
        model[0].weight[:, ::128] = 50.0  # outliers set every scale
    made = create_ultra_precision_module(
        model, PrecisionConfig(quantization_mode=QuantizationMode.STATIC, target_memory_reduction=0.5)
    )
    bits = {one.name: one.bits for one in made.allocation.layers}
    assert bits["0"] >= 8 and bits["1"] < 8


def test_seed_calls() -> None:
    model = network()
    config = PrecisionConfig(
        allocation_strategy=AllocationStrategy.ENTROPY_BASED, target_memory_reduction=0.4, entropy_threshold=1.5
    )
    made = create_ultra_precision_module(model=model, config=config)
    made(samples(1)[0])
    assert made.get_precision_stats().memory_savings_ratio >= 0.4
    assert isinstance(model[0], nn.Linear)
    found = analyze_precision_opportunities(model=model, sample_input=samples(1)[0])
    assert found["potential_savings"] > 0 and len(found["recommendations"]) >= 1 and len(found["layers"]) == 3
    upstream = create_ultra_precision_module(
        nn.Linear(64, 64), allocation_strategy=AllocationStrategy.ENTROPY_BASED, target_memory_reduction=0.7,
        precision_formats=[PrecisionFormat.FP4, PrecisionFormat.INT8, PrecisionFormat.FP16],
    )  # fmt: skip
    upstream(torch.randn(2, 64))
    assert isinstance(upstream.base_module, QuantizedLinear) and upstream.base_module.format == "nvfp4"


@pytest.mark.parametrize("name", ["fp4", "nvfp4", "mxfp4", PrecisionFormat.FP4])
def test_fp4_quantizer(name) -> None:
    quantizer = FP4Quantizer(format_type=name)
    tensor = torch.randn(3, 4, 64, requires_grad=True)
    values = quantizer(tensor)
    assert torch.equal(values, quantizer.dequantize(quantizer.quantize(tensor), torch.float32).view(3, 4, 64))
    values.sum().backward()
    assert torch.equal(tensor.grad, torch.ones_like(tensor))
    model = network()
    made = quantizer.quantize_module(model, skip=["4"])
    assert isinstance(made[0], QuantizedLinear) and type(made[4]) is nn.Linear and isinstance(model[0], nn.Linear)
    x = samples(1)[0]
    assert float((made(x) - model(x)).detach().norm() / model(x).detach().norm()) < 0.25


def test_bad_configurations_are_named() -> None:
    for options, words in (
        ({"target_memory_reduction": 1.0}, "target_memory_reduction"),
        ({"gradient_weight": 0.9}, "at most 1"),
        ({"rounding": "up"}, "gptq"),
        ({"base_precision": PrecisionFormat.INT4}, "base_precision"),
    ):
        with pytest.raises(ValueError, match=words):
            PrecisionConfig(**options)
    with pytest.raises(ValueError, match="format_type"):
        FP4Quantizer("fp3")
    with pytest.raises(ValueError, match="format"):
        WeightFormat("int9")
    with pytest.raises(ValueError, match="gptq"):
        create_ultra_precision_module(
            network(), PrecisionConfig(rounding="gptq", quantization_mode=QuantizationMode.STATIC)
        )
