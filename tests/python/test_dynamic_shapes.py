"""Buckets, padding and DynamicShapeModule: results equal the plain module's, whatever is padded and however often."""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_pytorch.optimization_patterns import (
    BucketingStrategy,
    DynamicShapeBucketing,
    DynamicShapeModule,
    MaskArgument,
    PaddingStrategy,
    benchmark_dynamic_shapes,
    create_optimal_bucketing_system,
    print_bucketing_analysis,
)
from kernel_pytorch.optimization_patterns.padding import copy_padded, pad
from torch import Tensor, nn

from kernel_pytorch import functional


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def padded(module: nn.Module, *args: object, **options: object) -> DynamicShapeModule:
    """Padded on the CPU too, where that is not done by itself: it gains nothing there."""
    return DynamicShapeModule(module, *args, **{"padding": "always", **options})  # type: ignore[arg-type]


class Encoder(nn.Module):
    """One attention layer that is told by `argument` which keys are real."""

    def __init__(self, dim: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def attend(self, x: Tensor, mask: Tensor | None) -> Tensor:
        query, key, value = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        return self.out(attended.transpose(1, 2).flatten(2))


class Keep(Encoder):
    def forward(self, x: Tensor, attention_mask: Tensor | None = None) -> dict[str, Tensor]:
        mask = None if attention_mask is None else attention_mask[:, None, None, :].bool()
        hidden = self.attend(x, mask)
        return {"hidden": hidden, "pooled": hidden[:, 0]}


class Lengths(Encoder):
    def forward(self, x: Tensor, key_lengths: Tensor | None = None) -> tuple[Tensor, Tensor]:
        query, key, value = self.qkv(x).unflatten(-1, (3, self.heads, -1)).unbind(2)
        attended = functional.attention(query, key, value, layout="bshd", key_lengths=key_lengths)
        hidden = self.out(attended.flatten(2))
        if key_lengths is None:
            return hidden, hidden.mean(1)
        real = torch.arange(x.shape[1])[None, :, None] < key_lengths[:, None, None]
        return hidden, (hidden * real).sum(1) / key_lengths[:, None]


class Blind(Encoder):
    def forward(self, x: Tensor) -> Tensor:
        return self.attend(x, None)


class Leaky(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return (x.float() + 0.02 * x.float().mean(1, keepdim=True)).to(x.dtype)


def trace(count: int, seed: int = 0, dim: int = 32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    lengths = [int(4 + 60 * torch.rand((), generator=generator) ** 2) for _ in range(count)]
    return [torch.randn(1, length, dim, generator=generator) for length in lengths]


def close(one: object, other: object) -> None:
    torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("strategy", list(BucketingStrategy))
def test_every_strategy_covers_its_samples(strategy: BucketingStrategy) -> None:
    samples = trace(200)
    system = create_optimal_bucketing_system(samples, strategy, max_buckets=6)
    assert 1 <= len(system.sizes(1)) <= 6 and system.sizes(2) == []
    for sample in samples:
        bucket = system.find_optimal_bucket(sample.shape)
        grown = system.pad_to_bucket_shape(sample, bucket)
        assert grown.shape[1] in system.sizes(1) and grown.shape[2] == 32
        smaller = [size for size in system.sizes(1) if size < grown.shape[1]]
        assert not smaller or max(smaller) < sample.shape[1]  # the smallest that fits
        assert torch.equal(system.unpad_from_bucket_shape(grown, sample.shape), sample)
    stats = system.get_performance_stats()
    assert stats["observations"] == 400 and 0 <= stats["padding_overhead"] < 1


def test_more_buckets_pad_less_and_the_optimum_beats_the_grids() -> None:
    samples = trace(300)

    def overhead(strategy: BucketingStrategy, buckets: int) -> float:
        system = create_optimal_bucketing_system(samples, strategy, buckets)
        for sample in samples:
            system.find_optimal_bucket(sample.shape)
        return system.get_performance_stats()["padding_overhead"]

    best = [overhead(BucketingStrategy.MEMORY_OPTIMAL, buckets) for buckets in (1, 2, 4, 8, 64)]
    assert best == sorted(best, reverse=True) and best[-1] == 0
    for strategy in (BucketingStrategy.GEOMETRIC, BucketingStrategy.LINEAR):
        assert overhead(strategy, 8) >= best[3]


def test_batch_and_length_have_buckets_of_their_own() -> None:
    system = create_optimal_bucketing_system([(b, s, 8) for b in (1, 2, 7) for s in (5, 9, 30)], max_buckets=2)
    assert system.dimensions == (0, 1)
    shape = system.bucket_shape(system.find_optimal_bucket((3, 6, 8)))
    assert shape[0] == 7 and shape[1] >= 9 and shape[2] == 8


def test_sizes_beyond_the_plan_get_a_bucket_and_drift_moves_the_plan() -> None:
    system = create_optimal_bucketing_system(
        [(1, length) for length in range(8, 16)], BucketingStrategy.ADAPTIVE, 4, replan_every=50, dimensions=[1]
    )
    before = system.sizes(1)
    beyond = system.bucket_shape(system.find_optimal_bucket((1, 1000)))[1]
    assert 1000 <= beyond <= 1125
    for turn in range(400):
        system.find_optimal_bucket((1, 100 + turn % 8))
    after = system.sizes(1)
    assert after != before and sum(100 <= size < 108 for size in after) >= 2
    still = DynamicShapeBucketing(dimensions=[1], enable_adaptive_optimization=False, replan_every=1)
    still.learn([(1, 10)])
    for _ in range(50):
        still.find_optimal_bucket((1, 300))
    assert len(still.sizes(1)) == 1


@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=3),
    st.lists(st.integers(0, 5), min_size=3, max_size=3),
    st.sampled_from(list(PaddingStrategy)),
)
@settings(max_examples=60, deadline=None)
def test_padding_keeps_what_was_there(shape: list[int], more: list[int], strategy: PaddingStrategy) -> None:
    tensor = torch.randint(1, 100, shape)
    sizes = {dim: size + more[dim] for dim, size in enumerate(shape)}
    padded = pad(tensor, sizes, strategy)
    assert list(padded.shape) == list(sizes.values())
    assert torch.equal(padded[tuple(slice(size) for size in shape)], tensor)
    if strategy is not PaddingStrategy.ZEROS:
        assert (padded > 0).all()  # repeats of what was there
    if strategy is PaddingStrategy.CIRCULAR and len(shape) == 1:
        assert torch.equal(padded, tensor.repeat(padded.shape[0])[: padded.shape[0]])


def test_copy_padded_clears_what_a_longer_call_left() -> None:
    static = torch.full((2, 8), 7.0)
    written = -1
    for length in (3, 8, 2, 5):
        source = torch.rand(2, length) + 1
        written = copy_padded(static, source, (1,), written)
        assert torch.equal(static, pad(source, {1: 8}))
    both, written = torch.full((4, 8), 7.0), -1
    for rows, length in ((4, 8), (2, 3), (4, 5), (3, 8), (4, 8)):
        source = torch.rand(rows, length) + 1
        written = copy_padded(both, source, (0, 1), written)
        assert torch.equal(both, pad(source, {0: 4, 1: 8}))


@pytest.mark.parametrize("module_type", [Keep, Lengths])
def test_masked_modules_give_the_plain_results(module_type: type[Encoder]) -> None:
    torch.manual_seed(0)
    module = module_type().eval()
    samples = trace(60)
    bucketed = padded(module, create_optimal_bucketing_system(samples, max_buckets=4))
    assert not bucketed.training  # as its base module
    with torch.no_grad():
        for _ in range(2):
            for sample in samples:
                close(bucketed(sample), module(sample))
    assert bucketed.refusals() == []
    assert bucketed.statistics()["padding_overhead"] > 0
    assert list(bucketed.state_dict()) == list(module.state_dict())
    for state in (module.state_dict(), {f"base_module.{name}": value for name, value in module.state_dict().items()}):
        assert bucketed.load_state_dict(state)  # its own, and one of version 0.5
    assert bucketed.bucketing_system is bucketed.bucketing


def test_torch_transformer_layers_are_told_by_their_key_padding_mask() -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True).eval()
    samples = trace(30)
    bucketed = padded(layer, create_optimal_bucketing_system(samples, max_buckets=3)).eval()
    assert bucketed.mask == MaskArgument("src_key_padding_mask", "pad")
    with torch.no_grad():
        for sample in samples + samples:
            close(bucketed(sample), layer(sample))
    assert bucketed.refusals() == []


