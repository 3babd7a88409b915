"""Matrix products on a GPU: values in every order and form, gradients, FP8 scalings, graphs, results in place."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as torch_functional  # noqa: E402
from kernel_pytorch._ops.float8 import dequantize, scaled_matmul  # noqa: E402
from kernel_pytorch._ops.matmul import add_product_  # noqa: E402
from kernel_pytorch.functional import linear, matmul  # noqa: E402

pytestmark = pytest.mark.gpu

# Rounding of the result, and of sums of a few hundred products.
TOLERANCE = {torch.bfloat16: 4e-3, torch.float16: 6e-4, torch.float32: 2e-6}


def normal(*shape, dtype=torch.bfloat16):
    return torch.randn(*shape, device="cuda").to(dtype)


def assert_near(got, wanted, tolerance):
    error = ((got.double() - wanted).norm() / wanted.norm()).item()
    assert error < tolerance, f"relative error {error:.2e}"


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("m, n, k", [(128, 256, 64), (1, 264, 512), (300, 520, 328), (67, 131, 45), (16, 8, 1)])
def test_orders(m, n, k, dtype):
    torch.manual_seed(m + n)
    a, b = normal(2, m, k, dtype=dtype), normal(2, k, n, dtype=dtype)
    wanted = a.double() @ b.double()
    for x in (a, a.mT.contiguous().mT):
        for y in (b, b.mT.contiguous().mT):
            assert_near(matmul(x, y), wanted, TOLERANCE[dtype])


@pytest.mark.parametrize("activation", [None, "gelu", "silu", "swiglu", "geglu"])
@pytest.mark.parametrize("features", [264, 130])  # rows of 16 bytes, and others
def test_linear_and_its_gradients(activation, features):
    torch.manual_seed(features)
    x, weight, bias = normal(3, 50, 200), normal(features, 200) / 14, normal(features)
    gated = activation in ("swiglu", "geglu")
    residual = normal(3, 50, features // 2 if gated else features)
    arguments = [t.requires_grad_() for t in (x, weight, bias, residual)]
    output = linear(x, weight, bias, activation=activation, residual=residual)
    gradient = normal(*output.shape)
    got = (output, *torch.autograd.grad(output, arguments, gradient))

    exact = [t.detach().double().requires_grad_() for t in arguments]
    sums = exact[0] @ exact[1].t() + exact[2]
    functions = {"gelu": torch_functional.gelu, "geglu": torch_functional.gelu, None: lambda v: v}
    function = functions.get(activation, torch_functional.silu)
    value = function(sums[..., 0::2]) * sums[..., 1::2] if gated else function(sums)
    wanted = (value + exact[3],)
    wanted += torch.autograd.grad(wanted[0], exact, gradient.double())
    for mine, theirs in zip(got, wanted, strict=True):
        assert_near(mine, theirs, 1e-2)  # gradients pass through a rounded preactivation


@pytest.mark.parametrize("scaling", ["tensor", "row", "1x128", "128x128"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("accurate", [True, False])
@pytest.mark.parametrize("k", [256, 400])
def test_scaled(scaling, dtype, accurate, k):
    torch.manual_seed(k)
    m, n, blocks = 200, 304, -(-k // 128)
    a = torch.randn(m, k, device="cuda").to(torch.float8_e5m2)
    b = torch.randn(n, k, device="cuda").to(torch.float8_e4m3fn)
    shapes = {
        "tensor": ((1,), (1,)),
        "row": ((m,), (n,)),
        "1x128": ((m, blocks), (n, blocks)),
        "128x128": ((m, blocks), (-(-n // 128), blocks)),
    }
    scale_a, scale_b = (torch.rand(*shape, device="cuda") + 0.5 for shape in shapes[scaling])
    bias = torch.randn(n, device="cuda")
    wanted = dequantize(a, scale_a).double() @ dequantize(b, scale_b).double().t() + bias.double()
    got = scaled_matmul(a, b, scale_a, scale_b, bias=bias, dtype=dtype, accurate=accurate)
    # The tensor core's own accumulator keeps about 14 bits.
    assert_near(got, wanted, TOLERANCE[dtype] if dtype is torch.bfloat16 else 1e-3)


def test_graph_and_repeats():
    a, b = normal(512, 768), normal(1024, 768)
    eager = matmul(a, b.t())
    assert all(torch.equal(matmul(a, b.t()), eager) for _ in range(5))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = matmul(a, b.t())
    a.copy_(normal(512, 768))
    graph.replay()
    assert torch.equal(captured, matmul(a, b.t()))


def test_adds_in_place():
    a, b, total = normal(300, 264), normal(264, 520), normal(300, 520)
    wanted = total.double() + a.double() @ b.double()
    add_product_(total, a, b, 1.0)
    assert_near(total, wanted, TOLERANCE[torch.bfloat16])
