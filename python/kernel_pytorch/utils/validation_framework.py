"""Checks a layer against the plain torch composition of the same weights: values, gradients, state_dict.

The reference computes in float64 with the layer's own parameters, so that what is measured is the layer's error and not
two roundings' difference. A layer that raises is a failed result with its message, not an exception here.
"""

from __future__ import annotations

import copy
import inspect
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from .. import _torch as _torch  # first: it says what is missing where torch is missing or old

import torch  # isort: skip
import torch.nn.functional as torch_functional  # isort: skip
from torch import Tensor, nn  # isort: skip

from ..advanced_memory import SegmentedAttentionMemory  # isort: skip
from ..attention.layers import FlashAttention3  # isort: skip
from ..attention.plain import plain_attention  # isort: skip
from ..attention.sparse import DynamicSparseAttention  # isort: skip

# Shares of the largest expected value: sums of a few thousand products, each rounded; low precision is rounded between
# steps.
TOLERANCE = {torch.float64: 1e-10, torch.float32: 2e-5, torch.float16: 1e-2, torch.bfloat16: 6e-2}


_LEAST_SHARE = 0.1  # of the largest gradient


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
        """An attention layer against plain torch operations: nn.MultiheadAttention for layers with its parameters, the
        whole matrix of scores for those of kernel_pytorch.attention, with their masks, windows and functions.

        Layers whose forward takes a key are also called with keys of another length.
        """
        x, memory = (2, 17, d_model), (2, 9, d_model)
        has_keys = "key" in inspect.signature(layer.forward).parameters
        if isinstance(layer, (FlashAttention3, SegmentedAttentionMemory)):
            calls = {"": {"x": x}, "cross: ": {"query": x, "key": memory, "value": memory}}
            results = []
            for prefix, shapes in calls.items() if has_keys else [("", calls[""])]:
                results += self.validate_component(
                    layer, copy.deepcopy(layer), shapes, expected=_written_out, prefix=prefix, same_choices=_same_blocks
                )
            return results
        reference = nn.MultiheadAttention(
            d_model, num_heads, bias="in_proj_bias" in dict(layer.named_parameters()), batch_first=True
        )

        def expected(module: nn.Module, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            return module(query, key, value, need_weights=False)[0]  # type: ignore[no-any-return]

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
        same_choices: Callable[[nn.Module, nn.Module], None] | None = None,
    ) -> list[ValidationResult]:
        """Any layer against a module that takes its state_dict, on random inputs of these shapes, in evaluation mode.

        `call` and `expected` are (module, *inputs) -> output of the layer and of the reference; a call by default.
        `same_choices(layer, reference)` runs between the two, for layers that choose by their own rounded values.
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
        try:
            actual = _values_and_gradients(layer, call or _call, inputs)
        except Exception as error:  # whatever a layer under test raises is its result
            words = f"{type(error).__name__}: {error}"
            return [*results, ValidationResult(f"{prefix}output", False, words, {}, time.perf_counter() - begin)]
        if same_choices is not None:
            same_choices(layer, reference)
        exact = _values_and_gradients(reference, expected or _call, wide)
        seconds = (time.perf_counter() - begin) / len(exact)
        largest = max(_largest(gradient) for gradient in exact[1:])
        for name, got, want in zip(("output", *(f"gradient of {name}" for name in names)), actual, exact, strict=True):
            of_all = 0.0 if name == "output" else largest
            results.append(self._compare(prefix + name, got, want, seconds, of_all))
        return results

    def _random_inputs(self, layer: nn.Module, shapes: Mapping[str, tuple[int, ...]]) -> list[Tensor]:
        generator = torch.Generator().manual_seed(self.seed)
        dtype = next((p.dtype for p in layer.parameters() if p.is_floating_point()), torch.float32)
        return [
            torch.randn(shape, generator=generator).to(self.device, dtype).requires_grad_() for shape in shapes.values()
        ]

    def _compare(
        self, name: str, got: Tensor | None, want: Tensor | None, seconds: float, of_all: float
    ) -> ValidationResult:
        """Relative to the largest value that is wanted. Of gradients, at least to a share of the largest of all: one
        whose terms cancel, as that of a bias of keys, has the rounding of its terms."""
        if got is None or want is None:
            same = (got is None) == (want is None)
            words = "" if same else f"the layer's is {'absent' if got is None else 'there'}, the reference's is not"
            return ValidationResult(name, same, words, {}, seconds)
        if got.shape != want.shape:
            words = f"its shape is {list(got.shape)}, the reference's {list(want.shape)}"
            return ValidationResult(name, False, words, {}, seconds)
        tolerance = self.tolerance if self.tolerance is not None else TOLERANCE.get(got.dtype, 0.0)
        scale = max(_largest(want), _LEAST_SHARE * of_all)
        absolute = (got.double() - want).abs().max().item() if want.numel() else 0.0
        relative = absolute / scale if scale else absolute
        passed = relative <= tolerance  # false for NaN
        words = "" if passed else f"relative error {relative:.2e} is above {tolerance:.0e} for {got.dtype}"
        return ValidationResult(name, passed, words, {"max_absolute_error": absolute, "error": relative}, seconds)


def _largest(tensor: Tensor | None) -> float:
    return tensor.abs().max().item() if tensor is not None and tensor.numel() else 0.0


def _written_out(layer: nn.Module, query: Tensor, key: Tensor | None = None, value: Tensor | None = None) -> Tensor:
    """What such a layer means, from its parameters and options alone: its forward is what is under test."""
    inner = layer.attention if isinstance(layer, SegmentedAttentionMemory) else layer
    assert isinstance(inner, FlashAttention3)
    key = query if key is None else key
    value = key if value is None else value
    q, k, v = (
        inner._heads(torch_functional.linear(x, projection.weight, projection.bias))
        for x, projection in ((query, inner.q_proj), (key, inner.k_proj), (value, inner.v_proj))
    )
    options = inner._options(q, k, None, None)
    if isinstance(inner, DynamicSparseAttention):
        options |= inner._blocks(q, k)
    if isinstance(layer, SegmentedAttentionMemory):
        segment, memory = layer.segment_length, layer.memory_length
        options["mask_mod"] = lambda b, h, i, j: j >= i // segment * segment - memory
    attended = plain_attention(q, k, v, **options).flatten(-2)
    return torch_functional.linear(attended, inner.out_proj.weight, inner.out_proj.bias)


def _same_blocks(layer: nn.Module, reference: nn.Module) -> None:
    """What a rounded score chooses, an exact one may not."""
    for mine, theirs in zip(layer.modules(), reference.modules(), strict=True):
        if isinstance(mine, DynamicSparseAttention) and isinstance(theirs, DynamicSparseAttention):
            theirs.compute_the_blocks_of(mine)


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
