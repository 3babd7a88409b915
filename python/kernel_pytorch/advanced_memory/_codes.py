"""Codes of gradients: numbers to a message of bytes with one row for each process, and back. Each code is one way to
say less of a number:

    int8, int4   multiples of the largest magnitude of a block (256, 64 numbers) by 127, 7
    onebit       the sign, and the mean magnitude of a block of 256
    topk         the largest magnitudes of a row with their places

The first three are ops of the core (ops/gradient_code), which also keep what a code leaves out. A block with an
infinity or a NaN becomes NaN, so that whoever skips such steps sees it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .._ops.gradient_code import gradient_decode_, gradient_encode_

__all__ = ["CODES", "Code"]

_TILE = 256  # columns are multiples of it


class Code:
    """Number i of a message is in column i % columns of row i / columns; numbers beyond the end are zeros."""

    def padded(self, columns: int) -> int:
        """The columns that a row of so many numbers has."""
        return max(-(-columns // _TILE), 1) * _TILE

    def row_bytes(self, columns: int) -> int:
        raise NotImplementedError

    def encode(
        self, x: Tensor, rows: int, columns: int, error: Tensor | None = None, *, carries: bool = True, gain: float = 1
    ) -> Tensor:
        """Bytes [rows, row_bytes] of x [n]. With `carries`, of x + error, and what they leave out becomes the error;
        else gain times what they leave out is added to the error."""
        raise NotImplementedError

    def decode_(
        self, message: Tensor, columns: int, output: Tensor, *, mean: bool = False, adds: bool = False
    ) -> Tensor:
        """Writes the numbers, or their mean over the rows, into output [n], or adds them to it."""
        raise NotImplementedError


class BlockCode(Code):
    def __init__(self, name: str) -> None:
        self.name = name
        self.block = 64 if name == "int4" else 256
        self._bits = {"int8": 8, "int4": 4, "onebit": 1}[name]

    def row_bytes(self, columns: int) -> int:
        return columns * self._bits // 8 + 4 * (columns // self.block)

    def _parts(self, message: Tensor, columns: int) -> tuple[Tensor, Tensor]:
        size = columns * self._bits // 8
        return message[:, :size].view(torch.int8), message.view(torch.float32)[:, size // 4 :]

    def encode(
        self, x: Tensor, rows: int, columns: int, error: Tensor | None = None, *, carries: bool = True, gain: float = 1
    ) -> Tensor:
        message = torch.empty(rows, self.row_bytes(columns), dtype=torch.uint8, device=x.device)
        gradient_encode_(x, error, *self._parts(message, columns), self.name, carries, float(gain))
        return message

    def decode_(
        self, message: Tensor, columns: int, output: Tensor, *, mean: bool = False, adds: bool = False
    ) -> Tensor:
        gradient_decode_(*self._parts(message, columns), output, self.name, mean, adds)
        return output


class TopK(Code):
    def __init__(self, share: float = 0.01) -> None:
        self.share = share

    def _count(self, columns: int) -> int:
        return max(1, int(columns * self.share))

    def row_bytes(self, columns: int) -> int:
        return 8 * self._count(columns)

    def encode(
        self, x: Tensor, rows: int, columns: int, error: Tensor | None = None, *, carries: bool = True, gain: float = 1
    ) -> Tensor:
        values = torch.zeros(rows, columns, device=x.device)
        flat = values.view(-1)[: x.numel()]
        flat.copy_(x)
        if error is not None and carries:
            flat += error
        places = values.abs().topk(self._count(columns), 1).indices
        kept = values.gather(1, places)
        parts = [part.contiguous().view(torch.uint8) for part in (places.to(torch.int32), kept)]
        if error is not None:
            left = (values - torch.zeros_like(values).scatter_(1, places, kept)).view(-1)[: x.numel()]
            error.copy_((left if carries else error + gain * left).nan_to_num_(0, 0, 0))
        return torch.cat(parts, 1)

    def decode_(
        self, message: Tensor, columns: int, output: Tensor, *, mean: bool = False, adds: bool = False
    ) -> Tensor:
        places, kept = message[:, : message.shape[1] // 2], message[:, message.shape[1] // 2 :]
        rows = torch.zeros(len(message), columns, device=message.device)
        rows.scatter_(1, places.contiguous().view(torch.int32).long(), kept.contiguous().view(torch.float32))
        numbers = (rows.mean(0) if mean else rows.view(-1))[: output.numel()]
        return output.add_(numbers) if adds else output.copy_(numbers)


CODES = {name: (lambda name=name: BlockCode(name)) for name in ("int8", "int4", "onebit")} | {"topk": TopK}
