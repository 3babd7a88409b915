"""Subgroups as a step sees them: states in the host's arrays and in the device's buffers, gradients and weights on
their way between the two."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..shards import local
from .lanes import CudaLanes, OneLane
from .slabs import ALIGNMENT, Piece, Slabs, flat, hull

DEPTH = 3  # subgroups on the device at once: one on its way up, one updated, one on its way down

States = dict[str, list[Tensor]]  # by name, for every piece


@dataclass(frozen=True)
class Gathered:
    """Many pieces in a lane's buffer on the device, as few copies: of every piece by itself copies took the host longer
    than the link."""

    parts: list[Tensor]  # by piece
    on_device: list[Tensor]  # whole runs of them, and what they are copies of
    on_host: list[Tensor]


@dataclass(frozen=True)
class Views:
    own: list[Tensor]  # the parameters' elements
    states: States
    on_device: list[Tensor] = field(default_factory=list)  # on the device: of its buffer, and of the host's arrays
    on_host: list[Tensor] = field(default_factory=list)
    weights: list[Tensor] = field(default_factory=list)  # on the host: staged
    gradients: list[Tensor] = field(default_factory=list)
    gathered: dict[str, Gathered] = field(default_factory=dict)


class StepViews:
    """Views that are kept as long as parameters stay where they are, and the device's memory behind them."""

    def __init__(self, slabs: Slabs, device: torch.device, dtype: torch.dtype, lanes: CudaLanes | OneLane) -> None:
        self._slabs, self._device, self._dtype, self._lanes = slabs, device, dtype, lanes
        self.has_master = any(one.name == "master" for one in slabs.fields)
        self._buffers: list[tuple[dict[str, Tensor], Tensor]] = []
        self._free: deque[Any] = deque()  # marks after which the buffers may be written, the oldest first
        self._next = 0
        self._passing: dict[str, Tensor] = {}
        self._addresses: list[int | None] = [None] * len(slabs.parameters)
        # By buffer and pieces; those of the host apart, since another thread makes the device's.
        self._on_device: dict[tuple[int, ...], Views] = {}
        self._on_host: dict[tuple[int, ...], Views] = {}

    def check_addresses(self, numbers: Iterable[int]) -> None:
        """Forgets all views if one of these parameters has moved since it was last looked at."""
        for number in numbers:
            address = local(self._slabs.parameters[number]).data_ptr()
            if address != self._addresses[number]:
                if self._addresses[number] is not None:
                    self._on_device, self._on_host = {}, {}
                self._addresses[number] = address

    def forget_host(self) -> None:
        """Views of batches that will not come again."""
        self._on_host = {}

    def on_device(self, pieces: list[Piece]) -> tuple[Views, Any]:
        """Views in the next of the device's buffers, and the mark after which that may be written; who takes them
        gives a mark back with `free`."""
        number, self._next = self._next, (self._next + 1) % DEPTH
        key = (number, *(piece.slot for piece in pieces))
        views = self._on_device.get(key)
        if views is None:
            views = self._on_device[key] = self._made_on_device(pieces, number)
        return views, self._free.popleft()

    def free(self, mark: Any) -> None:
        self._free.append(mark)

    def on_host(self, batches: list[list[Piece]], staged: bool) -> list[Views]:
        """Views in the host's arrays; staged, with what gradients and weights need that come from the device."""
        keys = [tuple(piece.slot for piece in pieces) for pieces in batches]
        if staged and not all(key in self._on_host for key in keys):
            self._reserve(max(sum(_run_sizes(pieces)) for pieces in batches))
        found = []
        for key, pieces in zip(keys, batches, strict=True):
            views = self._on_host.get(key)
            if views is None:
                states = self._states(pieces, self._slabs.arrays, self._slabs.steps, ORIGIN)
                views = self._on_host[key] = Views(self._own(pieces), states)
                if staged:
                    self._stage(views, pieces)
            found.append(views)
        return found

    @staticmethod
    def _own(pieces: list[Piece]) -> list[Tensor]:
        return [flat(piece.parameter, piece.begin, piece.count) for piece in pieces]

    def _states(self, pieces: list[Piece], arrays: dict[str, Tensor], steps: Tensor, base: Piece) -> States:
        by_piece = [self._slabs.piece_states(piece, arrays, steps, base) for piece in pieces]
        return {name: [state[name] for state in by_piece] for name in by_piece[0]}

    def _made_on_device(self, pieces: list[Piece], number: int) -> Views:
        arrays, steps = self._buffers[number]
        slots = slice(pieces[0].slot, pieces[-1].slot + 1)
        there, here = [steps[: slots.stop - slots.start]], [self._slabs.steps[slots]]
        for one, part in hull(pieces, self._slabs.fields):
            there.append(arrays[one.name][: part.stop - part.start])
            here.append(self._slabs.arrays[one.name][part])
        return Views(self._own(pieces), self._states(pieces, arrays, steps, pieces[0]), there, here)

    def make_buffers(self) -> None:
        """On the caller's stream, whose memory they are when they are freed."""
        if self._buffers:
            return
        subgroups = self._slabs.subgroups
        longest = max(p[-1].offset + p[-1].count - p[0].offset for p in subgroups)
        most = max(len(pieces) for pieces in subgroups)
        for _ in range(DEPTH):
            arrays = {
                one.name: torch.empty(-(-longest // one.per), dtype=one.dtype, device=self._device)
                for one in self._slabs.fields
            }
            self._buffers.append((arrays, torch.empty(most, device=self._device)))
        self._lanes.settle()  # new memory may still be in use by what was queued before it was freed
        self._free = deque([None] * DEPTH)

    def _stage(self, views: Views, pieces: list[Piece]) -> None:
        """Adds staged tensors on the host, and the device's buffers before and after."""
        arrays = {name: self._slabs.staging(name, self._dtype) for name in ("gradient", "parameter")}
        for kept, name in ((views.gradients, "gradient"), (views.weights, "parameter")):
            kept.extend(arrays[name][piece.offset : piece.offset + piece.count] for piece in pieces)
        for buffer, memory in self._passing.items():
            made, begin = Gathered([], [], []), 0
            array = arrays["gradient" if buffer == "gradient" else "parameter"]
            for run, size in zip(_runs(pieces), _run_sizes(pieces), strict=True):
                first = run[0].offset
                made.on_device.append(memory[begin : begin + size])
                made.on_host.append(array[first : first + size])
                made.parts.extend(memory[begin + p.offset - first : begin + p.offset - first + p.count] for p in run)
                begin += size
            views.gathered[buffer] = made

    def _reserve(self, elements: int) -> None:
        """The device's memory that gradients and weights pass through: of each lane one, whose order keeps batches
        apart."""
        if self._passing and self._passing["gradient"].numel() >= elements:
            return
        self._lanes.settle()  # other streams may still use the new memory, and these lanes the old
        for name in ("gradient", "result", *(() if self.has_master else ("parameter",))):
            self._passing[name] = torch.empty(elements, dtype=self._dtype, device=self._device)
        self._on_host = {}


def _runs(pieces: list[Piece]) -> Iterator[list[Piece]]:
    """Pieces that follow each other in the arrays."""
    run: list[Piece] = []
    for piece in pieces:
        if run and piece.slot != run[-1].slot + 1:
            yield run
            run = []
        run.append(piece)
    if run:
        yield run


def _run_sizes(pieces: list[Piece]) -> list[int]:
    """Elements that runs take in the arrays."""
    return [-(-(run[-1].offset + run[-1].count - run[0].offset) // ALIGNMENT) * ALIGNMENT for run in _runs(pieces)]


def copy_all(targets: list[Tensor], sources: list[Tensor]) -> None:
    """One launch where all are on one device; else one copy each, which do not wait for each other."""
    pairs = [(target, source) for target, source in zip(targets, sources, strict=True) if target.numel() > 0]
    if pairs:
        torch._foreach_copy_([target for target, _ in pairs], [source for _, source in pairs], non_blocking=True)


ORIGIN = Piece(0, torch.empty(0), 0, 0, 0, 0)
