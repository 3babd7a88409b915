"""Calls of the C interface by name: kp_argument[] of tensors that have shapes alone and the call's rehearsal, or of
tensors in memory and the call.

What the op refuses is refused in a rehearsal with the op's own sentence, and nothing is computed.
"""

from __future__ import annotations

import ctypes
from typing import Any

from .. import _library

_TYPES = ("fp32", "fp64", "bf16", "fp16", "e4m3", "e5m2", "int8", "int32", "int64", "bool")  # by their kp_dtype
_TENSOR, _TENSORS, _NUMBER, _INTEGER, _FLAG, _TEXT = range(6)  # kp_kind
CPU, CUDA = 0, 1


class Device(ctypes.Structure):
    _fields_ = (("kind", ctypes.c_int32), ("index", ctypes.c_int32))


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("dtype", ctypes.c_int32),
        ("device", Device),
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


def workspace_bytes(
    device: tuple[int, int], op: str, tensors: tuple[Any, ...], options: tuple[tuple[str, Any], ...]
) -> int:
    """Scratch memory of the call on the device (kind, index). Raises what the op refuses.

    Args:
        tensors: (name, type, shape) of arguments and results, and strides where they are not row-major; a list's
            tensors follow each other under one name.
        options: by name; numbers, flags and texts.
    """
    arguments = arguments_of(Device(*device), tensors, options)
    count, found = ctypes.c_size_t(len(arguments)), ctypes.c_size_t()
    _library.call_plain("workspace_bytes", Device(*device), op.encode(), arguments, count, ctypes.byref(found))
    return found.value


def call_on_cpu(op: str, tensors: tuple[Any, ...], options: tuple[tuple[str, Any], ...]) -> None:
    """The call itself, by the CPU's kernels; of each tensor (name, type, shape, strides or None, address)."""
    device = Device(CPU, 0)
    arguments, context = arguments_of(device, tensors, options), ctypes.c_void_p()
    _library.call_plain("context_create", device, None, ctypes.byref(context))
    try:
        _library.call_plain("call", context, op.encode(), arguments, ctypes.c_size_t(len(arguments)))
    finally:
        _library.load().kp_context_destroy(context)


def arguments_of(device: Device, tensors: tuple[Any, ...], options: tuple[tuple[str, Any], ...]) -> Any:
    """kp_argument[]: tensors as workspace_bytes takes them, with addresses as a fifth word where they have memory; and
    options."""
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


def _tensor(
    device: Device, dtype: str, shape: tuple[int, ...], strides: tuple[int, ...] | None = None, data: int | None = None
) -> _Tensor:
    sizes, steps = (
        None if one is None else ctypes.cast((ctypes.c_int64 * len(one))(*one), ctypes.POINTER(ctypes.c_int64))
        for one in (shape, strides)
    )
    return _Tensor(data, _TYPES.index(dtype), device, len(shape), sizes, steps)


def _option(name: str, value: Any) -> _Argument:
    value = value.item() if hasattr(value, "item") else value  # numpy's
    if isinstance(value, bool):
        return _Argument(name.encode(), _FLAG, 0, _Value(integer=int(value)))
    if isinstance(value, int):
        return _Argument(name.encode(), _INTEGER, 0, _Value(integer=value))
    if isinstance(value, float):
        return _Argument(name.encode(), _NUMBER, 0, _Value(number=value))
    return _Argument(name.encode(), _TEXT, 0, _Value(text=str(value).encode()))
