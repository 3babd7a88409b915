"""Norms, softmax and means of rows, by torch operations."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .numbers import column_sums, evaluate, wide

Outputs = tuple[Tensor | None, ...]


def _scaled(normal: Tensor, weight: Tensor | None, offset: float, bias: Tensor | None = None) -> Tensor:
    out = normal if weight is None else normal * (wide(weight) + offset)
    return out if bias is None else out + wide(bias)


def _rms(value: Tensor, eps: float) -> Tensor:
    return torch.rsqrt(value.square().mean(-1, keepdim=True) + eps)


def rms_norm_forward(x: Tensor, weight: Tensor | None, eps: float, weight_offset: float, *_: Any) -> Outputs:
    value = wide(x)
    rstd = _rms(value, eps)
    return _scaled(value * rstd, weight, weight_offset), rstd


def rms_norm_activation_forward(
    x: Tensor, weight: Tensor | None, eps: float, weight_offset: float, activation: str, *_: Any
) -> Outputs:
    normal, rstd = rms_norm_forward(x, weight, eps, weight_offset)
    assert normal is not None
    return evaluate(activation, normal)[0], rstd


def _sum(x: Tensor, residual: Tensor) -> Tensor:
    return (wide(x) + wide(residual)).to(x.dtype)  # the norm sees what the sum holds, rounded


def _sum_last(results: Outputs, total: Tensor, kept: int) -> Outputs:
    return (results[0], total, *results[1:])[: kept + 2]


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor | None, eps: float, offset: float, *_: Any) -> Outputs:
    total = _sum(x, residual)
    return _sum_last(rms_norm_forward(total, weight, eps, offset), total, 0)


def add_rms_norm_forward(
    x: Tensor, residual: Tensor, weight: Tensor | None, eps: float, offset: float, *_: Any
) -> Outputs:
    total = _sum(x, residual)
    return _sum_last(rms_norm_forward(total, weight, eps, offset), total, 1)


def layer_norm_forward(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, *_: Any) -> Outputs:
    value = wide(x)
    mean = value.mean(-1, keepdim=True)
    rstd = _rms(value - mean, eps)
    return _scaled((value - mean) * rstd, weight, 0, bias), mean, rstd


def layer_norm_activation_forward(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, activation: str, *_: Any
) -> Outputs:
    normal, *kept = layer_norm_forward(x, weight, bias, eps)
    assert normal is not None
    return evaluate(activation, normal)[0], *kept


def add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, *_: Any
) -> Outputs:
    total = _sum(x, residual)
    return _sum_last(layer_norm_forward(total, weight, bias, eps), total, 0)


def add_layer_norm_forward(
    x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, *_: Any
) -> Outputs:
    total = _sum(x, residual)
    return _sum_last(layer_norm_forward(total, weight, bias, eps), total, 2)


def _norm_backward(
    grad: Tensor,
    normal: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    offset: float,
    grad_sum: Tensor | None,
    layer: bool,
) -> tuple[Tensor, Tensor]:
    """The gradients of the value and, row by row, of the weight."""
    scaled = grad if weight is None else grad * (wide(weight) + offset)
    through = scaled - normal * (scaled * normal).mean(-1, keepdim=True)
    if layer:
        through = through - scaled.mean(-1, keepdim=True)
    grad_input = rstd * through
    return grad_input if grad_sum is None else grad_input + wide(grad_sum), grad * normal


def rms_norm_backward(
    grad_output: Tensor, value: Tensor, weight: Tensor | None, rstd: Tensor, grad_sum: Tensor | None, offset: float,
    input_grad: bool, weight_grad: bool,
) -> Outputs:  # fmt: skip
    rstd = wide(rstd).reshape(*value.shape[:-1], 1)
    grad, of_weight = _norm_backward(wide(grad_output), wide(value) * rstd, rstd, weight, offset, grad_sum, False)
    return grad if input_grad else None, column_sums(of_weight) if weight_grad else None


def layer_norm_backward(
    grad_output: Tensor, value: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, rstd: Tensor,
    grad_sum: Tensor | None, input_grad: bool, weight_grad: bool, bias_grad: bool,
) -> Outputs:  # fmt: skip
    mean, rstd = (wide(one).reshape(*value.shape[:-1], 1) for one in (mean, rstd))
    normal, grad = (wide(value) - mean) * rstd, wide(grad_output)
    of_input, of_weight = _norm_backward(grad, normal, rstd, weight, 0, grad_sum, True)
    return (
        of_input if input_grad else None,
        column_sums(of_weight) if weight_grad else None,
        column_sums(grad) if bias_grad else None,
    )


def softmax_forward(x: Tensor, mask: Tensor | None, scale: float, causal: bool, log: bool) -> Tensor:
    score = scale * wide(x)
    if mask is not None:
        score = score.masked_fill(~mask, float("-inf")) if mask.dtype is torch.bool else score + wide(mask)
    if causal:
        queries, columns = (x.shape[-2] if x.dim() > 1 else 1), x.shape[-1]
        kept = torch.ones(queries, columns, dtype=torch.bool, device=x.device).tril(columns - queries)
        score = score.masked_fill(~(kept if x.dim() > 1 else kept[0]), float("-inf"))
    out = torch.log_softmax(score, -1) if log else torch.softmax(score, -1)
    if mask is None and not causal:
        return out
    # A row with every score removed.
    return out.masked_fill((score == float("-inf")).all(-1, keepdim=True), float("-inf") if log else 0.0)


def softmax_(x: Tensor, mask: Tensor | None, scale: float, causal: bool, log: bool) -> None:
    x.copy_(softmax_forward(x, mask, scale, causal, log))


def softmax_backward(grad_output: Tensor, output: Tensor, scale: float, log: bool, masked: bool) -> Tensor:
    grad, out = wide(grad_output), wide(output)
    if not log:
        return scale * out * (grad - (grad * out).sum(-1, keepdim=True))
    of_input = scale * (grad - out.exp() * grad.sum(-1, keepdim=True))
    return of_input.masked_fill(out == float("-inf"), 0.0) if masked else of_input


def _sequence_of(offsets: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
    """For each token its sequence, and whether it is in one."""
    place = torch.arange(tokens, device=offsets.device)
    sequence = torch.searchsorted(offsets.long(), place, right=True) - 1
    return sequence.clamp(0, max(offsets.numel() - 2, 0)), (sequence >= 0) & (sequence < offsets.numel() - 1)


def _lengths(offsets: Tensor, like: Tensor) -> Tensor:
    return (offsets[1:] - offsets[:-1]).clamp(min=1).to(like.dtype).view(-1, *(1,) * (like.dim() - 1))


def mean_pool_forward(x: Tensor, offsets: Tensor | None, tokens: int) -> Tensor:
    value = wide(x)
    if offsets is None:
        return value.mean(1) if x.shape[1] else value.sum(1)
    sequence, inside = _sequence_of(offsets, x.shape[0])
    sums = value.new_zeros(offsets.numel() - 1, *x.shape[1:])
    sums.index_add_(0, sequence[inside], value[inside])
    return sums / _lengths(offsets, sums)


def mean_pool_backward(grad_output: Tensor, offsets: Tensor | None, tokens: int) -> Tensor:
    grad = wide(grad_output)
    if offsets is None:
        return (grad / max(tokens, 1)).unsqueeze(1).expand(grad.shape[0], tokens, *grad.shape[1:])
    sequence, inside = _sequence_of(offsets, tokens)
    if grad.shape[0] == 0:
        return grad.new_zeros(tokens, *grad.shape[1:])
    each = (grad / _lengths(offsets, grad))[sequence]
    return torch.where(inside.view(-1, *(1,) * (grad.dim() - 1)), each, torch.zeros((), device=grad.device))


def chunk_mean_pool_forward(x: Tensor, chunk_size: int, tokens: int) -> Tensor:
    parts = [wide(part).mean(1) for part in torch.split(x, min(chunk_size, x.shape[1]), 1)] if x.shape[1] else []
    return torch.stack(parts, 1) if parts else wide(x)


def chunk_mean_pool_backward(grad_output: Tensor, chunk_size: int, tokens: int) -> Tensor:
    chunk_size = min(chunk_size, tokens)
    each = wide(grad_output).repeat_interleave(chunk_size, 1)[:, :tokens]
    last = tokens % chunk_size or chunk_size if tokens else 0
    lengths = torch.full((tokens,), float(chunk_size), device=each.device, dtype=each.dtype)
    lengths[max(tokens - last, 0) :] = last
    return each / lengths.view(1, -1, *(1,) * (each.dim() - 2))
