"""Cross entropy, by torch operations; ops/cross_entropy/cross_entropy.h has the formulas."""

from __future__ import annotations

import torch
from torch import Tensor

from .numbers import rows_at, wide

MaybeTensor = Tensor | None


def _capped(logits: Tensor, softcap: float) -> Tensor:
    return wide(logits) if softcap == 0 else softcap * torch.tanh(wide(logits) / softcap)


def _weights(weight: MaybeTensor, z: Tensor, vocabulary: int) -> Tensor:
    return z.new_ones(vocabulary) if weight is None else wide(weight).to(z.dtype)


def cross_entropy_rows_forward(
    logits: Tensor, target: Tensor, weight: MaybeTensor, ignore_index: int, label_smoothing: float, z_loss: float,
    softcap: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    z = _capped(logits, softcap)
    weights = _weights(weight, z, z.shape[-1])
    counts = target != ignore_index
    at = torch.where(counts & (target >= 0) & (target < z.shape[-1]), target, 0)
    lse = torch.logsumexp(z, -1)
    loss = (1 - label_smoothing) * rows_at(weights, target) * (lse - z.gather(-1, at.unsqueeze(-1)).squeeze(-1))
    if label_smoothing:
        loss = loss + label_smoothing / z.shape[-1] * (weights.sum() * lse - (z * weights).sum(-1))
    if z_loss:
        loss = loss + z_loss * lse * lse
    nothing = torch.zeros((), dtype=z.dtype, device=z.device)
    return torch.where(counts, loss, nothing), torch.where(counts, lse, nothing)


def cross_entropy_rows_backward(
    grad_output: Tensor, logits: Tensor, target: Tensor, weight: MaybeTensor, lse: Tensor, ignore_index: int,
    label_smoothing: float, z_loss: float, softcap: float, vocabulary: int, first_column: int,
) -> Tensor:  # fmt: skip
    z = _capped(logits, softcap)
    vocabulary = vocabulary or z.shape[-1]
    weights = _weights(weight, z, vocabulary)
    counts = target != ignore_index
    on_target = ((1 - label_smoothing) * rows_at(weights, target)).unsqueeze(-1)
    lse, share = wide(lse).reshape(target.shape).unsqueeze(-1), label_smoothing / vocabulary
    here = weights[first_column : first_column + z.shape[-1]]
    grad = (on_target + share * weights.sum() + 2 * z_loss * lse) * torch.exp(z - lse) - share * here
    columns = torch.arange(first_column, first_column + z.shape[-1], device=z.device)
    grad = grad - on_target * (columns == target.unsqueeze(-1))
    if softcap:
        grad = grad * (1 - (z / softcap).square())
    scale = wide(grad_output)
    scale = scale.reshape(()) if scale.numel() == 1 else scale.reshape(target.shape).unsqueeze(-1)
    return torch.where(counts.unsqueeze(-1), grad * scale, torch.zeros((), dtype=grad.dtype, device=grad.device))


def cross_entropy_forward(
    logits: Tensor, target: Tensor, weight: MaybeTensor, ignore_index: int, label_smoothing: float, z_loss: float,
    softcap: float, mean: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    options = (ignore_index, label_smoothing, z_loss, softcap)
    loss, lse = cross_entropy_rows_forward(logits, target, weight, *options)
    divisor = loss.new_ones(())
    if mean:
        weights, counts = _weights(weight, loss, logits.shape[-1]), target != ignore_index
        divisor = torch.where(counts, rows_at(weights, target), 0.0).sum()
    grad = cross_entropy_rows_backward(1 / divisor, logits, target, weight, lse, *options, 0, 0)
    return loss.sum() / divisor, grad


def cross_entropy_(
    logits: Tensor, target: Tensor, weight: MaybeTensor, ignore_index: int, label_smoothing: float, z_loss: float,
    softcap: float, mean: bool,
) -> Tensor:  # fmt: skip
    loss, grad = cross_entropy_forward(logits, target, weight, ignore_index, label_smoothing, z_loss, softcap, mean)
    logits.copy_(grad)
    return loss


def cross_entropy_rescale_(tensor: Tensor, scale: Tensor) -> None:
    tensor.mul_(scale.reshape(()))
