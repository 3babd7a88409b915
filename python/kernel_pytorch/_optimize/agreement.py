"""Ranks that share a model decide alike: what is timed, and for how long, is the first rank's word.

A model with DTensors (tensor parallel, FSDP2) exchanges tensors whenever it runs, so that every rank has to run it as
often as the others, with the same parts replaced. All of them call `optimize`; without DTensors nothing is exchanged.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

_devices: list[torch.device] = []  # of the messages, while a model of several ranks is optimised


@contextmanager
def among_ranks(model: nn.Module) -> Iterator[None]:
    """Inside, `agreed` and `anyone` ask all ranks, if the model is theirs."""
    meshes = [(p.device_mesh, p.device) for p in model.parameters() if hasattr(p, "device_mesh")]
    shared = [device for mesh, device in meshes if mesh.size() > 1]
    _devices.extend(shared[:1])
    try:
        yield
    finally:
        del _devices[: len(shared[:1])]


@contextmanager
def alone() -> Iterator[None]:
    """Inside, a rank decides for itself: for what only some ranks may do, as they have done it before."""
    held = list(_devices)
    _devices.clear()
    try:
        yield
    finally:
        _devices.extend(held)


def is_shared() -> bool:
    """Whether the model that is being optimised is one of several ranks."""
    return bool(_devices)


def agreed(value: float) -> float:
    """The first rank's value."""
    if not _devices:
        return value
    message = torch.tensor([value], dtype=torch.float64, device=_devices[0])
    torch.distributed.broadcast(message, 0)
    return float(message)


def anyone(reason: str | None) -> str | None:
    """A reason, if any rank has one."""
    if not _devices:
        return reason
    message = torch.tensor([reason is not None], dtype=torch.float64, device=_devices[0])
    torch.distributed.all_reduce(message)
    return reason if reason is not None or not float(message) else "another rank has a difference"
