"""How long `optimize` may still take: shares of the seconds given, and what its last steps need, which is kept back.

The whole call takes at most 1.5 times the seconds, plus its start: two runs of the sample, a measurement of the
machine's roofs (a second at most) and, once per process, the start of torch's profiler and dispatch modes. What finds
no time is left as it was, and the report says so.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from .agreement import agreed

__all__ = ["Budget", "shown_progress"]

_MOST = 1.5  # times the seconds, of all
FINAL_RUNS = 16  # of the model: verified against the original (4), timed in turns (8), profiled (4)
_SILENT_SECONDS = 2.0  # before progress is shown by itself


class Budget:
    """Seconds of one call of `optimize`, from `start` on."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.step_seconds = 0.0  # of one run of the sample
        self._began = time.monotonic()

    def start(self, step_seconds: float) -> None:
        self.step_seconds = agreed(step_seconds)
        self._began = time.monotonic()

    @property
    def final_seconds(self) -> float:
        """What verifying and measuring the whole takes at least."""
        return FINAL_RUNS * self.step_seconds

    def left(self, share: float = 1.0) -> float:
        """Until a share of the seconds has passed, and before the last steps have to begin."""
        passed = time.monotonic() - self._began
        return min(share * self.seconds, _MOST * self.seconds - self.final_seconds) - passed

    def is_spent(self, share: float = 1.0) -> bool:
        """The same on all ranks that share a model."""
        return agreed(float(self.left(share) <= 0)) != 0.0

    @property
    def is_too_small(self) -> bool:
        """Whether not even the last steps fit: then nothing is tried and nothing measured."""
        return agreed(float(self.final_seconds > _MOST * self.seconds)) != 0.0

    def reason(self) -> str:
        """Why something was not tried."""
        if self.is_too_small:
            return (
                f"not tried: one run of the model takes {self.step_seconds:.2g} s, and measuring the whole needs "
                f"{FINAL_RUNS} of them; give budget_seconds {2 * self.final_seconds:.0f} or more"
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
