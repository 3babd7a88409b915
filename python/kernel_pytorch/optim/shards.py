"""Parameters that are sharded over processes (DTensor, as FSDP2 makes them): what this process has of them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def is_sharded(tensor: Tensor) -> bool:
    return hasattr(tensor, "placements")


def local(tensor: Tensor) -> Tensor:
    """This process' part, which shares its memory; a plain tensor as it is."""
    return tensor.to_local() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]


def locals_of(tensors: list[Tensor]) -> list[Tensor]:
    return [local(tensor) for tensor in tensors]


def sharded_like(part: Tensor, like: Tensor) -> Tensor:
    """`part`, wherever it is, as this process' part of a tensor that is sharded as `like`; as it is where that is not.

    DTensor.from_local would move it to the mesh's device; FSDP2 makes its own parameters of the host's memory so.
    """
    if not is_sharded(like):
        return part
    from torch.distributed.tensor import DTensor  # a second's import: only sharded parameters need it
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta  # likewise

    meta = TensorMeta(like.shape, like.stride(), part.dtype)
    spec = DTensorSpec(like.device_mesh, like.placements, tensor_meta=meta)  # type: ignore[attr-defined]
    return DTensor(part, spec, requires_grad=False)  # type: ignore[no-untyped-call]


def sharding(tensor: Tensor) -> tuple[Any, ...]:
    """What tensors must share so that norms of their parts can be summed together."""
    return (tensor.device_mesh, tuple(tensor.placements)) if is_sharded(tensor) else ()  # type: ignore[attr-defined]


def summed(square: Tensor, like: Tensor) -> Tensor:
    """A sum over this process' part, of `like`'s sharding, over all parts."""
    for dimension, placement in enumerate(getattr(like, "placements", ())):
        if placement.is_shard():
            torch.distributed.all_reduce(square, group=like.device_mesh.get_group(dimension))  # type: ignore[attr-defined]
        elif not placement.is_replicate():
            raise ValueError(f"a gradient is {placement}; redistribute it before its norm is taken")
    return square
