"""Products of 8-bit integers: exact sums, rounding of rows, gradients straight through, and the end of an FP8 step."""

from __future__ import annotations

import pytest
import torch
from kernel_pytorch._ops.delayed_scales import delayed_scales_
from kernel_pytorch._ops.int8_matmul import quantize_rows
from kernel_pytorch.precision import Int8Linear
from torch import nn

from kernel_pytorch import functional as F
from kernel_pytorch import precision

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("shape", [(96,), (3, 96), (2, 5, 96), (40, 96), (0, 96)])
@pytest.mark.parametrize("group", [0, 32, 64])
def test_codes_multiply_exactly(shape, group) -> None:
    torch.manual_seed(0)
    x, weight = (torch.randint(-128, 128, size, dtype=torch.int8) for size in (shape, (21, 96)))
    groups = 1 if group == 0 else -(-96 // group)
    scale_x, scale_weight, bias = torch.rand(shape[:-1]), torch.rand(21, groups), torch.randn(21)
    each = scale_weight.double().repeat_interleave(group or 96, 1)[:, :96]
    sums = x.double() @ (weight.double() * each).t() * scale_x.double()[..., None] + bias.double()
    made = F.int8_matmul(x, weight, scale_weight, scale_x=scale_x, bias=bias, activation="silu", dtype=torch.float32)
    torch.testing.assert_close(made.double(), nn.functional.silu(sums), rtol=1e-5, atol=1e-2)
    assert F.int8_matmul(x, weight, scale_weight, scale_x=scale_x).dtype is torch.bfloat16


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", [1, 37, 200])
def test_rows_are_rounded_on_their_way(dtype, columns) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 6, columns).to(dtype)
    codes, scales = quantize_rows(torch.randn(9, columns))
    step = x.float().abs().amax(-1, keepdim=True) / 127
    rounded = (x.float() / step).round()
    expected = (rounded.double() @ codes.double().t()) * step.double() * scales.double()
    made = F.int8_matmul(x, codes, scales)
    assert made.dtype is dtype and made.shape == (2, 6, 9)
    bound = {torch.float32: 1e-5, torch.bfloat16: 2**-8, torch.float16: 2**-10}[dtype]
    torch.testing.assert_close(made.double(), expected, rtol=bound, atol=bound)
    transposed = F.int8_matmul(x.transpose(0, 1), codes, scales)
    assert torch.equal(transposed, made.transpose(0, 1))


def test_gradients_pass_the_rounding() -> None:
    torch.manual_seed(0)
    codes, scales = quantize_rows(torch.randn(7, 40))
    values = codes.float() * scales[:, None]
    for activation in (None, "gelu"):
        x, bias = torch.randn(3, 5, 40, requires_grad=True), torch.randn(7, requires_grad=True)
        grad = torch.randn(3, 5, 7)
        F.int8_matmul(x, codes, scales, bias=bias, activation=activation).backward(grad)
        sums = (F.int8_matmul(x.detach(), codes, scales) + bias.detach()).requires_grad_()
        (sums if activation is None else nn.functional.gelu(sums)).backward(grad)
        torch.testing.assert_close(x.grad, sums.grad @ values, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(bias.grad, sums.grad.sum((0, 1)), rtol=1e-4, atol=1e-4)
    compiled = torch.compile(lambda x: F.int8_matmul(x, codes, scales), backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(x.detach()), F.int8_matmul(x.detach(), codes, scales))
    mapped = torch.vmap(lambda one: F.int8_matmul(one, codes, scales))(x.detach())
    assert torch.equal(mapped, F.int8_matmul(x.detach(), codes, scales))


def test_a_weight_in_int8_multiplies_integers() -> None:
    torch.manual_seed(0)
    weight, x = F.quantize_weight(torch.randn(12, 150), "int8", group=64), torch.randn(4, 150)
    made = F.quantized_matmul(x, weight, activations="int8", activation="relu")
    plain = F.quantized_matmul(x, weight, activation="relu")
    assert 0 < float((made - plain).norm() / plain.norm()) < 0.02
    with pytest.raises(ValueError, match='activations is "int8" with a weight in int4'):
        F.quantized_matmul(x, F.quantize_weight(torch.randn(12, 150), "int4"), activations="int8")


def test_bad_arguments_are_named() -> None:
    x, codes, scales = torch.randn(2, 64), torch.ones(3, 64, dtype=torch.int8), torch.ones(3)
    with pytest.raises(ValueError, match="scale_x is given"):
        F.int8_matmul(x, codes, scales, scale_x=torch.ones(2))
    with pytest.raises(ValueError, match="scale_x is missing"):
        F.int8_matmul(codes, codes, scales)
    with pytest.raises(ValueError, match="their last sizes must be equal"):
        F.int8_matmul(x[:, :-1], codes, scales)
    with pytest.raises(ValueError, match="groups of 32, 64 or 128"):
        F.int8_matmul(x, codes, torch.ones(3, 5))
    with pytest.raises(ValueError, match=r"weight is torch\.float32"):
        F.int8_matmul(x, codes.float(), scales)


def test_layer_is_saved_and_moved() -> None:
    torch.manual_seed(0)
    linear = nn.Linear(45, 8)
    layer = Int8Linear.from_linear(linear, activation="relu")
    x = torch.randn(3, 45)
    assert float((layer(x) - linear(x).relu()).norm() / linear(x).relu().norm()) < 0.03
    other = Int8Linear(45, 8, activation="relu", dtype=torch.float32)
    other.load_state_dict(layer.state_dict())
    assert torch.equal(other(x), layer(x)) and layer.half().scale.dtype is torch.float32
    assert layer.to("meta").weight.device.type == "meta"


def test_the_end_of_a_step_is_one_op() -> None:
    """Against the formulas in torch that it stands for."""
    torch.manual_seed(0)
    histories, factors = torch.rand(4, 3, 3), torch.rand(3, 3) * 2.0**-9
    expected = histories.clone()
    for step in range(6):
        amax, scales = ([torch.rand(3) * (step != 3) for _ in range(3)] for _ in range(2))
        seen = torch.stack(amax) * (2 if step == 5 else 1)
        expected = torch.cat([expected[1:], seen[None]])
        delayed_scales_(histories, amax, scales, factors, seen if step == 5 else None)
        peaks = expected.amax(0)
        wanted = torch.where(peaks > 0, (peaks * factors).clamp(2.0**-126, 2.0**126), 1.0)
        assert torch.equal(histories, expected) and torch.equal(torch.stack(scales), wanted)
        assert not any(bool(one.any()) for one in amax)


def test_layers_in_fp8_take_their_scales_from_it() -> None:
    torch.manual_seed(0)
    model = precision.convert_model_to_fp8(nn.Sequential(nn.Linear(32, 48), nn.Linear(48, 16)))
    seen = []
    for _ in range(2):
        model(torch.randn(8, 32)).square().sum().backward()
        seen.append([layer.fp8_amax.clone() for layer in model])
        assert precision.update_fp8_scales(model) == 2
    config = model[0].fp8_config
    largest = torch.tensor([config.forward_format.largest] * 2 + [config.backward_format.largest])
    for i, layer in enumerate(model):
        expected = torch.maximum(seen[0][i], seen[1][i]) * (torch.tensor([[2.0**config.margin]]) / largest)[0]
        assert torch.equal(layer.fp8_scale, expected) and not bool(layer.fp8_amax.any())
