"""How long `optimize` may still take. How its seconds are shared among its stages is the core's to say (C++,
kernel_pytorch/plan/optimize/budget_plan.h); here is the clock.

The whole call takes at most 1.5 times the seconds, plus a second of its start: two runs of the sample, a measurement of
the machine's roofs and, once per process, the start of torch's profiler and dispatch modes. What a start takes beyond
that second counts. What finds no time is left as it was, and the report says so.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from .. import _library
from .agreement import agreed

__all__ = ["Budget", "shown_progress"]

_SILENT_SECONDS = 2.0  # before progress is shown by itself
_START_SECONDS = 1.0  # that do not count
TIMED_RUNS = 10  # of the model, that timing it with and without something takes at least


class Budget:
    """Seconds of one call of `optimize`, from `start` on. Stages are named as the plan names them."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._called = time.monotonic()
        self.start(0.0)

    def start(self, step_seconds: float) -> None:
        self.step_seconds = agreed(step_seconds)  # of one run of the sample
        self._began = min(time.monotonic(), self._called + _START_SECONDS)
        self._plan = self._ask(0.0)
        self._first: dict[str, float] = {}

    def _ask(self, passed: float) -> dict[str, Any]:
        request = {"seconds": self.seconds, "step_seconds": self.step_seconds, "passed_seconds": passed}
        found: dict[str, Any] = _library.call("budget_plan", request=request)
        return found

    def left(self, stage: str = "whole") -> float:
        """Until the stage's share of the seconds has passed, and before the last steps have to begin."""
        until: float = self._plan["stages"][stage]["until_seconds"]
        return until - (time.monotonic() - self._began)

    def left_in_all(self) -> float:
        """Until the whole call must have ended."""
        most: float = self._plan["most_seconds"]
        return most - (time.monotonic() - self._began)

    def may_take(self, seconds: float) -> bool:
        """Whether what takes so long, and can be left out, ends before the whole call must have ended."""
        return agreed(float(seconds <= self.left_in_all())) != 0.0

    def has_time_for(self, stage: str, runs: int = TIMED_RUNS) -> bool:
        """Whether so many runs of the sample end within the stage's share."""
        return agreed(float(runs * self.step_seconds <= self.left(stage))) != 0.0

    def measure_seconds(self, stage: str) -> float:
        """How long one measurement of the stage may take that starts now."""
        found: float = self._ask(time.monotonic() - self._began)["stages"][stage]["measure_seconds"]
        return found

    def is_spent(self, stage: str = "whole", share: float = 1.0) -> bool:
        """Whether the stage's seconds are over, or a share of them, counted from the stage's first question. The same
        on all ranks that share a model."""
        left = self.left(stage)
        first = self._first.setdefault(stage, left)
        return agreed(float(left <= (1.0 - share) * first)) != 0.0

    @property
    def is_too_small(self) -> bool:
        """Whether not even the last steps fit: then nothing is tried and nothing measured."""
        return agreed(float(self._plan["is_too_small"])) != 0.0

    def reason(self) -> str:
        """Why something was not tried."""
        if self.is_too_small:
            return (
                f"not tried: one run of the model takes {self.step_seconds:.2g} s, and measuring the whole needs "
                f"{self._plan['final_runs']} of them; give budget_seconds {self._plan['enough_seconds']:.0f} or more"
            )
        return f"not tried: the {self.seconds:g} s of budget_seconds were spent; give more"


@contextmanager
def shown_progress(progress: Callable[[str], None] | None) -> Iterator[Callable[[str], None]]:
    """The caller's way of showing lines, or one line on a terminal's standard error once work takes some seconds."""
    if progress is not None or not sys.stderr.isatty():
        yield progress or (lambda line: None)
        return
    began = time.monotonic()
    shown = False

    def show(line: str) -> None:
        nonlocal shown
        if time.monotonic() - began > _SILENT_SECONDS:
            shown = True
            print(f"\r\033[Koptimize: {line[:100]}", end="", file=sys.stderr, flush=True)

    try:
        yield show
    finally:
        if shown:
            print("\r\033[K", end="", file=sys.stderr, flush=True)
