"""The examples of the API as users write them, each with what it must have done: values, not shapes alone."""

from __future__ import annotations

import copy

import pytest
import torch
from kernel_pytorch.attention import (
    AttentionConfig,
    DynamicSparseAttention,
    FlashAttention3,
    RingAttentionLayer,
    SparsePattern,
    create_attention,
    create_ring_attention,
    create_sparse_attention,
)
from kernel_pytorch.core import AttentionLayer, FusedGELU, OptimizedLinear
from kernel_pytorch.hardware import HardwareAbstractionLayer, detect_available_devices
from kernel_pytorch.precision import (
    FP8Config,
    FP8Format,
    FP8TrainingEngine,
    convert_model_to_fp8,
    create_fp8_trainer,
)
from torch import Tensor, nn


@pytest.fixture(autouse=True)
def same_numbers() -> None:
    torch.manual_seed(0)


@pytest.fixture
def model() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 32))


@pytest.fixture
def batch() -> tuple[Tensor, Tensor]:
    return torch.randn(16, 64), torch.randint(32, (16,))


def dense(layer: nn.Module, x: Tensor, *, causal: bool, keep: Tensor | None = None) -> Tensor:
    """What a layer with q_proj, k_proj, v_proj and out_proj computes, by torch."""
    heads = layer.config.num_heads

    def split(projection: nn.Module) -> Tensor:
        return projection(x).unflatten(-1, (heads, -1)).transpose(1, 2)

    query, key, value = split(layer.q_proj), split(layer.k_proj), split(layer.v_proj)
    mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool)
    mask = (mask.tril() if causal else mask)[None, None]
    mask = mask if keep is None else mask & keep[:, None, None]
    mixed = nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)
    return layer.out_proj(mixed.transpose(1, 2).flatten(2))


def test_ring_attention_is_attention() -> None:
    attention = create_ring_attention(d_model=512, num_heads=8, max_sequence_length=1_000_000)
    assert isinstance(attention, RingAttentionLayer)
    hidden_states = torch.randn(1, 600, 512)
    output = attention(hidden_states)
    torch.testing.assert_close(
        output, dense(attention, hidden_states, causal=attention.config.causal), rtol=1e-4, atol=1e-5
    )
    attention_mask = torch.ones(1, 600, dtype=torch.bool)
    attention_mask[:, 500:] = False
    masked = attention(hidden_states, attention_mask=attention_mask)
    expected = dense(attention, hidden_states, causal=attention.config.causal, keep=attention_mask)
    torch.testing.assert_close(masked[:, :500], expected[:, :500], rtol=1e-4, atol=1e-5)
    positional = create_ring_attention(768, 12, 1_000_000, torch.device("cpu"))
    assert positional.q_proj.weight.shape == (768, 768)
    with pytest.raises(ValueError, match="1000001"):
        attention(torch.empty(1, 1_000_001, 512, device="meta"))


