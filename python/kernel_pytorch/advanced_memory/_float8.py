"""Saved activations in FP8: a byte a number, with a scale for 128. Not exact; whoever asks for it is told the error."""

from __future__ import annotations

import time

import torch
from torch import Tensor

from ..functional import quantize

_TYPES = (torch.float32, torch.bfloat16, torch.float16)
_BLOCK = 128
_WIDE = 4096  # columns of a matrix that the kernels like, where the size allows it


def code_bytes(tensor: Tensor) -> int:
    """Of the codes and scales of its storage; 0 where it cannot be coded: another type, or a part of a storage."""
    storage = tensor.untyped_storage()
    if tensor.dtype not in _TYPES or tensor.numel() * tensor.element_size() != storage.nbytes():
        return 0
    return tensor.numel() + tensor.numel() // _BLOCK * 4 if tensor.numel() % _BLOCK == 0 else 0


def _flat(tensor: Tensor) -> Tensor:
    empty = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return empty.set_(tensor.untyped_storage(), 0, (tensor.numel(),), (1,))


def encode(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """Codes and scales of all numbers of its storage, in the storage's order."""
    made = quantize(_flat(tensor).view(-1, _WIDE if tensor.numel() % _WIDE == 0 else _BLOCK), granularity="1x128")
    assert made.codes is not None
    return made.codes, made.scales


def decode(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """The numbers, in the storage's order."""
    numbers = codes.reshape(-1, _BLOCK).to(dtype)
    return numbers.mul_(scales.reshape(-1, 1)).view(-1)


def relative_error(tensor: Tensor, codes: Tensor, scales: Tensor) -> float:
    exact = _flat(tensor).float()
    size = exact.norm()
    return float((decode(codes, scales, tensor.dtype).float() - exact).norm() / size) if size > 0 else 0.0


def microseconds_per_byte(device: torch.device) -> float:
    """Of encoding and decoding, for a byte of what is coded."""
    count = (8 << 20) if device.type == "cuda" else 1 << 18
    x = torch.randn(count, dtype=torch.bfloat16, device=device)
    times = []
    for _ in range(3):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        start = time.perf_counter()
        decode(*encode(x), x.dtype)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - start)
    return min(times) * 1e6 / x.nbytes
