"""mean_pool and chunk_mean_pool for torch: shapes and gradients. The kernels are C++ (kernel_pytorch/torch/ops/
mean_pooling.cpp); how a call reaches them is in _declare.py.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ._declare import backward, differentiable


def mean_pool(x: Tensor, cu_seqlens: Tensor | None = None) -> Tensor:
    """The mean of whole sequences.

    Args:
        x: [batch, tokens, ..., columns], or with cu_seqlens packed as [tokens, ..., columns]; any strides.
        cu_seqlens: [sequences + 1], int32 or int64, on x's device: sequence i is tokens cu_seqlens[i] up to
            cu_seqlens[i + 1]. It is not read on the host, so that nothing waits. Ends that do not ascend within the
            tokens raise on the CPU, and with KERNEL_PYTORCH_CHECK=1 on a GPU, where they are clamped otherwise.

    Returns:
        [batch, ..., columns], or [sequences, ..., columns]; contiguous, of x's type. An empty sequence has mean 0.
    """
    if cu_seqlens is None:
        return _mean_pool(_mergeable(x, 2), None, x.shape[1] if x.dim() > 1 else 0)  # type: ignore[no-any-return]
    return _mean_pool(_mergeable(x, 1), cu_seqlens, x.shape[0] if x.dim() > 0 else 0)  # type: ignore[no-any-return]


def chunk_mean_pool(x: Tensor, chunk_size: int) -> Tensor:
    """The means of chunks of chunk_size tokens; the last is divided by its own length.

    Args:
        x: [batch, tokens, ..., columns], any strides.

    Returns:
        [batch, ceil(tokens / chunk_size), ..., columns]; contiguous, of x's type.
    """
    return _chunk_mean_pool(_mergeable(x, 2), chunk_size, x.shape[1] if x.dim() > 1 else 0)  # type: ignore[no-any-return]


def _mergeable(x: Tensor, leading: int) -> Tensor:
    """x, or a copy where more than one dimension between tokens and columns has a stride of its own."""
    return x.contiguous() if x.dim() > leading + 2 and not x.is_contiguous() else x


def _shapes(x: Tensor, offsets: Tensor | None, _: Any) -> Tensor:
    if offsets is None:
        return x.new_empty((x.shape[0], *x.shape[2:]))
    return x.new_empty((offsets.shape[0] - 1, *x.shape[1:]))


def _backward_shapes(grad_output: Tensor, offsets: Tensor | None, tokens: int) -> Tensor:
    if offsets is None:
        return grad_output.new_empty((grad_output.shape[0], tokens, *grad_output.shape[1:]))
    return grad_output.new_empty((tokens, *grad_output.shape[1:]))


def _gradient(grads: Any, saved: Any, wanted: Any) -> Any:
    return _backward(grads[0], *saved), None


def _chunk_shapes(x: Tensor, chunk_size: int, _: Any) -> Tensor:
    return x.new_empty((x.shape[0], -(-x.shape[1] // chunk_size), *x.shape[2:]))


def _chunk_backward_shapes(grad_output: Tensor, chunk_size: int, tokens: int) -> Tensor:
    return grad_output.new_empty((grad_output.shape[0], tokens, *grad_output.shape[2:]))


def _chunk_gradient(grads: Any, saved: Any, wanted: Any) -> Any:
    return (_chunk_backward(grads[0], *saved),)


# Tokens are not the last but one dimension: vmap cannot fold its batch in front and calls once per sample instead.
_backward = backward("mean_pool", shapes=_backward_shapes, parameters=["grad_output", "offsets"], instead="torch.mean")
_mean_pool = differentiable(
    "mean_pool",
    shapes=_shapes,
    saves=["offsets", "tokens"],
    gradient=_gradient,
    parameters=["x", "offsets"],
    instead="torch.mean",
)
_chunk_backward = backward(
    "chunk_mean_pool", shapes=_chunk_backward_shapes, parameters=["grad_output"], instead="torch.mean"
)
_chunk_mean_pool = differentiable(
    "chunk_mean_pool",
    shapes=_chunk_shapes,
    saves=["chunk_size", "tokens"],
    gradient=_chunk_gradient,
    parameters=["x"],
    instead="torch.mean",
)
