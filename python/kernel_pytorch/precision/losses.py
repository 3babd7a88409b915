"""What the engine does with a model's outputs: the loss it takes where none is given, and the one it hands back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as torch_functional
from torch import Tensor

IGNORED = -100  # the class that counts for nothing, as in torch's cross_entropy


def default_loss(outputs: Any, targets: Any) -> Tensor:
    """Cross entropy over the last dimension for classes (integers), else the mean squared error.

    Args:
        outputs: a tensor, or what Hugging Face's models return: their logits count.
        targets: one class for each row of the outputs, or values of their shape. Rows of class -100 are left out;
            where all are, the loss is 0. None: the loss that the model's outputs have.
    """
    if targets is None:
        return _loss_of(outputs)
    outputs = _tensor_of(outputs)
    if targets.dtype not in (torch.int64, torch.int32):
        if outputs.shape != targets.shape:
            raise ValueError(
                f"FP8TrainingEngine: outputs have shape {tuple(outputs.shape)} and targets {tuple(targets.shape)}; the "
                "mean squared error needs one value for each output. Targets that are classes must be int64"
            )
        return torch_functional.mse_loss(outputs, targets)
    if outputs.dim() == 0 or outputs.shape[:-1] != targets.shape:
        raise ValueError(
            f"FP8TrainingEngine: outputs have shape {tuple(outputs.shape)} and targets {tuple(targets.shape)}; cross "
            f"entropy needs targets of shape {tuple(outputs.shape[:-1])}, one class for each row of outputs. To train "
            "on the last position alone give loss_function=lambda outputs, targets: cross_entropy(outputs[:, -1], "
            "targets)"
        )
    classes = targets.reshape(-1).long()
    # By rows: the mean of no rows is NaN, and a sum of 16-bit numbers can overflow.
    losses: Tensor = torch_functional.cross_entropy(outputs.reshape(-1, outputs.shape[-1]), classes, reduction="none")
    total: Tensor = losses.float().sum()
    counted: Tensor = (classes != IGNORED).sum()
    return total / counted.clamp_min(1)


def _tensor_of(outputs: Any) -> Tensor:
    logits = outputs.get("logits") if isinstance(outputs, Mapping) else getattr(outputs, "logits", outputs)
    if not isinstance(logits, Tensor):
        raise TypeError(
            f"FP8TrainingEngine: the model returns {type(outputs).__name__}, of which no loss is known; give "
            "loss_function=, which is called with what the model returns and the targets"
        )
    return logits


def _loss_of(outputs: Any) -> Tensor:
    loss = outputs.get("loss") if isinstance(outputs, Mapping) else getattr(outputs, "loss", None)
    if not isinstance(loss, Tensor):
        raise TypeError(
            f"FP8TrainingEngine: targets are None, and the model returns {type(outputs).__name__} without a loss; give "
            "targets, or the model's labels among its inputs"
        )
    return loss


class DifferentiatedLoss(Tensor):
    """A loss whose backward has run: a number to log. Its own backward(), or that of its multiples, changes nothing."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]  # results are plain tensors

    @classmethod
    def of(cls, loss: Tensor) -> DifferentiatedLoss:
        made = loss.detach().clone().as_subclass(cls)
        made.requires_grad_()
        return made

    # torch warns of numbers made from tensors that require a gradient; this one does so only for callers' backward().
    def __float__(self) -> float:
        return float(self.detach())

    def __int__(self) -> int:
        return int(self.detach())

    def __format__(self, spec: str) -> str:
        return format(self.detach().as_subclass(Tensor), spec)
