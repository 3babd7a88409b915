"""The model as a whole: does it still compute what it did, and is it faster?"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from .agreement import anyone
from .budget import Budget
from .changes import Changes
from .choose import Kept, Outcome
from .measure import Timing, interleaved, kernels_of, peak_bytes, switches
from .patterns.context import Context
from .patterns.graphs import graph_bytes
from .run import Sample, gradients_kept
from .runner import working
from .sites import Call, Refusal, raised
from .tuned import Tuning
from .verdicts import pays
from .verify import Difference, Mismatch, Results, results_of, verify

_CHECKING_RUNS = 4  # of the model, by one check
_LISTING_RUNS = 20  # of the model, that listing the kernels of one takes: ops are counted in Python


@dataclass
class Measured:
    """Before and after, of the whole."""

    timings: dict[str, Timing] = field(default_factory=dict)
    peaks: dict[str, int | None] = field(default_factory=dict)
    launches: dict[str, int | None] = field(default_factory=dict)
    kernels: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def verify_whole(
    context: Context, changes: Changes, outcome: Outcome, sample: Sample, budget: Budget, say: Callable[[str], None]
) -> None:
    """Checks outputs and gradients of the model; what makes it fail is reverted, the least exact pattern first, and all
    of it where the time is over."""
    while True:
        failure, differences = check_whole(context, changes, outcome, sample)
        if failure is None or not outcome.kept:
            outcome.differences.extend(differences)
            break
        worst = _least_exact(outcome.kept)
        has_time = budget.has_time_for("whole", _CHECKING_RUNS)
        say(f"the whole differs ({failure}); reverting {worst if has_time else 'everything'}")
        for kept in [one for one in outcome.kept if one.proposal.pattern == worst or not has_time]:
            revert(changes, outcome, kept, f"with it the whole model's {failure}")


def check_whole(
    context: Context, changes: Changes, outcome: Outcome, sample: Sample
) -> tuple[str | None, list[Difference]]:
    """Whether the model computes what it did before everything, as (why not or None, differences)."""

    def original(inputs: Call, seed: int, is_perturbed: bool) -> Results:
        with changes.suspended():
            return results_of(context.model, inputs, context.trains, seed)

    accuracy = "tolerant" if any(one.proposal.approximate for one in outcome.kept) else "exact"
    try:
        differences = verify("", sample.call, context.model, original, accuracy, context.trains, is_whole=True)
    except Mismatch as error:
        return anyone(str(error)), []
    except Exception as error:  # what only shows where replaced parts meet
        return anyone(raised("call", error)), []
    bad = [f"{d.quantity} differs by {d.relative:.1e}, more than {d.tolerance:.0e}" for d in differences if not d.ok]
    return anyone(bad[0] if bad else None), differences


def _least_exact(kept: list[Kept]) -> str:
    def error(one: Kept) -> float:
        return max((d.relative / max(d.tolerance, 1e-30) for d in one.differences), default=0.0)

    return max(kept, key=error).proposal.pattern


def revert(changes: Changes, outcome: Outcome, kept: Kept, reason: str) -> None:
    changes.undo(kept.change)
    outcome.kept.remove(kept)
    outcome.refusals.append(Refusal(kept.proposal.path, kept.proposal.pattern, reason))


def compare_whole(
    model: nn.Module,
    context: Context,
    changes: Changes,
    outcome: Outcome,
    sample: Sample,
    tuned: Tuning,
    budget: Budget,
    say: Callable[[str], None],
) -> Measured:
    """Times the model with and without the changes, in turns; changes that do not pay are undone."""
    say("measuring before and after")
    measured = Measured()
    _time(model, context, changes, sample, budget, measured)
    if (outcome.kept or tuned.change) and not pays(measured.timings["before"], measured.timings["after"]):
        ratio = measured.timings["before"].median_us / measured.timings["after"].median_us
        measured.notes.append(f"the whole was measured {ratio:.2f}x as fast with the replacements, so they were undone")
        for kept in list(reversed(outcome.kept)):
            revert(changes, outcome, kept, f"the whole model was not faster with the replacements ({ratio:.2f}x)")
        tuned.leave(changes, lambda gain: f"{gain} alone; all was undone, the whole was not faster ({ratio:.2f}x)")
        _copy_before(measured)
    return measured


def _time(
    model: nn.Module, context: Context, changes: Changes, sample: Sample, budget: Budget, measured: Measured
) -> None:
    run = sample.step(model)
    held = list(changes.applied)

    def apply_all() -> None:
        for change in held:
            changes.apply(change)

    off, on = switches(changes.undo_all, apply_all)
    ways = {"before": (off, run), "after": (on, run)}
    if not held:
        del ways["after"]  # there is nothing to compare
    with gradients_kept(context.model), working(context.model, context.trains):
        try:
            # It decides about everything: as many turns as a verdict wants, while the whole call may take as long.
            seconds = budget.measure_seconds("whole")
            measured.timings = interleaved(ways, context.device, seconds, most_seconds=budget.left_in_all())
            listing = _LISTING_RUNS * budget.step_seconds
            for name, (turn, _) in reversed(ways.items()):
                measured.kernels[name] = []
                if not budget.may_take(listing):
                    measured.notes.append(f"memory and kernels {name} are not listed: the budget was spent")
                    continue
                turn()
                began = time.monotonic()
                if context.trains:
                    sample.clear(
                        model
                    )  # the profiler warns of memory that was there before and is freed while it looks
                measured.peaks[name] = peak_bytes(run, context.device)
                if name == "after" and (held_by_graphs := graph_bytes(context.model)):
                    measured.peaks[name] = (measured.peaks[name] or 0) + held_by_graphs
                    measured.notes.append(f"the memory after includes {held_by_graphs / 2**30:.2f} GiB of CUDA graphs")
                try:
                    measured.kernels[name], launches = kernels_of(run, context.device, context.runs_compiled_code)
                except Exception as error:  # a profiler or a counter may not know what a model does
                    measured.kernels[name], launches = [], 0
                    measured.notes.append(raised(f"listing the kernels {name}", error))
                measured.launches[name] = launches or None
                listing = time.monotonic() - began
        finally:
            on()
    if not held:
        _copy_before(measured)


def _copy_before(measured: Measured) -> None:
    tables: tuple[dict[str, Any], ...] = (measured.timings, measured.peaks, measured.launches, measured.kernels)
    for values in tables:
        values["after"] = values.get("before")
