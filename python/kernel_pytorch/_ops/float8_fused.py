"""FP8 codes of norms, gated activations and their gradients, quantised in the op's own pass: no 16-bit tensor between.

Codes are those of the op followed by `quantize`. On a GPU with FP8 one kernel reads what the op reads and writes codes,
transposed codes and scales (norms: two, the first measures the rows); elsewhere the two ops run one after the other.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .float8 import OutputBuffers, Quantized
from .support.casting import parameter_for
from .support.declare import without_gradient


class QuantizedNorm(NamedTuple):
    """codes of the output, the output itself where asked for, x + residual where there was one, and rstd [rows]."""

    quantized: Quantized
    output: Tensor | None
    sum: Tensor | None
    rstd: Tensor


class QuantizedGate(NamedTuple):
    """codes of the output, and the output itself where asked for."""

    quantized: Quantized
    output: Tensor | None


def rms_norm_quantized(
    x: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    *,
    residual: Tensor | None = None,
    weight_offset: float = 0.0,
    with_output: bool = False,
    **options: Any,
) -> QuantizedNorm:
    """`quantize` of `rms_norm(x, weight, eps, residual=residual)`, x [rows, columns]. No gradient.

    Args:
        x, weight, eps, residual, weight_offset: as for `rms_norm`; the residual has x's type.
        with_output: the output is written as well.
        options: those of `quantize`.
    """
    _check_matrix("rms_norm_quantized", x)
    if weight is not None and weight.dtype is not x.dtype:
        weight = parameter_for(x, weight)
    output = torch.empty_like(x, memory_format=torch.contiguous_format) if with_output else None
    total = torch.empty_like(x, memory_format=torch.contiguous_format) if residual is not None else None
    rstd = x.new_empty(x.shape[0], dtype=torch.float32)
    made = _make(
        "norm", x, x.shape[1], residual=residual, weight=weight, value=output, total=total, rstd=rstd, eps=eps,
        weight_offset=weight_offset, **options,
    )  # fmt: skip
    return QuantizedNorm(made, output, total, rstd)


def gated_activation_quantized(
    gate: Tensor, up: Tensor, kind: str = "silu", *, with_output: bool = False, **options: Any
) -> QuantizedGate:
    """`quantize` of `gated_activation(gate, up, kind)`, both [rows, columns] of one type. No gradient.

    Args:
        gate, up, kind: as for `gated_activation`; the halves of one packed tensor are as good as two.
        with_output: the output is written as well.
        options: those of `quantize`.
    """
    _check_matrix("gated_activation_quantized", gate)
    output = gate.new_empty(gate.shape) if with_output else None
    return QuantizedGate(_make("gate", gate, gate.shape[1], up=up, value=output, kind=kind, **options), output)


def gated_activation_backward_quantized(
    grad_output: Tensor, gate: Tensor, up: Tensor, kind: str = "silu", *, with_output: bool = False, **options: Any
) -> QuantizedGate:
    """`quantize` of the gradients of `gated_activation`, that of the gate before that of up: [rows, 2 columns].

    Args:
        grad_output, gate, up: [rows, columns] of one type.
        with_output: the gradients are written as well, as one packed tensor.
        options: those of `quantize`.
    """
    _check_matrix("gated_activation_backward_quantized", gate)
    columns = 2 * gate.shape[1]
    output = gate.new_empty((gate.shape[0], columns)) if with_output else None
    made = _make("gate_gradient", gate, columns, up=up, grad_output=grad_output, value=output, kind=kind, **options)
    return QuantizedGate(made, output)


def _check_matrix(name: str, x: Tensor) -> None:
    if x.dim() != 2:
        raise ValueError(f"{name}: its first tensor has shape {tuple(x.shape)}; it must be [rows, columns]")


def _make(
    source: str,
    x: Tensor,
    columns: Any,
    *,
    up: Tensor | None = None,
    grad_output: Tensor | None = None,
    residual: Tensor | None = None,
    weight: Tensor | None = None,
    value: Tensor | None = None,
    total: Tensor | None = None,
    rstd: Tensor | None = None,
    kind: str = "silu",
    eps: float = 0.0,
    weight_offset: float = 0.0,
    dtype: torch.dtype = torch.float8_e4m3fn,
    granularity: str = "tensor",
    scale: Tensor | None = None,
    margin: int = 0,
    power_of_two: bool = False,
    seed: Tensor | None = None,
    amax: Tensor | None = None,
    found_nonfinite: Tensor | None = None,
    codes: bool = True,
    transposed: bool = False,
    square_transpose: bool = False,
) -> Quantized:
    outs = OutputBuffers(x, x.shape[0], columns, dtype, granularity, scale, codes, transposed, square_transpose)
    inputs = [None if view is None else view.detach() for view in (x, up, grad_output, residual, weight)]
    _quantize_produced(
        *inputs, scale, seed, value, total, rstd, outs.codes, outs.transposed, outs.scales, outs.transposed_scales,
        amax, found_nonfinite, source, kind, eps, weight_offset, granularity, margin, power_of_two, square_transpose,
    )  # fmt: skip
    return outs.result()


_quantize_produced = without_gradient("quantize_produced_")
