"""Kernels measured on the very problems of the model's step, where that pays, and kept where the whole is faster.

The plan (C++, plan/optimize/tuning_plan.h) says which problems and for how long; a scope of the tuner measures them at
their calls. What it finds is an overlay: it holds for the process, for as long as the model is optimized, and is a
change of the model like any other, so that a failure and `restore` take it away. The tuning cache on disk, which every
process of this machine shares, gets it only where that is asked for.
"""

from __future__ import annotations

import datetime
import json
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from .. import _library, tuning
from .agreement import is_shared
from .changes import Change, Changes
from .measure import Timing, interleaved, once_us, switches
from .patterns.context import Context
from .run import Sample, gradients_kept
from .runner import working
from .verdicts import confirms_tuning

Row = dict[str, Any]
Choice = tuning.TunedProblem
_MOST_PASSES = 3


class Choices(Change):
    """Kernels for problems, in force for the process while applied, and no longer than this lives."""

    def __init__(self, entries: list[dict[str, str]]) -> None:
        self.entries = entries
        self._pop: weakref.finalize[..., Choices] | None = None

    def apply(self) -> None:
        if self._pop is None:
            handle = _library.call_for_handle("overlay_push", {"entries": self.entries})
            self._pop = weakref.finalize(self, _library.call_plain, "overlay_pop", handle)
            self._pop.atexit = False

    def undo(self) -> None:
        if self._pop is not None:
            pop, self._pop = self._pop, None
            pop()

    def __deepcopy__(self, memo: dict[int, Any]) -> Choices:
        """A copied model holds them for itself."""
        made = Choices(list(self.entries))
        if self._pop is not None:
            made.apply()
        return made


@dataclass
class Tuning:
    """What was measured, and what is in force of it."""

    rows: list[Row] = field(default_factory=list)  # for the report
    notes: list[str] = field(default_factory=list)
    change: Choices | None = None
    choices: list[Choice] = field(default_factory=list)

    def leave(self, changes: Changes, reason: Callable[[str], str]) -> None:
        """Takes the choices back; `reason` gets the words for a problem's own gain."""
        if self.change is not None:
            changes.undo(self.change)
        self.change = None
        for row in self.rows:
            if row["kept"]:
                row["kept"], row["reason"] = False, reason(row["reason"])

    def keep_on_disk(self) -> None:
        """Into the tuning cache, for every process of this machine."""
        if self.change is None:
            return
        try:
            _library.import_cache(_export(self.choices).encode())
            self.notes.append("the tuned choices are in the tuning cache; kpt cache clear takes them out")
        except _library.KernelPyTorchError as error:
            self.notes.append(f"the tuned choices could not be kept on disk: {error}")


def tune_step(
    model: nn.Module,
    context: Context,
    changes: Changes,
    sample: Sample,
    roofs: dict[str, Any],
    seconds: float,
    whole_seconds: float,
    check: Callable[[], str | None],
    say: Callable[[str], None],
) -> Tuning:
    """Tunes the problems of a step that are worth it, in about `seconds`, and times the whole in about
    `whole_seconds`. `check` says what is wrong with the whole."""
    if is_shared():
        return Tuning(notes=["not tuned: ranks share the model; kernel_pytorch.autotune tunes each for itself"])
    if _library.call("recorded", has_request=False)["recording"]:
        return Tuning(notes=["not tuned: kernel_pytorch.record is on, and tuning records too"])
    run = sample.step(model)
    found = Tuning()
    with gradients_kept(context.model), working(context.model, context.trains):
        with tuning.record() as decisions:
            run()
        if not decisions:
            return found
        step_us = min(once_us(run, context.device) for _ in range(2))
        planned = _Planned(decisions, context, roofs, step_us)
        found.rows, found.choices = planned.measured(run, max(seconds, 0.0), say)
        if not found.choices:
            return found
        found.change = Choices([_entry(one) for one in found.choices])
        changes.apply(found.change)
        failure = check()
        if failure is not None:
            found.leave(changes, lambda gain: f"{gain} alone; with it the whole model's {failure}")
            return found
        say(f"timing the whole with {len(found.choices)} tuned kernels, and without")
        before, after = _time(run, found.change, context, whole_seconds)
    expected = sum(row["calls"] * (row["from_us"] - row["to_us"]) for row in found.rows if row["kept"])
    if not confirms_tuning(before, after, expected):
        saved = before.median_us - after.median_us
        words = f"all of them save {saved:.1f} us of a step of {before.median_us:.0f}, of {expected:.1f} expected"
        found.leave(changes, lambda gain: f"{gain} alone, not kept: {words}")
    return found


