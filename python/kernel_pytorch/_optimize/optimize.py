"""`kernel_pytorch.optimize`: a model in, the same model out, faster, with a report of what was done and measured.

The steps: record what every module gets on the sample; find the patterns we have kernels for; ask the plan (C++) what
each would gain; apply, verify and time them one by one; tune their kernels; verify and time the whole. Nothing is
copied: modules keep their class, parameters and names, and get another `forward`. `restore` takes it away; so does an
exception on the way.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .. import _torch as _torch  # first: it says what is missing where torch is missing or old
from . import optimizers
from .agreement import among_ranks, is_shared
from .budget import Budget, shown_progress
from .changes import KEY, Changes, changes_of, uncompiled
from .choose import Chooser, Outcome, proposals
from .compiled import choose_set
from .measure import once_us, warm_up
from .patterns import FIRST_PATTERNS, LAST_PATTERNS, LATER_PATTERNS, few_bits, named
from .patterns.context import Context
from .pending import forget_first_call
from .plan import Plan, plan_sites, shares_of
from .record import record, why_closed
from .report import Report
from .report.collect import collect, collect_nothing
from .roofs import roofs
from .run import Sample, gradients_kept, sample_of
from .runner import working
from .sites import Proposal, Refusal, raised
from .state import left_as_it_was
from .together import confirm, try_together
from .traced.traced import attach
from .tuned import Tuning, tune_step
from .whole import check_whole, compare_whole, revert, verify_whole

__all__ = ["OptimizationResult", "optimize", "restore"]


@dataclass
class OptimizationResult:
    """What `optimize` gives back."""

    model: nn.Module
    report: Any

    def restore(self) -> nn.Module:
        """The model as it was before."""
        return restore(self.model)


def optimize(
    model: nn.Module,
    sample_inputs: Any,
    goal: str = "inference",
    budget_seconds: float = 60.0,
    accuracy: str = "exact",
    *,
    loss: Callable[[Any], Tensor] | None = None,
    optimizer: Optimizer | None = None,
    patterns: Collection[str] | None = None,
    weights: str | None = None,
    tune: str = "model",
    compile: bool = False,
    progress: Callable[[str], None] | None = None,
) -> OptimizationResult:
    """Makes the model faster, in place, and shows it.

    Args:
        model: any nn.Module, or what torch.compile made of one. It keeps its class, parameters, names and hooks. All
            ranks that share it (DTensors: tensor parallel, FSDP2) call optimize.
        sample_inputs: what it is called with: a tensor, a tuple of positional or a dict of named arguments, of the
            shapes that matter. Call optimize under torch.autocast where the model will run under it.
        goal: "inference" measures forward, "train" forward and backward.
        budget_seconds: how long it may take. The whole call ends within 1.5 times that, plus a second of its start (two
            runs of the sample and a measurement of the machine). Parts for which there is no time are left as they
            were, and the report says so.
        accuracy: "exact" keeps the model's precision; "tolerant" also tries narrower products (FP8, bf16).
        weights: with accuracy="tolerant" and for inference: linear layers read their weights in "nvfp4", "mxfp4" or
            "int4", or in what is fastest of them ("auto"), wherever that is faster. The parameters stay; codes lie next
            to them (`precision.UltraPrecisionModule` keeps codes alone).
        loss: for training, from the output to a scalar; by default the output's `loss`, or none: backward from
            random gradients of all outputs.
        optimizer: of the model that trains: torch's AdamW gets a step on our kernel, and stays the same object.
        patterns: names of the patterns to look for, as _optimize.patterns.names() lists them; all by default.
        tune: where some of the budget goes to measuring which of our kernels is the fastest for this model's shapes:
            "model" keeps what makes the whole faster until `restore` (kernels are chosen per process: other models have
            the use of it meanwhile), "cache" also writes it to the tuning cache on disk, which every process reads and
            `restore` leaves alone, "off" measures nothing.
        compile: also compiles the model, as it was given, with torch.compile(backend="kernel_pytorch") and keeps that
            where it is faster than everything else. A compilation that has begun is finished, whatever the budget says.
        progress: called with one line after each step; None shows one on a terminal's standard error.

    Returns:
        `.model` (the same object), `.report` (print it, or .save("report.html")) and `.restore()`.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"optimize: model is {type(model).__name__}; it must be a torch.nn.Module")
    if goal not in ("inference", "train"):
        raise ValueError(f'optimize: goal is "{goal}"; it is "inference" or "train"')
    if accuracy not in ("exact", "tolerant"):
        raise ValueError(f'optimize: accuracy is "{accuracy}"; it is "exact" or "tolerant"')
    if weights not in (None, "auto", *few_bits.FORMATS):
        raise ValueError(
            f'optimize: weights is "{weights}"; it is None, "auto" or one of {", ".join(few_bits.FORMATS)}'
        )
    if weights is not None and (accuracy != "tolerant" or goal != "inference"):
        raise ValueError(
            f'optimize: weights is "{weights}" with accuracy "{accuracy}" and goal "{goal}"; few bits round weights '
            'that stay as they are: use accuracy="tolerant" and goal="inference"'
        )
    if tune not in ("model", "cache", "off"):
        raise ValueError(f'optimize: tune is "{tune}"; it is "model", "cache" or "off"')
    if budget_seconds <= 0:
        raise ValueError(f"optimize: budget_seconds is {budget_seconds}; it must be positive")
    chosen = named(patterns, compile)
    inner = uncompiled(model)
    if changes_of(inner) is not None:
        raise RuntimeError("optimize: the model is optimized already; call kernel_pytorch.restore(model) first")
    budget = Budget(budget_seconds)
    sample = sample_of(model, sample_inputs, goal, loss)
    changes = Changes(hidden_in=model if model is inner else None)
    try:
        # What is made here outlives the caller's inference mode, whose tensors could not be trained with.
        apart = torch.inference_mode(False) if torch.is_inference_mode_enabled() else contextlib.nullcontext()
        with apart, among_ranks(inner), left_as_it_was(inner), shown_progress(progress) as say:
            data = _optimize(
                model, inner, sample, goal, accuracy, weights, changes, budget, say, chosen, optimizer, tune
            )
    except BaseException:  # Ctrl-C too: the model is left as it was
        changes.release()
        changes.undo_all()
        raise
    if changes.applied:
        inner.__dict__[KEY] = changes
    return OptimizationResult(model, Report(data))


