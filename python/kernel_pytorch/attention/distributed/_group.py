"""The process group that a layer holds: shared by copies of the layer, and never part of a file."""

from __future__ import annotations

from typing import Any, NoReturn

import torch.distributed as distributed


def members_of(what: str, group: Any) -> int:
    """How many processes a group has; None is this one alone."""
    if group is None:
        return 1
    if not distributed.is_available() or not distributed.is_initialized():
        raise RuntimeError(
            f"{what}: a group is given and torch.distributed is not initialised; start the processes with torchrun and"
            " call torch.distributed.init_process_group"
        )
    return distributed.get_world_size(group)


class Group:
    """A process group, or None, as an attribute of a module that is copied."""

    def __init__(self, processes: Any) -> None:
        self.processes = processes

    def __deepcopy__(self, memo: Any) -> Group:
        return self

    def __reduce__(self) -> Any:
        if self.processes is None:
            return Group, (None,)
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise TypeError(
            "a layer of a process group cannot be pickled: the group is of running processes. Save its state_dict() and"
            " create the layer again where the group is"
        )
