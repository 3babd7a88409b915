"""The validator finds what is wrong with a layer, and nothing wrong with a right one; timings are medians."""

from __future__ import annotations

import time

import pytest

torch = pytest.importorskip("torch")

from kernel_pytorch.utils.compiler_optimization_assistant import benchmark_attention_performance  # noqa: E402
from kernel_pytorch.utils.profiling import (  # noqa: E402
    Comparison,
    KernelProfiler,
    Timing,
    compare_functions,
    profile_model_inference,
    quick_benchmark,
)
from kernel_pytorch.utils.validation_framework import ComponentValidator  # noqa: E402

from kernel_pytorch import core  # noqa: E402

nn = torch.nn


def failures(results):
    return {result.test_name: result.error_message for result in results if not result.passed}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("bias", [True, False])
def test_right_layers_pass(dtype, bias):
    validator = ComponentValidator(device=torch.device("cpu"))
    attention = core.AttentionLayer(32, 4, dropout=0.1, bias=bias).to(dtype)
    results = validator.validate_attention_component(attention, 32, 4)
    assert not failures(results), [str(result) for result in results]
    names = [result.test_name for result in results]
    assert {"state_dict", "output", "gradient of x", "gradient of in_proj_weight", "cross: gradient of key"} <= {*names}
    errors = [result.metrics["error"] for result in results if result.test_name == "output"]
    assert errors[0] < 0.06 and (errors[0] > 0 or dtype is torch.float64)
    assert attention.training, "the caller's layer is not touched"
    linear = core.OptimizedLinear(12, 20, bias).to(dtype)
    assert not failures(validator.validate_linear_component(linear, 12, 20))
    assert not failures(validator.validate_linear_component(nn.Linear(12, 20, bias, dtype=dtype), 12, 20))


