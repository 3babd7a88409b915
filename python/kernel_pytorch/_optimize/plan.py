"""Asks the core's plan (C++, kernel_pytorch/plan/optimize/model_plan.h) what each replacement would gain, and in which
order to try them. Here the work of each part is counted, before and after, and handed over as numbers.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from .. import _library
from .agreement import agreed
from .budget import Budget
from .changes import Changes
from .measure import float8_rate
from .patterns.context import Context
from .runner import cost_of
from .sites import Proposal, Refusal, raised

_LEAST_US = 50.0  # of a part that takes next to no time itself
_RUNS = 10  # of a way that is decided, for each run of a module that is verified


@dataclass
class PlannedSite:
    proposal: Proposal
    prediction: dict[str, Any]


@dataclass
class Plan:
    """Sites worth trying, in order, and what the plan said of the others."""

    sites: list[PlannedSite] = field(default_factory=list)
    refusals: list[Refusal] = field(default_factory=list)
    roofs: dict[str, Any] | None = None
    notes: list[str] = field(default_factory=list)
    predictions: dict[int, dict[str, Any]] = field(default_factory=dict)

    def prediction(self, proposal: Proposal) -> dict[str, Any]:
        return self.predictions.get(id(proposal), {})


def plan_sites(
    context: Context,
    changes: Changes,
    found: list[Proposal],
    roofs: dict[str, Any],
    budget: Budget,
    stage: str = "count",
) -> Plan:
    """One request for all of them; sites that do the same work are counted once."""
    plan = Plan(roofs={name: agreed(one) if isinstance(one, float) else one for name, one in roofs.items()})
    if not found:
        return plan
    assert plan.roofs is not None
    ridge = plan.roofs["matmul_flops_per_second"] / plan.roofs["copy_bytes_per_second"]
    costs: dict[tuple[Any, ...], dict[str, Any]] = {}
    failures: dict[tuple[Any, ...], str] = {}
    for proposal in found:
        signature = proposal.signature
        if signature in costs or signature in failures or budget.is_spent(stage):
            continue
        try:
            costs[signature] = _costs(context, changes, proposal, ridge)
        except Exception as error:  # the model's own code runs in there
            failures[signature] = raised("counting what it does", error)
    left = [one for one in found if one.signature not in costs]
    plan.refusals.extend(Refusal(one.path, one.pattern, failures.get(one.signature, budget.reason())) for one in left)
    found = [one for one in found if one.signature in costs]
    kinds = {signature: number for number, signature in enumerate(costs)}
    request = {
        "is_cuda": context.device.type == "cuda",
        "tolerant": context.accuracy == "tolerant",
        "compiled": context.compiled,
        "budget_seconds": budget.seconds,
        "copy_bytes_per_second": plan.roofs["copy_bytes_per_second"],
        "matmul_flops_per_second": plan.roofs["matmul_flops_per_second"],
        "float8_flops_per_second": agreed(float8_rate(context.device)) if context.accuracy == "tolerant" else 0.0,
        "sites": [
            {
                "path": one.path,
                "pattern": one.pattern,
                "kind": kinds[one.signature],
                "pointwise": one.pointwise,
                "approximate": one.approximate,
                **costs[one.signature],
            }
            for one in found
        ],
    }
    answer = _library.call("model_plan", request=request)
    for decision in answer["decisions"]:
        proposal = found[decision["site"]]
        plan.predictions[id(proposal)] = decision
        if decision["tries"]:
            plan.sites.append(PlannedSite(proposal, decision))
        else:
            plan.refusals.append(Refusal(proposal.path, proposal.pattern, decision["reason"]))
    plan.notes.extend(answer["notes"])
    return plan


def shares_of(sites: list[PlannedSite]) -> dict[tuple[Any, ...], float]:
    """By kind: the share of the seconds for parts that may have passed when the kind is done. A kind gets time by what
    its ways take to run, so that many ways of one leave some for those that come after it."""
    weights: dict[tuple[Any, ...], float] = {}
    for site in sites:
        us = site.prediction["before_us"] + site.prediction["after_us"]
        weights.setdefault(site.proposal.signature, us * len(site.proposal.ways) + _LEAST_US)
        weights[site.proposal.signature] += us / _RUNS  # every module of a kind is verified
    total, passed = sum(weights.values()), 0.0
    shares = {}
    for signature, weight in weights.items():
        passed += weight
        shares[signature] = passed / total
    return shares


def _costs(context: Context, changes: Changes, proposal: Proposal, ridge: float) -> dict[str, Any]:
    """The costs of the original part and of its first variant."""
    call = context.recording.call(proposal.path)
    assert call is not None
    before = cost_of(proposal.module, call, context.trains, ridge)
    change = proposal.ways[0].change()
    try:
        changes.apply(change)
        after = cost_of(proposal.module, call, context.trains, ridge)
    finally:
        changes.undo(change)
    if proposal.opaque:
        before.bytes, before.flops = max(before.bytes, after.bytes), max(before.flops, after.flops)
        before.float8_flops = max(before.float8_flops, after.float8_flops)
        before.launches = max(before.launches, after.launches)
    return {"before": before.as_request(), "after": after.as_request()}
