"""Derivatives: gradcheck in fp64, torch.func's transforms, and refusals where there is no formula."""

from __future__ import annotations

import itertools

import pytest

torch = pytest.importorskip("torch")

from norm_reference import reference_norm  # noqa: E402

from kernel_pytorch import functional  # noqa: E402

vmap, grad = torch.func.vmap, torch.func.grad


def random(*shape):
    return torch.randn(*shape, dtype=torch.float64)


@pytest.mark.parametrize(
    "with_weight, with_residual, weight_offset", list(itertools.product([False, True], [False, True], [0.0, 1.0]))
)
def test_gradcheck_rms_norm(with_weight, with_residual, weight_offset):
    x, weight, residual = random(2, 3, 5), random(5), random(2, 3, 5)
    leaves = [x.requires_grad_()]
    leaves += [weight.requires_grad_()] if with_weight else []
    leaves += [residual.requires_grad_()] if with_residual else []

    def run(x, *rest):
        rest = list(rest)
        weight = rest.pop(0) if with_weight else None
        residual = rest.pop(0) if with_residual else None
        return functional.rms_norm(x, weight, 1e-3, residual=residual, weight_offset=weight_offset)

    assert torch.autograd.gradcheck(run, leaves)


@pytest.mark.parametrize("with_weight, with_bias, with_residual", list(itertools.product([False, True], repeat=3)))
def test_gradcheck_layer_norm(with_weight, with_bias, with_residual):
    x, weight, bias, residual = random(2, 3, 5), random(5), random(5), random(2, 3, 5)
    chosen = [
        t.requires_grad_() if w else None
        for t, w in zip((weight, bias, residual), (with_weight, with_bias, with_residual), strict=True)
    ]
    leaves = [x.requires_grad_()] + [t for t in chosen if t is not None]

    def run(x, *rest):
        rest = iter(rest)
        weight, bias, residual = (None if t is None else next(rest) for t in chosen)
        return functional.layer_norm(x, weight, bias, 1e-3, residual=residual)

    assert torch.autograd.gradcheck(run, leaves)


@pytest.mark.parametrize("op", ["rms_norm", "layer_norm"])
@pytest.mark.parametrize("with_residual", [False, True])
def test_second_derivative_raises_and_create_graph_alone_does_not(op, with_residual):
    x, weight, residual = random(3, 6).requires_grad_(), random(6).requires_grad_(), random(3, 6)
    output = getattr(functional, op)(x, weight, residual=residual if with_residual else None)
    output = output[0] if with_residual else output
    (first,) = torch.autograd.grad(output.square().sum(), x, create_graph=True)
    assert first.shape == x.shape
    with pytest.raises(RuntimeError, match=f"{op}: .*second derivative"):
        first.sum().backward()
    with pytest.raises(RuntimeError, match=f"{op}: .*second derivative"):
        grad(lambda x: grad(lambda x: getattr(functional, op)(x, weight.detach()).square().sum())(x).sum())(x.detach())


@pytest.mark.parametrize("op", ["rms_norm", "layer_norm"])
@pytest.mark.parametrize("with_gradient", [False, True])
def test_forward_mode_raises(op, with_gradient):
    x, weight = random(3, 6), random(6).requires_grad_(with_gradient)
    run = lambda x: getattr(functional, op)(x, weight)  # noqa: E731
    with pytest.raises(NotImplementedError, match=f"{op}: forward-mode"):
        torch.func.jvp(run, (x,), (torch.ones_like(x),))
    with pytest.raises(NotImplementedError, match=f"{op}: forward-mode"), torch.autograd.forward_ad.dual_level():
        run(torch.autograd.forward_ad.make_dual(x, torch.ones_like(x)))


def calls(op):
    """(name, function of (x, weight), the formula of it) for an op with its options."""
    ours = getattr(functional, op)
    yield lambda x, w: ours(x, w), lambda x, w: reference_norm(op, x, w, eps=1e-6 if op == "rms_norm" else 1e-5)[0]
    yield (
        lambda x, w: sum(ours(x, w, residual=x * 2, eps=1e-3)),
        lambda x, w: sum(reference_norm(op, x, w, residual=x * 2, eps=1e-3)),
    )


