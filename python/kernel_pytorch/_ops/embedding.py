"""embedding."""

from __future__ import annotations

from torch import Tensor

from .support.declare import differentiable


def embedding(input: Tensor, weight: Tensor, padding_idx: int | None = None) -> Tensor:
    """weight[input]: rows of a table by their index, as torch.nn.functional.embedding.

    The weight's gradient is dense and summed in a fixed order: two runs give the same bits, without
    torch.use_deterministic_algorithms.

    Args:
        input: indices of any shape, int64 or int32. One outside the table raises on the CPU; on a GPU, which cannot
            stop for it without waiting, its row is NaN and the gradient ignores it.
        weight: [rows, columns], any strides; fp32, bf16, fp16 and fp64.
        padding_idx: a row whose gradient is zero; negative counts from the last.

    Returns:
        [input's shape, columns], contiguous, of weight's type.
    """
    rows = weight.shape[0]
    if padding_idx is None:
        padding_idx = -1
    else:
        if not -rows <= padding_idx < rows:
            raise ValueError(f"embedding: padding_idx is {padding_idx}, the table has {rows} rows; it must be one")
        padding_idx %= rows
    return _embedding(input, weight, rows, padding_idx)  # type: ignore[no-any-return]


_embedding = differentiable("embedding", instead="torch.nn.functional.embedding")
