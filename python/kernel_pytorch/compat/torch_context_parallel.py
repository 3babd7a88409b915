"""torch's context_parallel for unmodified models, on this library's ring, zigzag, all-gather and Ulysses schedules.

    from kernel_pytorch.compat.torch_context_parallel import context_parallel, context_parallel_unshard
    with context_parallel(mesh, buffers=[tokens, labels, cos, sin], buffer_seq_dims=[1, 1, 0, 0]):
        loss(model(tokens), labels).backward()

Inside, F.scaled_dot_product_attention (and nn.MultiheadAttention, which calls it) attends to the whole sequence, of
which every rank has a part. A TorchFunctionMode of this thread sees the calls: nothing of torch is patched. Backward
runs inside; afterwards it would need buffers that have been put back, of which torch's autograd complains.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as torch_functional
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.overrides import TorchFunctionMode

from .._rebind import rebind
from ..attention.distributed import context_parallel_attention, gather_sequence, shard_sequence
from ..attention.distributed._pieces import SCHEDULES

__all__ = ["context_parallel", "context_parallel_unshard"]

_WHAT = "context_parallel"


@contextlib.contextmanager
def context_parallel(
    mesh: Any,
    *,
    buffers: Sequence[Tensor] | None = None,
    buffer_seq_dims: Sequence[int] | None = None,
    no_restore_buffers: set[Tensor] | None = None,
    schedule: str = "zigzag",
) -> Iterator[None]:
    """A context in which attention is of the sequence of all ranks, and `buffers` hold this rank's part of it.

    Args:
        mesh: a one-dimensional DeviceMesh, or a process group.
        buffers: what depends on places of the sequence: tokens, labels, positions, cos and sin, masks (along their
            queries). Cut in place on entry, put back as they were on exit.
        buffer_seq_dims: the dimension of the sequence in each of them.
        no_restore_buffers: those of them that stay cut.
        schedule: as for context_parallel_attention. The default, zigzag, gives each rank a run from both ends (torch's
            load balance): equal work where attention is causal.
    """
    buffers, dims = list(buffers or ()), list(buffer_seq_dims or ())
    kept_cut = list(no_restore_buffers or ())
    if schedule not in SCHEDULES:
        raise ValueError(f'{_WHAT}: schedule is "{schedule}"; use one of {", ".join(SCHEDULES)}')
    if len(buffers) != len(dims):
        raise ValueError(f"{_WHAT}: {len(buffers)} buffers and {len(dims)} buffer_seq_dims; give one for each")
    if not all(any(one is buffer for buffer in buffers) for one in kept_cut):
        raise ValueError(f"{_WHAT}: no_restore_buffers has a tensor that is not in buffers; add it there")
    group = _group(mesh)
    parts = [_part(buffer, dim, group, schedule, i) for i, (buffer, dim) in enumerate(zip(buffers, dims, strict=True))]
    with contextlib.ExitStack() as undo:
        for buffer, part in zip(buffers, parts, strict=True):
            if not any(one is buffer for one in kept_cut):
                whole = torch.empty(0, dtype=buffer.dtype, device=buffer.device)
                undo.callback(buffer.set_, whole.set_(buffer))  # type: ignore[call-overload]
            buffer.set_(part)  # type: ignore[call-overload]
        with _Attention(group, schedule):
            yield


def context_parallel_unshard(
    mesh: Any, buffers: Sequence[Tensor], seq_dims: Sequence[int], *, schedule: str = "zigzag"
) -> list[Tensor]:
    """The whole sequence of each tensor (outputs, say) of which every rank has a part, in order of place.

    Differentiable where every rank uses the whole in the same way (see gather_sequence).
    """
    group = _group(mesh)
    return [
        gather_sequence(tensor, dim % tensor.dim(), group=group, schedule=schedule)
        for tensor, dim in zip(buffers, seq_dims, strict=True)
    ]


def _group(mesh: Any) -> Any:
    return mesh.get_group() if hasattr(mesh, "get_group") else mesh


def _part(buffer: Tensor, dim: int, group: Any, schedule: str, index: int) -> Tensor:
    if buffer.requires_grad:
        raise ValueError(
            f"{_WHAT}: buffers[{index}] wants a gradient, which a tensor cut in place cannot have; "
            "cut it with kernel_pytorch.attention.distributed.shard_sequence"
        )
    return shard_sequence(buffer, dim % buffer.dim(), group=group, schedule=schedule).clone()


class _Attention(TorchFunctionMode):
    """Calls of torch's attention become calls over the group; what would quietly attend to a part alone raises."""

    attends_to_all_ranks = True

    def __init__(self, group: Any, schedule: str) -> None:
        super().__init__()
        self.group, self.schedule = group, schedule
        self.multi_head = rebind(
            torch_functional.multi_head_attention_forward, {torch_functional.scaled_dot_product_attention: self.attend}
        )

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch_functional.scaled_dot_product_attention:
            return self.attend(*args, **kwargs)
        if func is torch_functional.multi_head_attention_forward:
            if kwargs.get("need_weights", True):
                raise RuntimeError(
                    f"{_WHAT}: multi_head_attention_forward is asked for attention weights, which no fused attention "
                    "has; call the module with need_weights=False"
                )
            return self.multi_head(*args, **kwargs)
        if func in _OF_A_PART or getattr(func, "__name__", "") == "flex_attention":
            raise RuntimeError(
                f"{_WHAT}: {func} would attend to this rank's part of the sequence alone; call torch's "
                "scaled_dot_product_attention or kernel_pytorch.attention.distributed.context_parallel_attention; if "
                "kernel_pytorch.optimize put it there, kernel_pytorch.restore(model) first"
            )
        return func(*args, **kwargs)

    @_disable_dynamo  # a compiler cannot trace sends
    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """scaled_dot_product_attention of the whole sequence, for this rank's queries."""
        if is_causal and attn_mask is not None:
            raise RuntimeError(f"{_WHAT}: scaled_dot_product_attention has attn_mask and is_causal; give one of them")
        shape = query.shape
        query, key, value = (_with_heads(tensor) for tensor in (query, key, value))
        if query.shape[1] != key.shape[1] and not enable_gqa:
            raise RuntimeError(
                f"{_WHAT}: the query has {query.shape[1]} heads, the key {key.shape[1]}; give enable_gqa=True"
            )
        options: dict[str, Any] = {"scale": scale, "dropout_p": dropout_p}
        if is_causal:
            options.update(causal=True, causal_offset=0)
        if attn_mask is not None:
            is_bool = attn_mask.dtype is torch.bool
            options["mask" if is_bool else "bias"] = self._mask(attn_mask, len(shape), query, key)
        output: Tensor = context_parallel_attention(
            query, key, value, group=self.group, schedule=self.schedule, layout="bhsd", **options
        )
        return output.reshape(*shape[:-1], value.shape[-1])

    def _mask(self, mask: Tensor, rank: int, query: Tensor, key: Tensor) -> Tensor:
        """The mask for this rank's queries and all keys, cut from a mask of the whole."""
        members = torch.distributed.get_world_size(self.group)
        rows, keys = query.shape[2], members * key.shape[2]
        mask = mask.reshape(1, *mask.shape) if mask.dim() == 1 else mask
        if mask.shape[-1] not in (1, keys) or mask.shape[-2] not in (1, rows, members * rows):
            raise RuntimeError(
                f"{_WHAT}: attn_mask is {list(mask.shape)}, it must end with ({rows} or {members * rows}, {keys}): "
                "this rank's queries or all, and the keys of all ranks. Make it of the whole sequence, give it in "
                "buffers with its dimension of queries, or use is_causal"
            )
        if mask.shape[-2] == members * rows and members > 1:
            mask = shard_sequence(mask, mask.dim() - 2, group=self.group, schedule=self.schedule)
        return mask if mask.dim() < 3 else mask[:, None] if rank == 3 else mask.reshape(-1, *mask.shape[-3:])


_OF_A_PART = (torch.ops.kernel_pytorch.attention.default, torch.ops.kernel_pytorch.attention_forward.default)


def _with_heads(tensor: Tensor) -> Tensor:
    """[batch, heads, sequence, size] of what torch takes: none or any number of dimensions before the sequence."""
    if tensor.dim() == 3:
        return tensor[:, None]
    return tensor.reshape(-1, *tensor.shape[-3:]) if tensor.dim() > 3 else tensor[None, None]
