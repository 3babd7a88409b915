"""Gradient release: steps inside backward have the numbers of steps after it, and no gradient outlives them."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from kernel_pytorch.optim import SGD, AdamW, Lion, release_gradients
from torch import nn


def model() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Linear(48, 48), nn.GELU(), nn.Linear(48, 48), nn.GELU(), nn.Linear(48, 8)]
    network = nn.Sequential(*layers)
    network[2].weight = network[0].weight  # a gradient of two uses is complete after the second
    return network


@pytest.mark.parametrize(
    "make",
    [
        lambda p: AdamW(p, lr=1e-2),
        lambda p: AdamW(p, lr=1e-2, state="compact"),
        lambda p: Lion(p, lr=1e-3),
        lambda p: SGD(p, lr=1e-2, momentum=0.9),
    ],
)
def test_numbers_are_those_of_a_step_after_backward(make) -> None:
    released, plain = model(), model()
    optimizers = [make(network.parameters()) for network in (released, plain)]
    schedules = [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5) for optimizer in optimizers]
    alive = []

    def count_alive() -> None:
        alive.append(sum(p.grad is not None for p in released.parameters()))

    with release_gradients(optimizers[0]):
        for step in range(3):
            x = torch.randn(5, 48, generator=torch.Generator().manual_seed(step))
            for network, optimizer in zip((released, plain), optimizers, strict=True):
                loss = network(x).square().mean()
                if network is released:
                    handles = [p.register_hook(lambda _: count_alive()) for p in released.parameters()]
                loss.backward()
                if network is released:
                    assert all(p.grad is None for p in released.parameters())
                    for handle in handles:
                        handle.remove()
                optimizer.step()
                optimizer.zero_grad()
            for schedule in schedules:
                schedule.step()
    assert max(alive) <= 2  # one of a layer may be whole while the next is made
    for a, b in zip(released.parameters(), plain.parameters(), strict=True):
        assert torch.equal(a, b)
    released(x).sum().backward()  # it has ended: gradients stay
    assert all(p.grad is not None for p in released.parameters())


def test_what_cannot_work_is_refused(tmp_path) -> None:
    network = model()
    with pytest.raises(ValueError, match=r"max_grad_norm is 1.0, and the norm is not known"):
        release_gradients(AdamW(network.parameters(), max_grad_norm=1.0))
    with pytest.raises(TypeError, match="the optimizer is Adam;"):
        release_gradients(torch.optim.Adam(network.parameters()))  # type: ignore[arg-type]


@pytest.mark.parametrize("make", [AdamW, lambda p: AdamW(p, state="compact"), Lion, SGD])
def test_nothing_is_kept_alive(make) -> None:
    network = model()
    optimizer = make(network.parameters())
    release_gradients(optimizer)
    network(torch.randn(5, 48)).square().mean().backward()
    assert all(p.grad is None for p in network.parameters())
    parameters, held = [weakref.ref(p) for p in network.parameters()], weakref.ref(optimizer)
    del optimizer
    gc.collect()
    assert held() is None, "hooks hold the optimizer"
    with pytest.warns(UserWarning, match="nobody holds the optimizer"):
        network(torch.randn(5, 48)).square().mean().backward()
    assert all(p.grad is not None for p in network.parameters())
    del network
    gc.collect()
    assert all(p() is None for p in parameters)
