"""8-bit states as the core stores them (kernel_pytorch/ops/optimizer_step/optimizer_step.h), and conversion of states
from and to fp32: for checkpoints of other optimizers, not for steps, which the core takes on the codes themselves."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from ..utils.state_formats import GROUP, STORAGE, check_state, format_of_size, zero_code

__all__ = [
    "GROUP",
    "STORAGE",
    "check_state",
    "decode",
    "dynamic_map",
    "encode",
    "format_of",
    "make_correction",
    "make_state",
    "master_of",
    "zero_code",
]


def format_of(parameter: Tensor, state: str) -> str:
    """The format of a parameter's states in a group of this `state`."""
    return format_of_size(parameter.numel(), state)


def make_state(state: dict[str, Any], parameter: Tensor, name: str, form: str) -> None:
    """Zeros under `name`, and with codes their scales under `name`_scale."""
    if form == "fp32":
        state[name] = torch.zeros_like(parameter, dtype=torch.float32)
        return
    state[name] = torch.full_like(parameter, zero_code(name, form), dtype=torch.int8)
    state[f"{name}_scale"] = torch.zeros(-(-parameter.numel() // GROUP[form]), device=parameter.device)


def make_correction(parameter: Tensor, master: Tensor | None = None) -> Tensor:
    """What a bf16 parameter lacks of 24 bits of its fp32 master; zeros without one."""
    if master is None:
        return torch.zeros_like(parameter, dtype=torch.int8)
    wanted = ((master.detach().float().view(torch.int32) & 0x7FFFFFFF) + 0x80) >> 8
    had = (parameter.detach().view(torch.int16).to(torch.int32) & 0x7FFF) << 8
    return torch.empty_like(parameter, dtype=torch.int8).copy_((wanted - had).clamp(-128, 127))


def master_of(parameter: Tensor, correction: Tensor) -> Tensor:
    """The fp32 master of a bf16 parameter with its correction."""
    bits = parameter.detach().view(torch.int16).to(torch.int32) << 16
    moved = ((bits & 0x7FFFFFFF) + correction.to(torch.int32) * 256).clamp(min=0)
    return (moved | (bits & -0x80000000)).view(torch.float32)


def decode(codes: Tensor, scale: Tensor, form: str, is_square: bool) -> Tensor:
    """Codes as fp32, in the layout of the codes."""
    grouped = _grouped(codes, GROUP[form])
    if form == "compact":
        if is_square:
            values = grouped.view(torch.uint8).float() * (scale.unsqueeze(1) * (1.0 / 255.0))
            values = values * values
        else:
            compressed = grouped.float()
            values = compressed / (254.0 - compressed.abs()) * scale.unsqueeze(1)
    else:
        table = dynamic_map(not is_square).to(codes.device)
        values = table[grouped.view(torch.uint8).long()] * scale.unsqueeze(1)
    return _ungrouped(values, codes, torch.float32)


def encode(values: Tensor, form: str, is_square: bool) -> tuple[Tensor, Tensor]:
    """fp32 as codes and scales, in the layout of the values."""
    grouped = _grouped(values.detach().float(), GROUP[form])
    if form == "compact" and is_square:
        grouped = grouped.sqrt()
    scale = grouped.abs().amax(1)
    inverse = torch.where(scale >= 2.0**-126, 1.0 / scale, 0.0).unsqueeze(1)
    if form == "compact" and is_square:
        codes = torch.where(grouped > 0, (grouped * (inverse * 255.0)).clamp(min=1.0), 0.0).round().to(torch.uint8)
    elif form == "compact":
        x = grouped * inverse
        codes = (x * 254.0 * (1.0 / (1.0 + x.abs()))).round().to(torch.int8)
    else:
        table = dynamic_map(not is_square).to(values.device)
        scaled = grouped * inverse
        codes = torch.bucketize(scaled, (table[1:] + table[:-1]) / 2)
        if not is_square:
            codes = codes - ((scaled < 0) & (codes == 127)).to(codes.dtype)  # a negative number never becomes 0
        codes = codes.to(torch.uint8)
    return _ungrouped(codes.view(torch.int8), values, torch.int8), scale


@functools.cache
def dynamic_map(signed: bool) -> Tensor:
    """The 256 values of bitsandbytes' dynamic map, ascending."""
    magnitudes = []
    for i in range(7):
        parts = 2**i if signed else 2 ** (i + 1)
        magnitudes += [10.0 ** (i - 6) * (0.1 + 0.9 * (part + 0.5) / parts) for part in range(parts)]
    values = [*(-m for m in reversed(magnitudes)), 0.0, *magnitudes, 1.0] if signed else [0.0, *magnitudes, 1.0]
    return torch.tensor(values, dtype=torch.float64).float()


def _grouped(tensor: Tensor, group: int) -> Tensor:
    """Rows of one group each, in the order of memory, filled up with zeros."""
    flat = tensor.as_strided((tensor.numel(),), (1,))  # parameters fill their memory without gaps
    return torch.nn.functional.pad(flat, (0, -flat.numel() % group)).view(-1, group)


def _ungrouped(rows: Tensor, like: Tensor, dtype: torch.dtype) -> Tensor:
    result = torch.empty_like(like, dtype=dtype)
    result.as_strided((like.numel(),), (1,)).copy_(rows.reshape(-1)[: like.numel()])
    return result
