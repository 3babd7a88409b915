"""Every op on devices that the library has no kernels for (mps, xpu, hpu, xla, privateuse1, ...).

torch sends a call to the kernel of its tensors' device. The library registers its own for cpu and cuda; `register` adds
one for every other device: a formula in torch operations where this package has one (`formula_of`), which runs on the
device itself, or else the CPU's kernels on copies (host.py). Either way the op's own checks, shapes and types hold, and
gradients are made as everywhere: a backward is an op like others. No formula is loaded before such a call.
"""

from __future__ import annotations

import functools
import importlib
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ... import _torch as _torch  # loads the library
from ..._devices import has_amd_kernels
from ..._library import KernelPyTorchError
from ..._shape_rules import Output, declared
from ...utils.rehearsal import CPU, workspace_bytes
from ..support.declared import described, empties, name_of, torch_dtype
from .host import run_on_host
from .numbers import NoFormula as NoFormula

# torch's names of the devices that a tensor of values can be on, besides cpu and cuda.
DISPATCH_KEYS = ("MPS", "XPU", "HPU", "XLA", "MTIA", "PrivateUse1")
_FILES = ("attention", "losses", "pointwise", "positions", "products", "rows")

Formula = Callable[..., Any]


@functools.cache
def formulas() -> dict[str, Formula]:
    """By the name of the op, the functions of this package's files: (arguments of the schema) -> outputs.

    They compute in fp32 (fp64 for fp64) and return what they have computed, None for an output that was not asked for;
    `run` makes types and shapes those of the declaration. One for `<op>_forward` serves `<op>` as well.
    """
    found: dict[str, Formula] = {}
    for file in _FILES:
        for name, function in vars(importlib.import_module(f"{__name__}.{file}")).items():
            found |= {name: function} if name in declared() else {}
    return found


def formula_of(op: str) -> Formula | None:
    return formulas().get(op) or formulas().get(f"{op}_forward")


def run(overload: Any, *args: Any) -> Any:
    """The op `overload`, by its formula or on the host."""
    op = overload._schema.name.split("::")[1]
    formula = formula_of(op)
    if formula is not None:
        values, outputs = _checked(op, args)
        try:
            made = formula(*args)
        except NoFormula:
            return run_on_host(overload, args)
        return _as_declared(op, values, outputs, made if isinstance(made, tuple) else (made,))
    return run_on_host(overload, args)


def _checked(op: str, args: Sequence[Any]) -> tuple[dict[str, Any], list[Output]]:
    """Arguments by name and the outputs of the call, after the op's own checks."""
    try:
        values, outputs = described(op, args)
        _check(op, values, outputs)
    except (ValueError, KernelPyTorchError) as error:
        name = op.removesuffix("_forward")
        raise RuntimeError(str(error) if name in str(error) else f"{name}: {error}") from None
    return values, outputs


def _check(op: str, values: dict[str, Any], outputs: Sequence[Output]) -> None:
    tensors: list[Any] = []
    options = []
    for argument in declared()[op]["arguments"]:
        name, value = argument["name"], values.get(argument["name"])
        if argument["kind"] in ("tensor", "tensors"):
            given = [] if value is None else [value] if isinstance(value, Tensor) else value
            tensors += [(name, name_of(one.dtype), tuple(one.shape)) for one in given]
        elif value is not None and argument["kind"] not in ("wanted", "type"):
            options.append((name, value))
    tensors += [(one.name, one.dtype, tuple(one.shape)) for one in outputs if one.shape is not None]
    _rehearse(op, tuple(tensors), tuple(options))


@functools.lru_cache(maxsize=4096)
def _rehearse(op: str, tensors: tuple[Any, ...], options: tuple[Any, ...]) -> None:
    """The call without memory on the CPU, whose kernels take every type."""
    workspace_bytes((CPU, 0), op, tensors, options)


def _as_declared(op: str, values: dict[str, Any], outputs: Sequence[Output], made: Sequence[Any]) -> Any:
    """What a formula made, in the declaration's types and shapes; an empty tensor for what was not asked for."""
    results = []
    for one, output in zip(made, outputs):
        if output.shape is None or 0 in output.shape:
            results += empties(op, values, [output])
        else:
            results.append(one.to(torch_dtype(output.dtype)).reshape(tuple(output.shape)).contiguous())
    return None if not results else results[0] if len(results) == 1 else tuple(results)


def register(library: Any) -> None:
    """Gives every op a kernel on every device of DISPATCH_KEYS; `library` keeps the registrations as long as it lives.

    A torch built for ROCm says "cuda" of AMD's GPUs, on which the library runs kernels where KERNEL_PYTORCH_AMD asks.
    """
    is_rocm = getattr(torch.version, "hip", None) is not None and not has_amd_kernels()
    for op in declared():
        packet = getattr(torch.ops.kernel_pytorch, op)
        for name in packet.overloads():
            kernel = functools.partial(run, getattr(packet, name))
            for key in DISPATCH_KEYS:
                library.impl(getattr(packet, name), kernel, key)
            if is_rocm:
                library.impl(getattr(packet, name), kernel, "CUDA", allow_override=True)


def force() -> None:
    """From now on this process computes every op on the CPU as on a device without kernels: to try a model as another
    machine would run it, also compiled. What no formula takes runs by the CPU's kernels on copies, as there."""
    if _FORCED:
        return
    library: Any = torch.library.Library("kernel_pytorch", "IMPL")  # type: ignore[no-untyped-call]
    _FORCED.append(library)
    for op in declared():
        packet = getattr(torch.ops.kernel_pytorch, op)
        for name in packet.overloads():
            overload = getattr(packet, name)
            ours = torch.library.get_kernel(overload, "CPU")
            library.impl(overload, functools.partial(_forced, overload, ours), "CPU", allow_override=True)


_FORCED: list[Any] = []  # the library, which ends its registrations when it goes
_on_host = threading.local()  # `now`: whether this thread is inside run_on_host, whose ops are the kernels' own


def _forced(overload: Any, ours: Any, *args: Any) -> Any:
    if getattr(_on_host, "now", False):
        return ours.call_boxed(torch._C.DispatchKeySet(torch._C.DispatchKey.CPU), *args)
    _on_host.now = True
    try:
        return run(overload, *args)
    finally:
        _on_host.now = False
