"""Weights in few bits: quantize_weight, dequantize_weight and the product with such a weight."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from .activation import activation as _activate
from .matmul import matmul
from .support.autograd import wants_gradient
from .support.casting import packed_operands
from .support.declare import differentiable, without_gradient

# By format: sizes of groups, the usual one first; bits of a code.
FORMATS = {
    "nvfp4": ((16,), 4),
    "mxfp4": ((32,), 4),
    "mxfp8": ((32,), 8),
    **{f"int{bits}": ((128, 64, 32), bits) for bits in (4, 8, 2, 3, 5, 6)},
}
_SCALE_TYPES = {"nvfp4": torch.float8_e4m3fn, "mxfp4": torch.int8, "mxfp8": torch.int8}  # others: the weight's
_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.float8_e4m3fn: "e4m3"}


@dataclass(frozen=True)
class QuantizedWeight:
    """A tensor [..., columns] in few bits, as `quantize_weight` makes it and checkpoints have it. Products take a
    matrix [rows, columns]. `functional` has it as QuantizedTensor, too. QuantizedLinear saves its tensors;
    `state_dict` and `from_state_dict` are for one that is in no module.

    Attributes:
        codes: uint8 [..., ceil(columns * bits / 8)], also by the name data: the codes of a row behind each other,
            lowest bits first; of two 4-bit codes the even column's is in the low half.
        scales: [..., ceil(columns / group)]: float8_e4m3fn (nvfp4), uint8 with E8M0's bits (mxfp4, mxfp8), else the
            type of what was quantised.
        zeros: uint8, of scales' shape, for asymmetric integers; None: half of the number of codes, 8 for int4.
        tensor_scale: fp32, one element, a factor of all values (nvfp4); None: 1.
        format: "nvfp4", "mxfp4", "mxfp8", or "int2", "int3", "int4", "int5", "int6", "int8".
        group: columns that share a scale.
        columns: None: as many as the bytes of a row hold.
    """

    codes: Tensor
    scales: Tensor
    zeros: Tensor | None
    tensor_scale: Tensor | None
    format: str
    group: int
    columns: int | None = None

    @property
    def shape(self) -> torch.Size:
        held = columns_of(self.format, self.codes.shape[-1])
        return torch.Size((*self.codes.shape[:-1], held if self.columns is None else self.columns))

    @property
    def data(self) -> Tensor:
        return self.codes

    @property
    def device(self) -> torch.device:
        return self.codes.device

    @property
    def nbytes(self) -> int:
        tensors = (self.codes, self.scales, self.zeros, self.tensor_scale)
        return sum(tensor.nbytes for tensor in tensors if tensor is not None)

    def dequantize(self, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return dequantize_weight(self, dtype)

    def to(self, device: torch.device | str) -> QuantizedWeight:
        if isinstance(device, torch.dtype):
            raise TypeError(f"QuantizedWeight: .to moves it to a device; .dequantize({device}) gives its values")
        return self._each(lambda tensor: tensor.to(device))

    def state_dict(self) -> dict[str, Any]:
        """Its tensors and what they mean, as torch.save(weights_only) and torch.load take them."""
        return {name: value for name, value in self._fields().items() if value is not None}

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any]) -> QuantizedWeight:
        return cls(**{name: state.get(name) for name in cls.__dataclass_fields__})  # type: ignore[arg-type]

    def __reduce__(self) -> tuple[Any, ...]:
        # torch does not read float8 tensors from plain pickles: scales go as bytes.
        kept = self._fields()
        if self.format == "nvfp4":
            kept["scales"] = self.scales.view(torch.uint8)
        return _unpickled, (kept,)

    def _fields(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__dataclass_fields__}

    def _each(self, change: Callable[[Tensor], Tensor]) -> QuantizedWeight:
        names = ("codes", "scales", "zeros", "tensor_scale")
        parts = {name: getattr(self, name) for name in names}
        changed: dict[str, Any] = {name: None if one is None else change(one) for name, one in parts.items()}
        return replace(self, **changed)


QuantizedTensor = QuantizedWeight


def _unpickled(kept: dict[str, Any]) -> QuantizedWeight:
    if kept["format"] == "nvfp4":
        kept["scales"] = kept["scales"].view(torch.float8_e4m3fn)
    return QuantizedWeight(**kept)


def quantize_weight(
    weight: Tensor,
    format: str = "nvfp4",
    *,
    group: int | None = None,
    asymmetric: bool = False,
    tensor_scale: Tensor | None = None,
    seed: Tensor | None = None,
) -> QuantizedWeight:
    """A weight [rows, columns], or a tensor [..., columns], in few bits, in one visit; no gradient.

    Args:
        weight: fp32, bf16 or fp16, of any sizes.
        format: "nvfp4" (E2M1, an E4M3 scale for 16 columns, one scale for the tensor), "mxfp4" (E2M1), "mxfp8" (E4M3),
            both with a power of two for 32 columns; "int2", "int3", "int4", "int5", "int6" or "int8" with a scale of
            the weight's type for `group`.
        group: 32, 64 or 128 (the default) for integers; the others have one size.
        asymmetric: integers: a zero for each group, so that its range need not be symmetric.
        tensor_scale: nvfp4: fp32, one element, positive; None takes the smallest power of two with which no scale
            saturates, so that all roundings are exact.
        seed: int64[2], for stochastic rounding; None rounds to nearest even.
    """
    groups, _ = _format(format)
    if weight.dim() == 0:
        raise ValueError("quantize_weight: weight has no dimension; it must be [..., columns]")
    group = groups[0] if group is None else group
    leading = weight.shape[:-1]
    weight = weight.detach()
    if weight.dim() != 2:
        weight = weight.reshape(leading.numel(), weight.shape[-1])
    if format == "nvfp4" and tensor_scale is None:
        tensor_scale = _tensor_scale(weight)
    codes, scales, zeros = _quantize(
        weight, tensor_scale, seed, format, group, code_bytes(format, weight.shape[1]), asymmetric,
        _SCALE_TYPES.get(format, weight.dtype),
    )  # fmt: skip
    bytes_of_zeros = zeros.view(torch.uint8) if asymmetric else None
    scales = scales.view(torch.uint8) if scales.dtype is torch.int8 else scales
    codes = codes.view(torch.uint8)
    if len(leading) != 1:
        codes, scales = codes.view(*leading, codes.shape[1]), scales.view(*leading, scales.shape[1])
        bytes_of_zeros = None if bytes_of_zeros is None else bytes_of_zeros.view(scales.shape)
    return QuantizedWeight(codes, scales, bytes_of_zeros, tensor_scale, format, group, weight.shape[1])


def dequantize_weight(weight: QuantizedWeight, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """The values of a quantised weight as fp32, bf16, fp16 or float8_e4m3fn (saturated)."""
    if dtype not in _NAMES:
        raise ValueError(f"dequantize_weight: dtype is {dtype}; it must be fp32, bf16, fp16 or float8_e4m3fn")
    shape = weight.shape
    if len(shape) != 2:
        rows = shape[:-1].numel()  # -1 would not be known without columns
        weight = weight._each(lambda one: one if one is weight.tensor_scale else one.reshape(rows, one.shape[-1]))
    values: Tensor = _dequantize(*parts_of(weight), weight.format, weight.group, shape[-1], _NAMES[dtype])
    return values if len(shape) == 2 else values.view(shape)


def quantized_matmul(
    x: Tensor,
    weight: QuantizedWeight,
    *,
    bias: Tensor | None = None,
    activation: str | None = None,
    activations: str | None = None,
) -> Tensor:
    """activation(x @ weight.T + bias) with a weight that is decoded on its way to the multipliers.

    Args:
        x: [..., columns of the weight]; fp32, bf16 or fp16, under autocast its type. Gradients of x and bias exist;
            the weight has none. Scales of integers are converted to x's type in each call where they have another.
        weight: what `quantize_weight` made of [rows, columns].
        bias: [rows of the weight], of x's type or fp32.
        activation: a name that `activation` takes, or None.
        activations: "fp8" multiplies in FP8 (W4A8): x is rounded to E4M3 with a scale for each row. For mxfp4, whose
            values are exact in E4M3 within 15 powers of two below a row's largest scale; smaller ones are rounded.
            "int8" multiplies integers (W8A8, `int8_matmul`): x is rounded to 8 bits with a scale for each row. For int8
            without zeros. The gradient of x is that of the product without this rounding (straight through).

    Returns:
        [..., rows of the weight] of x's type.
    """
    check_matrix("quantized_matmul", weight)
    x, bias = packed_operands("quantized_matmul", x, weight.shape, bias)
    if activations is not None:
        from .fp8_activations import fp8_product  # it needs float8.py, which needs this file

        if activations == "int8" and weight.format == "int8" and weight.zeros is None:
            return _integer_product(x, weight, bias, activation)
        if activations != "fp8" or weight.format != "mxfp4":
            raise ValueError(
                f'quantized_matmul: activations is "{activations}" with a weight in {weight.format}; "fp8" with mxfp4 '
                'and "int8" with int8 without zeros are the ones that are exact, leave it out for others'
            )
        product = fp8_product(x, weight, bias)
        return product if activation is None else _activate(product, activation)
    if activation is not None and wants_gradient(x, bias):  # the activation's own gradient needs its input
        return _activate(quantized_matmul(x, weight, bias=bias), activation)
    kind = "identity" if activation is None else activation
    codes, scales, zeros, tensor_scale = parts_of(weight)
    if is_integer(weight.format) and scales.dtype is not x.dtype:
        scales = scales.to(x.dtype)
    missing = columns_of(weight.format, codes.shape[1]) - weight.shape[1]
    if missing:  # the gradient knows a row's bytes alone
        x = torch.nn.functional.pad(x, (0, missing))
    return _product(x, codes, scales, zeros, tensor_scale, bias, weight.format, weight.group, kind)  # type: ignore[no-any-return]


def check_matrix(name: str, weight: Any) -> None:
    if not isinstance(weight, QuantizedWeight):
        raise TypeError(f"{name}: weight is {type(weight).__name__}; give what quantize_weight makes of one")
    if weight.codes.dim() != 2:
        raise ValueError(f"{name}: the weight has shape {list(weight.shape)}; it must be [rows, columns]")


def is_integer(format: str) -> bool:
    return format.startswith("int")


def columns_of(format: str, row_bytes: int) -> int:
    """How many codes so many bytes hold."""
    return row_bytes * 8 // FORMATS[format][1]


def code_bytes(format: str, columns: int) -> int:
    """Bytes of a row of so many codes."""
    return -(-columns * FORMATS[format][1] // 8)


def pack_codes(codes: Tensor, bits: int) -> Tensor:
    """Codes [..., columns], uint8, bit by bit behind each other: [..., ceil(columns * bits / 8)]."""
    columns = codes.shape[-1]
    eights = torch.nn.functional.pad(codes, (0, -columns % 8)).long()
    eights = eights.view(*codes.shape[:-1], eights.shape[-1] // 8, 8)
    words = (eights << torch.arange(0, 8 * bits, bits, device=codes.device)).sum(-1, keepdim=True)
    packed: Tensor = words >> torch.arange(0, 8 * bits, 8, device=codes.device) & 255
    return packed.flatten(-2)[..., : -(-columns * bits // 8)].to(torch.uint8)


def unpack_codes(packed: Tensor, bits: int, columns: int) -> Tensor:
    """The way back: [..., columns]."""
    parts = torch.nn.functional.pad(packed, (0, -packed.shape[-1] % bits)).long()
    parts = parts.view(*packed.shape[:-1], parts.shape[-1] // bits, bits)
    words = (parts << torch.arange(0, 8 * bits, 8, device=packed.device)).sum(-1, keepdim=True)
    codes: Tensor = words >> torch.arange(0, 8 * bits, bits, device=packed.device) & (1 << bits) - 1
    return codes.flatten(-2)[..., :columns].to(torch.uint8)


def _integer_product(x: Tensor, weight: QuantizedWeight, bias: Tensor | None, activation: str | None) -> Tensor:
    from .int8_matmul import int8_matmul  # it is about another op, and only these calls need it

    kept = weight.__dict__.get("_int8")
    version = None if weight.codes.is_inference() else weight.codes._version
    if kept is None or kept[0] != version:
        kept = (version, (weight.codes ^ 0x80).view(torch.int8))
        object.__setattr__(weight, "_int8", kept)
    return int8_matmul(x, kept[1], weight.scales.float(), bias=bias, activation=activation)


def _format(format: str) -> tuple[tuple[int, ...], int]:
    if format not in FORMATS:
        raise ValueError(f'quantize_weight: format is "{format}"; it is one of {", ".join(FORMATS)}')
    return FORMATS[format]


def _tensor_scale(weight: Tensor) -> Tensor:
    """The smallest power of two that 6 * 448 times reaches the largest magnitude; 1 where there is none."""
    if weight.numel() == 0:
        return torch.ones(1, device=weight.device)
    largest = weight.abs().amax().float().reshape(1) / (6.0 * 448.0)
    mantissa, exponent = torch.frexp(largest)
    power = torch.ldexp(torch.ones_like(largest), exponent - (mantissa == 0.5).to(exponent.dtype))
    usable = torch.isfinite(largest) & (largest > 0)
    return torch.where(usable, power.clamp(2.0**-100, 2.0**100), 1.0)


def parts_of(weight: QuantizedWeight) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    scales = weight.scales.view(torch.int8) if weight.scales.dtype is torch.uint8 else weight.scales
    zeros = None if weight.zeros is None else weight.zeros.view(torch.int8)
    return weight.codes.view(torch.int8), scales, zeros, weight.tensor_scale


def values_of(
    codes: Tensor, scales: Tensor, zeros: Tensor | None, tensor_scale: Tensor | None, format: str, group: int,
    dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """The values of all codes that the bytes of a row hold."""
    columns = columns_of(format, codes.shape[1])
    return _dequantize(codes, scales, zeros, tensor_scale, format, group, columns, _NAMES[dtype])  # type: ignore[no-any-return]


def _gradient(grads: Any, saved: Any, wanted: Any) -> Any:
    codes, scales, zeros, tensor_scale, bias, format, group = saved
    grad = grads[0]
    grad_x = grad_bias = None
    if wanted[0]:
        grad_x = matmul(grad, values_of(codes, scales, zeros, tensor_scale, format, group, grad.dtype))
    if wanted[5]:
        rows = grad.flatten(0, -2) if grad.dim() > 1 else grad[None]
        grad_bias = rows.sum(0, dtype=torch.float32).to(bias.dtype)
    return grad_x, None, None, None, None, grad_bias


_quantize = without_gradient("group_quantize", name="quantize_weight")
_dequantize = without_gradient("group_dequantize", name="dequantize_weight")
_product = differentiable(
    "quantized_matmul",
    saves=["codes", "scales", "zeros", "tensor_scale", "bias", "format", "group"],
    gradient=_gradient,
    instead="torch.nn.functional.linear of dequantize_weight",
)
