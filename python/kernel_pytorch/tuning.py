"""Which kernel runs, why, and how to have it measured. Works without torch.

The tiers that choose, first to last: Override, Overlay, Memory, Persistent, Autotune, Heuristic, Error. `explain` shows
them at work, `tune` and `autotune` measure, `overlay` decides by hand, `record` shows what was decided.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from . import _library
from ._interrupts import catching_interrupt, postponing_interrupt
from ._supports import KernelSupport, supports
from ._supports import problem as _problem

if TYPE_CHECKING:
    import torch

__all__ = [
    "AutotuneProgress",
    "AutotuneReport",
    "Candidate",
    "Decision",
    "Explanation",
    "KernelSupport",
    "Key",
    "TuneProgress",
    "TuneReport",
    "TuneRow",
    "TunedProblem",
    "UntunedProblem",
    "autotune",
    "explain",
    "kernels",
    "overlay",
    "record",
    "recorded",
    "supports",
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
class Candidate(KernelSupport):
    """A kernel that was asked, and the `configs` that it could run with."""

    configs: tuple[str, ...]
    heuristic_config: str


@dataclass(frozen=True)
class Explanation:
    """Which kernel a problem gets. `tier` is who decided; `kernel` is empty where nothing supports the problem.

    `parts` are the problems that an op composed of others gives to them, in order: the GEMMs of a linear layer.
    """

    op: str
    device: str
    key: Key
    candidates: tuple[Candidate, ...]
    kernel: str
    config: str
    tier: str
    measured_us: float
    parts: tuple[Explanation, ...] = ()

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
        lines += [f"    {line}" for part in self.parts for line in str(part).splitlines()]
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
    samples: int = 0

    @property
    def name(self) -> str:
        return f"{self.kernel} {self.config}".rstrip()


@dataclass(frozen=True)
class TuneReport:
    """Rows fastest first, failures last. `complete`: every candidate was measured within the budget."""

    key: Key
    rows: tuple[TuneRow, ...]
    complete: bool
    seconds: float


@dataclass(frozen=True)
class AutotuneProgress:
    """Where a scope is: at one problem, after `problems_done` others and `seconds` of `budget_seconds` (None: any)."""

    op: str
    problem: str
    problems_done: int
    seconds: float
    budget_seconds: float | None
    candidate: TuneProgress


@dataclass(frozen=True)
class TunedProblem:
    """A problem that was measured: what would have run, and the fastest. `gains`: faster beyond the spread of both."""

    key: Key
    before: TuneRow
    after: TuneRow
    gains: bool
    candidates: int
    measured: int
    complete: bool
    seconds: float


@dataclass(frozen=True)
class UntunedProblem:
    """A problem that was asked for and not measured: `reason` says why, mostly that the budget was spent."""

    key: Key
    reason: str


@dataclass
class AutotuneReport:
    """What the calls inside an `autotune` tuned, and what they left."""

    tuned: list[TunedProblem] = field(default_factory=list)
    untuned: list[UntunedProblem] = field(default_factory=list)
    seconds: float = 0.0

    def __str__(self) -> str:
        lines = [f"tuned {len(self.tuned)} problems in {self.seconds:.1f} s, {len(self.untuned)} left untuned"]
        for one in self.tuned:
            before, after = one.before, one.after
            gain = f"{before.median_us / after.median_us:.2f}x" if before.median_us > 0 else "not comparable"
            change = f"{before.name} -> {after.name}" if before.name != after.name else f"{before.name} stays"
            lines.append(f"  {one.key.op} {one.key.problem}: {change}, {after.median_us:.2f} us, {gain}")
        lines += [f"  {one.key.op} {one.key.problem}: untuned, {one.reason}" for one in self.untuned]
        return "\n".join(lines)


@dataclass(frozen=True)
class Decision:
    """A choice that calls made while recording, and how often; what tuning would choose from; the work of one call."""

    key: Key
    kernel: str
    config: str
    tier: str
    count: int
    candidates: int = 0
    bytes: int = 0
    flops: int = 0


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
    residual=1, weight_dtype="fp32". On a device that the library has no kernels for (mps, xpu, ...) "portable" runs:
    the op's formula in torch operations, or the CPU's kernels on copies.
    """
    elsewhere = str(device).split(":")[0] not in ("cpu", "cuda")
    request = {**_problem(op, shape, dtype, "cpu" if elsewhere else device, options), "kernel": kernel}
    explanation = _explanation(_library.call("explain", request=request))
    return _portable(explanation, str(device)) if elsewhere else explanation


