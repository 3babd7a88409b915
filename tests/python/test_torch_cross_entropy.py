"""cross_entropy against torch: values, gradients, options, edges, parts of a vocabulary, compilers, errors."""

from __future__ import annotations

import math
import random

import pytest

torch = pytest.importorskip("torch")
F = torch.nn.functional

from kernel_pytorch import functional  # noqa: E402

ops = torch.ops.kernel_pytorch
TYPES = (torch.float32, torch.bfloat16, torch.float16)
GRADIENT = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}


def reference(
    logits,
    target,
    *,
    weight=None,
    ignore_index=-100,
    label_smoothing=0.0,
    z_loss=0.0,
    softcap=None,
    reduction="mean",
):
    """By torch's own cross entropy, with what it lacks written out."""
    z = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    rows = F.cross_entropy(
        z.flatten(0, -2),
        target.flatten(),
        weight=weight,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        reduction="none",
    )
    counts = (target != ignore_index).flatten()
    rows = rows + torch.where(counts, z_loss * torch.logsumexp(z.flatten(0, -2), -1) ** 2, 0.0)
    if reduction == "none":
        return rows.view(target.shape)
    weights = torch.ones_like(rows) if weight is None else weight[target.flatten().clamp(min=0)]
    return rows.sum() / (weights * counts).sum() if reduction == "mean" else rows.sum()


def random_problem(rng, device="cpu"):
    dtype = rng.choice(TYPES)
    sizes = [rng.choice((1, 2, 3, 7)) for _ in range(rng.randint(1, 2))]
    classes = rng.choice((1, 2, 8, 33, 257, 1000, 4096, rng.randint(1, 5000)))
    logits = (3 * torch.randn(*sizes, classes + rng.choice((0, 0, 3)), device=device)).to(dtype)[..., :classes]
    ignore_index = rng.choice((-100, 0, 5))
    target = torch.randint(0, classes, sizes, device=device)
    target = target.masked_fill(torch.rand(sizes, device=device) < 0.2, ignore_index)
    if ignore_index >= classes:
        target = target.clamp(max=classes - 1)
    weight = rng.choice((None, None, torch.rand(classes, device=device) + 0.5))
    return (
        logits,
        target,
        dict(
            weight=weight if weight is None or rng.random() < 0.5 else weight.to(dtype),
            ignore_index=ignore_index,
            label_smoothing=rng.choice((0.0, 0.0, 0.1)),
            z_loss=rng.choice((0.0, 1e-2)),
            softcap=rng.choice((None, None, 5.0)),
            reduction=rng.choice(("mean", "mean", "sum", "none")),
        ),
    )


def check_random_problem(seed, device="cpu"):
    rng = random.Random(seed)
    torch.manual_seed(seed)
    logits, target, options = random_problem(rng, device)
    ours, theirs = logits.detach().requires_grad_(), logits.detach().double().requires_grad_()
    loss = functional.cross_entropy(ours, target, **options)
    weight = options["weight"]
    expected = reference(theirs, target, **{**options, "weight": None if weight is None else weight.double()})
    assert loss.dtype is torch.float32 and loss.shape == expected.shape
    torch.testing.assert_close(loss.double(), expected, rtol=1e-5, atol=1e-5, equal_nan=True)
    gradient = torch.randn_like(loss)
    loss.backward(gradient)
    expected.backward(gradient.double())
    wanted = theirs.grad.nan_to_num()  # all rows ignored: torch's own division by zero
    bound = GRADIENT[logits.dtype]
    # A target's gradient is its probability less one: where that is near one, fp32's last places of one are left.
    cancelled = 2**-22 * gradient.abs().max().item() * (1.0 if weight is None else weight.max().item())
    atol = max(bound * max(1e-2, wanted.abs().max().item()), cancelled)
    torch.testing.assert_close(ours.grad.double(), wanted, rtol=2 * bound, atol=atol)