def _optimize(
    model: nn.Module,
    inner: nn.Module,
    sample: Sample,
    goal: str,
    accuracy: str,
    weights: str | None,
    changes: Changes,
    budget: Budget,
    say: Callable[[str], None],
    patterns: tuple[ModuleType, ...],
    optimizer: Optimizer | None,
    tune: str,
) -> dict[str, Any]:
    say("running the sample")
    if any(nn.parameter.is_lazy(p) for p in inner.parameters()):
        sample.forward(inner)  # a lazy module has no parameters before its first call
    recording = record(inner, lambda: sample.forward(inner))
    context = Context(inner, goal, accuracy, sample.device, recording, compiled=model is not inner, weights=weights)
    machine = roofs(context.device, sample.dtype)
    step_seconds = _step_seconds(inner, context, sample)
    if "" in recording.closed:
        return collect_nothing(model, context, step_seconds, why_closed(recording.closed[""]), sample)
    budget.start(step_seconds)
    if budget.is_too_small and budget.may_take(step_seconds):  # the machine may have been busy with something else
        step_seconds = min(step_seconds, _step_seconds(inner, context, sample))
        budget.start(step_seconds)
    if budget.is_too_small:
        return collect_nothing(model, context, step_seconds, budget.reason(), sample)
    warm_up()
    budget.start(step_seconds)
    chooser = Chooser(context, changes, budget)
    first = _try_first(chooser, [one for one in FIRST_PATTERNS if one in patterns], sample, machine, say)
    others = [one for one in patterns if one not in (*FIRST_PATTERNS, *LATER_PATTERNS, *LAST_PATTERNS)]
    plan = _try_patterns(chooser, others, machine, say)
    plan.predictions |= first
    chooser.stage = "later"
    later = _try_patterns(chooser, [one for one in LATER_PATTERNS if one in patterns], machine, say)
    plan.predictions |= later.predictions
    outcome = chooser.outcome
    for path, compiler in recording.closed.items():
        outcome.refusals.append(Refusal(path, "every pattern", why_closed(compiler)))
    if not context.compiled and budget.has_time_for("together"):
        note = try_together(chooser, sample, budget.measure_seconds("together"), say)
        plan.notes.extend([note] if note else [])
    if outcome.kept:
        verify_whole(context, changes, outcome, sample, budget, say)
    if context.compiled:
        note = choose_set(model, context, changes, outcome, sample, budget.measure_seconds("compiled"), say)
        plan.notes.extend([note] if note else [])
    tuned = Tuning()
    if tune != "off" and budget.has_time_for("tune"):
        check = functools.partial(check_whole, context, changes, outcome, sample)
        seconds = (budget.measure_seconds("tune"), budget.measure_seconds("tuned"))
        tuned = tune_step(model, context, changes, sample, plan.roofs or {}, *seconds, lambda: check()[0], say)
    chooser.by_calls, chooser.stage = True, "last"
    alone = len(outcome.kept)
    for proposal in _last(context, outcome, patterns, budget):
        chooser.try_one(proposal, budget.measure_seconds("last"))
    changes.release()  # graphs of the trials, in other modes than the model's own
    if len(outcome.kept) == alone:
        confirm(chooser, sample, say)
    measured = compare_whole(model, context, changes, outcome, sample, tuned, budget, say)
    if tune == "cache":
        tuned.keep_on_disk()
    if not context.compiled and not is_shared():
        attach(model, changes, outcome.kept)
    if optimizer is not None:
        optimizers.choose(optimizer, changes, outcome, sample.device, budget.measure_seconds("optimizer"))
    return collect(model, context, outcome, plan, tuned, measured, sample)


