"""Our ops on DTensors, two gloo processes: every rule equals the whole and moves nothing; what has none says so."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import kernel_pytorch.functional as F
import pytest
import torch
import torch.distributed as distributed
from kernel_pytorch._ops.support import sharding
from ranks import member, spawn_to_the_end
from torch import Tensor

pytestmark = pytest.mark.skipif(not distributed.is_gloo_available(), reason="torch has no gloo here")
MEMBERS = 2
R, S = None, "sum"  # replicated; a part of a sum; a number is the dimension that is cut

# function of tensors, their shapes, placements of each, placements of the results; cut so, nothing has to move
Case = tuple[Callable[..., Any], list[tuple[int, ...]], list[tuple[list[Any], list[Any]]]]
X = (4, 6, 8)


def _indices(rows: Tensor, size: int) -> Tensor:
    """Integers out of random numbers, so that a case is of floating tensors alone."""
    return (rows.detach().abs() * 1e3).long() % size


def _rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Any:
    return F.rope(q, k, cos.detach(), sin.detach())


def _sum_of_losses(x: Tensor, t: Tensor) -> Tensor:
    return F.cross_entropy(x, _indices(t, 8), reduction="sum")


ROWS = [([0], [0]), ([1], [1])]
HEADS = [(4, 6, 4, 8), (4, 6, 2, 8), (4, 6, 2, 8)]
CASES: dict[str, Case] = {
    "rms_norm": (F.rms_norm, [X, (8,)], [([d, R], [d]) for d in (0, 1)]),
    "add_rms_norm": (lambda x, r, w: F.rms_norm(x, w, residual=r), [X, X, (8,)], [([d, d, R], [d, d]) for d in (0, 1)]),
    "layer_norm": (F.layer_norm, [X, (8,), (8,)], [([d, R, R], [d]) for d in (0, 1)]),
    "add_layer_norm": (
        lambda x, r, w, b: F.layer_norm(x, w, b, residual=r),
        [X, X, (8,), (8,)],
        [([d, d, R, R], [d, d]) for d in (0, 1)],
    ),
    "gelu": (F.gelu, [X], [([d], [d]) for d in (0, 1, 2)]),
    "activation": (
        lambda x, b, r: F.activation(x, "silu", bias=b, residual=r),
        [X, (8,), X],
        [([1, R, 1], [1]), ([2, 0, 2], [2])],
    ),
    "gated": (lambda g, u: F.gated_activation(g, u, "silu"), [X, X], [([d, d], [d]) for d in (0, 1, 2)]),
    "linear": (F.linear, [X, (10, 8)], [([0, R], [0]), ([1, R], [1]), ([R, 0], [2]), ([2, 1], [S])]),
    "linear with bias": (F.linear, [X, (10, 8), (10,)], [([1, R, R], [1]), ([R, 0, 0], [2]), ([2, 1, R], [S])]),
    "linear gelu": (
        lambda x, w, b: F.linear(x, w, b, activation="gelu"),
        [X, (10, 8), (10,)],
        [([1, R, R], [1]), ([R, 0, 0], [2])],
    ),
    "linear swiglu residual": (
        lambda x, w, r: F.linear(x, w, activation="swiglu", residual=r),
        [X, (16, 8), X],
        [([1, R, 1], [1]), ([R, 0, 2], [2])],
    ),
    "mlp": (
        lambda x, a, ba, b, bb, r: F.mlp(x, a, b, ba, bb, residual=r),
        [X, (12, 8), (12,), (8, 12), (8,), X],
        [([1, R, R, R, R, 1], [1]), ([R, 0, 0, 1, R, R], [S])],
    ),
    "mlp swiglu": (
        lambda x, a, b: F.mlp(x, a, b, activation="swiglu"),
        [X, (24, 8), (8, 12)],
        [([0, R, R], [0]), ([R, 0, 1], [S])],
    ),
    "matmul": (F.matmul, [(6, 8), (8, 4)], [([0, R], [0]), ([R, 1], [1]), ([1, 0], [S])]),
    "batched matmul": (F.matmul, [(2, 6, 8), (2, 8, 4)], [([0, 0], [0]), ([1, R], [1]), ([2, 1], [S])]),
    "rope": (
        _rope,
        [*HEADS[:2], (6, 8), (6, 8)],
        [([0, 0, R, R], [0, 0]), ([1, 1, 0, 0], [1, 1]), ([2, 2, R, R], [2, 2])],
    ),
    "softmax": (F.softmax, [X], ROWS),
    "causal softmax": (lambda x: F.softmax(x, causal=True, scale=0.5), [X], ROWS[:1]),
    "cross_entropy": (_sum_of_losses, [X, X[:2]], [([0, 0], [S]), ([1, 1], [S])]),
    "losses": (
        lambda x, t: F.cross_entropy(x, _indices(t, 8), reduction="none"),
        [X, X[:2]],
        [([0, 0], [0]), ([1, 1], [1])],
    ),
    "embedding": (lambda i, w: F.embedding(_indices(i, 10), w), [X[:2], (10, 8)], [([1, R], [1]), ([R, 1], [2])]),
    "attention": (
        lambda q, k, v: F.attention(q, k, v, layout="bshd", causal=True),
        HEADS,
        [([0, 0, 0], [0]), ([2, 2, 2], [2])],
    ),
    "attention with bias": (
        lambda q, k, v, b, s: F.attention(q, k, v, bias=b, sinks=s, return_lse=True),
        [(4, 4, 6, 8), (4, 2, 6, 8), (4, 2, 6, 8), (4, 6, 6), (4,)],
        [([0, 0, 0, R, R], [0, 0]), ([1, 1, 1, 0, 0], [1, 1])],
    ),
}


def _placement(where: Any) -> Any:
    from torch.distributed.tensor import Partial, Replicate, Shard

    return Replicate() if where is R else Partial() if where == S else Shard(where)


def _results(output: Any) -> list[Any]:
    return list(output) if isinstance(output, tuple) else [output]


def _check(name: str, mesh: Any) -> None:
    from torch.distributed.tensor import distribute_tensor
    from torch.distributed.tensor.debug import CommDebugMode

    function, shapes, ways = CASES[name]
    generator = torch.Generator().manual_seed(len(name))
    whole = [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]
    expected = _results(function(*whole))
    weights = [torch.randn(one.shape, generator=generator) for one in expected]
    sum((one * weight).sum() for one, weight in zip(expected, weights, strict=True)).backward()
    for inputs, outputs in ways:
        cut = [
            distribute_tensor(tensor.detach(), mesh, [_placement(where)]).requires_grad_()
            for tensor, where in zip(whole, inputs, strict=True)
        ]
        with CommDebugMode() as moved:
            found = _results(function(*cut))
        assert moved.get_total_counts() == 0, (name, inputs, moved.get_comm_counts())
        places = [one.placements[0] for one in found]
        assert places == [_placement(where) for where in outputs], (name, inputs, places)
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(
                one.full_tensor(), other, rtol=1e-5, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}"
            )
        with torch.no_grad():  # the route without gradients
            for one, other in zip(_results(function(*cut)), expected, strict=True):
                torch.testing.assert_close(one.full_tensor(), other, rtol=1e-5, atol=1e-5)
        products = [
            (one * distribute_tensor(weight, mesh, [_placement(R)])).sum()
            for one, weight in zip(found, weights, strict=True)
        ]
        sum(products[1:], products[0]).backward()
        for i, (one, other) in enumerate(zip(cut, whole, strict=True)):
            if other.grad is None:
                assert one.grad is None, (name, i)
                continue
            text = f"{name}, {inputs}, gradient {i}: "
            torch.testing.assert_close(
                one.grad.full_tensor(), other.grad, rtol=1e-4, atol=1e-5, msg=lambda m, text=text: text + m
            )


def _frozen(mesh: Any) -> None:
    """What is not wanted is not made: the same shapes, other flags, which torch must not take for the same call."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    x, w = torch.randn(4, 6, 8), torch.randn(8)
    for frozen in (0, 1, 0):
        cut = [distribute_tensor(x, mesh, [Shard(1)]), distribute_tensor(w, mesh, [Replicate()])]
        cut[1 - frozen].requires_grad_()
        F.rms_norm(*cut).sum().backward()
        assert cut[frozen].grad is None and cut[1 - frozen].grad.shape == cut[1 - frozen].shape


