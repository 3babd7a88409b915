"""matmul: casts, broadcasting, gradients. A gradient of a product is a product, so that it has gradients of its own."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .support.casting import autocast, product_precision, same_type
from .support.declare import differentiable, without_gradient


def matmul(a: Tensor, b: Tensor, *, precision: str | None = None) -> Tensor:
    """a @ b, summed in fp32 and rounded once.

    Args:
        a: [..., m, k], or a vector [k]. Any strides; transposed views are not copied. fp32, bf16, fp16 and fp64;
            of two types the wider is taken.
        b: [..., k, n], or a vector [k]; leading sizes broadcast, as torch.matmul's.
        precision: of fp32 products: "full" is right to fp32's rounding, "bf16" rounds both to bf16 first, "bf16x3" adds
            three products of bf16 halves (errors near fp32's), "tf32" rounds both to 11 bits, on a GPU. None is "tf32"
            on a GPU where torch.backends.cuda.matmul.fp32_precision is, else "full". Gradients are taken alike.

    Returns:
        [..., m, n], contiguous. Under autocast in its type, as torch.matmul.
    """
    a, b = autocast(a, b)
    if a.dtype is not b.dtype:
        a, b = same_type(a, b)
    precision = product_precision("matmul", precision, a)
    if a.dim() == 2 and b.dim() == 2:
        return _matmul(a, b, precision)  # type: ignore[no-any-return]
    if a.dim() == 0 or b.dim() == 0:
        raise ValueError(f"matmul: a has {a.dim()} dimensions, b has {b.dim()}; both need at least one")
    if b.dim() == 1:
        return matmul(a, b[:, None], precision=precision).squeeze(-1)
    if a.dim() == 1:
        return matmul(a[None], b, precision=precision).squeeze(-2)
    if b.dim() == 2:  # one product of all rows
        return _matmul(a.flatten(0, -2), b, precision).reshape(*a.shape[:-1], b.shape[-1])  # type: ignore[no-any-return]
    try:
        leading = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])  # type: ignore[no-untyped-call]
    except RuntimeError:
        raise ValueError(
            f"matmul: a has shape {list(a.shape)}, b has {list(b.shape)}; the sizes before the last two must broadcast"
        ) from None
    return _matmul(a.expand(*leading, *a.shape[-2:]), b.expand(*leading, *b.shape[-2:]), precision)  # type: ignore[no-any-return]


def _gradient(grads: Any, saved: Any, wanted: Any) -> Any:
    a, b, precision = saved
    return (
        _matmul(grads[0], b.mT, precision) if wanted[0] else None,
        _matmul(a.mT, grads[0], precision) if wanted[1] else None,
    )


_matmul = differentiable("matmul", saves=["a", "b", "precision"], gradient=_gradient, instead="torch.matmul")
add_product_ = without_gradient("matmul_add_")
