"""distributed_scale: a model on a mesh has the gradients of one process; predictions follow their formula."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as distributed
from kernel_pytorch.attention.distributed import create_context_parallel_attention, shard_sequence
from kernel_pytorch.distributed_scale import (
    Links,
    MeasuredStep,
    create_device_mesh,
    data_mesh,
    estimate_scaling,
    measure_step,
    parallelize,
)
from kernel_pytorch.mixture_of_experts import MoELayer
from ranks import member, spawn_to_the_end
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

MEMBERS, WIDTH, EXPERTS = 4, 16, 4
PLAN = {"blocks.*.0": ColwiseParallel(), "blocks.*.2": RowwiseParallel()}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, WIDTH)) for _ in range(2)
        )
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def samples(rank: int) -> Tensor:
    return torch.randn(3, 8, WIDTH, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)


def gradients_of(model: nn.Module, inputs: list[Tensor]) -> dict[str, Tensor]:
    """Of the mean loss of all inputs, by one process."""
    whole = copy.deepcopy(model)
    torch.stack([whole(x).square().mean() for x in inputs]).mean().backward()
    return {name: parameter.grad for name, parameter in whole.named_parameters()}


def assert_gradients(model: nn.Module, expected: dict[str, Tensor], rtol: float = 1e-9) -> None:
    for name, parameter in model.named_parameters():
        gradient = parameter.grad.full_tensor() if isinstance(parameter.grad, DTensor) else parameter.grad
        torch.testing.assert_close(gradient, expected[name.removeprefix("module.")], rtol=rtol, atol=1e-3 * rtol)


def make() -> Net:
    torch.manual_seed(0)
    return Net().double()


def check_data_and_tensor() -> None:
    for sizes, plan in (
        (dict(shard=-1), None), (dict(shard=1, replicate=4), None), (dict(shard=2, replicate=2), None),
        (dict(shard=2, tensor=2), PLAN), (dict(shard=1, tensor=4), PLAN),
    ):  # fmt: skip
        mesh = create_device_mesh(**sizes, device="cpu")
        model, data = make(), data_mesh(mesh)
        devices = 1 if data is None else data.size()
        place = distributed.get_rank() // (MEMBERS // devices)  # those of a product have the same samples
        expected = gradients_of(model, [samples(i) for i in range(devices)])
        changed = parallelize(model, mesh, tensor_plan=plan)
        assert isinstance(changed, nn.parallel.DistributedDataParallel) == (mesh.mesh_dim_names == ("replicate",))
        if "shard" in mesh.mesh_dim_names:
            assert isinstance(model.blocks[0][0].weight, DTensor)
        changed(samples(place)).square().mean().backward()
        assert_gradients(changed, expected)
    with pytest.raises(ValueError, match="no tensor_plan"):
        parallelize(make(), create_device_mesh(tensor=4, shard=1, device="cpu"))
    with pytest.raises(ValueError, match="no dimension 'tensor'"):
        parallelize(make(), create_device_mesh(device="cpu"), tensor_plan=PLAN)
    for sizes in (dict(shard=3), dict(shard=-1, tensor=-1), dict(shard=0), dict(shard=2)):
        with pytest.raises(ValueError, match="create_device_mesh"):
            create_device_mesh(**sizes, device="cpu")


class Attending(nn.Module):
    def __init__(self, group: Any) -> None:
        super().__init__()
        size = 1 if group is None else 2
        torch.manual_seed(0)
        options = dict(causal=True, sharded=True, schedule="ring")
        self.attention = create_context_parallel_attention(WIDTH, 2, size, group=group, **options)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x)


def check_context() -> None:
    """Two pairs: each pair has its samples, each of the pair half of their sequence."""
    mesh = create_device_mesh(shard=2, context=2, device="cpu")
    pair, group = distributed.get_rank() // 2, mesh.get_group("context")
    model, whole = Attending(group).double(), Attending(None).double()
    whole.load_state_dict(model.state_dict())
    expected = gradients_of(whole, [samples(0), samples(1)])
    parallelize(model, mesh)
    model(shard_sequence(samples(pair), 1, group=group, schedule="ring")).square().mean().backward()
    assert_gradients(model, expected)


class Routed(nn.Module):
    def __init__(self, group: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.head = nn.Linear(WIDTH, WIDTH)
        self.experts = MoELayer(WIDTH, 8, EXPERTS, 2, group=group)

    def forward(self, x: Tensor) -> Tensor:
        return self.experts(self.head(x))


def check_experts(rank: int) -> None:
    for sizes in (dict(shard=4), dict(replicate=4, shard=1)):
        mesh = create_device_mesh(**sizes, device="cpu")
        model, whole = Routed(mesh.get_group(0)), Routed(None)  # fp32: routers take no fp64
        own = slice(rank * EXPERTS // MEMBERS, (rank + 1) * EXPERTS // MEMBERS)
        model.head.load_state_dict(whole.head.state_dict())
        model.experts.router.load_state_dict(whole.experts.router.state_dict())
        with torch.no_grad():
            model.experts.gate_up.copy_(whole.experts.gate_up[own])
            model.experts.down.copy_(whole.experts.down[own])
        expected = gradients_of(whole, [samples(i).float() for i in range(MEMBERS)])
        for name in ("experts.gate_up", "experts.down"):
            expected[name] = expected[name][own]
        changed = parallelize(model, mesh, blocks=[])
        for _ in range(2):  # the second adds to the first
            changed(samples(rank).float()).square().mean().backward()
        assert_gradients(changed, {name: 2 * gradient for name, gradient in expected.items()}, 1e-4)


def work(rank: int, folder: str) -> None:
    with member(rank, folder, MEMBERS):
        check_data_and_tensor()
        check_context()
        check_experts(rank)


@pytest.mark.skipif(not distributed.is_gloo_available(), reason="torch has no gloo here")
def test_a_model_on_a_mesh_has_the_gradients_of_one_process(tmp_path: Path) -> None:
    spawn_to_the_end(work, tmp_path, MEMBERS)


def test_a_mesh_needs_processes() -> None:
    with pytest.raises(RuntimeError, match="torchrun"):
        create_device_mesh()


def test_a_step_is_measured() -> None:
    model, x = make(), samples(0)
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        model(x).square().mean().backward()
        optimizer.step()

    measured = measure_step(model, step, tokens=24, optimizer=optimizer)
    count = sum(parameter.numel() for parameter in model.parameters())
    assert measured.seconds > 0 and measured.blocks == 2 and measured.parameter_bytes == 8 * count
    assert 16 * count <= measured.state_bytes < 17 * count  # two moments, and counts of steps


def test_predictions_follow_the_formula() -> None:
    step = MeasuredStep(0.1, 1000, 10**9, 10**9, blocks=10)
    free = Links(latency_seconds=1e-30)
    one, eight, sixteen = estimate_scaling(step, links=free, devices=(1, 8, 16)).rows
    assert one.efficiency == 1 and one.tokens_per_second == pytest.approx(10000)
    assert eight.communication_seconds == pytest.approx(3e9 * 7 / 8 / 450e9)
    assert eight.step_seconds == pytest.approx(0.1 + eight.communication_seconds / 10)
    assert sixteen.communication_seconds == pytest.approx(3e9 * 15 / 16 / 50e9)
    assert sixteen.memory_bytes == pytest.approx(2e9 / 16)
    bound = estimate_scaling(MeasuredStep(1e-3, 1000, 10**9, 10**9), links=free, devices=(16,)).rows[0]
    assert bound.step_seconds == pytest.approx(2 * bound.communication_seconds)  # one block hides nothing
    hybrid = estimate_scaling(step, strategy="hsdp", links=free, devices=(16,)).rows[0]
    assert hybrid.communication_seconds == pytest.approx(3e9 * 7 / 8 / 450e9 + 2e9 / 8 / 2 / 50e9)
    assert estimate_scaling(step, strategy="ddp", links=free, devices=(8,)).rows[0].memory_bytes == 2e9
    table = str(estimate_scaling(step))
    assert table.startswith("Predicted, not measured") and len(table.splitlines()) == 11
    with pytest.raises(ValueError, match="ddp, fsdp, hsdp"):
        estimate_scaling(step, strategy="zero")
    with pytest.raises(ValueError, match="positive"):
        MeasuredStep(0, 1, 1, 1)
    with pytest.raises(ValueError, match="positive"):
        Links(per_node=0)
