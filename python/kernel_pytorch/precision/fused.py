"""FP8 layers with what stands before and between them: a norm, a gated activation, and its gradient.

Each is rounded to FP8 where it is made, so that it never lies in memory in 16 bits: of a norm before a layer a write
and a read of its output are saved, of a gated pair of layers those of the activation and, backward, of its gradient,
which is the largest tensor of a block. The layers are FP8LinearLayer, which keep their parameters and scales. Where one
has hooks (fp8_numerics_report, FSDP2), it is called, and the parts run one after the other.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .._modules import has_hooks
from .._ops.float8 import Quantized, quantize, scaled_matmul
from .._ops.float8_fused import (
    QuantizedGate,
    gated_activation_backward_quantized,
    gated_activation_quantized,
    rms_norm_quantized,
)
from .._ops.gated_activation import gated_activation_packed
from .._ops.rms_norm import add_rms_norm, rms_norm
from .._ops.support.seed import seed_for
from .linear import GRADIENT, GRANULARITIES, INPUT, WEIGHT, FP8LinearLayer, State


def fp8_norm_linear(
    x: Tensor,
    layer: FP8LinearLayer,
    norm_weight: Tensor | None = None,
    eps: float = 1e-6,
    *,
    residual: Tensor | None = None,
    weight_offset: float = 0.0,
) -> Any:
    """layer(rms_norm(x, norm_weight, eps, residual=residual)); with a residual the pair (output, x + residual).

    Args:
        x: [..., in_features]; norm_weight, eps, residual, weight_offset: as for functional.rms_norm.
    """
    if _is_watched(layer):
        normed, total = _norm(x, norm_weight, eps, residual, weight_offset)
        return layer(normed) if residual is None else (layer(normed), total)
    x = _autocast(x)
    shape = x.shape
    rows = x.reshape(-1, shape[-1])
    added = None if residual is None else residual.to(x.dtype).reshape(rows.shape)
    output, total = _NormLinear.apply(  # type: ignore[no-untyped-call]
        rows, added, norm_weight, *_tensors(layer, x), float(eps), float(weight_offset), _settings(layer)
    )
    output = output.view(*shape[:-1], layer.out_features)
    return output if residual is None else (output, total.view(shape))


def fp8_gated_mlp(
    x: Tensor,
    gate_up: FP8LinearLayer,
    down: FP8LinearLayer,
    kind: str = "silu",
    *,
    norm_weight: Tensor | None = None,
    eps: float | None = None,
    residual: Tensor | None = None,
    weight_offset: float = 0.0,
) -> Any:
    """down(function(g) * u) with g and u the halves of gate_up(x), gate before up.

    Args:
        x: [..., in_features of gate_up].
        gate_up: its out_features are twice the in_features of down.
        kind: as for functional.gated_activation.
        norm_weight, eps, residual, weight_offset: eps puts functional.rms_norm before it. With a residual the pair
            (output, x + residual) is returned.
    """
    if gate_up.out_features != 2 * down.in_features:
        raise ValueError(
            f"fp8_gated_mlp: gate_up has {gate_up.out_features} outputs, down has {down.in_features} inputs; the first "
            "must be twice the second"
        )
    if eps is None and (norm_weight is not None or residual is not None):
        raise ValueError("fp8_gated_mlp: norm_weight or residual is given without eps; the norm needs it")
    if _is_watched(gate_up) or _is_watched(down):
        normed, total = (x, None) if eps is None else _norm(x, norm_weight, eps, residual, weight_offset)
        output = down(gated_activation_packed(gate_up(normed), kind))
        return output if residual is None else (output, total)
    x = _autocast(x)
    shape = x.shape
    rows = x.reshape(-1, shape[-1])
    added = None if residual is None else residual.to(x.dtype).reshape(rows.shape)
    output, total = _GatedMlp.apply(  # type: ignore[no-untyped-call]
        rows, added, norm_weight, *_tensors(gate_up, x), *_tensors(down, x), kind, eps, float(weight_offset),
        _settings(gate_up), _settings(down),
    )  # fmt: skip
    output = output.view(*shape[:-1], down.out_features)
    return output if residual is None else (output, total.view(shape))


def _is_watched(layer: FP8LinearLayer) -> bool:
    return layer.fp8_watcher is not None or has_hooks(layer)


def _norm(x: Tensor, weight: Tensor | None, eps: float, residual: Tensor | None, weight_offset: float) -> Any:
    """The output, and x + residual."""
    if residual is None:
        return rms_norm(x, weight, eps, weight_offset=weight_offset), None
    return add_rms_norm(x, residual, weight, eps, weight_offset=weight_offset)


def _autocast(x: Tensor) -> Tensor:
    kind = x.device.type
    return x.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else x


_TENSORS = 6  # of a layer among a function's arguments
_SAVED = 4  # of those, the first


def _tensors(layer: FP8LinearLayer, x: Tensor) -> tuple[Tensor | None, ...]:
    draws = layer.fp8_config.stochastic_gradients and torch.is_grad_enabled()
    seed = seed_for(x, None) if draws else None
    return layer.weight, layer.bias, layer.fp8_scale, seed, layer.fp8_amax, layer.fp8_nonfinite


def _settings(layer: FP8LinearLayer) -> tuple[Any, ...]:
    config = layer.fp8_config
    types = config.forward_format.dtype, config.backward_format.dtype
    return config.recipe, layer.fp8_ready, layer.training, config.accurate_sums, *types


class _Layer(NamedTuple):
    """One layer inside a function: its tensors, and what it does with codes."""

    weight: Any
    bias: Any
    scale: Any
    seed: Any
    amax: Any  # this and the next are written by every use of the layer, so not saved: autograd would object
    nonfinite: Any
    settings: Any

    @staticmethod
    def of(tensors: Any, settings: Any) -> _Layer:
        return _Layer._make([*tensors, settings])

    def options(self, row: int, *, codes: bool, transposed: bool) -> dict[str, Any]:
        recipe, ready, training, _, forward_type, backward_type = self.settings
        state = State(self.scale, self.amax, self.nonfinite, recipe == "delayed" and ready, training)
        dtype = backward_type if row == GRADIENT else forward_type
        granularity = GRANULARITIES[recipe][1 if row == WEIGHT else 0]
        seed = self.seed if row == GRADIENT else None
        return state.options(row, dtype, granularity, codes=codes, transposed=transposed, seed=seed)

    def multiply(self, inputs: Quantized, dtype: torch.dtype, needs_x: bool) -> tuple[Tensor, Quantized]:
        """The output, and the codes of the weight."""
        weights = quantize(self.weight, **self.options(WEIGHT, codes=True, transposed=needs_x))
        output = scaled_matmul(
            inputs.codes, weights.codes, inputs.scales, weights.scales, bias=self.bias, dtype=dtype,
            accurate=self.settings[3] == "all",
        )  # fmt: skip
        return output, weights

    def input_gradient(self, grads: Quantized, weights: tuple[Any, Any], dtype: torch.dtype) -> Tensor:
        """That of x, of the weight's transposed codes and their scales."""
        accurate = self.settings[3] != "none"
        return scaled_matmul(grads.codes, weights[0], grads.scales, weights[1], dtype=dtype, accurate=accurate)

    def weight_gradient(self, grads: Quantized, inputs: tuple[Any, Any]) -> Tensor:
        """That of the weight, of x's transposed codes and their scales."""
        return scaled_matmul(
            grads.transposed, inputs[0], grads.transposed_scales, inputs[1], dtype=self.weight.dtype,
            accurate=self.settings[3] != "none",
        )  # fmt: skip