@pytest.mark.parametrize("block", range(4))
def test_random_problems(block):
    for seed in range(40 * block, 40 * block + 40):
        check_random_problem(seed)


@pytest.mark.gpu
def test_random_problems_on_the_gpu():
    for seed in range(500):
        check_random_problem(seed, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("classes", [32000, 50257, 128256, 151936, 262144])
def test_vocabularies_on_the_gpu(classes):
    for dtype in TYPES:
        logits = torch.randn(37, classes, device="cuda").to(dtype)
        target = torch.randint(0, classes, (37,), device="cuda")
        target[::5] = -100
        for options in ({}, {"label_smoothing": 0.1, "softcap": 5.0}, {"reduction": "none"}):
            ours, theirs = logits.clone().requires_grad_(), logits.float().clone().requires_grad_()
            loss, expected = functional.cross_entropy(ours, target, **options), reference(theirs, target, **options)
            torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-5)
            loss.sum().backward()
            expected.sum().backward()
            bound = GRADIENT[dtype]
            torch.testing.assert_close(
                ours.grad.float(), theirs.grad, rtol=2 * bound, atol=bound * theirs.grad.abs().max().item()
            )
        in_place = logits.clone()
        loss = functional.cross_entropy_(in_place, target)
        ours = logits.clone().requires_grad_()
        functional.cross_entropy(ours, target).backward()
        assert torch.equal(in_place, ours.grad)


@pytest.mark.gpu
def test_wrong_targets_are_nan_on_the_gpu():
    logits = torch.randn(4, 100, device="cuda", requires_grad=True)
    target = torch.tensor([5, 100, -3, 99], device="cuda")
    loss = functional.cross_entropy(logits, target, reduction="none")
    assert loss.isnan().tolist() == [False, True, True, False]


@pytest.mark.gpu
def test_bitwise_repeatable_on_the_gpu():
    logits = torch.randn(300, 32000, device="cuda", dtype=torch.bfloat16)
    target = torch.randint(0, 32000, (300,), device="cuda")
    losses = {functional.cross_entropy(logits, target, label_smoothing=0.1).item() for _ in range(10)}
    assert len(losses) == 1


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("extra", [{}, {"label_smoothing": 0.2, "z_loss": 0.1, "softcap": 2.0}])
def test_gradcheck(reduction, extra):
    logits = torch.randn(4, 5, dtype=torch.float64, requires_grad=True)
    target, weight = torch.tensor([0, 4, -100, 2]), torch.rand(5, dtype=torch.float64)
    assert torch.autograd.gradcheck(
        lambda x: functional.cross_entropy(x, target, weight=weight, reduction=reduction, **extra), (logits,)
    )


