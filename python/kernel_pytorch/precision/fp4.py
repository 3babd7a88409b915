"""FP4 weights of tensors and models under the seeds' name; QuantizedLinear and quantize_weight do the work."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from .._ops.quantized_matmul import FORMATS, QuantizedWeight, quantize_weight
from .allocation import PrecisionFormat
from .models.opened import open_layers, replace_layers
from .quantized_linear import QuantizedLinear
from .sensitivity import quantizable_layers

_NAMES = {"fp4": "nvfp4", "nvfp4": "nvfp4", "mxfp4": "mxfp4"}


class FP4Quantizer(nn.Module):
    """Weights in E2M1: "fp4" and "nvfp4" with E4M3 scales for 16 columns and one for the tensor, "mxfp4" with powers of
    two for 32.

    Args:
        format_type: a name or a PrecisionFormat.
        block_size: columns of a scale, which the format decides: None, or its own.
        use_double_quantization: whether scales are kept in 8 bits: they always are, in both formats.
        adaptive_scaling: nvfp4: the tensor's scale follows from its largest magnitude; False: 1.
    """

    def __init__(
        self, format_type: str | PrecisionFormat = "fp4", block_size: int | None = None,
        use_double_quantization: bool = True, adaptive_scaling: bool = True,
    ) -> None:  # fmt: skip
        super().__init__()
        name = format_type.value if isinstance(format_type, PrecisionFormat) else format_type
        if name not in _NAMES:
            raise ValueError(f'FP4Quantizer: format_type is "{name}"; it is one of {", ".join(_NAMES)}')
        self.format = _NAMES[name]
        groups = FORMATS[self.format][0]
        if block_size is not None and block_size not in groups:
            raise ValueError(
                f"FP4Quantizer: block_size is {block_size}; {self.format} has scales for {groups[0]} columns"
            )
        if not use_double_quantization:
            raise ValueError(f"FP4Quantizer: use_double_quantization is False; scales of {self.format} have 8 bits")
        self.block_size, self.adaptive_scaling = groups[0], adaptive_scaling

    def quantize(self, tensor: Tensor) -> QuantizedWeight:
        """Codes and scales of a tensor [..., columns]."""
        fixed = self.format == "nvfp4" and not self.adaptive_scaling
        return quantize_weight(tensor, self.format, tensor_scale=torch.ones(1, device=tensor.device) if fixed else None)

    def dequantize(self, weight: QuantizedWeight, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return weight.dequantize(dtype)

    def forward(self, tensor: Tensor) -> Tensor:
        """The tensor as FP4 has it, in its own type; gradients pass the rounding."""
        values = self.quantize(tensor).dequantize(tensor.dtype)
        return tensor + (values - tensor).detach()

    def quantize_module(self, module: nn.Module, *, skip: Sequence[str] = (), inplace: bool = False) -> nn.Module:
        """The module with QuantizedLinear instead of its linear layers, which multiply by FP4 codes.

        Args:
            skip: names of layers that stay, whole or their last part.
            inplace: False quantises a copy.
        """
        if not inplace:
            module = copy.deepcopy(module)
        module = open_layers(module, skip)
        made: dict[nn.Module, nn.Module] = {}
        for layer in quantizable_layers(module, skip).values():
            if layer not in made:
                made[layer] = QuantizedLinear.from_quantized(self.quantize(layer.weight), layer.bias)
                made[layer].train(layer.training)
        return replace_layers(module, made)