def package_layers():
    from kernel_pytorch.advanced_memory import SegmentedAttentionMemory

    from kernel_pytorch import attention as A

    mods = A.FlexAttentionScoreMods
    yield from (core.OptimizedMultiHeadAttention(32, 4), core.CompilerOptimizedMultiHeadAttention(32, 4))
    for pattern in ("full", "causal", "alibi", "soft_cap"):
        yield A.create_attention(32, 4, pattern=pattern, kv_heads=2, bias=True)
    for options in ({"causal": True}, {"prefix_length": 4, "pattern": "prefix_lm"}, {"sliding_window_size": 3}):
        yield A.create_attention(32, 4, **options)
    yield A.create_flex_attention(32, 4, score_mod=mods.alibi(4), mask_mod=A.FlexAttentionMaskMods.local(5))
    table = nn.Parameter(torch.randn(4, 7))
    yield A.create_flex_attention(32, 4, score_mod=mods.relative_position_bias(table))
    for pattern in A.SparsePattern:
        yield A.create_sparse_attention(32, 4, 0.5, pattern, causal=pattern.value != "random", block_size=4)
    yield A.create_sparse_attention(32, 4, 0.5)
    yield A.create_ring_attention(32, 4)
    yield A.create_ring_attention(32, 4, chunk_size=5, causal=True)
    yield A.create_context_parallel_attention(32, 4, kv_heads=2, sliding_window_size=4)
    yield SegmentedAttentionMemory(32, 4, segment_length=4, memory_length=3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_attention_layer_of_the_package_passes(dtype):
    torch.manual_seed(0)
    for layer in package_layers():
        results = ComponentValidator().validate_attention_component(layer.to(dtype), 32, 4)
        assert not failures(results), (layer, [str(result) for result in results])
        assert {"state_dict", "output", "gradient of x"} <= {result.test_name for result in results}


def wrong(base, change):
    class Wrong(base):
        def forward(self, *args, **options):
            return change(super().forward(*args, **options))

    return Wrong


def test_wrong_attention_layers_of_the_package_do_not_pass():
    for layer in package_layers():
        layer.__class__ = wrong(type(layer), lambda output: output * 1.001)
        found = failures(ComponentValidator().validate_attention_component(layer, 32, 4))
        assert "above 2e-05" in found["output"], layer
    from kernel_pytorch.attention import create_attention, create_ring_attention

    misread = create_attention(32, 4)
    misread._attention = lambda q, k, v, **options: v  # attends to itself alone
    assert "output" in failures(ComponentValidator().validate_attention_component(misread, 32, 4))
    message = failures(ComponentValidator().validate_attention_component(create_ring_attention(64, 4), 32, 4))["output"]
    assert "RingAttentionLayer: hidden_states has shape [2, 17, 32], its last dimension must be 64" in message


def test_torchs_own_attention_passes():
    layer = nn.MultiheadAttention(32, 4, batch_first=True)
    assert not failures(ComponentValidator().validate_attention_component(layer, 32, 4))


class WrongScale(core.AttentionLayer):
    def forward(self, *args, **options):
        return super().forward(*args, **options) * 1.001


class WrongGradient(core.OptimizedLinear):
    def forward(self, x):
        return super().forward(x.detach())


class WrongShape(core.OptimizedLinear):
    def forward(self, x):
        return super().forward(x)[..., :-1]


class Raises(core.OptimizedLinear):
    def forward(self, x):
        raise ZeroDivisionError("by nothing")


class NotANumber(core.OptimizedLinear):
    def forward(self, x):
        return super().forward(x) * float("nan")


def test_wrong_layers_are_named():
    validator = ComponentValidator()
    wrong = failures(validator.validate_attention_component(WrongScale(32, 4), 32, 4))
    assert "above 2e-05" in wrong["output"] and "cross: output" in wrong
    wrong = failures(validator.validate_linear_component(WrongGradient(12, 20), 12, 20))
    assert {*wrong} == {f"{prefix}gradient of x" for prefix in ("", "single row: ", "no rows: ")}
    assert "absent" in wrong["gradient of x"]
    wrong = failures(validator.validate_linear_component(WrongShape(12, 20), 12, 20))
    assert "[3, 5, 19]" in wrong["output"] and "[3, 5, 20]" in wrong["output"]
    wrong = failures(validator.validate_linear_component(Raises(12, 20), 12, 20))
    assert wrong["output"] == "ZeroDivisionError: by nothing"
    assert "output" in failures(validator.validate_linear_component(NotANumber(12, 20), 12, 20))
    wrong = failures(validator.validate_linear_component(core.OptimizedLinear(12, 21), 12, 20))
    assert "size mismatch" in wrong["state_dict"]
    assert failures(ComponentValidator(tolerance=0.0).validate_linear_component(core.OptimizedLinear(12, 20), 12, 20))


def test_any_layer_against_any_composition():
    mlp = core.OptimizedMLP(12, 20)

    class Plain(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate_proj, self.up_proj = nn.Linear(12, 20, False), nn.Linear(12, 20, False)
            self.down_proj = nn.Linear(20, 12, False)

        def forward(self, x):
            return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))

    results = ComponentValidator().validate_component(mlp, Plain(), {"x": (3, 5, 12)})
    assert len(results) == 6 and not failures(results)
    assert "gradient of up_proj.weight" in str(results[-2]) and str(results[0]).startswith("ok: state_dict")


def test_timings_are_medians_of_turns():
    slow = lambda: time.sleep(0.002)  # noqa: E731
    timing = KernelProfiler("cpu").benchmark_function(slow, iterations=9, warmup=1, name="sleep")
    assert timing.name == "sleep" and timing.turns == 9 and 2000 <= timing.p25_us <= timing.median_us <= timing.p75_us
    assert timing.spread_us == (timing.p75_us - timing.p25_us) / 2
    assert f"sleep: {timing.median_us:.1f} us" in str(timing)


