"""Attention with both products in FP8."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .._shape_rules import window_sides
from .support.casting import autocast
from .support.declare import without_gradient

_LAYOUTS = {"bhsd": True, "bshd": False}


def attention_fp8(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    causal: bool = False,
    layout: str = "bhsd",
    scale: float | None = None,
    window: int | tuple[int, int] | None = None,
    rotate: bool = False,
    return_lse: bool = False,
) -> Any:
    """Attention of operands rounded to float8_e4m3fn, 128 rows of a head to a scale; results have query's type.

    The operands are rounded and attended to as `attention` does: as exact as that leaves it, and no faster. A kernel
    with both products on Hopper's FP8 tensor cores runs where it is asked for,
    `tuning.overlay({"attention_fp8_forward": "sm90_wgmma"})`: what is there now has not been verified on a GPU. No
    gradient.

    Args:
        query: [batch, heads, queries, size]; heads are a multiple of key's heads, sizes are at most 256.
        key, value: [batch, key_heads, keys, size], values of a size of their own.
        causal: a query sees the keys up to its own place; the last query is at the last key.
        layout: "bhsd", or "bshd" with the sequence before the heads.
        scale: of the scores; None is size ** -0.5.
        window: (left, right), keeps -left <= key - query <= right, -1 is unbounded; a number is both.
        rotate: queries and keys are multiplied by one random orthogonal matrix before they are rounded (incoherent
            processing): scores stay what they are, and columns that stand out cost the others no precision.
        return_lse: also the logarithms of the sums of exponentials, fp32 [batch, heads, queries], natural.
    """
    if layout not in _LAYOUTS:
        raise ValueError(f'attention_fp8: layout is "{layout}"; it is "bhsd" or "bshd"')
    left, right = window_sides("attention_fp8", window)
    query, key, value = autocast(query, key, value)
    output, lse = _attend(query, key, value, _LAYOUTS[layout], scale, causal, left, right, rotate, return_lse)
    return (output, lse) if return_lse else output


_attend = without_gradient("attention_fp8")
