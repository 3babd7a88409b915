"""PyGraphCUDAOptimizer: graphs of models under names that the caller gives. Thin over PyGraph, which captures, decides
and replays; where there is no CUDA device it says so and runs the model.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..utils.profiling import KernelProfiler
from .graphs import GraphDecision, PyGraph, graph_absence

__all__ = ["CUDAGraphState", "GraphDeploymentStrategy", "PyGraphCUDAOptimizer", "WorkloadAnalysis"]


class GraphDeploymentStrategy(enum.Enum):
    """How much a graph must save to be kept."""

    CONSERVATIVE = "conservative"
    BALANCED = "balanced"
    AGGRESSIVE = "aggressive"

    @property
    def least_gain(self) -> float:
        return {"conservative": 0.25, "balanced": 0.1, "aggressive": 0.02}[self.value]


@dataclass(frozen=True)
class WorkloadAnalysis:
    """Whether a model is worth a graph with these inputs, and why; times are of one call, measured (0: nothing was)."""

    is_suitable: bool
    reason: str
    eager_us: float
    graph_us: float
    break_even_calls: float | None


@dataclass(frozen=True)
class CUDAGraphState:
    """A graph that was asked for under a name."""

    name: str
    is_captured: bool
    reason: str


class PyGraphCUDAOptimizer:
    """Captures models as CUDA graphs where that pays.

    Args:
        cost_threshold: share of the eager time that a graph must save; None takes the strategy's.
        strategy: a GraphDeploymentStrategy or its value.
        expected_calls: which a capture must be earned back in.
    """

    def __init__(
        self,
        cost_threshold: float | None = 0.1,
        strategy: GraphDeploymentStrategy | str = "balanced",
        expected_calls: int = 10_000,
    ) -> None:
        self.strategy = GraphDeploymentStrategy(strategy)
        self.least_gain = self.strategy.least_gain if cost_threshold is None else cost_threshold
        self.expected_calls = expected_calls
        self._named: dict[str, PyGraph] = {}

    def _graph(self, model: nn.Module) -> PyGraph:
        return PyGraph(model, least_gain=self.least_gain, expected_calls=self.expected_calls)

    def analyze_workload(self, model: nn.Module, inputs: Sequence[Tensor]) -> WorkloadAnalysis:
        """Measures the model both ways."""
        decision = self._explain(self._graph(model), inputs)
        return WorkloadAnalysis(
            decision.pays, decision.reason, decision.eager_us, decision.graph_us, decision.break_even_calls
        )

    def create_cuda_graph(self, model: nn.Module, inputs: Sequence[Tensor], graph_id: str) -> CUDAGraphState:
        """Captures the model under a name; other shapes are captured when they come."""
        self._named[graph_id] = self._graph(model)
        decision = self._explain(self._named[graph_id], inputs)
        return CUDAGraphState(graph_id, decision.pays, decision.reason)

    def execute_cuda_graph(self, graph_id: str, inputs: Sequence[Tensor]) -> Any:
        """The model's result; nothing waits for the device."""
        if graph_id not in self._named:
            raise KeyError(f"PyGraphCUDAOptimizer: no graph called {graph_id!r}; there are {sorted(self._named)}")
        with torch.no_grad():
            return self._named[graph_id](*inputs)

    def benchmark_vs_eager(self, model: nn.Module, inputs: Sequence[Tensor], num_runs: int = 100) -> dict[str, Any]:
        """Both ways in turns, by medians."""
        graph = self._graph(model)
        decision = self._explain(graph, inputs)
        with torch.no_grad():
            comparison = KernelProfiler(inputs[0].device).compare_implementations(
                {"eager": model, "graph": graph}, tuple(inputs), max(num_runs, 2)
            )
        eager, replayed = comparison.timings
        return {
            "eager_us": eager.median_us,
            "graph_us": replayed.median_us,
            "speedup": comparison.speedup("graph"),
            "is_clear": comparison.is_clear("graph"),
            "pays": decision.pays,
            "reason": decision.reason,
        }

    def get_performance_stats(self) -> dict[str, Any]:
        """Sums over all names."""
        every = [graph.statistics() for graph in self._named.values()]
        keys = ("graphs", "graph_bytes", "replays", "plain_calls", "captures", "recaptures", "evictions")
        return {key: sum(entry[key] for entry in every) for key in keys}

    def clear_cache(self) -> None:
        self._named.clear()

    @staticmethod
    def _explain(graph: PyGraph, inputs: Sequence[Tensor]) -> GraphDecision:
        with torch.no_grad():
            absence = graph_absence(list(inputs), graph.module)
            return GraphDecision(False, absence) if absence else graph.explain(*inputs)