def test_as_torch_where_torch_has_it():
    logits, target = torch.randn(6, 11), torch.randint(0, 11, (6,))
    assert_same = torch.testing.assert_close
    assert_same(functional.cross_entropy(logits, target), F.cross_entropy(logits, target))
    assert_same(functional.cross_entropy(logits[0], target[0]), F.cross_entropy(logits[0], target[0]))
    assert_same(functional.cross_entropy(logits, target.int()), F.cross_entropy(logits, target))
    ignored = torch.full((6,), -100)
    assert functional.cross_entropy(logits, ignored).isnan() and F.cross_entropy(logits, ignored).isnan()
    assert functional.cross_entropy(logits, ignored, reduction="sum") == 0.0
    empty = torch.randn(0, 11, requires_grad=True)
    assert functional.cross_entropy(empty, target[:0]).isnan() and F.cross_entropy(empty, target[:0]).isnan()
    functional.cross_entropy(empty, target[:0], reduction="sum").backward()
    assert empty.grad.shape == (0, 11)
    assert functional.cross_entropy(logits[:, :1], torch.zeros(6, dtype=torch.int64)) == 0.0  # one class
    large = torch.tensor([[1e4, 1e4 - 8, 0.0], [0.0, -math.inf, 1.0], [math.nan, 0.0, 0.0]])
    for row in range(3):
        assert_same(
            functional.cross_entropy(large[row : row + 1], torch.tensor([0])),
            F.cross_entropy(large[row : row + 1], torch.tensor([0])),
            equal_nan=True,
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_upstream_gradients_and_kept_graphs(dtype):
    logits = torch.randn(5, 70).to(dtype).requires_grad_()
    target = torch.randint(0, 70, (5,))
    (once,) = torch.autograd.grad(functional.cross_entropy(logits, target), logits)
    loss = functional.cross_entropy(logits, target)
    (first,) = torch.autograd.grad(loss, logits, torch.tensor(4.0), retain_graph=True)
    kept = first.clone()
    torch.testing.assert_close(first, 4 * once, rtol=8e-3, atol=0)
    (second,) = torch.autograd.grad(loss, logits, torch.tensor(-0.5), retain_graph=True)
    torch.testing.assert_close(second, -0.5 * once, rtol=8e-3, atol=0)
    assert torch.equal(first, kept)  # what the first caller holds stays what it was
    (third,) = torch.autograd.grad(loss, logits, torch.tensor(4.0))
    torch.testing.assert_close(third, first)


def test_in_place_takes_the_memory_of_the_logits():
    weight = torch.randn(9, 30, requires_grad=True)
    x, target = torch.randn(4, 30), torch.randint(0, 9, (4,))
    functional.cross_entropy(F.linear(x, weight), target, label_smoothing=0.1).backward()
    expected, weight.grad = weight.grad, None
    logits = F.linear(x, weight)
    address = logits.data_ptr()
    loss = functional.cross_entropy_(logits, target, label_smoothing=0.1)
    (2 * loss).backward()
    torch.testing.assert_close(weight.grad, 2 * expected)
    plain = torch.randn(4, 9)
    functional.cross_entropy_(plain, target)  # without a graph the logits are their gradient
    torch.testing.assert_close(plain.sum(-1), torch.zeros(4), atol=1e-6, rtol=0)
    assert address == logits.data_ptr()
    with pytest.raises(RuntimeError, match="leaf"):
        functional.cross_entropy_(torch.randn(4, 9, requires_grad=True), target)
    with pytest.raises(ValueError, match='reduction is "none"'):
        functional.cross_entropy_(plain, target, reduction="none")
    squared = torch.randn(4, 9, requires_grad=True).exp()  # its gradient needs what is overwritten
    with pytest.raises(RuntimeError, match="inplace"):
        functional.cross_entropy_(squared, target).backward()


@pytest.mark.parametrize("dtype", TYPES)
def test_parts_of_a_vocabulary_give_the_whole(dtype):
    parts, columns = 3, 40
    logits = torch.randn(2, 6, parts * columns).to(dtype)
    target = torch.randint(0, parts * columns, (2, 6))
    target[1, 2] = -100
    options = dict(label_smoothing=0.1, z_loss=0.01, softcap=4.0)
    whole = logits.clone().requires_grad_()
    expected = functional.cross_entropy(whole, target, reduction="none", **options)
    upstream = torch.randn_like(expected)
    expected.backward(upstream)
    where = [dict(vocabulary=parts * columns, first_column=part * columns) for part in range(parts)]
    pieces = [piece.clone().requires_grad_() for piece in logits.split(columns, -1)]
    shares = torch.stack(
        [
            functional.cross_entropy_partials(piece.detach(), target, softcap=4.0, **place)
            for piece, place in zip(pieces, where, strict=True)
        ]
    )
    for part in range(parts):
        loss = functional.parallel_cross_entropy(
            pieces[part], target, gather=lambda own: shares, **where[part], **options
        )
        torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-5)
        loss.backward(upstream)
        bound = GRADIENT[dtype]
        torch.testing.assert_close(
            pieces[part].grad, whole.grad.split(columns, -1)[part], rtol=2 * bound, atol=bound * 1e-2
        )


