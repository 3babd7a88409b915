"""Adafactor against torch's: the same numbers, states that load both ways, more bits for bf16 weights."""

from __future__ import annotations

import copy

import pytest
import torch
from kernel_pytorch.optim import Adafactor, release_gradients
from torch import Tensor, nn

SHAPES = [(7, 5), (40, 300), (3, 4, 6), (17,), (), (1, 1), (64, 1)]


def parameters(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in SHAPES]


def set_gradients(all_of: list[list[nn.Parameter]], step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    for shape, *alike in zip(SHAPES, *all_of, strict=True):
        gradient = torch.randn(shape, generator=generator) * 10.0 ** (step % 3 - 1)
        for parameter in alike:
            parameter.grad = gradient.to(parameter.dtype)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"lr": torch.tensor(0.3)},
        {"lr": 0.3, "weight_decay": 0.1},
        {"eps": (1e-3, 0.5), "d": 2.0},
        {"maximize": True, "beta2_decay": -0.5},
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_numbers_are_torchs(options: dict, dtype: torch.dtype) -> None:
    exact, mine = parameters(dtype), parameters(dtype)
    ours, theirs = Adafactor(mine, **options), torch.optim.Adafactor(exact, **options)
    for step in range(4):
        set_gradients([mine, exact], step)
        ours.step()
        theirs.step()
        for a, b in zip(mine, exact, strict=True):
            # torch keeps averages of bf16 gradients in bf16.
            limit = dict(rtol=2e-5, atol=1e-6) if dtype is torch.float32 else dict(rtol=3e-2, atol=3e-2)
            torch.testing.assert_close(a, b, **limit)


def test_states_load_from_and_into_torchs() -> None:
    first, second = parameters(), parameters()
    ours, theirs = Adafactor(first), torch.optim.Adafactor(second)
    set_gradients([first, second], 0)
    ours.step()
    theirs.step()
    from_torch, to_torch = Adafactor(parameters()), torch.optim.Adafactor(parameters())
    from_torch.load_state_dict(copy.deepcopy(theirs.state_dict()))
    to_torch.load_state_dict(copy.deepcopy(ours.state_dict()))
    for new, old in ((from_torch, theirs), (to_torch, ours)):
        for a, b in zip(new.param_groups[0]["params"], old.param_groups[0]["params"], strict=True):
            a.data.copy_(b)
    groups = [one.param_groups[0]["params"] for one in (ours, theirs, from_torch, to_torch)]
    set_gradients(groups, 1)
    for one in (ours, theirs, from_torch, to_torch):
        one.step()
    for alike in zip(*groups, strict=True):
        for one in alike[1:]:
            torch.testing.assert_close(one, alike[0], rtol=2e-5, atol=1e-6)


def test_compact_weights_keep_small_steps() -> None:
    def trained(state: str) -> Tensor:
        weight = nn.Parameter(torch.ones(64, 64, dtype=torch.bfloat16))
        optimizer = Adafactor([weight], lr=1e-4, state=state)
        for _ in range(30):
            weight.grad = torch.ones_like(weight)
            optimizer.step()
        return weight.detach().float()

    assert torch.equal(trained("fp32"), torch.ones(64, 64)), "a step is below half a unit of bf16"
    torch.testing.assert_close(trained("compact"), torch.full((64, 64), 1 - 30e-4), rtol=0, atol=4e-3)
    assert bool((trained("compact") < 1).all())


def test_clipping_and_release() -> None:
    clipped, plain, released = parameters(), parameters(), parameters()
    ours, theirs = Adafactor(clipped, max_grad_norm=0.5), Adafactor(plain)
    set_gradients([clipped, plain], 1)
    torch.nn.utils.clip_grad_norm_(plain, 0.5)
    ours.step()
    theirs.step()
    for a, b in zip(clipped, plain, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    with release_gradients(Adafactor(released)) as _:
        sum(parameter.sum() for parameter in released).backward()
    assert all(parameter.grad is None for parameter in released)


def test_refusals() -> None:
    with pytest.raises(ValueError, match="averages are few numbers"):
        Adafactor(parameters(), state="8bit")
    with pytest.raises(ValueError, match=r"d is 0\.5"):
        Adafactor(parameters(), d=0.5)
