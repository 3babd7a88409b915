"""matmul, linear and mlp for torch: values, gradients, views, compilers, transforms, errors."""

from __future__ import annotations

import itertools

import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as torch_functional  # noqa: E402
from attention_cases import products_of_fp32  # noqa: E402
from kernel_pytorch._ops.support.casting import product_precision  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402

from kernel_pytorch import functional  # noqa: E402

ops = torch.ops.kernel_pytorch
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
FUNCTIONS = {
    None: lambda x: x,
    "gelu": torch_functional.gelu,
    "gelu_tanh": lambda x: torch_functional.gelu(x, approximate="tanh"),
    "silu": torch_functional.silu,
    "relu": torch_functional.relu,
    "relu_squared": lambda x: torch_functional.relu(x) ** 2,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "swiglu": lambda x: torch_functional.silu(x[..., ::2]) * x[..., 1::2],
    "geglu": lambda x: torch_functional.gelu(x[..., ::2]) * x[..., 1::2],
    "reglu": lambda x: torch_functional.relu(x[..., ::2]) * x[..., 1::2],
    "glu": lambda x: torch.sigmoid(x[..., ::2]) * x[..., 1::2],
}
GATED = ("swiglu", "geglu", "reglu", "glu")


def types_on(device):
    return [dtype for dtype in TOLERANCE if device == "cpu" or dtype is not torch.float64]


def assert_near(actual, exact, dtype, terms=1):
    exact = exact.detach().cpu().double()
    scale = exact.abs().max().item() if exact.numel() else 0.0
    torch.testing.assert_close(
        actual.detach().cpu().double(), exact, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype] * max(scale, 1e-3) * terms
    )


def leaves(tensors):
    ours = [None if t is None else t.detach().requires_grad_() for t in tensors]
    exact = [None if t is None else t.detach().cpu().double().requires_grad_() for t in tensors]
    return ours, exact


def compare_gradients(output, wanted, ours, exact, dtype, terms=2):
    grad = torch.randn(wanted.shape, dtype=torch.float64)
    ours, exact = [t for t in ours if t is not None], [t for t in exact if t is not None]
    grads = torch.autograd.grad(output, ours, grad.to(output.device, output.dtype))
    for mine, theirs, leaf in zip(grads, torch.autograd.grad(wanted, exact, grad), ours, strict=True):
        assert mine.dtype is leaf.dtype
        assert_near(mine, theirs, dtype, terms)


SHAPES = [
    ((5, 7), (7, 3)),
    ((64, 96), (96, 130)),
    ((1, 33), (33, 70)),
    ((2, 3, 9, 16), (16, 8)),
    ((2, 3, 9, 16), (2, 3, 16, 8)),
    ((3, 1, 9, 16), (5, 16, 8)),
    ((16,), (16, 8)),
    ((2, 9, 16), (16,)),
    ((16,), (16,)),
    ((4, 0), (0, 6)),
    ((0, 4), (4, 6)),
]


@pytest.mark.parametrize("device", DEVICES)
def test_matmul_is_torchs(device):
    torch.manual_seed(1)
    for dtype, (first, second) in itertools.product(types_on(device), SHAPES):
        ours, exact = leaves([torch.randn(shape).to(device, dtype) for shape in (first, second)])
        output, wanted = functional.matmul(*ours), torch.matmul(*exact)
        assert output.shape == wanted.shape and output.dtype is dtype
        assert_near(output, wanted, dtype)
        compare_gradients(output, wanted, ours, exact, dtype)


@pytest.mark.parametrize("device", DEVICES)
def test_views_are_operands(device):
    a, b = torch.randn(40, 24, device=device), torch.randn(50, 24, device=device)
    exact = a.double() @ b.double().T
    assert_near(functional.matmul(a, b.T), exact, torch.float32)
    assert_near(functional.matmul(a.T.contiguous().T, b.T.contiguous()), exact, torch.float32)
    scattered = torch.randn(40, 48, device=device)[:, ::2]
    assert_near(functional.matmul(scattered, b.T), scattered.double() @ b.double().T, torch.float32)
    batched = torch.randn(4, 6, 24, device=device)
    many = b.T.expand(4, 24, 50)
    assert_near(functional.matmul(batched, many), batched.double() @ many.double(), torch.float32)
    mixed = functional.matmul(a, b.T.bfloat16())
    assert mixed.dtype is torch.float32


