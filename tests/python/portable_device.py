"""A device of its own, made of the CPU in Python, and every op of the library on it: run by test_portable.py.

Its tensors say that they are on `toy`, torch's place for devices that it does not know. torch's own ops run on the
CPU's values inside; ours go to what is registered for such a device.
"""

from __future__ import annotations

from typing import Any

import torch
from op_samples import clone, map_tensors, op_names, samples, tensor_at, tensor_paths
from torch import Tensor
from torch.utils import _pytree, backend_registration
from torch.utils._python_dispatch import TorchDispatchMode


class Toy(Tensor):
    values_on_cpu: Tensor

    @staticmethod
    def __new__(cls, values: Tensor) -> Toy:
        made: Any = torch.Tensor._make_wrapper_subclass(
            cls, values.shape, strides=values.stride(), dtype=values.dtype, device="toy:0"
        )
        made.values_on_cpu = values
        return made  # type: ignore[no-any-return]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "kernel_pytorch":
            with Factories():
                return func.redispatch(torch._C.DispatchKeySet(torch._C.DispatchKey.PrivateUse1), *args)
        kwargs = kwargs or {}
        leaves = any(isinstance(value, torch.device) and value.type == "cpu" for value in (*args, *kwargs.values()))
        outputs = func(*unwrapped(args), **{**unwrapped(kwargs), **({"device": "cpu"} if "device" in kwargs else {})})
        writes = (
            bool(func._schema.arguments)
            and func._schema.arguments[0].alias_info is not None
            and func._schema.arguments[0].alias_info.is_write
        )
        return args[0] if writes else outputs if leaves else wrapped(outputs)


class Factories(TorchDispatchMode):
    """torch.arange(..., device="toy") and its like, and copies from the CPU."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "aten" and str(kwargs.get("device")).startswith("toy") and Toy not in types:
            return wrapped(func(*args, **{**kwargs, "device": "cpu"}))
        return func(*args, **kwargs)


def wrapped(tree: Any) -> Any:
    return _pytree.tree_map_only(Tensor, Toy, tree)


def unwrapped(tree: Any) -> Any:
    return _pytree.tree_map_only(Toy, lambda tensor: tensor.values_on_cpu, tree)


def same(found: Tensor, expected: Tensor, what: str) -> None:
    assert isinstance(found, Toy), what
    values = found.values_on_cpu
    if values.element_size() == 1:  # codes: torch compares none of them within bounds
        values, expected = values.float(), expected.float()
    torch.testing.assert_close(values, expected, rtol=2e-5, atol=2e-5, equal_nan=True, msg=lambda m: f"{what}: {m}")


def check_samples(drawn: dict[str, list[Any]]) -> None:
    for op in op_names():
        for sample in drawn[op]:
            if not list(tensor_paths(sample)):
                continue
            ours, overload = map_tensors(sample, clone), getattr(torch.ops.kernel_pytorch, op).default
            theirs = map_tensors(sample, lambda tensor: wrapped(clone(tensor)))
            expected, found = _pytree.tree_leaves(overload(*ours)), _pytree.tree_leaves(overload(*theirs))
            for one, other in zip(found, expected, strict=True):
                if other is not None:
                    same(one, other, op)
            for path in tensor_paths(ours):
                same(tensor_at(theirs, path), tensor_at(ours, path), op)


def main() -> None:
    drawn = samples()  # before there is a device whose generator torch would ask
    backend_registration._setup_privateuseone_for_python_backend("toy")
    with Factories():
        check_samples(drawn)
    print(f"{len(op_names())} ops")


if __name__ == "__main__":
    main()
