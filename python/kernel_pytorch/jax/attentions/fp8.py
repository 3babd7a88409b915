"""Attention with both products in FP8. Forward only."""

from __future__ import annotations

from typing import Any

import jax

from ..._shape_rules import window_sides
from .._call import call

Array = jax.Array
_LAYOUTS = {"bhsd": True, "bshd": False}


def attention_fp8(
    query: Array,
    key: Array,
    value: Array,
    *,
    causal: bool = False,
    layout: str = "bhsd",
    scale: float | None = None,
    window: int | tuple[int, int] | None = None,
    rotate: bool = False,
    return_lse: bool = False,
) -> Any:
    """Attention of operands rounded to float8_e4m3fn; arguments as in `functional.attention_fp8`. No gradient.

    Args:
        query: [batch, heads, queries, size].
        key, value: [batch, key_heads, keys, size], values of a size of their own.
        layout: "bhsd", or "bshd" with the sequence before the heads.
        window: (left, right), -1 is unbounded; a number is both.
        rotate: queries and keys are multiplied by one random orthogonal matrix before they are rounded.
        return_lse: also fp32 [batch, heads, queries].
    """
    if layout not in _LAYOUTS:
        raise ValueError(f'attention_fp8: layout is "{layout}"; it is "bhsd" or "bshd"')
    left, right = window_sides("attention_fp8", window)
    tensors = {"query": jax.lax.stop_gradient(query), "key": key, "value": value}
    options = {
        "heads_first": _LAYOUTS[layout],
        "scale": scale,
        "causal": causal,
        "window_left": left,
        "window_right": right,
        "rotate": rotate,
    }
    made = call("attention_fp8", tensors, options, wanted=("return_lse",) if return_lse else ())
    return (made["output"], made["lse"]) if return_lse else made["output"]
