"""vmap of ops over rows, by folding: the batch becomes one more leading dimension of every activation. Where that would
give other numbers than a call per sample, there is a call per sample.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .border import library

Dims = Sequence[int | None]


class BatchingRule(NamedTuple):
    """How vmap calls an op, by positions of its arguments."""

    parameters: Sequence[int] = ()  # have no batch dimension: one with a batch makes it a call per sample
    per_sample: Sequence[int] = ()  # flags and seeds: one that is given makes it a call per sample


def fold(
    call: Callable[..., Any], batch_size: int, in_dims: Dims, args: Sequence[Any], rule: BatchingRule
) -> tuple[Any, Any]:
    """The outputs of a batched call and where the batch is in each, as torch's vmap rules return them.

    An activation without a batch is expanded, which copies nothing since the ops take strides. Where the rule says so
    the op is called once per sample.
    """
    is_given = any(args[i] is not None and args[i] is not False for i in rule.per_sample)
    if is_given or any(_is_batched(in_dims[i]) for i in rule.parameters):
        samples = [call(*_sample(args, in_dims, index)) for index in range(batch_size)]
        if isinstance(samples[0], Tensor):
            return torch.stack(samples), 0
        return tuple(map(torch.stack, zip(*samples, strict=True))), (0,) * len(samples[0])
    folded = [
        _to_front(arg, dim, batch_size) if isinstance(arg, Tensor) and i not in rule.parameters else arg
        for i, (arg, dim) in enumerate(zip(args, in_dims, strict=True))
    ]
    outputs = call(*folded)
    if isinstance(outputs, Tensor):
        return outputs, 0
    return outputs, tuple(None if _is_absent(output) else 0 for output in outputs)


def register_vmap(op: Any, call: Callable[..., Any], rule: BatchingRule) -> None:
    """Makes vmap of `op` the folded `call`."""

    def batch(info: Any, in_dims: Dims, *args: Any) -> tuple[Any, Any]:
        return fold(call, info.batch_size, in_dims, args, rule)

    torch.library.register_vmap(op, batch, lib=library)


def _is_batched(dim: Any) -> bool:
    return any(map(_is_batched, dim)) if isinstance(dim, list | tuple) else dim is not None


def _sample(args: Sequence[Any], in_dims: Dims, index: int) -> list[Any]:
    """The arguments of one sample; a list of tensors has a list of dimensions."""
    return [
        _sample(arg, dim, index) if isinstance(dim, list | tuple) else arg if dim is None else arg.select(dim, index)
        for arg, dim in zip(args, in_dims, strict=True)
    ]


def _to_front(tensor: Tensor, dim: int | None, batch_size: int) -> Tensor:
    return tensor.expand(batch_size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)


def _is_absent(output: Tensor) -> bool:
    """Whether it stands for an output that was not asked for; an output with the batch in front is never that."""
    return output.dim() == 1 and output.shape[0] == 0
