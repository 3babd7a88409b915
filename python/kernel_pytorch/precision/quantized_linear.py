"""A linear layer whose weight is kept in few bits."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .._ops.quantized_matmul import (
    FORMATS,
    QuantizedWeight,
    code_bytes,
    dequantize_weight,
    is_integer,
    quantize_weight,
    quantized_matmul,
)


class QuantizedBuffers(nn.Module):
    """A weight in few bits as buffers: codes, scales, zeros and tensor_scale. Conversions of the module's type change
    the scales of integers, which have the type of the activations; E4M3 scales and tensor_scale keep theirs.

    Args:
        weight: the weight.
        dtype: of the values it stands for.
    """

    codes: Tensor
    scales: Tensor
    zeros: Tensor | None
    tensor_scale: Tensor | None

    def __init__(self, weight: QuantizedWeight, dtype: torch.dtype) -> None:
        super().__init__()
        self.format, self.group, self.columns, self.dtype = weight.format, weight.group, weight.shape[1], dtype
        for name in ("codes", "scales", "zeros", "tensor_scale"):
            self.register_buffer(name, getattr(weight, name))

    @property
    def quantized_weight(self) -> QuantizedWeight:
        return QuantizedWeight(
            self.codes, self.scales, self.zeros, self.tensor_scale, self.format, self.group, self.columns
        )

    def __getstate__(self) -> dict[str, Any]:
        """With E4M3 scales as their bytes: torch does not read float8 tensors from plain pickles."""
        buffers = dict(self._buffers)
        if self.scales.dtype is torch.float8_e4m3fn:
            buffers["scales"] = self.scales.view(torch.uint8)
        return {**self.__dict__, "_buffers": buffers}

    def __setstate__(self, state: dict[str, Any]) -> None:
        buffers = dict(state["_buffers"])
        if state["format"] == "nvfp4":
            buffers["scales"] = buffers["scales"].view(torch.float8_e4m3fn)
        super().__setstate__({**state, "_buffers": buffers})  # type: ignore[no-untyped-call]

    def _apply(self, fn, recurse=True):  # type: ignore[no-untyped-def]
        fixed = {"scales": self.scales, "tensor_scale": self.tensor_scale} if self.format == "nvfp4" else {}
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, before in fixed.items():
            after = self._buffers[name]
            if before is not None and after is not None and after.dtype is not before.dtype:
                self._buffers[name] = before.to(after.device)
        self.dtype = fn(torch.empty(0, dtype=self.dtype, device="cpu")).dtype
        return self


class QuantizedLinear(QuantizedBuffers):
    """activation(x @ weight.T + bias) with a weight in few bits: codes, scales, zeros and tensor_scale are buffers, and
    so is `order` of a weight whose columns were sorted (GPTQ's act-order): column i of the codes is column order[i].

    `from_linear` quantises a layer. The constructor makes an empty one for load_state_dict. Gradients reach x and bias,
    the weight is fixed.

    Args:
        format: as quantize_weight names them: "nvfp4", "mxfp4", "mxfp8", or integers of 2 to 8 bits, "int4".
        group: columns that share a scale, of integers: 32, 64 or 128.
        asymmetric: integers: each group has a zero.
        dtype: of the bias, and of the scales of integers.
        activation: what is applied to the result, by its name in functional.activation.
    """

    order: Tensor | None

    def __init__(
        self, in_features: int, out_features: int, bias: bool = True, *, format: str = "nvfp4",
        group: int | None = None, asymmetric: bool = False, activation: str | None = None,
        device: torch.device | str | None = None, dtype: torch.dtype = torch.bfloat16,
    ) -> None:  # fmt: skip
        if format not in FORMATS:
            raise ValueError(f'QuantizedLinear: format is "{format}"; it is one of {", ".join(FORMATS)}')
        groups = FORMATS[format][0]
        group = groups[0] if group is None else group
        if group not in groups:
            raise ValueError(
                f"QuantizedLinear: group is {group}; {format} has groups of {' or '.join(map(str, groups))}"
            )
        if asymmetric and not is_integer(format):
            raise ValueError(f"QuantizedLinear: {format} is symmetric; asymmetric is for integers")
        in_row = -(-in_features // group)
        scale_type = {"nvfp4": torch.float8_e4m3fn, "mxfp4": torch.uint8, "mxfp8": torch.uint8}.get(format, dtype)
        codes = torch.zeros(out_features, code_bytes(format, in_features), dtype=torch.uint8, device=device)
        scales = torch.zeros(out_features, in_row, device=device).to(scale_type)
        zeros = torch.zeros(out_features, in_row, dtype=torch.uint8, device=device) if asymmetric else None
        tensor_scale = torch.ones(1, device=device) if format == "nvfp4" else None
        super().__init__(QuantizedWeight(codes, scales, zeros, tensor_scale, format, group, in_features), dtype)
        self.in_features, self.out_features, self.activation = in_features, out_features, activation
        self.register_buffer("order", None)
        self.bias = nn.Parameter(torch.zeros(out_features, dtype=dtype, device=device)) if bias else None

    @classmethod
    def from_linear(
        cls, linear: nn.Linear, *, format: str = "nvfp4", group: int | None = None, asymmetric: bool = False,
        activation: str | None = None, seed: Tensor | None = None,
    ) -> QuantizedLinear:  # fmt: skip
        """The layer with its weight rounded; the bias is the same parameter."""
        weight = quantize_weight(linear.weight, format, group=group, asymmetric=asymmetric, seed=seed)
        return cls.from_quantized(weight, linear.bias, activation=activation)

    @classmethod
    def from_quantized(
        cls, weight: QuantizedWeight, bias: nn.Parameter | None = None, *, activation: str | None = None,
        order: Tensor | None = None,
    ) -> QuantizedLinear:  # fmt: skip
        """A layer of a weight that is quantised already; the bias is the same parameter."""
        rows, columns = weight.shape
        of_values = weight.scales.dtype if is_integer(weight.format) else torch.bfloat16
        made = cls(
            columns, rows, False, format=weight.format, group=weight.group, asymmetric=weight.zeros is not None,
            activation=activation, device="meta", dtype=of_values if bias is None else bias.dtype,
        )  # fmt: skip
        made.codes, made.scales = weight.codes, weight.scales
        made.zeros, made.tensor_scale = weight.zeros, weight.tensor_scale
        made.bias, made.order = bias, order
        return made

    def dequantize(self, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        """The weight's values, columns as the layer's input has them."""
        values = dequantize_weight(self.quantized_weight, dtype)
        return values if self.order is None else torch.empty_like(values).index_copy_(1, self.order, values)

    def forward(self, x: Tensor) -> Tensor:
        if self.order is not None:
            x = x.index_select(-1, self.order)
        return quantized_matmul(x, self.quantized_weight, bias=self.bias, activation=self.activation)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, " + (
            f"format={self.format}, group={self.group}, bytes={self.quantized_weight.nbytes:,}"
        )