def _portable(on_cpu: Explanation, device: str) -> Explanation:
    refused = [replace(one, supported=False, reason=f"no kernels for {device}") for one in on_cpu.candidates]
    portable = replace(refused[0], kernel="portable", supported=True, reason="", configs=(), heuristic_config="")
    return replace(
        on_cpu, device=device, candidates=(*refused, portable), kernel="portable", config="", tier="heuristic", parts=()
    )


def _explanation(fields: dict[str, Any]) -> Explanation:
    candidates = tuple(Candidate(**{**one, "configs": tuple(one["configs"])}) for one in fields["candidates"])
    parts = tuple(_explanation(part) for part in fields["parts"])
    return Explanation(**{**fields, "key": Key(**fields["key"]), "candidates": candidates, "parts": parts})


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


def _show_scope(progress: AutotuneProgress) -> None:
    budget = "" if progress.budget_seconds is None else f" of {progress.budget_seconds:.0f}"
    now, best = progress.candidate, progress.candidate.best or progress.candidate.candidate
    line = (
        f"tuning {progress.op}, {progress.seconds:.1f}{budget} s, {now.done}/{now.total}  {best} {now.best_us:.2f} us"
    )
    sys.stderr.write("\r" + line[:100] + "\033[K" + ("\r\033[K" if now.done == now.total else ""))
    sys.stderr.flush()


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

    with catching_interrupt() as interrupted:
        fields = _library.call_with_callbacks("tune", request, _library.Callbacks(on_progress, interrupted))
    rows = tuple(TuneRow(**row) for row in fields["rows"])
    return TuneReport(Key(**fields["key"]), rows, fields["complete"], fields["seconds"])


@contextlib.contextmanager
def autotune(
    budget_seconds: float | None = None,
    *,
    problem_seconds: float = 10.0,
    progress: Callable[[AutotuneProgress], None] | None = None,
) -> Iterator[AutotuneReport]:
    """Inside, a problem that was never measured is tuned at its first call, and the fastest is remembered.

    Args:
        budget_seconds: for all problems together; what comes after runs by the heuristic, and the report names it.
        problem_seconds: for one problem at most.
        progress: called after each candidate; without it a terminal gets a line.

    Gives a report that is filled on leaving. Holds for the whole process; of scopes inside one another the inner one is
    in charge. Ctrl-C while a call tunes ends the tuning and is raised when the call is done: what was measured is kept.
    """
    request: dict[str, Any] = {"problem_seconds": problem_seconds}
    if budget_seconds is not None:
        request["budget_seconds"] = budget_seconds
    with autotune_scope(request, progress) as report:
        yield report


@contextlib.contextmanager
def autotune_scope(
    request: Mapping[str, Any], progress: Callable[[AutotuneProgress], None] | None = None
) -> Iterator[AutotuneReport]:
    """`autotune` with all that kp_autotune_push takes."""
    show = progress if progress is not None else _show_scope if sys.stderr.isatty() else None
    report = AutotuneReport()

    def on_progress(fields: dict[str, Any]) -> None:
        if show is not None:
            own = {name: fields.pop(name) for name in ("op", "problem", "problems_done", "seconds", "budget_seconds")}
            show(AutotuneProgress(**own, candidate=TuneProgress(**fields)))

    interrupted: list[Callable[[], bool]] = []
    callbacks = _library.Callbacks(on_progress, lambda: interrupted[0]())
    with postponing_interrupt(callbacks.entered_from) as pressed:
        interrupted.append(pressed)
        handle = _library.push_autotune(dict(request), callbacks)
        try:
            yield report
        finally:
            _fill(report, _library.pop_autotune(handle))
    if callbacks.raised:
        raise callbacks.raised[0]


def _fill(report: AutotuneReport, fields: dict[str, Any]) -> None:
    report.seconds = fields["seconds"]
    for one in fields["tuned"]:
        rows = {side: TuneRow(**one[side]) for side in ("before", "after")}
        report.tuned.append(TunedProblem(**{**one, "key": Key(**one["key"]), **rows}))
    report.untuned.extend(UntunedProblem(Key(**one["key"]), one["reason"]) for one in fields["untuned"])


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
    with overlay_of(entries):
        yield


@contextlib.contextmanager
def overlay_of(entries: Sequence[Mapping[str, str]]) -> Iterator[None]:
    """`overlay` of entries as kp_overlay_push takes them: of one problem or one device alone, too."""
    handle = _library.call_for_handle("overlay_push", {"entries": list(entries)})
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