def test_products_of_fp32_on_a_gpu_follow_torchs_setting():
    """None asks torch, an answer of the caller's goes first, and nothing else is ever rounded."""
    with FakeTensorMode():
        on_gpu, on_cpu = torch.empty(8, 8, device="cuda"), torch.empty(8, 8)
        for setting, expected in (("ieee", "full"), ("tf32", "tf32")):
            with products_of_fp32(setting):
                assert product_precision("matmul", None, on_gpu) == expected
                assert product_precision("matmul", "full", on_gpu) == "full"
                assert product_precision("matmul", None, on_gpu.bfloat16()) == "full"
                assert product_precision("matmul", None, on_cpu) == "full"


@pytest.mark.parametrize("device", DEVICES)
def test_named_precisions(device):
    a, b = torch.randn(48, 200, device=device), torch.randn(200, 72, device=device)
    exact = a.double() @ b.double()
    rounded = a.bfloat16().double() @ b.bfloat16().double()
    near = functional.matmul(a, b, precision="bf16")
    torch.testing.assert_close(near.double(), rounded, rtol=1e-5, atol=1e-4)
    split = functional.matmul(a, b, precision="bf16x3")
    torch.testing.assert_close(split.double(), exact, rtol=1e-4, atol=1e-3)
    with pytest.raises(ValueError, match="full, tf32, bf16, bf16x3"):
        functional.matmul(a, b, precision="fp8")
    with pytest.raises(RuntimeError, match="precision is for fp32"):
        functional.matmul(a.half(), b.half(), precision="bf16")
    x, weight = a.requires_grad_(), b.T.contiguous().requires_grad_()
    for layer in (
        functional.linear(x, weight, precision="bf16"),
        functional.mlp(x, weight, torch.eye(72, device=device), activation=None, precision="bf16"),
    ):
        torch.testing.assert_close(layer.double(), rounded, rtol=1e-2, atol=1e-2)
        assert (layer.double() - exact).abs().max() > 1e-3  # an option that reaches the products
        gradient = torch.autograd.grad(layer.sum(), x)[0]
        wanted = b.bfloat16().double().sum(1).expand(48, 200)
        torch.testing.assert_close(gradient.double(), wanted, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("activation", FUNCTIONS)
def test_linear_with_everything_and_with_nothing(activation, device):
    torch.manual_seed(2)
    function = FUNCTIONS[activation]
    for dtype, shape, everything in itertools.product(types_on(device), [(7, 20), (2, 3, 33), (20,), (0, 8)], (0, 1)):
        columns = 26
        x, weight, bias = (torch.randn(s).to(device, dtype) for s in (shape, (columns, shape[-1]), (columns,)))
        output_columns = columns // 2 if activation in GATED else columns
        residual = torch.randn(*shape[:-1], output_columns).to(device, dtype)
        given = [x, weight, bias if everything else None, residual if everything else None]
        ours, exact = leaves(given)
        output = functional.linear(*ours[:3], activation=activation, residual=ours[3])
        wanted = function(torch_functional.linear(*exact[:3]))
        wanted = wanted + exact[3] if everything else wanted
        assert output.dtype is dtype and output.is_contiguous() and output.shape == wanted.shape
        assert_near(output, wanted, dtype, terms=2)
        with torch.no_grad():
            assert torch.equal(functional.linear(*ours[:3], activation=activation, residual=ours[3]), output)
        compare_gradients(output, wanted, ours, exact, dtype, terms=4)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
def test_mlp_is_two_layers(activation, device):
    torch.manual_seed(3)
    for dtype, everything in itertools.product(types_on(device), (0, 1)):
        hidden = 24 if activation == "gelu" else 12
        sizes = [(2, 9, 20), (24, 20), (24,), (16, hidden), (16,), (2, 9, 16)]
        given = [torch.randn(s).to(device, dtype) for s in sizes]
        if not everything:
            given[2] = given[4] = given[5] = None
        ours, exact = leaves(given)
        x, weight_in, bias_in, weight_out, bias_out, residual = ours
        output = functional.mlp(x, weight_in, weight_out, bias_in, bias_out, activation=activation, residual=residual)
        inner = FUNCTIONS[activation](torch_functional.linear(exact[0], exact[1], exact[2]))
        wanted = torch_functional.linear(inner, exact[3], exact[4])
        wanted = wanted + exact[5] if everything else wanted
        assert_near(output, wanted, dtype, terms=2)
        compare_gradients(output, wanted, ours, exact, dtype, terms=4)
        with torch.no_grad():
            assert torch.equal(
                functional.mlp(x, weight_in, weight_out, bias_in, bias_out, activation=activation, residual=residual),
                output,
            )


def test_only_what_is_wanted():
    x, weight, bias = torch.randn(5, 8), torch.randn(6, 8), torch.randn(6)
    for wanted in itertools.product((False, True), repeat=3):
        if not any(wanted):
            continue
        given = [t.clone().requires_grad_(w) for t, w in zip((x, weight, bias), wanted, strict=True)]
        theirs = [t.clone().requires_grad_(w) for t, w in zip((x, weight, bias), wanted, strict=True)]
        functional.linear(*given, activation="silu").sum().backward()
        torch_functional.silu(torch_functional.linear(*theirs)).sum().backward()
        for mine, exact in zip(given, theirs, strict=True):
            if exact.grad is None:
                assert mine.grad is None
            else:
                torch.testing.assert_close(mine.grad, exact.grad, rtol=1e-4, atol=1e-5)


def test_gradcheck():
    def leaf(*shape):
        return torch.randn(*shape, dtype=torch.float64).requires_grad_()

    a, b = leaf(2, 3, 4), leaf(2, 4, 5)
    assert torch.autograd.gradcheck(functional.matmul, (a, b))
    assert torch.autograd.gradgradcheck(functional.matmul, (a, b))
    x, weight, bias, residual = leaf(3, 4), leaf(6, 4), leaf(6), leaf(3, 3)
    assert torch.autograd.gradcheck(
        lambda x, w, c, r: functional.linear(x, w, c, activation="swiglu", residual=r), (x, weight, bias, residual)
    )
    assert torch.autograd.gradcheck(
        lambda x, w, c, v, d: functional.mlp(x, w, v, c, d, activation="geglu"), (x, weight, bias, leaf(2, 3), leaf(2))
    )


def test_second_derivatives_exist_without_an_activation():
    x, weight = torch.randn(3, 4, requires_grad=True), torch.randn(6, 4, requires_grad=True)
    (grad,) = torch.autograd.grad(functional.linear(x, weight, activation="gelu").sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="second derivative"):
        grad.sum().backward()
    leaves = [torch.randn(*shape, dtype=torch.float64).requires_grad_() for shape in ((3, 4), (6, 4), (6,))]
    assert torch.autograd.gradgradcheck(functional.linear, leaves)


def opcheck_samples():
    for dtype in (torch.float32, torch.bfloat16):

        def leaf(*shape, dtype=dtype):
            return torch.randn(*shape).to(dtype).requires_grad_()

        def fixed(*shape, dtype=dtype):
            return torch.randn(*shape).to(dtype)

        yield ops.matmul, (fixed(2, 3, 4), fixed(2, 4, 5), "full")
        yield ops.matmul_forward, (leaf(3, 4), leaf(4, 5), "full")
        yield ops.matmul_add_, (fixed(3, 5), fixed(3, 4), fixed(4, 5), 0.5)
        for kind, gated in (("identity", False), ("gelu", False), ("silu", True)):
            columns = 3 if gated else 6
            yield ops.linear, (fixed(2, 5, 4), fixed(6, 4), fixed(6), None, kind, gated, "full", None)
            yield (
                ops.linear_forward,
                (leaf(2, 5, 4), leaf(6, 4), leaf(6), leaf(2, 5, columns), kind, gated, "full", None),
            )
            kept = fixed(2, 5, 6) if gated or kind != "identity" else fixed(0)
            for flags in ((True, True, True), (True, False, False), (False, False, True)):
                args = (fixed(2, 5, columns), fixed(2, 5, 4), fixed(6, 4), fixed(6), kept, kind, gated, "full", *flags)
                yield ops.linear_backward, args
            # A weight stored transposed has a gradient stored so; of 16 bits it may be wanted in fp32.
            args = (fixed(2, 5, columns), fixed(2, 5, 4), fixed(4, 6).t(), fixed(6), kept, kind, gated, "full")
            yield ops.linear_backward, (*args, True, True, True, torch.float32)
            yield ops.mlp, (fixed(5, 4), fixed(6, 4), None, fixed(2, columns), fixed(2), None, kind, gated, "full")
            yield (
                ops.mlp_forward,
                (leaf(5, 4), leaf(6, 4), leaf(6), leaf(2, columns), None, leaf(5, 2), kind, gated, "full"),
            )
        tensors = (fixed(5, 2), fixed(5, 4), fixed(6, 4), fixed(6), fixed(2, 3), fixed(2), fixed(5, 3), fixed(5, 6))
        yield ops.mlp_backward, (*tensors, "silu", True, "full", True, True, True, False, True)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("op, args", list(opcheck_samples()), ids=lambda v: getattr(v, "__name__", ""))
def test_opcheck(op, args):
    torch.library.opcheck(op.default, args)


def test_torch_compile():
    torch._dynamo.reset()
    weight_in, weight_out, bias = torch.randn(24, 10), torch.randn(10, 12), torch.randn(24)

    def model(x, weight_in, weight_out, bias):
        hidden = functional.linear(x, weight_in, bias, activation="swiglu")
        y = functional.linear(hidden, weight_out, residual=x)
        return functional.matmul(y, y.mT) + functional.mlp(x, weight_in, weight_out, bias, activation="swiglu").sum()

    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend="aot_eager")
    for rows in (7, 9):
        given = [t.clone().requires_grad_() for t in (torch.randn(2, rows, 10), weight_in, weight_out, bias)]
        eager, traced = model(*given), compiled(*given)
        torch.testing.assert_close(traced, eager)
        for mine, theirs in zip(
            torch.autograd.grad(traced.sum(), given), torch.autograd.grad(eager.sum(), given), strict=True
        ):
            torch.testing.assert_close(mine, theirs)


