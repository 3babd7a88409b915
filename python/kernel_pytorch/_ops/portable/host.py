"""An op by the CPU's kernels on copies of its tensors: for a device without kernels, where no formula takes the call.

Right for every op and option, and slow: each tensor crosses the bus. What the op writes into is copied back.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def run_on_host(overload: Any, args: tuple[Any, ...]) -> Any:
    device = next(arg.device for arg in _tensors(args))
    copies = tuple(map(_to_host, args))
    outputs = overload(*copies)
    for argument, arg, copied in zip(overload._schema.arguments, args, copies):
        if argument.alias_info is not None and argument.alias_info.is_write:
            for target, source in zip(_tensors((arg,)), _tensors((copied,))):
                target.copy_(source)
    return _to_device(outputs, device)


def _tensors(args: Any) -> list[Tensor]:
    found: list[Tensor] = []
    for arg in args:
        if isinstance(arg, Tensor):
            found.append(arg)
        elif isinstance(arg, list | tuple):
            found += _tensors(arg)
    return found


def _to_host(arg: Any) -> Any:
    if isinstance(arg, list | tuple):
        return [_to_host(item) for item in arg]
    return arg.to("cpu") if isinstance(arg, Tensor) else arg


def _to_device(outputs: Any, device: torch.device) -> Any:
    if isinstance(outputs, list | tuple):
        return tuple(_to_device(one, device) for one in outputs)
    return outputs.to(device) if isinstance(outputs, Tensor) else outputs
