"""How much a layer in a format costs a model: from its weight, its gradients, its inputs, or measured."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from .._ops.quantized_matmul import quantize_weight, unpack_codes
from ..core.linear import OptimizedLinear
from .allocation import AllocationStrategy, PrecisionConfig, WeightFormat, menu_of
from .rounding import clipped_quantize, gptq_quantize

Metric = Callable[[Any, Any], Tensor]
_MOST_GRAM_COLUMNS = 8192  # more: only its diagonal, since the whole has columns^2 numbers


@dataclass
class LayerSensitivity:
    """A layer's choices: their bytes, and the error that each is estimated to cost."""

    name: str
    elements: int
    base_bytes: int
    formats: list[WeightFormat] = field(default_factory=list)
    nbytes: list[int] = field(default_factory=list)
    errors: list[float] = field(default_factory=list)


@dataclass
class Statistics:
    """What calibration leaves of a layer: X^T X of its inputs (or its diagonal), and for each output the sum of squares
    of the loss's gradient over all tokens."""

    gram: Tensor | None = None
    gradient_squares: Tensor | None = None


def is_skipped(name: str, skip: Sequence[str]) -> bool:
    return name in skip or name.rpartition(".")[2] in skip


def quantizable_layers(model: nn.Module, skip: Sequence[str]) -> dict[str, nn.Linear]:
    """Linear layers whose forward is nn.Linear's or OptimizedLinear's, by name; a shared one once. Those of
    nn.MultiheadAttention, which reads their weights past their forward, are none (models/opened.py opens it).
    """
    found: dict[str, nn.Linear] = {}
    readers: list[str] = []
    for name, module in model.named_modules():
        if isinstance(module, nn.MultiheadAttention):
            readers.append(f"{name}." if name else "")
        if any(name.startswith(reader) for reader in readers) or not isinstance(module, nn.Linear):
            continue
        is_plain = type(module).forward in (nn.Linear.forward, OptimizedLinear.forward)
        if is_plain and not is_skipped(name, skip) and module.weight.numel() > 0:
            found[name] = module
    return found


def call_model(model: nn.Module, batch: Any) -> Any:
    """model(*batch) of a tuple, model(**batch) of a dictionary, model(batch) of anything else."""
    if isinstance(batch, dict):
        return model(**batch)
    return model(*batch) if isinstance(batch, tuple) else model(batch)


def output_of(result: Any) -> Tensor:
    """The tensor of a model's result: itself, its logits, or the first of several."""
    if isinstance(result, Tensor):
        return result
    if hasattr(result, "logits"):
        return result.logits  # type: ignore[no-any-return]
    return output_of(result[0])


def mean_square_change(output: Any, reference: Any) -> Tensor:
    return (output_of(output).float() - output_of(reference).float()).square().mean()


def collect(
    model: nn.Module, layers: dict[str, nn.Linear], batches: Iterable[Any], *, gradients: bool,
    loss: Callable[[Any, Any], Tensor] | None,
) -> dict[str, Statistics]:  # fmt: skip
    """Runs the batches through the model and keeps what the estimates need of every layer.

    The gradient is that of loss(output, batch); without one, of the sum of squares of the output, which weighs outputs
    alike.
    """
    statistics = {name: Statistics() for name in layers}
    hooks = [layer.register_forward_pre_hook(_add_gram(statistics[name])) for name, layer in layers.items()]
    if gradients:
        hooks += [layer.register_forward_hook(_add_gradients(statistics[name])) for name, layer in layers.items()]
    count = 0
    try:
        for batch in batches:
            count += 1
            with torch.set_grad_enabled(gradients):
                output = call_model(model, batch)
                if not gradients or not layers:
                    continue
                value = loss(output, batch) if loss is not None else output_of(output).float().square().sum()
                # The gradients of weights are not kept: hooks take those of the layers' outputs on the way.
                torch.autograd.grad(value, [layer.weight for layer in layers.values()], allow_unused=True)
    finally:
        for hook in hooks:
            hook.remove()
    if count == 0:
        raise ValueError("adaptive precision: the calibration data has no batches; give at least one")
    return statistics


def _add_gram(of: Statistics) -> Callable[[nn.Module, tuple[Any, ...]], None]:
    @torch.no_grad()
    def hook(module: nn.Module, inputs: tuple[Any, ...]) -> None:
        x = inputs[0].detach().flatten(0, -2).float()
        gram = x.t() @ x if x.shape[1] <= _MOST_GRAM_COLUMNS else x.square().sum(0)
        of.gram = gram if of.gram is None else of.gram + gram

    return hook


