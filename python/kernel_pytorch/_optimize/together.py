"""What parts cannot tell one by one, tried together: the whole model with all of them and without, in turns. They stay
where the whole is faster. Those are gains too small to be told, by the device's own time on a GPU; and parts with less
of the device's time and more of the host's, by the model's calls as they will be.
"""

from __future__ import annotations

from collections.abc import Callable

from .changes import Change
from .choose import Chooser, Kept, Outcome
from .measure import Timing, interleaved, switches
from .run import Sample, gradients_kept
from .runner import working
from .verdicts import faster
from .whole import revert


def try_together(chooser: Chooser, sample: Sample, seconds: float, say: Callable[[str], None]) -> str | None:
    """Applies, verifies and times what was left undecided; returns a note of what came of it."""
    found = _applied(chooser)
    if not found:
        return None
    say(f"small gains, timed together: {len(found)}")
    on_gpu = chooser.context.device.type == "cuda"
    before, after = _time(chooser, sample, [kept.change for kept in found], seconds, queued=on_gpu)
    parts = "1 part with a small gain" if len(found) == 1 else f"{len(found)} parts with small gains, together"
    words = f"{parts}: {before.median_us:.0f} us without and {after.median_us:.0f} us"
    if faster(before, after):
        _keep(chooser.outcome, found)
        return f"{words} with them, so they were taken"
    for kept in reversed(found):
        chooser.changes.undo(kept.change)
    return f"{words} with them, so they were left"


def confirm(chooser: Chooser, sample: Sample, say: Callable[[str], None]) -> None:
    """Parts that cost the host more than they did, where calls are no replays: kept if the whole is faster, and if
    there is time to see that."""
    found = [kept for kept in chooser.outcome.kept if kept.costs_calls]
    if not found:
        return
    if not chooser.budget.has_time_for("last"):
        for kept in found:
            reason = f"its calls take longer, and whether the whole gains was {chooser.budget.reason()}"
            revert(chooser.changes, chooser.outcome, kept, reason)
        return
    seconds = chooser.budget.measure_seconds("last")
    say(f"timing the whole with {len(found)} parts whose calls take longer, and without")
    before, after = _time(chooser, sample, [kept.change for kept in found], seconds, queued=False)
    if faster(before, after):
        return
    ratio = before.median_us / after.median_us
    for kept in found:
        alone = kept.before.median_us / kept.after.median_us if kept.before and kept.after else 1.0
        reason = f"{alone:.2f}x alone by the device's own time, not kept: calls take longer, the whole is {ratio:.2f}x"
        revert(chooser.changes, chooser.outcome, kept, reason)


def _applied(chooser: Chooser) -> list[Kept]:
    """The undecided ones that verify, in force. What a larger part passes by stays out."""
    covered = {path for kept in chooser.outcome.kept for path in (*kept.proposal.covers, *kept.way.covers)}
    covered |= {kept.proposal.path for kept in chooser.outcome.kept}
    found: list[Kept] = []
    for proposal, decision in chooser.undecided:
        if proposal.path in covered or decision.maybe is None:
            continue
        call = chooser.context.recording.call(proposal.path)
        assert call is not None
        way = proposal.ways[decision.maybe]
        change = way.change()
        chooser.changes.apply(change)
        failure, differences = chooser.check(proposal, call, is_brief=True)
        if failure is not None:
            chooser.changes.undo(change)
            continue
        covered |= {proposal.path, *proposal.covers, *way.covers}
        found.append(Kept(proposal, way, change, differences, decision.before, decision.after))
    return found


def _time(
    chooser: Chooser, sample: Sample, changes: list[Change], seconds: float, queued: bool
) -> tuple[Timing, Timing]:
    model = chooser.context.model

    def undo_all() -> None:
        for change in reversed(changes):
            chooser.changes.undo(change)

    def apply_all() -> None:
        for change in changes:
            chooser.changes.apply(change)

    run = sample.step(model)
    off, on = switches(undo_all, apply_all)
    with gradients_kept(model), working(model, chooser.context.trains):
        try:
            ways = {"before": (off, run), "after": (on, run)}
            found = interleaved(ways, chooser.context.device, seconds, queued)
        finally:
            on()
    return found["before"], found["after"]


def _keep(outcome: Outcome, found: list[Kept]) -> None:
    taken = {(kept.proposal.path, kept.proposal.pattern) for kept in found}
    outcome.refusals[:] = [one for one in outcome.refusals if (one.path, one.pattern) not in taken]
    for kept in found:
        outcome.differences.extend(kept.differences)
        outcome.kept.append(kept)
