"""Under torch.compile parts are chosen by the time of the whole: a custom op stops the compiler from fusing around it.

Every part that verifies is taken first; then the model is compiled and timed with several sets of them, in turns, and
the fastest set stays. torch.compile notices which forwards are in force, so each set is compiled once.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from .changes import Changes
from .choose import Kept, Outcome
from .measure import Timing, interleaved
from .patterns.context import Context
from .run import Sample, gradients_kept
from .runner import working
from .verdicts import pays
from .whole import revert

NOTHING = "as it is"


def sets_of(kept: list[Kept]) -> dict[str, list[Kept]]:
    """What is compared: nothing, attention and losses alone, everything bound by products, everything."""
    attention = [one for one in kept if one.proposal.pattern.startswith(("attention", "cross entropy"))]
    heavy = [one for one in kept if not one.proposal.pointwise]
    sets: dict[str, list[Kept]] = {NOTHING: []}
    for name, members in (("attention", attention), ("products and attention", heavy), ("everything", kept)):
        if members and members not in sets.values():
            sets[name] = members
    return sets


def choose_set(
    model: nn.Module,
    context: Context,
    changes: Changes,
    outcome: Outcome,
    sample: Sample,
    seconds: float,
    say: Callable[[str], None],
) -> str | None:
    """Leaves the fastest set in force; returns a note of what was compared."""
    if not outcome.kept:
        return None
    sets = sets_of(list(outcome.kept))
    order = list(changes.applied)
    run = sample.step(model)

    def switch(members: list[Kept]) -> Callable[[], None]:
        wanted = [change for change in order if any(change is one.change for one in members)]

        def turn() -> None:
            if changes.applied != wanted:
                changes.undo_all()
                for change in wanted:
                    changes.apply(change)

        return turn

    say(f"compiling and timing {len(sets)} sets of replacements")
    with gradients_kept(context.model), working(context.model, context.trains):
        try:
            timings = interleaved(
                {name: (switch(members), run) for name, members in sets.items()}, context.device, seconds
            )
        finally:
            switch(outcome.kept)()
    best = _best(timings)
    for kept in reversed([one for one in outcome.kept if one not in sets[best]]):
        reason = (
            f"compiled, the model is fastest with {best if best != NOTHING else 'no replacement'}: {_summary(timings)}"
        )
        revert(changes, outcome, kept, reason)
    return f"compiled and timed in turns: {_summary(timings)}"


def _best(timings: dict[str, Timing]) -> str:
    name = min(timings, key=lambda one: timings[one].median_us)
    return name if name == NOTHING or pays(timings[NOTHING], timings[name]) else NOTHING


def _summary(timings: dict[str, Timing]) -> str:
    return ", ".join(f"{name} {timing.median_us:.0f} us" for name, timing in timings.items())
