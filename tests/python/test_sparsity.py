"""2:4 sparsity: what is kept, products with their gradients, masks of both directions, training, models."""

from __future__ import annotations

import copy
import io
import itertools

import pytest
import torch
from kernel_pytorch.precision import Sparse24Linear, SparseTrainingLinear, StructuredSparsity24, transposable_mask
from kernel_pytorch.precision import sparsity as sparsity_module
from torch import Tensor, nn
from torch.nn import functional as T

from kernel_pytorch import functional as F
from kernel_pytorch import precision


def largest_two(weight: Tensor) -> Tensor:
    """The mask by sorting; a stable sort keeps the first of equals."""
    groups = weight.float().abs().view(weight.shape[0], -1, 4)
    order = groups.sort(dim=-1, descending=True, stable=True).indices[..., :2]
    return torch.zeros_like(groups, dtype=torch.bool).scatter_(-1, order, True).view(weight.shape)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(1, 4), (5, 64), (24, 72), (3, 260)])
def test_the_two_largest_of_four_are_kept(dtype, shape) -> None:
    torch.manual_seed(0)
    weight = torch.randint(-3, 4, shape).to(dtype)  # many equals and zeros
    sparse = F.sparse_compress(weight)
    assert sparse.shape == weight.shape and sparse.dtype is dtype
    assert torch.equal(sparse.mask(), largest_two(weight))
    assert torch.equal(sparse.to_dense(), weight * largest_two(weight))
    assert sparse.nbytes == weight.nbytes // 2 + -(-shape[1] // 64) * shape[0] * 8


def test_rows_may_lie_apart_and_nan_counts_as_largest() -> None:
    weight = torch.randn(6, 80)[:, :64]
    assert torch.equal(F.sparse_compress(weight).to_dense(), weight * largest_two(weight))
    assert F.sparse_compress(torch.tensor([[9.0, torch.nan, 1.0, 8.0]])).mask().tolist() == [[True, True, False, False]]
    across = torch.randn(64, 8).t()
    assert torch.equal(F.sparse_compress(across).to_dense(), across * largest_two(across))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [(), (1,), (2, 5), (70,)])
@pytest.mark.parametrize("activation", [None, "silu"])
def test_products_and_gradients_are_those_of_the_pruned_weight(dtype, rows, activation) -> None:
    torch.manual_seed(0)
    sparse = F.sparse_compress(torch.randn(24, 72).to(dtype) / 8)
    x = torch.randn(*rows, 72, requires_grad=True, dtype=dtype)
    bias = torch.randn(24, requires_grad=True, dtype=dtype)
    ours = F.sparse_matmul(x, sparse, bias=bias, activation=activation)
    sums = T.linear(x.float(), sparse.to_dense().float(), bias.float())
    theirs = T.silu(sums) if activation else sums
    bound = 1e-5 if dtype is torch.float32 else 0.03
    torch.testing.assert_close(ours.float(), theirs, rtol=bound, atol=bound)
    weights = torch.randn_like(theirs)
    for a, b in zip(
        torch.autograd.grad((ours.float() * weights).sum(), (x, bias)),
        torch.autograd.grad((theirs * weights).sum(), (x, bias)), strict=True,
    ):  # fmt: skip
        torch.testing.assert_close(a.float(), b.float(), rtol=4 * bound, atol=4 * bound)


