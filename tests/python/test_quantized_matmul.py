"""Weights in few bits: what torch can check of the formats, products with their gradients, the layer."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from kernel_pytorch._ops.quantized_matmul import FORMATS, pack_codes, unpack_codes
from kernel_pytorch.precision import QuantizedLinear
from torch import Tensor, nn

from kernel_pytorch import functional as F

CASES = [
    ("nvfp4", {}, 0.12),
    ("mxfp4", {}, 0.15),
    ("mxfp8", {}, 0.04),
    ("int4", {"group": 32}, 0.12),
    ("int4", {"group": 128, "asymmetric": True}, 0.12),
    ("int8", {"group": 64}, 0.008),
    ("int8", {"group": 128, "asymmetric": True}, 0.008),
    ("int2", {"group": 32}, 1.0),
    ("int2", {"group": 64, "asymmetric": True}, 0.6),
    ("int3", {"group": 128, "asymmetric": True}, 0.3),
    ("int5", {"group": 32}, 0.06),
    ("int6", {"group": 64, "asymmetric": True}, 0.03),
]
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def relative(actual: Tensor, expected: Tensor) -> float:
    actual, expected = actual.detach().double(), expected.detach().double()
    return float((actual - expected).norm() / expected.norm())


def unpacked(codes: Tensor) -> Tensor:
    return unpack_codes(codes, 4, 2 * codes.shape[1]).long()


@pytest.mark.parametrize(("format", "options", "bound"), CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_weight_comes_back_as_close_as_its_format_allows(format, options, bound, dtype) -> None:
    torch.manual_seed(0)
    weight = torch.randn(24, 200).to(dtype)
    coded = F.quantize_weight(weight, format, **options)
    assert coded.shape == weight.shape
    assert relative(coded.dequantize(torch.float32), weight) < bound
    stochastic = F.quantize_weight(weight, format, seed=torch.tensor([1, 2]), **options)
    assert torch.equal(stochastic.scales, coded.scales) and not torch.equal(stochastic.codes, coded.codes)
    assert relative(stochastic.dequantize(torch.float32), weight) < 2 * bound


def test_quantize_with_a_format_is_quantize_weight() -> None:
    x = torch.randn(8, 128)
    made, same = F.quantize(x, "int4", group=32), F.quantize_weight(x, "int4", group=32)
    assert torch.equal(made.codes, same.codes) and torch.equal(made.scales, same.scales) and made.group == 32
    torch.manual_seed(1)
    drawn = F.quantize(x, "mxfp4", stochastic=True)
    assert not torch.equal(drawn.codes, F.quantize(x, "mxfp4").codes)
    assert F.quantize(x, stochastic=True).codes.dtype is torch.float8_e4m3fn
    with pytest.raises(ValueError, match="without a format"):
        F.quantize(x, group=32)


def test_values_follow_from_codes_and_scales() -> None:
    weight = torch.randn(6, 96)
    made = F.quantize_weight(weight, "nvfp4")
    codes = unpacked(made.codes)
    signs = 1.0 - 2.0 * (codes >> 3)
    values = E2M1[codes & 7] * signs * made.scales.float().repeat_interleave(16, 1) * made.tensor_scale
    assert torch.equal(values, made.dequantize(torch.float32))
    made = F.quantize_weight(weight, "mxfp4")
    codes = unpacked(made.codes)
    powers = 2.0 ** (made.scales.double() - 127).repeat_interleave(32, 1)
    values = (E2M1[codes & 7] * (1.0 - 2.0 * (codes >> 3)) * powers).float()
    assert torch.equal(values, made.dequantize(torch.float32))
    made = F.quantize_weight(weight, "int4", group=32, asymmetric=True)
    centred = unpacked(made.codes) - made.zeros.long().repeat_interleave(32, 1)
    assert torch.equal(centred * made.scales.repeat_interleave(32, 1), made.dequantize(torch.float32))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [(3,), (2, 11), ()])
@pytest.mark.parametrize(("format", "options", "bound"), CASES)
def test_product_is_that_of_the_dequantized_weight(format, options, bound, rows, dtype) -> None:
    torch.manual_seed(0)
    coded = F.quantize_weight(torch.randn(40, 160).to(dtype), format, **options)
    x, bias = torch.randn(*rows, 160, dtype=dtype), torch.randn(40, dtype=dtype)
    weight = coded.dequantize(dtype).double()
    expected = nn.functional.silu(x.double() @ weight.t() + bias.double())
    actual = F.quantized_matmul(x, coded, bias=bias, activation="silu")
    assert actual.dtype is dtype and actual.shape == (*rows, 40)
    assert relative(actual, expected) < (1e-6 if dtype is torch.float32 else 0.004)
    assert torch.equal(F.quantized_matmul(x, coded), F.quantized_matmul(x.clone(), coded))


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
def test_codes_are_packed_and_unpacked(bits) -> None:
    for columns in (0, 1, 7, 8, 33):
        codes = torch.randint(0, 2**bits, (3, columns), dtype=torch.uint8)
        packed = pack_codes(codes, bits)
        assert packed.shape == (3, -(-columns * bits // 8)) and torch.equal(unpack_codes(packed, bits, columns), codes)
    weight = torch.randn(4, 77)
    coded = F.quantize_weight(weight, f"int{bits}", group=32)
    codes = unpack_codes(coded.codes, bits, 77).double() - 2 ** (bits - 1)
    values = codes * coded.scales.double().repeat_interleave(32, 1)[:, :77]
    assert torch.equal(values.float(), coded.dequantize(torch.float32))


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("columns", [1, 33, 77, 130])
def test_any_number_of_columns_multiplies_and_differentiates(format, columns) -> None:
    torch.manual_seed(0)
    weight = torch.randn(5, columns)
    weight[1] = 0  # a scale of 0
    coded = F.quantize_weight(weight, format, group=32 if format.startswith("int") else None)
    values = coded.dequantize(torch.float32)
    assert coded.shape == values.shape == weight.shape and not bool(values[1].any())
    for rows in (3, 40):
        x = torch.randn(rows, columns, requires_grad=True)
        grad = torch.randn(rows, 5)
        product = F.quantized_matmul(x, coded)
        product.backward(grad)
        assert product.shape == (rows, 5) and x.grad.shape == x.shape
        torch.testing.assert_close(product, x.detach() @ values.t(), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(x.grad, grad @ values, rtol=1e-4, atol=1e-4)
    layer = QuantizedLinear.from_linear(nn.Linear(columns, 6), format=format)
    other = QuantizedLinear(columns, 6, format=format, dtype=torch.float32)
    other.load_state_dict(layer.state_dict())
    x = torch.randn(2, columns)
    assert torch.equal(other(x), layer(x))


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_groups_of_rows_multiply_by_their_own_matrices(format, dtype) -> None:
    torch.manual_seed(0)
    coded = F.quantize_weight(torch.randn(3 * 10, 77).to(dtype), format)
    matrices = coded.dequantize(dtype).view(3, 10, 77)
    offsets, gather = torch.tensor([2, 2, 25]), torch.randint(0, 6, (27,))
    bound = 1e-4 if dtype is torch.float32 else 0.05
    for activation in (None, "silu", "swiglu", "swiglu_clamped_interleaved"):
        ours, plain = (torch.randn(6, 77, generator=torch.Generator().manual_seed(1)).to(dtype) for _ in range(2))
        bias = torch.randn(3, 10).to(dtype)
        made = F.quantized_grouped_matmul(
            ours.requires_grad_(), coded, offsets, bias=bias, activation=activation, gather=gather
        )
        expected = F.grouped_matmul(
            plain.requires_grad_(), matrices, offsets, bias=bias, activation=activation, gather=gather,
            transpose_weight=True,
        )  # fmt: skip
        torch.testing.assert_close(made, expected, rtol=bound, atol=bound)
        assert made.dtype is dtype and not bool(made[25:].any())
        grad = torch.randn_like(made)
        made.backward(grad)
        expected.backward(grad)
        torch.testing.assert_close(ours.grad, plain.grad, rtol=bound, atol=4 * bound)
    front = torch.cat([torch.zeros(1, dtype=torch.int64), offsets])
    x = torch.randn(27, 77).to(dtype)
    with torch.no_grad():
        assert torch.equal(
            F.quantized_grouped_matmul(x, coded, front, groups=3), F.quantized_grouped_matmul(x, coded, offsets)
        )
    with pytest.raises(ValueError, match="each has as many rows"):
        F.quantized_grouped_matmul(x, coded, front)


@pytest.mark.parametrize("activation", [None, "gelu"])
def test_gradients_are_those_of_the_dequantized_weight(activation) -> None:
    torch.manual_seed(0)
    coded = F.quantize_weight(torch.randn(12, 64), "int4", group=32)
    x, bias = torch.randn(5, 64, requires_grad=True), torch.randn(12, requires_grad=True)
    grad = torch.randn(5, 12)
    F.quantized_matmul(x, coded, bias=bias, activation=activation).backward(grad)
    plain = [one.detach().double().requires_grad_() for one in (x, bias)]
    v = plain[0] @ coded.dequantize(torch.float32).double().t() + plain[1]
    (v if activation is None else nn.functional.gelu(v)).backward(grad.double())
    for mine, theirs in zip((x, bias), plain):
        assert relative(mine.grad, theirs.grad) < 1e-5


def test_fp8_activations_multiply_codes_that_are_exact() -> None:
    torch.manual_seed(0)
    spread = torch.exp2(torch.randint(-4, 4, (24, 1)).float())
    coded = F.quantize_weight(torch.randn(24, 160) * spread, "mxfp4")
    x, bias = torch.randn(2, 5, 160, dtype=torch.bfloat16), torch.randn(24)
    rounded = F.quantize(x.reshape(-1, 160), granularity="row")
    values = rounded.codes.double() * rounded.scales.double()
    expected = nn.functional.silu(values @ coded.dequantize(torch.float32).double().t() + bias).reshape(2, 5, 24)
    actual = F.quantized_matmul(x, coded, bias=bias, activation="silu", activations="fp8")
    assert actual.dtype is torch.bfloat16 and relative(actual, expected) < 0.004
    rows, again = (x.clone().requires_grad_() for _ in range(2))
    grad = torch.randn(2, 5, 24, dtype=torch.bfloat16)
    F.quantized_matmul(rows, coded, activations="fp8").backward(grad)
    F.quantized_matmul(again, coded).backward(grad)
    assert torch.equal(rows.grad, again.grad)
    with pytest.raises(ValueError, match='activations is "fp8" with a weight in nvfp4'):
        F.quantized_matmul(x, F.quantize_weight(torch.randn(24, 160), "nvfp4"), activations="fp8")


def test_fp8_values_of_mxfp4_follow_its_scales() -> None:
    torch.manual_seed(0)
    coded, x = F.quantize_weight(torch.randn(6, 96), "mxfp4"), 448 * torch.eye(96)  # rows whose scale is 1
    product = lambda: F.quantized_matmul(x, coded, activations="fp8").t() / 448  # noqa: E731
    assert torch.equal(product(), coded.dequantize(torch.float32))
    coded.scales[2, 1] += 3  # kept factors notice
    assert torch.equal(product(), coded.dequantize(torch.float32))
    coded.scales[3, 0], coded.scales[4, 0] = 255, coded.scales[4, 0] - 40  # NaN; too small for E4M3 beside the others
    values, made = coded.dequantize(torch.float32), product()
    assert bool(made[3].isnan().any()) and torch.equal(made[5], values[5])
    assert float((made[4] - values[4]).abs().max()) <= float(values[4].abs().max()) * 2.0**-15


def test_compiled_and_autocast_products_are_the_same() -> None:
    torch.manual_seed(0)
    coded = F.quantize_weight(torch.randn(16, 64), "nvfp4")
    x = torch.randn(3, 64)
    compiled = torch.compile(lambda x: F.quantized_matmul(x, coded), backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(x), F.quantized_matmul(x, coded))
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(F.quantized_matmul(x, coded), F.quantized_matmul(x.bfloat16(), coded))


@pytest.mark.parametrize(("format", "options", "bound"), CASES)
def test_layer_is_saved_moved_and_copied(format, options, bound) -> None:
    torch.manual_seed(0)
    linear = nn.Linear(128, 24)
    layer = QuantizedLinear.from_linear(linear, format=format, activation="relu", **options)
    x = torch.randn(4, 128)
    assert relative(layer(x), linear(x).relu()) < 3 * bound
    file = io.BytesIO()
    torch.save(layer.state_dict(), file)
    file.seek(0)
    other = QuantizedLinear(128, 24, format=format, activation="relu", dtype=torch.float32, **options)
    other.load_state_dict(torch.load(file))
    assert torch.equal(other(x), layer(x)) and torch.equal(copy.deepcopy(layer)(x), layer(x))
    half = copy.deepcopy(layer).to(torch.bfloat16)
    assert relative(half(x.bfloat16()), layer(x)) < 0.02
    assert torch.equal(half.codes, layer.codes) and layer.to("meta").codes.device.type == "meta"
    assert layer.quantized_weight.nbytes < linear.weight.nbytes / (3 if FORMATS[format][1] > 4 else 6)


def test_bad_arguments_are_named() -> None:
    weight = torch.randn(4, 64)
    with pytest.raises(ValueError, match='format is "fp3"'):
        F.quantize_weight(weight, "fp3")
    with pytest.raises(ValueError, match=r"weight has no dimension"):
        F.quantize_weight(weight[0, 0])
    with pytest.raises(ValueError, match=r"must be \[rows, columns\]"):
        F.quantized_matmul(weight, F.quantize_weight(weight[0]))
    with pytest.raises(RuntimeError, match="group is 48"):
        F.quantize_weight(weight, "int4", group=48)
    with pytest.raises(RuntimeError, match="zeros are given with format mxfp4"):
        F.quantize_weight(weight, "mxfp4", asymmetric=True)
    coded = F.quantize_weight(weight)
    with pytest.raises(ValueError, match="their last sizes must be equal"):
        F.quantized_matmul(torch.randn(2, 63), coded)
    with pytest.raises(ValueError, match=r"dtype is torch\.float64"):
        coded.dequantize(torch.float64)
    with pytest.raises(ValueError, match="groups of 128 or 64 or 32"):
        QuantizedLinear(64, 4, format="int4", group=16)


@pytest.mark.parametrize(("format", "options", "bound"), CASES)
def test_threads_that_flush_subnormal_numbers_decode_the_same(format, options, bound) -> None:
    torch.manual_seed(0)
    coded = F.quantize_weight(torch.randn(8, 96), format, **options)
    x = torch.randn(2, 96)
    expected = (
        coded.dequantize(torch.float32),
        F.quantized_matmul(x, coded),
        F.quantized_matmul(x.expand(20, 2, 96), coded),
    )
    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU cannot flush subnormal numbers")
    try:
        again = F.quantize_weight(torch.randn(8, 96) * 0 + coded.dequantize(torch.float32), format, **options)
        actual = (
            coded.dequantize(torch.float32),
            F.quantized_matmul(x, coded),
            F.quantized_matmul(x.expand(20, 2, 96), coded),
        )
    finally:
        torch.set_flush_denormal(False)
    assert relative(again.dequantize(torch.float32), expected[0]) < bound
    for one, other in zip(actual, expected):
        assert torch.equal(one, other)
