"""A step of an optimizer whose states are in the host's memory.

Subgroups go one of two ways, at the same time. On the device: states are sent up, updated next to weight and gradient,
and sent back, each on a lane of its own, with three subgroups under way. On the CPU: gradients are sent down, the CPU
updates states where they are, and weights are sent back. The core's step gives the same bits on both. A thread queues
what the device does, since Python's part of a subgroup takes a fifth of the time of its copies and would keep the CPU.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from ..shards import local
from . import rates
from .lanes import beside, lanes_of
from .slabs import ALIGNMENT, Field, Piece, Slabs, flat, hull

MODES = ("host", "interleave", "stream")
_DEPTH = 3  # subgroups on the device at once: one on its way up, one updated, one on its way down
_CALLS, _MOST_TOGETHER = 8, 4  # of the CPU's updates in a step, about; subgroups in one of them
_LEAST, _MOST = 1 << 26, 1 << 27  # bytes of a subgroup's states: copies long enough, a pipeline short enough

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


def default_subgroup(elements: int, bytes_each: float) -> int:
    """Elements of a subgroup for so many in all, with states of so many bytes each."""
    return int(min(max(elements * bytes_each / 64, _LEAST), _MOST) / bytes_each)


def _batches(subgroups: list[list[Piece]]) -> list[list[Piece]]:
    """Subgroups that the CPU updates in one call. The first and the last are alone: nothing hides the way of the
    gradients before the one and of the weights after the other."""
    inner = subgroups[1:-1]
    each = min(max(-(-len(inner) // _CALLS), 1), _MOST_TOGETHER)
    together = [inner[begin : begin + each] for begin in range(0, len(inner), each)]
    cuts = [subgroups[:1], *together, subgroups[1:][-1:]]
    return [[piece for subgroup in some for piece in subgroup] for some in cuts if some]


@dataclass(frozen=True)
class _Views:
    own: list[Tensor]  # the parameters' elements
    states: list[dict[str, Tensor]]
    copies: list[tuple[Tensor, Tensor]]  # on the device: of its buffer, of the host's arrays
    weights: list[Tensor] = field(default_factory=list)  # on the host: staged
    gradients: list[Tensor] = field(default_factory=list)
    # On the device, where many pieces become few copies: parts of a lane's buffer by piece, and whole runs of them with
    # what they are copies of. Copies of every piece by itself took the host longer than the link.
    gathered: dict[str, tuple[list[Tensor], list[tuple[Tensor, Tensor]]]] = field(default_factory=dict)


class OffloadedStates:
    """States of parameters of one device and type, and the steps that they take."""

    def __init__(self, parameters: list[Tensor], fields: list[Field], how: Offload) -> None:
        self.device, self.dtype, self.how = parameters[0].device, parameters[0].dtype, how
        elements = sum(local(parameter).numel() for parameter in parameters)
        subgroup = how.subgroup_elements or default_subgroup(elements, sum(one.bytes_each for one in fields))
        self.slabs = Slabs(parameters, fields, subgroup, pinned=self.device.type == "cuda")
        self.has_master = any(one.name == "master" for one in fields)
        self._lanes = lanes_of(self.device)
        self._is_direct = self.device.type == "cpu"  # weights are where the states are: nothing is sent
        self._buffers: list[tuple[dict[str, Tensor], Tensor]] = []
        self._free: deque[Any] = deque()  # marks after which the buffers may be written, the oldest first
        self._next = 0
        self._gathering: dict[str, Tensor] = {}
        # By buffer and slots; those of the host apart, since another thread makes the device's.
        self._kept_views: dict[tuple[int, ...], _Views] = {}
        self._kept_host_views: dict[tuple[int, ...], _Views] = {}
        self._in_host: list[Any] = [
            None
        ] * self.slabs.steps.numel()  # marks after which a piece is there again, by slot
        self._uploaded: Any = None  # after which staged weights may be written
        self._updated: dict[Tensor, dict[str, Any]] = {}  # marks after which new weights are there, by lane
        self._alive: deque[tuple[Any, list[Tensor]]] = deque()  # gradients that a lane may still read
        self.plan: dict[str, Any] | None = None
        self.rates = how.rates

    def make_plan(self, bare: Update) -> dict[str, Any]:
        """The core's plan (kp_offload_plan); the first one measures this machine's rates."""
        if self.rates is None:
            self.rates = rates.measure(self.device, self.dtype, self.slabs.fields, self.slabs.elements, bare)
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
        # Released gradients come one by one: nothing here may take as long as all parameters do.
        has_all = len(gradients) == len(self.slabs.parameters)
        of = self.slabs.subgroups_of
        for number in range(len(chosen)) if has_all else sorted({one for tensor in gradients for one in of[tensor]}):
            pieces = self.slabs.subgroups[number]
            if not has_all:
                pieces = [piece for piece in pieces if piece.parameter in gradients]
            (for_device if chosen[number] else for_host).append(pieces)

        def queue_for_device() -> None:
            for pieces in for_device:
                self._update_on_device(pieces, gradients, ready, update)

        if for_host and for_device:
            with beside(queue_for_device):
                self._update_all_on_host(for_host, gradients, ready, update)
        else:
            queue_for_device()
            self._update_all_on_host(for_host, gradients, ready, update)
        while self._alive and self._lanes.is_past(self._alive[0][0]):
            self._alive.popleft()
        if for_device and not self._is_direct:  # on the host gradients have been read
            self._alive.append((self._lanes.mark("update"), list(gradients.values())))

    def join(self) -> None:
        """What the caller's stream does from here on sees the new weights, and may take the gradients' memory."""
        self._lanes.join(self._lanes.mark("update"))
        self._lanes.join(self._uploaded)
        self._alive.clear()
        self._updated.clear()

    def join_one(self, parameter: Tensor) -> None:
        """As `join`, for the new weights of one parameter; gradients are held on to."""
        for mark in self._updated.pop(parameter, {}).values():
            self._lanes.join(mark)

    def _update_all_on_host(
        self, subgroups: list[list[Piece]], gradients: dict[Tensor, Tensor], ready: Any, update: Update
    ) -> None:
        batches = _batches(subgroups)
        if self._is_direct:
            for pieces in batches:
                own = [flat(gradients[piece.parameter], piece.begin, piece.count) for piece in pieces]
                views = self._views(pieces, None)
                update(views.own, own, views.states)
            return
        free = self._uploaded  # of the step before: its staged weights have been read
        flushed: deque[Any] = deque()
        for number, pieces in enumerate(batches):
            for later in batches[number + len(flushed) : number + 2]:  # the next one is on its way meanwhile
                flushed.append(self._flush(later, gradients, ready, free))
            self._update_on_host(pieces, flushed.popleft(), update)

    def _flush(self, pieces: list[Piece], gradients: dict[Tensor, Tensor], *after: Any) -> Any:
        """Gradients, and weights unless their masters are here, on their way to the host."""
        views = self._views(pieces, None)
        with self._lanes.on("flush", *after):
            parts, runs = views.gathered["gradient"]
            _copy_all(parts, [flat(gradients[piece.parameter], piece.begin, piece.count) for piece in pieces])
            if not self.has_master:
                weights, weight_runs = views.gathered["parameter"]
                _copy_all(weights, views.own)
                runs = runs + weight_runs
            for there, here in runs:
                here.copy_(there, non_blocking=True)
        return self._lanes.mark("flush")

    def _update_on_host(self, pieces: list[Piece], flushed: Any, update: Update) -> None:
        views = self._views(pieces, None)
        self._lanes.wait(flushed)
        for mark in {self._in_host[piece.slot] for piece in pieces}:  # they may have been on the device before
            self._lanes.wait(mark)
        if not update(views.weights, views.gradients, views.states):
            return  # staged weights are not theirs
        parts, runs = views.gathered["result"]
        with self._lanes.on("results"):
            for there, here in runs:
                there.copy_(here, non_blocking=True)
            _copy_all(views.own, parts)
        self._uploaded = self._lanes.mark("results")
        for piece in pieces:
            self._updated.setdefault(piece.parameter, {})["results"] = self._uploaded

    def _update_on_device(
        self, pieces: list[Piece], gradients: dict[Tensor, Tensor], ready: Any, update: Update
    ) -> None:
        number = self._buffer()
        views, free = self._views(pieces, number), self._free.popleft()
        slots = slice(pieces[0].slot, pieces[-1].slot + 1)
        with self._lanes.on("up", free, *set(self._in_host[slots])):
            for there, here in views.copies:
                there.copy_(here, non_blocking=True)
        with self._lanes.on("update", self._lanes.mark("up"), ready):
            update(views.own, [flat(gradients[p.parameter], p.begin, p.count) for p in pieces], views.states)
        updated = self._lanes.mark("update")
        for piece in pieces:
            self._updated.setdefault(piece.parameter, {})["update"] = updated
        with self._lanes.on("down", updated):
            for there, here in views.copies:
                here.copy_(there, non_blocking=True)
        written = self._lanes.mark("down")
        self._in_host[slots] = [written] * (slots.stop - slots.start)
        self._free.append(written)

    def _views(self, pieces: list[Piece], buffer: int | None) -> _Views:
        """Views of these pieces for a step on the host, or on the device in this buffer; the same ones as long as the
        parameters stay where they are."""
        kept = self._kept_host_views if buffer is None else self._kept_views
        key = (-1 if buffer is None else buffer, *(piece.slot for piece in pieces))
        found = kept.get(key)
        if found is not None and all(
            own.data_ptr() == local(piece.parameter).data_ptr() + piece.begin * own.element_size()
            for own, piece in zip(found.own, pieces, strict=True)
        ):
            return found
        own = [flat(piece.parameter, piece.begin, piece.count) for piece in pieces]
        slabs = self.slabs
        if buffer is not None:
            (arrays, steps), base = self._buffers[buffer], pieces[0]
            slots = slice(pieces[0].slot, pieces[-1].slot + 1)
            copies = [(steps[: slots.stop - slots.start], slabs.steps[slots])]
            for one, part in hull(pieces, slabs.fields):
                copies.append((arrays[one.name][: part.stop - part.start], slabs.arrays[one.name][part]))
            states = [slabs.piece_states(piece, arrays, steps, base) for piece in pieces]
            views = _Views(own, states, copies)
        else:
            states = [slabs.piece_states(piece, slabs.arrays, slabs.steps, _ORIGIN) for piece in pieces]
            views = _Views(own, states, [])
            if not self._is_direct:
                self._stage(views, pieces)
        kept[key] = views
        return views

    def _stage(self, views: _Views, pieces: list[Piece]) -> None:
        """Adds what the way over the host needs: staged tensors there, and the device's buffers before and after."""
        runs = list(_runs(pieces))
        sizes = [-(-(run[-1].offset + run[-1].count - run[0].offset) // ALIGNMENT) * ALIGNMENT for run in runs]
        arrays = {name: self.slabs.staging(name, self.dtype) for name in ("gradient", "parameter")}
        for kept, name in ((views.gradients, "gradient"), (views.weights, "parameter")):
            kept.extend(arrays[name][piece.offset : piece.offset + piece.count] for piece in pieces)
        for buffer, name in (("gradient", "gradient"), ("parameter", "parameter"), ("result", "parameter")):
            if buffer == "parameter" and self.has_master:
                continue
            memory, begin = self._passing(buffer, sum(sizes)), 0
            parts, copies = [], []
            for run, size in zip(runs, sizes, strict=True):
                first = run[0].offset
                copies.append((memory[begin : begin + size], arrays[name][first : first + size]))
                parts += [memory[begin + p.offset - first : begin + p.offset - first + p.count] for p in run]
                begin += size
            views.gathered[buffer] = parts, copies

    def _passing(self, name: str, elements: int) -> Tensor:
        """The device's memory that gradients or weights pass through on one lane, whose order keeps them apart."""
        found = self._gathering.get(name)
        if found is None or found.numel() < elements:
            self._lanes.settle()  # other streams may still use the new memory, and these lanes the old
            found = self._gathering[name] = torch.empty(elements, dtype=self.dtype, device=self.device)
            self._kept_host_views = {}
        return found

    def _buffer(self) -> int:
        """The next of the device's buffers for a subgroup; `_free` begins with its mark."""
        if not self._buffers:
            longest = max(p[-1].offset + p[-1].count - p[0].offset for p in self.slabs.subgroups)
            most = max(len(pieces) for pieces in self.slabs.subgroups)
            for _ in range(_DEPTH):
                arrays = {
                    one.name: torch.empty(-(-longest // one.per), dtype=one.dtype, device=self.device)
                    for one in self.slabs.fields
                }
                self._buffers.append((arrays, torch.empty(most, device=self.device)))
            # New memory may still be in use by what was queued before it was freed.
            self._free = deque([self._lanes.current()] * _DEPTH)
        number = self._next
        self._next = (self._next + 1) % _DEPTH
        return number


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


def _copy_all(targets: list[Tensor], sources: list[Tensor]) -> None:
    pairs = [(target, source) for target, source in zip(targets, sources, strict=True) if target.numel() > 0]
    if pairs:
        torch._foreach_copy_([target for target, _ in pairs], [source for _, source in pairs])


_ORIGIN = Piece(torch.empty(0), 0, 0, 0, 0)
