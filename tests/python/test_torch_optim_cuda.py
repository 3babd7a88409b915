"""kernel_pytorch.optim on a GPU against itself on the CPU: values, random lists, norms, CUDA graphs, long lists."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
import torch
from kernel_pytorch._ops.optimizer_step import reduce_norm
from kernel_pytorch.optim import SGD, AdamW, Lion
from optim_parameters import assert_same, make_parameters, set_gradients
from torch import Tensor

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("amsgrad,state", list(itertools.product([False, True], [torch.float32, torch.bfloat16])))
def test_gpu_follows_cpu(amsgrad: bool, state: torch.dtype) -> None:
    for dtype, master in [(torch.float32, False), (torch.bfloat16, False), (torch.bfloat16, True)]:
        options: dict[str, Any] = dict(lr=0.02, amsgrad=amsgrad, state_dtype=state, master_weights=master)
        options |= dict(stochastic_rounding=dtype is torch.bfloat16, seed=4, max_grad_norm=3.0)
        cpu, gpu = make_parameters(dtype), make_parameters(dtype, "cuda")
        optimizers = AdamW(cpu, **options), AdamW(gpu, **options)
        for step in range(5):
            set_gradients(step, cpu, gpu)
            for optimizer in optimizers:
                optimizer.step()
        exact = dtype is torch.float32 and state is torch.float32
        assert_same([p.cpu() for p in gpu], cpu, rtol=1e-5 if exact else 2e-2, atol=1e-5 if exact else 5e-2)
        assert optimizers[1].state[gpu[0]]["step"].item() == 5


def random_lists(seed: int) -> tuple[list[Tensor], list[Tensor], dict[str, Any]]:
    rng = random.Random(seed)
    torch.manual_seed(seed)
    dtype = rng.choice((torch.float32, torch.bfloat16, torch.float16))
    state = rng.choice((torch.float32, None) if dtype is torch.float16 else (torch.float32, torch.bfloat16, None))
    options = dict(lr=rng.choice((1e-4, 0.05)), amsgrad=rng.random() < 0.3, state_dtype=state, seed=seed)
    options |= dict(weight_decay=rng.choice((0.0, 0.1)), maximize=rng.random() < 0.2)
    options |= dict(master_weights=rng.random() < 0.3, stochastic_rounding=rng.random() < 0.3)
    options |= dict(max_grad_norm=rng.choice((None, 0.5, 1e4)))
    parameters, gradients = [], []
    for _ in range(rng.randint(1, 12)):
        offset, size = rng.choice((0, 0, 1, 3)), rng.choice((0, 1, 5, 2048, 2049, rng.randint(1, 9000)))
        parameters.append(torch.randn(size + offset).to(dtype)[offset:])  # some begin at odd addresses
        gradients.append(torch.randn(size).to(dtype))
    return parameters, gradients, options


def test_gpu_random_lists_follow_cpu() -> None:
    for seed in range(500):
        values, gradients, options = random_lists(seed)
        results = []
        for device in ("cpu", "cuda"):
            # A copy, also on the CPU; the slice of a larger tensor keeps its odd address.
            moved = [v._base.to(device, copy=True)[v.storage_offset() :] for v in values]
            parameters = [m.detach().requires_grad_() for m in moved]
            optimizer = AdamW(parameters, **options)
            for step in range(2):
                for parameter, gradient in zip(parameters, gradients, strict=True):
                    parameter.grad = (gradient * (1 + step)).to(device)
                optimizer.step()
            results.append([p.detach().cpu() for p in parameters])
        small = values[0].dtype is not torch.float32
        for ours, theirs in zip(*results, strict=True):
            rtol, atol = (2**-6, 2e-3 * (1 + 20 * options["lr"])) if small else (1e-5, 1e-5 + 1e-3 * options["lr"])
            torch.testing.assert_close(
                ours.float(), theirs.float(), rtol=rtol, atol=atol, msg=lambda m, s=seed: f"seed {s}: {m}"
            )


def test_gpu_norms_follow_float64() -> None:
    for seed in range(500):
        _, gradients, _ = random_lists(seed)
        norm = reduce_norm([g.cuda() for g in gradients])
        exact = torch.cat([g.double() for g in gradients]).norm()
        torch.testing.assert_close(norm.cpu().double(), exact, rtol=2e-6, atol=0.0)
        assert torch.equal(norm, reduce_norm([g.cuda() for g in gradients]))


def test_gpu_graph_replays_like_eager_steps() -> None:
    torch.manual_seed(0)
    eager = [torch.nn.Parameter(torch.randn(n, device="cuda", dtype=torch.bfloat16)) for n in (1000, 7, 50000)]
    graphed = [torch.nn.Parameter(p.detach().clone()) for p in eager]
    rates = [torch.tensor(0.01, device="cuda") for _ in range(2)]
    optimizers = [
        AdamW(p, lr=lr, stochastic_rounding=True, seed=8, max_grad_norm=1.0)
        for p, lr in zip((eager, graphed), rates, strict=True)
    ]
    gradients = [[torch.randn_like(p) for p in eager] for _ in range(6)]

    def load(parameters: list[Any], step: int) -> None:
        for parameter, gradient in zip(parameters, gradients[step], strict=True):
            if parameter.grad is None:
                parameter.grad = torch.empty_like(parameter)
            parameter.grad.copy_(gradient)

    for step in range(3):
        for parameters, optimizer in zip((eager, graphed), optimizers, strict=True):
            load(parameters, step)
            optimizer.step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimizers[1].step()
    for step in range(3, 6):
        for rate in rates:
            rate.mul_(0.5)
        load(eager, step)
        load(graphed, step)
        optimizers[0].step()
        graph.replay()
    for a, b in zip(eager, graphed, strict=True):
        assert torch.equal(a, b)
    assert optimizers[1].state[graphed[0]]["step"].item() == 6


def test_gpu_takes_more_parameters_than_a_launch() -> None:
    sizes = [(i * 37) % 2000 for i in range(950)]
    cpu = [torch.nn.Parameter(torch.randn(n)) for n in sizes]
    gpu = [torch.nn.Parameter(p.detach().cuda()) for p in cpu]
    optimizers = AdamW(cpu, lr=0.1, max_grad_norm=2.0), AdamW(gpu, lr=0.1, max_grad_norm=2.0)
    for _ in range(2):
        for a, b in zip(cpu, gpu, strict=True):
            a.grad = torch.randn_like(a)
            b.grad = a.grad.cuda()
        for optimizer in optimizers:
            optimizer.step()
    for a, b in zip(cpu, gpu, strict=True):
        torch.testing.assert_close(b.detach().cpu(), a.detach(), rtol=1e-5, atol=1e-5)
    assert {optimizers[1].state[p]["step"].item() for p in gpu} == {2.0}


@pytest.mark.parametrize("state", ["fp32", "compact", "8bit"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["adamw", "lion", "sgd"])
def test_steps_have_the_bits_of_the_cpu(name: str, dtype: torch.dtype, state: str) -> None:
    if name == "adamw" and state == "fp32":
        pytest.skip("an op of its own, whose bias corrections are fp32 on a GPU")
    make = {
        "adamw": lambda p: AdamW(p, lr=0.02, state=state, max_grad_norm=3.0),
        "lion": lambda p: Lion(p, lr=0.01, weight_decay=0.1, state=state),
        "sgd": lambda p: SGD(p, lr=0.05, momentum=0.9, nesterov=True, state=state),
    }[name]
    there, here = make_parameters(dtype, "cuda"), make_parameters(dtype)
    optimizers = [make(there), make(here)]
    for step in range(20):
        set_gradients(step, there, here)
        if name == "adamw":  # the norm is a sum of its own order: given, so that both clip by the same factor
            norm = torch.linalg.vector_norm(torch.cat([p.grad.float().flatten() for p in here]))
            for optimizer in optimizers:
                optimizer._total_norm = lambda norm=norm: norm
        for optimizer in optimizers:
            optimizer.step()
    for a, b in zip(there, here, strict=True):
        assert torch.equal(a.cpu(), b), a.shape
        for key, value in optimizers[0].state[a].items():
            assert torch.equal(value.cpu(), optimizers[1].state[b][key]), (a.shape, key)
