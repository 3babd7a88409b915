"""Codes of gradients: fp32 rows to bytes of a fixed number and back. Each code is one way to say less of a number:

    int8, int4   multiples of the largest magnitude of a block (256, 64 numbers) by 127, 7
    onebit       the sign, and the mean magnitude of a block of 256
    topk         the largest magnitudes of a row with their places

A block with an infinity or a NaN becomes NaN, so that whoever skips such steps sees it.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["CODES", "Code"]


class Code:
    """Encodes rows [rows, columns] of fp32, whose columns are a multiple of `block`."""

    block = 1

    def encode(self, x: Tensor) -> Tensor:
        """Bytes [rows, n]."""
        raise NotImplementedError

    def decode(self, code: Tensor, columns: int) -> Tensor:
        raise NotImplementedError

    def padded(self, columns: int) -> int:
        return -(-columns // self.block) * self.block


def _bytes(*parts: Tensor) -> Tensor:
    return torch.cat([part.contiguous().view(torch.uint8).flatten(1) for part in parts], 1)


def _floats(code: Tensor, count: int) -> Tensor:
    """The last `count` fp32 of each row, which need not be aligned."""
    return code[:, code.shape[1] - 4 * count :].contiguous().view(torch.float32)


class _Steps(Code):
    """Nearest multiples of a block's largest magnitude."""

    def __init__(self, block: int, most: int) -> None:
        self.block, self._most = block, most

    def _split(self, x: Tensor) -> tuple[Tensor, Tensor]:
        blocks = x.view(len(x), -1, self.block)
        scale = blocks.abs().amax(-1) / self._most
        inverse = torch.where(scale > 0, 1 / scale, 0)
        return (blocks * inverse[..., None]).round_().clamp_(-self._most, self._most).flatten(1), scale

    def _join(self, steps: Tensor, scale: Tensor) -> Tensor:
        return (steps.view(len(steps), -1, self.block) * scale[..., None]).flatten(1)


class Int8(_Steps):
    def __init__(self) -> None:
        super().__init__(256, 127)

    def encode(self, x: Tensor) -> Tensor:
        steps, scale = self._split(x)
        return _bytes(steps.nan_to_num_(0).to(torch.int8), scale)

    def decode(self, code: Tensor, columns: int) -> Tensor:
        return self._join(code[:, :columns].view(torch.int8).float(), _floats(code, columns // self.block))


class Int4(_Steps):
    def __init__(self) -> None:
        super().__init__(64, 7)

    def encode(self, x: Tensor) -> Tensor:
        steps, scale = self._split(x)
        both = (steps.nan_to_num_(0) + 8).to(torch.uint8).view(len(x), -1, 2)
        return _bytes(both[..., 0] | both[..., 1] << 4, scale)

    def decode(self, code: Tensor, columns: int) -> Tensor:
        both = code[:, : columns // 2]
        steps = torch.stack([both & 15, both >> 4], -1).flatten(1).float() - 8
        return self._join(steps, _floats(code, columns // self.block))


class OneBit(Code):
    block = 256

    def encode(self, x: Tensor) -> Tensor:
        scale = x.view(len(x), -1, self.block).abs().mean(-1)
        places = torch.arange(8, dtype=torch.uint8, device=x.device)
        signs = ((x >= 0).to(torch.uint8).view(len(x), -1, 8) << places).sum(-1, dtype=torch.uint8)
        return _bytes(signs, scale)

    def decode(self, code: Tensor, columns: int) -> Tensor:
        places = torch.arange(8, dtype=torch.uint8, device=code.device)
        signs = (code[:, : columns // 8, None] >> places & 1).flatten(1).float() * 2 - 1
        scale = _floats(code, columns // self.block)
        return (signs.view(len(code), -1, self.block) * scale[..., None]).flatten(1)


class TopK(Code):
    def __init__(self, share: float = 0.01) -> None:
        self.share = share

    def _count(self, columns: int) -> int:
        return max(1, int(columns * self.share))

    def encode(self, x: Tensor) -> Tensor:
        places = x.abs().topk(self._count(x.shape[1]), 1).indices
        return _bytes(places.to(torch.int32), x.gather(1, places))

    def decode(self, code: Tensor, columns: int) -> Tensor:
        count = self._count(columns)
        places = code[:, : 4 * count].contiguous().view(torch.int32).long()
        return torch.zeros(len(code), columns, device=code.device).scatter_(1, places, _floats(code, count))


CODES = {"int8": Int8, "int4": Int4, "onebit": OneBit, "topk": TopK}
