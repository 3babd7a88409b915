"""A step of an optimizer whose states are in the host's memory.

Subgroups go one of two ways, at the same time. On the device: states are sent up, updated next to weight and gradient,
and sent back, each on a lane of its own, with three subgroups under way. On the CPU: gradients are sent down, the CPU
updates states where they are, and weights are sent back. The core's step gives the same bits on both. A thread queues
all copies and what the device does, so that the CPU's update of one batch follows that of another without a pause.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from queue import SimpleQueue
from typing import Any

from torch import Tensor

from ..shards import local
from . import rates
from .lanes import beside, lanes_of, threads_beside_queueing, threads_of_cpu
from .slabs import Field, Piece, Slabs, flat
from .views import States, StepViews, Views, copy_all

MODES = ("host", "interleave", "stream")
_CALLS, _MOST_TOGETHER = 8, 4  # of the CPU's updates in a step, about; subgroups in one of them
_GOLDEN = 0.6180339887498949  # multiples of it, without their whole parts, are spread evenly however many there are
_LEAST, _MOST = 1 << 25, 1 << 27  # bytes of a subgroup's states: copies long enough, a pipeline short enough

# A step of the optimizer over lists of weights, gradients and states; whether it took place, where the host knows.
Update = Callable[[list[Tensor], list[Tensor], States], bool]


@dataclass(frozen=True)
class Offload:
    """How states are kept in the host's memory.

    Args:
        mode: "host": the CPU updates everything. "stream": the device updates everything, states pass through it.
            "interleave": both at once, in shares that a plan chooses by this machine's rates, and that follow what the
            two took in the last step.
        subgroup_elements: parameters that are sent and updated together; None: by the number of parameters.
        device_share: of "interleave", the share of the device, 0 to 1; None: by the plan and the last step.
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


@dataclass(frozen=True)
class _Work:
    """Pieces that are updated in one call, and the subgroups that they are of."""

    subgroups: list[int]
    pieces: list[Piece]


