"""Experts on four gloo ranks against one process: outputs, all gradients, ranks without tokens, capacities, FSDP."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as distributed
from kernel_pytorch.mixture_of_experts import MoELayer, expert_parallel_mlp
from ranks import member, spawn_to_the_end
from torch import Tensor

from kernel_pytorch import functional as F

pytestmark = pytest.mark.skipif(not distributed.is_gloo_available(), reason="torch has no gloo here")
MEMBERS, LOCAL, SIZE, INNER = 4, 2, 12, 8
EXPERTS = MEMBERS * LOCAL
TOKENS = (37, 0, 5, 64)  # of each rank


def _random(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _experts() -> dict[str, Tensor]:
    return {
        "gate_up": _random(1, EXPERTS, SIZE, 2 * INNER), "down": _random(2, EXPERTS, INNER, SIZE),
        "gate_up_bias": _random(3, EXPERTS, 2 * INNER), "down_bias": _random(4, EXPERTS, SIZE),
    }  # fmt: skip


def _logits(rank: int, unused: bool) -> Tensor:
    logits = _random(20 + rank, TOKENS[rank], EXPERTS)
    if unused:  # all of one rank's experts, and one of another's
        logits[:, LOCAL : 2 * LOCAL], logits[:, -1] = -50.0, -50.0
    return logits


def _step(rank: int, experts: dict[str, Tensor], options: dict[str, Any], mlp: Any) -> list[Tensor]:
    """A rank's output and the gradients of its tokens, logits and experts."""
    x = _random(10 + rank, TOKENS[rank], SIZE).requires_grad_()
    logits = _logits(rank, options["unused"]).requires_grad_()
    leaves = [x, logits, *(value.requires_grad_() for value in experts.values())]
    routing = F.route(logits, options["k"], capacity=options["capacity"])
    output = mlp(x, routing, **experts)
    return [output.detach(), *torch.autograd.grad(output, leaves, _random(30 + rank, TOKENS[rank], SIZE))]


def _check_against_one_process(rank: int, options: dict[str, Any]) -> None:
    alone = [_step(r, _experts(), options, F.moe_mlp) for r in range(MEMBERS)]
    own = slice(rank * LOCAL, (rank + 1) * LOCAL)
    mine = {name: value[own].clone() for name, value in _experts().items()}
    for parts in (1, 2):
        mlp = functools.partial(expert_parallel_mlp, parts=parts)
        found, again = (_step(rank, mine, options, mlp) for _ in range(2))
        assert all(torch.equal(one, other) for one, other in zip(found, again))
        for one, other in zip(found[:3], alone[rank]):
            torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-11)
        for i, one in enumerate(found[3:], 3):  # of all ranks' tokens
            torch.testing.assert_close(one, sum(step[i][own] for step in alone), rtol=1e-11, atol=1e-11)


def _check_layer_under_fsdp(rank: int) -> None:
    """Two ranks share the experts, two pairs of them share the parameters' memory."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    mesh = distributed.init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "experts"))
    group = mesh["experts"].get_group()
    layer = MoELayer(SIZE, INNER, EXPERTS, 3, group=group, dtype=torch.float32)
    whole = MoELayer(SIZE, INNER, EXPERTS, 3, dtype=torch.float32)
    for i, one in enumerate(whole.parameters()):
        one.data = _random(50 + i, *one.shape).float() * 0.3
    place = distributed.get_rank(group)
    own = slice(place * EXPERTS // 2, (place + 1) * EXPERTS // 2)
    layer.router.weight.data = whole.router.weight.data.clone()
    layer.gate_up.data, layer.down.data = whole.gate_up.data[own].clone(), whole.down.data[own].clone()
    fully_shard(layer.router, mesh=distributed.init_device_mesh("cpu", (MEMBERS,)))
    fully_shard(layer, mesh=mesh["data"])
    xs = [_random(60 + r, 9 + r, SIZE).float() for r in range(MEMBERS)]
    output = layer(xs[rank])
    torch.testing.assert_close(output, whole(xs[rank]).detach(), rtol=1e-5, atol=1e-5)
    output.square().sum().backward()
    sum(whole(x).square().sum() for x in xs).backward()
    # FSDP divides by the ranks that it reduces over: four for the router, two for the experts.
    for one, expected, ranks in (
        (layer.router.weight, whole.router.weight.grad, 4),
        (layer.gate_up, whole.gate_up.grad[own], 2),
        (layer.down, whole.down.grad[own], 2),
    ):
        assert isinstance(one.grad, DTensor)
        torch.testing.assert_close(one.grad.full_tensor(), expected / ranks, rtol=1e-4, atol=1e-5)


def _work(rank: int, folder: str) -> None:
    with member(rank, folder, MEMBERS):
        for options in (
            dict(k=3, capacity=None, unused=False), dict(k=1, capacity=None, unused=True),
            dict(k=2, capacity=6, unused=True), dict(k=5, capacity=3, unused=False),
        ):  # fmt: skip
            _check_against_one_process(rank, options)
        mine = {name: value[rank * LOCAL : (rank + 1) * LOCAL].clone() for name, value in _experts().items()}
        with pytest.raises(ValueError, match="4 ranks with 1 experts each have 4, the routing is among 8"):
            x = _random(1, 3, SIZE)
            expert_parallel_mlp(x, F.route(_random(2, 3, EXPERTS), 2), mine["gate_up"][:1], mine["down"][:1])
        with pytest.raises(ValueError, match="parts is 3"):
            expert_parallel_mlp(x, F.route(_random(2, 3, EXPERTS), 2), mine["gate_up"], mine["down"], parts=3)
        _check_layer_under_fsdp(rank)


def test_experts_on_four_ranks_are_those_of_one_process(tmp_path: Path) -> None:
    spawn_to_the_end(_work, tmp_path, MEMBERS)


def test_a_compiled_function_calls_it_as_it_is(tmp_path: Path) -> None:
    def layer(x: Tensor, routing: Any, **experts: Tensor) -> Tensor:
        return 2 * expert_parallel_mlp(2 * x, routing, **experts, parts=2)

    options = dict(k=2, capacity=None, unused=False)
    threads = torch.get_num_threads()
    with member(0, str(tmp_path), 1):
        found, expected = (_step(0, _experts(), options, one) for one in (torch.compile(layer, backend="eager"), layer))
    torch.set_num_threads(threads)
    assert all(torch.equal(one, other) for one, other in zip(found, expected))
