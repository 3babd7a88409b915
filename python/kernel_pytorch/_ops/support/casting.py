"""Casts by role: what autocast means for a norm. Activations keep their type, fp32 parameters stay fp32."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

MaybeTensor = TypeVar("MaybeTensor", Tensor, None, "Tensor | None")  # what returns a tensor for a tensor, None for None
_PRECISIONS = ("full", "tf32", "bf16", "bf16x3")
_WIDTHS = {torch.bfloat16: 2, torch.float16: 2, torch.float32: 4, torch.float64: 8}


def parameter_for(x: Tensor, parameter: MaybeTensor) -> MaybeTensor:
    """A weight or bias, if there is one, for x: a narrower one is widened to x's type, fp32 stays.

    What remains unequal is left to the op, which says what is wrong.
    """
    if parameter is None or parameter.dtype is x.dtype:
        return parameter
    return parameter.to(x.dtype) if _WIDTHS.get(parameter.dtype, 8) < _WIDTHS.get(x.dtype, 0) else parameter


def same_type(first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """Both in the wider of their types (fp32 for bf16 with fp16)."""
    dtype = torch.promote_types(first.dtype, second.dtype)
    return first.to(dtype), second.to(dtype)


def wide_first(x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
    """The two of a sum, as the ops take them: of one type, or fp32 before a 16-bit one."""
    if residual.dtype is torch.float32 and x.dtype in (torch.bfloat16, torch.float16):
        return residual, x
    if x.dtype is torch.float32 and residual.dtype in (torch.bfloat16, torch.float16):
        return x, residual
    return same_type(x, residual)


def statistics_dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype is torch.float64 else torch.float32


def product_dtype(x: Tensor) -> torch.dtype:
    """The type in which a product with x is computed: autocast's where that is on."""
    return _autocast_dtype(x) or x.dtype


def autocast(*tensors: Tensor) -> Sequence[Tensor]:
    """What a product's operands are under torch.autocast: its type, fp64 aside."""
    kind = tensors[0].device.type  # as in _autocast_dtype, less a call in every product
    dtype = torch.get_autocast_dtype(kind) if kind != "meta" and torch.is_autocast_enabled(kind) else None
    if dtype is None:
        return tensors
    return [tensor if tensor.dtype is torch.float64 else tensor.to(dtype) for tensor in tensors]


def packed_operands(
    op: str, x: Tensor, weight_shape: Sequence[int], bias: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """x and bias of a product with a packed weight: x as autocast wants it, bias of its type or fp32."""
    (x,) = autocast(x)
    if x.dim() == 0 or x.shape[-1] != weight_shape[1]:
        raise ValueError(
            f"{op}: x has shape {list(x.shape)}, the weight has {list(weight_shape)}; their last sizes must be equal"
        )
    if bias is not None and bias.dtype not in (x.dtype, torch.float32):
        bias = bias.to(x.dtype)
    return x, bias


def is_autocast(x: Tensor) -> bool:
    return _autocast_dtype(x) is not None


def _autocast_dtype(x: Tensor) -> torch.dtype | None:
    """autocast's type where that is on for x's device; meta has no autocast, and torch raises where it is asked."""
    kind = x.device.type
    if kind == "meta" or not torch.is_autocast_enabled(kind):
        return None
    return torch.get_autocast_dtype(kind)


def check_dtype(op: str, argument: str, dtype: Any) -> None:
    """Raises where `dtype` is no type of torch: as a number it would fail inside torch, without a name."""
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"{op}: {argument} is {dtype!r}; it must be a torch.dtype such as torch.bfloat16, or None")


def torch_allows_tf32() -> bool:
    """Whether torch's own products of fp32 on a GPU may be of tf32; torch.compile compiles again where that changes."""
    return bool(torch.backends.cuda.matmul.fp32_precision == "tf32")


# What torch.compiler.assume_constant_result sets; the decorator itself would import the compiler, a second.
torch_allows_tf32._dynamo_marked_constant = True  # type: ignore[attr-defined]


def product_precision(op: str, precision: str | None, x: Tensor) -> str:
    """That of products with x: of None tf32 for fp32 on a GPU where torch's own products may be of it, else full."""
    if precision is None:
        return "tf32" if x.is_cuda and x.dtype is torch.float32 and torch_allows_tf32() else "full"
    if precision not in _PRECISIONS:
        raise ValueError(f'{op}: precision is "{precision}"; it is one of {", ".join(_PRECISIONS)}')
    return precision