def test_autocast_is_torchs():
    x, weight, bias = torch.randn(6, 8), torch.randn(5, 8), torch.randn(5)
    with torch.autocast("cpu", torch.bfloat16):
        assert functional.linear(x, weight, bias).dtype is torch.bfloat16
        assert functional.matmul(x, weight.T).dtype is torch.bfloat16
        assert functional.mlp(x, weight, torch.randn(3, 5), bias).dtype is torch.bfloat16
        assert functional.linear(x.double(), weight.double()).dtype is torch.float64
    with pytest.raises(TypeError, match="autocast"):
        functional.linear(x.bfloat16(), weight)


def test_vmap_and_per_sample_gradients():
    x, weight, bias = torch.randn(4, 3, 8), torch.randn(6, 8), torch.randn(6)
    folded = torch.func.vmap(lambda x: functional.linear(x, weight, bias, activation="gelu"))(x)
    torch.testing.assert_close(folded, functional.linear(x, weight, bias, activation="gelu"))
    products = torch.func.vmap(functional.matmul)(x, x.mT.contiguous())
    torch.testing.assert_close(products, x @ x.mT, rtol=1e-4, atol=1e-5)

    def loss(weight, x):
        return functional.linear(x, weight, bias, activation="gelu").sum()

    grads = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(weight, x)
    for i in range(4):
        torch.testing.assert_close(grads[i], torch.func.grad(loss)(weight, x[i]), rtol=1e-4, atol=1e-5)


