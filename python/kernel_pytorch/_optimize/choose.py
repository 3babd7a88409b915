"""From proposals to what is in force: each way is applied, verified against the original, timed, and kept or undone.

Small parts come first and stay in force while larger ones are tried, so that a larger one is measured for what it adds.
Modules that do the same work share one decision; every one of them is verified.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from torch import nn

from .agreement import anyone
from .budget import Budget
from .changes import Change, Changes
from .measure import Timing, interleaved, switches
from .patterns.context import Context
from .patterns.torch_layers import passed_by
from .runner import runner, working
from .sites import Call, Found, Proposal, Refusal, Way, raised
from .verdicts import judge
from .verify import Difference, Mismatch, Results, results_of, verify, wider_results

_WIDER_RUNS = 4  # of the original, that one in a wider type may take
_WIDER_SHARE = 0.1  # of a stage's seconds left, that it may take


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
    maybe: int | None = None  # a variant whose gain is below the noise of the part, see together.py
    costs_calls: bool = False


@dataclass
class Outcome:
    """Everything that was decided."""

    kept: list[Kept] = field(default_factory=list)
    refusals: list[Refusal] = field(default_factory=list)
    differences: list[Difference] = field(default_factory=list)


def proposals(
    context: Context, patterns: Iterable[ModuleType], budget: Budget, stage: str = "find"
) -> tuple[list[Proposal], list[Refusal]]:
    """What every pattern finds in every module that the sample reaches, pattern by pattern, until the stage's share of
    the budget is spent."""
    found: list[Proposal] = []
    refused: list[Refusal] = []
    for pattern in patterns:
        for path, module in context.model.named_modules():
            call = context.recording.call(path)
            if call is None or passed_by(context, path) or context.recording.has_closed(path):
                continue
            if budget.is_spent(stage):
                refused.append(Refusal("", pattern.NAME, budget.reason()))
                break
            one = _find(pattern, context, path, module, call)
            if isinstance(one, Proposal):
                one.signature = (one.pattern, one.source, context.recording.signatures[path])
                found.append(one)
            elif isinstance(one, Refusal):
                refused.append(one)
    return found, refused


def _find(pattern: ModuleType, context: Context, path: str, module: nn.Module, call: Call) -> Found:
    try:
        return pattern.find(context, path, module, call)  # type: ignore[no-any-return]
    except Exception as error:  # a model's own code runs in there, and may fail in any way
        return Refusal(path, pattern.NAME, raised("looking at it", error))


class Chooser:
    """Tries proposals on a model whose changes it owns."""

    def __init__(self, context: Context, changes: Changes, budget: Budget) -> None:
        self.context, self.changes, self.budget, self.stage = context, changes, budget, "parts"
        self.decisions: dict[tuple[Any, ...], Decision] = {}
        self.outcome = Outcome()
        self.undecided: list[tuple[Proposal, Decision]] = []
        self._runs: tuple[nn.Module | None, dict[tuple[Any, ...], Results | None]] = (None, {})
        self._run_seconds: dict[tuple[Any, ...], float] = {}  # of the newest run of each kind
        self.by_calls = False  # what is tried saves the host's time, as a graph does

    def try_one(self, proposal: Proposal, seconds: float, predicted_us: float = 0.0, share: float = 1.0) -> None:
        """Keeps the fastest way that verifies, or says why none. `predicted_us` is what the plan says it saves; no
        second way is begun once this share of the stage's seconds is over."""
        call = self.context.recording.call(proposal.path)
        assert call is not None
        decision = self.decisions.get(proposal.signature)
        if (decision is None or decision.way is not None) and self.budget.is_spent(self.stage):
            self.outcome.refusals.append(Refusal(proposal.path, proposal.pattern, self.budget.reason()))
            return
        if decision is None:
            decision = self.decisions[proposal.signature] = self._decide(proposal, call, seconds, predicted_us, share)
        if decision.way is None:
            self.outcome.refusals.append(Refusal(proposal.path, proposal.pattern, decision.reason))
            if decision.maybe is not None:
                self.undecided.append((proposal, decision))
            return
        way = proposal.ways[decision.way]
        change = way.change()
        self.changes.apply(change)
        failure, differences = self.check(proposal, call, is_brief=True)
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

    def check(
        self, proposal: Proposal, call: Call, perturbs: bool = False, is_brief: bool = False
    ) -> tuple[str | None, list[Difference]]:
        """Whether the module computes what it did, as (why not or None, differences); with `perturbs` by its errors
        against a wider type, and of a part also with other parameters, which says it for all modules that do the same
        work: for these `is_brief` is enough."""
        module, gradients = proposal.module, self.context.trains
        try:
            inside = f"{proposal.path}." if proposal.path else ""
            kept = [one.proposal for one in self.outcome.kept]
            rounds = proposal.approximate or any(one.approximate and one.path.startswith(inside) for one in kept)
            accuracy = "tolerant" if rounds else "exact"
            is_whole = proposal.path == ""
            by_wider = perturbs and not rounds
            perturbs = by_wider and not is_whole
            original = self._once(module, lambda *inputs: results_of(module, *inputs))
            wider = self._once(module, lambda *inputs: wider_results(module, *inputs), "wider")
            differences = verify(
                proposal.path, call, module, original, accuracy, gradients, is_whole, perturbs,  # type: ignore[arg-type]
                wider if by_wider else lambda *_: None, is_brief,
            )  # fmt: skip
        except Mismatch as error:
            return anyone(str(error)), []
        except Exception as error:  # the model's own code runs in there, on a replaced part
            return anyone(raised("running it", error)), []
        worst = max(differences, key=lambda one: one.relative / max(one.tolerance, 1e-30))
        words = f"its {worst.quantity} differs by {worst.relative:.1e} of a row, more than {worst.tolerance:.0e}"
        return anyone(None if worst.ok else words), differences

    def _once(
        self, module: nn.Module, run: Callable[[Call, bool, int], Results | None], kind: str = ""
    ) -> Callable[[Call, int, bool], Results | None]:
        """Runs of the original, each once: every way of one part is judged against the same."""

        def known(inputs: Call, seed: int, is_perturbed: bool) -> Results | None:
            if self._runs[0] is not module:
                self._runs = (module, {})
            results, key = self._runs[1], (kind, seed, is_perturbed)
            if key not in results:
                began = time.monotonic()
                with self.changes.suspended():
                    fits = kind != "wider" or self._has_time_for_wider(seed, is_perturbed)
                    results[key] = run(inputs, self.context.trains, seed) if fits else None
                self._run_seconds[kind, seed, is_perturbed] = time.monotonic() - began
            return results[key]

        return known

    def _has_time_for_wider(self, seed: int, is_perturbed: bool) -> bool:
        """Whether a run in a wider type, which takes some times as long, leaves the stage most of its seconds; else
        fixed tolerances decide."""
        seconds = _WIDER_RUNS * self._run_seconds.get(("", seed, is_perturbed), 0.0)
        return anyone(None if seconds <= _WIDER_SHARE * self.budget.left(self.stage) else "no time") is None

    def _decide(
        self, proposal: Proposal, call: Call, seconds: float, predicted_us: float, share: float = 1.0
    ) -> Decision:
        """Verifies and times every way once."""
        timed: list[list[tuple[Timing, Timing]]] = []
        reasons: list[str] = []
        for index, way in enumerate(proposal.ways):
            timed.append([])
            if index and self.budget.is_spent(self.stage, share):
                reasons.append(f"{way.name}: {self.budget.reason()}")
                continue
            change = way.change()
            try:
                self.changes.apply(change)
                failure, differences = self.check(proposal, call, perturbs=True)
                if failure is not None:
                    self.outcome.differences.extend(differences)
                    reasons.append(f"{way.name}: {failure}")
                    continue
                if self.context.compiled:  # the whole decides, see compiled.py
                    return Decision(index, "")
                timed[index] = self._time(proposal, call, change, seconds)
            except Exception as error:
                reasons.append(f"{way.name}: {raised('trying it', error)}")
                continue
            finally:
                self.changes.undo(change)
            reasons.append(f"{way.name}: {_comparison_text(*timed[index])}")
        verdict = judge(timed, predicted_us)
        if verdict.way is not None:
            return Decision(verdict.way, "", *timed[verdict.way][0], costs_calls=verdict.costs_calls)
        maybe = Decision(None, "") if verdict.maybe is None else Decision(None, "", *timed[verdict.maybe][0])
        maybe.maybe = verdict.maybe
        maybe.reason = self._summary(maybe, any(timed)) + "; ".join(reasons)
        return maybe

    def _summary(self, decision: Decision, was_timed: bool) -> str:
        if not was_timed:
            return "it computes something else. "
        return "not faster here. " if decision.maybe is None else "no clear gain of its own. "

    def _time(self, proposal: Proposal, call: Call, change: Change, seconds: float) -> list[tuple[Timing, Timing]]:
        """The module with and without the change, in turns: of a GPU its own time, which decides, and that of calls; of
        a CPU the one that there is.
        """
        path = proposal.path if proposal.timed is None else proposal.timed
        module = self.context.model.get_submodule(path)
        run = runner(module, self.context.recording.call(path) or call, self.context.trains)
        clocks = [True, False] if self.context.device.type == "cuda" and not self.by_calls else [False]
        off, on = switches(change.undo, change.apply)
        try:
            with working(module, self.context.trains):
                left = max(self.budget.left(self.stage), 0.0)
                ways = {"before": (off, run), "after": (on, run)}
                each = min(seconds, left) / len(clocks)
                found = [interleaved(ways, self.context.device, each, queued) for queued in clocks]
        finally:
            on()
        return [(one["before"], one["after"]) for one in found]


def _comparison_text(decides: tuple[Timing, Timing], *others: tuple[Timing, Timing]) -> str:
    """By which clock, and what it said."""
    before, after = decides
    words = f"{after.median_us:.0f} us against {before.median_us:.0f} us as it is"
    ratio = f"({before.median_us / after.median_us:.2f}x)"
    return f"{words} by the device's own time {ratio}" if others else f"{words} {ratio}"
