"""A call in rehearsal while JAX traces it (kp_workspace_bytes): the op's checks, its kernels, its scratch memory.

What the op refuses raises here rather than when the program runs. On GPUs the kernels are compiled and loaded, so that
a call only launches them, and the scratch memory becomes one more result: XLA plans it and a call allocates none.
"""

from __future__ import annotations

import ctypes
import functools
import json
from collections.abc import Mapping
from typing import Any

import jax

from .. import _library
from ..utils.rehearsal import CPU, CUDA, Device, arguments_of, call_on_cpu, workspace_bytes
from . import _registration

NAME = "workspace"


@functools.cache
def _devices() -> tuple[tuple[int, int], ...]:
    """(kind, index) of the devices to rehearse on: this process's NVIDIA GPUs, as CUDA counts them, or the CPU."""
    devices = jax.local_devices()
    if devices[0].platform == "gpu" and "cuda" in devices[0].client.platform_version.lower():
        _registration.check("gpu")
        return tuple((CUDA, device.local_hardware_id) for device in devices)
    if devices[0].platform == "cpu":
        _registration.check("cpu")
    return ((CPU, 0),)


def bytes_for(op: str, tensors: tuple[Any, ...], options: tuple[tuple[str, Any], ...]) -> int:
    """The most that a call takes on any of this process's GPUs, 0 where there are none. Raises what the op refuses.

    Args:
        tensors: (name, type, shape) of arguments and results, and strides where they are not row-major; a list's
            tensors follow each other under one name.
        options: attributes by name, as the handler reads them.
    """
    generation = _library.load().kp_selection_generation
    generation.restype = ctypes.c_uint64
    return _bytes_for(generation(), op, tensors, options)


@functools.lru_cache(maxsize=4096)
def _bytes_for(generation: int, op: str, tensors: tuple[Any, ...], options: tuple[tuple[str, Any], ...]) -> int:
    """generation: of the choices of kernels, which what was measured since may change."""
    try:
        return max(workspace_bytes(device, op, tensors, options) for device in _devices())
    except _library.KernelPyTorchError:
        if _devices() == ((CPU, 0),):
            raise
        # A program for the CPU may do what a GPU does not (fp64). What is then given to a GPU raises as it runs.
        workspace_bytes((CPU, 0), op, tensors, options)
        return 0


def explained(op: str, tensors: tuple[Any, ...], options: tuple[tuple[str, Any], ...]) -> list[dict[str, Any]]:
    """What the op chooses for this call on the first of this process's devices, as kp_explain_call says it."""
    device = Device(*_devices()[0])
    arguments = arguments_of(device, tensors, options)
    count, result = ctypes.c_size_t(len(arguments)), ctypes.c_void_p()
    _library.call_plain("explain_call", device, op.encode(), arguments, count, ctypes.byref(result))
    text = ctypes.string_at(result.value or 0)
    _library.load().kp_free(result)
    explanations: list[dict[str, Any]] = json.loads(text)["explanations"]
    return explanations


def call_on_host(op: str, arrays: Mapping[str, Any], options: tuple[tuple[str, Any], ...]) -> None:
    """A call on numpy arrays while JAX traces, for what is known then; `arrays` are written in place."""
    tensors = tuple(
        (name, {"f": "fp", "i": "int"}[one.dtype.kind] + str(8 * one.itemsize), one.shape, None, one.ctypes.data)
        for name, one in arrays.items()
    )
    call_on_cpu(op, tensors, options)