def opcheck_samples():
    target, rows = torch.tensor([[1, 2, 0], [7, 3, -100]]), torch.rand(2, 3)
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.randn(2, 3, 8).to(dtype)
        leaf = x.clone().requires_grad_()
        numbers = (-100, 0.1, 0.01, 0.0)
        yield ops.cross_entropy, (x, target, None, *numbers, True)
        yield ops.cross_entropy_forward, (leaf, target, torch.rand(8), *numbers, False)
        yield ops.cross_entropy_, (x.clone(), target, None, *numbers, True)
        yield ops.cross_entropy_rows, (x, target, None, *numbers)
        yield ops.cross_entropy_rows_forward, (leaf, target, torch.rand(8), *numbers)
        yield ops.cross_entropy_rows_backward, (rows, x, target, None, 2 + rows, *numbers, 16, 8)
        yield ops.cross_entropy_partials, (x, target, -100, 30.0, 16, 0)
        yield ops.cross_entropy_rescale_, (x.clone(), torch.tensor(2.0))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("op, args", list(opcheck_samples()), ids=lambda v: getattr(v, "__name__", ""))
def test_opcheck(op, args):
    torch.library.opcheck(op.default, args)


def test_every_op_is_checked():
    checked = {op._qualified_op_name.split("::")[1] for op, _ in opcheck_samples()}
    assert checked == {name for name in dir(ops) if name.startswith("cross_entropy")}


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_compiled(reduction):
    torch._dynamo.reset()

    def step(x, weight, target):
        return functional.cross_entropy(F.linear(x, weight), target, softcap=10.0, reduction=reduction).mean() * 3

    x, weight = torch.randn(7, 12), torch.randn(20, 12, requires_grad=True)
    target = torch.randint(0, 20, (7,))
    torch.compile(step, fullgraph=True)(x, weight, target).backward()
    compiled, weight.grad = weight.grad, None
    step(x, weight, target).backward()
    torch.testing.assert_close(compiled, weight.grad)


def test_transforms():
    logits, target = torch.randn(4, 6, 9), torch.randint(0, 9, (4, 6))

    def ours(x, t):
        return functional.cross_entropy(x, t)

    torch.testing.assert_close(torch.vmap(ours)(logits, target), torch.vmap(F.cross_entropy)(logits, target))
    torch.testing.assert_close(
        torch.vmap(torch.func.grad(ours))(logits, target), torch.vmap(torch.func.grad(F.cross_entropy))(logits, target)
    )
    rows = torch.vmap(lambda x, t: functional.cross_entropy(x, t, reduction="none"))(logits, target)
    torch.testing.assert_close(rows, functional.cross_entropy(logits, target, reduction="none"))


def test_errors():
    logits, target = torch.randn(3, 4), torch.tensor([0, 1, 2])
    with pytest.raises(RuntimeError, match=r"target 4 of row 1 is not in \[0, 4\)"):
        functional.cross_entropy(logits, torch.tensor([0, 4, 1]))
    with pytest.raises(RuntimeError, match="target has shape"):
        functional.cross_entropy(logits, target[:2])
    with pytest.raises(RuntimeError, match="class indices"):
        functional.cross_entropy(logits, torch.rand(3))
    with pytest.raises(RuntimeError, match="weight has shape"):
        functional.cross_entropy(logits, target, weight=torch.ones(3))
    with pytest.raises(RuntimeError, match="label_smoothing is 2"):
        functional.cross_entropy(logits, target, label_smoothing=2.0)
    with pytest.raises(ValueError, match="softcap is 0"):
        functional.cross_entropy(logits, target, softcap=0.0)
    with pytest.raises(ValueError, match='reduction is "median"'):
        functional.cross_entropy(logits, target, reduction="median")
    for reduction in ("mean", "none"):
        leaf = logits.clone().requires_grad_()
        loss = functional.cross_entropy(leaf, target, reduction=reduction).sum()
        (gradient,) = torch.autograd.grad(loss, leaf, create_graph=True)
        with pytest.raises(RuntimeError, match="second derivative"):
            gradient.square().sum().backward()
