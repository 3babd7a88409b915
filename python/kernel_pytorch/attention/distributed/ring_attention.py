"""Ring attention as a layer: exact attention of long sequences with memory that grows as the sequence does."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from ...core._names import accepts_mask_names, accepts_names, check_known, renamed
from ._group import members_of
from .context_parallel import ContextParallelAttention, ContextParallelConfig

_NAMES = {"ring_size": "context_parallel_size"}


@accepts_names(**_NAMES)
@dataclasses.dataclass
class RingAttentionConfig(ContextParallelConfig):
    """ContextParallelConfig, and what only a ring has.

    Args:
        max_sequence_length: longer sequences raise.
        chunk_size: for one process: keys are streamed in chunks of this many; None leaves streaming to the kernel,
            whose memory beyond its inputs and outputs is that of one tile.
    """

    max_sequence_length: int = 1_000_000
    chunk_size: int | None = None


class RingAttentionLayer(ContextParallelAttention):
    """Attention of [batch, sequence, d_model] in memory of O(sequence), on one device or round a ring of them."""

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        config: RingAttentionConfig | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        group: Any = None,
    ) -> None:
        config = config or RingAttentionConfig()
        super().__init__(d_model, num_heads, config, device, dtype, group)
        self.max_sequence_length = config.max_sequence_length
        self.key_chunk = config.chunk_size

    @accepts_mask_names
    def forward(  # type: ignore[override]
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        rotary: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """[batch, sequence, d_model] -> the same shape; arguments as ContextParallelAttention's."""
        self._check_inputs(hidden_states=hidden_states)
        length = hidden_states.shape[1] * (self.parallel.context_parallel_size if self.parallel.sharded else 1)
        if length > self.max_sequence_length:
            raise ValueError(
                f"RingAttentionLayer: the sequence has {length} places, max_sequence_length is"
                f" {self.max_sequence_length}; create the layer with a larger one"
            )
        return super().forward(hidden_states, attention_mask, rotary)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, max_sequence_length={self.max_sequence_length}, chunk_size={self.key_chunk}"


def create_ring_attention(
    d_model: int,
    num_heads: int,
    max_sequence_length: int = 1_000_000,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    group: Any = None,
    **options: Any,
) -> RingAttentionLayer:
    """A RingAttentionLayer; a ring of one process, or of the members of `group`.

    Args:
        options: fields of RingAttentionConfig; ring_size is another name of context_parallel_size.
    """
    call = "create_ring_attention"
    options = renamed(call, options, _NAMES)
    known = [field.name for field in dataclasses.fields(RingAttentionConfig)]
    check_known(call, options, (*known, "ring_size", "max_sequence_length", "device", "dtype", "group"))
    options.setdefault("context_parallel_size", members_of(call, group))
    config = RingAttentionConfig(max_sequence_length=max_sequence_length, **options)
    return RingAttentionLayer(d_model, num_heads, config, device, dtype, group)
