"""From proposals to what is in force: each way is applied, verified against the original, timed, and kept or undone.

Small parts come first and stay in force while larger ones are tried, so that a larger one is measured for what it adds.
Modules that do the same work share one decision; every one of them is verified.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from .agreement import anyone
from .budget import Budget
from .changes import Change, Changes
from .costs import Cost, count
from .measure import Timing, interleaved, switches
from .patterns.context import Context
from .patterns.torch_layers import passed_by
from .record import copied
from .sites import Call, Proposal, Refusal, Way
from .verify import Difference, Mismatch, Results, evaluating, random_like, results_of, verify

LEAST_GAIN = 1.01
CLEAR_GAIN = 1.03  # a part that is slower by no more than this may still be worth it by another clock, or with others
TIE = 1.01  # of two ways this close the earlier stays: those with less work come first
FAINT_GAIN = 1.002  # of the whole, by its median and by its lower quartile
LEAST_SAVING_US = 20.0  # predicted, below which a gain that no clock can tell is not worth a change


@dataclass
class Kept:
    """A replacement in force."""

    proposal: Proposal
    way: Way
    change: Change
    differences: list[Difference]
    before: Timing | None = None
    after: Timing | None = None
    predicted: dict[str, Any] = field(default_factory=dict)
    costs_calls: bool = False  # less time of the device and more of the host: the whole decides, see together.py


@dataclass
class Decision:
    """For all modules of one signature: the way, or why none."""

    way: int | None
    reason: str
    before: Timing | None = None
    after: Timing | None = None
    maybe: int | None = None  # a way that may be faster by less than can be told of the part, see together.py
    costs_calls: bool = False


@dataclass
class Outcome:
    """Everything that was decided."""

    kept: list[Kept] = field(default_factory=list)
    refusals: list[Refusal] = field(default_factory=list)
    differences: list[Difference] = field(default_factory=list)


def proposals(
    context: Context, patterns: Iterable[ModuleType], budget: Budget, share: float = 0.3
) -> tuple[list[Proposal], list[Refusal]]:
    """What every pattern finds in every module that the sample reaches, pattern by pattern, until a share of the budget
    is spent."""
    found: list[Proposal] = []
    refused: list[Refusal] = []
    for pattern in patterns:
        for path, module in context.model.named_modules():
            call = context.recording.call(path)
            if call is None or passed_by(context, path):
                continue
            if budget.is_spent(share):
                refused.append(Refusal("", pattern.NAME, budget.reason()))
                break
            one = pattern.find(context, path, module, call)
            if isinstance(one, Proposal):
                one.signature = (one.pattern, one.source, context.recording.signatures[path])
                found.append(one)
            elif isinstance(one, Refusal):
                refused.append(one)
    return found, refused


class Chooser:
    """Tries proposals on a model whose changes it owns."""

    def __init__(self, context: Context, changes: Changes, budget: Budget, share: float = 0.6) -> None:
        self.context, self.changes, self.budget, self.share = context, changes, budget, share
        self.decisions: dict[tuple[Any, ...], Decision] = {}
        self.outcome = Outcome()
        self.undecided: list[tuple[Proposal, Decision]] = []
        self.by_calls = False  # what is tried saves the host's time, as a graph does

    def try_one(self, proposal: Proposal, seconds: float, predicted_us: float = 0.0) -> None:
        """Keeps the fastest way that verifies, or says why none. `predicted_us` is what the plan says it saves."""
        call = self.context.recording.call(proposal.path)
        assert call is not None
        decision = self.decisions.get(proposal.signature)
        if (decision is None or decision.way is not None) and self.budget.is_spent(self.share):
            self.outcome.refusals.append(Refusal(proposal.path, proposal.pattern, self.budget.reason()))
            return
        if decision is None:
            decision = self.decisions[proposal.signature] = self._decide(proposal, call, seconds, predicted_us)
        if decision.way is None:
            self.outcome.refusals.append(Refusal(proposal.path, proposal.pattern, decision.reason))
            if decision.maybe is not None:
                self.undecided.append((proposal, decision))
            return
        way = proposal.ways[decision.way]
        change = way.change()
        self.changes.apply(change)
        failure, differences = self.check(proposal, call)
        self.outcome.differences.extend(differences)
        if failure is not None:
            self.changes.undo(change)
            self.outcome.refusals.append(Refusal(proposal.path, proposal.pattern, failure))
            return
        self._lift(proposal, way)
        kept = Kept(proposal, way, change, differences, decision.before, decision.after)
        kept.costs_calls = decision.costs_calls
        self.outcome.kept.append(kept)

    def _lift(self, proposal: Proposal, way: Way) -> None:
        """Parts that a larger one passes by are left as they were. Narrow layers are called by those that would read
        their weights otherwise, and stay.
        """
        for kept in list(self.outcome.kept):
            path, narrow = kept.proposal.path, kept.proposal.approximate and not way.narrow
            if path not in proposal.covers and (narrow or path not in way.covers):
                continue
            self.changes.undo(kept.change)
            self.outcome.kept.remove(kept)

    def check(self, proposal: Proposal, call: Call) -> tuple[str | None, list[Difference]]:
        """Whether the module computes what it did, as (why not or None, differences)."""
        module, gradients = proposal.module, self.context.trains

        def original(inputs: Call, seed: int) -> Results:
            with self.changes.suspended():
                return results_of(module, inputs, gradients, seed)

        try:
            inside = f"{proposal.path}." if proposal.path else ""
            kept = [one.proposal for one in self.outcome.kept]
            rounds = proposal.approximate or any(one.approximate and one.path.startswith(inside) for one in kept)
            accuracy = "tolerant" if rounds else "exact"
            differences = verify(proposal.path, call, module, original, accuracy, gradients, proposal.path == "")
        except Mismatch as error:
            return anyone(str(error)), []
        worst = max(differences, key=lambda one: one.relative / max(one.tolerance, 1e-30))
        words = f"its {worst.quantity} differs by {worst.relative:.1e} of a row, more than {worst.tolerance:.0e}"
        return anyone(None if worst.ok else words), differences

    def _decide(self, proposal: Proposal, call: Call, seconds: float, predicted_us: float) -> Decision:
        """Verifies and times every way once."""
        best: Decision | None = None
        maybe = Decision(None, "")
        reasons: list[str] = []
        for index, way in enumerate(proposal.ways):
            change = way.change()
            self.changes.apply(change)
            try:
                failure, differences = self.check(proposal, call)
                if failure is not None:
                    self.outcome.differences.extend(differences)
                    reasons.append(f"{way.name}: {failure}")
                    continue
                if self.context.compiled:  # the whole decides, see compiled.py
                    return Decision(index, "")
                found = self._time(proposal, call, change, seconds)
            finally:
                self.changes.undo(change)
            before, after = found[0]
            slower_calls = len(found) > 1 and _gain(*found[-1]) < 2 - CLEAR_GAIN
            gains = pays(before, after)
            if not gains and not (pays(*found[-1]) and _gain(before, after) > 2 - CLEAR_GAIN):
                reasons.append(f"{way.name}: {_told(*found)}")
                ratio = min(before.median_us / after.median_us, _gain(before, after))
                may_gain = ratio > 1.0 or saves(before, after, predicted_us)
                if may_gain and _gain(before, after) > _gain(maybe.before, maybe.after):
                    maybe = Decision(None, "", before, after, index)
            elif best is None or _gain(before, after) > TIE * _gain(best.before, best.after):
                best = Decision(index, "", before, after, costs_calls=slower_calls)
        maybe.reason = self._words(maybe) + "; ".join(reasons)
        return best or maybe

    def _words(self, decision: Decision) -> str:
        if self.context.compiled:
            return "it computes something else. "
        return "not faster here. " if decision.maybe is None else "no clear gain of its own. "

    def _time(self, proposal: Proposal, call: Call, change: Change, seconds: float) -> list[tuple[Timing, Timing]]:
        """The module with and without the change, in turns: of a GPU its own time, which decides, and that of calls; of
        a CPU the one that there is.
        """
        module = self.context.model.get_submodule(proposal.timed) if proposal.timed else proposal.module
        run = runner(module, self.context.recording.call(proposal.timed or proposal.path) or call, self.context.trains)
        clocks = [True, False] if self.context.device.type == "cuda" and not self.by_calls else [False]
        off, on = switches(change.undo, change.apply)
        try:
            with working(module, self.context.trains):
                left = max(self.budget.left(self.share), 0.0)
                ways = {"before": (off, run), "after": (on, run)}
                each = min(seconds, left) / len(clocks)
                found = [interleaved(ways, self.context.device, each, queued) for queued in clocks]
        finally:
            on()
        return [(one["before"], one["after"]) for one in found]


def _told(decides: tuple[Timing, Timing], *others: tuple[Timing, Timing]) -> str:
    """By which clock, and what it said."""
    before, after = decides
    words = f"{after.median_us:.0f} us against {before.median_us:.0f} us as it is"
    ratio = f"({before.median_us / after.median_us:.2f}x)"
    return f"{words} by the device's own time {ratio}" if others else f"{words} {ratio}"


def pays(before: Timing, after: Timing) -> bool:
    """Whether the change is faster beyond doubt, as the report would call it: the quartiles do not overlap."""
    return _gain(before, after) >= LEAST_GAIN and after.high_us < before.low_us


def faster(before: Timing, after: Timing) -> bool:
    """Whether the whole is faster, by however little, beyond doubt."""
    return _gain(before, after) >= FAINT_GAIN and after.high_us < before.low_us


def saves(before: Timing, after: Timing, predicted_us: float) -> bool:
    """Whether a change too small for the clock is worth a trial with others: no slower as far as it can tell, and less
    work by the plan."""
    overlaps = before.low_us <= after.high_us and after.low_us <= before.high_us
    return predicted_us > LEAST_SAVING_US and overlaps and _gain(before, after) > 2 - CLEAR_GAIN


def _gain(before: Timing | None, after: Timing | None) -> float:
    return before.low_us / after.low_us if before is not None and after is not None else 0.0


def working(module: nn.Module, trains: bool) -> Any:
    """The mode in which the module is timed: as the user left it for training, evaluating for inference."""
    from contextlib import nullcontext

    return nullcontext() if trains else evaluating(module)


def runner(module: nn.Module, call: Call, trains: bool) -> Callable[[], object]:
    """One run of a part: forward, and for training backward too, into nobody's .grad."""
    held = Call(copied(call.args), copied(call.kwargs))
    first = held.first()
    if not trains:

        def infer() -> object:
            with torch.no_grad():
                return held.run(module)

        return infer
    if first is not None:
        first.requires_grad_()
    leaves: list[Tensor] = [p for p in module.parameters() if p.requires_grad]
    leaves += [first] if first is not None else []
    gradients: list[Tensor] = []  # drawn in the first run: of ones a GPU draws less power than of numbers

    def step() -> object:
        from torch.utils import _pytree as pytree

        outputs = [leaf for leaf in pytree.tree_leaves(held.run(module)) if isinstance(leaf, Tensor)]
        outputs = [leaf for leaf in outputs if leaf.requires_grad]
        if not outputs:
            return None
        if [one.shape for one in outputs] != [one.shape for one in gradients]:
            gradients[:] = [random_like(leaf, i) for i, leaf in enumerate(outputs)]
        return torch.autograd.grad(outputs, leaves, gradients, allow_unused=True)

    return step


def cost_of(module: nn.Module, call: Call, trains: bool, ridge: float) -> Cost:
    """Counted in one run of the module as it is."""
    run = runner(module, call, trains)
    with working(module, trains):
        return count(run, ridge)
