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
import numpy as np

from .. import _library
from . import _registration

NAME = "workspace"

_TYPES = ("fp32", "fp64", "bf16", "fp16", "e4m3", "e5m2", "int8", "int32", "int64", "bool")  # by their kp_dtype
_TENSOR, _TENSORS, _NUMBER, _INTEGER, _FLAG, _TEXT = range(6)  # kp_kind
_CPU, _CUDA = 0, 1


class _Device(ctypes.Structure):
    _fields_ = (("kind", ctypes.c_int32), ("index", ctypes.c_int32))


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("dtype", ctypes.c_int32),
        ("device", _Device),
        ("rank", ctypes.c_int32),
        ("sizes", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
    )


class _Value(ctypes.Union):
    _fields_ = (
        ("tensors", ctypes.POINTER(_Tensor)),
        ("number", ctypes.c_double),
        ("integer", ctypes.c_int64),
        ("text", ctypes.c_char_p),
    )


class _Argument(ctypes.Structure):
    _fields_ = (("name", ctypes.c_char_p), ("kind", ctypes.c_int32), ("count", ctypes.c_size_t), ("value", _Value))


@functools.cache
def _devices() -> tuple[tuple[int, int], ...]:
    """(kind, index) of the devices to rehearse on: this process's NVIDIA GPUs, as CUDA counts them, or the CPU."""
    devices = jax.local_devices()
    if devices[0].platform == "gpu" and "cuda" in devices[0].client.platform_version.lower():
        _registration.check("gpu")
        return tuple((_CUDA, device.local_hardware_id) for device in devices)
    if devices[0].platform == "cpu":
        _registration.check("cpu")
    return ((_CPU, 0),)


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
        return max(_bytes_on(device, op, tensors, options) for device in _devices())
    except _library.KernelPyTorchError:
        if _devices() == ((_CPU, 0),):
            raise
        # A program for the CPU may do what a GPU does not (fp64). What is then given to a GPU raises as it runs.
        _bytes_on((_CPU, 0), op, tensors, options)
        return 0


def _bytes_on(device: tuple[int, int], op: str, tensors: tuple[Any, ...], options: tuple[tuple[str, Any], ...]) -> int:
    arguments = arguments_of(_Device(*device), tensors, options)
    count, found = ctypes.c_size_t(len(arguments)), ctypes.c_size_t()
    _library.call_plain("workspace_bytes", _Device(*device), op.encode(), arguments, count, ctypes.byref(found))
    return found.value


def explained(op: str, tensors: tuple[Any, ...], options: tuple[tuple[str, Any], ...]) -> list[dict[str, Any]]:
    """What the op chooses for this call on the first of this process's devices, as kp_explain_call says it."""
    device = _Device(*_devices()[0])
    arguments = arguments_of(device, tensors, options)
    count, result = ctypes.c_size_t(len(arguments)), ctypes.c_void_p()
    _library.call_plain("explain_call", device, op.encode(), arguments, count, ctypes.byref(result))
    text = ctypes.string_at(result.value or 0)
    _library.load().kp_free(result)
    explanations: list[dict[str, Any]] = json.loads(text)["explanations"]
    return explanations


def call_on_host(op: str, arrays: Mapping[str, Any], options: tuple[tuple[str, Any], ...]) -> None:
    """A call on numpy arrays while JAX traces, for what is known then; `arrays` are written in place."""
    device = _Device(_CPU, 0)
    tensors = tuple(
        (name, {"f": "fp", "i": "int"}[one.dtype.kind] + str(8 * one.itemsize), one.shape)
        for name, one in arrays.items()
    )
    arguments = arguments_of(device, tensors, options)
    for argument, array in zip(arguments, arrays.values()):
        argument.value.tensors[0].data = array.ctypes.data
    context = ctypes.c_void_p()
    _library.call_plain("context_create", device, None, ctypes.byref(context))
    try:
        _library.call_plain("call", context, op.encode(), arguments, ctypes.c_size_t(len(arguments)))
    finally:
        _library.load().kp_context_destroy(context)


def arguments_of(device: _Device, tensors: tuple[Any, ...], options: tuple[tuple[str, Any], ...]) -> Any:
    """kp_argument[]: tensors without memory, and options."""
    made: list[_Argument] = []
    begin = 0
    while begin < len(tensors):
        name = tensors[begin][0]
        end = begin + 1
        while end < len(tensors) and tensors[end][0] == name:
            end += 1
        views = (_Tensor * (end - begin))(*(_tensor(device, *one[1:]) for one in tensors[begin:end]))
        value = _Value(tensors=ctypes.cast(views, ctypes.POINTER(_Tensor)))
        made.append(_Argument(name.encode(), _TENSORS if end - begin > 1 else _TENSOR, end - begin, value))
        begin = end
    made += [_option(name, value) for name, value in options]
    return (_Argument * len(made))(*made)


def _tensor(device: _Device, dtype: str, shape: tuple[int, ...], strides: tuple[int, ...] | None = None) -> _Tensor:
    sizes, steps = (
        None if one is None else ctypes.cast((ctypes.c_int64 * len(one))(*one), ctypes.POINTER(ctypes.c_int64))
        for one in (shape, strides)
    )
    return _Tensor(None, _TYPES.index(dtype), device, len(shape), sizes, steps)


def _option(name: str, value: Any) -> _Argument:
    if isinstance(value, np.bool_):
        return _Argument(name.encode(), _FLAG, 0, _Value(integer=int(value)))
    if isinstance(value, np.int64):
        return _Argument(name.encode(), _INTEGER, 0, _Value(integer=int(value)))
    if isinstance(value, np.float64):
        return _Argument(name.encode(), _NUMBER, 0, _Value(number=float(value)))
    return _Argument(name.encode(), _TEXT, 0, _Value(text=str(value).encode()))