class _Norm(NamedTuple):
    """What a norm before a layer keeps for the backward: x or the sum, its weight, rstd."""

    value: Any
    weight: Any
    rstd: Any

    def gradients(self, grad: Tensor, grad_sum: Any, weight_offset: float, needs_x: bool, needs_weight: bool) -> Any:
        backward = torch.ops.kernel_pytorch.rms_norm_backward.default
        return backward(grad, self.value, self.weight, self.rstd, grad_sum, weight_offset, needs_x, needs_weight)


class _NormLinear(torch.autograd.Function):
    """x [tokens, in] -> [tokens, out], and x + residual (empty without one)."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, residual: Tensor | None, norm_weight: Tensor | None, weight: Tensor, bias: Tensor | None,
        scale: Tensor, seed: Tensor | None, amax: Tensor, nonfinite: Tensor, eps: float, weight_offset: float,
        settings: Any,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        needs_x, needs_weight = any(ctx.needs_input_grad[:3]), ctx.needs_input_grad[3]
        layer = _Layer(weight, bias, scale, seed, amax, nonfinite, settings)
        made = rms_norm_quantized(
            x, norm_weight, eps, residual=residual, weight_offset=weight_offset,
            **layer.options(INPUT, codes=True, transposed=needs_weight),
        )  # fmt: skip
        output, weights = layer.multiply(made.quantized, x.dtype, needs_x)
        value = x if made.sum is None else made.sum
        ctx.save_for_backward(
            value, norm_weight, made.rstd, made.quantized.transposed, made.quantized.transposed_scales,
            weights.transposed, weights.transposed_scales, weight, bias, scale, seed,
        )  # fmt: skip
        ctx.records = amax, nonfinite
        ctx.settings, ctx.weight_offset, ctx.has_residual = settings, weight_offset, residual is not None
        return output, made.sum if made.sum is not None else x.new_empty(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, grad_sum: Tensor) -> Any:
        *norm, x_codes, x_scales, weight_codes, weight_scales = ctx.saved_tensors[:7]
        layer = _Layer.of([*ctx.saved_tensors[7:], *ctx.records], ctx.settings)
        needs_x, needs_residual, needs_norm, needs_weight, needs_bias = ctx.needs_input_grad[:5]
        needs_input = needs_x or needs_residual
        needs_codes = needs_input or needs_norm
        grad_normed = grad_weight = None
        if needs_codes or needs_weight:
            grads = quantize(grad, **layer.options(GRADIENT, codes=needs_codes, transposed=needs_weight))
            if needs_codes:
                grad_normed = layer.input_gradient(grads, (weight_codes, weight_scales), norm[0].dtype)
            if needs_weight:
                grad_weight = layer.weight_gradient(grads, (x_codes, x_scales))
        grad_x = grad_norm = None
        if grad_normed is not None:
            grad_x, grad_norm = _Norm._make(norm).gradients(
                grad_normed, grad_sum if ctx.has_residual else None, ctx.weight_offset, needs_input, needs_norm
            )
        grad_bias = grad.sum(0) if layer.bias is not None and needs_bias else None
        return (
            grad_x if needs_x else None, grad_x if needs_residual else None, grad_norm if needs_norm else None,
            grad_weight, grad_bias, *([None] * 7),
        )  # fmt: skip


# Codes of the gradient of gate and up that are made at a time, where they are more; in at most so many parts, since the
# gradient of x is added up once for each.
LARGE_GRADIENT = 1 << 27
_MOST_PARTS = 4


class _Hidden:
    """The gradients of a gated pair of layers from that of the second one's output on."""

    def __init__(self, packed: Tensor, kind: str, inputs: Any, first_weights: Any, second_weights: Any) -> None:
        self.packed, self.kind, self.inputs = packed, kind, inputs
        self.first_weights, self.second_weights = first_weights, second_weights

    def gradients(
        self, first: _Layer, second: _Layer, grads: Quantized, dtype: torch.dtype, needs_x: bool, needs_first: bool,
        needs_bias: bool,
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
        """Of x, of the first weight and of its bias. The gradient of gate and up, with its codes and their transpose,
        is the largest tensor of a block: where it decides over the peak, it is there by parts of the columns."""
        width = self.packed.shape[1] // 2
        can_split = GRANULARITIES[first.settings[0]][0] == "tensor" and not needs_bias and first.seed is None
        parts = min(max(-(-self.packed.numel() // LARGE_GRADIENT), 1), _MOST_PARTS) if can_split else 1
        size = -(-width // parts // 128) * 128  # columns of a part
        if size >= width:
            made = self._of_columns(first, second, grads, dtype, slice(None), needs_x, needs_first, needs_bias)
            self.packed = self.packed.new_empty(0)  # its gradient is there
            grad_x = first.input_gradient(made.quantized, self.first_weights, dtype) if needs_x else None
            grad_first = first.weight_gradient(made.quantized, self.inputs) if needs_first else None
            return grad_x, grad_first, made.output.sum(0) if made.output is not None else None
        grad_x = None
        grad_first = torch.empty_like(first.weight) if needs_first else None
        for columns in (slice(begin, min(begin + size, width)) for begin in range(0, width, size)):
            made = self._of_columns(first, second, grads, dtype, columns, needs_x, needs_first, False)
            halves = columns, slice(width + columns.start, width + columns.stop)
            if needs_x:
                weights = torch.cat([self.first_weights[0][:, half] for half in halves], 1)
                part = first.input_gradient(made.quantized, (weights, self.first_weights[1]), dtype)
                grad_x = part if grad_x is None else grad_x.add_(part)
            if grad_first is not None:
                part = first.weight_gradient(made.quantized, self.inputs)
                for half, rows in zip(halves, part.chunk(2), strict=True):
                    grad_first[half].copy_(rows)
            del made
        return grad_x, grad_first, None

    def _of_columns(
        self, first: _Layer, second: _Layer, grads: Quantized, dtype: torch.dtype, columns: slice, needs_x: bool,
        needs_first: bool, needs_bias: bool,
    ) -> QuantizedGate:  # fmt: skip
        codes, scales = self.second_weights
        grad_hidden = second.input_gradient(grads, (codes[columns], scales), dtype)
        gate, up = (half[:, columns] for half in self.packed.chunk(2, 1))
        return gated_activation_backward_quantized(
            grad_hidden, gate, up, self.kind, with_output=needs_bias,
            **first.options(GRADIENT, codes=needs_x or not needs_first, transposed=needs_first),
        )  # fmt: skip


def _let_go(ctx: Any) -> None:
    """What was saved may die while backward works, unless the graph is kept; older releases of torch hold it."""
    if not torch.compiler.is_compiling() and hasattr(ctx, "maybe_clear_saved_tensors"):
        ctx.maybe_clear_saved_tensors()


class _GatedMlp(torch.autograd.Function):
    """x [tokens, in] -> [tokens, out], and x + residual (empty without one)."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, residual: Tensor | None, norm_weight: Tensor | None, *arguments: Any
    ) -> tuple[Tensor, Tensor]:
        *tensors, kind, eps, weight_offset, up_settings, down_settings = arguments
        of_first, of_second = tensors[:_TENSORS], tensors[_TENSORS:]
        first, second = _Layer.of(of_first, up_settings), _Layer.of(of_second, down_settings)
        needs = ctx.needs_input_grad
        needs_x, needs_first, needs_second = any(needs[:3]), needs[3], needs[3 + _TENSORS]
        options = first.options(INPUT, codes=True, transposed=needs_first)
        value, rstd, total = x, None, None
        if eps is None:
            inputs = quantize(x, **options)
        else:
            made = rms_norm_quantized(
                x, norm_weight, eps, residual=residual, weight_offset=weight_offset, **options
            )  # fmt: skip
            inputs, rstd, total = made.quantized, made.rstd, made.sum
            value = x if total is None else total
        packed, first_weights = first.multiply(inputs, x.dtype, needs_x)
        gate, up = packed.chunk(2, 1)
        hidden = gated_activation_quantized(
            gate, up, kind, **second.options(INPUT, codes=True, transposed=needs_second)
        ).quantized
        needs_hidden = needs_x or needs_first or needs[4]
        output, second_weights = second.multiply(hidden, x.dtype, needs_hidden)
        ctx.save_for_backward(
            value, norm_weight, rstd, packed, inputs.transposed, inputs.transposed_scales, first_weights.transposed,
            first_weights.transposed_scales, hidden.transposed, hidden.transposed_scales, second_weights.transposed,
            second_weights.transposed_scales, *of_first[:_SAVED], *of_second[:_SAVED],
        )  # fmt: skip
        ctx.records = of_first[_SAVED:], of_second[_SAVED:]
        ctx.settings = kind, eps, weight_offset, up_settings, down_settings
        return output, total if total is not None else x.new_empty(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, grad_sum: Tensor) -> Any:
        value, norm_weight, rstd, packed, *codes = ctx.saved_tensors[:12]
        of_first, of_second = ctx.saved_tensors[12 : 12 + _SAVED], ctx.saved_tensors[12 + _SAVED :]
        _let_go(ctx)
        kind, eps, weight_offset, up_settings, down_settings = ctx.settings
        first = _Layer.of([*of_first, *ctx.records[0]], up_settings)
        second = _Layer.of([*of_second, *ctx.records[1]], down_settings)
        needs = ctx.needs_input_grad
        needs_x, needs_first, needs_up_bias = any(needs[:3]), needs[3], needs[4]
        needs_second, needs_bias = needs[3 + _TENSORS], needs[4 + _TENSORS]
        needs_hidden = needs_x or needs_first or needs_up_bias
        grads = grad_second = None
        if needs_hidden or needs_second:
            grads = quantize(grad, **second.options(GRADIENT, codes=needs_hidden, transposed=needs_second))
        if grads is not None and needs_second:
            grad_second = second.weight_gradient(grads, (codes[4], codes[5]))
            grads = grads._replace(transposed=None)
        codes[4] = codes[5] = None
        grad_x = grad_first = grad_up_bias = None
        if grads is not None and needs_hidden:
            hidden = _Hidden(packed, kind, (codes[0], codes[1]), (codes[2], codes[3]), (codes[6], codes[7]))
            del packed, codes
            grad_x, grad_first, grad_up_bias = hidden.gradients(
                first, second, grads, value.dtype, needs_x, needs_first, needs_up_bias
            )
        grad_norm = None
        if eps is not None and grad_x is not None:
            known = None if grad_sum is None or grad_sum.numel() == 0 else grad_sum
            grad_x, grad_norm = _Norm(value, norm_weight, rstd).gradients(
                grad_x, known, weight_offset, needs[0] or needs[1], needs[2]
            )
        grad_bias = grad.sum(0) if needs_bias else None
        return (
            grad_x if needs[0] else None, grad_x if needs[1] else None, grad_norm if needs[2] else None,
            grad_first, grad_up_bias, *([None] * 4), grad_second, grad_bias, *([None] * 4), *([None] * 5),
        )  # fmt: skip
