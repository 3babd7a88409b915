"""A model whose linear layers have as many bits as they need: UltraPrecisionModule and its factory."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from .allocation import AllocationStrategy, PrecisionConfig, PrecisionFormat, QuantizationMode, WeightFormat
from .allocator import AdaptivePrecisionAllocator, PrecisionAllocation, RoundedLinear
from .models.opened import is_closed, open_layers
from .sensitivity import Metric, code_entropy, estimate, quantizable_layers


@dataclass(frozen=True)
class PrecisionStats:
    """What adaptive precision made of a model's linear layers.

    Attributes:
        base_bytes, nbytes: of their weights, in base_precision and as they are kept.
        average_bits: of a weight, with its share of scales.
        layers: how many have each format.
        predicted_error: the sum of the layers' estimated errors, in the strategy's unit.
    """

    base_bytes: int
    nbytes: int
    average_bits: float
    layers: dict[str, int]
    predicted_error: float

    @property
    def memory_savings_ratio(self) -> float:
        """The share of base_bytes that is saved."""
        return 1 - self.nbytes / self.base_bytes if self.base_bytes else 0.0

    memory_reduction_ratio = memory_savings_ratio

    @property
    def precision_diversity(self) -> int:
        """How many different formats there are."""
        return len(self.layers)


class UltraPrecisionModule(nn.Module):
    """A model whose linear layers are kept in formats of 4 to 16 bits, chosen within a budget of bytes.

    Layers are replaced inside `base_module`; attributes of the model are reached through it. In the mode DYNAMIC this
    happens at the first forward.

    Args:
        base_module: the model. It is changed.
        config: what to choose from and how.
        calibration: inputs, for strategies that look at data (AdaptivePrecisionAllocator.analyze).
        loss, metric: as AdaptivePrecisionAllocator.analyze takes them.
    """

    def __init__(
        self, base_module: nn.Module, config: PrecisionConfig | None = None, *,
        calibration: Sequence[Any] | None = None, loss: Callable[[Any, Any], Tensor] | None = None,
        metric: Metric | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.config = config or PrecisionConfig()
        self.base_module = open_layers(base_module, self.config.skip)
        self.allocator = AdaptivePrecisionAllocator(self.config)
        self._allocation: PrecisionAllocation | None = None
        self._calibration, self._loss, self._metric = calibration, loss, metric
        self._forwards = 0
        self.train(base_module.training)
        mode = self.config.quantization_mode
        if mode is QuantizationMode.INFERENCE:
            self.eval()
        if mode is not QuantizationMode.DYNAMIC:
            self._convert(calibration)

    @property
    def current_allocation(self) -> dict[str, WeightFormat]:
        """Every layer's format, by its name; empty before the first forward in the mode DYNAMIC."""
        return {} if self._allocation is None else {one.name: one.format for one in self._allocation.layers}

    @property
    def allocation(self) -> PrecisionAllocation:
        """The plan; printed, it is a table with a bar of bits for each layer."""
        if self._allocation is None:
            raise RuntimeError(
                "UltraPrecisionModule: no format is chosen before the first forward; call it once, or use STATIC"
            )
        return self._allocation

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self._allocation is None:
            given: Any = kwargs if kwargs and not args else tuple(args)
            self._convert([given] if self._calibration is None else self._calibration)
        elif self._trains and self.training and self.config.update_frequency > 0:
            self._forwards += 1
            if self._forwards % self.config.update_frequency == 0 and self._calibration is not None:
                self._choose_again()
        return self.base_module(*args, **kwargs)

    def get_precision_stats(self) -> PrecisionStats:
        """Bytes, bits and formats of the layers."""
        allocation = self.allocation
        counts: dict[str, int] = {}
        for one in allocation.layers:
            counts[str(one.format)] = counts.get(str(one.format), 0) + 1
        return PrecisionStats(
            allocation.base_bytes, allocation.nbytes, allocation.average_bits, counts, allocation.error
        )

    get_precision_statistics = get_precision_stats

    def get_precision_analysis(self) -> list[dict[str, Any]]:
        """One entry for each layer: its name, format, bits, bytes and estimated error."""
        return [
            {"name": one.name, "format": str(one.format), "bits": one.bits, "bytes": one.nbytes, "error": one.error}
            for one in self.allocation.layers
        ]

    @property
    def _trains(self) -> bool:
        return self.config.quantization_mode in (QuantizationMode.TRAINING, QuantizationMode.HYBRID)

    def _convert(self, calibration: Sequence[Any] | None) -> None:
        needs = self.config.allocation_strategy.needs_data or self.config.rounding != "nearest"
        data = calibration if needs else None
        model = self.base_module
        self._allocation = self.allocator.allocate(model, data, loss=self._loss, metric=self._metric)
        packs = self.config.quantization_mode is QuantizationMode.HYBRID
        self.base_module = self.allocator.apply(model, self._allocation, trains=self._trains, packs=packs)
        self.allocator.statistics.clear()  # columns^2 numbers a layer

    def _choose_again(self) -> None:
        """Formats for the weights as they have become; layers that train keep their parameters."""
        layers = {name: one for name, one in self.base_module.named_modules() if isinstance(one, RoundedLinear)}
        data = self._calibration if self.config.allocation_strategy.needs_data else None
        rows, _ = estimate(self.base_module, self.config, dict(layers), data, self._loss, self._metric)
        self._allocation = self.allocator.choose(rows)
        for one in self._allocation.layers:
            layers[one.name].format = one.format
            layers[one.name]._packed = None


