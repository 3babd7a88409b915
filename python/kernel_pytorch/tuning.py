"""Which kernel runs, why, and how to have it measured. Works without torch.

The tiers that choose, first to last: Override, Overlay, Memory, Persistent, Autotune, Heuristic, Error. `explain` shows
them at work, `tune` and `autotune` measure, `overlay` decides by hand, `record` shows what was decided.
"""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from . import _library

if TYPE_CHECKING:
    import torch

__all__ = [
    "Candidate",
    "Decision",
    "Explanation",
    "Key",
    "TuneProgress",
    "TuneReport",
    "TuneRow",
    "autotune",
    "explain",
    "kernels",
    "overlay",
    "record",
    "recorded",
    "tune",
]


@dataclass(frozen=True)
class Key:
    """Under what a measurement is kept: the device's fingerprint, the op, its set of kernels, the bucketed problem."""

    device: str
    op: str
    kernel_set: str
    problem: str


@dataclass(frozen=True)
class Candidate:
    """A kernel that was asked. `reason` says why not; `configs` are those it could run with."""

    kernel: str
    origin: str
    supported: bool
    reason: str
    configs: tuple[str, ...]
    heuristic_config: str


@dataclass(frozen=True)
class Explanation:
    """Which kernel a problem gets. `tier` is who decided; `kernel` is empty where nothing supports the problem."""

    op: str
    device: str
    key: Key
    candidates: tuple[Candidate, ...]
    kernel: str
    config: str
    tier: str
    measured_us: float

    def __str__(self) -> str:
        width = max(len(candidate.kernel) for candidate in self.candidates)
        lines = [f"{self.op} on {self.device}: {self.key.problem}"]
        for candidate in self.candidates:
            mark = "→" if candidate.kernel == self.kernel else "✓" if candidate.supported else "✗"
            words = candidate.heuristic_config if candidate.supported else candidate.reason
            lines.append(f"  {mark} {candidate.kernel:<{width}}  {words}".rstrip())
        measured = f", measured {self.measured_us:.2f} us" if self.measured_us > 0 else ""
        chosen = " ".join(filter(None, (self.kernel, self.config)))
        lines.append(f"  {chosen}, by tier {self.tier}{measured}" if chosen else "  no kernel supports this problem")
        return "\n".join(lines)


@dataclass(frozen=True)
class TuneProgress:
    """Where a tuning run is: after `done` of `total` candidates, with the best so far."""

    done: int
    total: int
    candidate: str
    candidate_us: float
    best: str
    best_us: float


@dataclass(frozen=True)
class TuneRow:
    """A measured kernel and config; `failure` is not empty where its result was wrong or it could not run."""

    kernel: str
    config: str
    median_us: float
    spread_us: float
    failure: str


@dataclass(frozen=True)
class TuneReport:
    """Rows fastest first, failures last. `complete`: every candidate was measured within the budget."""

    key: Key
    rows: tuple[TuneRow, ...]
    complete: bool
    seconds: float


@dataclass(frozen=True)
class Decision:
    """A choice that calls made while recording, and how often."""

    key: Key
    kernel: str
    config: str
    tier: str
    count: int


def _problem(
    op: str, shape: Sequence[int], dtype: str | torch.dtype, device: str | torch.device, options: Mapping[str, Any]
) -> dict[str, Any]:
    return {
        "op": op,
        "shape": [int(size) for size in shape],
        "dtype": str(dtype).removeprefix("torch."),
        "device": str(device),
        "options": {
            name: value if isinstance(value, (bool, int, float)) else str(value).removeprefix("torch.")
            for name, value in options.items()
        },
    }


def explain(
    op: str,
    shape: Sequence[int],
    dtype: str | torch.dtype = "fp32",
    device: str | torch.device = "cpu",
    *,
    kernel: str = "",
    **options: Any,
) -> Explanation:
    """Which kernel `op` would run on a tensor of this shape, and why not another.

    `op` is a name that `kernels()` has, e.g. "rms_norm_forward". `dtype` is "bf16", "float32", ... or a torch.dtype.
    `kernel` ("name" or "name config") asks as a call with an override would. `options` are the op's own words:
    residual=1, weight_dtype="fp32".
    """
    request = {**_problem(op, shape, dtype, device, options), "kernel": kernel}
    fields = _library.call("explain", request=request)
    candidates = [Candidate(**{**each, "configs": tuple(each["configs"])}) for each in fields.pop("candidates")]
    return Explanation(**{**fields, "key": Key(**fields["key"]), "candidates": tuple(candidates)})


