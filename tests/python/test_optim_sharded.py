"""Optimizers of sharded parameters (FSDP2), in two processes: the numbers are those of the whole model."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from kernel_pytorch.optim import SGD, AdamW, Lion, Offload, clip_grad_norm_
from kernel_pytorch.optim.offload.pipeline import OffloadedStates
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

    # States on the host: the bits of states beside the parameters, and checkpoints of either continue in the other.
    # A CPU stands in the device's place, with all copies.
    made = OffloadedStates.__init__

    def staged(self: OffloadedStates, *arguments: Any) -> None:
        made(self, *arguments)
        self._is_direct = False

    for how, is_staged in ((Offload("host", 32), False), (Offload("interleave", 32, device_share=0.5), True)):
        OffloadedStates.__init__ = staged if is_staged else made  # type: ignore[method-assign]
        models = [sharded() for _ in range(3)]
        resident = AdamW(models[0].parameters(), 1e-2, max_grad_norm=0.1)
        offloaded, resumed = (AdamW(one.parameters(), 1e-2, max_grad_norm=0.1, offload=how) for one in models[1:])
        for model, optimizer in zip(models[:2], (resident, offloaded), strict=True):
            train(model, optimizer, 2)
        models[2].load_state_dict(models[1].state_dict())
        saved = get_optimizer_state_dict(models[1], offloaded)
        averages = [value["exp_avg"] for value in saved["state"].values()]
        assert all(isinstance(one, DTensor) and one.device.type == "cpu" for one in averages)
        set_optimizer_state_dict(models[2], resumed, saved)
        for model, optimizer in zip(models, (resident, offloaded, resumed), strict=True):
            train(model, optimizer, 2)
        for whole, *others in zip(*(model.parameters() for model in models), strict=True):
            assert all(torch.equal(whole.full_tensor(), other.full_tensor()) for other in others)

        # Replicated: DistributedDataParallel reduces what the CPU is sent.
        plain = copy.deepcopy(base)
        replicated = torch.nn.parallel.DistributedDataParallel(copy.deepcopy(base))
        train(plain, AdamW(plain.parameters(), 1e-2), 2)
        train(replicated, AdamW(replicated.parameters(), 1e-2, offload=how), 2)
        for p, q in zip(replicated.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)
    OffloadedStates.__init__ = made  # type: ignore[method-assign]

    for options, words in (({"state": "compact"}, "DTensor"), ({"state": "compact", "offload": "host"}, "DTensor")):
        model = sharded()
        refused = AdamW(model.parameters(), **options)
        with pytest.raises((RuntimeError, ValueError), match=words):
            train(model, refused, 1)
