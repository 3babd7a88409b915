"""The seeds' optimizers with states on the host: what they take over, and what they refuse."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from kernel_pytorch.optim import (
    AdamW,
    CPUGPUHybridOptimizer,
    DeepOptimizerStates,
    InterleaveOffloadingOptimizer,
    MemoryConfig,
    PerformanceModel,
)
from torch import nn

from kernel_pytorch import advanced_memory

RATES = PerformanceModel(up=50e9, down=50e9, host_memory=150e9, cpu=5e9, device=1e11)


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(40, 64), nn.GELU(), nn.Linear(64, 10))


def train(model: nn.Module, optimizer: Any, steps: range, scheduler: Any = None) -> None:
    for step in steps:
        x = torch.randn(16, 40, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()


MAKERS: dict[str, Any] = {
    "deep": lambda o, m: DeepOptimizerStates(o, m, MemoryConfig(cpu_memory_limit_gb=8.0), RATES, num_groups=4),
    "deep, plain": lambda o, m: DeepOptimizerStates(optimizer=o, model=m, enable_profiling=False),
    "interleave": lambda o, m: InterleaveOffloadingOptimizer(optimizer=o, model=m, memory_limit_gb=2.0, auto_tune=True),
    "half": lambda o, m: InterleaveOffloadingOptimizer(o, m, auto_tune=False),
    "resident": lambda o, m: InterleaveOffloadingOptimizer(o, m, cpu_offload=False),
}


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("ours", [False, True])
def test_takes_over_groups_states_and_schedulers(name: str, ours: bool) -> None:
    models = make_model(), make_model()
    kind: Any = AdamW if ours else torch.optim.AdamW
    base, other = (kind(model.parameters(), lr=1e-2, weight_decay=0.1) for model in models)
    plain = torch.optim.lr_scheduler.ExponentialLR(base, 0.5)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(other, 0.5)
    for model, optimizer, schedule in ((models[0], base, plain), (models[1], other, scheduler)):
        train(model, optimizer, range(2), schedule)
    taken = MAKERS[name](other, models[1])
    assert not other.state and len(taken.state) == 4
    for model, optimizer, schedule in ((models[0], base, plain), (models[1], taken, scheduler)):
        train(model, optimizer, range(2, 4), schedule)
    for p, q in zip(models[0].parameters(), models[1].parameters(), strict=True):
        if ours:
            assert torch.equal(p, q)
        else:
            torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)
    resumed = copy.deepcopy(models[1])
    again = AdamW(resumed.parameters(), state_dtype=None)
    again.load_state_dict(taken.state_dict())
    assert again.param_groups[0]["lr"] == taken.param_groups[0]["lr"]


def test_metrics_and_statistics() -> None:
    model = make_model()
    deep = DeepOptimizerStates(torch.optim.AdamW(model.parameters()), model)
    x = torch.randn(4, 40)

    def closure() -> torch.Tensor:
        deep.zero_grad()
        loss: torch.Tensor = model(x).square().mean()
        loss.backward()
        return loss

    metrics = deep.step(closure)
    assert metrics["step_seconds"] > 0 and float(metrics["loss"].detach()) > 0
    stats = deep.get_performance_stats()
    assert stats["steps"] == 1 and stats["host_bytes"] > 8 * sum(p.numel() for p in model.parameters())
    assert "nothing is sent" in deep.optimize_memory_configuration()
    deep.cleanup()
    hybrid = CPUGPUHybridOptimizer(torch.optim.AdamW, model, lr=1e-2, cpu_ratio=0.25, auto_balance=False, eps=1e-6)
    train(model, hybrid, range(2))
    assert hybrid._offload is not None and hybrid._offload.device_share == 0.75
    assert hybrid.param_groups[0]["eps"] == 1e-6
    assert advanced_memory.DeepOptimizerStates is DeepOptimizerStates


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda m: DeepOptimizerStates(torch.optim.SGD(m.parameters()), m), "it must be an AdamW"),
        (lambda m: DeepOptimizerStates(torch.optim.AdamW(make_model().parameters()), m), "not the model's"),
        (
            lambda m: DeepOptimizerStates(torch.optim.AdamW(m.parameters()), m, MemoryConfig(1e-6)),
            "cpu_memory_limit_gb",
        ),
        (lambda m: DeepOptimizerStates(torch.optim.AdamW(m.parameters()), m, num_groups=0), "num_groups is 0"),
        (
            lambda m: InterleaveOffloadingOptimizer(torch.optim.AdamW(m.parameters()), m, disk_offload=True),
            "disk_offload is not built",
        ),
        (
            lambda m: InterleaveOffloadingOptimizer(torch.optim.AdamW(m.parameters()), m, memory_limit_gb=1e-6),
            "give it more",
        ),
        (lambda m: CPUGPUHybridOptimizer(torch.optim.SGD, m), "it must be AdamW"),
        (lambda m: CPUGPUHybridOptimizer(AdamW, m, cpu_ratio=2), "cpu_ratio is 2"),
        (lambda m: MemoryConfig(compression_ratio=0.5), "only 0.7 is built"),
        (lambda m: MemoryConfig(cpu_memory_limit_gb=0), "must be positive"),
        (lambda m: MemoryConfig(offload_threshold=7), "it is a share"),
        (lambda m: PerformanceModel(0, 1, 1, 1, 1), "up is 0; it must be positive"),
    ],
)
def test_what_cannot_be_is_named(make: Any, words: str) -> None:
    with pytest.raises((TypeError, ValueError), match=words):
        make(make_model())
