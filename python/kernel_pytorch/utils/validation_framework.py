"""Checks a layer against the plain torch composition of the same weights: values, gradients, state_dict.

The reference computes in float64 with the layer's own parameters, so that what is measured is the layer's error and not
two roundings' difference. A layer that raises is a failed result with its message, not an exception here.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from .. import _torch as _torch  # first: it says what is missing where torch is missing or old

import torch  # isort: skip
from torch import Tensor, nn  # isort: skip

# Of the largest expected value. Sums of a few thousand products, each rounded; low precision is rounded between steps.
TOLERANCE = {torch.float64: 1e-10, torch.float32: 2e-5, torch.float16: 1e-2, torch.bfloat16: 6e-2}


@dataclass(frozen=True)
class ValidationResult:
    """One named check. `error_message` is empty where it passed; the `error` in `metrics` is relative to the largest
    expected value."""

    test_name: str
    passed: bool
    error_message: str = ""
    metrics: Mapping[str, float] = field(default_factory=dict)
    execution_time: float = 0.0  # seconds

    def __str__(self) -> str:
        figures = ", ".join(f"{name} {value:.2e}" for name, value in self.metrics.items())
        return f"{'ok' if self.passed else 'FAILED'}: {self.test_name}" + "".join(
            f" ({words})" for words in (figures, self.error_message) if words
        )


class ComponentValidator:
    """Validates layers in their own dtype on one device.

    Args:
        device: where to run; the layer is copied there, so the caller's stays as it is.
        tolerance: greatest error, relative to the largest expected value; by the layer's dtype where absent.
        seed: of the random inputs.
    """

    def __init__(self, device: torch.device | str | None = None, tolerance: float | None = None, seed: int = 0) -> None:
        self.device = torch.device(device or "cpu")
        self.tolerance = tolerance
        self.seed = seed

    def __repr__(self) -> str:
        return f"ComponentValidator({str(self.device)!r}, tolerance={self.tolerance}, seed={self.seed})"

    def validate_attention_component(self, layer: nn.Module, d_model: int, num_heads: int) -> list[ValidationResult]:
        """A multi-head attention, called as layer(query, key, value), against nn.MultiheadAttention."""
        reference = nn.MultiheadAttention(
            d_model, num_heads, bias="in_proj_bias" in dict(layer.named_parameters()), batch_first=True
        )

        def expected(module: nn.Module, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            return module(query, key, value, need_weights=False)[0]  # type: ignore[no-any-return]

        x, memory = (2, 17, d_model), (2, 9, d_model)
        return [
            *self.validate_component(layer, reference, {"x": x}, call=_itself_thrice, expected=_itself_to(expected)),
            *self.validate_component(
                layer, reference, {"query": x, "key": memory, "value": memory}, expected=expected, prefix="cross: "
            ),
        ]

    def validate_linear_component(
        self, layer: nn.Module, in_features: int, out_features: int
    ) -> list[ValidationResult]:
        """A linear layer against nn.Linear, on a batch, a single row and no rows."""
        has_bias = "bias" in dict(layer.named_parameters())
        results = []
        for prefix, rows in (("", (3, 5)), ("single row: ", ()), ("no rows: ", (0,))):
            reference = nn.Linear(in_features, out_features, bias=has_bias)
            results += self.validate_component(layer, reference, {"x": (*rows, in_features)}, prefix=prefix)
        return results

    def validate_component(
        self,
        layer: nn.Module,
        reference: nn.Module,
        shapes: Mapping[str, tuple[int, ...]],
        *,
        call: Callable[..., Any] | None = None,
        expected: Callable[..., Any] | None = None,
        prefix: str = "",
    ) -> list[ValidationResult]:
        """Any layer against a module that takes its state_dict, on random inputs of these shapes, in evaluation mode.

        `call` and `expected` are (module, *inputs) -> output of the layer and of the reference; a call by default.
        """
        begin = time.perf_counter()
        layer = copy.deepcopy(layer).to(self.device).eval()
        reference = reference.to(self.device, torch.float64).eval()
        try:
            reference.load_state_dict(layer.state_dict(), strict=True)
        except (RuntimeError, TypeError) as error:
            return [ValidationResult(f"{prefix}state_dict", False, str(error), {}, time.perf_counter() - begin)]
        results = [ValidationResult(f"{prefix}state_dict", True, "", {}, time.perf_counter() - begin)]
        begin = time.perf_counter()
        inputs = self._random_inputs(layer, shapes)
        names = [*shapes, *(name for name, _ in layer.named_parameters())]
        wide = [tensor.detach().double().requires_grad_() for tensor in inputs]
        exact = _values_and_gradients(reference, expected or _call, wide)
        try:
            actual = _values_and_gradients(layer, call or _call, inputs)
        except Exception as error:  # whatever a layer under test raises is its result
            words = f"{type(error).__name__}: {error}"
            return [*results, ValidationResult(f"{prefix}output", False, words, {}, time.perf_counter() - begin)]
        seconds = (time.perf_counter() - begin) / len(exact)
        for name, got, want in zip(("output", *(f"gradient of {name}" for name in names)), actual, exact, strict=True):
            results.append(self._compare(prefix + name, got, want, seconds))
        return results

    def _random_inputs(self, layer: nn.Module, shapes: Mapping[str, tuple[int, ...]]) -> list[Tensor]:
        generator = torch.Generator().manual_seed(self.seed)
        dtype = next((p.dtype for p in layer.parameters() if p.is_floating_point()), torch.float32)
        return [
            torch.randn(shape, generator=generator).to(self.device, dtype).requires_grad_() for shape in shapes.values()
        ]

    def _compare(self, name: str, got: Tensor | None, want: Tensor | None, seconds: float) -> ValidationResult:
        if got is None or want is None:
            same = (got is None) == (want is None)
            words = "" if same else f"the layer's is {'absent' if got is None else 'there'}, the reference's is not"
            return ValidationResult(name, same, words, {}, seconds)
        if got.shape != want.shape:
            words = f"its shape is {list(got.shape)}, the reference's {list(want.shape)}"
            return ValidationResult(name, False, words, {}, seconds)
        tolerance = self.tolerance if self.tolerance is not None else TOLERANCE.get(got.dtype, 0.0)
        scale = want.abs().max().item() if want.numel() else 0.0
        absolute = (got.double() - want).abs().max().item() if want.numel() else 0.0
        relative = absolute / scale if scale else absolute
        passed = relative <= tolerance  # false for NaN
        words = "" if passed else f"relative error {relative:.2e} is above {tolerance:.0e} for {got.dtype}"
        return ValidationResult(name, passed, words, {"max_absolute_error": absolute, "error": relative}, seconds)


def _call(module: nn.Module, *inputs: Tensor) -> Any:
    return module(*inputs)


def _itself_thrice(module: nn.Module, x: Tensor) -> Any:
    return module(x, x, x)


def _itself_to(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda module, x: function(module, x, x, x)


def _values_and_gradients(module: nn.Module, call: Callable[..., Any], inputs: list[Tensor]) -> list[Tensor | None]:
    """The output, then the gradients of inputs and parameters for a fixed gradient of the output."""
    output = call(module, *inputs)
    output = output[0] if isinstance(output, tuple) else output
    leaves = [*inputs, *module.parameters()]
    weights = torch.linspace(-1, 1, output.numel(), dtype=torch.float64, device=output.device).view(output.shape)
    gradients = torch.autograd.grad(output, leaves, weights.to(output.dtype), allow_unused=True)
    return [output.detach(), *gradients]
