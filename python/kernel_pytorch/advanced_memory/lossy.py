"""A gradient, or any tensor, in few bits and back: the codes of `GradientCompressor`, one tensor at a time."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ._codes import CODES

__all__ = ["CompressedGradient", "LossyGradientCompression"]

_NAMES = {8: "int8", 4: "int4", 1: "onebit"}


class CompressedGradient(NamedTuple):
    """Codes and their scales as one message of bytes, and what they were made of."""

    message: Tensor  # uint8 [1, bytes]
    shape: torch.Size
    dtype: torch.dtype
    bits: int

    @property
    def ratio(self) -> float:
        """Bytes of the tensor over those of the message."""
        return self.shape.numel() * self.dtype.itemsize / max(self.message.numel(), 1)


class LossyGradientCompression:
    """Multiples of the largest magnitude of a block, or signs with a mean magnitude (`GradientCompressor` says which).

    Args:
        bits: of a number: 8, 4 or 1.
        error_feedback: adds what a code leaves out of a tensor to the next one that is given by the same key.
    """

    def __init__(self, bits: int = 8, error_feedback: bool = False) -> None:
        if bits not in _NAMES:
            raise ValueError(f"LossyGradientCompression: bits is {bits}; it must be 8, 4 or 1")
        self.bits, self.error_feedback = bits, error_feedback
        self._code = CODES[_NAMES[bits]]()
        self._errors: dict[str, Tensor] = {}

    def compress(self, gradient: Tensor, key: str = "") -> CompressedGradient:
        flat = gradient.detach().reshape(-1)
        error = None
        if self.error_feedback:
            error = self._errors.get(key)
            if error is None or error.numel() != flat.numel() or error.device != flat.device:
                error = self._errors[key] = torch.zeros(flat.numel(), device=flat.device)
        columns = self._code.padded(flat.numel())
        return CompressedGradient(self._code.encode(flat, 1, columns, error), gradient.shape, gradient.dtype, self.bits)

    def decompress(self, compressed: CompressedGradient) -> Tensor:
        """A new tensor of the gradient's shape and type."""
        if compressed.bits != self.bits:
            raise ValueError(f"LossyGradientCompression: the message has {compressed.bits} bits, this has {self.bits}")
        columns = self._code.padded(compressed.shape.numel())
        output = torch.empty(compressed.shape.numel(), dtype=compressed.dtype, device=compressed.message.device)
        return self._code.decode_(compressed.message, columns, output).view(compressed.shape)
