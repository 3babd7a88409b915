"""cross_entropy: gradients, and its vocabulary-parallel form.

A reduced loss has its gradient computed with it, in the same visit to the logits, for a gradient of 1 of the loss.
Backward hands that tensor on and multiplies it in place where it turns out that the gradient of the loss is not 1; the
device looks, so that nobody waits for the value.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .support.autograd import adds_gradients, eager, last_derivative, wants_gradient
from .support.batching import BatchingRule
from .support.casting import parameter_for, statistics_dtype
from .support.declare import backward, differentiable, without_gradient

_ops = torch.ops.kernel_pytorch
_REDUCTIONS = ("none", "sum", "mean")


def cross_entropy(
    logits: Tensor,
    target: Tensor,
    *,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    reduction: str = "mean",
) -> Tensor:
    """Cross entropy of logits against class indices; loss and gradient in one visit to the logits.

    Args:
        logits: [..., classes], any strides; fp32, bf16, fp16 and fp64.
        target: [...], integers in [0, classes) or ignore_index. Another index is an error on the CPU and makes the
            row's loss and gradient NaN on a GPU.
        weight: [classes], the logits' type or fp32; ones where absent. It has no gradient.
        label_smoothing: as torch's: the target's share of the probability is less by it, every class' more.
        z_loss: adds z_loss * logsumexp(logits)^2 to every row's loss.
        softcap: replaces the logits by softcap * tanh(logits / softcap).
        reduction: "mean" divides by the number of rows that count (with a weight: by the sum of their targets'
            weights), "sum" adds them up, "none" returns [...].

    Returns:
        The loss in fp32 (fp64 for fp64), also for 16-bit logits.
    """
    options = (int(ignore_index), label_smoothing, z_loss, _cap(softcap))
    target, weight = _target_for(logits, target), parameter_for(logits, weight)
    if _is_reduced(reduction):
        if torch.compiler.is_compiling() and weight is None and wants_gradient(logits):
            # A compiler cannot multiply the gradient that comes with the loss in place; that of rows needs no factor.
            total = _rows(logits, target, None, *options).sum()
            return total / (target != ignore_index).sum() if reduction == "mean" else total  # type: ignore[no-any-return]
        if reduction == "mean" and weight is None and not _is_plain(logits):  # a DTensor's sum may stay in parts
            return _reduced(logits, target, None, *options, False) / (target != ignore_index).sum()
        return _reduced(logits, target, weight, *options, reduction == "mean")
    return _rows(logits, target, weight, *options)  # type: ignore[no-any-return]


def cross_entropy_(
    logits: Tensor,
    target: Tensor,
    *,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    reduction: str = "mean",
) -> Tensor:
    """`cross_entropy` whose gradient takes the logits' memory: half the memory, and the logits are gone.

    The logits are contiguous and not a leaf; nothing else may want them, in this graph or later (autograd notices most
    of that). The reduction is "mean" or "sum". Without a graph the logits simply become their gradient.
    """
    options = (int(ignore_index), label_smoothing, z_loss, _cap(softcap))
    if not _is_reduced(reduction):
        raise ValueError(f'cross_entropy_: reduction is "{reduction}"; in place it is "mean" or "sum"')
    if logits.requires_grad and logits.is_leaf and torch.is_grad_enabled():
        raise RuntimeError("cross_entropy_: the logits are a leaf that requires a gradient; use cross_entropy")
    arguments = (_target_for(logits, target), parameter_for(logits, weight), *options, reduction == "mean")
    if logits.requires_grad and torch.is_grad_enabled():
        return loss_with_gradients(_into_logits, logits, *arguments)
    return _write_gradient(logits, *arguments)  # type: ignore[no-any-return]


def cross_entropy_partials(
    logits: Tensor,
    target: Tensor,
    *,
    vocabulary: int,
    first_column: int,
    ignore_index: int = -100,
    softcap: float | None = None,
) -> Tensor:
    """What the columns [first_column, first_column + logits.shape[-1]) of a vocabulary add to its cross entropy.

    Args:
        logits: [..., columns], this part of the logits.
        target: [...], int64, columns of the whole vocabulary.
        vocabulary: the number of columns of all parts together.
        first_column: where this part begins.
        ignore_index: rows with this target count for nothing.
        softcap: logits become softcap * tanh(logits / softcap) first.

    Returns:
        [..., 4] in fp32 (fp64): the largest logit, the sum of exponentials around it, the target's logit (0 where it is
        in another part) and the sum of the logits. `combine_cross_entropy_partials` takes them from all parts.
    """
    target = _target_for(logits, target)
    return _partials(logits, target, int(ignore_index), _cap(softcap), vocabulary, first_column)  # type: ignore[no-any-return]


def combine_cross_entropy_partials(
    partials: Tensor,
    target: Tensor,
    *,
    vocabulary: int,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """The rows' losses and logarithms of the sum of exponentials, from [parts, ..., 4] of `cross_entropy_partials`."""
    is_ignored = target == ignore_index
    largest = partials[..., 0].amax(0).masked_fill(is_ignored, 0.0)
    log_sum = (partials[..., 1] * (partials[..., 0] - largest).exp()).sum(0).masked_fill(is_ignored, 1.0).log()
    own, logit_sum = partials[..., 2].sum(0), partials[..., 3].sum(0)
    lse = largest + log_sum
    loss = (1.0 - label_smoothing) * ((largest - own) + log_sum)
    if label_smoothing != 0.0:
        loss = loss + label_smoothing * (lse - logit_sum / vocabulary)
    if z_loss != 0.0:
        loss = loss + z_loss * lse * lse
    return loss.masked_fill(is_ignored, 0.0), lse


