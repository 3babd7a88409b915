"""xformers' memory_efficient_attention: [batch, sequence, heads, size] tensors and its attention biases.

The biases here are plain descriptions; xformers' own are recognised by name, so code may keep its imports.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..functional import attention

__all__ = [
    "BlockDiagonalCausalMask",
    "BlockDiagonalMask",
    "LocalAttentionFromBottomRightMask",
    "LowerTriangularFromBottomRightMask",
    "LowerTriangularMask",
    "memory_efficient_attention",
]


class LowerTriangularMask:
    """Query i sees keys up to i, both counted from the start."""


class LowerTriangularFromBottomRightMask:
    """Causal with the last query at the last key."""


@dataclasses.dataclass(frozen=True)
class LocalAttentionFromBottomRightMask:
    """The last query at the last key; window_left keys before it and window_right after it are seen."""

    window_left: int
    window_right: int


@dataclasses.dataclass(frozen=True)
class BlockDiagonalMask:
    """Sequences laid end to end in a batch of one, each seeing itself."""

    q_seqlen: Sequence[int]
    kv_seqlen: Sequence[int]
    causal: bool = False

    @classmethod
    def from_seqlens(cls, q_seqlen: Sequence[int], kv_seqlen: Sequence[int] | None = None) -> BlockDiagonalMask:
        return cls(tuple(q_seqlen), tuple(q_seqlen if kv_seqlen is None else kv_seqlen))

    def make_causal(self) -> BlockDiagonalMask:
        return BlockDiagonalCausalMask(self.q_seqlen, self.kv_seqlen)


@dataclasses.dataclass(frozen=True)
class BlockDiagonalCausalMask(BlockDiagonalMask):
    """BlockDiagonalMask whose sequences are causal, counted from their starts."""

    causal: bool = True


def memory_efficient_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Any = None,
    p: float = 0.0,
    scale: float | None = None,
    *,
    op: Any = None,
) -> Tensor:
    """query [batch, queries, heads, size] (or without heads, or with groups before them) -> query's shape.

    Args:
        attn_bias: None, a tensor that broadcasts to [batch, heads, queries, keys] (added, with its gradient), or one
            of the biases above or xformers' own of those names.
        p: dropout probability.
        op: must be None: the kernel is chosen by this library.
    """
    if op is not None:
        raise ValueError(f"memory_efficient_attention: op is {op!r}; kernels are chosen by this library, pass None")
    if query.ndim == 3:  # [batch, sequence, size]: one head
        q, k, v = (tensor.unsqueeze(2) for tensor in (query, key, value))
    elif query.ndim == 5:  # [batch, sequence, groups, heads, size], groups and heads of key expanded or equal
        q, k, v = (tensor.flatten(2, 3) for tensor in (query, key, value))
        if isinstance(attn_bias, Tensor) and attn_bias.ndim == 5:
            attn_bias = attn_bias.flatten(1, 2)
    else:
        q, k, v = query, key, value
    if isinstance(attn_bias, Tensor) and attn_bias.ndim == 3 and query.ndim == 3:
        attn_bias = attn_bias.unsqueeze(1)
    options: dict[str, Any] = {"scale": scale, "dropout_p": p}
    lengths = _sequence_lengths(attn_bias)
    if lengths is not None:
        return _attend_sequences(q, k, v, *lengths, **options).reshape(*query.shape[:-1], value.shape[-1])
    output: Tensor = attention(q, k, v, layout="bshd", **options, **_bias_options(attn_bias))
    return output.reshape(*query.shape[:-1], value.shape[-1])


def _bias_options(bias: Any) -> dict[str, Any]:
    if bias is None:
        return {}
    if isinstance(bias, Tensor):
        return {"bias": bias}
    name = type(bias).__name__
    if name == "LowerTriangularMask":
        return {"causal": True, "causal_offset": 0}
    if name == "LowerTriangularFromBottomRightMask":
        return {"causal": True}
    if name == "LocalAttentionFromBottomRightMask":
        return {"window": (bias.window_left, bias.window_right)}
    raise ValueError(
        f"memory_efficient_attention: attn_bias is a {name}; give a tensor, one of {', '.join(__all__[:-1])},"
        " or use kernel_pytorch.functional.attention"
    )


def _sequence_lengths(bias: Any) -> tuple[Sequence[int], Sequence[int], bool] | None:
    """Lengths of queries and keys of a block-diagonal bias, ours or xformers', and whether it is causal."""
    name = type(bias).__name__
    if name not in ("BlockDiagonalMask", "BlockDiagonalCausalMask"):
        return None
    if isinstance(bias, BlockDiagonalMask):
        return bias.q_seqlen, bias.kv_seqlen, bias.causal
    return _differences(bias.q_seqinfo.seqstart_py), _differences(bias.k_seqinfo.seqstart_py), "Causal" in name


def _differences(starts: Sequence[int]) -> list[int]:
    return [end - start for start, end in itertools.pairwise(starts)]


def _attend_sequences(
    q: Tensor, k: Tensor, v: Tensor, q_lengths: Sequence[int], k_lengths: Sequence[int], causal: bool, **options: Any
) -> Tensor:
    if q.shape[0] != 1:
        raise ValueError(
            f"memory_efficient_attention: a block-diagonal bias needs a batch of 1, query has shape {list(q.shape)};"
            " lay the sequences end to end"
        )
    return attention(  # type: ignore[no-any-return]
        q.squeeze(0),
        k.squeeze(0),
        v.squeeze(0),
        cu_seqlens_q=_offsets(q_lengths, q.device),
        cu_seqlens_k=_offsets(k_lengths, q.device),
        max_seqlen_q=max(q_lengths, default=0),
        max_seqlen_k=max(k_lengths, default=0),
        causal=causal,
        causal_offset=0 if causal else None,
        **options,
    )


def _offsets(lengths: Sequence[int], device: torch.device) -> Tensor:
    return torch.tensor(list(itertools.accumulate(lengths, initial=0)), dtype=torch.int32, device=device)
