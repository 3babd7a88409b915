"""Layers and norms of one input, whose gradients are added where they are made: the same numbers as one by one."""

from __future__ import annotations

import copy

import pytest

torch = pytest.importorskip("torch")

from kernel_pytorch.core._shared_input import layer_norm_through, linears, rms_norm_through  # noqa: E402

from kernel_pytorch import functional as F  # noqa: E402

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
CLOSE = {torch.float64: 1e-10, torch.float32: 1e-4, torch.bfloat16: 4e-2}


def drawn(*shape, device, dtype, grad=True):
    value = torch.randn(shape, device=device, dtype=torch.float64).to(dtype)
    return value.requires_grad_(grad)


def assert_close(mine, theirs, dtype):
    assert (mine is None) == (theirs is None)
    if theirs is not None:
        scale = theirs.double().norm().clamp(min=1e-6)
        assert (mine.double() - theirs.double()).norm() <= CLOSE[dtype] * scale


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("ours", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [True, False])
def test_linears(device, ours, dtype, bias) -> None:
    torch.manual_seed(0)
    x = drawn(3, 5, 48, device=device, dtype=dtype)
    weights = [drawn(rows, 48, device=device, dtype=dtype) for rows in (64, 16, 24)]
    biases = [drawn(rows, device=device, dtype=dtype) if bias else None for rows in (64, 16, 24)]
    leaves = [x, *weights, *(one for one in biases if one is not None)]
    grads = [drawn(3, 5, rows, device=device, dtype=dtype, grad=False) for rows in (64, 16, 24)]
    mine = linears(x, weights, biases, ours=ours)
    wide = [leaf.detach().double().requires_grad_() for leaf in leaves]
    theirs = [
        torch.nn.functional.linear(wide[0], wide[1 + i], wide[4 + i] if bias else None) for i in range(len(weights))
    ]
    found = torch.autograd.grad(mine, leaves, grads)
    expected = torch.autograd.grad(theirs, wide, [grad.double() for grad in grads])
    for a, b in zip([*mine, *found], [*theirs, *expected], strict=True):
        assert a.dtype is dtype
        assert_close(a, b, dtype)


def test_layers_that_are_not_used_or_wanted() -> None:
    torch.manual_seed(0)
    x = drawn(6, 8, device="cpu", dtype=torch.float32)
    weights = [drawn(4, 8, device="cpu", dtype=torch.float32, grad=i != 1) for i in range(3)]
    for ours in (True, False):
        outputs = linears(x, weights, [None] * 3, ours=ours)
        (outputs[1].sum() + 2 * outputs[2].sum()).backward()
        expected = weights[1].detach().sum(0) + 2 * weights[2].detach().sum(0)
        torch.testing.assert_close(x.grad, expected.expand(6, 8))
        assert weights[0].grad is None and weights[1].grad is None
        torch.testing.assert_close(weights[2].grad, 2 * x.detach().sum(0).expand(4, 8))
        x.grad = weights[2].grad = None
        still = linears(x.detach(), weights, [None] * 3, ours=ours)  # x needs none
        still[0].sum().backward()
        assert x.grad is None and weights[0].grad is not None
        weights[0].grad = None


def test_a_second_derivative_is_refused() -> None:
    x, weight = torch.randn(3, 4, requires_grad=True), torch.randn(5, 4, requires_grad=True)
    (grad,) = torch.autograd.grad(linears(x, [weight, weight], [None, None])[0].square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


def test_transforms_take_the_layers_one_by_one() -> None:
    x, weight = torch.randn(3, 4), torch.randn(5, 4)
    found = torch.func.grad(lambda x: linears(x, [weight], [None], ours=False)[0].sum())(x)
    torch.testing.assert_close(found, weight.sum(0).expand(3, 4))
    normed = torch.func.grad(lambda x: rms_norm_through(x)[1].sum())(x)
    torch.testing.assert_close(normed, torch.ones(3, 4))


def test_autocast() -> None:
    x, weight = torch.randn(3, 4, requires_grad=True), torch.randn(5, 4, requires_grad=True)
    for ours in (True, False):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            outputs = linears(x, [weight, weight], [torch.zeros(5), None], ours=ours)
        assert [one.dtype for one in outputs] == [torch.bfloat16] * 2
        sum(one.float().sum() for one in outputs).backward()
        assert x.grad.dtype is torch.float32
        torch.testing.assert_close(x.grad, 2 * weight.detach().sum(0).expand(3, 4), rtol=0.05, atol=0.1)
        x.grad = None


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["rms_norm", "layer_norm"])
def test_norms_add_what_comes_past_them(device, dtype, kind) -> None:
    torch.manual_seed(0)
    x = drawn(3, 5, 40, device=device, dtype=dtype)
    weight, bias = (drawn(40, device=device, dtype=dtype) for _ in range(2))
    grads = [drawn(3, 5, 40, device=device, dtype=dtype, grad=False) for _ in range(2)]
    is_rms = kind == "rms_norm"
    leaves = [x, weight] if is_rms else [x, weight, bias]
    run = (
        (lambda x: rms_norm_through(x, weight, 1e-5, 1.0)) if is_rms else lambda x: layer_norm_through(x, weight, bias)
    )
    normed, past = run(x)
    plain = F.rms_norm(x, weight, 1e-5, weight_offset=1.0) if is_rms else F.layer_norm(x, weight, bias)
    assert torch.equal(normed, plain) and torch.equal(past, x)
    wide = copy.deepcopy(leaves)
    again = F.rms_norm(wide[0], wide[1], 1e-5, weight_offset=1.0) if is_rms else F.layer_norm(*wide)
    for outputs, used in (((normed, past), grads), ((run(x)[0],), grads[:1]), ((run(x)[1],), grads[1:])):
        wants = {2: (again, wide[0] * 1), 1: (again,) if used is grads[:1] or used[0] is grads[0] else (wide[0] * 1,)}
        found = torch.autograd.grad(outputs, leaves, used, allow_unused=True)
        expected = torch.autograd.grad(wants[len(used)], wide, used, allow_unused=True, retain_graph=True)
        for a, b in zip(found, expected, strict=True):
            assert_close(a, b, dtype)
    assert not any(one.requires_grad for one in rms_norm_through(x.detach()))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("run", [rms_norm_through, layer_norm_through])
