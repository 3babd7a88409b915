"""torch.roll along several dimensions as one gather of rows: torch's own is a pass for each of them. Windows that shift
(Swin) roll images of rows in two.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_MOST = 32  # index tensors that are kept
_indices: dict[tuple[Any, ...], Tensor] = {}


def rolled(input: Any, shifts: Any = None, dims: Any = None) -> Tensor | None:
    """The rolled tensor; None where it is not rows that are rolled in several dimensions."""
    if type(input) is not Tensor or not isinstance(shifts, (tuple, list)) or not isinstance(dims, (tuple, list)):
        return None
    places = [dim % input.dim() for dim in dims] if input.dim() else []
    if len(set(places)) < 2 or len(places) != len(shifts) or input.dim() - 1 in places:
        return None
    if not input.is_contiguous() or input.numel() == 0 or not all(isinstance(one, int) for one in (*shifts, *dims)):
        return None
    index = _index(tuple(input.shape[:-1]), tuple(shifts), tuple(places), input.device)
    return None if index is None else input.flatten(0, -2).index_select(0, index).view(input.shape)


def _index(
    sizes: tuple[int, ...], shifts: tuple[int, ...], dims: tuple[int, ...], device: torch.device
) -> Tensor | None:
    """By row of the result, the row that goes there. Made outside of CUDA graphs, whose memory is theirs."""
    key = (sizes, shifts, dims, device)
    if key not in _indices:
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return None
        if len(_indices) >= _MOST:
            return None
        rows = torch.arange(torch.Size(sizes).numel(), device=device).view(sizes)
        _indices[key] = rows.roll(shifts, dims).flatten()
    return _indices[key]