def test_comparison_in_turns():
    order = []
    ways = {"one": lambda x: order.append("one"), "two": lambda x: (order.append("two"), time.sleep(0.001))}
    comparison = compare_functions(ways, torch.zeros(1), iterations=8)
    assert order[-16:] == ["one", "two"] * 8
    assert comparison.speedup("one") == 1.0 and comparison.speedup("two") < 0.5 and comparison.is_clear("two")
    assert "two: " in str(comparison) and "within the spread" not in str(comparison)
    with pytest.raises(KeyError, match="'three'"):
        comparison.speedup("three")
    close = Comparison((Timing("a", 10.0, 9.0, 11.0, 5), Timing("b", 9.5, 8.0, 10.0, 5)))
    assert not close.is_clear("b") and "1.05x, within the spread" in str(close)


def test_a_model_keeps_its_mode_and_reports_collect():
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)).train()
    assert profile_model_inference(model, torch.randn(2, 8), iterations=5).turns == 5
    assert model.training
    profiler = KernelProfiler("cpu")
    profiler.benchmark_function(torch.neg, (torch.zeros(4),), iterations=5)
    profiler.benchmark_function(torch.clamp, (torch.zeros(4),), {"min": 1}, iterations=5, name="clamp")
    assert [line.split(":")[0] for line in profiler.generate_report().splitlines()] == ["neg", "clamp"]
    assert quick_benchmark(torch.neg, torch.zeros(4), iterations=5).median_us > 0


def test_wrong_arguments():
    with pytest.raises(ValueError, match="meta; only cpu and cuda"):
        KernelProfiler("meta")
    with pytest.raises(ValueError, match="1 iterations"):
        quick_benchmark(torch.neg, torch.zeros(4), iterations=1)
    with pytest.raises(ValueError, match="CUDA only"):
        KernelProfiler("cpu").profile_memory_usage(torch.neg, torch.zeros(4))
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="no CUDA device"):
            KernelProfiler("cuda")


@pytest.mark.gpu
def test_on_a_gpu():
    x = torch.randn(1024, 1024, device="cuda")
    comparison = compare_functions({"copy": torch.clone, "many": lambda x: [x.exp() for _ in range(50)]}, x)
    assert comparison.speedup("many") < 0.2
    profiler = KernelProfiler("cuda")
    timing = profiler.benchmark_function(torch.neg, (x,), iterations=20)
    assert 0.5 < timing.median_us < 10000
    assert profiler.profile_memory_usage(torch.neg, x) >= x.nbytes
    validator = ComponentValidator("cuda")
    assert not failures(validator.validate_attention_component(core.AttentionLayer(32, 4), 32, 4))
    assert not failures(validator.validate_linear_component(core.OptimizedLinear(12, 20), 12, 20))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_benchmark_tells_the_spread(dtype: torch.dtype) -> None:
    layer = torch.nn.MultiheadAttention(32, 4, batch_first=True, dtype=dtype)
    state = torch.random.get_rng_state()
    found = benchmark_attention_performance(layer, (2, 8, 32), num_trials=12)
    assert layer.training and torch.equal(state, torch.random.get_rng_state())
    assert 0 < found["min_latency"] <= found["p25_latency"] <= found["median_latency"] <= found["p75_latency"]
    assert found["min_latency"] <= found["avg_latency"] <= found["max_latency"]
    assert found["spread"] == pytest.approx((found["p75_latency"] - found["p25_latency"]) / 2)
    assert found["tokens_per_second"] == pytest.approx(16e3 / found["median_latency"])
    assert (found["num_trials"], found["device"], found["dtype"]) == (12, "cpu", str(dtype).removeprefix("torch."))


def test_attention_benchmark_times_the_layer_itself() -> None:
    class Sleeper(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            assert not torch.is_grad_enabled() and not self.training
            time.sleep(0.004)
            return x

    found = benchmark_attention_performance(Sleeper(), (1, 2, 4), num_trials=5)
    assert 4 <= found["min_latency"] <= found["avg_latency"]
    for shape, trials, words in [
        ((2, 3), 5, "input_shape is"),
        ((1, 0, 4), 5, "input_shape is"),
        ((1, 2, 4), 1, "num_"),
    ]:
        with pytest.raises(ValueError, match=words):
            benchmark_attention_performance(Sleeper(), shape, trials)