def test_sparse_attention_leaves_out_what_it_says() -> None:
    attention = create_sparse_attention(d_model=512, num_heads=8, sparsity_ratio=0.9)
    assert isinstance(attention, DynamicSparseAttention)
    x = torch.randn(1, 512, 512)
    output = attention(x)
    assert output.shape == x.shape and torch.isfinite(output).all()
    nothing_left_out = create_sparse_attention(d_model=512, num_heads=8, sparsity_ratio=0.0)
    nothing_left_out.load_state_dict(attention.state_dict())
    whole = dense(nothing_left_out, x, causal=False)
    torch.testing.assert_close(nothing_left_out(x), whole, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(output, whole, rtol=1e-3, atol=1e-4), "nothing was left out"


@pytest.mark.parametrize("pattern", list(SparsePattern), ids=lambda pattern: pattern.value)
def test_every_sparse_pattern_computes_and_differentiates(pattern: SparsePattern) -> None:
    assert SparsePattern[pattern.name].value == pattern.name.lower()
    attention = create_sparse_attention(64, 4, 0.5, pattern)
    x = torch.randn(1, 256, 64, requires_grad=True)
    attention(x).square().mean().backward()
    assert x.grad is not None and x.grad.abs().sum(-1).min() > 0, "a token has no gradient"


def test_sparse_patterns_are_the_six() -> None:
    names = {"random", "block_sparse", "strided", "local_global", "dynamic_threshold", "learned"}
    assert {pattern.value for pattern in SparsePattern} == names


def test_fp8_training_lowers_the_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> None:
    inputs, targets = batch
    trainer = create_fp8_trainer(model, forward_format=FP8Format.E4M3, backward_format=FP8Format.E5M2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    with trainer:
        for _ in range(20):
            loss = trainer.training_step(inputs, targets)
            success = trainer.optimizer_step(optimizer)
            assert success is True
            losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0], losses


def test_the_engine_counts_its_steps(model: nn.Module, batch: tuple[Tensor, Tensor]) -> None:
    inputs, targets = batch
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    with FP8TrainingEngine(model, FP8Config()) as trainer:
        for _ in range(3):
            trainer.training_step(inputs, targets)
            success = trainer.optimizer_step(optimizer)
        stats = trainer.get_training_statistics()
    assert success and stats["steps"] == 3 and stats["overflows"] == 0
    assert (FP8Format.E4M3.value, FP8Format.E5M2.value) == ("e4m3", "e5m2")


def test_setting_up_fp8_training_by_name(model: nn.Module) -> None:
    trainer = create_fp8_trainer(model)
    trainer.setup_fp8_training()
    assert any(type(module).__name__ == "FP8LinearLayer" for module in model.modules())


def test_converted_models_compute_nearly_the_same(model: nn.Module, batch: tuple[Tensor, Tensor]) -> None:
    before = copy.deepcopy(model)
    copied = convert_model_to_fp8(model, None, False)
    assert copied is not model and type(model[0]) is nn.Linear
    fp8_model = convert_model_to_fp8(model)
    assert [type(layer).__name__ for layer in fp8_model] == ["FP8LinearLayer", "GELU", "FP8LinearLayer"]
    assert fp8_model is model
    want, got = before(batch[0]), fp8_model(batch[0])
    error = float((got - want).norm() / want.norm())
    assert 1e-4 < error < 0.1, "FP8 rounds, and not by more than its formats do"


def test_buckets_change_no_value(model: nn.Module) -> None:
    from kernel_pytorch.optimization_patterns import (
        BucketingStrategy,
        DynamicShapeBucketing,
        DynamicShapeModule,
        create_optimal_bucketing_system,
    )

    variable_shapes = [(2, 5, 64), (2, 9, 64), (4, 17, 64)]
    sample_inputs = [torch.randn(b, s, d) for b, s, d in variable_shapes]
    bucketing = create_optimal_bucketing_system(sample_inputs, strategy=BucketingStrategy.HARDWARE_AWARE)
    assert isinstance(bucketing, DynamicShapeBucketing)
    optimized_model = DynamicShapeModule(model, bucketing)
    for shape in [*variable_shapes, (3, 7, 64)]:
        variable_input = torch.randn(shape)
        output = optimized_model(variable_input)
        assert output.shape == (*shape[:2], 32)
        torch.testing.assert_close(output, model(variable_input), rtol=1e-5, atol=1e-5)


def test_hardware_layer(model: nn.Module, batch: tuple[Tensor, Tensor]) -> None:
    hal = HardwareAbstractionLayer()
    expected = model(batch[0])
    optimized_model = hal.optimize_for_hardware(model)
    got = optimized_model(batch[0].to(next(optimized_model.parameters()).device)).cpu()
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
    batch_size = hal.get_optimal_batch_size(model)
    assert batch_size >= 1 and batch_size & (batch_size - 1) == 0
    one, many = (hal.estimate_memory_usage(model, batch_size=size) for size in (1, 1024))
    weights = sum(parameter.nbytes for parameter in model.parameters()) / 1e9
    assert weights < one < many
    devices = detect_available_devices()
    assert devices["cpu"] == [torch.device("cpu")]
    assert all(device.type == "cuda" for device in devices["cuda"])
    assert len(devices["cuda"]) == torch.cuda.device_count()


def test_core_layers() -> None:
    layer = OptimizedLinear(64, 32, bias=True, optimization_level="balanced")
    x = torch.randn(4, 64)
    torch.testing.assert_close(layer(x), nn.functional.linear(x, layer.weight, layer.bias), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(FusedGELU()(x), nn.functional.gelu(x), rtol=1e-5, atol=1e-6)
    attention = AttentionLayer(64, 4, dropout=0.1, bias=True).eval()
    other = nn.MultiheadAttention(64, 4, batch_first=True).eval()
    attention.load_state_dict(other.state_dict())
    sequence = torch.randn(2, 8, 64)
    torch.testing.assert_close(attention(sequence), other(sequence, sequence, sequence)[0], rtol=1e-4, atol=1e-5)


def test_one_factory_for_attention() -> None:
    layer = create_attention(AttentionConfig(64, 4))
    assert isinstance(layer, FlashAttention3)
    x = torch.randn(2, 24, 64)
    torch.testing.assert_close(layer(x), dense(layer, x, causal=layer.config.causal), rtol=1e-4, atol=1e-5)


def test_flex_attention_by_pattern() -> None:
    from kernel_pytorch.optimizations.next_gen import create_advanced_flex_attention

    attention = create_advanced_flex_attention(embed_dim=512, num_heads=8, pattern="causal")
    x = torch.randn(1, 64, 512)
    output = attention(x)
    later = x.clone()
    later[:, 40:] = 7
    changed = attention(later)
    torch.testing.assert_close(changed[:, :40], output[:, :40], rtol=1e-5, atol=1e-6)
    assert not torch.allclose(changed[:, 40:], output[:, 40:])


def test_segments_of_a_long_sequence() -> None:
    from kernel_pytorch.advanced_memory import LongSequenceOptimizer, SegmentedAttentionMemory

    segmented_attention = SegmentedAttentionMemory(embed_dim=768, num_heads=12, segment_length=256, memory_length=128)
    sequence_optimizer = LongSequenceOptimizer(max_segment_length=256)
    sequence = torch.randn(1, 600, 768)
    segments = sequence_optimizer.segment_sequence(sequence)
    assert torch.equal(torch.cat(list(segments), 1), sequence)
    assert [segment.shape[1] for segment in segments] == [256, 256, 88]
    with torch.no_grad():
        outputs = [segmented_attention(segment) for segment in segments]
        fresh = SegmentedAttentionMemory(embed_dim=768, num_heads=12, segment_length=256, memory_length=128)
        fresh.load_state_dict(segmented_attention.state_dict())
        torch.testing.assert_close(fresh(segments[0]), outputs[0], rtol=1e-4, atol=1e-5)
        forgetful = SegmentedAttentionMemory(embed_dim=768, num_heads=12, segment_length=256, memory_length=128)
        with pytest.raises(ValueError, match="in order"):
            forgetful(segments[1])
    assert [output.shape[1] for output in outputs] == [256, 256, 88]


def test_checkpointing_and_offload_of_activations() -> None:
    from kernel_pytorch.advanced_memory import (
        AdaptiveCheckpointing,
        DynamicActivationOffloading,
        SelectiveGradientCheckpointing,
    )

    selective_checkpoint = SelectiveGradientCheckpointing(importance_threshold=0.7)
    selective_checkpoint.update_importance("transformer.layers.23", 0.9)
    assert not selective_checkpoint.should_checkpoint("transformer.layers.23", 0.9)
    assert selective_checkpoint.should_checkpoint("transformer.layers.0", 0.9)
    model, input_data = torch.nn.Linear(8, 8), torch.randn(2, 8, requires_grad=True)
    assert torch.equal(AdaptiveCheckpointing().forward(model, input_data), model(input_data))
    offloader = DynamicActivationOffloading(offload_device="cpu")
    cpu_activations = offloader.offload_activations(input_data)
    assert torch.equal(offloader.reload_activations(cpu_activations, input_data.device), input_data)


def test_validation_and_timing_of_layers() -> None:
    from kernel_pytorch.utils.compiler_optimization_assistant import benchmark_attention_performance
    from kernel_pytorch.utils.validation_framework import ComponentValidator

    validator = ComponentValidator(device=torch.device("cpu"))
    attention_layer, linear_layer = AttentionLayer(64, 4), OptimizedLinear(64, 32)
    for results in (
        validator.validate_attention_component(attention_layer, 64, 4),
        validator.validate_linear_component(linear_layer, 64, 32),
    ):
        assert len(results) >= 3 and all(result.passed for result in results), results
    broken = OptimizedLinear(64, 32)
    broken.forward = lambda x: nn.functional.linear(x, broken.weight, broken.bias) * 1.5  # type: ignore[method-assign]
    assert not all(result.passed for result in validator.validate_linear_component(broken, 64, 32))
    results = benchmark_attention_performance(model=attention_layer, input_shape=(2, 32, 64), num_trials=20)
    assert 0 < results["avg_latency"] < 1000  # milliseconds


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("devices", [None, [torch.device("cpu")] * 4], ids=["no devices", "a list of devices"])
def test_context_parallel_in_one_process_computes_the_whole(devices: list[torch.device] | None) -> None:
    from kernel_pytorch.attention import ContextParallelAttention, create_context_parallel_attention

    attention = create_context_parallel_attention(512, 8, 4, devices)
    assert isinstance(attention, ContextParallelAttention)
    x = torch.randn(1, 64, 512)
    torch.testing.assert_close(attention(x), dense(attention, x, causal=attention.config.causal), rtol=1e-4, atol=1e-5)


def test_names_that_are_imported_together() -> None:
    from kernel_pytorch.attention import AttentionPatterns, FP8AttentionConfig, create_unified_attention_fusion

    assert isinstance(AttentionPatterns, type) and isinstance(FP8AttentionConfig, type)
    assert callable(create_unified_attention_fusion)