def test_tokenwise_modules_need_no_mask_and_blind_ones_stay_unpadded() -> None:
    torch.manual_seed(0)
    samples = trace(40)
    system = create_optimal_bucketing_system(samples, max_buckets=3)
    tokenwise = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.LayerNorm(64)).eval()
    bucketed = padded(tokenwise, system)
    with torch.no_grad():
        for sample in samples:
            close(bucketed(sample), tokenwise(sample))
    assert bucketed.refusals() == []
    blind = Blind().eval()
    with pytest.warns(UserWarning, match="runs unpadded.*mask"), torch.no_grad():
        bucketed = padded(blind, system)
        for sample in samples:
            close(bucketed(sample), blind(sample))
    assert bucketed.refusals() and "differs" in bucketed.refusals()[0]
    leaky = Leaky().eval()  # lets through less than the rounding of its type
    with pytest.warns(UserWarning, match="runs unpadded.*with other values"), torch.no_grad():
        bucketed = padded(leaky, system)
        for sample in samples[:8]:
            bucketed(sample.bfloat16())
    down = nn.Conv1d(32, 32, 2, stride=2).eval()
    with pytest.warns(UserWarning, match="runs unpadded"), torch.no_grad():
        channels_last = [sample.transpose(1, 2) for sample in samples]
        shapes = create_optimal_bucketing_system(channels_last, max_buckets=3, dimensions=[2])
        bucketed = padded(down, shapes, mask_argument=None)
        for sample in channels_last:
            close(bucketed(sample), down(sample))


