"""A step of an optimizer whose states are in the host's memory.

Subgroups go one of two ways, at the same time. On the device: states are sent up, updated next to weight and gradient,
and sent back, each on a lane of its own, with three subgroups under way. On the CPU: gradients are sent down, the CPU
updates states where they are, and weights are sent back. The core's step gives the same bits on both.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from . import rates
from .lanes import lanes_of
from .slabs import Field, Piece, Slabs, flat, hull

MODES = ("host", "interleave", "stream")
_DEPTH = 3  # subgroups on the device at once: one on its way up, one updated, one on its way down
_LEAST, _MOST = 1 << 22, 1 << 24  # elements of a subgroup: copies long enough, a pipeline short enough

# A step of the optimizer over lists of weights, gradients and states; whether it took place, where the host knows.
Update = Callable[[list[Tensor], list[Tensor], list[dict[str, Tensor]]], bool]


@dataclass(frozen=True)
class Offload:
    """How states are kept in the host's memory.

    Args:
        mode: "host": the CPU updates everything. "stream": the device updates everything, states pass through it.
            "interleave": both at once, in shares that a plan chooses by this machine's rates.
        subgroup_elements: parameters that are sent and updated together; None: by the number of parameters.
        device_share: of "interleave", the share of the device, 0 to 1; None: by the plan.
        rates: of the plan, by the second: bytes "up", "down" and of "host_memory", elements of "cpu" and "device";
            None: measured in the first step.
    """

    mode: str
    subgroup_elements: int | None = None
    device_share: float | None = None
    rates: dict[str, float] | None = None

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise ValueError(f'offload is "{self.mode}"; it must be None, "host", "interleave" or "stream"')
        if self.subgroup_elements is not None and self.subgroup_elements < 1:
            raise ValueError(f"offload: subgroup_elements is {self.subgroup_elements}; it must be positive, or None")
        if self.device_share is not None and not 0 <= self.device_share <= 1:
            raise ValueError(f"offload: device_share is {self.device_share}; it must be from 0 to 1, or None")


def default_subgroup(elements: int) -> int:
    """Elements of a subgroup for so many in all."""
    return min(max(elements // 64, _LEAST), _MOST)


class OffloadedStates:
    """States of parameters of one device and type, and the steps that they take."""

    def __init__(self, parameters: list[Tensor], fields: list[Field], how: Offload) -> None:
        self.device, self.dtype, self.how = parameters[0].device, parameters[0].dtype, how
        elements = sum(parameter.numel() for parameter in parameters)
        subgroup = how.subgroup_elements or default_subgroup(elements)
        self.slabs = Slabs(parameters, fields, subgroup, pinned=self.device.type == "cuda")
        self.has_master = any(field.name == "master" for field in fields)
        self._lanes = lanes_of(self.device)
        self._is_direct = self.device.type == "cpu"  # weights are where the states are: nothing is sent
        self._buffers: list[tuple[dict[str, Tensor], Tensor]] = []
        self._free: deque[Any] = deque()  # marks after which the buffers may be written, the oldest first
        self._next = 0
        self._in_host: list[Any] = [
            None
        ] * self.slabs.steps.numel()  # marks after which a piece is there again, by slot
        self._uploaded: Any = None  # after which staged weights may be written
        self._alive: deque[tuple[Any, list[Tensor]]] = deque()  # gradients that a lane may still read
        self.plan: dict[str, Any] | None = None
        self.rates = how.rates

    def make_plan(self, bare: Update) -> dict[str, Any]:
        """The core's plan (kp_offload_plan); the first one measures this machine's rates."""
        if self.rates is None:
            self.rates = rates.measure(self.device, self.dtype, self.slabs.fields, bare)
        if self.plan is None:
            self.plan = rates.plan(
                self.rates,
                self.slabs.fields,
                self.dtype,
                self.slabs.elements,
                len(self.slabs.subgroups),
                {"host": 0.0, "stream": 1.0}.get(self.how.mode, self.how.device_share),
            )
        return self.plan

    def set_device_share(self, share: float | None) -> None:
        """Another share of the device from the next step on; None: the plan's."""
        self.how = replace(self.how, mode="interleave", device_share=share)
        self.plan = None

    def forget_rates(self) -> None:
        """The next plan measures anew."""
        self.rates = self.plan = None

    def _shares(self, bare: Update) -> list[bool]:
        """Which subgroups the device updates, evenly spread."""
        count = len(self.slabs.subgroups)
        if self._is_direct or self.how.mode == "host":
            return [False] * count
        if self.how.mode == "stream":
            return [True] * count
        if self.how.device_share is not None:
            chosen = round(self.how.device_share * count)
        else:
            chosen = self.make_plan(bare)["on_device"]
        return [(i + 1) * chosen // count > i * chosen // count for i in range(count)]

    def finish(self) -> None:
        """The host's arrays hold every step taken so far when this returns."""
        for mark in set(self._in_host):
            self._lanes.wait(mark)
        self._lanes.wait(self._uploaded)

    def step(self, gradients: dict[Tensor, Tensor], update: Update, bare: Update) -> None:
        """Steps the parameters that have a gradient here, which must be laid out as they are.

        `update` is the optimizer's step over lists of tensors, all on the host or all on the device; `bare` the same
        without signals, to be timed. The caller's stream does not wait for what is queued; `join()` makes it.
        """
        ready = self._lanes.current()
        chosen = self._shares(bare)
        for_host: list[list[Piece]] = []
        for_device: list[list[Piece]] = []
        for subgroup, is_on_device in zip(self.slabs.subgroups, chosen, strict=True):
            pieces = [piece for piece in subgroup if piece.parameter in gradients]
            if pieces:
                (for_device if is_on_device else for_host).append(pieces)
        flushed = [self._flush(pieces, gradients, ready) for pieces in for_host]
        for pieces in for_device:
            self._update_on_device(pieces, gradients, ready, update)
        for pieces, mark in zip(for_host, flushed, strict=True):
            self._update_on_host(pieces, gradients, mark, update)
        while self._alive and self._lanes.is_past(self._alive[0][0]):
            self._alive.popleft()
        if for_device and not self._is_direct:  # on the host gradients have been read
            self._alive.append((self._lanes.mark("update"), list(gradients.values())))

    def join(self) -> None:
        """What the caller's stream does from here on sees the new weights, and may take the gradients' memory."""
        self._lanes.join(self._lanes.mark("update"))
        self._lanes.join(self._uploaded)
        self._alive.clear()

    def _flush(self, pieces: list[Piece], gradients: dict[Tensor, Tensor], ready: Any) -> Any:
        """Gradients, and weights unless their masters are here, on their way to the host."""
        if self._is_direct:
            return None
        staged = self.slabs.staging("gradient", self.dtype)
        weights = self.slabs.staging("parameter", self.dtype)
        with self._lanes.on("flush", ready, self._uploaded):
            for piece in pieces:
                place = slice(piece.offset, piece.offset + piece.count)
                staged[place].copy_(flat(gradients[piece.parameter], piece.begin, piece.count), non_blocking=True)
                if not self.has_master:
                    weights[place].copy_(flat(piece.parameter, piece.begin, piece.count), non_blocking=True)
        return self._lanes.mark("flush")

    def _update_on_host(
        self, pieces: list[Piece], gradients: dict[Tensor, Tensor], flushed: Any, update: Update
    ) -> None:
        states = [self.slabs.piece_states(p, self.slabs.arrays, self.slabs.steps, _ORIGIN) for p in pieces]
        if self._is_direct:
            own = [flat(piece.parameter, piece.begin, piece.count) for piece in pieces]
            update(own, [flat(gradients[p.parameter], p.begin, p.count) for p in pieces], states)
            return
        self._lanes.wait(flushed)
        for mark in {self._in_host[piece.slot] for piece in pieces}:  # they may have been on the device before
            self._lanes.wait(mark)
        staged = self.slabs.staging("gradient", self.dtype)
        weights = self.slabs.staging("parameter", self.dtype)
        places = [slice(piece.offset, piece.offset + piece.count) for piece in pieces]
        if not update([weights[place] for place in places], [staged[place] for place in places], states):
            return  # staged weights are not theirs
        with self._lanes.on("results"):
            for piece, place in zip(pieces, places, strict=True):
                flat(piece.parameter, piece.begin, piece.count).copy_(weights[place], non_blocking=True)
        self._uploaded = self._lanes.mark("results")

    def _update_on_device(
        self, pieces: list[Piece], gradients: dict[Tensor, Tensor], ready: Any, update: Update
    ) -> None:
        arrays, steps = self._buffer()
        free = self._free.popleft()
        base, slots = pieces[0], slice(pieces[0].slot, pieces[-1].slot + 1)
        parts = list(hull(pieces, self.slabs.fields))
        with self._lanes.on("up", free, *set(self._in_host[slots])):
            steps[: slots.stop - slots.start].copy_(self.slabs.steps[slots], non_blocking=True)
            for field, part in parts:
                arrays[field.name][: part.stop - part.start].copy_(
                    self.slabs.arrays[field.name][part], non_blocking=True
                )
        with self._lanes.on("update", self._lanes.mark("up"), ready):
            states = [self.slabs.piece_states(piece, arrays, steps, base) for piece in pieces]
            own = [flat(piece.parameter, piece.begin, piece.count) for piece in pieces]
            update(own, [flat(gradients[p.parameter], p.begin, p.count) for p in pieces], states)
        with self._lanes.on("down", self._lanes.mark("update")):
            self.slabs.steps[slots].copy_(steps[: slots.stop - slots.start], non_blocking=True)
            for field, part in parts:
                self.slabs.arrays[field.name][part].copy_(
                    arrays[field.name][: part.stop - part.start], non_blocking=True
                )
        written = self._lanes.mark("down")
        self._in_host[slots] = [written] * (slots.stop - slots.start)
        self._free.append(written)

    def _buffer(self) -> tuple[dict[str, Tensor], Tensor]:
        """The next of the device's buffers for a subgroup; `_free` begins with its mark."""
        if not self._buffers:
            longest = max(p[-1].offset + p[-1].count - p[0].offset for p in self.slabs.subgroups)
            most = max(len(pieces) for pieces in self.slabs.subgroups)
            for _ in range(_DEPTH):
                arrays = {
                    field.name: torch.empty(-(-longest // field.per), dtype=field.dtype, device=self.device)
                    for field in self.slabs.fields
                }
                self._buffers.append((arrays, torch.empty(most, device=self.device)))
            # New memory may still be in use by what was queued before it was freed.
            self._free = deque([self._lanes.current()] * _DEPTH)
        buffer = self._buffers[self._next]
        self._next = (self._next + 1) % _DEPTH
        return buffer


_ORIGIN = Piece(torch.empty(0), 0, 0, 0, 0)
