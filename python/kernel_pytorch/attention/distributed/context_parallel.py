"""Attention layers of a sequence that a process group holds in parts: projections around context_parallel_attention."""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as distributed
from torch import Tensor

from ..._ops.support.masks import Sizes, mask_options
from ...core._names import accepts_mask_names, accepts_names, check_known
from ...functional import rope
from ..config import AttentionConfig
from ..layers import FlashAttention3
from ._group import Group, members_of
from ._pieces import SCHEDULES
from .functional import context_parallel_attention, gather_sequence, shard_sequence
from .plan import plan_context_parallel


@accepts_names(cp_size="context_parallel_size")
@dataclasses.dataclass
class ContextParallelConfig:
    """How a layer's sequence lies on the members of a group.

    Args:
        context_parallel_size: members; 1 is this process alone.
        schedule: "ring", "zigzag", "allgather" or "ulysses" (see context_parallel_attention), or "auto":
            plan_context_parallel chooses by the sequence; where `sharded`, who cuts must know: zigzag where causal,
            else ring.
        causal: whether a place sees those before it and itself only; not by default, as in every attention layer.
        sharded: whether the layer gets and returns this member's part of the sequence (what shard_sequence gives) or,
            replicated on all members, the whole.
        kv_heads, bias, soft_cap, sliding_window_size, alibi, attention_dropout: as in AttentionConfig.
    """

    context_parallel_size: int = 1
    schedule: str = "auto"
    causal: bool = False
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
        return AttentionConfig(
            d_model,
            num_heads,
            kv_heads=self.kv_heads,
            causal=self.causal,
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

    Without torch.distributed a layer of more than one member computes the whole on one device, which gives the same
    result, and says so once in a warning.

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
        name, size = type(self).__name__, parallel.context_parallel_size
        members = members_of(name, group)
        if members != size and not _falls_back(name, parallel, group):
            raise ValueError(
                f"{name}: context_parallel_size is {size}, the group has {members} members; give "
                f"context_parallel_size={members}, or a group of {size} (torch.distributed.new_group)"
            )
        super().__init__(parallel.attention_config(d_model, num_heads), device=device, dtype=dtype)
        self.parallel = parallel
        self._group = Group(None if members == 1 else group)
        self.key_chunk: int | None = None

    @property
    def group(self) -> Any:
        """The process group, None where one process computes everything."""
        return self._group.processes

    @accepts_mask_names
    def forward(  # type: ignore[override]
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        rotary: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """[batch, sequence, d_model] -> the same shape: this member's part where config.sharded, else the whole.

        Args:
            attention_mask: as FlashAttention3's, of the input's queries and all keys of the sequence, in order:
                bool (True keeps), integers (1 keeps, 0 hides) or floating numbers (added to the scores).
            rotary: cos and sin [places, size] of the input's places, as RotaryPositionalEncoding gives them.
        """
        x = hidden_states
        self._check_inputs(hidden_states=x)
        members = 1 if self.group is None else self.parallel.context_parallel_size
        keys = x.shape[1] * members if self.parallel.sharded else x.shape[1]
        sizes = Sizes(x.shape[0], self.config.num_heads, x.shape[1], keys)
        masks = mask_options(type(self).__name__, attention_mask, *sizes)
        schedule = self._schedule(x, any(mask.shape[-2] != 1 for mask in masks.values()))

        def cut(tensor: Tensor, dim: int) -> Tensor:
            return shard_sequence(tensor, dim, group=self.group, schedule=schedule)

        if not self.parallel.sharded:
            x = cut(x, 1)
            masks = {name: mask if mask.shape[-2] == 1 else cut(mask, 2) for name, mask in masks.items()}
            rotary = rotary if rotary is None else (cut(rotary[0], -2), cut(rotary[1], -2))
        q, k, v = (self._heads(projection(x)) for projection in (self.q_proj, self.k_proj, self.v_proj))
        if rotary is not None:
            q, k = rope(q, k, *rotary)
        options = self._options(q, k, None, None) | masks
        if self.group is None and self.key_chunk is None:
            attended = self._attention(q, k, v, **options)
        else:
            attended = context_parallel_attention(
                q, k, v, group=self.group, schedule=schedule, key_chunk=self.key_chunk, **options
            )
        output: Tensor = self.out_proj(attended.flatten(-2))
        if self.parallel.sharded:
            return output
        return gather_sequence(output, 1, group=self.group, schedule=schedule)

    def _schedule(self, x: Tensor, mask_has_rows: bool) -> str:
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
        has_dropout = self.training and config.attention_dropout > 0
        return plan.best_of(SCHEDULES[:3] if mask_has_rows or has_dropout else SCHEDULES)  # what ulysses refuses

    def extra_repr(self) -> str:
        parallel = self.parallel
        parts = f"context_parallel_size={parallel.context_parallel_size}, schedule={parallel.schedule}"
        return f"{super().extra_repr()}, {parts}, sharded={parallel.sharded}, processes={members_of('', self.group)}"


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
    """A ContextParallelAttention of `context_parallel_size` processes; without torch.distributed, one process for all.

    Args:
        device_mesh: who they are: a one-dimensional torch DeviceMesh, or a device for each member, in order of rank. Or
            give `group`. With neither, all processes of torch.distributed, whose number must be context_parallel_size.
            One process takes the first device of a list.
        options: fields of ContextParallelConfig.
    """
    call = "create_context_parallel_attention"
    check_known(call, options, (*FIELDS[1:], "device_mesh", "device", "dtype", "group"))
    config = ContextParallelConfig(context_parallel_size, **options)
    if isinstance(device_mesh, Sequence) and not isinstance(device_mesh, str):
        if len(device_mesh) != context_parallel_size:
            raise ValueError(
                f"{call}: device_mesh has {len(device_mesh)} devices, context_parallel_size is {context_parallel_size};"
                " give one for each"
            )
        rank = distributed.get_rank(group) if context_parallel_size > 1 and distributed.is_initialized() else 0
        device = device_mesh[rank] if device is None else device
    elif device_mesh is not None:
        if not hasattr(device_mesh, "get_group"):
            raise TypeError(f"{call}: device_mesh is {device_mesh!r}; give a torch DeviceMesh, or a list of devices")
        group = device_mesh.get_group()
    if group is None and context_parallel_size > 1 and distributed.is_initialized():
        group = distributed.group.WORLD
    return ContextParallelAttention(d_model, num_heads, config, device, dtype, group)


FIELDS = tuple(field.name for field in dataclasses.fields(ContextParallelConfig))


def _falls_back(layer: str, parallel: ContextParallelConfig, group: Any) -> bool:
    """Whether one process computes what several were asked for: where torch.distributed has not been started."""
    size = parallel.context_parallel_size
    if group is not None or distributed.is_initialized():
        return False
    if parallel.sharded:
        raise RuntimeError(
            f"{layer}: sharded=True with context_parallel_size {size}, and torch.distributed is not initialised: no"
            " other process holds the other parts. Start the processes with torchrun and call init_process_group, or"
            " use sharded=False"
        )
    _warn_of_fallback(layer, size)
    return True


@functools.cache  # once a process
def _warn_of_fallback(layer: str, size: int) -> None:
    warnings.warn(
        f"{layer}: context_parallel_size is {size} and torch.distributed is not initialised; one process computes the"
        " whole sequence on one device, with the same result. Start the processes with torchrun and call"
        " init_process_group to spread it",
        stacklevel=4,
    )
