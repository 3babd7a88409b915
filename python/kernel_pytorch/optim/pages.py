"""States in large pages on a CPU: a step reads and writes four streams or more, and hardware stops to fetch ahead at
the end of every page."""

from __future__ import annotations

import ctypes
import sys
from typing import Any

import torch
from torch import Tensor

_PAGE = 2 << 20
_MADV_HUGEPAGE = 14


def zeros_like(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Zeros with the tensor's shape and strides, in large pages where they are large and the system has such pages."""
    zeros = torch.zeros_like(tensor, dtype=dtype)
    storage: Any = zeros.untyped_storage() if type(zeros) is Tensor and zeros.device.type == "cpu" else None
    if storage is not None and storage.nbytes() >= 2 * _PAGE and sys.platform.startswith("linux"):
        # Nothing of it has been touched yet. Whether the system follows is its choice: nothing depends on it.
        begin, end = -(-storage.data_ptr() // _PAGE), (storage.data_ptr() + storage.nbytes()) // _PAGE
        size = ctypes.c_size_t((end - begin) * _PAGE)
        ctypes.CDLL(None).madvise(ctypes.c_void_p(begin * _PAGE), size, _MADV_HUGEPAGE)
    return zeros