class _Planned:
    """The problems of a step, and the plan's word on each."""

    def __init__(
        self, decisions: list[tuning.Decision], context: Context, roofs: dict[str, Any], step_us: float
    ) -> None:
        self.problems = list({one.key: one for one in reversed(decisions)}.values())[::-1]
        self.on_gpu = context.device.type == "cuda"
        calls = {one.key: sum(other.count for other in decisions if other.key == one.key) for one in self.problems}
        self.request: dict[str, Any] = {
            "step_us": step_us,
            "is_cuda": self.on_gpu,
            "copy_bytes_per_second": roofs["copy_bytes_per_second"],
            "matmul_flops_per_second": roofs["matmul_flops_per_second"],
            "problems": [
                {
                    "op": one.key.op,
                    "problem": one.key.problem,
                    "calls": calls[one.key],
                    "candidates": one.candidates,
                    "bytes": one.bytes,
                    "flops": one.flops,
                    "decided": one.tier != "heuristic",
                }
                for one in self.problems
            ],
        }

    def measured(
        self, run: Callable[[], object], seconds: float, say: Callable[[str], None]
    ) -> tuple[list[Row], list[Choice]]:
        """Rows for the report, and what is clearly faster. Where measuring took less time than the plan thought, those
        that there seemed to be no time for get what is left."""
        rows: dict[int, Row] = {}
        chosen: list[Choice] = []
        done: set[int] = set()
        for _ in range(_MOST_PASSES):
            decided = _library.call("tuning_plan", request={**self.request, "budget_seconds": seconds})["decisions"]
            rows |= {one["problem"]: self._row(one) for one in decided if one["listed"] and one["problem"] not in done}
            wanted = [one for one in decided if one["tunes"]]
            if not wanted:
                break
            report = self._measure(run, wanted, seconds, say)
            chosen += _read(report, [rows[one["problem"]] for one in wanted])
            for one in wanted:
                done.add(one["problem"])
                self.request["problems"][one["problem"]]["decided"] = True
            seconds = max(seconds - report.seconds, 0.0)
        return list(rows.values()), chosen

    def _row(self, decided: dict[str, Any]) -> Row:
        decision, asked = self.problems[decided["problem"]], self.request["problems"][decided["problem"]]
        return {
            "op": decision.key.op,
            "problem": decision.key.problem,
            "calls": asked["calls"],
            "share": decided["share"],
            "from": f"{decision.kernel} {decision.config}".rstrip(),
            "to": None,
            "from_us": None,
            "to_us": None,
            "kept": False,
            "reason": decided["reason"],
        }

    def _measure(
        self, run: Callable[[], object], wanted: list[dict[str, Any]], seconds: float, say: Callable[[str], None]
    ) -> tuning.AutotuneReport:
        """Those alone, at their calls in one step, which go on as before."""
        only = [{**self._name(one["problem"]), "seconds": one["seconds"]} for one in wanted]

        said: list[tuple[str, str, str]] = [("", "", "")]

        def tell(now: tuning.AutotuneProgress) -> None:
            news = (now.op, now.problem, now.candidate.best)
            if news != said[-1]:  # a new problem, or a new best
                said.append(news)
                place = f"{now.problems_done + 1} of {len(only)}, {now.seconds:.1f} of {seconds:.1f} s"
                say(f"tuning {now.op}, {place}: {now.candidate.best or now.candidate.candidate}")

        if self.on_gpu:
            torch.cuda.empty_cache()  # the tuner has buffers of its own
        request = {"budget_seconds": seconds, "only": only, "remembers": False}
        with tuning.autotune_scope(request, tell) as report:
            run()
        return report

    def _name(self, index: int) -> dict[str, str]:
        key = self.problems[index].key
        return {"op": key.op, "problem": key.problem}


def _read(report: tuning.AutotuneReport, rows: list[Row]) -> list[Choice]:
    """Writes into the rows what was found; returns what is clearly faster."""
    tuned = {(one.key.op, one.key.problem): one for one in report.tuned}
    untuned = {(one.key.op, one.key.problem): one.reason for one in report.untuned}
    chosen = []
    for row in rows:
        place = (row["op"], row["problem"])
        row["reason"] = untuned.get(place, row["reason"])
        one = tuned.get(place)
        if one is None:
            continue
        row.update({"to": one.after.name, "from_us": one.before.median_us or None, "to_us": one.after.median_us})
        if one.gains:
            row.update({"kept": True, "reason": f"{one.before.median_us / one.after.median_us:.2f}x"})
            chosen.append(one)
            continue
        cut = "" if one.complete else f", {one.measured} of {one.candidates} in time"
        same = one.after.name == one.before.name
        row["reason"] = ("the fastest already" if same else "no clear gain") + cut
    return chosen


def _entry(one: Choice) -> dict[str, str]:
    choice = {"kernel": one.after.kernel, "config": one.after.config}
    return {"op": one.key.op, "problem": one.key.problem, "device": one.key.device, **choice}


def _time(run: Callable[[], object], change: Choices, context: Context, seconds: float) -> tuple[Timing, Timing]:
    off, on = switches(change.undo, change.apply)
    on_gpu = context.device.type == "cuda" and not context.compiled
    try:
        timed = interleaved({"before": (off, run), "after": (on, run)}, context.device, seconds, on_gpu)
    finally:
        on()
    return timed["before"], timed["after"]


def _export(choices: list[Choice]) -> str:
    """As `kernel_pytorch.cache.import_` reads it."""
    date = datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
    measurements = [
        {
            "device": one.key.device,
            "op": one.key.op,
            "kernel_set": one.key.kernel_set,
            "problem": one.key.problem,
            "kernel": one.after.kernel,
            "config": one.after.config,
            "median_us": one.after.median_us,
            "spread_us": one.after.spread_us,
            "date": date,
            "library_version": _library.version(),
        }
        for one in choices
    ]
    return json.dumps({"format": "kernel_pytorch tuning measurements", "version": 1, "measurements": measurements})