def test_interleaved_weights():
    gate, up, x = torch.randn(6, 8), torch.randn(6, 8), torch.randn(3, 8)
    weight = functional.interleave_gate_up(gate, up)
    assert torch.equal(weight[0], gate[0]) and torch.equal(weight[1], up[0]) and torch.equal(weight[-1], up[-1])
    wanted = torch_functional.silu(x @ gate.T) * (x @ up.T)
    torch.testing.assert_close(functional.linear(x, weight, activation="swiglu"), wanted, rtol=1e-4, atol=1e-4)
    assert functional.interleave_gate_up(gate[:, 0], up[:, 0]).shape == (12,)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("rows", [1, 9, 300])
def test_gate_and_up_as_two_matrices(device, rows):
    """Two tensors in either order in memory, halves of one, misaligned rows, other strides."""
    for dtype, activation in zip((torch.bfloat16, torch.float32), ("silu", "gelu"), strict=True):
        both = torch.randn(264, 136, device=device, dtype=torch.float64).to(dtype)
        pairs = [(both[:132], both[132:]), (both[132:], both[:132]), (both[:132].clone(), both[132:].clone())]
        pairs += [
            (both[:132, :72], both[132:, :72]),
            (both[:132, 3:75], both[132:, 3:75]),
            (both.mT[:131], both.mT[5:]),
        ]
        for gate, up in pairs:
            gate, up = gate[: len(up)], up[: len(gate)]
            x = torch.randn(rows, gate.shape[1], device=device, dtype=torch.float64).to(dtype)
            residual = torch.randn(rows, len(gate), device=device, dtype=torch.float64).to(dtype)
            (ours_x, ours_gate, ours_up, extra), exact = leaves((x, gate, up, residual))
            wanted = FUNCTIONS[activation](exact[0] @ exact[1].T) * (exact[0] @ exact[2].T) + exact[3]
            with torch.no_grad():
                found = functional.linear(x, gate, activation=activation, residual=residual, weight_up=up)
            assert_near(found, wanted, dtype, 2)
            output = functional.linear(ours_x, ours_gate, activation=activation, residual=extra, weight_up=ours_up)
            assert_near(output, wanted, dtype, 2)
            compare_gradients(output, wanted, [ours_x, ours_gate, ours_up, extra], exact, dtype)


