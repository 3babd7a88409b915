"""FP8 codes made where norms and gated activations are, and layers built on them: as one op after the other."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kernel_pytorch._ops.float8 import Quantized
from kernel_pytorch.advanced_memory._meter import Counting, Meter
from kernel_pytorch.core import FusedSwiGLU, OptimizedMLP
from kernel_pytorch.precision import (
    FP8Config,
    FP8LinearLayer,
    convert_model_to_fp8,
    fp8_gated_mlp,
    fp8_layers,
    fp8_norm_linear,
    fp8_numerics_report,
    take_overflows,
    update_fp8_scales,
)
from torch import Tensor, nn

from kernel_pytorch import functional

DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[
            pytest.mark.gpu,
            pytest.mark.skipif(
                not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9),
                reason="no GPU with FP8 here",
            ),
        ],
    ),
]
OPTIONS: list[dict[str, Any]] = [
    {"granularity": "tensor", "scale": 0.01},
    {"granularity": "tensor"},
    {"granularity": "row", "dtype": torch.float8_e5m2},
    {"granularity": "1x128", "square_transpose": True},
    {"granularity": "128x128", "power_of_two": True},
]


def on(device: str, options: dict[str, Any]) -> dict[str, Any]:
    moved = {**options, "transposed": True}
    if "scale" in options:
        moved["scale"] = torch.tensor([options["scale"]], device=device)
    return moved


def same(made: Quantized, expected: Quantized) -> bool:
    def equal(a: Tensor | None, b: Tensor | None) -> bool:
        if a is None or b is None:
            return a is b
        return torch.equal(a.view(torch.uint8), b.view(torch.uint8)) if a.element_size() == 1 else torch.equal(a, b)

    return all(equal(a, b) for a, b in zip(made, expected))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kind", ["silu", "gelu"])
def test_gates_are_those_of_two_ops(device: str, dtype: torch.dtype, kind: str) -> None:
    generator = torch.Generator().manual_seed(0)
    for rows, columns in ((200, 256), (130, 136), (3, 5)):
        packed = torch.randn(rows, 2 * columns, generator=generator).to(device, dtype).requires_grad_()
        grad = torch.randn(rows, columns, generator=generator).to(device, dtype)
        gate, up = packed.detach().chunk(2, 1)
        output = functional.gated_activation_packed(packed, kind)
        (grad_packed,) = torch.autograd.grad(output, packed, grad)
        for options in OPTIONS:
            told = on(device, options)
            made = functional.gated_activation_quantized(gate, up, kind, with_output=True, **told)
            assert made.output is not None and torch.equal(made.output, output)
            assert same(made.quantized, functional.quantize(output.detach(), **told))
            back = functional.gated_activation_backward_quantized(grad, gate, up, kind, with_output=True, **told)
            assert back.output is not None and torch.equal(back.output, grad_packed)
            assert same(back.quantized, functional.quantize(grad_packed, **told))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("has_residual", [False, True])
def test_norms_are_those_of_two_ops(device: str, has_residual: bool) -> None:
    generator = torch.Generator().manual_seed(1)
    for rows, columns in ((200, 256), (130, 136), (3, 5)):
        x = torch.randn(rows, columns, generator=generator).to(device, torch.bfloat16)
        residual = torch.randn(rows, columns, generator=generator).to(x) if has_residual else None
        weight = torch.randn(columns, generator=generator).to(x)
        expected: Any = functional.rms_norm(x, weight, 1e-5, residual=residual)  # type: ignore[call-overload]
        output, total = expected if has_residual else (expected, None)
        for options in OPTIONS:
            told = on(device, options)
            made = functional.rms_norm_quantized(x, weight, 1e-5, residual=residual, with_output=True, **told)
            assert made.output is not None and (made.sum is None) == (total is None)
            torch.testing.assert_close(made.output, output, rtol=2**-7, atol=0)
            if total is not None and made.sum is not None:
                assert torch.equal(made.sum, total)
            # Codes are exactly those of the output that was made with them.
            assert same(made.quantized, functional.quantize(made.output, **told))


def layers(device: str, recipe: str, bias: bool) -> tuple[FP8LinearLayer, FP8LinearLayer, Tensor]:
    torch.manual_seed(0)
    config = FP8Config(scaling_strategy=recipe)
    gate_up = FP8LinearLayer(128, 2 * 192, bias, config, device=device, dtype=torch.bfloat16)
    down = FP8LinearLayer(192, 128, bias, config, device=device, dtype=torch.bfloat16)
    return gate_up, down, torch.randn(128, device=device).requires_grad_()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("recipe", ["delayed", "current", "rowwise", "blockwise"])
@pytest.mark.parametrize("part", ["norm and layer", "norm and gated layers", "gated layers"])
def test_layers_are_those_of_their_parts(device: str, recipe: str, part: str) -> None:
    for bias, has_residual in ((False, False), (True, part != "gated layers")):
        results = [steps(part, device, recipe, bias, has_residual, is_fused) for is_fused in (False, True)]
        for expected, actual in zip(*results):
            # On a GPU a value in another last place of bf16 may be another code; errors of FP8 are ten times this.
            error = (actual.float() - expected.float()).norm() / expected.float().norm()
            assert error <= (0 if device == "cpu" else 5e-3)


def steps(part: str, device: str, recipe: str, bias: bool, has_residual: bool, is_fused: bool) -> list[Tensor]:
    """Outputs, gradients and scales of the second of two steps, which has delayed scales."""
    gate_up, down, weight = layers(device, recipe, bias)
    x = torch.randn(4, 40, 128, device=device, generator=torch.Generator(device).manual_seed(3))
    x = x.to(torch.bfloat16).requires_grad_()
    residual = (x.detach() * 0.5).requires_grad_() if has_residual else None
    wanted = [x, *gate_up.parameters()]
    wanted += [] if part == "gated layers" else [weight]
    wanted += [] if part == "norm and layer" else [*down.parameters()]
    wanted += [] if residual is None else [residual]
    for _ in range(2):
        output: Any = (run_fused if is_fused else run_parts)(part, x, residual, weight, gate_up, down)
        outputs = list(output) if has_residual else [output]
        loss = sum((output.float() * (i + 1)).square().sum() for i, output in enumerate(outputs))
        gradients = torch.autograd.grad(loss, wanted)  # type: ignore[arg-type]
        update_fp8_scales(gate_up)
        update_fp8_scales(down)
    return [*outputs, *gradients, gate_up.fp8_scale, down.fp8_scale]


def run_fused(part: str, x: Tensor, residual: Any, weight: Tensor, gate_up: Any, down: Any) -> Any:
    if part == "norm and layer":
        return fp8_norm_linear(x, gate_up, weight, 1e-5, residual=residual)
    if part == "gated layers":
        return fp8_gated_mlp(x, gate_up, down, "gelu")
    return fp8_gated_mlp(x, gate_up, down, norm_weight=weight, eps=1e-5, residual=residual)


def run_parts(part: str, x: Tensor, residual: Any, weight: Tensor, gate_up: Any, down: Any) -> Any:
    if part == "gated layers":
        return down(functional.gated_activation_packed(gate_up(x), "gelu"))
    normed: Any = functional.rms_norm(x, weight, 1e-5, residual=residual)
    total = None
    if residual is not None:
        normed, total = normed
    output = gate_up(normed)
    if part != "norm and layer":
        output = down(functional.swiglu_packed(output))
    return output if total is None else (output, total)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("recipe", ["delayed", "current"])
def test_a_large_gradient_is_made_by_halves(device: str, recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    config = FP8Config(scaling_strategy=recipe)
    gate_up = FP8LinearLayer(128, 2 * 512, False, config, device=device, dtype=torch.bfloat16)
    down = FP8LinearLayer(512, 128, False, config, device=device, dtype=torch.bfloat16)
    weight = torch.randn(128, device=device).requires_grad_()
    x = torch.randn(1024, 128, dtype=torch.bfloat16, device=device).requires_grad_()
    wanted = [x, weight, gate_up.weight, down.weight]

    def step() -> tuple[list[Tensor], int]:
        meter = Meter(x.device, wanted)
        meter.reset()
        with Counting(meter):
            output, total = fp8_gated_mlp(x, gate_up, down, norm_weight=weight, eps=1e-5, residual=x)
            gradients = torch.autograd.grad((output + total).float().square().mean(), wanted)
        return [gradient.float() for gradient in gradients], meter.greatest()

    def exact() -> list[Tensor]:
        normed, total = functional.rms_norm(x, weight, 1e-5, residual=x)
        gate, up = nn.functional.linear(normed, gate_up.weight).float().chunk(2, 1)
        output = nn.functional.linear(nn.functional.silu(gate) * up, down.weight.float())
        return [one.float() for one in torch.autograd.grad((output + total).square().mean(), wanted)]

    whole, whole_peak = step()
    monkeypatch.setattr("kernel_pytorch.precision.fused.LARGE_GRADIENT", 1)
    parts, parts_peak = step()
    assert parts_peak < whole_peak
    assert torch.equal(whole[3], parts[3])  # the second layer's is made as before
    for one, other, truth in zip(whole, parts, exact()):
        assert (other - truth).norm() < 1.1 * (one - truth).norm() + 1e-6 * truth.norm()


def test_a_layer_used_twice() -> None:
    gate_up, _, _ = layers("cpu", "delayed", False)
    x = torch.randn(8, 128, dtype=torch.bfloat16)
    (twice,) = torch.autograd.grad((gate_up(x) + gate_up(x)).float().sum(), gate_up.weight)
    (once,) = torch.autograd.grad(gate_up(x).float().sum(), gate_up.weight)
    torch.testing.assert_close(twice, 2 * once)


def test_compiled_as_eager() -> None:
    gate_up, down, weight = layers("cpu", "current", True)
    x = torch.randn(16, 128, dtype=torch.bfloat16).requires_grad_()

    def mlp(x: Tensor) -> Any:
        return fp8_gated_mlp(x, gate_up, down, norm_weight=weight, eps=1e-5, residual=x)

    results = []
    for call in (mlp, torch.compile(mlp, fullgraph=True)):
        output, total = call(x)
        loss = output.float().square().sum() + total.float().sum()
        results.append([output, total, *torch.autograd.grad(loss, [x, weight, *gate_up.parameters()])])
    assert all(torch.equal(actual, expected) for expected, actual in zip(*results))
    with torch.no_grad():
        assert torch.equal(mlp(x)[0], results[0][0])


def test_second_derivatives_are_refused() -> None:
    gate_up, down, _ = layers("cpu", "current", False)
    x = torch.randn(4, 128, dtype=torch.bfloat16).requires_grad_()
    for output in (gate_up(x), fp8_gated_mlp(x, gate_up, down)):
        (grad,) = torch.autograd.grad(output.float().square().sum(), x, create_graph=True)
        with pytest.raises(RuntimeError, match="once_differentiable"):
            grad.float().sum().backward()


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_layers_of_core_modules_compute_in_fp8(dropout: float) -> None:
    torch.manual_seed(0)
    x = torch.randn(8, 64)
    for module in (FusedSwiGLU(64, 128, True, dropout), OptimizedMLP(64, 128, True, dropout)):
        plain = module.eval()(x)
        convert_model_to_fp8(module, FP8Config(scaling_strategy="current"))
        assert len(fp8_layers(module)) == len(list(module.children()))
        error = (module(x) - plain).norm() / plain.norm()
        assert 0.01 < error < 0.1  # that of FP8, so it was FP8
        module.train()(x).sum().backward()
        take_overflows(module)
        assert all(layer.weight.grad is not None for layer in fp8_layers(module).values())
        assert all(layer.fp8_amax.min() > 0 for layer in fp8_layers(module).values())


def test_layers_with_hooks_are_called() -> None:
    gate_up, down, weight = layers("cpu", "current", True)
    x = torch.randn(16, 128, dtype=torch.bfloat16)
    expected = fp8_gated_mlp(x, gate_up, down, norm_weight=weight, eps=1e-5, residual=x)
    first = fp8_norm_linear(x, gate_up, weight)
    seen: list[int] = []
    gate_up.register_forward_hook(lambda *_: seen.append(1))
    for made, known in zip(fp8_gated_mlp(x, gate_up, down, norm_weight=weight, eps=1e-5, residual=x), expected):
        assert torch.equal(made, known)
    assert torch.equal(fp8_norm_linear(x, gate_up, weight), first) and len(seen) == 2
    module = convert_model_to_fp8(FusedSwiGLU(64, 128), FP8Config(scaling_strategy="current"))
    report = fp8_numerics_report(module, lambda: module(torch.randn(8, 64)).square().sum())
    assert all(set(layer.tensors) == {"input", "weight", "gradient"} for layer in report.values()) and len(report) == 2


def test_bad_arguments_are_named() -> None:
    gate_up, down, _ = layers("cpu", "current", False)
    x = torch.randn(4, 128)
    with pytest.raises(ValueError, match="gate_up has 384 outputs, down has 384 inputs"):
        fp8_gated_mlp(x, gate_up, FP8LinearLayer(384, 8))
    with pytest.raises(ValueError, match="without eps"):
        fp8_gated_mlp(x, gate_up, down, residual=x)
    with pytest.raises(RuntimeError, match="up has shape"):
        functional.gated_activation_quantized(x, x[:, :5])
    with pytest.raises(RuntimeError, match="a gate is gelu"):
        functional.gated_activation_quantized(x, x, "tanh")
    with pytest.raises(RuntimeError, match="weight has shape"):
        functional.rms_norm_quantized(x, torch.ones(3))
    with pytest.raises(ValueError, match=r"must be \[rows, columns\]"):
        functional.rms_norm_quantized(torch.ones(3))
