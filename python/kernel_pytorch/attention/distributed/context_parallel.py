"""Attention layers of a sequence that a process group holds in parts: projections around context_parallel_attention."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as distributed
from torch import Tensor

from ...functional import rope
from ..config import AttentionConfig
from ..layers import FlashAttention3
from ._pieces import SCHEDULES
from .functional import context_parallel_attention, gather_sequence, shard_sequence
from .plan import plan_context_parallel


@dataclasses.dataclass
class ContextParallelConfig:
    """How a layer's sequence lies on the members of a group.

    Args:
        context_parallel_size: members; 1 is this process alone.
        schedule: "ring", "zigzag", "allgather" or "ulysses" (see context_parallel_attention), or "auto":
            plan_context_parallel chooses by the sequence; where `sharded`, who cuts must know: zigzag where causal,
            else ring.
        causal: whether a place sees those before it and itself only.
        sharded: whether the layer gets and returns this member's part of the sequence (what shard_sequence gives) or,
            replicated on all members, the whole.
        kv_heads, bias, soft_cap, sliding_window_size, alibi, attention_dropout: as in AttentionConfig.
    """

    context_parallel_size: int = 1
    schedule: str = "auto"
    causal: bool = True
    sharded: bool = False
    kv_heads: int | None = None
    bias: bool = False
    soft_cap: float | None = None
    sliding_window_size: int | None = None
    alibi: bool = False
    attention_dropout: float = 0.0

    def __post_init__(self) -> None:
        if self.schedule == "auto" and self.sharded:
            self.schedule = "zigzag" if self.causal else "ring"
        if self.schedule not in ("auto", *SCHEDULES):
            raise ValueError(f"schedule is {self.schedule!r}; use auto or one of {', '.join(SCHEDULES)}")
        if self.context_parallel_size < 1:
            raise ValueError(f"context_parallel_size is {self.context_parallel_size}; use 1 or more")

    def attention_config(self, d_model: int, num_heads: int) -> AttentionConfig:
        pattern = "causal" if self.causal else "full"
        if self.sliding_window_size is not None:
            pattern = "sliding_window" if self.causal else "local"
        return AttentionConfig(
            d_model,
            num_heads,
            kv_heads=self.kv_heads,
            pattern=pattern,
            sliding_window_size=self.sliding_window_size,
            soft_cap=self.soft_cap,
            alibi=self.alibi,
            attention_dropout=self.attention_dropout,
            bias=self.bias,
        )


class ContextParallelAttention(FlashAttention3):
    """Multi-head attention of [batch, sequence, d_model] whose sequence is spread over the members of a group.

    Parameters are those of FlashAttention3, the same on every member; their gradients are of this member's part of the
    sequence, to be summed (or averaged, as the loss is) over the group: DDP and FSDP2 do that.

    Args:
        group: a process group of config.context_parallel_size members; None for one process.
    """

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        config: ContextParallelConfig | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        group: Any = None,
    ) -> None:
        parallel = config or ContextParallelConfig()
        members = 1 if group is None else distributed.get_world_size(group)
        if members != parallel.context_parallel_size:
            raise ValueError(
                f"{type(self).__name__}: context_parallel_size is {parallel.context_parallel_size}, the group has"
                f" {members} members; they must be equal"
            )
        super().__init__(parallel.attention_config(d_model, num_heads), device, dtype)
        self.parallel = parallel
        self.group = None if members == 1 else group
        self.key_chunk: int | None = None

    def forward(  # type: ignore[override]
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        rotary: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """[batch, sequence, d_model] -> the same shape: this member's part where config.sharded, else the whole.

        Args:
            attention_mask: [batch, all keys], True for real tokens, or what broadcasts to [batch, heads, queries, all
                keys]: True where a query sees a key, or a number added to the score. Queries are those of the input.
            rotary: cos and sin [places, size] of the input's places, as RotaryPositionalEncoding gives them.
        """
        x, mask = hidden_states, attention_mask
        if mask is not None and mask.dim() == 2:
            mask = mask[:, None, None, :].to(torch.bool)
        schedule = self._schedule(x, mask)

        def cut(tensor: Tensor, dim: int) -> Tensor:
            return shard_sequence(tensor, dim, group=self.group, schedule=schedule)

        if not self.parallel.sharded:
            x = cut(x, 1)
            mask = mask if mask is None or mask.shape[-2] == 1 else cut(mask, mask.dim() - 2)
            rotary = rotary if rotary is None else (cut(rotary[0], -2), cut(rotary[1], -2))
        q, k, v = (self._heads(projection(x)) for projection in (self.q_proj, self.k_proj, self.v_proj))
        if rotary is not None:
            q, k = rope(q, k, *rotary)
        options = self._options(q, k, mask, None)
        attended = context_parallel_attention(
            q, k, v, group=self.group, schedule=schedule, key_chunk=self.key_chunk, **options
        )
        output: Tensor = self.out_proj(attended.flatten(-2))
        if self.parallel.sharded:
            return output
        return gather_sequence(output, 1, group=self.group, schedule=schedule)

    def _schedule(self, x: Tensor, mask: Tensor | None) -> str:
        parallel, config = self.parallel, self.config
        if parallel.schedule != "auto":
            return parallel.schedule
        if self.group is None:
            return "ring"
        plan = plan_context_parallel(
            parallel.context_parallel_size,
            x.shape[1],
            config.num_heads,
            config.head_dim or 1,
            key_heads=config.kv_heads,
            batch=x.shape[0],
            causal=config.causal,
            window=-1 if config.sliding_window_size is None else config.sliding_window_size,
            backward=torch.is_grad_enabled() and self.training,
            dtype=x.dtype,
            device=x.device,
        )
        has_rows = mask is not None and mask.shape[-2] != 1
        has_dropout = self.training and config.attention_dropout > 0
        return plan.best_of(SCHEDULES[:3] if has_rows or has_dropout else SCHEDULES)  # what ulysses refuses

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, members={self.parallel.context_parallel_size}, {self.parallel.schedule}"


def create_context_parallel_attention(
    d_model: int,
    num_heads: int,
    context_parallel_size: int = 1,
    device_mesh: Any = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    group: Any = None,
    **options: Any,
) -> ContextParallelAttention:
    """A ContextParallelAttention of `context_parallel_size` processes.

    Args:
        device_mesh: who they are: a one-dimensional torch DeviceMesh, or a device for each member, in order of rank. Or
            give `group`. With neither, all processes of torch.distributed, whose number must be context_parallel_size.
        options: fields of ContextParallelConfig.
    """
    config = ContextParallelConfig(context_parallel_size, **options)
    if isinstance(device_mesh, Sequence):
        if len(device_mesh) != context_parallel_size:
            raise ValueError(
                f"create_context_parallel_attention: device_mesh has {len(device_mesh)} devices,"
                f" context_parallel_size is {context_parallel_size}; give one for each"
            )
        rank = distributed.get_rank(group) if context_parallel_size > 1 else 0
        device = device_mesh[rank] if device is None else device
    elif device_mesh is not None:
        group = device_mesh.get_group()
    if group is None and context_parallel_size > 1:
        if not distributed.is_initialized():
            raise RuntimeError(
                f"create_context_parallel_attention: {context_parallel_size} processes are wanted and torch.distributed"
                " is not initialised; start them with torchrun and call init_process_group"
            )
        group = distributed.group.WORLD
    return ContextParallelAttention(d_model, num_heads, config, device, dtype, group)
