"""Fusion by the seeds' names: the same numbers, the same parameters, launches counted and not assumed."""

from __future__ import annotations

import contextlib
import copy

import pytest

torch = pytest.importorskip("torch")

from kernel_pytorch.attention import create_unified_attention_fusion  # noqa: E402
from kernel_pytorch.attention.fusion import (  # noqa: E402
    CausalBlock,
    FusionConfig,
    FusionPerformanceStats,
    FusionStrategy,
    OptimizationLevel,
    UnifiedAttentionFusion,
    benchmark_fusion_performance,
)

nn = torch.nn
QUICK = 0.3


@pytest.fixture(autouse=True)
def one_thread():
    """Of all there is on a busy machine, waiting for each other's threads takes longest."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def encoder(**changes) -> nn.Module:
    torch.manual_seed(0)
    return nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True, **changes)


def test_the_seed_s_example() -> None:
    transformer = nn.TransformerEncoderLayer(d_model=32, nhead=4, dropout=0.0)
    fused = create_unified_attention_fusion(
        transformer,
        fusion_strategy=FusionStrategy.FULL_BLOCK,
        optimization_level=OptimizationLevel.AGGRESSIVE,
    )
    assert isinstance(fused, UnifiedAttentionFusion) and fused.report is None
    fused.config = FusionConfig(optimization_level=OptimizationLevel.AGGRESSIVE, budget_seconds=QUICK)
    x = torch.randn(8, 2, 32)
    transformer.eval(), fused.eval()
    with torch.no_grad():
        torch.testing.assert_close(fused(x), transformer(x), rtol=3e-2, atol=3e-2)
    assert fused.report is not None and fused.report.data["accuracy"] == "tolerant"


@pytest.mark.parametrize("training", [True, False])
def test_the_example_fuses_where_the_clock_says_that_it_pays(monkeypatch, training: bool) -> None:
    """The clock says that each replacement halves the time: what can be replaced is, and computes the same."""
    from kernel_pytorch._optimize import choose, whole
    from kernel_pytorch._optimize.measure import Timing

    def halved(ways, *_, **__):
        return {
            name: Timing(1000.0 / 2**place, 990.0 / 2**place, 1010.0 / 2**place, 9) for place, name in enumerate(ways)
        }

    monkeypatch.setattr(choose, "interleaved", halved)
    monkeypatch.setattr(whole, "pays", lambda *_: True)
    transformer = nn.TransformerEncoderLayer(d_model=32, nhead=4, dropout=0.0).train(training)
    # Time alone decides here: the peak memory of a model this small is mostly scratch, and varies from run to run.
    config = FusionConfig(
        optimization_level=OptimizationLevel.BALANCED, budget_seconds=15, enable_memory_optimization=False
    )
    fused = UnifiedAttentionFusion(transformer, config).train(training)
    x = torch.randn(8, 2, 32)
    expected = transformer(x)
    with contextlib.nullcontext() if training else torch.no_grad():
        output = fused(x)
    replaced = fused.report.data["replacements"]
    assert ("", "encoder layer") in {(row["path"], row["pattern"]) for row in replaced}, replaced  # the whole of it
    torch.testing.assert_close(output, expected, rtol=1e-3, atol=1e-4)
    if training:
        weights = [transformer.linear1.weight, transformer.self_attn.in_proj_weight]
        wanted = torch.autograd.grad(expected.square().sum(), weights)
        got = torch.autograd.grad(output.square().sum(), weights)
        torch.testing.assert_close(got, wanted, rtol=1e-3, atol=1e-3)


def test_the_model_given_stays_as_it_is_and_shares_its_parameters() -> None:
    model = encoder().eval()
    names = set(model.state_dict())
    fused = UnifiedAttentionFusion(model, FusionConfig(budget_seconds=QUICK))
    x = torch.randn(2, 8, 32)
    with torch.no_grad():
        want = model(x)
        torch.testing.assert_close(fused(x), want, rtol=1e-3, atol=1e-4)
        assert torch.equal(model(x), want)
        model.norm1.weight.mul_(2)
        torch.testing.assert_close(fused(x), model(x), rtol=1e-3, atol=1e-4)
    assert {id(p) for p in fused.parameters()} == {id(p) for p in model.parameters()}
    assert set(fused.state_dict()) == names == set(model.state_dict())


@pytest.mark.parametrize("nested", [False, True])
def test_state_dicts_load_both_ways(nested: bool) -> None:
    class WithAModel(nn.Module):  # a name that our own must not be confused with
        def __init__(self) -> None:
            super().__init__()
            self.model = nn.Linear(3, 3)

        def forward(self, x):
            return self.model(x)

    def wrapped(model):
        fused = UnifiedAttentionFusion(model)
        return nn.Sequential(nn.Linear(3, 3), fused) if nested else fused

    def plain(model):
        return nn.Sequential(nn.Linear(3, 3), model) if nested else model

    one, other = wrapped(WithAModel()), plain(WithAModel())
    assert list(one.state_dict()) == list(other.state_dict())
    one.load_state_dict(other.state_dict())
    for a, b in zip(one.state_dict().values(), other.state_dict().values()):
        assert torch.equal(a, b)
    plain(WithAModel()).load_state_dict(one.state_dict())
    with pytest.raises(RuntimeError, match="Missing key"):
        one.load_state_dict({})


def test_training_is_fused_again_and_gradients_are_right() -> None:
    model = encoder()
    fused = UnifiedAttentionFusion(model, FusionConfig(budget_seconds=QUICK))
    x = torch.randn(2, 8, 32)
    with torch.no_grad():
        fused.eval()(x)
    assert fused.report.data["goal"] == "inference"
    fused.train()
    fused(x).square().sum().backward()
    assert fused.report.data["goal"] == "train"
    got = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    model(x).square().sum().backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(got[name], parameter.grad, rtol=1e-3, atol=1e-3, msg=name)


def test_strategies_and_levels_choose_patterns_and_accuracy() -> None:
    everything = FusionConfig()
    assert everything.pattern_names() is None and everything.accuracy("inference") == "exact"
    attention = FusionConfig(FusionStrategy.ATTENTION_NORM).pattern_names()
    ffn = FusionConfig(FusionStrategy.FFN_NORM).pattern_names()
    assert attention is not None and ffn is not None
    assert "perceptrons" not in attention and "calls" not in ffn and "norms" in attention and "norms" in ffn
    careful = FusionConfig(FusionStrategy.ATTENTION_FFN, OptimizationLevel.CONSERVATIVE)
    assert careful.pattern_names() == ("activations",)
    adaptive = FusionConfig(optimization_level=OptimizationLevel.ADAPTIVE)
    assert (adaptive.accuracy("train"), adaptive.accuracy("inference")) == ("exact", "tolerant")
    wide = FusionConfig(optimization_level=OptimizationLevel.AGGRESSIVE, enable_mixed_precision=False)
    assert wide.accuracy("inference") == "exact"
    assert FusionConfig(FusionStrategy.CUSTOM, patterns=("norms",)).pattern_names() == ("norms",)
    with pytest.raises(ValueError, match="patterns is empty"):
        FusionConfig(FusionStrategy.CUSTOM)


def test_only_what_the_strategy_names_is_looked_at() -> None:
    config = FusionConfig(FusionStrategy.CUSTOM, patterns=("norms",), budget_seconds=QUICK)
    fused = UnifiedAttentionFusion(CausalBlock(64, 4).eval(), config)
    analysis = fused.get_fusion_analysis(torch.randn(1, 8, 64))
    seen = {row["path"] for row in analysis["fused"] + analysis["left_alone"]}
    assert seen == {"norm1", "norm2"}
    assert analysis["strategy"] == "custom" and {row["name"] for row in analysis["measurements"]} >= {"before", "after"}
    unknown = UnifiedAttentionFusion(CausalBlock(64, 4), FusionConfig(FusionStrategy.CUSTOM, patterns=("nonsense",)))
    with pytest.raises(ValueError, match="no pattern is called nonsense"):
        unknown(torch.randn(1, 8, 64))


@pytest.mark.parametrize("model", [encoder(), nn.TransformerEncoderLayer(32, 4, 64), CausalBlock(32, 4)])
def test_samples_can_be_made_up(model: nn.Module) -> None:
    fused = UnifiedAttentionFusion(model.eval(), FusionConfig(target_sequence_length=6, budget_seconds=QUICK)).fuse()
    (words,) = fused.report.data["model"]["inputs"]
    assert words.split()[0] in ("1x6x32", "6x1x32")
    fused.restore()
    assert fused.report is None
    with pytest.raises(ValueError, match="no sample can be made up"):
        UnifiedAttentionFusion(nn.Bilinear(2, 2, 2)).fuse()


def test_a_new_block_by_its_sizes() -> None:
    fused = create_unified_attention_fusion(32, 4, 48)
    assert fused.model.mlp[0].out_features == 48 and fused.model.n_heads == 4
    fused.config = FusionConfig(budget_seconds=QUICK)
    plain = copy.deepcopy(fused.model)
    x = torch.randn(2, 8, 32)
    with torch.no_grad():
        torch.testing.assert_close(fused.eval()(x), plain.eval()(x), rtol=1e-3, atol=1e-4)
        later = x.clone()
        later[:, 5:] += 1  # causal: what comes later changes nothing before it
        torch.testing.assert_close(fused(later)[:, :5], fused(x)[:, :5], rtol=1e-4, atol=1e-5)
    for wrong in ({"model": 32}, {"model": 30, "n_heads": 4}, {"model": encoder(), "n_heads": 4}):
        with pytest.raises((TypeError, ValueError), match="create_unified_attention_fusion"):
            create_unified_attention_fusion(**wrong)


class Chain(nn.Module):
    """So many additions, and an error of its own."""

    def __init__(self, operations: int, error: float = 0.0) -> None:
        super().__init__()
        self.operations, self.error = operations, error

    def forward(self, x):
        for _ in range(self.operations):
            x = x + 1
        return x * (1 + self.error)


def test_launches_are_counted_and_accuracy_is_measured() -> None:
    x = torch.ones(64, 64)
    stats = benchmark_fusion_performance(Chain(9), Chain(4, error=1e-3), x, num_runs=20)
    assert isinstance(stats, FusionPerformanceStats)
    assert (stats.kernel_launches_original, stats.kernel_launches_fused) == (10, 5)
    assert stats.kernel_reduction_ratio == 0.5
    assert stats.max_relative_error == pytest.approx((10 - 5 * 1.001) / 10, rel=1e-4)
    assert stats.numerical_accuracy == pytest.approx(1 - stats.max_relative_error)
    assert stats.speedup == stats.execution_time_original_ms / stats.execution_time_fused_ms
    if not x.is_cuda:
        assert stats.gpu_utilization is None
    moved = 20 * x.numel() * 4  # each operation reads and writes
    assert stats.memory_bandwidth_original_gb_s == pytest.approx(moved / stats.execution_time_original_ms / 1e6)
    same = benchmark_fusion_performance(Chain(3), Chain(3), x, num_runs=5)
    assert same.max_relative_error == 0 and same.fusion_efficiency is None
    with pytest.raises(ValueError, match="cannot be compared"):
        benchmark_fusion_performance(Chain(1), nn.Linear(64, 3), x, num_runs=2)


@pytest.mark.parametrize(("peak", "undone"), [(1_000_000, True), (10_500, False)])
def test_memory_that_grows_undoes_the_fusion(monkeypatch, peak: int, undone: bool) -> None:
    from kernel_pytorch._optimize import optimize as module
    from kernel_pytorch._optimize.report import Report
    from report_sample import sample

    def pretend(model, *_, **__):  # a fusion of four parts that was faster and needs this much memory
        data = sample()
        data["measurements"][0]["peak_bytes"], data["measurements"][1]["peak_bytes"] = 10_000, peak
        return module.OptimizationResult(model, Report(data))

    monkeypatch.setattr(module, "optimize", pretend)
    block = CausalBlock(64, 4).eval()
    report = UnifiedAttentionFusion(block).fuse(torch.randn(1, 8, 64)).report
    assert report.headline.startswith("nothing was replaced") == undone
    assert len(report.data["replacements"]) == (0 if undone else 12)
    assert ("more memory" in str(report)) == undone
    always = UnifiedAttentionFusion(block, FusionConfig(enable_memory_optimization=False))
    assert len(always.fuse(torch.randn(1, 8, 64)).report.data["replacements"]) == 12


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_fusing_inside_a_checkpoint_is_no_part_of_the_call(reentrant: bool, dropout: float) -> None:
    from torch.utils.checkpoint import checkpoint

    fused = create_unified_attention_fusion(32, 4, dropout=dropout, config=FusionConfig(budget_seconds=QUICK))
    plain = copy.deepcopy(fused.model)
    gradients = []
    for model in (fused, plain):
        x = torch.randn(2, 8, 32, generator=torch.Generator().manual_seed(1)).requires_grad_()
        torch.manual_seed(3)
        checkpoint(model, x, use_reentrant=reentrant).sum().backward()
        gradients.append(x.grad)
    if dropout == 0.0:  # our kernels draw other numbers than torch's
        torch.testing.assert_close(*gradients, rtol=1e-3, atol=1e-4)
    checkpoint(fused, x, use_reentrant=reentrant).sum().backward()  # and again, fused


def test_a_first_call_inside_saved_tensor_hooks_works_and_hooks_see_that_call_alone() -> None:
    from kernel_pytorch._optimize.first_call import optimize_at_first_call

    block = CausalBlock(32, 4)
    plain = copy.deepcopy(block)
    x = torch.randn(2, 8, 32)
    seen: list[int] = []

    def pack(tensor):
        seen.append(tensor.numel())
        return tensor

    counts = []
    for model in (plain, optimize_at_first_call(block, budget_seconds=QUICK)):
        seen.clear()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            state = torch.get_rng_state()
            model(x).sum().backward()
            assert torch.equal(torch.get_rng_state(), state)
        counts.append(len(seen))
    assert 0 < counts[1] <= 2 * counts[0]
    for (name, one), other in zip(plain.named_parameters(), block.parameters()):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-3, atol=1e-4, msg=name)


def test_evaluation_and_training_have_each_its_own_fusion() -> None:
    fused = UnifiedAttentionFusion(encoder(), FusionConfig(budget_seconds=QUICK))
    x = torch.randn(2, 8, 32)
    fused.train()(x).sum().backward()
    in_training = fused.report
    assert in_training.data["goal"] == "train"
    with torch.no_grad():
        fused.eval()(x)
        assert fused.report.data["goal"] == "inference"
        in_evaluation = fused.report
        fused(x)
    fused.train()(x)
    assert fused.report is in_training  # no second fusion
    with torch.no_grad():
        fused.eval()(x)
    assert fused.report is in_evaluation
    stats = benchmark_fusion_performance(encoder().eval(), fused, x, num_runs=5)
    replaced = in_evaluation.data["replacements"]
    assert replaced or stats.kernel_launches_fused == stats.kernel_launches_original  # torch's one op for the layer


def test_a_fused_block_takes_masks_by_the_rule_of_all_attention_layers() -> None:
    fused = create_unified_attention_fusion(d_model=32, n_heads=4, config=FusionConfig(budget_seconds=QUICK)).eval()
    x = torch.randn(2, 8, 32)
    keep = torch.ones(2, 8, dtype=torch.bool)
    keep[1, 5:] = False
    with torch.no_grad():
        want = fused(x, attention_mask=keep)
        torch.testing.assert_close(fused(x, attention_mask=keep.long()), want)
        added = torch.zeros(2, 1, 1, 8).masked_fill(~keep[:, None, None], float("-inf"))
        torch.testing.assert_close(fused(x, attention_mask=added), want, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(fused(x, mask=keep), want)
        changed = x.clone()
        changed[1, 5] += 3.0
        torch.testing.assert_close(fused(changed, attention_mask=keep)[1, 6:], want[1, 6:])  # nobody sees a hidden key
        assert not torch.allclose(fused(x)[1, 6:], want[1, 6:])
    with pytest.raises(TypeError, match=r"CausalBlock.*unexpected keyword argument 'padding'.*its forward takes"):
        UnifiedAttentionFusion(CausalBlock(32, 4))(x, padding=keep)
    with pytest.raises(ValueError, match="CausalBlock: x has shape"):
        fused(x[..., :16])
    with pytest.raises(TypeError, match="d_model is 32 and n_heads is None"):
        create_unified_attention_fusion(d_model=32)


def test_fused_models_are_copied_pickled_and_saved(tmp_path) -> None:
    import pickle

    fused = create_unified_attention_fusion(64, 4, config=FusionConfig(budget_seconds=QUICK)).eval()
    x = torch.randn(2, 64, 64)
    with torch.no_grad():
        want = fused(x)
        torch.save(fused, tmp_path / "fused.pt")
        loaded = torch.load(tmp_path / "fused.pt", weights_only=False)
        for twin in (copy.deepcopy(fused), pickle.loads(pickle.dumps(fused)), loaded):
            assert twin.report is None
            torch.testing.assert_close(twin(x), want, rtol=1e-4, atol=1e-5)
            assert twin.report is not None
        torch.testing.assert_close(fused(x), want)
    assert "full_block" in repr(fused)


def test_stats_have_defaults() -> None:
    stats = FusionPerformanceStats()
    assert stats.kernel_reduction_ratio is None and stats.speedup != stats.speedup and not stats.is_clear