def test_bad_arguments_are_named() -> None:
    with pytest.raises(ValueError, match="multiple of 4"):
        F.sparse_compress(torch.randn(4, 6))
    sparse = F.sparse_compress(torch.randn(4, 8))
    with pytest.raises(ValueError, match="last sizes"):
        F.sparse_matmul(torch.randn(2, 4), sparse)
    with pytest.raises(ValueError, match="more than two"):
        Sparse24Linear.from_linear(nn.Linear(8, 4), mask=torch.ones(4, 8, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"0\.5, 4 and True"):
        StructuredSparsity24(sparsity_ratio=0.9)
    with pytest.raises(ValueError, match="multiples of 4"):
        transposable_mask(torch.randn(6, 8))


def test_a_transposable_mask_is_the_best_of_all_patterns() -> None:
    torch.manual_seed(0)
    weight = torch.randn(12, 20)
    mask = transposable_mask(weight)
    for one in (mask, mask.t()):
        assert (one.reshape(one.shape[0], -1, 4).sum(2) == 2).all()
    # No exchange of a rectangle's corners within a block improves it.
    block, kept = weight[:4, :4].abs(), mask[:4, :4]
    best = float((block * kept).sum())
    for i, j, p, q in itertools.product(range(4), repeat=4):
        if kept[i, p] and kept[j, q] and not kept[i, q] and not kept[j, p]:
            change = block[i, q] + block[j, p] - block[i, p] - block[j, q]
            assert best + float(change) <= best + 1e-6


@pytest.mark.parametrize("transposable", [False, True])
def test_training_passes_the_pruning_and_decays_what_is_pruned(transposable) -> None:
    torch.manual_seed(0)
    plain = nn.Linear(16, 12)
    layer = SparseTrainingLinear(copy.deepcopy(plain), decay=0.5, transposable=transposable)
    x, weights = torch.randn(3, 5, 16, requires_grad=True), torch.randn(3, 5, 12)
    mask = layer.mask()
    (layer(x) * weights).sum().backward()
    pruned = (plain.weight.detach() * mask).requires_grad_()
    other = x.detach().clone().requires_grad_()
    (T.linear(other, pruned, plain.bias) * weights).sum().backward()
    torch.testing.assert_close(x.grad, other.grad)
    torch.testing.assert_close(layer.weight.grad, pruned.grad + 0.5 * plain.weight.detach() * ~mask)
    torch.testing.assert_close(layer.bias.grad, plain.bias.grad)
    torch.testing.assert_close(layer.to_sparse()(x), layer(x))


def test_sparse_training_learns() -> None:
    torch.manual_seed(0)
    x, target = torch.randn(256, 16), torch.randn(16, 16) / 4
    target = target * largest_two(target)  # what a 2:4 weight can be
    layer = SparseTrainingLinear(nn.Linear(16, 16, bias=False))
    optimizer = torch.optim.Adam(layer.parameters(), lr=0.02)
    losses = []
    for _ in range(80):
        loss = T.mse_loss(layer(x), x @ target.t())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.1 * losses[0]


@pytest.mark.parametrize("hardware_optimized", [False, True])
@pytest.mark.parametrize("transposable", [False, True])
def test_models_are_pruned_and_saved(hardware_optimized, transposable) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 8), nn.Linear(6, 4))
    sparsity = StructuredSparsity24(0.5, hardware_optimized=hardware_optimized, transposable=transposable)
    pruned = sparsity.apply_to_model(model, skip=["3"])
    expected = copy.deepcopy(model)
    for i in (0, 2):
        weight = expected[i].weight
        weight.data *= sparsity.create_24_pattern(weight.data)[1]
        assert (weight == 0).float().mean() == 0.5
    x = torch.randn(4, 16)
    torch.testing.assert_close(pruned[:3](x), expected[:3](x))
    assert isinstance(pruned[0], Sparse24Linear) == hardware_optimized and type(pruned[3]) is nn.Linear
    assert isinstance(model[0], nn.Linear)
    file = io.BytesIO()
    torch.save(pruned.state_dict(), file)
    file.seek(0)
    again = sparsity.apply_to_model(
        nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 8), nn.Linear(6, 4)), skip=["3"]
    )
    again.load_state_dict(torch.load(file))
    torch.testing.assert_close(again[:3](x), pruned[:3](x))


