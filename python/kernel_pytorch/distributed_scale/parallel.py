"""One call that puts a model on a mesh: tensor parallel, FSDP2 or DDP, around context and expert parallel layers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as distributed
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import parallelize_module
from torch.distributed.tensor.parallel.style import ParallelStyle

from ..mixture_of_experts import MoELayer
from .mesh import data_mesh


def parallelize(
    model: nn.Module,
    mesh: DeviceMesh,
    *,
    tensor_plan: Mapping[str, ParallelStyle] | None = None,
    blocks: Iterable[nn.Module] | None = None,
    mixed_precision: torch.dtype | None = None,
    reshard_after_forward: bool = True,
) -> nn.Module:
    """The model on a mesh of `create_device_mesh`; its parameters must be the same on all ranks before.

    "tensor" applies the plan. "shard" (with "replicate": in every replica) cuts parameters by FSDP2, block by block;
    "replicate" alone is a DistributedDataParallel. Members of "context" count as shards: they see other tokens, and
    their layers exchange keys (`create_context_parallel_attention(..., group=mesh.get_group("context"))`). Experts that
    ranks share (`MoELayer(..., group=mesh.get_group("shard"))`) stay where they are; their gradients, which are sums
    over the ranks' tokens, become means as all others.

    Args:
        tensor_plan: as torch.distributed.tensor.parallel.parallelize_module takes it; needed with "tensor".
        blocks: modules that are gathered one at a time; None: the elements of the outermost ModuleList.
        mixed_precision: the type of computation; parameters, gradients and sums between ranks stay in theirs.
        reshard_after_forward: whether a block's gathered parameters are dropped until its backward.

    Returns:
        The same model, or the DistributedDataParallel around it.
    """
    names = mesh.mesh_dim_names or ()
    if "tensor" in names:
        if tensor_plan is None:
            raise ValueError(
                f"parallelize: the mesh has {mesh['tensor'].size()} devices for each product and there is no "
                "tensor_plan; give one such as {'blocks.*.mlp.up_proj': ColwiseParallel(), ...}"
            )
        parallelize_module(model, mesh["tensor"], dict(tensor_plan))
    elif tensor_plan is not None:
        raise ValueError("parallelize: tensor_plan is given and the mesh has no dimension 'tensor'")
    data = data_mesh(mesh)
    if data is None:
        return model
    kept = _experts(model, data.size())
    if data.mesh_dim_names == ("replicate",):
        if mixed_precision is not None:
            raise ValueError("parallelize: replicas have no mixed_precision; use torch.autocast in the step")
        if kept:
            names_kept = [name for name, parameter in model.named_parameters() if parameter in kept]
            ignore: Any = nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model
            ignore(model, names_kept)
        return nn.parallel.DistributedDataParallel(model, process_group=data.get_group())
    options: dict[str, Any] = {"mesh": data, "reshard_after_forward": reshard_after_forward, "ignored_params": kept}
    if mixed_precision is not None:
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=mixed_precision, reduce_dtype=torch.float32)
    for block in _blocks(model) if blocks is None else blocks:
        fully_shard(block, **options)
    fully_shard(model, **options)
    return model


def _blocks(model: nn.Module) -> list[nn.Module]:
    for module in model.modules():
        if isinstance(module, nn.ModuleList):
            return list(module)
    return []


def _experts(model: nn.Module, devices: int) -> set[nn.Parameter]:
    """Weights of experts that ranks share; their gradients are sums, which are divided from now on."""
    found: set[nn.Parameter] = set()
    for module in model.modules():
        if not isinstance(module, MoELayer) or module.group is None:
            continue
        ranks = distributed.get_world_size(module.group)
        if ranks != devices:
            raise ValueError(
                f"parallelize: experts are shared by {ranks} ranks, and {devices} have their own tokens; copies of "
                "experts are not reduced yet: give MoELayer the group of all of them"
            )
        for name in ("gate_up", "down", "gate_up_bias", "down_bias"):
            parameter: nn.Parameter | None = getattr(module, name)
            if parameter is not None:
                found.add(parameter)
                parameter.register_hook(lambda gradient: gradient / devices)  # type: ignore[no-untyped-call]
    return found