def create_ultra_precision_module(
    model: nn.Module, config: PrecisionConfig | AllocationStrategy | None = None,
    device: torch.device | str | None = None, *, allocation_strategy: AllocationStrategy | None = None,
    target_memory_reduction: float | None = None,
    precision_formats: Sequence[PrecisionFormat | WeightFormat] | None = None,
    calibration: Sequence[Any] | None = None, loss: Callable[[Any, Any], Tensor] | None = None,
    metric: Metric | None = None, inplace: bool = False,
) -> UltraPrecisionModule:  # fmt: skip
    """The model with adaptive precision.

    Args:
        config: a configuration, or a strategy.
        device: where the model goes first; None: it stays.
        allocation_strategy, target_memory_reduction, precision_formats: fields of the configuration, by themselves.
        calibration, loss, metric: as UltraPrecisionModule takes them.
        inplace: False works on a copy of the model.
    """
    if isinstance(config, AllocationStrategy):
        config = PrecisionConfig(allocation_strategy=config)
    config = config or PrecisionConfig()
    given: dict[str, Any] = {
        "allocation_strategy": allocation_strategy,
        "target_memory_reduction": target_memory_reduction,
        "formats": precision_formats,
    }
    config = replace(config, **{name: value for name, value in given.items() if value is not None})
    if not inplace:
        model = copy.deepcopy(model)
    if device is not None:
        model = model.to(device)
    return UltraPrecisionModule(model, config, calibration=calibration, loss=loss, metric=metric)


def analyze_precision_opportunities(
    model: nn.Module, sample_input: Any, device: torch.device | str | None = None, *,
    target_memory_reduction: float = 0.4,
) -> dict[str, Any]:  # fmt: skip
    """What few bits would save and cost, measured on a sample; the model stays as it is.

    Args:
        sample_input: an input, or a list of them.
        device: where a copy of the model is analysed; None: where it is.
        target_memory_reduction: of the plan that is recommended.

    Returns:
        "potential_savings", bytes that the smallest formats save, and "savings_ratio", their share;
        "recommendations", a dictionary for each layer that the plan changes: name, format, bits, saved_bytes, and
        output_error, the squared error of the layer's outputs on the sample;
        "layers": name, entropy (bits of a 4-bit code) and bytes of every layer.
    """
    if device is not None:
        model = copy.deepcopy(model).to(device)
    elif any(is_closed(module) for module in model.modules()):
        model = copy.deepcopy(model)
    model = open_layers(model)
    samples = sample_input if isinstance(sample_input, list) else [sample_input]
    config = PrecisionConfig(
        base_precision=None,
        allocation_strategy=AllocationStrategy.ACTIVATION_AWARE,
        target_memory_reduction=target_memory_reduction,
    )
    allocator = AdaptivePrecisionAllocator(config)
    rows = allocator.analyze(model, samples)
    allocation = allocator.choose(rows)
    base = sum(row.base_bytes for row in rows)
    saved = base - sum(min(row.nbytes) for row in rows)
    layers = quantizable_layers(model, ())
    return {
        "potential_savings": saved,
        "savings_ratio": saved / base if base else 0.0,
        "recommendations": [
            {
                "name": one.name, "format": str(one.format), "bits": one.bits,
                "saved_bytes": one.base_bytes - one.nbytes, "output_error": one.error,
            }
            for one in allocation.layers
            if one.format.format is not None
        ],
        "layers": [
            {"name": row.name, "entropy": code_entropy(layers[row.name].weight), "bytes": row.base_bytes}
            for row in rows
        ],
    }  # fmt: skip
