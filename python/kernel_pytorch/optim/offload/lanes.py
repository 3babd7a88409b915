"""Where the copies and updates of a step run: streams of a GPU, or one after another on a CPU."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

LANES = ("up", "down", "flush", "results", "update")


class CudaLanes:
    """A stream each for states to the device, states back, gradients to the host, weights back, and updates."""

    def __init__(self, device: torch.device) -> None:
        self.streams = {name: torch.cuda.Stream(device) for name in LANES}  # type: ignore[no-untyped-call]
        self.device = device

    @contextmanager
    def visited(self) -> Iterator[None]:
        """What is called inside runs on the lane that was last visited; afterwards on the caller's stream again."""
        stream = torch.cuda.current_stream(self.device)
        try:
            yield
        finally:
            torch.cuda.set_stream(stream)

    def visit(self, lane: str, *after: Any) -> None:
        """What follows runs on the lane, after these marks."""
        stream = self.streams[lane]
        for mark in after:
            if mark is not None:
                stream.wait_event(mark)
        torch.cuda.set_stream(stream)

    def mark(self, lane: str, timed: bool = False) -> torch.cuda.Event:
        return _recorded(self.streams[lane], timed)

    def current(self, timed: bool = False) -> torch.cuda.Event:
        return _recorded(torch.cuda.current_stream(self.device), timed)

    def seconds(self, begin: Any, end: Any) -> float | None:
        """Between two timed marks, where both are past."""
        if not (self.is_past(begin) and self.is_past(end)):
            return None
        return float(begin.elapsed_time(end)) * 1e-3

    def join(self, mark: Any) -> None:
        """The caller's stream goes on after the mark."""
        if mark is not None:
            torch.cuda.current_stream(self.device).wait_event(mark)

    def wait(self, mark: Any) -> None:
        """The host waits."""
        if mark is not None:
            mark.synchronize()

    def is_past(self, mark: Any) -> bool:
        return mark is None or bool(mark.query())

    def settle(self) -> None:
        """The host waits for all lanes and for the caller's stream."""
        torch.cuda.synchronize(self.device)


class OneLane:
    """The same without streams: whatever is called has ended when the call returns."""

    @contextmanager
    def visited(self) -> Iterator[None]:
        yield

    def visit(self, lane: str, *after: Any) -> None:
        return None

    def mark(self, lane: str, timed: bool = False) -> None:
        return None

    def current(self, timed: bool = False) -> None:
        return None

    def seconds(self, begin: Any, end: Any) -> float | None:
        return None

    def join(self, mark: Any) -> None:
        return None

    def wait(self, mark: Any) -> None:
        return None

    def is_past(self, mark: Any) -> bool:
        return True

    def settle(self) -> None:
        return None


def lanes_of(device: torch.device) -> CudaLanes | OneLane:
    return CudaLanes(device) if device.type == "cuda" else OneLane()


@contextmanager
def threads_of_cpu(count: int) -> Iterator[None]:
    """CPU ops inside have so many threads. A thread that first computes meanwhile keeps that number."""
    threads = torch.get_num_threads()
    if count != threads:
        torch.set_num_threads(count)
    try:
        yield
    finally:
        if count != threads:
            torch.set_num_threads(threads)


def threads_beside_queueing() -> int:
    """One core of eight is left to the thread that queues: a thread of an op that is put aside for it would keep all
    others waiting at the op's end."""
    threads = torch.get_num_threads()
    return threads - max(threads // 8, 1) if threads >= 4 else threads


def _recorded(stream: torch.cuda.Stream, timed: bool) -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=timed)  # type: ignore[no-untyped-call]
    event.record(stream)
    return event


@contextmanager
def beside(work: Callable[[], None]) -> Iterator[None]:
    """`work` is called by a thread of its own, while what is inside goes on; both have ended on leaving."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            with torch.no_grad():  # a thread's own
                work()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="kernel_pytorch offload")
    thread.start()
    try:
        yield
    finally:
        thread.join()
    if errors:
        raise errors[0]