def parallel_cross_entropy(
    logits: Tensor,
    target: Tensor,
    *,
    vocabulary: int,
    first_column: int,
    gather: Callable[[Tensor], Tensor],
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
) -> Tensor:
    """The rows' losses where each rank has some columns of the vocabulary; backward gives each rank its own gradient.

    Args:
        logits: [..., columns], this rank's: columns first_column, first_column + 1, ... of the vocabulary.
        target: [...], indices in the whole vocabulary, the same on all ranks.
        gather: [..., 4] -> [ranks, ..., 4], everybody's partials (torch.distributed.all_gather_into_tensor).

    Returns:
        [...], the same on all ranks; reduce it as you like.
    """
    options = (int(ignore_index), label_smoothing, z_loss, _cap(softcap), vocabulary, first_column)
    return _Parallel.apply(logits, _target_for(logits, target), gather, *options)  # type: ignore[no-any-return, no-untyped-call]


def _is_reduced(reduction: str) -> bool:
    if reduction not in _REDUCTIONS:
        raise ValueError(f'cross_entropy: reduction is "{reduction}"; it is one of {", ".join(_REDUCTIONS)}')
    return reduction != "none"


def _cap(softcap: float | None) -> float:
    if softcap is None:
        return 0.0
    if softcap <= 0.0:
        raise ValueError(f"cross_entropy: softcap is {softcap}; it must be positive, or None for none")
    return softcap


def _target_for(logits: Tensor, target: Tensor, op: str = "cross_entropy") -> Tensor:
    """Narrower integers are widened; what else there is the op refuses, except as many targets in another shape, which
    it takes as rows."""
    rows = logits.shape[:-1]
    if target.shape != rows and target.numel() == rows.numel():
        raise ValueError(
            f"{op}: target has shape {list(target.shape)}, {'hidden' if op.startswith('linear') else 'logits'} have "
            f"{list(logits.shape)}; it must be {list(rows)}"
        )
    return target.long() if target.dtype in (torch.int16, torch.int8, torch.uint8) else target


def _is_plain(logits: Tensor) -> bool:
    return type(logits) is Tensor or type(logits) is torch.nn.Parameter


def _reduced(logits: Tensor, *arguments: Any) -> Tensor:
    if _is_plain(logits) and adds_gradients(logits):
        return loss_with_gradients(_forward, logits, *arguments)
    return _traced(logits, *arguments)  # type: ignore[no-any-return]


