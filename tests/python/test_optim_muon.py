"""Muon against torch.optim.Muon: values, states both ways, orthogonality, bad input."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from kernel_pytorch.optim import Muon
from kernel_pytorch.optim.muon import orthogonalized
from torch import Tensor

SHAPES = [(64, 32), (32, 64), (64, 32), (48, 48), (1, 16)]


def make(seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]


def set_gradients(step: int, *lists: list[Tensor]) -> None:
    generator = torch.Generator().manual_seed(step)
    for together in zip(*lists, strict=True):
        gradient = torch.randn(together[0].shape, generator=generator)
        for parameter in together:
            parameter.grad = gradient.clone()


@pytest.mark.parametrize(
    "options", [dict(), dict(nesterov=False), dict(adjust_lr_fn="match_rms_adamw"), dict(ns_steps=2, weight_decay=0.0)]
)
def test_follows_torch(options: dict[str, Any]) -> None:
    ours, theirs = make(), make()
    mine, reference = Muon(ours, lr=0.02, **options), torch.optim.Muon(theirs, lr=0.02, **options)
    scale = 0.02 * (0.2 * 8 if "adjust_lr_fn" in options else 2**0.5)
    for step in range(4):
        set_gradients(step, ours, theirs)
        mine.step()
        reference.step()
    for a, b in zip(ours, theirs, strict=True):  # elements of an update are below 1, and bf16 in every product
        assert (a - b).abs().max() < 4 * scale * 0.02
        torch.testing.assert_close(
            mine.state[a]["momentum_buffer"], reference.state[b]["momentum_buffer"], rtol=1e-5, atol=1e-6
        )
    copies = [[torch.nn.Parameter(p.detach().clone()) for p in theirs] for _ in range(2)]
    again = [Muon(copies[0], lr=1.0, **options), torch.optim.Muon(copies[1], lr=1.0, **options)]
    again[0].load_state_dict(copy.deepcopy(reference.state_dict()))
    again[1].load_state_dict(copy.deepcopy(mine.state_dict()))
    set_gradients(9, *copies)
    for optimizer in again:
        optimizer.step()
    for a, b in zip(*copies, strict=True):
        assert (a - b).abs().max() < scale * 0.03


def test_singular_values_are_near_one() -> None:
    x = torch.randn(3, 40, 100, generator=torch.Generator().manual_seed(1))
    for matrices in (x, x.mT):
        values = torch.linalg.svdvals(orthogonalized(matrices, (3.4445, -4.7750, 2.0315), 5, 1e-7).float())
        assert (values > 0.5).all() and (values < 1.3).all()
    zero = orthogonalized(torch.zeros(1, 4, 6), (3.4445, -4.7750, 2.0315), 5, 1e-7)
    assert (zero == 0).all()


def test_bad_input_is_named() -> None:
    matrix = torch.nn.Parameter(torch.ones(3, 4))
    for options, text in [
        (dict(lr=-1.0), "lr is -1.0"),
        (dict(ns_steps=100), "ns_steps is 100"),
        (dict(adjust_lr_fn="other"), 'adjust_lr_fn is "other"'),
        (dict(ns_coefficients=(1.0, 2.0)), "ns_coefficients has 2 numbers"),
    ]:
        with pytest.raises(ValueError, match=text):
            Muon([matrix], **options)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"shape \[3\]; it takes matrices"):
        Muon([torch.nn.Parameter(torch.ones(3))])