def test_masks_of_the_caller_and_other_tensors_are_padded_along() -> None:
    torch.manual_seed(0)
    module = Keep().eval()
    system = DynamicShapeBucketing(BucketingStrategy.OPTIMAL, 2, dimensions=[0, 1])
    system.learn([(4, 16, 32), (8, 32, 32)])
    bucketed = padded(module, system)
    with torch.no_grad():
        for rows, length in ((3, 9), (4, 16), (7, 20), (3, 10), (2, 9), (5, 32)):
            x = torch.randn(rows, length, 32)
            mask = (torch.arange(length) < torch.randint(1, length + 1, (rows, 1))).long()
            for _ in range(2):
                close(bucketed(x, attention_mask=mask), module(x, attention_mask=mask))
                close(bucketed(x, mask), module(x, mask))
                close(bucketed(x), module(x))
    assert bucketed.refusals() == []


def test_gradients_equal_the_plain_ones_and_dropout_does_not_confuse_the_check() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(32, 32), nn.Dropout(0.5), nn.Linear(32, 8)).train()
    system = create_optimal_bucketing_system(trace(30), max_buckets=2)
    bucketed = padded(module, system).train()
    for sample in trace(10):
        assert bucketed(sample).shape == (1, sample.shape[1], 8)
    assert bucketed.refusals() == [] and module[1].training
    bucketed.eval()
    for sample in trace(4, seed=1):
        for model in (module, bucketed):
            model.zero_grad()
            x = sample.clone().requires_grad_()
            model(x).square().sum().backward()
            found = [x.grad, *(parameter.grad.clone() for parameter in module.parameters())]
            if model is module:
                expected = found
        close(found, expected)


def test_batch_norm_in_training_sees_no_padding() -> None:
    module = nn.BatchNorm1d(4).train()
    bucketed = padded(module, DynamicShapeBucketing(dimensions=[0])).train()
    bucketed.bucketing.learn([(16, 4)])
    x = torch.randn(9, 4) + 5
    with pytest.warns(UserWarning, match="batch norm"):
        bucketed(x)
    close(module.running_mean, 0.1 * x.mean(0))


