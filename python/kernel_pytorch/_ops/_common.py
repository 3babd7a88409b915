"""Words that the ops of this folder share: casts by role, batching by folding, and the refusals of what has no formula."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

WIDTHS = {torch.bfloat16: 2, torch.float16: 2, torch.float32: 4, torch.float64: 8}


def parameter_for(x: Tensor, parameter: Tensor) -> Tensor:
    """A weight or bias of another type than x's: fp32 stays fp32, a narrower one is widened to x's type.

    This is the whole of autocast for norms: activations keep the type they arrive in. What remains unequal is left to
    the op, which says what is wrong.
    """
    if parameter.dtype is torch.float32 and x.dtype is not torch.float64:
        return parameter
    return parameter.to(x.dtype) if WIDTHS.get(parameter.dtype, 8) < WIDTHS.get(x.dtype, 0) else parameter


def same_type(x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
    """Both in the wider of their types (fp32 for bf16 with fp16)."""
    dtype = torch.promote_types(x.dtype, residual.dtype)
    return x.to(dtype), residual.to(dtype)


def statistics_dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype is torch.float64 else torch.float32


def fold(
    call: Callable[..., Any],
    batch_size: int,
    in_dims: Sequence[int | None],
    args: Sequence[Any],
    parameters: Sequence[int],
    per_sample: bool = False,
) -> tuple[Any, Any]:
    """vmap of an op over rows: the batch becomes one more leading dimension of every activation.

    An activation without a batch is expanded, which costs no copy since the ops take strides. Where a parameter (its
    position is in `parameters`) has a batch, or its gradient is wanted per sample, the op is called once per sample.
    """
    if per_sample or any(in_dims[i] is not None for i in parameters):
        samples = [call(*_sample(args, in_dims, b)) for b in range(batch_size)]
        if isinstance(samples[0], Tensor):
            return torch.stack(samples), 0
        return tuple(torch.stack(group) for group in zip(*samples)), (0,) * len(samples[0])
    folded = [
        _to_front(arg, dim, batch_size) if isinstance(arg, Tensor) and i not in parameters else arg
        for i, (arg, dim) in enumerate(zip(args, in_dims))
    ]
    outputs = call(*folded)
    if isinstance(outputs, Tensor):
        return outputs, 0
    return outputs, tuple(None if is_absent(output) else 0 for output in outputs)


def _sample(args: Sequence[Any], in_dims: Sequence[int | None], index: int) -> list[Any]:
    return [arg if dim is None else arg.select(dim, index) for arg, dim in zip(args, in_dims)]


def _to_front(tensor: Tensor, dim: int | None, batch_size: int) -> Tensor:
    return tensor.expand(batch_size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)


def is_absent(output: Tensor) -> bool:
    """Whether it stands for an output that was not asked for."""
    return output.dim() == 1 and output.shape[0] == 0


def raise_no_second_derivative(op: str) -> None:
    raise RuntimeError(
        f"{op}: its gradient has no derivative of its own (second derivative asked for); "
        f"use torch.nn.functional.{op} where create_graph=True must be differentiated through"
    )


def raise_no_forward_mode(op: str) -> None:
    raise NotImplementedError(
        f"{op}: forward-mode derivatives (jvp, jacfwd, dual tensors) are not supported; "
        f"use reverse mode (vjp, jacrev) or torch.nn.functional.{op}"
    )
