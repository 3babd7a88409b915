"""States of many parameters as arrays in host memory, one per name, cut into subgroups that a step takes whole."""

from __future__ import annotations

import mmap
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..shards import local, sharded_like

ALIGNMENT = 256  # elements at which parameters begin: whole groups of every 8-bit format, aligned for every type


@dataclass(frozen=True)
class Field:
    """One array: its name in the state, its type, and how many elements share an entry."""

    name: str
    dtype: torch.dtype
    per: int = 1

    @property
    def bytes_each(self) -> float:
        return self.dtype.itemsize / self.per


@dataclass(frozen=True)
class Piece:
    """Consecutive elements, in the order of memory, of one parameter."""

    number: int  # of the parameter, in the slabs' order
    parameter: Tensor
    begin: int  # in the parameter
    count: int
    offset: int  # in the arrays
    slot: int  # of its step count


class Slabs:
    """Arrays for all states of a list of parameters; of sharded ones, of this process' parts.

    A parameter larger than a subgroup is cut. Every piece has a step count of its own, so that subgroups can be stepped
    in different places.
    """

    def __init__(self, parameters: list[Tensor], fields: list[Field], subgroup_elements: int, pinned: bool) -> None:
        self.fields = fields
        self.parameters = parameters
        self.pinned = pinned
        self.pieces: dict[Tensor, list[Piece]] = {}
        self.subgroups: list[list[Piece]] = []
        self.subgroups_of: dict[Tensor, list[int]] = {}
        self.elements = 0
        self._cut(max(subgroup_elements // ALIGNMENT, 1) * ALIGNMENT)
        self.arrays = {field.name: self._array(field.dtype, -(-self.elements // field.per)) for field in fields}
        self.steps = self._array(torch.float32, sum(len(pieces) for pieces in self.pieces.values()))
        self._staging: dict[str, Tensor] = {}

    def _cut(self, subgroup_elements: int) -> None:
        subgroup: list[Piece] = []
        filled, slots = 0, 0
        for number, parameter in enumerate(self.parameters):
            self.pieces[parameter], self.subgroups_of[parameter] = [], []
            begin, size = 0, local(parameter).numel()
            while begin < size or not self.pieces[parameter]:
                if filled >= subgroup_elements:
                    self.subgroups.append(subgroup)
                    subgroup, filled = [], 0
                count = min(size - begin, subgroup_elements - filled)
                piece = Piece(number, parameter, begin, count, self.elements, slots)
                self.pieces[parameter].append(piece)
                self.subgroups_of[parameter].append(len(self.subgroups))
                subgroup.append(piece)
                taken = -(-count // ALIGNMENT) * ALIGNMENT
                filled, slots, begin, self.elements = filled + taken, slots + 1, begin + count, self.elements + taken
        if subgroup:
            self.subgroups.append(subgroup)

    def _array(self, dtype: torch.dtype, count: int) -> Tensor:
        return host_array(dtype, count, self if self.pinned else None)

    def staging(self, name: str, dtype: torch.dtype) -> Tensor:
        """An array beside the states through which gradients or weights of all elements pass; made when first asked."""
        if name not in self._staging:
            self._staging[name] = self._array(dtype, self.elements)
        return self._staging[name]

    def views(self, parameter: Tensor) -> dict[str, Tensor]:
        """A parameter's states as they stand in the arrays, with its shape and strides; scales are flat."""
        first, own = self.pieces[parameter][0], local(parameter)
        state: dict[str, Tensor] = {"step": self.steps[first.slot]}
        for field in self.fields:
            array, begin = self.arrays[field.name], first.offset // field.per
            if field.per == 1:
                part = array.as_strided(own.shape, own.stride(), begin)
                state[field.name] = sharded_like(part, parameter)
            else:
                state[field.name] = array[begin : begin - (-own.numel() // field.per)]
        return state

    def store(self, parameter: Tensor, state: dict[str, Any]) -> dict[str, Any]:
        """Copies a state into the arrays; what it lacks is as in a new array. Returns the views."""
        views: dict[str, Any] = self.views(parameter)
        for name, view in views.items():
            if name in state:
                local(view).copy_(local(state[name]))
        for piece in self.pieces[parameter]:
            self.steps[piece.slot] = views["step"]
        return {**{name: value for name, value in state.items() if name not in views}, **views}

    def piece_states(self, piece: Piece, arrays: dict[str, Tensor], steps: Tensor, base: Piece) -> dict[str, Tensor]:
        """A piece's states in `arrays`, which hold the elements from those of `base` on."""
        state = {"step": steps[piece.slot - base.slot]}
        for field in self.fields:
            begin = (piece.offset - base.offset) // field.per
            state[field.name] = arrays[field.name][begin : begin - (-piece.count // field.per)]
        return state

    def host_bytes(self) -> int:
        arrays: Iterable[Tensor] = [*self.arrays.values(), self.steps, *self._staging.values()]
        return sum(array.numel() * array.element_size() for array in arrays)


def flat(tensor: Tensor, begin: int, count: int) -> Tensor:
    """Elements of a tensor without gaps, in the order of memory."""
    own = local(tensor.detach())
    return own.as_strided((count,), (1,), own.storage_offset() + begin)


def hull(pieces: list[Piece], fields: list[Field]) -> Iterator[tuple[Field, slice]]:
    """What the pieces and those between them have of each array."""
    begin, end = pieces[0].offset, pieces[-1].offset + pieces[-1].count
    for field in fields:
        yield field, slice(begin // field.per, -(-end // field.per))


def host_array(dtype: torch.dtype, count: int, pinned_for: object | None) -> Tensor:
    """Zeros in large pages, where the system has them: a DMA over gigabytes of small ones waits for their addresses.

    `pinned_for`: locks the pages while this object lives, so that copies to and from a GPU run beside everything else.
    torch's own pinned memory comes in powers of two, up to twice of what is asked for.
    """
    if count == 0:
        return torch.zeros(0, dtype=dtype)
    # Private: large pages of shared memory are a setting of their own, which is off nearly everywhere.
    memory = mmap.mmap(-1, count * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    array = torch.frombuffer(memory, dtype=dtype, count=count).zero_()  # pages are made by all threads, not by one
    if pinned_for is None:
        return array
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    torch.cuda.check_error(runtime.cudaHostRegister(array.data_ptr(), array.numel() * array.element_size(), 0))
    weakref.finalize(pinned_for, _unlock, runtime, array.data_ptr())
    return array


def _unlock(runtime: Any, address: int) -> None:
    torch.cuda.synchronize()  # a copy may still be under way
    torch.cuda.check_error(runtime.cudaHostUnregister(address))
