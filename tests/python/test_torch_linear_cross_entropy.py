"""linear_cross_entropy: losses and gradients against whole logits, options, chunks, memory, compilers, errors."""

from __future__ import annotations

import itertools

import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as torch_functional  # noqa: E402

from kernel_pytorch import functional  # noqa: E402

ops = torch.ops.kernel_pytorch
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}


def sample(dtype, device, rows=50, size=24, classes=70, ignored=0):
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(rows, size, generator=generator).to(device, dtype)
    weight = (torch.randn(classes, size, generator=generator) / 4).to(device, dtype)
    target = torch.randint(classes, (rows,), generator=generator)
    target[:ignored] = -100
    return hidden, weight, target.to(device)


def exact_loss(hidden, weight, target, class_weight=None, z_loss=0.0, softcap=None, **options):
    logits = hidden @ weight.T
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    loss = torch_functional.cross_entropy(logits, target, weight=class_weight, **options)
    kept = target != -100
    extra = z_loss * (torch.logsumexp(logits, -1) ** 2 * kept).sum()
    if options.get("reduction", "mean") == "mean":
        extra = extra / (kept.sum() if class_weight is None else class_weight[target[kept]].sum())
    return loss + extra


def assert_near(actual, exact, dtype):
    exact = exact.detach().cpu().double()
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(
        actual.detach().cpu().double(), exact, rtol=tolerance, atol=tolerance * exact.abs().max().item()
    )


