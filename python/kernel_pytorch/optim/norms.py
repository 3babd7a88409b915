"""The norm of all gradients, and clipping by it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from .._ops.optimizer_step import reduce_norm
from .shards import local, locals_of, sharding, summed


def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor], max_norm: float, *, error_if_nonfinite: bool = False
) -> Tensor:
    """Scales gradients in place so that the L2 norm of all of them is at most max_norm; returns the norm before.

    As torch.nn.utils.clip_grad_norm_ with norm_type=2; nothing waits for the device unless error_if_nonfinite.
    """
    if isinstance(parameters, Tensor):
        parameters = [parameters]
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if not gradients:
        return torch.zeros(())
    total = norm_of(gradients)
    if error_if_nonfinite and not bool(torch.isfinite(total)):
        raise RuntimeError(f"clip_grad_norm_: the norm of the gradients is {total.item()}; it cannot be clipped")
    factor = (max_norm / (total + 1e-6)).clamp(max=1.0)
    by_device: dict[torch.device, list[Tensor]] = {}
    for gradient in gradients:
        by_device.setdefault(gradient.device, []).append(local(gradient.detach()))
    for device, some in by_device.items():
        torch._foreach_mul_(some, factor.to(device))
    return total


def norm_of(gradients: list[Tensor]) -> Tensor:
    """The L2 norm of all elements of all tensors; of sharded ones, over all their parts."""
    alike: dict[Any, list[Tensor]] = {}
    for gradient in gradients:
        alike.setdefault((gradient.device, sharding(gradient)), []).append(gradient)
    norms = []
    for (_, shards), some in alike.items():
        norm = reduce_norm(locals_of(some))
        norms.append(summed(norm.square(), some[0]).sqrt() if shards else norm)
    if len(norms) == 1:
        return norms[0]
    total: Tensor = torch.linalg.vector_norm(torch.stack([norm.to(norms[0].device) for norm in norms]))
    return total