def test_norms_in_the_type_of_the_product_after_them(device, run) -> None:
    torch.manual_seed(0)
    x = drawn(3, 5, 40, device=device, dtype=torch.float32)
    weight = drawn(40, device=device, dtype=torch.float32)
    grads = [drawn(3, 5, 40, device=device, dtype=dtype, grad=False) for dtype in (torch.bfloat16, torch.float32)]
    normed, past = run(x, weight, out_dtype=torch.bfloat16)
    wide, same = run(x, weight)
    assert normed.dtype is torch.bfloat16 and torch.equal(normed, wide.bfloat16()) and torch.equal(past, x)
    found = torch.autograd.grad((normed, past), (x, weight), grads)
    expected = torch.autograd.grad((wide.bfloat16(), same), (x, weight), grads)
    for a, b in zip(found, expected, strict=True):
        assert a.dtype is torch.float32 and torch.equal(a, b)
    assert run(x.detach(), out_dtype=torch.bfloat16)[0].dtype is torch.bfloat16


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("ours", [True, False])
@pytest.mark.parametrize("transposed", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_gradients_of_fp32_parameters_under_autocast(device, ours, transposed, bias) -> None:
    """In fp32, not rounded to autocast's type (of torch's products: on a GPU), and in memory as the parameter."""
    from kernel_pytorch.core._cast_linear import cast_linear

    torch.manual_seed(0)
    x = drawn(3, 40, 48, device=device, dtype=torch.float32)
    weight = drawn(*((48, 64) if transposed else (64, 48)), device=device, dtype=torch.float32)
    offset = drawn(64, device=device, dtype=torch.float32) if bias else None
    leaves = [x, weight] if offset is None else [x, weight, offset]
    grad = drawn(3, 40, 64, device=device, dtype=torch.bfloat16, grad=False)
    with torch.autocast(device, dtype=torch.bfloat16):
        mine = cast_linear(x, weight.t() if transposed else weight, offset, ours=ours)
    assert mine.dtype is torch.bfloat16 and type(mine.grad_fn).__name__ == "_CastLinearBackward"
    wide = [leaf.detach().bfloat16().double().requires_grad_() for leaf in leaves]
    theirs = torch.nn.functional.linear(wide[0], wide[1].t() if transposed else wide[1], *wide[2:])
    assert_close(mine, theirs, torch.bfloat16)
    expected = torch.autograd.grad(theirs, wide, grad.double())
    for one, found, true in zip(leaves, torch.autograd.grad(mine, leaves, grad), expected, strict=True):
        assert found.dtype is torch.float32 and found.stride() == one.stride()
        is_rounded = one is x or (not ours and device == "cpu" and one is weight)
        assert_close(found, true, torch.bfloat16 if is_rounded else torch.float32)
    with torch.no_grad(), torch.autocast(device, dtype=torch.bfloat16):
        again = cast_linear(x, weight.t() if transposed else weight, offset, ours=ours)
    assert torch.equal(again, mine)
    plain = cast_linear(x, weight.t() if transposed else weight, offset, ours=ours)  # no autocast
    assert plain.dtype is torch.float32


def test_a_bias_alone_wants_a_gradient() -> None:
    x, weight = torch.randn(7, 5), torch.randn(3, 5)
    bias = torch.randn(3, requires_grad=True)
    grad = torch.randn(7, 3)
    (found,) = torch.autograd.grad(F.linear(x, weight, bias), bias, grad)
    torch.testing.assert_close(found, grad.sum(0))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("bias", [True, False])
def test_a_padded_product_under_autocast(device, bias) -> None:
    from kernel_pytorch.core._cast_linear import padded_linear

    torch.manual_seed(0)
    x, weight = (drawn(*shape, device=device, dtype=torch.float32) for shape in ((3, 40, 16), (29, 16)))
    leaves = [x, weight, drawn(29, device=device, dtype=torch.float32)][: 2 + bias]
    grad = drawn(3, 40, 32, device=device, dtype=torch.bfloat16, grad=False)
    grad[..., 29:] = 0  # what a softmax of minus infinity gives
    with torch.autocast(device, dtype=torch.bfloat16):
        padded = padded_linear(x, weight, leaves[2] if bias else None, 3)
    assert padded.shape == (3, 40, 32) and padded.is_contiguous() and bool((padded[..., 29:] == -torch.inf).all())
    wide = [leaf.detach().bfloat16().double().requires_grad_() for leaf in leaves]
    theirs = torch.nn.functional.linear(*wide)
    assert_close(padded[..., :29], theirs, torch.bfloat16)
    expected = torch.autograd.grad(theirs, wide, grad[..., :29].double())
    for one, found, true in zip(leaves, torch.autograd.grad(padded, leaves, grad), expected, strict=True):
        assert found.dtype is torch.float32 and found.shape == one.shape and found.is_contiguous()
        is_rounded = one is x or (device == "cpu" and one is weight)
        assert_close(found, true, torch.bfloat16 if is_rounded else torch.float32)
