"""`torch.compile(model, backend="kernel_pytorch")`: Dynamo's graph, our ops where they win, and then Inductor.

Nothing that goes wrong here is an error: the graph as Dynamo made it goes to Inductor, and the log says why.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx
from torch._dynamo.exc import RestartAnalysis

from .. import functional as functional  # shapes and gradients of our ops are registered where they are defined
from .canonical import Unfit, canonical, examples_of, higher_order_calls
from .model import Region
from .nodes import differentiable_nodes, value
from .report import CompileReport, GraphReport
from .rewrite import rewrite
from .settings import Settings, settings_of
from .trial import hint

log = logging.getLogger("kernel_pytorch.compile_backend")
VERSIONS = ((2, 11), (2, 13))
_BODIES = ("tag_activation_checkpoint",)


def backend(
    module: fx.GraphModule, inputs: list[Any], *, mode: str | None = None, options: dict[str, Any] | None = None
) -> Callable[..., Any]:
    """What torch.compile calls with each graph; `mode` and `options` are Inductor's, and ours (API.md)."""
    return compile_graph(module, inputs, settings_of(mode, options), CompileReport())


def compile_graph(
    module: fx.GraphModule, inputs: list[Any], settings: Settings, report: CompileReport
) -> Callable[..., Any]:
    """The graph rewritten and compiled; what was done is added to the report."""
    of_graph = GraphReport(f"graph {len(report.graphs)}", len(module.graph.nodes))
    report.graphs.append(of_graph)
    try:
        return settings.compile(_rewritten(module, settings, of_graph), inputs)
    except RestartAnalysis:  # no error: Dynamo traces anew, and comes back with another graph
        report.graphs.remove(of_graph)
        raise
    except Exception as error:
        if of_graph.problem or not of_graph.lines:
            raise  # the graph is Dynamo's own: this error is the inner compiler's
        of_graph.problem = f"the rewritten graph was refused, {type(error).__name__}: {error}"[:300]
        _say(of_graph)
        return settings.compile(module, inputs)


def _rewritten(module: fx.GraphModule, settings: Settings, report: GraphReport) -> fx.GraphModule:
    """The graph with our ops; the one given where that fails."""
    try:
        _check_version(torch.__version__)
        if higher_order_calls(module.graph):
            made = _with_bodies_rewritten(module, settings, report)
        else:
            made = _rewritten_graph(module, examples_of(module.graph), settings, report)
    except Unfit as reason:
        report.problem = str(reason)
        made = module
    except Exception as error:
        report.problem = f"{type(error).__name__}: {error}"[:300]
        made = module
    _say(report)
    return made


def _rewritten_graph(
    module: fx.GraphModule, examples: list[Any], settings: Settings, report: GraphReport
) -> fx.GraphModule:
    made, mode = canonical(module, examples)
    report.nodes = len(made.graph.nodes)
    wanted = [isinstance(one, Tensor) and one.requires_grad for one in examples]
    differentiable = differentiable_nodes(made.graph, wanted, torch.is_grad_enabled())
    rewrite(Region(made.graph, mode, differentiable), settings, report)
    if not report.replaced:
        return module  # Dynamo's own graph is what Inductor is tested with
    for node in made.graph.nodes:
        if node.op != "placeholder":
            node.meta.pop("val", None)
    made.recompile()
    return made


def _with_bodies_rewritten(module: fx.GraphModule, settings: Settings, report: GraphReport) -> fx.GraphModule:
    """Bodies of checkpointed regions are rewritten one by one; other higher-order operations are left alone."""
    made = copy.copy(module)
    kept = []
    for call in higher_order_calls(module.graph):
        body = call.args[0] if call.args else None
        if getattr(call.target, "_name", "") not in _BODIES or not isinstance(body, fx.Node) or body.op != "get_attr":
            kept.append(str(call.target))
            continue
        examples = [
            one.meta.get("example_value", value(one)) if isinstance(one, fx.Node) else one for one in call.args[1:]
        ]
        new = _rewritten_graph(getattr(module, str(body.target)), examples, settings, report)
        setattr(made, str(body.target), new)
    if kept and not report.replaced:
        raise Unfit(f"it holds {kept[0]}")
    return made


def _check_version(version: str) -> None:
    found = tuple(int(part) for part in version.split("+")[0].split(".")[:2])
    if not VERSIONS[0] <= found <= VERSIONS[1]:
        (first, last) = (".".join(map(str, one)) for one in VERSIONS)
        raise Unfit(f"torch {version}; the backend knows {first} to {last}")


def _say(report: GraphReport) -> None:
    if report.problem:
        log.warning("%s is left as it is: %s", report.name, report.problem)
    else:
        shown = ", ".join(f"{count} x {name}" for name, count in report.replaced.items()) or "nothing"
        log.info("%s: replaced %s", report.name, shown)


def reset() -> None:
    """What torch.compiler.reset() calls: CUDA graphs of Inductor's are dropped, as by its own backend."""
    from torch._inductor import config  # slow to load

    if config.triton.cudagraph_trees:
        from torch._inductor.cudagraph_trees import reset_cudagraph_trees  # slow to load

        reset_cudagraph_trees()


backend.reset = reset  # type: ignore[attr-defined]
__all__ = ["backend", "compile_graph", "hint"]
