"""Formats for a model's layers under a budget of bytes, and the layers that keep them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .. import _library
from .._ops.quantized_matmul import QuantizedWeight, quantized_matmul
from .allocation import PrecisionConfig, WeightFormat
from .models.opened import replace_layers
from .quantized_linear import QuantizedLinear
from .sensitivity import LayerSensitivity, Metric, Statistics, estimate, quantizable_layers, rounded


@dataclass
class LayerAllocation:
    """What one layer is kept in."""

    name: str
    format: WeightFormat
    elements: int
    nbytes: int
    base_bytes: int
    error: float

    @property
    def bits(self) -> float:
        """Of a weight, with its share of scales."""
        return 8 * self.nbytes / self.elements


@dataclass
class PrecisionAllocation:
    """The formats of all layers. `fits`: within the budget; `is_exact`: no choice within it has a smaller error."""

    layers: list[LayerAllocation]
    budget_bytes: int
    fits: bool
    is_exact: bool
    error: float
    reason: str

    @property
    def nbytes(self) -> int:
        return sum(layer.nbytes for layer in self.layers)

    @property
    def base_bytes(self) -> int:
        return sum(layer.base_bytes for layer in self.layers)

    @property
    def average_bits(self) -> float:
        elements = sum(layer.elements for layer in self.layers)
        return 8 * self.nbytes / elements if elements else 0.0

    def __str__(self) -> str:
        """A line for each layer, its bits as a bar."""
        width = max((len(layer.name) for layer in self.layers), default=0)
        lines = [
            f"{layer.name:<{width}}  {'#' * round(2 * layer.bits):<33} {layer.bits:5.2f} bits  {layer.format}"
            for layer in self.layers
        ]
        lines.append(
            f"{self.average_bits:.2f} bits on average, {self.nbytes:,} bytes of {self.base_bytes:,}; {self.reason}"
        )
        return "\n".join(lines)


class AdaptivePrecisionAllocator:
    """Chooses each linear layer's format: errors by config.allocation_strategy, the choice by the core's plan
    (kp_precision_plan), which is the best one within the budget.
    """

    def __init__(self, config: PrecisionConfig | None = None) -> None:
        self.config = config or PrecisionConfig()
        self.statistics: dict[str, Statistics] = {}

    def __repr__(self) -> str:
        return f"AdaptivePrecisionAllocator({self.config})"

    def analyze(
        self, model: nn.Module, calibration: Sequence[Any] | None = None, *,
        loss: Callable[[Any, Any], Tensor] | None = None, metric: Metric | None = None,
    ) -> list[LayerSensitivity]:  # fmt: skip
        """Bytes and estimated errors of every layer in every format.

        Args:
            calibration: inputs: a tensor, a tuple of arguments or a dictionary of them for each call.
            loss: loss(output, input), of GRADIENT_WEIGHTED and CONTENT_ADAPTIVE; None: the output's sum of squares.
            metric: metric(output, output before), of LAYER_ADAPTIVE; None: the mean square of the change.
        """
        layers = quantizable_layers(model, self.config.skip)
        rows, self.statistics = estimate(model, self.config, layers, calibration, loss, metric)
        return rows

    def allocate(
        self, model: nn.Module, calibration: Sequence[Any] | None = None, *, budget_bytes: int | None = None,
        loss: Callable[[Any, Any], Tensor] | None = None, metric: Metric | None = None,
    ) -> PrecisionAllocation:  # fmt: skip
        """The formats with the least sum of errors within the budget: budget_bytes, else the configuration's."""
        return self.choose(self.analyze(model, calibration, loss=loss, metric=metric), budget_bytes)

    def choose(self, rows: Sequence[LayerSensitivity], budget_bytes: int | None = None) -> PrecisionAllocation:
        """The plan for errors that are known."""
        config = self.config
        if budget_bytes is None:
            budget_bytes = config.budget_bytes
        if budget_bytes is None:
            budget_bytes = int((1 - config.target_memory_reduction) * sum(row.base_bytes for row in rows))
        request = {
            "layers": [{"bytes": row.nbytes, "errors": row.errors} for row in rows],
            "budget_bytes": budget_bytes,
        }
        answer = _library.call("precision_plan", request=request)
        layers = [
            LayerAllocation(
                row.name, row.formats[choice], row.elements, row.nbytes[choice], row.base_bytes, row.errors[choice]
            )
            for row, choice in zip(rows, answer["choices"], strict=True)
        ]
        return PrecisionAllocation(
            layers, budget_bytes, answer["fits"], answer["is_exact"], answer["error"], answer["reason"]
        )

    def apply(
        self, model: nn.Module, allocation: PrecisionAllocation, *, trains: bool = False, packs: bool = False
    ) -> nn.Module:
        """The model with its layers in their formats, in place; the model itself where it is a layer.

        Args:
            trains: weights stay parameters and are rounded in each forward (RoundedLinear).
            packs: with trains, in eval mode packed codes are multiplied.
        """
        made: dict[nn.Module, nn.Module] = {}
        for one in allocation.layers:
            layer = model.get_submodule(one.name)
            assert isinstance(layer, nn.Linear)
            if one.format.format is None or layer in made:
                continue
            if trains:
                made[layer] = RoundedLinear(layer, one.format, packs=packs)
            else:
                weight = rounded(layer, one.format, self.config, self.statistics.get(one.name))
                made[layer] = QuantizedLinear.from_quantized(weight, layer.bias)
                made[layer].train(layer.training)
        return replace_layers(model, made)


class RoundedLinear(nn.Linear):
    """A linear layer that multiplies by its weight in few bits and trains it: gradients pass the rounding as if it were
    not there. With `packs`, in eval mode the product is that of packed codes.
    """

    def __init__(self, linear: nn.Linear, format: WeightFormat, *, packs: bool = False) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight, self.bias = linear.weight, linear.bias
        self.format, self.packs = format, packs
        self._packed: tuple[int, QuantizedWeight] | None = None
        self.train(linear.training)

    def quantized(self) -> QuantizedWeight:
        """The weight's codes; made again where it has changed."""
        version = self.weight._version
        if self._packed is None or self._packed[0] != version or self._packed[1].codes.device != self.weight.device:
            config = PrecisionConfig()
            self._packed = version, rounded(self, self.format, config, None)
        return self._packed[1]

    def forward(self, x: Tensor) -> Tensor:
        if self.packs and not self.training:
            return quantized_matmul(x, self.quantized(), bias=self.bias)
        values = self.quantized().dequantize(torch.float32).to(self.weight.dtype)
        return nn.functional.linear(x, self.weight + (values - self.weight).detach(), self.bias)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, format={self.format}"
