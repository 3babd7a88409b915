"""Causal attention of a long sequence segment by segment, each with the keys and values of its past that are kept.

Work is O(sequence * (segment + memory)) and memory O(segment + memory) a segment. Where the memory holds the whole
past, the result is full causal attention.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..attention.config import AttentionConfig
from ..attention.layers import FlashAttention3
from ..core._checks import check_sequences
from ..functional import attention

_PLACE = "sequence_place"  # of a segment: how many places of its sequence lie before it


class LongSequenceOptimizer:
    """Cuts sequences into segments that SegmentedAttentionMemory knows as parts of one sequence."""

    def __init__(self, max_segment_length: int = 2048) -> None:
        if max_segment_length < 1:
            raise ValueError(f"LongSequenceOptimizer: max_segment_length is {max_segment_length}; use 1 or more")
        self.max_segment_length = max_segment_length

    def segment_sequence(self, x: Tensor, dim: int = 1) -> list[Tensor]:
        """Views of x along its sequence, each of at most max_segment_length places and marked with where it begins."""
        segments = []
        for first in range(0, x.shape[dim], self.max_segment_length):
            segment = x.narrow(dim, first, min(self.max_segment_length, x.shape[dim] - first))
            setattr(segment, _PLACE, first)
            segments.append(segment)
        return segments


class SegmentState(NamedTuple):
    """What a sequence carries from one segment to the next: its last keys and values, and how long it is so far."""

    key: Tensor  # [batch, kept, key heads, size]
    value: Tensor
    place: int


class SegmentedAttentionMemory(nn.Module):
    """Causal attention of [batch, sequence, embed_dim] by segments, each with up to memory_length keys before it.

    A plain tensor is a whole sequence: it is cut into segments here, and nothing is carried into or out of the call.
    The segments of LongSequenceOptimizer.segment_sequence, given one after another, are one sequence: the keys and
    values carried between calls are those of that sequence alone, and its first segment begins anew. `stream` is the
    same with the state in and out.

    Args:
        segment_length: of the segments that a whole sequence is cut into.
        memory_length: keys before a segment that it sees; with the length of the past, attention is full and causal.
        kv_heads, bias: as in AttentionConfig. Parameters are those of FlashAttention3.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        segment_length: int = 1024,
        memory_length: int = 512,
        kv_heads: int | None = None,
        bias: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if segment_length < 1 or memory_length < 0:
            raise ValueError(
                f"SegmentedAttentionMemory: segment_length is {segment_length}, memory_length {memory_length};"
                " use at least 1 and 0"
            )
        config = AttentionConfig(embed_dim, num_heads, kv_heads=kv_heads, pattern="causal", bias=bias)
        self.attention = FlashAttention3(config, device=device, dtype=dtype)
        self.segment_length = segment_length
        self.memory_length = memory_length
        self._carried: SegmentState | None = None

    def forward(self, x: Tensor) -> Tensor:
        """The output of a whole sequence, or of the next segment of one."""
        place = getattr(x, _PLACE, None)
        if place is None:
            return self.stream(x)[0]
        state = None if place == 0 else self._carried
        reached = 0 if state is None else state.place
        if place != reached or (state is not None and state.key.shape[0] != x.shape[0]):
            of = "" if state is None else f" of {state.key.shape[0]} sequences"
            raise ValueError(
                f"SegmentedAttentionMemory: a segment of {x.shape[0]} sequences begins at place {place}; what is"
                f" carried ends at place {reached}{of}. Give segments in order, or use stream()"
            )
        output, state = self.stream(x, state)
        # Across calls no gradient flows: the graph of the segment before may be gone.
        self._carried = SegmentState(state.key.detach(), state.value.detach(), state.place)
        return output

    def reset(self) -> None:
        """Forgets what is carried between segments."""
        self._carried = None

    def stream(self, x: Tensor, state: SegmentState | None = None) -> tuple[Tensor, SegmentState]:
        """Output of the places that follow `state` (None: a sequence begins), and the state behind them.

        Gradients flow through the state; detach its tensors to cut them.
        """
        layer = self.attention
        check_sequences(self, x, layer.embed_dim, "x")
        key, value, place = (None, None, 0) if state is None else state
        outputs = []
        for segment in torch.split(x, self.segment_length, 1) if x.shape[1] else (x,):
            q, k, v = (layer._heads(project(segment)) for project in (layer.q_proj, layer.k_proj, layer.v_proj))
            key = k if key is None else torch.cat([key, k], 1)
            value = v if value is None else torch.cat([value, v], 1)
            attended = attention(q, key, value, layout="bshd", causal=True)
            outputs.append(layer.out_proj(attended.flatten(-2)))
            kept = min(self.memory_length, key.shape[1])
            key, value = key.narrow(1, key.shape[1] - kept, kept), value.narrow(1, value.shape[1] - kept, kept)
            place += segment.shape[1]
        assert key is not None and value is not None
        return torch.cat(outputs, 1), SegmentState(key, value, place)

    def extra_repr(self) -> str:
        return f"segment_length={self.segment_length}, memory_length={self.memory_length}"