def _compiled(mesh: Any) -> None:
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    def block(x: Tensor, norm: Tensor, up: Tensor) -> Tensor:
        return F.linear(F.rms_norm(x, norm), up, activation="gelu")

    whole = [torch.randn(shape, requires_grad=True) for shape in ((4, 6, 8), (8,), (10, 8))]
    block(*whole).square().sum().backward()
    places = (Shard(0), Replicate(), Replicate())
    cut = [distribute_tensor(t.detach(), mesh, [p], src_data_rank=None) for t, p in zip(whole, places, strict=True)]
    for tensor in cut:
        tensor.requires_grad_()
    mine = torch.compile(block, backend="aot_eager", fullgraph=True)(*cut)
    assert mine.placements == (Shard(0),)
    mine.to_local().square().sum().backward()
    rank = mesh.get_local_rank()
    torch.testing.assert_close(mine.to_local(), block(*whole)[2 * rank : 2 * rank + 2], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(cut[0].grad.to_local(), whole[0].grad[2 * rank : 2 * rank + 2], rtol=1e-4, atol=1e-5)


def _means(mesh: Any) -> None:
    from torch.distributed.tensor import Shard, distribute_tensor

    torch.manual_seed(1)
    x, target = torch.randn(8, 10), torch.tensor([1, 2, 3, -100, 9, 0, -100, -100])
    mine = distribute_tensor(x, mesh, [Shard(0)]).requires_grad_()
    loss = F.cross_entropy(mine, distribute_tensor(target, mesh, [Shard(0)]))
    loss.backward()
    x.requires_grad_()
    expected = F.cross_entropy(x, target)
    expected.backward()
    torch.testing.assert_close(loss.full_tensor(), expected)
    torch.testing.assert_close(mine.grad.full_tensor(), x.grad)


def _refusals(mesh: Any) -> None:
    from torch.distributed.tensor import Shard, distribute_tensor

    x = distribute_tensor(torch.randn(4, 8), mesh, [Shard(0)])
    with pytest.raises(NotImplementedError, match=r"kernel_pytorch.linear_cross_entropy.*local parts"):
        F.linear_cross_entropy(x, x, distribute_tensor(torch.zeros(4).long(), mesh, [Shard(0)]))
    with pytest.raises(RuntimeError, match=r"kernel_pytorch.rms_norm.*mixed torch.Tensor and DTensor"):
        F.rms_norm(x, torch.ones(8))


def _work(rank: int, folder: str) -> None:
    assert "torch.distributed.tensor" not in sys.modules
    with member(rank, folder, MEMBERS):
        from torch.distributed.device_mesh import init_device_mesh

        torch.manual_seed(0)
        mesh = init_device_mesh("cpu", (MEMBERS,))
        assert not sharding._registered
        if rank == 1:  # there a compiler is the first to need the rules
            _compiled(mesh)
        for name in CASES:
            _check(name, mesh)
        _frozen(mesh)
        _means(mesh)
        _refusals(mesh)


def test_every_rule_equals_the_whole(tmp_path: Path) -> None:
    spawn_to_the_end(_work, tmp_path, MEMBERS)
