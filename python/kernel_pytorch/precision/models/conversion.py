"""Whole models to few bits: linear layers of torch and of this library, on request embeddings and experts."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ..._ops.quantized_matmul import FORMATS, QuantizedWeight, quantize_weight, quantized_matmul
from ...core.attention import AttentionLayer
from ...core.linear import FusedLinearActivation
from ...functional import activation as activate
from ...mixture_of_experts.layers import MoELayer
from ..config import FP8Config
from ..convert import convert_model_to_fp8
from ..int8_linear import Int8Linear
from ..own_layers import PROJECTION
from ..quantized_linear import QuantizedBuffers, QuantizedLinear
from ..sensitivity import is_skipped, quantizable_layers
from .experts import QuantizedMatrices, is_packed_experts, quantized_experts
from .opened import open_layers, replace_layers


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


class QuantizedEmbedding(QuantizedBuffers):
    """nn.Embedding with a table in few bits: the rows that are looked up are decoded.

    Args:
        table: what quantize_weight made of [num_embeddings, embedding_dim].
        dtype: of the rows that come out.
    """

    def __init__(self, table: QuantizedWeight, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__(table, dtype)
        self.num_embeddings, self.embedding_dim = table.shape

    def forward(self, ids: Tensor) -> Tensor:
        """ids [...] -> [..., embedding_dim]."""
        flat = ids.reshape(-1)
        whole = self.quantized_weight
        zeros = None if whole.zeros is None else whole.zeros[flat]
        rows = replace(whole, codes=whole.codes[flat], scales=whole.scales[flat], zeros=zeros)
        return rows.dequantize(self.dtype).view(*ids.shape, self.embedding_dim)

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}, format={self.format}, group={self.group}"


def convert_model(
    model: nn.Module, format: str = "nvfp4", *, group: int | None = None, asymmetric: bool = False,
    skip: Sequence[str] = (), embeddings: bool = False, experts: bool = False, activations: str | None = None,
    inplace: bool = True,
) -> nn.Module:  # fmt: skip
    """The model with its weights in few bits, for inference: products decode them on their way.

    Converted are nn.Linear (and what inherits its forward), OptimizedLinear, FusedLinearActivation, and the packed
    projection of AttentionLayer, which becomes its submodule `in_proj`. nn.MultiheadAttention (also in
    nn.TransformerEncoderLayer and the like) gets linear layers q_proj, k_proj, v_proj and out_proj; with extra keys
    (add_bias_kv, add_zero_attn) it stays. transformers' Conv1D (GPT-2) counts as the linear layer it is. Where
    they have hooks, both stay. Weights are rounded to nearest; UltraPrecisionModule chooses formats, and rounds by
    calibration data.

    Args:
        format: as quantize_weight takes it; "fp8": convert_model_to_fp8, which trains.
        group, asymmetric: of integers, as quantize_weight takes them.
        skip: names of layers that stay, whole or their last part.
        embeddings: also nn.Embedding; a head that shares its weight is converted as a layer of its own.
        experts: also the experts of MoELayer and of Hugging Face's mixtures, whose products decode them on their way
            (`quantized_grouped_matmul`).
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
        return convert_model_to_fp8(model, FP8Config(skip=tuple(skip)), inplace=inplace)
    if format not in FORMATS:
        raise ValueError(f'convert_model: format is "{format}"; it is "fp8" or one of {", ".join(FORMATS)}')
    if not inplace:
        model = copy.deepcopy(model)
    model = open_layers(model, skip)

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
        elif experts and is_packed_experts(module):
            made[module] = quantized_experts(module, quantized)
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
    return replace_layers(model, made)


def _convert_projection(layer: AttentionLayer, quantized: Any) -> None:
    if PROJECTION in layer._modules or layer.in_proj_weight is None:
        return
    bias = layer._parameters["in_proj_bias"]
    projection = QuantizedPackedProjection.from_quantized(quantized(layer.in_proj_weight), bias)
    layer.register_parameter("in_proj_weight", None)
    layer.register_parameter("in_proj_bias", None)
    layer.add_module(PROJECTION, projection)
    projection.train(layer.training)