def test_run_many_equals_one_by_one() -> None:
    torch.manual_seed(0)
    for module in (Keep().eval(), Lengths().eval()):
        requests = [sample[0] for sample in trace(70)]
        system = create_optimal_bucketing_system([request[None] for request in requests], max_buckets=4)
        bucketed = padded(module, system).eval()
        with torch.no_grad():
            for _ in range(2):
                results = bucketed.run_many(requests, max_tokens=256)
                for request, result in zip(requests, results, strict=True):
                    expected = module(request[None])
                    values = expected.values() if isinstance(expected, dict) else expected
                    found = result.values() if isinstance(result, dict) else result
                    close([value[0] for value in values], list(found))
        assert bucketed.run_many([]) == []
        unpadded = DynamicShapeModule(module, system).eval()  # in batches by length, padded to their longest
        with torch.no_grad():
            for one, other in zip(unpadded.run_many(requests, max_tokens=256), results, strict=True):
                close(one, other)
    with pytest.raises(ValueError, match="mask"):
        padded(Blind(), system).run_many(requests)


def test_alternatives_that_disagree_are_not_taken() -> None:
    torch.manual_seed(0)
    module, same, wrong = Keep().eval(), Keep().eval(), Keep().eval()
    same.load_state_dict(module.state_dict())
    samples = trace(20)
    system = create_optimal_bucketing_system(samples, max_buckets=2)
    bucketed = padded(module, system, alternatives=[wrong, same]).eval()
    with torch.no_grad():
        for sample in samples + samples:
            close(bucketed(sample), module(sample))
    chosen = {plan.chosen for plan in bucketed._plans.values() if plan.chosen is not None}
    assert chosen and chosen <= {0, 2}


def test_compiled_buckets_have_compilations_of_their_own() -> None:
    module = nn.Sequential(nn.Linear(8, 8), nn.GELU()).eval()
    system = DynamicShapeBucketing(BucketingStrategy.OPTIMAL, 5, dimensions=[1])
    system.learn([(1, 4 * length, 8) for length in range(1, 6)])
    bucketed = padded(module, system, compile="aot_eager").eval()
    with torch.no_grad(), torch._dynamo.config.patch(recompile_limit=2, fail_on_recompile_limit_hit=True):
        for length in [4 * i - 1 for i in range(1, 6)] * 2:
            x = torch.randn(1, length, 8)
            close(bucketed(x), module(x))