OPTIONS = [
    {},
    {"reduction": "sum"},
    {"label_smoothing": 0.1, "z_loss": 1e-3},
    {"softcap": 5.0},
    {"class_weight": True},
    {"class_weight": True, "label_smoothing": 0.2, "reduction": "sum"},
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_loss_and_gradients(dtype, device):
    if device == "cuda" and dtype is torch.float64:
        pytest.skip("fp64 is the CPU's")
    for options, ignored, rows_each in itertools.product(OPTIONS, (0, 7), (50, 16)):
        hidden, weight, target = sample(dtype, device, ignored=ignored)
        ours = [hidden.clone().requires_grad_(), weight.clone().requires_grad_()]
        exact = [t.detach().cpu().double().requires_grad_() for t in (hidden, weight)]
        options = dict(options)
        wanted_options = dict(options)
        if options.get("class_weight"):
            wanted_options["class_weight"] = torch.linspace(0.5, 1.5, 70, dtype=torch.float64)
            options["class_weight"] = wanted_options["class_weight"].to(device, dtype)
        loss = functional.linear_cross_entropy(
            *ours, target, chunk_bytes=rows_each * 70 * hidden.element_size(), **options
        )
        wanted = exact_loss(*exact, target.cpu(), **wanted_options)
        assert loss.dtype is (torch.float64 if dtype is torch.float64 else torch.float32) and loss.shape == ()
        assert_near(loss, wanted, dtype)
        grads, wanted_grads = torch.autograd.grad(3 * loss, ours), torch.autograd.grad(3 * wanted, exact)
        for mine, theirs in zip(grads, wanted_grads, strict=True):
            assert mine.dtype is dtype
            assert_near(mine, theirs, dtype)
        with torch.no_grad():
            again = functional.linear_cross_entropy(*ours, target, **options)
        assert_near(again, wanted, dtype)


def test_shapes_and_frozen_arguments():
    hidden, weight, target = sample(torch.float32, "cpu")
    flat = functional.linear_cross_entropy(hidden, weight, target)
    assert torch.equal(functional.linear_cross_entropy(hidden.view(5, 10, -1), weight, target.view(5, 10)), flat)
    strided = torch.randn(50, 48)[:, ::2]
    torch.testing.assert_close(
        functional.linear_cross_entropy(strided, weight.T.contiguous().T, target),
        torch_functional.cross_entropy(strided @ weight.T, target),
    )
    for frozen in (0, 1):
        given = [hidden.clone(), weight.clone()]
        given[1 - frozen].requires_grad_()
        functional.linear_cross_entropy(*given, target).backward()
        assert given[frozen].grad is None and given[1 - frozen].grad is not None


def test_a_kept_graph_gives_the_same_again():
    hidden, weight, target = sample(torch.float32, "cpu", ignored=4)
    hidden.requires_grad_(), weight.requires_grad_()
    loss = functional.linear_cross_entropy(hidden, weight, target)
    first = [g.clone() for g in torch.autograd.grad(loss, (hidden, weight), retain_graph=True)]
    doubled = torch.autograd.grad(2 * loss, (hidden, weight))
    for one, two in zip(first, doubled, strict=True):
        torch.testing.assert_close(2 * one, two)


def test_the_weights_gradient_in_fp32_is_nearer():
    hidden, weight, target = sample(torch.bfloat16, "cpu", rows=512, size=64, classes=40)
    exact = [hidden.double(), weight.double().requires_grad_()]
    exact_loss(*exact, target).backward()
    errors = []
    for dtype in (None, torch.float32):
        leaf = weight.clone().requires_grad_()
        functional.linear_cross_entropy(
            hidden, leaf, target, accumulate_dtype=dtype, chunk_bytes=16 * 40 * 2
        ).backward()
        assert leaf.grad.dtype is torch.bfloat16
        errors.append(((leaf.grad - exact[1].grad).norm() / exact[1].grad.norm()).item())
    assert errors[1] < 0.5 * errors[0] and errors[0] < 2e-2, errors


def test_gradcheck_opcheck_and_compile():
    hidden, weight, target = sample(torch.float64, "cpu", rows=6, size=4, classes=5, ignored=1)
    hidden.requires_grad_(), weight.requires_grad_()
    assert torch.autograd.gradcheck(lambda h, w: functional.linear_cross_entropy(h, w, target), (hidden, weight))
    options = (-100, 0.1, 0.0, 0.0, 1 << 20)
    leaves = [t.detach().float().requires_grad_() for t in (hidden, weight)]
    torch.library.opcheck(
        ops.linear_cross_entropy_forward.default, (*leaves, target, None, *options, True, True, False)
    )
    plain = [t.detach() for t in leaves]
    torch.library.opcheck(ops.linear_cross_entropy.default, (*plain, target, None, *options, False, False, True))
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda h, w: functional.linear_cross_entropy(h * 2, w, target), fullgraph=True, backend="aot_eager"
    )
    loss, eager = compiled(*leaves), functional.linear_cross_entropy(leaves[0] * 2, leaves[1], target)
    torch.testing.assert_close(loss, eager)
    for mine, theirs in zip(torch.autograd.grad(loss, leaves), torch.autograd.grad(eager, leaves), strict=True):
        torch.testing.assert_close(mine, theirs)


@pytest.mark.gpu
def test_memory_beyond_the_gradients_is_bounded():
    hidden = torch.randn(4096, 1024, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(128256, 1024, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    target = torch.randint(128256, (4096,), device="cuda")
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    functional.linear_cross_entropy(hidden, weight, target).backward()
    gradients = hidden.grad.nbytes + weight.grad.nbytes
    extra = torch.cuda.max_memory_allocated() - before - gradients
    assert extra <= 256 << 20, f"{extra / 2**20:.0f} MB"


def test_errors_name_the_cure():
    hidden, weight, target = sample(torch.float32, "cpu")
    with pytest.raises(ValueError, match='"mean" or "sum"'):
        functional.linear_cross_entropy(hidden, weight, target, reduction="none")
    with pytest.raises(ValueError, match="accumulate_dtype"):
        functional.linear_cross_entropy(hidden, weight, target, accumulate_dtype=torch.float16)
    with pytest.raises(TypeError, match="autocast"):
        functional.linear_cross_entropy(hidden, weight.bfloat16(), target)
    with pytest.raises(RuntimeError, match=r"\[rows, size\] and \[classes, size\]"):
        functional.linear_cross_entropy(hidden, weight[:, :8], target)
    with pytest.raises(RuntimeError, match="each of the 50 rows"):
        functional.linear_cross_entropy(hidden, weight, target[:9])
