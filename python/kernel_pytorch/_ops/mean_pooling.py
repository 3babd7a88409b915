"""mean_pool and chunk_mean_pool."""

from __future__ import annotations

from torch import Tensor

from .support.declare import differentiable


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
        chunk_size: tokens of a chunk, at least 1.

    Returns:
        [batch, ceil(tokens / chunk_size), ..., columns]; contiguous, of x's type.
    """
    return _chunk_mean_pool(_mergeable(x, 2), chunk_size, x.shape[1] if x.dim() > 1 else 0)  # type: ignore[no-any-return]


def _mergeable(x: Tensor, leading: int) -> Tensor:
    """x, or a copy where more than one dimension between tokens and columns has a stride of its own."""
    return x.contiguous() if x.dim() > leading + 2 and not x.is_contiguous() else x


_mean_pool = differentiable("mean_pool", instead="torch.mean")
_chunk_mean_pool = differentiable("chunk_mean_pool", instead="torch.mean")
