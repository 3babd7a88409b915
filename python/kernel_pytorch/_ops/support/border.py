"""What torch may pass that no kernel sees: tensors without memory (meta, fake), and views that negate on reading.

A call with a meta or fake tensor ends in a shape function, whatever its other tensors are. So a shape function is the
place to refuse a parameter left on meta beside real tensors: its outputs would be real and uninitialised. The adapter
(kernel_pytorch/torch/op.h) refuses CPU beside CUDA tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from .. import portable

# It keeps its registrations as long as it lives.
library: Any = torch.library.Library("kernel_pytorch", "IMPL")  # type: ignore[no-untyped-call]
portable.register(library)


def register_shapes(overload: Any, shapes: Callable[..., Any], name: str | None) -> None:
    """Makes `shapes` the op's shape function, for calls whose tensors are all on one device."""
    arguments = [argument.name for argument in overload._schema.arguments]

    def of_one_device(*args: Any) -> Any:
        _check_one_device(name or public_name(overload), arguments, args)
        return shapes(*args)

    register: Any = torch.library.register_fake
    register(overload, of_one_device, lib=library)


def pass_autograd(overload: Any) -> None:
    """Makes autograd pass over an op that its nodes call: torch would look whether a gradient is lost."""
    library.impl(overload, torch.library.fallthrough_kernel, "Autograd")


def refuse_lazy_writes(overload: Any, written: Sequence[int], name: str | None) -> None:
    """Makes the op refuse to write into a view that stands for negated or conjugated memory.

    Tensors that are only read are resolved, as torch does for ops that return their results.
    """
    arguments = [argument.name for argument in overload._schema.arguments]

    def resolved(*args: Any) -> Any:
        for path, tensor in _tensors([arguments[i] for i in written], [args[i] for i in written]):
            if tensor.is_neg() or tensor.is_conj():
                view, cure = ("negative", "neg") if tensor.is_neg() else ("conjugate", "conj")
                raise RuntimeError(
                    f"{name or public_name(overload)}: {path} is a {view} view, which the op would write into; "
                    f"call resolve_{cure}() on it first"
                )
        return overload(*map(_resolve, args))

    for key in ("Negative", "Conjugate"):
        library.impl(overload, resolved, key)


def public_name(overload: Any) -> str:
    """What errors call the op, as the adapter does (torch/schema.h)."""
    name: str = overload._schema.name.split("::")[1]
    backward = name.endswith("_backward")
    return name.removesuffix("_backward").removesuffix("_forward") + (" backward" if backward else "")


def _check_one_device(name: str, arguments: Sequence[str], args: Sequence[Any]) -> None:
    first = None
    for path, tensor in _tensors(arguments, args):
        if first is None:
            first = path, tensor.device
        elif tensor.device != first[1]:
            raise RuntimeError(
                f"{name}: {path} is on {tensor.device}, {first[0]} is on {first[1]}; move all tensors to one device "
                "(a tensor on meta has no values)"
            )


def _tensors(arguments: Sequence[str], args: Sequence[Any]) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a call and what they are called. Arguments at their defaults may be missing at the end."""
    for argument, arg in zip(arguments, args, strict=False):
        if isinstance(arg, Tensor):
            yield argument, arg
        elif isinstance(arg, list | tuple):
            yield from ((f"{argument}[{i}]", item) for i, item in enumerate(arg) if isinstance(item, Tensor))


def _resolve(arg: Any) -> Any:
    if isinstance(arg, list | tuple):
        return [_resolve(item) for item in arg]
    return arg.resolve_neg().resolve_conj() if isinstance(arg, Tensor) else arg
