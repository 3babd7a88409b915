"""attention over a part of the keys, added to what other parts gave: what rings, streams and shards are made of.

The kernels merge in fp32 (kernel_pytorch/ops/attention/attention.h, "Parts"), so any split gives what one call gives.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .attention import attention_options
from .support.casting import statistics_dtype
from .support.declare import without_gradient


def attention_part_(
    output: Tensor,
    lse: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    first_query: int = 0,
    first_key: int = 0,
    **options: Any,
) -> None:
    """Adds to `output` and `lse` what these keys give. Without a gradient of its own: see attention_part_backward_.

    Args:
        output: fp32 (fp64 for fp64), the shape of attention's; not read where lse is -inf.
        lse: fp32 (fp64), contiguous [batch, heads, queries]; -inf everywhere before the first part.
        query, key, value: parts of the whole, as `attention` takes them; not packed.
        first_query, first_key: their places in the whole. causal, window and alibi_slopes then need causal_offset, keys
            - queries of the whole; dropout, score_mod and mask_mod count as the whole does. bias, mask, segment ids and
            key_lengths are those of the part, key_lengths less first_key.
        options: those of `attention`. Give sinks to one part.
    """
    with torch.no_grad():
        part(query, key, value, first_query, first_key, *attention_options(query, key, **options), output, lse)


def attention_part_backward_(
    grad_query: Tensor,
    grad_key: Tensor,
    grad_value: Tensor,
    grad_output: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    lse: Tensor,
    grad_lse: Tensor | None = None,
    *,
    first_query: int = 0,
    first_key: int = 0,
    writes_keys: bool = False,
    wants_bias: bool = False,
    wants_sinks: bool = False,
    wants_captured: int = 0,
    **options: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """Adds the part's gradients to grad_query, grad_key and grad_value (fp32), from output and lse of the whole.

    Args:
        output: of the query's type; lse, grad_lse: as of attention_part_.
        writes_keys: grad_key and grad_value hold nothing yet and are written.
        wants_captured: a bit for each captured tensor.

    Returns:
        The part's gradients of bias, sinks and captured tensors (one row), fp32, empty where not wanted.
    """
    with torch.no_grad():
        return part_backward(  # type: ignore[no-any-return]
            grad_output, query, key, value, output, lse, grad_lse, wants_captured, first_query, first_key, writes_keys,
            *attention_options(query, key, **options), grad_query, grad_key, grad_value, wants_bias, wants_sinks,
        )  # fmt: skip


def empty_parts(query: Tensor, value: Tensor, layout: str = "bhsd") -> tuple[Tensor, Tensor]:
    """Output and lse before the first part."""
    dtype = statistics_dtype(query)
    output = query.new_empty((*query.shape[:-1], value.shape[-1]), dtype=dtype)
    batch, one, other, _ = query.shape
    rows = (batch, one, other) if layout == "bhsd" else (batch, other, one)
    return output, query.new_full(rows, float("-inf"), dtype=dtype)


# The ops themselves, on AttentionOptions.
part = without_gradient("attention_part_")
part_backward = without_gradient("attention_part_backward_")
