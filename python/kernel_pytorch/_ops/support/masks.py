"""What an attention mask means: the one rule that every attention layer and function reads `attention_mask` by.

Type: bool keeps where True. Floating numbers are added to the scores, with their gradient. Integers are the padding
mask of a tokenizer: 1 keeps, 0 hides. On the CPU any other integer is refused; on a GPU looking would wait for the
device, so there every nonzero integer keeps. What its dimensions mean: form_of in kernel_pytorch/_shape_rules.py.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from ..._shape_rules import Sizes as Sizes
from ..._shape_rules import fits, form_of, forms
from .autograd import transforms_active

INTEGERS = frozenset({torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64})
FLOATS = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})


def mask_options(
    what: str, attention_mask: Tensor | None, batch: int, heads: int, queries: int, keys: int
) -> dict[str, Any]:
    """The mask as an option of functional.attention: `mask` or `bias`, [batch, heads, queries, keys] or 1 for all."""
    if attention_mask is None:
        return {}
    sizes = Sizes(batch, heads, queries, keys)
    mask = _four_dimensions(what, attention_mask, sizes)
    for name, size, wanted in zip(Sizes._fields, mask.shape, sizes, strict=True):
        if not fits(size, wanted):
            raise ValueError(
                f"{what}: attention_mask has shape {list(attention_mask.shape)}: {size} {name}, there are {wanted}; "
                f"give {forms(sizes)}"
            )
    option, mask = mask_by_type(what, mask)
    return {option: mask if mask.shape[-1] == sizes.keys else mask.expand(*mask.shape[:-1], sizes.keys)}


def join_masks(
    what: str, mask: Tensor | None, bias: Tensor | None, attention_mask: Tensor | None, sizes: Sizes
) -> tuple[Tensor | None, Tensor | None]:
    """The one mask (bool) and the one bias that all of these are together; mask and bias broadcast as torch does."""
    if bias is not None and bias.dtype not in FLOATS:
        raise ValueError(
            f"{what}: bias is {bias.dtype}; give floating numbers, or a mask of bool or integers as attention_mask"
        )
    given = list(mask_options(what, attention_mask, *sizes).items())
    if mask is not None:
        given.append(mask_by_type(what, mask, "mask"))
    kept = [one for option, one in given if option == "mask"]
    added = [one for option, one in given if option == "bias"] + ([] if bias is None else [bias])
    return (
        functools.reduce(torch.logical_and, kept) if kept else None,
        functools.reduce(torch.add, added) if added else None,
    )


def mask_by_type(what: str, mask: Tensor, name: str = "attention_mask") -> tuple[str, Tensor]:
    """("mask", bool) where it says who is kept, ("bias", numbers) where it is added."""
    if mask.dtype is torch.bool:
        return "mask", mask
    if mask.dtype in FLOATS:
        return "bias", mask
    if mask.dtype not in INTEGERS:
        raise ValueError(
            f"{what}: {name} is {mask.dtype}; give bool (True keeps), floating numbers (added to the scores) or "
            "integers (1 keeps, 0 hides)"
        )
    if _can_be_read(mask):
        strange = mask[(mask != 0) & (mask != 1)]
        if strange.numel():
            raise ValueError(
                f"{what}: {name} is {mask.dtype} and holds {strange[0].item()}; integers say 1 (keep) or 0 (hide), "
                "numbers to be added to the scores are floating: give it as bool or floating"
            )
    return "mask", mask != 0


def _four_dimensions(what: str, mask: Tensor, sizes: Sizes) -> Tensor:
    form = form_of(what, tuple(mask.shape), mask.dtype in INTEGERS, sizes)
    if form == "keys":
        return mask[:, None, None, :]
    return mask[(None,) * (4 - mask.dim())]


def _can_be_read(mask: Tensor) -> bool:
    """Whether its values are at hand: on the CPU, and neither traced nor inside a transform."""
    is_plain = mask.device.type == "cpu" and type(mask) in (Tensor, torch.nn.Parameter)
    return is_plain and not torch.compiler.is_compiling() and not transforms_active()
