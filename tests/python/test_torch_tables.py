"""embedding, mean_pool and chunk_mean_pool against torch: values, gradients, compilers, transforms and bad input."""

from __future__ import annotations

import itertools
import random

import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: E402
from kernel_pytorch.functional import chunk_mean_pool, embedding, mean_pool  # noqa: E402

ops = torch.ops.kernel_pytorch
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def near(ours, theirs, terms=1):
    """Ours in its own type against theirs in float64."""
    relative = {torch.float64: 1e-12, torch.float32: 1e-6}.get(ours.dtype, torch.finfo(ours.dtype).eps)
    assert ours.shape == theirs.shape
    scale = float(theirs.detach().abs().max()) if theirs.numel() else 0.0
    torch.testing.assert_close(
        ours.detach().double().cpu(), theirs.detach().cpu(), rtol=relative, atol=4 * relative * scale * terms**0.5
    )


def chunk_reference(x, chunk_size):
    return torch.stack([part.mean(1) for part in x.split(chunk_size, dim=1)], dim=1)


def packed_reference(x, ends):
    return torch.stack([x[a:b].mean(0) if b > a else x[a:b].sum(0) for a, b in itertools.pairwise(ends)])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_embedding_values_and_gradients(dtype, device):
    if device == "cuda" and dtype is torch.float64:
        pytest.skip("fp64 is for the CPU")
    torch.manual_seed(0)
    for shape, rows, columns, padding in [
        ((), 3, 4, None),
        ((7,), 1, 1, None),
        ((2, 3, 4), 11, 8, -2),
        ((500,), 7, 33, 3),
        ((3, 300), 5000, 264, 0),
        ((0, 2), 5, 6, None),
        ((4000,), 2, 64, None),
    ]:
        indices = torch.randint(0, rows, shape, dtype=torch.int32 if len(shape) == 1 else torch.int64, device=device)
        weight = torch.randn(rows, columns, device=device).to(dtype).requires_grad_()
        double = weight.detach().double().requires_grad_()
        output, expected = embedding(indices, weight, padding), F.embedding(indices, double, padding)
        near(output, expected)
        grad = torch.randn(output.shape, device=device).to(dtype)
        (ours,) = torch.autograd.grad(output, weight, grad)
        (theirs,) = torch.autograd.grad(expected, double, grad.double())
        near(ours, theirs, terms=max(1, indices.numel() // rows))
        (again,) = torch.autograd.grad(embedding(indices, weight, padding), weight, grad)
        assert torch.equal(ours, again)


@pytest.mark.parametrize("device", DEVICES)
def test_embedding_takes_any_strides(device):
    table = torch.randn(64, 40, device=device)
    indices = torch.randint(0, 20, (6, 5), device=device).t()
    for weight in (table[:20, 3:20], table.t()[:20], table[::2]):
        assert torch.equal(embedding(indices, weight), F.embedding(indices, weight))
    weight = torch.randn(20, 16, device=device, requires_grad=True)
    for grad in (torch.randn(6, 5, 16, device=device).transpose(0, 1), torch.randn((), device=device).expand(5, 6, 16)):
        (ours,) = torch.autograd.grad(embedding(indices, weight), weight, grad)
        (theirs,) = torch.autograd.grad(F.embedding(indices, weight), weight, grad)
        torch.testing.assert_close(ours, theirs)


def test_embedding_bad_input():
    weight = torch.randn(5, 4)
    for wrong in (5, -1):
        with pytest.raises(RuntimeError, match=f"index {wrong} at position 1, the table has 5 rows"):
            embedding(torch.tensor([0, wrong]), weight)
    with pytest.raises(RuntimeError, match="indices are fp32; convert them to int64 or int32"):
        embedding(torch.tensor([0.0]), weight)
    with pytest.raises(ValueError, match="padding_idx is 5, the table has 5 rows"):
        embedding(torch.tensor([0]), weight, 5)
    with pytest.raises(RuntimeError, match=r"weight has shape \[5, 4, 1\]"):
        embedding(torch.tensor([0]), weight.unsqueeze(-1))


@pytest.mark.gpu
def test_gpu_embedding_marks_indices_outside_the_table():
    weight = torch.randn(5, 8, device="cuda", requires_grad=True)
    indices = torch.tensor([1, 7, -3, 4], device="cuda")
    output = embedding(indices, weight)
    assert output[1:3].isnan().all() and torch.equal(output[3], weight[4])
    output.sum().backward()
    assert torch.equal(weight.grad[:, 0], torch.tensor([0.0, 1, 0, 0, 1], device="cuda"))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_mean_pools(dtype, device):
    if device == "cuda" and dtype is torch.float64:
        pytest.skip("fp64 is for the CPU")
    torch.manual_seed(0)

    def check(call, reference, x):
        x = x.to(device, dtype).requires_grad_()
        double = x.detach().double().requires_grad_()
        output, expected = call(x), reference(double)
        near(output, expected, terms=x.shape[1])
        grad = torch.randn(output.shape, device=device).to(dtype)
        near(*(torch.autograd.grad(y, at, grad.to(y.dtype))[0] for y, at in ((output, x), (expected, double))))

    for shape in [(1, 1, 1), (3, 37, 7), (2, 600, 520), (1, 5000, 64), (2, 65, 3, 16), (2, 9, 2, 3, 5)]:
        check(mean_pool, lambda x: x.mean(1), torch.randn(shape))
        for chunk in (1, 4, 64, 10000):
            check(
                lambda x, c=chunk: chunk_mean_pool(x, c), lambda x, c=chunk: chunk_reference(x, c), torch.randn(shape)
            )
    heads_first = torch.randn(2, 3, 50, 16).transpose(1, 2)
    check(mean_pool, lambda x: x.mean(1), heads_first)
    check(lambda x: chunk_mean_pool(x, 8), lambda x: chunk_reference(x, 8), heads_first)
    check(mean_pool, lambda x: x.mean(1), torch.randn(2, 4, 3, 9, 5).permute(0, 3, 2, 1, 4))
    for kind in (torch.int32, torch.int64):
        ends = [0, 5, 5, 200, 201, 640]
        offsets = torch.tensor(ends, dtype=kind, device=device)
        for shape in [(700, 16), (640, 3), (650, 2, 24)]:
            check(lambda x, o=offsets: mean_pool(x, o), lambda x, e=ends: packed_reference(x, e), torch.randn(shape))


def random_strides(x, rng):
    """The same values with other strides: as they are, out of a wider tensor, or with dimensions moved."""
    kind = rng.choice(("dense", "sliced", "moved"))
    if kind == "sliced":
        wide = x.new_zeros((*x.shape[:-1], x.shape[-1] + rng.randint(1, 9)))
        wide[..., : x.shape[-1]] = x
        return wide[..., : x.shape[-1]]
    if kind == "moved" and x.dim() > 1:
        order = list(range(x.dim()))
        rng.shuffle(order)
        return x.permute(order).contiguous().permute([order.index(i) for i in range(x.dim())])
    return x


def check_random_problem(seed, device):
    """Forward and backward of one op with random sizes, strides and types, against torch in float64 on the CPU."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    dtype = rng.choice(DTYPES[:3])
    columns = rng.choice((1, 2, 7, 8, 33, 64, 128, 513, 1024, rng.randint(1, 2000)))

    def check(call, reference, leaf, terms):
        leaf = random_strides(leaf.to(device, dtype), rng).detach().requires_grad_()
        double = leaf.detach().cpu().double().requires_grad_()
        output, expected = call(leaf), reference(double)
        near(output, expected, terms)
        grad = random_strides(torch.randn(output.shape).to(device, dtype), rng)
        (ours,) = torch.autograd.grad(output, leaf, grad)
        (theirs,) = torch.autograd.grad(expected, double, grad.double().cpu())
        near(ours, theirs, terms)

    if seed % 3 == 0:
        rows, count = rng.choice((1, 2, 50, 3000)), rng.choice((0, 1, 5, 300, 5000))
        indices = torch.randint(0, rows, (count,), dtype=rng.choice((torch.int32, torch.int64)))
        indices = indices.clamp(max=rng.randint(0, rows))  # some indices far more often than others
        padding = rng.choice((None, 0, rows - 1))
        check(
            lambda w: embedding(indices.to(device), w, padding),
            lambda w: F.embedding(indices, w, padding),
            torch.randn(rows, columns),
            max(1, count),
        )
        return
    tokens = rng.choice((1, 2, 31, 64, 1000, rng.randint(1, 3000)))
    heads = (rng.randint(1, 4),) if rng.random() < 0.5 else ()
    if seed % 3 == 1:
        batch, chunk = rng.randint(1, 4), rng.choice((1, 16, 64, tokens, rng.randint(1, 500)))
        x = torch.randn(batch, tokens, *heads, min(columns, 300))
        if rng.random() < 0.5:
            check(mean_pool, lambda x: x.mean(1), x, tokens)
        else:
            check(lambda x: chunk_mean_pool(x, chunk), lambda x: chunk_reference(x, chunk), x, chunk)
        return
    ends = sorted(rng.randint(0, tokens) for _ in range(rng.randint(1, 20)))
    if len(ends) == 1:
        ends = [0, tokens]
    offsets = torch.tensor(ends, dtype=rng.choice((torch.int32, torch.int64)), device=device)
    x = torch.randn(tokens, *heads, min(columns, 300))
    check(lambda x: mean_pool(x, offsets), lambda x: packed_reference(x, ends), x, tokens)


@pytest.mark.parametrize("block", range(3))
def test_random_problems(block):
    for seed in range(60 * block, 60 * block + 60):
        check_random_problem(seed, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("block", range(3))
def test_random_problems_on_the_gpu(block):
    for seed in range(500 * block, 500 * block + 500):
        check_random_problem(seed, "cuda")


def test_mean_pool_edges_and_bad_input():
    assert mean_pool(torch.randn(3, 0, 4)).eq(0).all()
    assert chunk_mean_pool(torch.randn(3, 0, 4), 2).shape == (3, 0, 4)
    assert mean_pool(torch.randn(0, 3, 4)).shape == (0, 4)
    with pytest.raises(RuntimeError, match="chunk_size is 0; it must be at least 1"):
        chunk_mean_pool(torch.randn(1, 3, 4), 0)
    with pytest.raises(RuntimeError, match=r"x has shape \[3, 4\]; it must be \[batch, tokens, ..., columns\]"):
        mean_pool(torch.randn(3, 4))
    with pytest.raises(RuntimeError, match="offsets 1 and 2 are 2 and 9, x has 3 tokens"):
        mean_pool(torch.randn(3, 4), torch.tensor([0, 2, 9]))
    with pytest.raises(RuntimeError, match="offsets are fp32"):
        mean_pool(torch.randn(3, 4), torch.tensor([0.0, 3.0]))
    with pytest.raises(RuntimeError, match="x is int64"):
        mean_pool(torch.ones(1, 3, 4, dtype=torch.int64))


def test_gradcheck():
    torch.manual_seed(0)
    indices = torch.tensor([[0, 2, 2], [4, 1, 2]])
    weight = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda w: embedding(indices, w, 3), weight)
    x = torch.randn(2, 5, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(mean_pool, x)
    assert torch.autograd.gradcheck(lambda x: chunk_mean_pool(x, 2), x)
    packed = torch.randn(6, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: mean_pool(x, torch.tensor([1, 3, 3, 5])), packed)
    for call in (mean_pool, lambda x: chunk_mean_pool(x, 2)):
        (grad,) = torch.autograd.grad(call(x).square().sum(), x, create_graph=True)
        with pytest.raises(RuntimeError, match="mean_pool"):
            grad.sum().backward()


def test_opcheck():
    indices, weight = torch.tensor([[0, 2], [1, 1]]), torch.randn(3, 4)
    x, offsets = torch.randn(2, 5, 3), torch.tensor([0, 1, 5])
    for op, arguments in [
        (ops.embedding, (indices, weight, 3, -1)),
        (ops.embedding_forward, (indices, weight.clone().requires_grad_(), 3, 1)),
        (ops.embedding_backward, (torch.randn(2, 2, 4), indices, 3, 1)),
        (ops.mean_pool, (x, None, 5)),
        (ops.mean_pool_forward, (x[0].clone().requires_grad_(), offsets, 5)),
        (ops.mean_pool_backward, (torch.randn(2, 3), offsets, 5)),
        (ops.chunk_mean_pool, (x, 2, 5)),
        (ops.chunk_mean_pool_forward, (x.clone().requires_grad_(), 2, 5)),
        (ops.chunk_mean_pool_backward, (torch.randn(2, 3, 3), 2, 5)),
    ]:
        torch.library.opcheck(op.default, arguments)


def test_compiles_without_breaks_for_any_length():
    torch._dynamo.reset()

    def model(indices, weight, offsets):
        x = embedding(indices, weight, 0)
        return mean_pool(x).sum() + chunk_mean_pool(x, 3).square().sum() + mean_pool(x[0], offsets).sum()

    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend="aot_eager")
    weight = torch.randn(9, 4, requires_grad=True)
    for length in (7, 12, 30):
        arguments = torch.randint(0, 9, (2, length)), weight, torch.tensor([0, 2, length])
        ours, theirs = compiled(*arguments), model(*arguments)
        torch.testing.assert_close(ours, theirs)
        torch.testing.assert_close(*(torch.autograd.grad(y, weight)[0] for y in (ours, theirs)))


def test_transforms():
    indices, weight, x = torch.randint(0, 5, (3, 4)), torch.randn(5, 2), torch.randn(3, 2, 6, 4)
    torch.testing.assert_close(torch.func.vmap(lambda i: embedding(i, weight))(indices), weight[indices])
    weights = torch.randn(3, 5, 2)
    torch.testing.assert_close(
        torch.func.vmap(embedding)(indices, weights), torch.stack([w[i] for w, i in zip(weights, indices, strict=True)])
    )
    torch.testing.assert_close(torch.func.vmap(mean_pool)(x), x.mean(2))
    torch.testing.assert_close(
        torch.func.vmap(lambda x: chunk_mean_pool(x, 4))(x), torch.stack([chunk_reference(y, 4) for y in x])
    )
    per_sample = torch.func.vmap(torch.func.grad(lambda w, i: embedding(i, w).square().sum()), in_dims=(None, 0))
    expected = torch.stack([2 * torch.bincount(i, minlength=5)[:, None] * weight for i in indices])
    torch.testing.assert_close(per_sample(weight, indices), expected)
    grads = torch.func.vmap(torch.func.grad(lambda y: mean_pool(y).square().sum()))(x)
    torch.testing.assert_close(grads, (2 * x.mean(2) / 6).unsqueeze(2).expand_as(x))