def _add_gradients(of: Statistics) -> Callable[[nn.Module, tuple[Any, ...], Tensor], None]:
    def add(grad: Tensor) -> None:
        squares = grad.detach().float().flatten(0, -2).square().sum(0)
        of.gradient_squares = squares if of.gradient_squares is None else of.gradient_squares + squares

    def hook(module: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> None:
        if output.requires_grad:
            output.register_hook(add)  # type: ignore[no-untyped-call]

    return hook


def rounded(layer: nn.Linear, choice: WeightFormat, config: PrecisionConfig, statistics: Statistics | None) -> Any:
    """The layer's weight in a format, by the configured rounding."""
    assert choice.format is not None
    weight = layer.weight.detach()
    gram = None if statistics is None else statistics.gram
    options: dict[str, Any] = {"group": choice.group, "asymmetric": choice.asymmetric}
    if config.rounding == "nearest":
        return quantize_weight(weight, choice.format, **options)
    importance = None if gram is None else gram.diagonal() if gram.dim() == 2 else gram
    clipped = clipped_quantize(weight, choice.format, importance=importance, **options)
    if config.rounding == "clipped" or choice.format == "mxfp8" or gram is None or gram.dim() == 1:
        return clipped
    return gptq_quantize(weight, gram, choice.format, ranges=clipped, **options)


def code_entropy(weight: Tensor) -> float:
    """Bits of a 4-bit code of the weight (int4 by groups of 128): 4 where all are as frequent, few where outliers set
    the scales and most codes are the middle one.
    """
    codes = unpack_codes(quantize_weight(weight.detach(), "int4").codes, 4, weight.shape[1])
    counts = torch.bincount(codes.flatten().int(), minlength=16).double()
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * shares.log2()).sum())


def estimate(
    model: nn.Module, config: PrecisionConfig, layers: dict[str, nn.Linear], batches: Sequence[Any] | None,
    loss: Callable[[Any, Any], Tensor] | None = None, metric: Metric | None = None,
) -> tuple[list[LayerSensitivity], dict[str, Statistics]]:  # fmt: skip
    """Every layer's choices by the configured strategy, and the statistics of the calibration data."""
    strategy = config.allocation_strategy
    if strategy.needs_data and batches is None:
        raise ValueError(
            f"adaptive precision: {strategy.value} needs calibration data; give a list of inputs, or take entropy_based"
        )
    gradients = strategy in (AllocationStrategy.GRADIENT_WEIGHTED, AllocationStrategy.CONTENT_ADAPTIVE)
    statistics: dict[str, Statistics] = {}
    if batches is not None:
        statistics = collect(model, layers, batches, gradients=gradients, loss=loss)
    elif config.rounding == "gptq":
        raise ValueError('adaptive precision: rounding "gptq" needs calibration data; give a list of inputs')
    menu = menu_of(config.formats)
    rows = [
        LayerSensitivity(
            name, layer.weight.numel(), config.base_bytes(layer.weight), list(menu),
            [choice.nbytes(layer.weight) for choice in menu],
        )
        for name, layer in layers.items()
    ]  # fmt: skip
    estimates = {
        AllocationStrategy.ENTROPY_BASED: lambda: _by_entropy(config, layers, rows),
        AllocationStrategy.GRADIENT_WEIGHTED: lambda: _by_weight(config, layers, rows, statistics, _gradient_error),
        AllocationStrategy.ACTIVATION_AWARE: lambda: _by_weight(config, layers, rows, statistics, _output_error),
        AllocationStrategy.LAYER_ADAPTIVE: lambda: _measured(model, config, layers, rows, statistics, batches, metric),
    }
    if strategy is AllocationStrategy.CONTENT_ADAPTIVE:
        names = list(AllocationStrategy)[:3]
        shares = (
            1 - config.gradient_weight - config.activation_weight,
            config.gradient_weight,
            config.activation_weight,
        )
        parts = [_normalized(estimates[name]()) for name in names]
        errors = [
            [sum(share * part[i][j] for share, part in zip(shares, parts, strict=True)) for j in range(len(menu))]
            for i in range(len(rows))
        ]
    else:
        errors = estimates[strategy]()
    for row, of_row in zip(rows, errors, strict=True):
        row.errors = of_row
    if strategy in (AllocationStrategy.ENTROPY_BASED, AllocationStrategy.CONTENT_ADAPTIVE):
        _apply_threshold(config, layers, rows)
    return rows, statistics