def test_errors_of_weight_up():
    x, weight = torch.randn(3, 8), torch.randn(6, 8)
    with pytest.raises(RuntimeError, match=r"weight_up has shape \[3, 8\]; it must be the weight's, \[6, 8\]"):
        functional.linear(x, weight, activation="silu", weight_up=weight[:3])
    with pytest.raises(RuntimeError, match="leave out weight_up"):
        functional.linear(x, weight, activation="swiglu", weight_up=weight)
    with pytest.raises(RuntimeError, match="gelu, gelu_tanh, silu, relu or sigmoid"):
        functional.linear(x, weight, activation="tanh", weight_up=weight)


def test_errors_name_both_values_and_the_cure():
    x, weight = torch.randn(3, 8), torch.randn(5, 8)
    with pytest.raises(
        RuntimeError, match=r"x has shape \[3, 7\], weight has \[5, 8\]; their last sizes must be equal"
    ):
        functional.linear(x[:, :7], weight)
    with pytest.raises(RuntimeError, match="a gated layer's rows are pairs"):
        functional.linear(x, weight, activation="swiglu")
    with pytest.raises(RuntimeError, match="gelu_tanh"):
        functional.linear(x, weight, activation="mish")
    with pytest.raises(RuntimeError, match="residual"):
        functional.linear(x, weight, residual=x)
    with pytest.raises(RuntimeError, match="5 columns of b"):
        functional.linear(x, weight, torch.randn(4))
    with pytest.raises(RuntimeError, match="hidden size 5"):
        functional.mlp(x, weight, torch.randn(4, 6))
    with pytest.raises(RuntimeError, match="a's last size and b's last but one"):
        functional.matmul(x, weight)
    with pytest.raises(ValueError, match="at least one"):
        functional.matmul(x, torch.tensor(1.0))
