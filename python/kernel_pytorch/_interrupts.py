"""Ctrl-C while the library works: the work ends in an orderly way first, then KeyboardInterrupt is raised.

Python runs a signal's handler in the main thread between two of its own steps, so in the middle of a call into the
library only inside a callback, where nothing may be raised.
"""

from __future__ import annotations

import _thread
import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType

__all__ = ["catching_interrupt", "postponing_interrupt"]

_POSTPONED_SECONDS = 0.05  # until it is looked whether the call into the library is over


@contextlib.contextmanager
def catching_interrupt() -> Iterator[Callable[[], bool]]:
    """While inside, Ctrl-C only answers True; it is raised on leaving. Only the main thread can do that."""
    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return
    pressed: list[int] = []
    previous = signal.signal(signal.SIGINT, lambda number, _frame: pressed.append(number))
    try:
        yield lambda: bool(pressed)
    finally:
        signal.signal(signal.SIGINT, previous)
    if pressed:
        raise KeyboardInterrupt


@contextlib.contextmanager
def postponing_interrupt(is_inside: Callable[[FrameType | None], bool]) -> Iterator[Callable[[], bool]]:
    """Ctrl-C in a frame that `is_inside` knows answers True, and is raised as soon as that is over; elsewhere it is
    what it is without this. Only in the main thread, and only where Ctrl-C raises something.
    """
    previous = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(previous):
        yield lambda: False
        return
    waiting: list[threading.Timer] = []  # at most one, which presses again

    def handle(number: int, frame: FrameType | None) -> None:
        if not is_inside(frame):
            waiting.clear()
            previous(number, frame)
            return
        waiting[:] = [threading.Timer(_POSTPONED_SECONDS, _thread.interrupt_main)]
        waiting[0].daemon = True
        waiting[0].start()

    signal.signal(signal.SIGINT, handle)
    try:
        yield lambda: bool(waiting)
    finally:
        try:
            for timer in list(waiting):
                timer.cancel()
                timer.join()  # a press that is under way arrives here
        finally:
            signal.signal(signal.SIGINT, previous)
    if waiting:
        raise KeyboardInterrupt