def _normalized(errors: list[list[float]]) -> list[list[float]]:
    total = sum(max(of_layer) for of_layer in errors) or 1.0
    return [[error / total for error in of_layer] for of_layer in errors]


def _by_entropy(
    config: PrecisionConfig, layers: dict[str, nn.Linear], rows: list[LayerSensitivity]
) -> list[list[float]]:
    errors = []
    for row, layer in zip(rows, layers.values(), strict=True):
        energy = float(layer.weight.detach().float().square().sum())
        lost = 4.0 - code_entropy(layer.weight)
        bits = [8 * nbytes / row.elements for nbytes in row.nbytes]
        errors.append(
            [
                0.0 if one.format is None else energy * 4.0 ** (lost - b)
                for one, b in zip(row.formats, bits, strict=True)
            ]
        )
    return errors


def _apply_threshold(config: PrecisionConfig, layers: dict[str, nn.Linear], rows: list[LayerSensitivity]) -> None:
    for row, layer in zip(rows, layers.values(), strict=True):
        if code_entropy(layer.weight) >= config.entropy_threshold:
            continue
        wide = [i for i, nbytes in enumerate(row.nbytes) if 8 * nbytes >= 8 * row.elements]
        if wide:
            row.formats, row.nbytes = [row.formats[i] for i in wide], [row.nbytes[i] for i in wide]
            row.errors = [row.errors[i] for i in wide]


def _gradient_error(change: Tensor, of: Statistics) -> float:
    if of.gradient_squares is None:  # the loss does not depend on this layer
        return 0.0
    return float(_row_errors(change, of) @ of.gradient_squares)


def _output_error(change: Tensor, of: Statistics) -> float:
    return float(_row_errors(change, of).sum())


def _row_errors(change: Tensor, of: Statistics) -> Tensor:
    """The squared error of every output on the calibration inputs."""
    assert of.gram is not None
    if of.gram.dim() == 1:
        return change.square() @ of.gram
    return ((change @ of.gram) * change).sum(1).clamp(min=0)


def _by_weight(
    config: PrecisionConfig, layers: dict[str, nn.Linear], rows: list[LayerSensitivity],
    statistics: dict[str, Statistics], error_of: Callable[[Tensor, Statistics], float],
) -> list[list[float]]:  # fmt: skip
    errors = []
    for row, layer in zip(rows, layers.values(), strict=True):
        of = statistics[row.name]
        if of.gram is None:
            raise ValueError(
                f'adaptive precision: the calibration data never reaches layer "{row.name}"; put it into skip'
            )
        weight = layer.weight.detach().float()
        errors.append(
            [
                0.0 if choice.format is None
                else error_of(rounded(layer, choice, config, of).dequantize(torch.float32) - weight, of)
                for choice in row.formats
            ]
        )  # fmt: skip
    return errors


@contextmanager
def _weight_replaced(layer: nn.Linear, values: Tensor) -> Iterator[None]:
    before = layer.weight.data
    layer.weight.data = values.to(before.dtype)
    try:
        yield
    finally:
        layer.weight.data = before


@torch.no_grad()
def _measured(
    model: nn.Module, config: PrecisionConfig, layers: dict[str, nn.Linear], rows: list[LayerSensitivity],
    statistics: dict[str, Statistics], batches: Sequence[Any] | None, metric: Metric | None,
) -> list[list[float]]:  # fmt: skip
    assert batches is not None
    metric = metric or mean_square_change
    references = [call_model(model, batch) for batch in batches]
    errors = []
    for row, layer in zip(rows, layers.values(), strict=True):
        of_row = []
        for choice in row.formats:
            if choice.format is None:
                of_row.append(0.0)
                continue
            values = rounded(layer, choice, config, statistics.get(row.name)).dequantize(torch.float32)
            with _weight_replaced(layer, values):
                changes = [metric(call_model(model, b), r) for b, r in zip(batches, references, strict=True)]
            of_row.append(max(float(torch.stack([one.float() for one in changes]).mean()), 0.0))
        errors.append(of_row)
    return errors
