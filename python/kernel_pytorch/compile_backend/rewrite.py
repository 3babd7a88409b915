"""Looks for the patterns in a canonical graph and puts in what was chosen."""

from __future__ import annotations

from torch import Tensor

from .canonical import writes_between
from .choice import Chooser
from .model import Candidate, Match, Refusal, Region
from .nodes import Emitter, Node, inputs_of, value
from .patterns import PATTERNS
from .report import GraphReport, Line
from .settings import Settings

_FIRST_IN_TRAINING = ("empty_cat", "attention", "mlp", "gated_mlp", "norm_rope")
_LAST_IN_TRAINING = ("gated_activation", "linear_activation")


def rewrite(region: Region, settings: Settings, report: GraphReport) -> None:
    """Replaces what is chosen, in place. What fails in a pattern refuses this match alone."""
    if settings.choose == "never":
        return
    chooser = Chooser(region, settings)
    taken: set[Node] = set()
    for pattern in _order(region, settings):
        found: list[Match | Refusal] = []
        try:
            found.extend(PATTERNS[pattern](region))
        except Exception as error:
            report.lines.append(
                Line(pattern, "", "", "", f"looking for it raised {type(error).__name__}: {error}"[:300])
            )
        for one in found:
            nodes = one.nodes if isinstance(one, Match) else [one.node]
            if any(node in taken for node in nodes):
                continue
            if isinstance(one, Refusal):
                report.lines.append(Line(pattern, one.node.name, "", "", one.reason))
            elif _tried(region, one, chooser, report):
                taken.update(one.nodes)
    region.graph.eliminate_dead_code()
    region.graph.lint()
    report.left.update(_operation(node) for node in region.graph.nodes if _computes(node))


def _operation(node: Node) -> str:
    return str(node.target._schema.name).removeprefix("aten::")


def _computes(node: Node) -> bool:
    """Whether it is torch's and makes numbers: no view, none of our ops, nothing about sizes."""
    schema = getattr(node.target, "_schema", None)
    if schema is None or not isinstance(value(node), Tensor) or schema.name.startswith("kernel_pytorch::"):
        return False
    return not any(one.alias_info is not None and not one.alias_info.is_write for one in schema.arguments)


def _order(region: Region, settings: Settings) -> list[str]:
    """The patterns as they are tried within the budget.

    With gradients what gains most comes first, and activations come last: in training they seldom win.
    """
    names = [name for name in PATTERNS if name in settings.patterns]
    if not region.differentiable:
        return names
    return sorted(names, key=lambda name: (name in _LAST_IN_TRAINING) - (name in _FIRST_IN_TRAINING))


def _tried(region: Region, match: Match, chooser: Chooser, report: GraphReport) -> bool:
    name, line = match.outputs[-1].name, None
    try:
        line = _tried_carefully(region, match, chooser)
    except Exception as error:
        line = Line(match.pattern, name, match.detail, "", f"raises {type(error).__name__}: {error}"[:300])
    report.lines.append(line)
    return bool(line.taken)


def _tried_carefully(region: Region, match: Match, chooser: Chooser) -> Line:
    order = {node: i for i, node in enumerate(region.graph.nodes)}
    match.nodes.sort(key=lambda node: order[node])
    name = match.outputs[-1].name
    problem = _obstacle(region, match, order)
    if problem:
        return Line(match.pattern, name, match.detail, "", problem)
    verdict = chooser.decide(match)
    if verdict.candidate is None:
        return Line(match.pattern, name, match.detail, "", verdict.reason)
    count = len(match.nodes)
    _replace(region, match, verdict.candidate, order)
    return Line(match.pattern, name, match.detail, verdict.candidate.name, verdict.reason, verdict.gain_us, count)


def _obstacle(region: Region, match: Match, order: dict[Node, int]) -> str:
    inside = set(match.nodes)
    for node in match.nodes:
        if node not in match.outputs and any(user not in inside for user in node.users):
            return "a value inside it is read elsewhere"
    if writes_between(match.nodes, region.graph):
        return "a tensor is written in between"
    place = order[_place(match, order)]
    more = [region.current(one) for candidate in match.candidates for one in candidate.reads]
    reads = [*inputs_of(match.nodes), *more]
    if any(order[node] >= place for node in reads):
        return "an input is computed between its outputs"
    return ""


def _place(match: Match, order: dict[Node, int]) -> Node:
    """Before the first output: later nodes may read it."""
    return min(match.outputs, key=lambda node: order[node])


def _replace(region: Region, match: Match, candidate: Candidate, order: dict[Node, int]) -> None:
    place = _place(match, order)
    wants_gradient = region.wants_gradient(match.outputs)
    before = set(region.graph.nodes)
    with region.graph.inserting_before(place):
        try:
            outputs = candidate.emit(Emitter(region.graph, region.mode, wants_gradient), region.current)
        except Exception:
            for node in reversed([one for one in region.graph.nodes if one not in before]):
                region.graph.erase_node(node)
            raise
    for old, new in zip(match.outputs, outputs):
        if new not in before:
            new.meta = {**old.meta, **new.meta}
        old.replace_all_uses_with(new)
        region.replaced[old] = new
        if old in region.differentiable:
            region.differentiable.add(new)
    for node in sorted(match.nodes, key=lambda one: order[one], reverse=True):
        if not node.users:
            region.graph.erase_node(node)