def test_seed_names() -> None:
    from kernel_pytorch.optimizations.next_gen import StructuredSparsity24 as Seed

    sparsity = Seed(sparsity_ratio=0.5)
    tensor = torch.randn(8, 16)
    sparse, mask = sparsity.create_24_pattern(tensor)
    assert torch.equal(sparsity.decompress_24_tensor(sparsity.compress_24_tensor(tensor)), sparse)
    assert torch.equal(sparse, tensor * mask)
    layer = sparsity.apply_to_model(nn.Linear(16, 8))
    assert isinstance(layer, Sparse24Linear)
    trained = sparsity.apply_to_model(nn.Linear(16, 8), trains=True)
    assert isinstance(trained, SparseTrainingLinear)


@pytest.mark.parametrize("shape", [(6, 4), (24, 8), (40, 36), (3, 128), (0, 16), (5, 0)])
def test_a_permuted_weight_keeps_more(shape) -> None:
    torch.manual_seed(0)
    weight = torch.randn(shape) * torch.rand(1, shape[1]).exp()
    order = precision.permuted_columns(weight)
    assert torch.equal(order.sort().values, torch.arange(shape[1]))
    permuted = F.sparse_compress(weight[:, order]).values.abs().sum()
    plain = F.sparse_compress(weight).values.abs().sum()
    assert permuted >= plain * (1 - 1e-6)
    if min(shape) >= 24:
        assert permuted > plain * 1.01


def test_large_columns_next_to_each_other_are_all_kept() -> None:
    torch.manual_seed(0)
    weight = torch.randn(16, 64)
    weight[:, :32] *= 1000  # all of the first groups, none of the others
    pattern = precision.StructuredSparsity24(permuted=True).create_24_pattern(weight)[1]
    assert float(pattern[:, :32].float().mean()) > 0.95


def test_layers_with_permuted_columns(tmp_path) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(36, 40), torch.nn.GELU(), torch.nn.Linear(40, 12))
    sparse = precision.StructuredSparsity24(permuted=True)
    pruned, x = sparse.apply_to_model(model), torch.randn(2, 5, 36, requires_grad=True)
    for before, after in ((model[0], pruned[0]), (model[2], pruned[2])):
        assert after.order is not None
        torch.testing.assert_close(after.to_dense(), sparse.create_24_pattern(before.weight.detach())[0])
    masked = copy.deepcopy(model)
    for i in (0, 2):
        masked[i].weight.data = pruned[i].to_dense()
    torch.testing.assert_close(pruned(x), masked(x), atol=1e-5, rtol=1e-5)
    grads = [torch.autograd.grad(one(x).square().sum(), x)[0] for one in (pruned, masked)]
    torch.testing.assert_close(*grads, atol=1e-4, rtol=1e-4)
    empty = precision.Sparse24Linear(36, 40, permuted=True, dtype=torch.float32)
    empty.load_state_dict(pruned[0].state_dict())
    assert torch.equal(empty(x), pruned[0](x))
    for wrong in ({"transposable": True}, {"hardware_optimized": False}):
        with pytest.raises(ValueError, match="permuted with"):
            precision.StructuredSparsity24(permuted=True, **wrong)
    with pytest.raises(ValueError, match="after training"):
        sparse.apply_to_model(model, trains=True)
    with pytest.raises(ValueError, match="permuted_columns"):
        sparse.compress_24_tensor(model[0].weight)


def test_orders_and_masks_do_not_ask_for_the_default_device() -> None:
    weight = torch.randn(8, 16, generator=torch.Generator().manual_seed(0))
    expected = precision.permuted_columns(weight), precision.transposable_mask(weight)
    for cached in (sparsity_module._patterns, sparsity_module._halves):
        cached.cache_clear()
    with torch.device("meta"):
        found = precision.permuted_columns(weight), precision.transposable_mask(weight)
    assert all(map(torch.equal, found, expected))


def test_dense_pruning_opens_what_hides_linear_layers() -> None:
    sparsity = precision.StructuredSparsity24(hardware_optimized=False)
    pruned = sparsity.apply_to_model(nn.MultiheadAttention(16, 2))
    assert isinstance(pruned, precision.OpenMultiheadAttention)
    assert (pruned.q_proj.weight.view(-1, 4) != 0).sum(1).max() == 2
