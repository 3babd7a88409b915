"""Values of the norms against float64 formulas: types, shapes, strides, options, edges. The GPU has its own file."""

from __future__ import annotations

import itertools

import pytest

torch = pytest.importorskip("torch")

from norm_reference import assert_near, reference_norm  # noqa: E402

from kernel_pytorch import functional  # noqa: E402

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
SHAPES = [(1, 1), (3, 1), (4, 64), (7, 33), (2, 3, 5), (5,), (2, 1, 3, 17), (3, 4096), (2, 5003), (1, 70000), (513, 8)]
EMPTY_SHAPES = [(0, 8), (3, 0), (2, 0, 4), (0,)]


def call(kind, x, weight=None, bias=None, residual=None, eps=1e-6, weight_offset=0.0):
    if kind == "rms_norm":
        return functional.rms_norm(x, weight, eps, residual=residual, weight_offset=weight_offset)
    return functional.layer_norm(x, weight, bias, eps, residual=residual)


def tensors(shape, dtype, weight_dtype=None, seed=0):
    generator = torch.Generator().manual_seed(seed)
    random = lambda *size: torch.randn(*size, generator=generator, dtype=torch.float64)  # noqa: E731
    x, residual = random(*shape).to(dtype), random(*shape).to(dtype)
    weight, bias = (random(shape[-1]).to(weight_dtype or dtype) for _ in range(2))
    return x, residual, weight, bias


def check_forward_and_backward(kind, x, weight=None, bias=None, residual=None, weight_offset=0.0):
    """Runs ours and the formula on leaves of their own, with a gradient for every output, and compares everything."""
    if kind == "rms_norm":
        bias = None
    given = {"x": x, "weight": weight, "bias": bias, "residual": residual}
    ours = {k: None if v is None else v.detach().requires_grad_() for k, v in given.items()}
    theirs = {k: None if v is None else v.detach().double().requires_grad_() for k, v in given.items()}
    theirs_x = theirs["x"] if x.dtype == torch.float64 else x.detach().clone().requires_grad_()
    theirs["x"] = theirs_x  # in its own type, so that the sum is rounded as ours is
    output = call(kind, **ours, weight_offset=weight_offset)
    expected, expected_sum = reference_norm(kind, **theirs, weight_offset=weight_offset)
    with torch.no_grad():
        plain = call(kind, **ours, weight_offset=weight_offset)
    generator = torch.Generator().manual_seed(7)
    grad = torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x.dtype)
    if residual is None:
        assert torch.equal(plain, output.detach())
        assert output.is_contiguous() and output.dtype == x.dtype
        assert_near(output.detach(), expected.detach())
        output.backward(grad)
        expected.backward(grad.double())
    else:
        output, total = output
        assert torch.equal(plain[0], output.detach()) and torch.equal(plain[1], total.detach())
        assert torch.equal(total, x + residual)
        assert_near(output.detach(), expected.detach())
        grad_sum = torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x.dtype)
        torch.autograd.backward([output, total], [grad, grad_sum])
        torch.autograd.backward([expected, expected_sum], [grad.double(), grad_sum.double()])
    for name, tensor in ours.items():
        if tensor is not None:
            assert tensor.grad.dtype == tensor.dtype
            assert_near(tensor.grad, theirs[name].grad, factor=8.0)


