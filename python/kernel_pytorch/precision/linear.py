"""nn.Linear whose three products are of FP8 codes: x and weight forward, the gradient with both of them backward.

Forward quantises x and weight, with their transposes for the backward (FP8 products run along k alone); backward
quantises the gradient, likewise. A step is three casts and three products, and what is kept for the backward is half of
what bf16 keeps. On a machine without FP8 units the same codes are multiplied in fp32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from .._ops.float8 import Quantized, quantize, scaled_matmul
from .._ops.support.seed import seed_for
from .config import FP8Config

GRANULARITIES = {  # of activations and gradients, and of weights
    "delayed": ("tensor", "tensor"),
    "current": ("tensor", "tensor"),
    "rowwise": ("row", "row"),
    "blockwise": ("1x128", "128x128"),
}
# Rows of a layer's state: what its scales, amax and flags are of.
INPUT, WEIGHT, GRADIENT = 0, 1, 2


class FP8LinearLayer(nn.Linear):
    """nn.Linear in FP8: the same parameters, state_dict and signature.

    Delayed scaling keeps the largest magnitudes of this step and the scales for it; update_fp8_scales (of this layer or
    of a whole model) ends the step. Until it was first called every tensor is scaled by its own magnitude.

    Args:
        fp8_config: None is FP8Config().
    """

    fp8_scale: Tensor
    fp8_amax: Tensor
    fp8_nonfinite: Tensor
    # Called with x, weight, bias and output of every product, as matrices; fp8_numerics_report sets it for a step.
    fp8_watcher: Callable[[Tensor, Tensor, Tensor | None, Tensor], None] | None = None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        fp8_config: FP8Config | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(in_features, out_features, bias, device, dtype)
        self._add_state(fp8_config or FP8Config(), torch.device(device) if device is not None else None)

    @classmethod
    def from_linear(cls, linear: nn.Linear, fp8_config: FP8Config | None = None) -> FP8LinearLayer:
        """A layer on the parameters and hooks of another, which stay the same objects: optimizers keep them."""
        layer = cls.__new__(cls)
        nn.Module.__init__(layer)
        layer.in_features, layer.out_features = linear.in_features, linear.out_features
        layer._parameters = linear._parameters  # one dictionary: whatever becomes of them becomes of both layers'
        _share_hooks(linear, layer)
        layer.__dict__["_original"] = linear  # not a submodule
        layer._add_state(fp8_config or FP8Config(), linear.weight.device)
        layer.train(linear.training)
        return layer

    def to_linear(self) -> nn.Linear:
        """The way back, on the same parameters: the layer that from_linear was given, else an nn.Linear."""
        linear: nn.Linear | None = self.__dict__.get("_original")
        if linear is None:
            linear = nn.Linear.__new__(nn.Linear)
            nn.Module.__init__(linear)
            linear.in_features, linear.out_features = self.in_features, self.out_features
            linear._parameters = self._parameters
        _share_hooks(self, linear)
        linear.train(self.training)
        return linear

    def _add_state(self, config: FP8Config, device: torch.device | None) -> None:
        self.fp8_config = config
        self.fp8_ready = False  # whether scales of earlier steps are known
        for name, value in {"fp8_scale": 1.0, "fp8_amax": 0.0, "fp8_nonfinite": 0.0}.items():
            self.register_buffer(name, torch.full((3,), value, dtype=torch.float32, device=device), persistent=False)

    def _apply(self, fn: Any, recurse: bool = True) -> FP8LinearLayer:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name in ("fp8_scale", "fp8_amax", "fp8_nonfinite"):  # a model's .to(bfloat16) is not meant for these
            buffer = getattr(self, name)
            if buffer.dtype != torch.float32:
                setattr(self, name, buffer.to(torch.float32))
        return self

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in_features] -> [..., out_features], in x's type, or that of autocast."""
        return self._multiply(x, self.weight, self.bias)

    def _multiply(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """x @ weight.T + bias with the layer's scales; the weight is the layer's, or rows of it."""
        if x.dim() == 0 or x.shape[-1] != self.in_features:
            raise ValueError(
                f"{type(self).__name__}: x has shape {tuple(x.shape)}; its last dimension must be {self.in_features}"
            )
        kind = x.device.type
        if torch.is_autocast_enabled(kind):
            x = x.to(torch.get_autocast_dtype(kind))
        config = self.fp8_config
        rows = x.reshape(-1, self.in_features)
        seed = seed_for(x, None) if config.stochastic_gradients and torch.is_grad_enabled() else None
        output = _Float8Linear.apply(  # type: ignore[no-untyped-call]
            rows, weight, bias, self.fp8_scale, self.fp8_amax, self.fp8_nonfinite, seed, config.recipe,
            self.fp8_ready, self.training, config.accurate_sums, config.forward_format.dtype,
            config.backward_format.dtype,
        )  # fmt: skip
        if self.fp8_watcher is not None:
            self.fp8_watcher(rows, weight, bias, output)
        return output.view(*x.shape[:-1], len(weight))  # type: ignore[no-any-return]

    def update_fp8_scales(self) -> None:
        """Ends a step of delayed scaling for this layer alone (update_fp8_scales of the package: for a model)."""
        from .scales import update_fp8_scales  # scales.py is about this class and imports it

        update_fp8_scales(self)

    def extra_repr(self) -> str:
        config = self.fp8_config
        formats = f"{config.forward_format.value}/{config.backward_format.value}"
        return f"{super().extra_repr()}, recipe={config.recipe!r}, formats={formats}"


def _share_hooks(of: nn.Module, with_layer: nn.Module) -> None:
    """Hooks live in dictionaries that their handles know, so both layers keep the same ones."""
    for name, value in of.__dict__.items():
        if "hook" in name:
            with_layer.__dict__[name] = value


class _Float8Linear(torch.autograd.Function):
    """x [tokens, in], weight [out, in] -> [tokens, out]. What follows them is state and settings of the layer."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, scale: Tensor, amax: Tensor, nonfinite: Tensor,
        seed: Tensor | None, recipe: str, ready: bool, training: bool, accurate: str, forward_type: torch.dtype,
        backward_type: torch.dtype,
    ) -> Tensor:  # fmt: skip
        of_rows, of_weights = GRANULARITIES[recipe]
        needs_x, needs_weight = ctx.needs_input_grad[0], ctx.needs_input_grad[1]
        state = State(scale, amax, nonfinite, recipe == "delayed" and ready, training)
        inputs = state.quantize(INPUT, x, forward_type, of_rows, codes=True, transposed=needs_weight)
        weights = state.quantize(WEIGHT, weight, forward_type, of_weights, codes=True, transposed=needs_x)
        output = scaled_matmul(
            inputs.codes,
            weights.codes,
            inputs.scales,
            weights.scales,
            bias=bias,
            dtype=x.dtype,
            accurate=accurate == "all",
        )
        ctx.save_for_backward(
            inputs.transposed, inputs.transposed_scales, weights.transposed, weights.transposed_scales,
            scale, seed,
        )  # fmt: skip
        ctx.records = amax, nonfinite  # written by every use of the layer, so not saved: autograd would object
        ctx.settings = (recipe, ready, training, backward_type, x.dtype, weight.dtype, accurate != "none")
        ctx.has_bias = bias is not None
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        x_codes, x_scales, weight_codes, weight_scales, scale, seed = ctx.saved_tensors
        recipe, ready, training, backward_type, x_type, weight_type, accurate = ctx.settings
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        grad_x = grad_weight = None
        if needs_x or needs_weight:
            state = State(scale, ctx.records[0], ctx.records[1], recipe == "delayed" and ready, training)
            grads = state.quantize(
                GRADIENT,
                grad,
                backward_type,
                GRANULARITIES[recipe][0],
                codes=needs_x,
                transposed=needs_weight,
                seed=seed,
            )
            if needs_x:
                grad_x = scaled_matmul(
                    grads.codes, weight_codes, grads.scales, weight_scales, dtype=x_type, accurate=accurate
                )
            if needs_weight:
                grad_weight = scaled_matmul(
                    grads.transposed, x_codes, grads.transposed_scales, x_scales, dtype=weight_type, accurate=accurate
                )
        grad_bias = grad.sum(0) if ctx.has_bias and needs_bias else None
        return grad_x, grad_weight, grad_bias, *([None] * 10)


class State:
    """The rows of a layer's state that a quantisation reads and writes."""

    def __init__(self, scale: Tensor, amax: Tensor, nonfinite: Tensor, delayed: bool, records: bool) -> None:
        self.scale, self.amax, self.nonfinite, self.delayed, self.records = scale, amax, nonfinite, delayed, records

    def options(
        self, row: int, dtype: torch.dtype, granularity: str, *, codes: bool, transposed: bool,
        seed: Tensor | None = None,
    ) -> dict[str, Any]:  # fmt: skip
        """The options for quantising the row's tensor."""
        return {
            "dtype": dtype,
            "granularity": granularity,
            "scale": self.scale[row : row + 1] if self.delayed else None,
            "seed": seed,
            "amax": self.amax[row : row + 1] if self.records else None,
            "found_nonfinite": self.nonfinite[row : row + 1] if self.records else None,
            "codes": codes,
            "transposed": transposed,
            # In the weight-gradient GEMM x is the second operand, so it is scaled in 128x128 blocks like a weight.
            "square_transpose": granularity == "1x128" and row == INPUT,
        }

    def quantize(
        self, row: int, x: Tensor, dtype: torch.dtype, granularity: str, *, codes: bool, transposed: bool,
        seed: Tensor | None = None,
    ) -> Quantized:  # fmt: skip
        options = self.options(row, dtype, granularity, codes=codes, transposed=transposed, seed=seed)
        made: Quantized = quantize(x, **options)
        return made