def _batches(subgroups: list[_Work]) -> list[_Work]:
    """Subgroups that the CPU updates in one call. The first and the last are alone: nothing hides the way of the
    gradients before the one and of the weights after the other."""
    inner = subgroups[1:-1]
    each = min(max(-(-len(inner) // _CALLS), 1), _MOST_TOGETHER)
    together = [inner[begin : begin + each] for begin in range(0, len(inner), each)]
    cuts = [subgroups[:1], *together, subgroups[1:][-1:]]
    return [
        _Work([one for work in some for one in work.subgroups], [piece for work in some for piece in work.pieces])
        for some in cuts
        if some
    ]


def balanced(on_device: int, subgroups: int, device_seconds: float, cpu_seconds: float) -> int:
    """Subgroups that the device should have had for both ways to end together, at the rates that they had; as many as
    it had where one more or less would bring little."""
    each_way = device_seconds / on_device + cpu_seconds / (subgroups - on_device)
    moved = (cpu_seconds - device_seconds) / each_way
    return min(max(on_device + round(moved), 1), subgroups - 1) if abs(moved) > 0.6 else on_device


class OffloadedStates:
    """States of parameters of one device and type, and the steps that they take."""

    def __init__(self, parameters: list[Tensor], fields: list[Field], how: Offload) -> None:
        self.device, self.dtype, self.how = parameters[0].device, parameters[0].dtype, how
        elements = sum(local(parameter).numel() for parameter in parameters)
        subgroup = how.subgroup_elements or default_subgroup(elements, sum(one.bytes_each for one in fields))
        self.slabs = Slabs(parameters, fields, subgroup, pinned=self.device.type == "cuda")
        self._lanes = lanes_of(self.device)
        self._views = StepViews(self.slabs, self.device, self.dtype, self._lanes)
        self._is_direct = self.device.type == "cpu"  # weights are where the states are: nothing is sent
        # Marks after which states are there again, and after which new weights are, by subgroup.
        self._in_host: list[Any] = [None] * len(self.slabs.subgroups)
        self._updated: dict[int, Any] = {}
        self._written: Any = None  # after which the states of every step are there
        self._uploaded: Any = None  # after which staged weights may be written
        self._alive: deque[tuple[Any, list[Tensor]]] = deque()  # gradients that a lane may still read
        self._ends: tuple[Any, Any, Any] | None = None  # of the last step: its begin, its end on device and CPU
        self._on_device: int | None = None  # of the subgroups, as steps have shown
        self._spread: list[bool] | None = None
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
        self.plan = self._on_device = self._ends = None
        self._views.forget_host()

    def forget_rates(self) -> None:
        """The next plan measures anew."""
        self.rates = self.plan = self._on_device = self._ends = None

    @property
    def on_device(self) -> int | None:
        """Subgroups that the device updates: the plan's, corrected by the times of earlier steps."""
        return self._on_device

    def _planned(self, bare: Update) -> int:
        """Subgroups of the device: as the plan says, then as the last step's two ways have ended."""
        count = len(self.slabs.subgroups)
        if self._on_device is None:
            self._on_device = int(self.make_plan(bare)["on_device"])
        if self._ends is not None:
            begin, device_end, cpu_end = self._ends
            taken = self._lanes.seconds(begin, device_end), self._lanes.seconds(begin, cpu_end)
            self._ends = None
            if taken[0] is not None and taken[1] is not None:
                wished = balanced(self._on_device, count, taken[0], taken[1])
                if wished != self._on_device:
                    self._on_device = wished
                    self._views.forget_host()
        return self._on_device

    def _shares(self, bare: Update) -> list[bool]:
        """Which subgroups the device updates, evenly spread; one more leaves the others where they are."""
        count = len(self.slabs.subgroups)
        if self._is_direct or self.how.mode == "host":
            return [False] * count
        if self.how.mode == "stream":
            return [True] * count
        chosen = self._planned(bare) if self.how.device_share is None else round(self.how.device_share * count)
        if self._spread is None or sum(self._spread) != chosen:
            order = sorted(range(count), key=lambda number: (number + 1) * _GOLDEN % 1)
            on_device = set(order[:chosen])
            self._spread = [number in on_device for number in range(count)]
        return self._spread

    def finish(self) -> None:
        """The host's arrays hold every step taken so far when this returns."""
        self._lanes.wait(self._written)
        self._lanes.wait(self._uploaded)

    def step(self, gradients: dict[Tensor, Tensor], update: Update, bare: Update) -> None:
        """Steps the parameters that have a gradient here, which must be laid out as they are.

        `update` is the optimizer's step over lists of tensors, all on the host or all on the device; `bare` the same
        without signals, to be timed. The caller's stream does not wait for what is queued; `join()` makes it.
        """
        chosen = self._shares(bare)
        # Released gradients come one by one: nothing here may take as long as all parameters do.
        has_all = len(gradients) == len(self.slabs.parameters)
        if has_all:
            given = {number: gradients[one] for number, one in enumerate(self.slabs.parameters)}
            wanted: list[int] = list(range(len(chosen)))
        else:
            given = {self.slabs.pieces[one][0].number: gradient for one, gradient in gradients.items()}
            wanted = sorted({number for one in gradients for number in self.slabs.subgroups_of[one]})
        self._views.check_addresses(given)
        works: tuple[list[_Work], list[_Work]] = [], []
        for number in wanted:
            pieces = self.slabs.subgroups[number]
            if not has_all:
                pieces = [piece for piece in pieces if piece.number in given]
            works[chosen[number]].append(_Work([number], pieces))
        for_host, for_device = _batches(works[False]), works[True]
        if self._is_direct:
            for work, views in zip(for_host, self._host_views(for_host), strict=True):
                update(views.own, _parts(work, given), views.states)
            return
        is_timed = has_all and bool(for_host) and bool(for_device) and self.how.device_share is None
        if for_device:
            self._views.make_buffers()
        ready = self._lanes.current(timed=is_timed)
        if has_all and for_host:
            self._step_beside(for_host, for_device, given, ready, update)
        else:
            self._step_inline(for_host, for_device, given, ready, update)
        if is_timed:
            self._ends = ready, self._lanes.mark("down", timed=True), self._lanes.mark("results", timed=True)
        while self._alive and self._lanes.is_past(self._alive[0][0]):
            self._alive.popleft()
        if for_device:  # on the host gradients have been read
            self._alive.append((self._lanes.mark("update"), list(gradients.values())))

    def join(self) -> None:
        """What the caller's stream does from here on sees the new weights, and may take the gradients' memory."""
        self._lanes.join(self._lanes.mark("update"))
        self._lanes.join(self._uploaded)
        self._alive.clear()
        self._updated.clear()

    def join_one(self, parameter: Tensor) -> None:
        """As `join`, for the new weights of one parameter; gradients are held on to."""
        for number in self.slabs.subgroups_of[parameter]:
            self._lanes.join(self._updated.pop(number, None))

    def _host_views(self, batches: list[_Work]) -> list[Views]:
        return self._views.on_host([work.pieces for work in batches], staged=not self._is_direct)

    def _step_inline(
        self, for_host: list[_Work], for_device: list[_Work], given: dict[int, Tensor], ready: Any, update: Update
    ) -> None:
        views = self._host_views(for_host)
        after = ready, self._uploaded  # staged weights of the last step have been read
        with self._lanes.visited():
            flushed = [self._flush(one, work, given, after) for one, work in zip(views, for_host, strict=True)]
            for work in for_device:
                self._update_on_device(work, given, ready, update)
        for one, work, mark in zip(views, for_host, flushed, strict=True):
            if self._update_on_host(one, work, mark, update):
                with self._lanes.visited():
                    self._send(one, work)

    def _step_beside(
        self, for_host: list[_Work], for_device: list[_Work], given: dict[int, Tensor], ready: Any, update: Update
    ) -> None:
        views = self._host_views(for_host)
        after = ready, self._uploaded
        flushed: SimpleQueue[Any] = SimpleQueue()  # marks after which gradients are there, or why none will come
        updated: SimpleQueue[tuple[int, bool] | None] = SimpleQueue()  # batches, and whether weights are to be sent
        batches = iter(zip(views, for_host, strict=True))

        def flush_next() -> None:
            batch = next(batches, None)
            if batch is not None:
                flushed.put(self._flush(*batch, given, after))

        def follow(wait: bool) -> bool:
            """What the CPU's updates ask for so far, or until the last; whether more may come. Gradients are sent no
            earlier than two batches ahead: they then are still in the CPU's cache."""
            while wait or not updated.empty():
                ended = updated.get()
                if ended is None:
                    return False
                flush_next()
                if ended[1]:
                    self._send(views[ended[0]], for_host[ended[0]])
            return True

        def queue() -> None:
            try:
                with self._lanes.visited():
                    flush_next()
                    flush_next()
                    may_come = True
                    for subgroup in for_device:
                        self._update_on_device(subgroup, given, ready, update)
                        may_come = may_come and follow(wait=False)
                    if may_come:
                        follow(wait=True)
            except BaseException as error:
                flushed.put(error)
                raise

        threads = (self.plan or {}).get("threads") if for_device else None
        with beside(queue), threads_of_cpu(threads or threads_beside_queueing()):
            try:
                for number, (one, work) in enumerate(zip(views, for_host, strict=True)):
                    mark = flushed.get()
                    if isinstance(mark, BaseException):
                        break  # raised on leaving
                    updated.put((number, self._update_on_host(one, work, mark, update)))
            finally:
                updated.put(None)

    def _flush(self, views: Views, work: _Work, given: dict[int, Tensor], after: tuple[Any, ...]) -> Any:
        """Gradients, and weights unless their masters are here, on their way to the host."""
        self._lanes.visit("flush", *after)
        gathered = views.gathered["gradient"]
        copy_all(gathered.parts, _parts(work, given))
        copy_all(gathered.on_host, gathered.on_device)
        if not self._views.has_master:
            gathered = views.gathered["parameter"]
            copy_all(gathered.parts, views.own)
            copy_all(gathered.on_host, gathered.on_device)
        return self._lanes.mark("flush")

    def _update_on_host(self, views: Views, work: _Work, flushed: Any, update: Update) -> bool:
        self._lanes.wait(flushed)
        for mark in {self._in_host[number] for number in work.subgroups}:  # they may have been on the device before
            self._lanes.wait(mark)
        return update(views.weights, views.gradients, views.states)  # if not, staged weights are not theirs

    def _send(self, views: Views, work: _Work) -> None:
        """New weights on their way to the device."""
        self._lanes.visit("results")
        gathered = views.gathered["result"]
        copy_all(gathered.on_device, gathered.on_host)
        copy_all(views.own, gathered.parts)
        self._uploaded = self._lanes.mark("results")
        self._updated.update(dict.fromkeys(work.subgroups, self._uploaded))

    def _update_on_device(self, work: _Work, given: dict[int, Tensor], ready: Any, update: Update) -> None:
        (number,) = work.subgroups
        views, free = self._views.on_device(work.pieces)
        self._lanes.visit("up", free, self._in_host[number])
        copy_all(views.on_device, views.on_host)
        self._lanes.visit("update", self._lanes.mark("up"), ready)
        update(views.own, _parts(work, given), views.states)
        self._updated[number] = self._lanes.mark("update")
        self._lanes.visit("down", self._updated[number])
        copy_all(views.on_host, views.on_device)
        self._written = self._in_host[number] = self._lanes.mark("down")
        self._views.free(self._written)


def _parts(work: _Work, given: dict[int, Tensor]) -> list[Tensor]:
    return [flat(given[piece.number], piece.begin, piece.count) for piece in work.pieces]
