"""Whole models to few bits: linear layers of torch and of this library, on request embeddings and experts."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ..._modules import replace_modules
from ..._ops.quantized_matmul import FORMATS, QuantizedWeight, quantize_weight, quantized_matmul
from ...core.attention import AttentionLayer
from ...core.linear import FusedLinearActivation
from ...functional import activation as activate
from ...mixture_of_experts.layers import MoELayer
from ..convert import convert_model_to_fp8
from ..int8_linear import Int8Linear
from ..own_layers import PROJECTION
from ..quantized_linear import QuantizedLinear
from ..sensitivity import is_skipped, quantizable_layers


class QuantizedLinearActivation(QuantizedLinear):
    """FusedLinearActivation with a weight in few bits: bias and activation are part of the product."""

    dropout: float = 0.0

    @classmethod
    def of(cls, layer: FusedLinearActivation, weight: QuantizedWeight) -> QuantizedLinearActivation:
        made = cls.from_quantized(weight, layer.bias, activation=layer._kind)
        assert isinstance(made, QuantizedLinearActivation)
        made.dropout = layer.dropout
        return made

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """x [..., in_features] -> [..., out_features]; the residual, of that shape, is added last."""
        if self.training and self.dropout > 0 and self.activation is not None:
            sums = quantized_matmul(x, self.quantized_weight)
            return activate(sums, self.activation, bias=self.bias, residual=residual, dropout_p=self.dropout)
        output = super().forward(x)
        return output if residual is None else output + residual


class QuantizedPackedProjection(QuantizedLinear):
    """The projection of query, key and value of an AttentionLayer."""

    def forward(self, x: Tensor, begin: int = 0, end: int | None = None) -> Tensor:
        """x [..., in_features] -> [..., end - begin]: those rows of the weight."""
        whole = self.quantized_weight
        zeros = None if whole.zeros is None else whole.zeros[begin:end]
        rows = replace(whole, codes=whole.codes[begin:end], scales=whole.scales[begin:end], zeros=zeros)
        return quantized_matmul(x, rows, bias=None if self.bias is None else self.bias[begin:end])


class QuantizedEmbedding(nn.Module):
    """nn.Embedding with a table in few bits: the rows that are looked up are decoded.

    Args:
        table: what quantize_weight made of [num_embeddings, embedding_dim].
        dtype: of the rows that come out.
    """

    codes: Tensor
    scales: Tensor
    zeros: Tensor | None
    tensor_scale: Tensor | None

    def __init__(self, table: QuantizedWeight, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        self.num_embeddings, self.embedding_dim = table.shape
        self.format, self.group, self.dtype = table.format, table.group, dtype
        for name in ("codes", "scales", "zeros", "tensor_scale"):
            self.register_buffer(name, getattr(table, name))

    def forward(self, ids: Tensor) -> Tensor:
        """ids [...] -> [..., embedding_dim]."""
        flat = ids.reshape(-1)
        zeros = None if self.zeros is None else self.zeros[flat]
        rows = QuantizedWeight(
            self.codes[flat], self.scales[flat], zeros, self.tensor_scale, self.format, self.group, self.embedding_dim
        )
        return rows.dequantize(self.dtype).view(*ids.shape, self.embedding_dim)

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}, format={self.format}, group={self.group}"


class QuantizedMatrices(nn.Module):
    """The weights of experts [experts, rows, columns] in few bits, in the place of a MoELayer's parameter.

    Args:
        weight: what quantize_weight made of [experts * rows, columns].
        experts: how many there are.
        dtype: of what `dequantize` gives.
    """

    codes: Tensor
    scales: Tensor
    zeros: Tensor | None
    tensor_scale: Tensor | None

    def __init__(self, weight: QuantizedWeight, experts: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.shape = torch.Size((experts, weight.shape[0] // max(experts, 1), weight.shape[1]))
        self.format, self.group, self.dtype = weight.format, weight.group, dtype
        for name in ("codes", "scales", "zeros", "tensor_scale"):
            self.register_buffer(name, getattr(weight, name))

    @property
    def quantized_weight(self) -> QuantizedWeight:
        return QuantizedWeight(
            self.codes, self.scales, self.zeros, self.tensor_scale, self.format, self.group, self.shape[2]
        )

    def dequantize(self) -> Tensor:
        """[experts, rows, columns]."""
        return self.quantized_weight.dequantize(self.dtype).view(self.shape)

    def extra_repr(self) -> str:
        return f"{list(self.shape)}, format={self.format}, group={self.group}"


def convert_model(
    model: nn.Module, format: str = "nvfp4", *, group: int | None = None, asymmetric: bool = False,
    skip: Sequence[str] = (), embeddings: bool = False, experts: bool = False, activations: str | None = None,
    inplace: bool = True,
) -> nn.Module:  # fmt: skip
    """The model with its weights in few bits, for inference: products decode them on their way.

    Converted are nn.Linear (and what inherits its forward), OptimizedLinear, FusedLinearActivation, and the packed
    projection of AttentionLayer, which becomes its submodule `in_proj`. Layers in nn.MultiheadAttention and in
    nn.TransformerEncoderLayer, which read weights past their layers' forward, stay. Weights are rounded to nearest;
    UltraPrecisionModule chooses formats, and rounds by calibration data.

    Args:
        format: as quantize_weight takes it; "fp8": convert_model_to_fp8, which trains.
        group, asymmetric: of integers, as quantize_weight takes them.
        skip: names of layers that stay, whole or their last part.
        embeddings: also nn.Embedding; a head that shares its weight is converted as a layer of its own.
        experts: also the experts of MoELayer, whose products decode them on their way (`quantized_grouped_matmul`).
        activations: "int8", with format "int8": linear layers become Int8Linear, whose weight has one scale a row and
            whose inputs are rounded to 8 bits in each call (W8A8).
        inplace: False converts a copy and leaves the model alone.
    """
    if activations is not None and (activations, format, group, asymmetric) != ("int8", "int8", None, False):
        raise ValueError(
            f'convert_model: activations is "{activations}" with format "{format}"; it is "int8", with format "int8" '
            "and neither group nor asymmetric, or None"
        )
    if format == "fp8":
        if group is not None or asymmetric or embeddings or experts:
            raise ValueError('convert_model: group, asymmetric, embeddings and experts are for few bits, not for "fp8"')
        return convert_model_to_fp8(model, inplace=inplace)
    if format not in FORMATS:
        raise ValueError(f'convert_model: format is "{format}"; it is "fp8" or one of {", ".join(FORMATS)}')
    if not inplace:
        model = copy.deepcopy(model)

    def quantized(weight: Tensor) -> QuantizedWeight:
        return quantize_weight(weight, format, group=group, asymmetric=asymmetric)

    made: dict[nn.Module, nn.Module] = {}
    for layer in quantizable_layers(model, skip).values():
        if activations == "int8":
            made[layer] = Int8Linear.from_linear(layer)
        else:
            made[layer] = QuantizedLinear.from_quantized(quantized(layer.weight), layer.bias)
    for name, module in list(model.named_modules()):
        if is_skipped(name, skip):
            continue
        if type(module) is FusedLinearActivation:
            made[module] = QuantizedLinearActivation.of(module, quantized(module.weight))
        elif isinstance(module, AttentionLayer):
            _convert_projection(module, quantized)
        elif embeddings and type(module) is nn.Embedding and module.max_norm is None:
            made[module] = QuantizedEmbedding(quantized(module.weight), module.weight.dtype)
        elif experts and isinstance(module, MoELayer):
            for weight in ("gate_up", "down"):
                kept = getattr(module, weight)
                if isinstance(kept, QuantizedMatrices):
                    continue
                codes = QuantizedMatrices(quantized(kept.detach().flatten(0, 1)), len(kept), kept.dtype)
                del module._parameters[weight]
                module.add_module(weight, codes)
    for before, after in made.items():
        after.train(before.training)
    return replace_modules(model, made)


def _convert_projection(layer: AttentionLayer, quantized: Any) -> None:
    if PROJECTION in layer._modules or layer.in_proj_weight is None:
        return
    bias = layer._parameters["in_proj_bias"]
    projection = QuantizedPackedProjection.from_quantized(quantized(layer.in_proj_weight), bias)
    layer.register_parameter("in_proj_weight", None)
    layer.register_parameter("in_proj_bias", None)
    layer.add_module(PROJECTION, projection)
    projection.train(layer.training)