def kernels(op: str = "") -> dict[str, list[str]]:
    """Kernels of each op, in the order in which they are asked. `op` limits it: "rms_norm" is forward and backward."""
    listed = _library.call("kernels", request={"op": op})["operations"]
    return {operation["op"]: operation["kernels"] for operation in listed}


def _show_progress(progress: TuneProgress) -> None:
    filled = 20 * progress.done // max(progress.total, 1)
    best = f"best {progress.best} {progress.best_us:.2f} us" if progress.best_us > 0 else progress.candidate
    line = f"tuning [{'#' * filled}{'-' * (20 - filled)}] {progress.done}/{progress.total}  {best}"
    sys.stderr.write("\r" + line[:100] + "\033[K" + ("\r\033[K" if progress.done == progress.total else ""))
    sys.stderr.flush()


@contextlib.contextmanager
def _catching_interrupt() -> Iterator[Callable[[], bool]]:
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


def tune(
    op: str,
    shape: Sequence[int],
    dtype: str | torch.dtype = "fp32",
    device: str | torch.device = "cpu",
    *,
    budget_seconds: float = 10.0,
    progress: Callable[[TuneProgress], None] | None = None,
    **options: Any,
) -> TuneReport:
    """Measures every kernel and config of `op` for this problem and remembers the fastest, in memory and on disk.

    Each candidate's output is checked against the reference first. Ctrl-C stops it: what was measured is kept, then
    KeyboardInterrupt is raised. `progress` is called after each candidate; without it a terminal gets a bar.
    """
    request = {**_problem(op, shape, dtype, device, options), "budget_seconds": budget_seconds}
    show = progress if progress is not None else _show_progress if sys.stderr.isatty() else None

    def on_progress(fields: dict[str, Any]) -> None:
        if show is not None:
            show(TuneProgress(**fields))

    with _catching_interrupt() as interrupted:
        fields = _library.call_with_callbacks("tune", request, on_progress, interrupted)
    rows = tuple(TuneRow(**row) for row in fields["rows"])
    return TuneReport(Key(**fields["key"]), rows, fields["complete"], fields["seconds"])


@contextlib.contextmanager
def autotune() -> Iterator[None]:
    """Inside, a problem that was never measured is tuned at its first call. Holds for the whole process; nests."""
    _library.call_plain("autotune_push")
    try:
        yield
    finally:
        _library.call_plain("autotune_pop")


@contextlib.contextmanager
def overlay(choices: Mapping[str, str]) -> Iterator[None]:
    """Inside, these ops run these kernels: `with overlay({"rms_norm_forward": "reference"})`.

    A value is "kernel" or "kernel config". Holds for the whole process, since a CUDA backward runs on autograd's own
    threads; an overlay inside another wins. An unknown op or kernel is an error at once.
    """
    entries = []
    for op, choice in choices.items():
        kernel, _, config = choice.partition(" ")
        entries.append({"op": op, "kernel": kernel, "config": config})
    handle = _library.call_for_handle("overlay_push", {"entries": entries})
    try:
        yield
    finally:
        _library.call_plain("overlay_pop", handle)


def recorded() -> list[Decision]:
    """What was decided since recording began, newest last, each distinct decision once with its count."""
    decisions = _library.call("recorded", has_request=False)["decisions"]
    return [Decision(**{**fields, "key": Key(**fields["key"])}) for fields in decisions]


@contextlib.contextmanager
def record() -> Iterator[list[Decision]]:
    """Records the decisions of calls inside. The list it gives is filled on leaving; `recorded()` can look before."""
    decisions: list[Decision] = []
    _library.call_plain("set_recording", 1)
    try:
        yield decisions
    finally:
        decisions.extend(recorded())
        _library.call_plain("set_recording", 0)
