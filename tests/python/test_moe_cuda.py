"""Mixtures of experts on a GPU: routing and layers against the CPU and a dense fp64 layer, graphs, repeated runs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_moe import GATES, check_rows, dense, parameters
from torch import Tensor

from kernel_pytorch import functional as F

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("options", [
    dict(k=8), dict(k=4, score="sigmoid", renormalize=False), dict(k=2, capacity=40), dict(k=16, scale=2.0),
    dict(k=6, score="sigmoid", groups=8, group_k=3),
])  # fmt: skip
@pytest.mark.parametrize(("tokens", "experts"), [(3000, 256), (70, 1024), (1, 64), (0, 64)])
def test_route_is_the_cpus(options: dict[str, Any], tokens: int, experts: int) -> None:
    torch.manual_seed(0)
    logits = torch.randint(-40, 40, (tokens, experts)) / 8.0  # ties are many
    bias = torch.randint(-8, 8, (experts,)) / 8.0 if "groups" in options else None
    found = F.route(logits.cuda(), bias=None if bias is None else bias.cuda(), **options)
    expected = F.route(logits, bias=bias, **options)
    for name, one, other in zip(found._fields, found, expected):
        if one.dtype is torch.int32:
            assert torch.equal(one.cpu(), other), name
        else:
            torch.testing.assert_close(one.cpu(), other, rtol=2e-5, atol=1e-6)
    check_rows(F.Routing(*(one.cpu() for one in found)), tokens, options["k"], experts, options.get("capacity"))


def near(found: Tensor, expected: Tensor, tolerance: float, name: str) -> None:
    error = float((found.double() - expected).norm() / expected.norm().clamp(min=1e-9))
    assert error < tolerance, f"{name}: relative error {error:.2e}"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("name", GATES)
@pytest.mark.parametrize("transposed", [False, True])
def test_layer_and_its_gradients(dtype: torch.dtype, name: str | None, transposed: bool) -> None:
    torch.manual_seed(1)
    tokens, experts, k = 513, 6, 2
    torch.set_default_device("cuda")
    try:
        p = parameters(experts, 136, 128, name, True, dtype)
        x, logits = torch.randn(tokens, 136).to(dtype), torch.randn(tokens, experts)
    finally:
        torch.set_default_device("cpu")
    logits[:, 1] = -50  # an expert without tokens
    routing = F.route(logits, k, capacity=200)
    weights = routing.weights.clone().requires_grad_()
    leaves = [x.requires_grad_(), weights, *(value.requires_grad_() for value in p.values())]
    given = dict(p)
    if transposed:
        given |= {key: p[key].mT.contiguous().mT for key in ("gate_up", "down")}
        given |= {key: given[key].mT for key in ("gate_up", "down")}
    routed = routing._replace(weights=weights)
    output = F.moe_mlp(x, routed, **given, activation=name, transposed=transposed, limit=0.7)
    wide = [leaf.detach().double().requires_grad_() for leaf in leaves]
    expected = dense(wide[0], routing, wide[1], dict(zip(p, wide[2:])), name)
    tolerance = {torch.bfloat16: 1.2e-2, torch.float16: 2e-3, torch.float32: 1e-5}[dtype]
    near(output, expected, tolerance, "output")
    upstream = torch.randn(tokens, 136, device="cuda").to(dtype)
    gradients = torch.autograd.grad(output, leaves, upstream)
    wanted = torch.autograd.grad(expected, wide, upstream.double())
    # A gate that is within a rounding of the limit has a gradient on one side and none on the other: of bf16 numbers
    # one in a thousand, whose root is their share of a norm.
    several = 4 if name is not None and "clamped" in name else 2
    for title, found, one in zip(["x", "weights", *p], gradients, wanted):
        near(found, one, several * tolerance, title)
    assert torch.count_nonzero(gradients[2][1]) == 0 and torch.count_nonzero(gradients[3][1]) == 0


def test_repeated_runs_are_bitwise_equal_and_graphs_follow_the_routing() -> None:
    torch.manual_seed(2)
    p = {k: v if v is None else v.cuda() for k, v in parameters(8, 128, 64, "swiglu", False, torch.bfloat16).items()}
    x, logits = torch.randn(700, 128, device="cuda").bfloat16(), torch.randn(700, 8, device="cuda")

    def run() -> list[Tensor]:
        leaves = [x.clone().requires_grad_(), logits.clone().requires_grad_()]
        weights = {key: v if v is None else v.clone().requires_grad_() for key, v in p.items()}
        routing = F.route(leaves[1], 3)
        output = F.moe_mlp(leaves[0], routing, **weights)
        leaves += [v for v in weights.values() if v is not None]
        return [output, *torch.autograd.grad(output.float().square().sum() + routing.aux_loss, leaves)]

    first = run()
    for _ in range(100):
        assert all(torch.equal(one, other) for one, other in zip(first, run()))

    def layer() -> Tensor:
        return F.moe_mlp(x, F.route(logits, 3), **p)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        layer()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = layer()
    logits.copy_(torch.randn_like(logits))  # other experts, other sizes of groups
    graph.replay()
    assert torch.equal(captured, layer())


@pytest.mark.parametrize("counts", [[0, 1, 63, 65], [64, 0, 0, 128], [129, 127, 1, 0], [0, 0, 0, 0]])
@pytest.mark.parametrize("gathers", ["none", "a", "b"])
def test_weight_gradients_of_uneven_groups(counts: list[int], gathers: str) -> None:
    torch.manual_seed(3)
    rows = sum(counts) + 7  # some in no group, which hold NaN
    ends = torch.tensor(counts, device="cuda").cumsum(0).int()
    a, b = (torch.randn(rows, n, device="cuda").bfloat16() for n in (200, 264))
    a[sum(counts) :], b[sum(counts) :] = float("nan"), float("nan")
    order = torch.randperm(rows, device="cuda").int()
    inverse = order.long().argsort()
    weight = torch.ops.kernel_pytorch.grouped_matmul_weight
    found = weight(
        a[inverse] if gathers == "a" else a, b[inverse] if gathers == "b" else b, ends,
        order if gathers == "a" else None, order if gathers == "b" else None, torch.float32,
    )  # fmt: skip
    begin = 0
    for group, count in enumerate(counts):
        expected = a[begin : begin + count].double().T @ b[begin : begin + count].double()
        peak = expected.abs().max().clamp(min=1e-9) if count else torch.ones((), device="cuda")
        assert float((found[group].double() - expected).abs().max() / peak) < 1e-5, (group, count)
        begin += count


def _spread(scales: Tensor, rows: int, k: int) -> Tensor:
    """Factors of every element, of scales of the whole, of rows or of blocks."""
    scales = scales.reshape(-1, 1) if scales.dim() < 2 else scales
    wide = scales if scales.shape[1] == 1 else scales.repeat_interleave(128, 1)[:, :k]
    return wide if wide.shape[0] in (1, rows) else wide.repeat_interleave(128, 0)[:rows]


@pytest.mark.parametrize("accurate", [False, True])
@pytest.mark.parametrize("gathers", [False, True])
@pytest.mark.parametrize("of_x", ["tensor", "row", "1x128"])
@pytest.mark.parametrize("of_weight", ["matrix", "row", "1x128", "128x128"])
def test_scaled_grouped_products(of_weight: str, of_x: str, gathers: bool, accurate: bool) -> None:
    torch.manual_seed(4)
    counts, n, k = [0, 1, 200, 65, 0, 300], 264, 400
    ends = torch.tensor(counts, device="cuda").cumsum(0).int()
    rows, groups, blocks = sum(counts) + 9, len(counts), 4
    source = 150 if gathers else rows

    def codes(*shape: int) -> Tensor:
        return torch.randn(shape, device="cuda").to(torch.float8_e4m3fn)

    def scales(*shape: int) -> Tensor:
        return torch.rand(shape, device="cuda") + 0.5

    x, weight = codes(source, k), codes(groups, n, k)
    scale_x = {"tensor": scales(1), "row": scales(source), "1x128": scales(blocks, source).t()}[of_x]
    shapes = {"matrix": (), "row": (n,), "1x128": (n, blocks), "128x128": (3, blocks)}
    scale_weight = scales(groups, *shapes[of_weight])
    gather = torch.randint(0, source, (rows,), device="cuda").int() if gathers else None
    options: dict[str, Any] = dict(gather=gather, dtype=torch.float32, accurate=accurate)
    found = F.scaled_grouped_matmul(x, weight, scale_x, scale_weight, ends, **options)
    assert torch.equal(found, F.scaled_grouped_matmul(x, weight, scale_x, scale_weight, ends, **options))
    left = x.double() * _spread(scale_x.double(), source, k)
    left = left if gather is None else left[gather.long()]
    expected, begin = torch.zeros(rows, n, device="cuda", dtype=torch.float64), 0
    for group, count in enumerate(counts):
        right = weight[group].double() * _spread(scale_weight[group].double(), n, k)
        expected[begin : begin + count] = left[begin : begin + count] @ right.t()
        begin += count
    assert torch.count_nonzero(found[begin:]) == 0
    # Sums of 128 of k are those of the tensor cores, which cut each of four additions at about 13 bits of the largest
    # term: 2^-11, as scaled_matmul's kernels are verified to.
    assert float((found.double() - expected).abs().max() / expected.abs().max()) < (2**-11 if accurate else 2e-3)