def _try_patterns(
    chooser: Chooser, patterns: list[ModuleType], machine: dict[str, Any], say: Callable[[str], None]
) -> Plan:
    """Finds what the patterns know, asks the plan, and tries what it names."""
    is_later = chooser.stage == "later"
    found, refused = proposals(chooser.context, patterns, chooser.budget, "later" if is_later else "find")
    say(f"{len(found)} {'more ' if is_later else ''}parts could be replaced")
    count = "later" if is_later else "count"
    plan = plan_sites(chooser.context, chooser.changes, found, machine, chooser.budget, count)
    chooser.outcome.refusals.extend([*refused, *plan.refusals])
    shares = shares_of(plan.sites)
    for index, site in enumerate(plan.sites):
        predicted = site.prediction
        gain_us = predicted["before_us"] - predicted["after_us"]
        chooser.try_one(site.proposal, predicted["measure_seconds"], gain_us, shares[site.proposal.signature])
        say(f"{index + 1} of {len(plan.sites)}: {site.proposal.path or 'the whole model'}")
    return plan


def _try_first(
    chooser: Chooser, patterns: list[ModuleType], sample: Sample, machine: dict[str, Any], say: Callable[[str], None]
) -> dict[int, dict[str, Any]]:
    """Tries them one after the other. Where one of them is in force, the model is recorded again: the parts inside get
    tensors of another layout. Returns the plan's predictions."""
    context, outcome = chooser.context, chooser.outcome
    predictions: dict[int, dict[str, Any]] = {}
    for pattern in patterns:
        before = len(outcome.kept)
        predictions |= _try_patterns(chooser, [pattern], machine, say).predictions
        kept = outcome.kept[before:]
        if not kept:
            continue
        try:
            context.recording = record(context.model, lambda: sample.forward(context.model))
        except Exception as error:  # code behind the parts may not take the layout that they leave
            for one in reversed(kept):
                revert(chooser.changes, outcome, one, raised("the model with it", error))
    return predictions


def _step_seconds(model: nn.Module, context: Context, sample: Sample) -> float:
    """Seconds of the second run; the first one warms up."""
    run = sample.step(model)
    with gradients_kept(model), working(model, context.trains):
        return once_us(run, context.device) / 1e6


def _last(context: Context, outcome: Outcome, patterns: tuple[ModuleType, ...], budget: Budget) -> list[Proposal]:
    found, refused = proposals(context, [one for one in LAST_PATTERNS if one in patterns], budget, "last")
    outcome.refusals.extend(refused)
    return found


def restore(model: nn.Module) -> nn.Module:
    """Undoes everything that `optimize` did to the model, or what its first call was to do; a model that was not
    optimized is returned as it is."""
    inner = uncompiled(model)
    forget_first_call(model)
    changes = changes_of(inner)
    if changes is not None:
        changes.release()
        changes.undo_all()
        del inner.__dict__[KEY]
    return model