def _into_logits(logits: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    """The loss and its gradient, which lies in the logits' memory."""
    return _write_gradient(logits.detach(), *arguments), logits.detach()


def loss_with_gradients(run: Callable[..., Any], *arguments: Any) -> Tensor:
    """The loss of `run`, which computes (loss, gradients of its first arguments); backward returns those gradients."""
    return _LossWithGradients.apply(run, *arguments)  # type: ignore[no-any-return, no-untyped-call]


class _LossWithGradients(torch.autograd.Function):
    """The eager route of a reduced loss: backward hands on what forward wrote, multiplied in place the first time.

    Of a graph that is kept, the first caller may still hold those tensors: the second gets some of its own, from which
    the first factor is divided out (NaN where that was 0).
    """

    @staticmethod
    def forward(ctx: Any, run: Callable[..., Any], *arguments: Any) -> Tensor:
        loss, *gradients = run(*arguments)
        ctx.save_for_backward(*gradients)
        ctx.applied, ctx.dtypes = None, [argument.dtype for argument in arguments[: len(gradients)]]
        return loss  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor | None, ...]:
        gradients, scale = ctx.saved_tensors, grad_loss.to(statistics_dtype(grad_loss))
        if ctx.applied is None and not torch.is_grad_enabled():
            ctx.applied = scale.clone()
            gradients = [gradient.detach() for gradient in gradients]  # autograd may keep these without a copy
            for gradient in gradients:
                if gradient.numel():
                    _rescale(gradient, scale)  # past autograd's version: the tensors are this node's own
        else:
            factor = scale if ctx.applied is None else scale / ctx.applied
            gradients = [_multiplied(gradient, factor) for gradient in gradients]
        needed = ctx.needs_input_grad[1:]
        made = [one.to(dtype) if wanted else None for one, dtype, wanted in zip(gradients, ctx.dtypes, needed)]
        return None, *made, *(None,) * (len(needed) - len(made))


class _Parallel(torch.autograd.Function):
    """A rank's part of a vocabulary: its partials, all ranks' partials, and a gradient from the common lse."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, gather: Callable[[Tensor], Tensor], *options: Any) -> Tensor:
        ignore_index, label_smoothing, z_loss, softcap, vocabulary, first_column = options
        partials = _partials(logits.detach(), target, ignore_index, softcap, vocabulary, first_column)
        loss, lse = combine_cross_entropy_partials(
            gather(partials),
            target,
            vocabulary=vocabulary,
            ignore_index=ignore_index,
            label_smoothing=label_smoothing,
            z_loss=z_loss,
        )
        ctx.save_for_backward(logits, target, lse)
        ctx.options = options
        return loss

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor | None, ...]:
        logits, target, lse = ctx.saved_tensors
        return _rows_backward(grad_loss, logits, target, None, lse, *ctx.options), *(None,) * 8


def _gradient(grads: Any, saved: Any, wanted: Any) -> Any:
    (grad_logits,) = saved
    return grad_logits * grads[0].to(grad_logits.dtype), None, None


def _rows_gradient(grads: Any, saved: Any, wanted: Any) -> Any:
    logits, target, weight, lse, *options = saved
    return _rows_backward(grads[0], logits, target, weight, lse, *options, logits.shape[-1], 0), None, None


_INSTEAD = "torch.nn.functional.cross_entropy"

_forward = eager(_ops.cross_entropy_forward.plain)
_rescale = eager(_ops.cross_entropy_rescale_.default)
_multiplied = last_derivative(
    "cross_entropy", lambda tensor, scale: (tensor * scale).to(tensor.dtype), BatchingRule(), _INSTEAD
)
_traced = differentiable("cross_entropy", gradient=_gradient, saves=["grad_logits"], instead=_INSTEAD)
_rows_backward = backward("cross_entropy_rows", name="cross_entropy", instead=_INSTEAD)
_rows = differentiable(
    "cross_entropy_rows",
    gradient=_rows_gradient,
    name="cross_entropy",
    instead=_INSTEAD,
)
_write_gradient = without_gradient("cross_entropy_")
_partials = without_gradient("cross_entropy_partials", name="cross_entropy_partials")
without_gradient("cross_entropy_rescale_")  # its shape function, for compilers
