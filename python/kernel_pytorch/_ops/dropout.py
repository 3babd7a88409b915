"""dropout."""

from __future__ import annotations

from torch import Tensor

from .support.declare import differentiable
from .support.seed import seed_for


def dropout(x: Tensor, p: float = 0.5, training: bool = True, *, seed: Tensor | None = None) -> Tensor:
    """x with each element zeroed with probability p and the others divided by 1 - p; x itself where not training.

    Args:
        x: [..., columns], any strides; fp32, bf16, fp16 and fp64.
        p: between 0 and 1, in steps of 1/65536.
        seed: int64[2] on x's device, the seed and the offset: the same mask for the same seed, on every device. None
            draws one from torch's generator.
    """
    if not training or p == 0.0:
        return x
    if x.dim() == 0:
        return dropout(x[None], p, seed=seed)[0]
    return _dropout(x, seed_for(x, seed), p)  # type: ignore[no-any-return]


_dropout = differentiable("dropout", instead="torch.nn.functional.dropout")
