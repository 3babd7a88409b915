"""Meshes of devices with the dimensions that `parallelize` knows."""

from __future__ import annotations

import math

import torch
import torch.distributed as distributed
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

# The outermost first: neighbours in the last exchange most, so they are neighbours in a node.
DIMENSIONS = ("replicate", "shard", "context", "tensor")


def create_device_mesh(
    *, replicate: int = 1, shard: int = -1, context: int = 1, tensor: int = 1, device: str | None = None
) -> DeviceMesh:
    """All processes of torch.distributed as a mesh whose dimensions are named.

    Dimensions of one device are left out; where all are, "shard" stays. `mesh.get_group("context")` is the group for
    attention layers, `mesh.get_group("shard")` one for experts.

    Args:
        replicate: devices that hold whole copies (of what the others cut).
        shard: devices that cut parameters, gradients and states among them and have their own samples (FSDP2).
        context: devices that share each sequence (attention.distributed).
        tensor: devices that share each product.
        device: "cuda" or "cpu"; None: "cuda" where there is one.

    One size may be -1: what the others leave.
    """
    sizes = dict(zip(DIMENSIONS, (replicate, shard, context, tensor), strict=True))
    if not distributed.is_initialized():
        raise RuntimeError(
            "create_device_mesh: torch.distributed is not initialised; start the program by torchrun and call "
            "torch.distributed.init_process_group first"
        )
    world = distributed.get_world_size()
    open_sizes = [name for name, size in sizes.items() if size == -1]
    if len(open_sizes) > 1 or any(size < 1 and size != -1 for size in sizes.values()):
        raise ValueError(f"create_device_mesh: sizes are {sizes}; they must be positive, and one of them may be -1")
    known = math.prod(size for size in sizes.values() if size != -1)
    if world % known or (not open_sizes and known != world):
        raise ValueError(
            f"create_device_mesh: sizes are {sizes}, whose product is {known}; the {world} processes must be "
            + ("a multiple of it" if open_sizes else "as many")
        )
    for name in open_sizes:
        sizes[name] = world // known
    kept = {name: size for name, size in sizes.items() if size > 1} or {"shard": 1}
    kind = device or ("cuda" if torch.cuda.is_available() else "cpu")
    return init_device_mesh(kind, tuple(kept.values()), mesh_dim_names=tuple(kept))


def data_mesh(mesh: DeviceMesh) -> DeviceMesh | None:
    """The part of the mesh whose devices have their own tokens: replicate, and shard and context as one dimension.

    Members of a context hold the same parameters and other tokens, so their gradients are reduced as those of shards.
    None where there is only "tensor".
    """
    names = tuple(mesh.mesh_dim_names or ())
    inner = tuple(name for name in ("shard", "context") if name in names)
    if len(inner) == 2:
        joined = mesh[inner]._flatten("shard_context")
        return mesh["replicate", "shard_context"] if "replicate" in names else joined
    kept = ("replicate", *inner) if "replicate" in names else inner
    return mesh[kept] if kept else None
