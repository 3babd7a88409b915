"""Where a module's weights lie, by which a graph knows whether it may still be replayed."""

from __future__ import annotations

from typing import Any

from torch import nn

__all__ = ["Addresses"]


class Addresses:
    """Where a module's parameters and buffers lie. The modules' own dictionaries are read, so that a new Parameter in
    an old place is seen as well as an old one whose storage moved."""

    def __init__(self, module: nn.Module) -> None:
        self._places: list[tuple[dict[str, Any], str, int]] = []
        for part in module.modules():
            for table in (part._parameters, part._buffers):
                for name, tensor in table.items():
                    if tensor is not None:
                        self._places.append((table, name, tensor.data_ptr()))

    def hold(self) -> bool:
        try:
            return all(table[name].data_ptr() == address for table, name, address in self._places)
        except (KeyError, AttributeError):  # taken away, or set to None
            return False
