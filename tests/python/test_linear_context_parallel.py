"""Linear attention and the delta rule over gloo: runs of a sequence give what one process gives, with all gradients."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as distributed
from kernel_pytorch.attention.distributed import (
    ContextParallelError,
    context_parallel_delta_rule,
    context_parallel_linear_attention,
    linear,
)
from ranks import member, spawn_to_the_end

from kernel_pytorch import functional as F

pytestmark = pytest.mark.skipif(not distributed.is_gloo_available(), reason="torch has no gloo here")
ENDS = [0, 50, 50, 87]  # of runs: one has no tokens
COLUMNS, VALUES, HEADS = 12, 8, 4


def _cases() -> dict[str, tuple[str, dict[str, Any]]]:
    tokens = ENDS[-1]
    gate, channels = -torch.rand(2, tokens, HEADS), -torch.rand(2, tokens, HEADS, COLUMNS)
    state, decay = torch.randn(2, HEADS, COLUMNS, VALUES), -torch.rand(HEADS)
    return {
        "plain": ("linear", {}),
        "lightning": ("linear", {"decay": decay, "initial_state": state}),
        "gate and decay": ("linear", {"gate": gate, "decay": decay}),
        "GLA": ("linear", {"gate": channels, "initial_state": state}),
        "normalised": ("linear", {"gate": gate, "normalize": True}),
        "DeltaNet": ("delta", {"initial_state": state}),
        "GDN": ("delta", {"gate": gate, "normalize_qk": True}),
        "KDA": ("delta", {"gate": channels, "initial_state": state, "mode": "recurrent"}),
    }


def _equal_one_process(rank: int) -> None:
    torch.manual_seed(5)
    cases = _cases()
    for name, (kind, options) in cases.items():
        query, key = (torch.rand(2, ENDS[-1], HEADS // 2, COLUMNS) for _ in range(2))
        value = torch.randn(2, ENDS[-1], HEADS, VALUES)
        tensors = {"query": query, "key": torch.nn.functional.normalize(key, dim=-1), "value": value}
        if kind == "delta":
            tensors["beta"] = torch.rand(2, ENDS[-1], HEADS)
        whole = F.linear_attention if kind == "linear" else F.delta_rule
        parts = context_parallel_linear_attention if kind == "linear" else context_parallel_delta_rule
        learned = {**tensors, **{key: x for key, x in options.items() if isinstance(x, torch.Tensor)}}
        leaves = {key: x.clone().requires_grad_() for key, x in learned.items()}
        output, state = whole(**{**options, **leaves}, return_state=True)
        weights, state_weights = torch.randn_like(output), torch.randn_like(state)
        expected = torch.autograd.grad((output * weights).sum() + (state * state_weights).sum(), list(leaves.values()))

        cut = slice(ENDS[rank], ENDS[rank + 1])
        mine = {
            key: (x[:, cut] if x.dim() > 1 and key != "initial_state" else x).clone().requires_grad_()
            for key, x in learned.items()
        }
        run, end = parts(**{**options, **mine}, group=distributed.group.WORLD, return_state=True)
        torch.testing.assert_close(run, output[:, cut], rtol=1e-4, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")
        torch.testing.assert_close(end, state, rtol=1e-4, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")
        loss = (run * weights[:, cut]).sum()
        if rank == len(ENDS) - 2:
            loss = loss + (end * state_weights).sum()
        found = torch.autograd.grad(loss, list(mine.values()))
        for (key, _), gradient, wanted in zip(mine.items(), found, expected, strict=True):
            if key in ("decay", "initial_state"):
                distributed.all_reduce(gradient)
            else:
                wanted = wanted[:, cut]
            torch.testing.assert_close(
                gradient, wanted, rtol=1e-3, atol=1e-4, msg=lambda m, n=name, k=key: f"{n}, {k}: {m}"
            )


def _who_differs_is_named(rank: int) -> None:
    heads = [
        torch.randn(1, 5 + rank, 2, 8 if rank else 4),
        torch.randn(1, 5 + rank, 2, 8),
        torch.randn(1, 5 + rank, 2, 8),
    ]
    with pytest.raises(ContextParallelError, match="query must be the same on all ranks of the group; rank 0 has"):
        context_parallel_linear_attention(*heads, group=distributed.group.WORLD)

    # A state of another type has other bytes, and who alone wants a gradient would wait for the others.
    heads = [torch.randn(1, 5 + rank, 2, 8) for _ in range(3)]
    state, decay = torch.zeros(1, 2, 8, 8), -torch.rand(2)
    for name, here, there in (
        ("decay", {"decay": decay}, {}),
        ("decay", {"decay": decay}, {"decay": decay.double()}),
        ("initial_state", {"initial_state": state}, {"initial_state": state.double()}),
        ("gradients", {"initial_state": state}, {"initial_state": state.clone().requires_grad_()}),
    ):
        with pytest.raises(ContextParallelError, match=f"{name} must be the same on all ranks"):
            context_parallel_linear_attention(*heads, group=distributed.group.WORLD, **(there if rank == 1 else here))


def _autocast_leaves_states_alone(rank: int) -> None:
    torch.manual_seed(6)
    heads = [torch.nn.functional.normalize(torch.randn(1, 60, 2, 16), dim=-1) for _ in range(3)]
    beta = torch.rand(1, 60, 2)
    mine = [x[:, rank * 20 : (rank + 1) * 20] for x in (*heads, beta)]
    with torch.autocast("cpu", torch.bfloat16):
        state = F.delta_rule(*heads, beta, return_state=True)[1]
        found = context_parallel_delta_rule(*mine, group=distributed.group.WORLD, return_state=True)[1]
    torch.testing.assert_close(found, state, rtol=1e-4, atol=1e-5)


def _no_call_has_more_values_than_the_run(rank: int) -> None:
    heads = [torch.randn(1, 4, 1, size) for size in (12, 12, 250)]
    sizes = []

    def noted(*args: Any, **options: Any) -> Any:
        sizes.append(args[2].shape[-1])
        return F.delta_rule(*args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(linear, "delta_rule", noted)
        context_parallel_delta_rule(*heads, torch.rand(1, 4, 1), group=distributed.group.WORLD)
    assert max(sizes) == 250  # gradients on CUDA take 256


def _gradients_are_of_the_first_order(rank: int) -> None:
    heads, state = [torch.randn(1, 4, 1, 8) for _ in range(3)], torch.randn(1, 1, 8, 8, requires_grad=True)
    options = {"initial_state": state, "group": distributed.group.WORLD, "return_state": True}
    end = context_parallel_linear_attention(*heads, **options)[1]
    (grad,) = torch.autograd.grad(end.square().sum(), state, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


def _work(rank: int, folder: str) -> None:
    with member(rank, folder, len(ENDS) - 1):
        _equal_one_process(rank)
        _who_differs_is_named(rank)
        _autocast_leaves_states_alone(rank)
        _no_call_has_more_values_than_the_run(rank)
        _gradients_are_of_the_first_order(rank)


def test_runs_of_a_sequence_are_one_process(tmp_path: Path) -> None:
    spawn_to_the_end(_work, tmp_path, len(ENDS) - 1)


def test_one_process_is_the_function() -> None:
    heads = [torch.randn(1, 9, 2, 8) for _ in range(3)]
    assert context_parallel_linear_attention(*heads, group=None).equal(F.linear_attention(*heads))
