"""2:4 sparsity: sparse_compress, the compressed matrix, and the product with one."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from .activation import activation as _activate
from .matmul import matmul
from .support.autograd import wants_gradient
from .support.casting import packed_operands
from .support.declare import differentiable, without_gradient


@dataclass(frozen=True)
class Sparse24Tensor:
    """A matrix [rows, columns] of which two of each four neighbours of a row are kept, as `sparse_compress` makes it.

    Attributes:
        values: [rows, columns / 2]: what is kept, in order.
        metadata: int32 [ceil(columns / 64), rows, 2]: the places of the kept values, 32 columns a word, four bits for
            each four columns: first | second << 2.
    """

    values: Tensor
    metadata: Tensor

    @property
    def shape(self) -> torch.Size:
        return torch.Size((self.values.shape[0], self.values.shape[1] * 2))

    @property
    def dtype(self) -> torch.dtype:
        return self.values.dtype

    @property
    def nbytes(self) -> int:
        return self.values.nbytes + self.metadata.nbytes

    def to_dense(self) -> Tensor:
        """The matrix with zeros where nothing is kept."""
        return _decompress(self.values, self.metadata)  # type: ignore[no-any-return]

    def mask(self) -> Tensor:
        """True where a value is kept: bool [rows, columns]."""
        kept = torch.ones_like(self.values)
        return _decompress(kept, self.metadata) != 0  # type: ignore[no-any-return]

    def to(self, target: torch.device | str | torch.dtype) -> Sparse24Tensor:
        """On another device, or with values of another type."""
        if isinstance(target, torch.dtype):
            return replace(self, values=self.values.to(target))
        return Sparse24Tensor(self.values.to(target), self.metadata.to(target))


def sparse_compress(weight: Tensor) -> Sparse24Tensor:
    """The two values of largest magnitude of each four neighbours of a row; no gradient.

    Args:
        weight: [rows, columns], fp32, bf16 or fp16; columns a multiple of 4. Of equal magnitudes the first are kept.
    """
    if weight.dim() != 2 or weight.shape[1] % 4:
        raise ValueError(
            f"sparse_compress: weight has shape {list(weight.shape)}; it must be [rows, columns] with a multiple of 4 "
            "columns"
        )
    weight = weight.detach()
    if weight.shape[1] > 1 and weight.stride(1) != 1:
        weight = weight.contiguous()
    return Sparse24Tensor(*_compress(weight))


def sparse_matmul(
    x: Tensor, weight: Sparse24Tensor, *, bias: Tensor | None = None, activation: str | None = None
) -> Tensor:
    """activation(x @ weight.T + bias) with a 2:4 weight: only what is kept is multiplied.

    Args:
        x: [..., columns of the weight]; fp32, bf16 or fp16, under autocast its type. Gradients of x and bias exist; the
            weight has none (`precision.SparseTrainingLinear` trains one). Values of another type are converted in each
            call.
        weight: what `sparse_compress` made of [rows, columns].
        bias: [rows of the weight], of x's type or fp32.
        activation: a name that `activation` takes, or None.

    Returns:
        [..., rows of the weight] of x's type.
    """
    if not isinstance(weight, Sparse24Tensor):
        raise TypeError(f"sparse_matmul: weight is {type(weight).__name__}; give what sparse_compress makes of one")
    x, bias = packed_operands("sparse_matmul", x, weight.shape, bias)
    if activation is not None and wants_gradient(x, bias):  # the activation's own gradient needs its input
        return _activate(sparse_matmul(x, weight, bias=bias), activation)
    values = weight.values if weight.dtype is x.dtype else weight.values.to(x.dtype)
    return _product(x, values, weight.metadata, bias, activation or "identity")  # type: ignore[no-any-return]


def _gradient(grads: Any, saved: Any, wanted: Any) -> Any:
    values, metadata, bias = saved[:3]
    grad = grads[0]
    grad_x = matmul(grad, _decompress(values, metadata)) if wanted[0] else None
    grad_bias = None
    if wanted[3]:
        rows = grad.flatten(0, -2) if grad.dim() > 1 else grad[None]
        grad_bias = rows.sum(0, dtype=torch.float32).to(bias.dtype)
    return grad_x, None, None, grad_bias


_compress = without_gradient("sparse_compress")
_decompress = without_gradient("sparse_decompress")
_product = differentiable(
    "sparse_matmul",
    saves=["values", "metadata", "bias"],
    gradient=_gradient,
    instead="torch.nn.functional.linear of Sparse24Tensor.to_dense",
)