@pytest.mark.parametrize("op", ["rms_norm", "layer_norm"])
@pytest.mark.parametrize("with_gradient", [False, True])
@pytest.mark.parametrize("x_dim, weight_dim", [(0, None), (1, None), (2, None), (-1, None), (0, 0), (1, 1), (None, 0)])
def test_vmap(op, with_gradient, x_dim, weight_dim):
    # The batch is 4 wide; a dimension of the tensor is inserted where it is mapped.
    x, weight = random(3, 5, 6), random(6)
    x = x if x_dim is None else torch.stack([x * (i + 1) for i in range(4)], x_dim)
    weight = weight if weight_dim is None else torch.stack([weight + i for i in range(4)], weight_dim)
    x.requires_grad_(with_gradient)
    for ours, formula in calls(op):
        actual = vmap(ours, (x_dim, weight_dim))(x, weight)
        torch.testing.assert_close(actual, vmap(formula, (x_dim, weight_dim))(x, weight))
        if with_gradient:
            got = torch.autograd.grad(actual.square().sum(), x)
            expected = torch.autograd.grad(vmap(formula, (x_dim, weight_dim))(x, weight).square().sum(), x)
            torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("op", ["rms_norm", "layer_norm"])
@pytest.mark.parametrize("argnums", [0, 1, (0, 1)], ids=str)
def test_func_grad_and_per_sample_gradients(op, argnums):
    x, weight = random(4, 3, 6), random(6)
    for ours, formula in calls(op):
        loss = lambda f: lambda x, w: f(x, w).square().sum()  # noqa: E731
        torch.testing.assert_close(grad(loss(ours), argnums)(x, weight), grad(loss(formula), argnums)(x, weight))
        actual = vmap(grad(loss(ours), argnums), (0, None))(x, weight)
        torch.testing.assert_close(actual, vmap(grad(loss(formula), argnums), (0, None))(x, weight))
        both = vmap(grad(loss(ours), argnums), (0, 0))(x, weight + random(4, 6))
        assert all(t.shape[0] == 4 for t in (both if isinstance(both, tuple) else (both,)))
        nested = vmap(vmap(grad(loss(ours), argnums), (0, None)), (0, None))(x, weight)
        expected = vmap(vmap(grad(loss(formula), argnums), (0, None)), (0, None))(x, weight)
        torch.testing.assert_close(nested, expected)


def test_vjp_outlives_its_transform():
    x, weight = random(3, 6), random(6)
    output, pull = torch.func.vjp(functional.rms_norm, x, weight)
    expected_output, expected_pull = torch.func.vjp(lambda x, w: reference_norm("rms_norm", x, w)[0], x, weight)
    torch.testing.assert_close(output, expected_output)
    torch.testing.assert_close(pull(torch.ones_like(output)), expected_pull(torch.ones_like(output)))


def test_a_tensor_escaped_from_a_transform_keeps_its_gradient():
    escaped = []
    x = random(3, 6).requires_grad_()
    grad(lambda x: escaped.append(x) or x.sum())(x)
    functional.rms_norm(escaped[0], random(6)).square().sum().backward()
    assert x.grad is not None and x.grad.abs().sum() > 0


def test_jacrev_matches_the_formula():
    x, weight = random(2, 5), random(5)
    actual = torch.func.jacrev(functional.rms_norm)(x, weight)
    torch.testing.assert_close(actual, torch.func.jacrev(lambda x, w: reference_norm("rms_norm", x, w)[0])(x, weight))


def test_repeated_and_interleaved_backward():
    x, weight = random(3, 6).requires_grad_(), random(6).requires_grad_()
    output = functional.rms_norm(x, weight)
    first = torch.autograd.grad(output.sum(), (x, weight), retain_graph=True)
    second = torch.autograd.grad(output.sum(), (x, weight))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    with pytest.raises(RuntimeError, match="second time"):
        output.sum().backward()


def test_changing_a_saved_input_is_noticed():
    x, weight = random(3, 6).requires_grad_(), random(6)
    value = x * 1
    output = functional.rms_norm(value, weight)
    value.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()


def test_activation_checkpointing():
    from torch.utils.checkpoint import checkpoint

    x, weight = random(3, 6).requires_grad_(), random(6).requires_grad_()
    plain = torch.autograd.grad(functional.rms_norm(x, weight).square().sum(), (x, weight))
    again = torch.autograd.grad(
        checkpoint(functional.rms_norm, x, weight, use_reentrant=False).square().sum(), (x, weight)
    )
    assert all(torch.equal(a, b) for a, b in zip(plain, again, strict=True))
