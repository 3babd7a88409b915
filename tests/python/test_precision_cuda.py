"""FP8 on a GPU: the CPU's codes and scales bit for bit, products and layers against the CPU's, in CUDA graphs."""

from __future__ import annotations

import pytest
import torch
from kernel_pytorch._ops.float8 import dequantize, quantize, scaled_matmul
from kernel_pytorch.precision import FP8Config, FP8LinearLayer
from torch import Tensor, nn

from kernel_pytorch import precision

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9), reason="no GPU with FP8 here"
    ),
]
GRANULARITIES = ("tensor", "row", "1x128", "128x128")


def relative(actual: Tensor, expected: Tensor) -> float:
    actual, expected = actual.detach().float().cpu(), expected.detach().float().cpu()
    return float((actual - expected).norm() / expected.norm())


def same_bits(actual: Tensor | None, expected: Tensor | None) -> bool:
    assert actual is not None and expected is not None
    if expected.element_size() == 1:  # codes, among them NaN
        actual, expected = actual.view(torch.uint8), expected.view(torch.uint8)
    return torch.equal(actual.cpu(), expected)


# What is compiled depends on the types and on whether x comes in vectors; `kpt verify quantize` has all pairs of types.
@pytest.mark.parametrize(
    ("dtype", "code"),
    [(torch.float32, torch.float8_e4m3fn), (torch.bfloat16, torch.float8_e5m2), (torch.float16, torch.float8_e4m3fn)],
)
def test_codes_are_those_of_the_cpu(dtype: torch.dtype, code: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    for rows, columns, seeded in ((1, 1, False), (200, 384, False), (130, 259, False), (300, 520, True)):
        spread = torch.randint(-12, 6, (rows, columns), generator=generator)
        x = torch.ldexp(torch.randn(rows, columns, generator=generator), spread).to(dtype)
        if rows == 200:
            x[0, 0], x[3, 5], x[130] = float("inf"), float("nan"), 0
        for granularity in ("given", *GRANULARITIES):
            results = [_codes_on(device, x, code, granularity, seeded) for device in ("cpu", "cuda")]
            for expected, actual in zip(*results):
                assert same_bits(actual, expected), (rows, columns, granularity)


def _codes_on(device: str, x: Tensor, code: torch.dtype, granularity: str, seeded: bool) -> list[Tensor | None]:
    amax, found = torch.zeros(1, device=device), torch.zeros(1, device=device)
    given = granularity == "given"
    made = quantize(
        x.to(device),
        dtype=code,
        granularity="tensor" if given else granularity,
        scale=torch.tensor([0.37], device=device) if given else None,
        seed=torch.tensor([3, 7], device=device) if seeded else None,
        amax=amax,
        found_nonfinite=found,
        transposed=True,
    )
    return [*made, amax, found]


@pytest.mark.parametrize("scales", [("tensor", "tensor"), ("row", "row"), ("1x128", "128x128"), ("1x128", "1x128")])
@pytest.mark.parametrize("accurate", [False, True])
def test_products_are_those_of_the_codes(scales: tuple[str, str], accurate: bool) -> None:
    torch.manual_seed(0)
    a = quantize(torch.randn(272, 1040, device="cuda"), granularity=scales[0], dtype=torch.float8_e5m2)
    b = quantize(torch.randn(400, 1040, device="cuda"), granularity=scales[1])
    output = scaled_matmul(a.codes, b.codes, a.scales, b.scales, dtype=torch.float32, accurate=accurate)
    expected = dequantize(a.codes, a.scales).double() @ dequantize(b.codes, b.scales).double().t()
    assert relative(output, expected) < (1e-3 if accurate else 5e-3)


@pytest.mark.parametrize("recipe", ["delayed", "current", "rowwise", "blockwise"])
def test_layer_is_that_of_the_cpu(recipe: str) -> None:
    torch.manual_seed(0)
    linear = nn.Linear(256, 384).to(torch.bfloat16)
    x, grad = torch.randn(200, 256).to(torch.bfloat16), torch.randn(200, 384).to(torch.bfloat16)
    results = []
    for device in ("cpu", "cuda"):
        layer = FP8LinearLayer.from_linear(linear.to(device), FP8Config(scaling_strategy=recipe))
        moved = x.to(device).requires_grad_()
        for _ in range(2):
            output = layer(moved)
            gradients = torch.autograd.grad(output, (moved, *layer.parameters()), grad.to(device))
            layer.update_fp8_scales()
        results.append([output, *gradients, layer.fp8_scale])
    for expected, actual in zip(*results):
        assert relative(actual, expected) < 5e-3


@pytest.mark.parametrize("recipe", ["delayed", "current", "blockwise"])
def test_steps_in_a_graph(recipe: str) -> None:
    torch.manual_seed(0)
    model = precision.convert_model_to_fp8(
        nn.Sequential(nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 128)).cuda(),
        FP8Config(scaling_strategy=recipe, convert="all"),
    )
    x = torch.randn(64, 256, device="cuda")

    def step() -> list[Tensor]:
        gradients = torch.autograd.grad(model(x).square().sum(), list(model.parameters()))
        precision.update_fp8_scales(model)
        return list(gradients)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        expected = [step() for _ in range(3)][-1]
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        gradients = step()
    graph.replay()
    torch.cuda.synchronize()
    assert all(relative(a, b) < 1e-5 for a, b in zip(gradients, expected))
