"""Padding tensors to a bucket's sizes and back, and the masks that tell a module which positions are real."""

from __future__ import annotations

import enum
import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["MaskArgument", "PaddingStrategy", "copy_padded", "find_mask_argument", "pad", "unpad"]

Sizes = Mapping[int, int]  # dimension -> size


class PaddingStrategy(enum.Enum):
    """What stands behind the real positions. Masked modules do not care; zeros are the cheapest."""

    ZEROS = "zeros"
    REFLECTION = "reflection"
    REPLICATION = "replication"
    CIRCULAR = "circular"
    ADAPTIVE = "adaptive"  # zeros for numbers, repeats of the last entry for integers, which may be indices


@dataclass(frozen=True)
class MaskArgument:
    """The argument that tells a module what is padding: its name and meaning.

    `meaning` is "keep" (nonzero: real, as Hugging Face's attention_mask), "pad" (True: padding, as torch's
    key_padding_mask) or "lengths" (real positions of each row, as our attention's key_lengths).
    """

    name: str
    meaning: str

    def __post_init__(self) -> None:
        if self.meaning not in ("keep", "pad", "lengths"):
            raise ValueError(
                f"MaskArgument {self.name!r}: meaning is {self.meaning!r}; it must be 'keep', 'pad' or 'lengths'"
            )

    def tensor(self, batch: int, padded: int, length: int, device: torch.device) -> Tensor:
        """For rows of one length: [batch, padded], or [batch] of int32 for lengths."""
        if self.meaning == "lengths":
            return torch.full((batch,), length, dtype=torch.int32, device=device)
        mask = torch.zeros((batch, padded), dtype=self._dtype, device=device)
        self.write(mask, length)
        return mask

    def of_rows(self, lengths: Tensor, padded: int) -> Tensor:
        """For rows of several lengths, an int32 tensor."""
        if self.meaning == "lengths":
            return lengths
        is_real = torch.arange(padded, device=lengths.device)[None, :] < lengths[:, None]
        return is_real.to(self._dtype) if self.meaning == "keep" else ~is_real

    def write(self, mask: Tensor, length: int) -> None:
        """Makes it the mask of another length, in place."""
        if self.meaning == "lengths":
            mask.fill_(length)
            return
        mask[:, :length] = 1 if self.meaning == "keep" else 0
        mask[:, length:] = 0 if self.meaning == "keep" else 1

    @property
    def _dtype(self) -> torch.dtype:
        return torch.int64 if self.meaning == "keep" else torch.bool

    @property
    def padding_value(self) -> int:
        """Behind a mask that the caller gave."""
        return 1 if self.meaning == "pad" else 0


_KNOWN = {
    "attention_mask": "keep",
    "src_key_padding_mask": "pad",
    "key_padding_mask": "pad",
    "key_lengths": "lengths",
    "lengths": "lengths",
}


def find_mask_argument(module: nn.Module) -> MaskArgument | None:
    """The mask that the module's forward can take, by its name, or None."""
    try:
        parameters = inspect.signature(module.forward).parameters
    except (TypeError, ValueError):
        return None
    return next((MaskArgument(name, meaning) for name, meaning in _KNOWN.items() if name in parameters), None)


def mask_argument_called(name: str) -> MaskArgument:
    """An argument whose meaning its name tells."""
    if name not in _KNOWN:
        raise ValueError(
            f"what a mask called {name!r} means is not known (known: {', '.join(_KNOWN)}); give "
            f"MaskArgument({name!r}, 'keep', 'pad' or 'lengths')"
        )
    return MaskArgument(name, _KNOWN[name])


def pad(tensor: Tensor, sizes: Sizes, strategy: PaddingStrategy = PaddingStrategy.ZEROS, value: float = 0) -> Tensor:
    """The tensor at the sizes given for some of its dimensions; differentiable. ZEROS pads with `value`."""
    grown = {dim: size for dim, size in sizes.items() if size != tensor.shape[dim]}
    for dim, size in grown.items():
        if size < tensor.shape[dim]:
            raise ValueError(f"pad: dimension {dim} is {tensor.shape[dim]} long and does not fit into {size}")
    if not grown:
        return tensor
    if strategy is PaddingStrategy.ADAPTIVE:
        is_number = tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool
        strategy = PaddingStrategy.ZEROS if is_number else PaddingStrategy.REPLICATION
    if strategy is PaddingStrategy.ZEROS or any(tensor.shape[dim] == 0 for dim in grown):
        widths = [0, 0] * tensor.dim()
        for dim, size in grown.items():
            widths[2 * (tensor.dim() - 1 - dim) + 1] = size - tensor.shape[dim]
        return nn.functional.pad(tensor, widths, value=value)
    for dim, size in grown.items():
        tensor = tensor.index_select(dim, _indices(tensor.shape[dim], size, strategy, tensor.device))
    return tensor


def _indices(length: int, size: int, strategy: PaddingStrategy, device: torch.device) -> Tensor:
    positions = torch.arange(size, device=device)
    if strategy is PaddingStrategy.REPLICATION:
        return positions.clamp(max=length - 1)
    if strategy is PaddingStrategy.CIRCULAR:
        return positions % length
    period = max(2 * (length - 1), 1)  # 0 1 2 3 2 1 | 0 1 ...
    folded = positions % period
    return torch.minimum(folded, period - folded) if length > 1 else torch.zeros_like(positions)


def unpad(tensor: Tensor, sizes: Sizes) -> Tensor:
    """The first sizes[dim] positions of each dimension given: a view."""
    for dim, size in sizes.items():
        if size < tensor.shape[dim]:
            tensor = tensor.narrow(dim, 0, size)
    return tensor


def copy_padded(static: Tensor, source: Tensor, dims: tuple[int, ...], written: int, value: float = 0) -> int:
    """Copies into a graph's own tensor; behind it goes `value`, where a former call left something. Returns what to
    hand in as `written` at the next call."""
    if not dims:
        static.copy_(source, non_blocking=True)
        return -1
    grown = [dim for dim in dims if source.shape[dim] != static.shape[dim]]
    if len(grown) > 1:
        static.fill_(value)
        unpad(static, {dim: source.shape[dim] for dim in grown}).copy_(source, non_blocking=True)
        return -1  # of which dimension is not kept: the next call fills
    dim = dims[0] if not grown else grown[0]
    length = source.shape[dim]
    static.narrow(dim, 0, length).copy_(source, non_blocking=True)
    end = static.shape[dim] if written < 0 or len(dims) > 1 else written
    if end > length:
        static.narrow(dim, length, end - length).fill_(value)
    return length


def first_tensor(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor | None:
    """The tensor whose shape chooses the bucket: the first of the positional arguments, else of the named ones."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor):
            return value
    return None
