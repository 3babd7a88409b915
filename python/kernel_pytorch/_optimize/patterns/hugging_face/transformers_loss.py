"""Hugging Face's causal loss: cross entropy straight from the logits, loss and gradient in one visit, no fp32 copy."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as torch_functional
from torch import Tensor, nn

from ....functional import cross_entropy
from ...changes import SetAttribute
from ...sites import Call, Found, Proposal, Way
from ..context import Context
from ..linears import padded_of
from .transformers_attention import is_pretrained

NAME = "cross entropy (Hugging Face)"


def causal_loss(
    logits: Tensor,
    labels: Tensor | None,
    vocab_size: int,
    num_items_in_batch: Tensor | int | None = None,
    ignore_index: int = -100,
    shift_labels: Tensor | None = None,
    **_: Any,
) -> Tensor:
    """As transformers' ForCausalLMLoss: position i predicts label i + 1; the mean, or the sum by a given count."""
    if shift_labels is None:
        assert labels is not None
        shift_labels = torch_functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    rows = padded_of(logits) if logits.shape[-1] == vocab_size else logits.reshape(-1, vocab_size)
    rows = rows.reshape(-1, rows.shape[-1])
    target = shift_labels.reshape(-1).to(logits.device)
    reduction = "mean" if num_items_in_batch is None else "sum"
    loss = cross_entropy(rows, target, ignore_index=ignore_index, reduction=reduction)
    if num_items_in_batch is not None:
        count = num_items_in_batch.to(loss.device) if isinstance(num_items_in_batch, Tensor) else num_items_in_batch
        loss = loss / count
    return loss


def find(context: Context, path: str, module: nn.Module, call: Call) -> Found:
    if not context.trains or not is_pretrained(module):
        return None
    function = getattr(module, "loss_function", None)
    if getattr(function, "__name__", "") != "ForCausalLMLoss" or call.kwargs.get("labels") is None:
        return None
    way = Way("kernel_pytorch cross_entropy", lambda: SetAttribute(module, "_loss_function", causal_loss))
    return Proposal(NAME, path, module, "ForCausalLMLoss, in fp32", [way])