@pytest.mark.parametrize("kind", ["rms_norm", "layer_norm"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_shapes_and_types(kind, dtype, shape):
    x, residual, weight, bias = tensors(shape, dtype)
    check_forward_and_backward(kind, x, weight, bias)
    check_forward_and_backward(kind, x, weight, bias, residual)


@pytest.mark.parametrize("kind", ["rms_norm", "layer_norm"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_fp32_parameters_with_narrow_activations(kind, dtype):
    x, residual, weight, bias = tensors((6, 130), dtype, torch.float32)
    check_forward_and_backward(kind, x, weight, bias, residual)


@pytest.mark.parametrize("kind", ["rms_norm", "layer_norm"])
@pytest.mark.parametrize("with_weight, with_bias, with_residual", list(itertools.product([False, True], repeat=3)))
@pytest.mark.parametrize("weight_offset", [0.0, 1.0])
def test_option_combinations(kind, with_weight, with_bias, with_residual, weight_offset):
    if kind == "layer_norm" and weight_offset:
        pytest.skip("layer_norm takes no weight_offset from Python")
    x, residual, weight, bias = tensors((5, 3, 48), torch.float32)
    check_forward_and_backward(
        kind,
        x,
        weight if with_weight else None,
        bias if with_bias else None,
        residual if with_residual else None,
        weight_offset,
    )


def strided_variants():
    base = torch.randn(6, 10, 24, generator=torch.Generator().manual_seed(1))
    yield "transposed rows", base.transpose(0, 1)
    yield "columns strided", base.transpose(1, 2)
    yield "sliced columns", base[..., 3:20]
    yield "every second column", base[..., ::2]
    yield "every second row", base[::2, 1::3]
    yield "expanded rows", base[:1].expand(9, 10, 24)
    yield "expanded columns", base[..., :1].expand(6, 10, 7)
    yield "permuted", base.permute(2, 0, 1)
    yield "channels last", torch.randn(2, 8, 5, 6).to(memory_format=torch.channels_last)
    yield "misaligned", torch.randn(4 * 24 + 1)[1:].view(4, 24)


@pytest.mark.parametrize("kind", ["rms_norm", "layer_norm"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name, view", list(strided_variants()), ids=lambda v: v if isinstance(v, str) else "")
def test_strides(kind, dtype, name, view):
    x = view if dtype == torch.float32 else view.to(dtype).as_strided(view.shape, view.to(dtype).stride())
    _, residual, weight, bias = tensors(x.shape, dtype)
    check_forward_and_backward(kind, x, weight, bias)
    check_forward_and_backward(kind, residual, weight, bias, residual=x)


@pytest.mark.parametrize("kind", ["rms_norm", "layer_norm"])
def test_strided_gradients_and_parameters(kind):
    x, _, weight, bias = tensors((5, 12), torch.float32)
    spread = torch.stack([weight, bias], dim=1)  # columns of it have stride 2
    check_forward_and_backward(kind, x, spread[:, 0], spread[:, 1])
    ours, theirs = (x.clone().requires_grad_() for _ in range(2))
    call(kind, ours, weight).sum().backward()  # an expanded gradient
    reference_norm(kind, theirs, weight)[0].sum().backward()
    assert_near(ours.grad, theirs.grad.double(), factor=8.0)
    ours.grad = theirs.grad = None
    grad = torch.randn(12, 5).t()
    call(kind, ours, weight).backward(grad)
    reference_norm(kind, theirs, weight)[0].backward(grad.double())
    assert_near(ours.grad, theirs.grad.double(), factor=8.0)


@pytest.mark.parametrize("kind", ["rms_norm", "layer_norm"])
@pytest.mark.parametrize("shape", EMPTY_SHAPES, ids=str)
def test_empty(kind, shape):
    x = torch.empty(shape, requires_grad=True)
    weight = torch.ones(shape[-1], requires_grad=True)
    output = call(kind, x, weight)
    assert output.shape == x.shape
    output.sum().backward()
    assert x.grad.shape == x.shape
    assert torch.equal(weight.grad, torch.zeros_like(weight))


@pytest.mark.parametrize("kind", ["rms_norm", "layer_norm"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_not_a_number_and_infinity_stay_in_their_row(kind, dtype):
    x, _, weight, bias = tensors((4, 40), dtype)
    x[1, 7], x[2, 9] = float("nan"), float("inf")
    output = call(kind, x, weight, bias)
    expected, _ = reference_norm(kind, x, weight, bias if kind == "layer_norm" else None)
    assert torch.equal(output.isnan(), expected.isnan())
    assert_near(output[[0, 3]], expected[[0, 3]])


@pytest.mark.parametrize("kind", ["rms_norm", "layer_norm"])
def test_only_one_of_the_outputs_is_used(kind):
    for used in (0, 1):
        x, residual, weight, _ = tensors((3, 20), torch.float32)
        leaves = [t.requires_grad_() for t in (x, residual, weight)]
        expected = [t.detach().double().requires_grad_() for t in leaves]
        call(kind, x, weight, residual=residual)[used].square().sum().backward()
        reference_norm(kind, expected[0], expected[2], residual=expected[1])[used].square().sum().backward()
        for ours, theirs in zip(leaves, expected, strict=True):
            assert (ours.grad is None) == (theirs.grad is None)
            if ours.grad is not None:
                assert_near(ours.grad, theirs.grad, factor=8.0)


@pytest.mark.parametrize("needs", list(itertools.product([False, True], repeat=4))[1:], ids=str)
def test_only_wanted_gradients_come(needs):
    leaves = [t.requires_grad_(n) for t, n in zip(tensors((3, 20), torch.float32), needs, strict=True)]
    x, residual, weight, bias = leaves
    output, total = functional.layer_norm(x, weight, bias, residual=residual)
    (output.square().sum() + total.square().sum()).backward()
    assert [leaf.grad is not None for leaf in leaves] == list(needs)


def test_types_by_role():
    x, residual, weight, bias = tensors((3, 16), torch.float32)
    narrow = functional.layer_norm(x, weight.bfloat16(), bias.bfloat16())
    assert torch.equal(narrow, functional.layer_norm(x, weight.bfloat16().float(), bias.bfloat16().float()))
    mixed = functional.layer_norm(x.bfloat16(), weight, bias.bfloat16())
    assert torch.equal(mixed, functional.layer_norm(x.bfloat16(), weight, bias.bfloat16().float()))
    output, total = functional.add_rms_norm(x.bfloat16(), residual, weight)
    assert output.dtype == total.dtype == torch.float32
    output, total = functional.add_rms_norm(x.bfloat16(), residual.half(), weight)
    assert output.dtype == total.dtype == torch.float32
    assert functional.rms_norm(x.double(), weight).dtype == torch.float64
    weight = weight.bfloat16().requires_grad_()
    functional.rms_norm(x, weight).sum().backward()
    assert weight.grad.dtype == torch.bfloat16


def test_autocast_keeps_activations_and_fp32_weights():
    x, residual, weight, _ = tensors((4, 32), torch.float32)
    weight.requires_grad_()
    linear = torch.nn.Linear(32, 32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        activation = linear(x)
        output = functional.rms_norm(activation, weight)
        assert activation.dtype == output.dtype == torch.bfloat16
        assert functional.rms_norm(x, weight).dtype == torch.float32
        assert functional.rms_norm(activation, weight, residual=residual)[1].dtype == torch.float32
    output.float().sum().backward()
    assert weight.grad.dtype == torch.float32 and linear.weight.grad is not None
    assert_near(output.detach(), reference_norm("rms_norm", activation, weight)[0].detach())


@pytest.mark.parametrize("kind", ["rms_norm", "layer_norm"])
@pytest.mark.parametrize("narrow", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("with_residual", [False, True])
def test_a_sixteen_bit_output_beside_fp32_is_the_cast_of_it(kind, narrow, with_residual):
    """Output, sum and gradients are those of casts around the norm, bit for bit, whichever of the two is fp32."""
    torch.manual_seed(0)
    x, weight = torch.randn(3, 5, 72, requires_grad=True), torch.randn(72, requires_grad=True)
    residual = torch.randn(3, 5, 72).to(narrow).requires_grad_() if with_residual else None
    leaves = [x, weight] if residual is None else [x, weight, residual]
    grads = [torch.randn(3, 5, 72).to(narrow), torch.randn(3, 5, 72)][: 1 + with_residual]
    run = getattr(functional, kind)
    wide = run(x, weight, residual=None if residual is None else residual.float())
    expected = (wide.to(narrow),) if residual is None else (wide[0].to(narrow), wide[1])
    expected += torch.autograd.grad(expected, leaves, grads)
    for first, second in ((x, residual),) if residual is None else ((x, residual), (residual, x)):
        found = run(first, weight, residual=second, out_dtype=narrow)
        found = (found,) if residual is None else found
        found += torch.autograd.grad(found, leaves, grads)
        for mine, theirs in zip(found, expected, strict=True):
            assert mine.dtype is theirs.dtype and torch.equal(mine, theirs)
    with torch.no_grad():
        plain = run(x, weight, residual=residual, out_dtype=narrow)
        assert torch.equal(plain if residual is None else plain[0], expected[0])
    with pytest.raises(RuntimeError, match=f"{kind}: output is fp32, x is bf16"):
        run(x.bfloat16(), weight, out_dtype=torch.float32)
