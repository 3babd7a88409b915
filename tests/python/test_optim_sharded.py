"""Optimizers of sharded parameters (FSDP2), in two processes: the numbers are those of the whole model."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from kernel_pytorch.optim import SGD, AdamW, Lion, clip_grad_norm_
from ranks import member, spawn_to_the_end


def test_two_processes_step_as_one(tmp_path: Path) -> None:
    spawn_to_the_end(work, tmp_path, 2)


def work(rank: int, folder: str) -> None:
    with member(rank, folder, 2):
        step_as_one()


def step_as_one() -> None:
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    base = torch.nn.Sequential(torch.nn.Linear(13, 7), torch.nn.Tanh(), torch.nn.Linear(7, 1))  # odd: uneven shards
    x = torch.randn(5, 13)  # the same everywhere: the mean of gradients is each one

    def sharded() -> torch.nn.Module:
        model = copy.deepcopy(base)
        fully_shard(model, mesh=mesh)
        return model

    def train(model: torch.nn.Module, optimizer: Any, steps: int, clip: float | None = None) -> None:
        for step in range(steps):
            optimizer.zero_grad()
            (model(x) * (step + 1)).square().mean().backward()
            if clip is not None:
                clip_grad_norm_(model.parameters(), clip)
            optimizer.step()

    def assert_same(model: torch.nn.Module, whole: torch.nn.Module) -> None:
        for p, q in zip(model.parameters(), whole.parameters(), strict=True):
            torch.testing.assert_close(p.full_tensor(), q, rtol=1e-5, atol=1e-6)

    for kind, options in (
        (AdamW, {"max_grad_norm": 0.1, "amsgrad": True}),
        (AdamW, {"state_dtype": torch.bfloat16}),
        (Lion, {"max_grad_norm": 0.1}),
        (SGD, {"momentum": 0.9}),
    ):
        model, whole = sharded(), copy.deepcopy(base)
        ours, plain = kind(model.parameters(), 1e-2, **options), kind(whole.parameters(), 1e-2, **options)
        train(model, ours, 3)
        train(whole, plain, 3)
        assert_same(model, whole)
        states = [value for entry in ours.state.values() for name, value in entry.items() if name != "step"]
        assert states and all(isinstance(value, DTensor) for value in states)

    model, whole = sharded(), copy.deepcopy(base)
    train(model, AdamW(model.parameters(), 1e-2), 2, clip=0.05)
    train(whole, AdamW(whole.parameters(), 1e-2), 2, clip=0.05)
    assert_same(model, whole)

    # A checkpoint by torch's own functions, in the middle of a run.
    model = sharded()
    ours = AdamW(model.parameters(), 1e-2)
    train(model, ours, 2)
    resumed = copy.deepcopy(base)
    fully_shard(resumed, mesh=mesh)
    resumed.load_state_dict(model.state_dict())
    again = AdamW(resumed.parameters(), 1e-2)
    set_optimizer_state_dict(resumed, again, get_optimizer_state_dict(model, ours))
    train(model, ours, 2)
    train(resumed, again, 2)
    for p, q in zip(model.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(p.full_tensor(), q.full_tensor())

    for options, words in (({"state": "compact"}, "DTensor"), ({"offload": "host"}, "DTensor")):
        model = sharded()
        refused = AdamW(model.parameters(), **options)
        with pytest.raises((RuntimeError, ValueError), match=words):
            train(model, refused, 1)