def test_many_threads_share_one_module() -> None:
    torch.manual_seed(0)
    module = Keep().eval()
    samples = trace(24)
    system = create_optimal_bucketing_system(samples, max_buckets=4, replan_every=7)
    bucketed = padded(module, system, max_plans=2).eval()
    with torch.no_grad():
        expected = [module(sample)["hidden"] for sample in samples]
    failures: list[BaseException] = []

    def work(first: int) -> None:
        try:
            with torch.no_grad():
                for turn in range(2 * len(samples)):
                    index = (first + turn) % len(samples)
                    close(bucketed(samples[index])["hidden"], expected[index])
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(5 * i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures[0]
    assert system.get_performance_stats()["observations"] == len(samples) + 4 * 2 * len(samples)


@pytest.mark.skipif(torch.cuda.is_available(), reason="shows what a machine without CUDA does")
def test_nothing_is_padded_where_that_cannot_pay() -> None:
    seen = []

    class Spy(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            seen.append(x.shape[1])
            return x

    bucketed = DynamicShapeModule(Spy().eval(), create_optimal_bucketing_system([(1, 8, 4), (1, 16, 4)]))
    for length in (3, 8, 9):
        bucketed(torch.ones(1, length, 4))
    assert seen == [3, 8, 9] and not bucketed.pads([torch.ones(1)])


def test_errors_say_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match="no samples"):
        create_optimal_bucketing_system([])
    with pytest.raises(ValueError, match='strategy is "best"; it is one of geometric'):
        create_optimal_bucketing_system([(1, 5)], strategy="best")
    with pytest.raises(ValueError, match="numbers of dimensions"):
        create_optimal_bucketing_system([(1, 2), (1, 2, 3)])
    with pytest.raises(ValueError, match="MaskArgument"):
        padded(Keep(), mask_argument="my_mask")
    with pytest.raises(ValueError, match="keep"):
        MaskArgument("my_mask", "yes")
    system = create_optimal_bucketing_system([(1, 5), (1, 9)])
    with pytest.raises(KeyError, match="no bucket 99"):
        system.bucket_shape(99)
    with pytest.raises(ValueError, match="does not fit"):
        system.pad_to_bucket_shape(torch.zeros(3), system.find_optimal_bucket((1, 5)))
    module = padded(Keep().eval(), enable_bucketing=False)
    close(module(torch.ones(1, 3, 32)), module.base_module(torch.ones(1, 3, 32)))
    measured = benchmark_dynamic_shapes(nn.Linear(8, 8), [(1, 3, 8), (1, 5, 8)], num_iterations=4, warmup_iterations=2)
    assert measured["speedup"] > 0 and measured["refusals"] == []
    print_bucketing_analysis(system)
    assert "dimension 1" in capsys.readouterr().out


@pytest.mark.parametrize("adapts", [True, False])
@pytest.mark.parametrize("strategy", list(BucketingStrategy))
def test_max_buckets_hold_from_the_first_shape_on(strategy: BucketingStrategy, adapts: bool) -> None:
    system = DynamicShapeBucketing(strategy, 3, enable_adaptive_optimization=adapts, dimensions=[1], replan_every=500)
    generator = torch.Generator().manual_seed(0)
    for length in torch.randint(1, 900, (899,), generator=generator).tolist():
        shape = system.bucket_shape(system.find_optimal_bucket((2, length)))
        assert shape[0] == 2 and shape[1] >= length
        assert system.get_performance_stats()["total_buckets"] <= 3


def test_geometric_buckets_without_samples_are_powers_of_two() -> None:
    system = DynamicShapeBucketing(BucketingStrategy.GEOMETRIC)
    assert system.bucket_shape(system.find_optimal_bucket((37, 83))) == (64, 128)
    assert system.bucket_shape(system.find_optimal_bucket((64, 128, 80))) == (64, 128, 80)  # features stay


def test_statistics_tell_the_padding_that_ran() -> None:
    module, samples = torch.nn.Linear(8, 8).eval(), [torch.randn(1, length, 8) for length in (3, 5, 9, 17)]
    bucketing = create_optimal_bucketing_system([torch.randn(1, 32, 8)], dimensions=[1])
    for padding, overhead in (("auto", 0.0), ("always", None)):
        bucketed = DynamicShapeModule(module, bucketing, padding=padding)
        with torch.no_grad():
            for sample in [*samples, *samples]:
                bucketed(sample)
        found = bucketed.statistics()["padding_overhead"]
        if not torch.cuda.is_available() or overhead is None:
            assert found > 0.5 if overhead is None else found == overhead


def test_copies_are_free_of_locks_and_plans(tmp_path) -> None:
    module = Keep().eval()
    samples = trace(6)
    bucketed = padded(module, create_optimal_bucketing_system(samples, max_buckets=4))
    with torch.no_grad():
        want = [bucketed(sample) for sample in samples]
        torch.save(bucketed, tmp_path / "module.pt")
        loaded = torch.load(tmp_path / "module.pt", weights_only=False)
        for twin in (copy.deepcopy(bucketed), pickle.loads(pickle.dumps(bucketed)), loaded):
            assert twin.bucketing.sizes(1) == bucketed.bucketing.sizes(1) and twin._graphs[0].module is twin.base_module
            for sample, expected in zip(samples, want, strict=True):
                close(twin(sample), expected)
            twin.bucketing.find_optimal_bucket((3, 999, 32))
            assert twin.bucketing.sizes(1) != [] and bucketed.statistics()["observations"] == 12
    assert "max_buckets=4" in repr(bucketed) and "sizes" in repr(bucketed.bucketing)
