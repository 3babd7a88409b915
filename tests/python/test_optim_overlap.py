"""Steps under the next forward: the numbers of a step before it, and every layer waits for its own weights."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from kernel_pytorch.optim import AdamW, Offload, overlap_forward
from kernel_pytorch.optim.offload.lanes import OneLane
from kernel_pytorch.optim.offload.pipeline import OffloadedStates
from torch import nn

WAYS = [Offload("stream", 600), Offload("interleave", 600, device_share=0.5), Offload("host", 600)]
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(autouse=True)
def staged(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A CPU in the device's place, with all copies."""
    made = OffloadedStates.__init__

    def stage(self: OffloadedStates, *arguments: Any) -> None:
        made(self, *arguments)
        self._is_direct = False

    monkeypatch.setattr(OffloadedStates, "__init__", stage)
    yield


def make(device: str) -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(24, 40), nn.LayerNorm(40), nn.Linear(40, 24)) for _ in range(3)]
    return nn.Sequential(*layers).to(device)


def train(model: nn.Module, optimizer: AdamW, device: str, steps: int = 4) -> None:
    for step in range(steps):
        x = torch.randn(16, 24, generator=torch.Generator().manual_seed(step)).to(device)
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("how", WAYS, ids=lambda how: how.mode)
def test_numbers_are_those_of_a_step_before_forward(how: Offload, device: str) -> None:
    models = [make(device) for _ in range(2)]
    plain, late = (
        AdamW(model.parameters(), 1e-2, max_grad_norm=0.05, offload=offload)
        for model, offload in zip(models, (None, how), strict=True)
    )
    overlap_forward(late, models[1])
    train(models[0], plain, device)
    train(models[1], late, device)
    states = [model.state_dict() for model in models]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    assert late.grad_norm is not None and torch.equal(late.grad_norm, plain.grad_norm)


@pytest.mark.parametrize("how", WAYS, ids=lambda how: how.mode)
def test_every_layer_waits_for_its_own(how: Offload, monkeypatch: pytest.MonkeyPatch) -> None:
    marks: list[int] = []  # those that were made, of those that were waited for their numbers
    waited: set[int] = set()
    monkeypatch.setattr(OneLane, "mark", lambda self, lane, timed=False: marks.append(len(marks)) or len(marks) - 1)
    monkeypatch.setattr(OneLane, "join", lambda self, mark: waited.add(mark))
    model = make("cpu")
    optimizer = AdamW(model.parameters(), 1e-2, offload=how)
    overlap = overlap_forward(optimizer, model)
    model(torch.randn(4, 24)).sum().backward()
    optimizer.step()
    assert all(parameter.grad is None for parameter in model.parameters())
    (states,) = optimizer._offloaded.all()
    of = states.slabs.subgroups_of
    needed = {name: {states._updated[one] for one in of[p]} for name, p in model.named_parameters()}
    assert all(needed.values()) and not waited & set().union(*needed.values()), "nothing waits before forward"

    def check(name: str) -> Any:
        def hook(module: nn.Module, _args: Any) -> None:
            assert all(needed[f"{name}.{own}"] <= waited for own, _ in module.named_parameters(recurse=False))
            if name == "0.0":
                assert not needed["2.2.weight"] <= waited, "the last layer's weights have time"

        return hook

    checks = [module.register_forward_pre_hook(check(name)) for name, module in model.named_modules()]
    model(torch.randn(4, 24))
    for handle in checks:
        handle.remove()
    overlap.remove()
    model(torch.randn(4, 24)).sum().backward()
    optimizer.step()
    assert not states._updated, "all are waited for again"


def test_what_cannot_be_is_named() -> None:
    model = make("cpu")
    with pytest.raises(TypeError, match="with offload"):
        overlap_forward(AdamW(model.parameters()), model)
    with pytest.raises(ValueError, match="not the model's"):
        overlap_forward(AdamW(make("cpu").parameters(), offload="stream"), model)
    optimizer = AdamW(model.parameters(), lr=torch.tensor(1e-3), offload="stream")
    with overlap_forward(optimizer, model), pytest.raises(RuntimeError, match="lr is a tensor"):
        train(model, optimizer, "cpu", 1)
    optimizer = AdamW(model.parameters(), offload="stream")
    optimizer.grad_scale = torch.tensor(2.0)  # type: ignore[attr-defined]
    with overlap_forward(optimizer, model), pytest.raises(RuntimeError, match="GradScaler"):
        train(model, optimizer, "cpu", 1)
    copied = copy.deepcopy(model)
    train(copied, AdamW(copied.parameters(), offload="stream"), "cpu", 1)
