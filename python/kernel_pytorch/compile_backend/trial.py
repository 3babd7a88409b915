"""A match and its candidates as graphs of their own, on values made for the occasion: do they agree, what do they take.

Both are compiled as the model's graph will be. Values are random; a mask, and whatever else is derived, is computed as
the model computes it, from random inputs.
"""

from __future__ import annotations

import contextlib
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, fx
from torch.fx.node import map_arg

from .model import Candidate, Match, Region
from .nodes import Emitter, Node, inputs_of, value
from .settings import Settings

# The largest difference, of the largest value, that two orders of summation may show.
_TOLERANCES = {torch.float64: 1e-9, torch.float32: 2e-4, torch.float16: 1e-2, torch.bfloat16: 4e-2}
_LARGEST_DERIVED = 1 << 28
T = TypeVar("T")


class Rejected(Exception):
    """Why a candidate may not take the place of what it was found in."""


class Trial:
    """The inputs of one match, and runs of it and of its candidates."""

    def __init__(self, region: Region, match: Match, settings: Settings) -> None:
        self.region, self.match, self.settings = region, match, settings
        reads = [region.current(one) for candidate in match.candidates for one in candidate.reads]
        self.inputs = list(dict.fromkeys([*inputs_of(match.nodes), *reads]))
        self.wants_gradient = region.wants_gradient(match.outputs)
        self.values = _values(region, match, self.inputs)
        self._gradients: list[Tensor] = []

    def reference(self) -> Callable[[], list[Tensor]]:
        graph, at = self._graph()
        for node in self.match.nodes:
            at[node] = graph.node_copy(node, lambda one: at[one])
        return self._runs(graph, [at[node] for node in self.match.outputs])

    def candidate(self, candidate: Candidate) -> Callable[[], list[Tensor]]:
        graph, at = self._graph()
        outputs = candidate.emit(
            Emitter(graph, self.region.mode, self.wants_gradient), lambda one: at[self.region.current(one)]
        )
        return self._runs(graph, outputs)

    def _graph(self) -> tuple[fx.Graph, dict[Node, Node]]:
        graph = fx.Graph()
        at = {}
        for i, node in enumerate(self.inputs):
            at[node] = graph.placeholder(f"input_{i}")
            at[node].meta["val"] = value(node)
        return graph, at

    def _runs(self, graph: fx.Graph, outputs: Sequence[Node]) -> Callable[[], list[Tensor]]:
        """Compiles the graph; a run gives outputs and, where gradients are wanted, those of the inputs."""
        graph.output(tuple(outputs))
        module = fx.GraphModule({}, graph)
        leaves = [one for one in self.values if isinstance(one, Tensor) and one.requires_grad]
        with torch.set_grad_enabled(self.wants_gradient):
            is_timed = self.settings.choose == "timed"
            compiled = self.settings.compile(module, list(self.values), in_trial=True) if is_timed else module

        def run() -> list[Tensor]:
            with torch.set_grad_enabled(self.wants_gradient):
                results = list(compiled(*self.values))
                if not self.wants_gradient:
                    return results
                found = [one for one in results if one.requires_grad]
                gradients = torch.autograd.grad(found, leaves, self._gradients_for(found), allow_unused=True)
                return [*(one.detach() for one in results), *(one for one in gradients if one is not None)]

        return run

    def _gradients_for(self, outputs: Sequence[Tensor]) -> list[Tensor]:
        if len(self._gradients) != len(outputs):
            self._gradients = [_normal(one, -1 - seed) for seed, one in enumerate(outputs)]
        return self._gradients


def check_agreement(expected: Sequence[Tensor], found: Sequence[Tensor]) -> None:
    """Raises Rejected where the candidate's values are not the reference's."""
    if len(expected) != len(found):
        raise Rejected(f"gives {len(found)} tensors and not {len(expected)}")
    for one, other in zip(expected, found):
        if one.shape != other.shape or one.dtype is not other.dtype:
            raise Rejected(f"gives {other.dtype} {list(other.shape)} and not {one.dtype} {list(one.shape)}")
        if not one.is_floating_point():
            continue
        wide, other = one.double(), other.double()
        largest = wide.abs().max().item() if one.numel() else 0.0
        difference = (wide - other).abs().max().item() if one.numel() else 0.0
        if not difference <= _TOLERANCES[one.dtype] * max(largest, 1e-3):
            raise Rejected(f"differs by {difference:.2g}, the largest value being {largest:.2g}")


def times(runs: dict[str, Callable[[], Any]], device: torch.device, seconds: float) -> dict[str, float]:
    """Median seconds of each, taken in turns."""
    if device.type == "cuda":
        runs = {name: _captured(run) for name, run in runs.items()}
    taken: dict[str, list[float]] = {name: [] for name in runs}
    for run in runs.values():
        run()
    end = time.perf_counter() + seconds
    while len(next(iter(taken.values()))) < 5 or time.perf_counter() < end:
        for name, run in runs.items():
            taken[name].append(_once(run, device))
        if len(next(iter(taken.values()))) >= 200:
            break
    return {name: statistics.median(one) for name, one in taken.items()}


def _once(run: Callable[[], Any], device: torch.device) -> float:
    if device.type != "cuda":
        begin = time.perf_counter()
        run()
        return time.perf_counter() - begin
    begin_event, end_event = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    begin_event.record()
    run()
    end_event.record()
    end_event.synchronize()
    return float(begin_event.elapsed_time(end_event)) / 1e3


def _captured(run: Callable[[], Any], repeats: int = 10) -> Callable[[], None]:
    """Device time: a CUDA graph of several runs, so that the host's share does not count."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(repeats):
            run()
    return graph.replay


def apart(work: Callable[[], T], device: torch.device) -> T:
    """Runs it in a thread of its own: the compilation that is under way keeps modes, autocast, its tracing context and
    its metrics per thread, and none of them may touch a trial, nor a trial them.
    """
    result: list[T] = []
    problem: list[BaseException] = []

    def body() -> None:
        try:
            with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
                result.append(work())
        except BaseException as error:  # it is raised again where the caller waits
            problem.append(error)

    thread = threading.Thread(target=body, name="kernel_pytorch trial")
    with _own_compiler_state():
        thread.start()
        thread.join()
    if problem:
        raise problem[0]
    return result[0]


@contextlib.contextmanager
def _own_compiler_state() -> Iterator[None]:
    """What the compiler has once per process: its lock, which this thread holds while it waits for a trial (so that
    nobody else compiles), and in older versions the metrics of the compilation that is under way.
    """
    from torch._dynamo import convert_frame, metrics_context, utils  # here: what torch.compile loads anyway

    own: list[tuple[Any, str, Any]] = [(convert_frame, "compile_lock", threading.RLock())]
    if hasattr(utils, "_METRICS_CONTEXT"):
        own.append((utils, "_METRICS_CONTEXT", metrics_context.MetricsContext(on_exit=lambda *_, **__: None)))
    before = [getattr(module, name) for module, name, _ in own]
    for module, name, one in own:
        setattr(module, name, one)
    try:
        yield
    finally:
        for (module, name, _), one in zip(own, before):
            setattr(module, name, one)


def hint(size: Any) -> Any:
    """A size as a number, the one that was seen where it is symbolic."""
    return size.node.hint if isinstance(size, torch.SymInt | torch.SymFloat) else size


def _values(region: Region, match: Match, inputs: Sequence[Node]) -> list[Any]:
    known: dict[Node, Any] = {}

    def evaluate(node: Node) -> Any:
        if node not in known:
            made = value(node)
            if node in match.leaf_values:
                known[node] = torch.full(_sizes(made), match.leaf_values[node], dtype=made.dtype, device=made.device)
            elif node.op == "call_function" and isinstance(made, Tensor):
                if made.numel() > _LARGEST_DERIVED:
                    raise Rejected("its mask is too large to be checked")
                args, kwargs = map_arg((node.args, node.kwargs), evaluate)
                known[node] = node.target(*args, **kwargs)
            else:
                known[node] = _made(node, False)
        return known[node]

    derived = {region.current(node) for node in match.derived}
    marked = [node for node in inputs if node in region.differentiable] or inputs  # all, where writes hide which
    wanted = marked if region.wants_gradient(match.outputs) else []
    with torch.no_grad():
        return [
            evaluate(node) if node in derived else _made(node, node in wanted, seed) for seed, node in enumerate(inputs)
        ]


def _sizes(fake: Tensor) -> list[int]:
    return [hint(size) for size in fake.shape]


def _made(node: Node, requires_grad: bool, seed: int = 0) -> Any:
    fake = value(node)
    if not isinstance(fake, Tensor):
        return hint(fake)
    sizes, strides = _sizes(fake), [hint(stride) for stride in fake.stride()]
    made = torch.empty_strided(sizes, strides, dtype=fake.dtype, device=fake.device)
    if not fake.is_floating_point():
        made.fill_(1)
        if made.dim() > 1 and made.shape[-1] > 1:
            made[..., -1] = 0  # padding, where it is a mask
        return made
    made.copy_(_normal(made, seed))
    return made.requires_grad_() if requires_grad else made


def _normal(like: Tensor, seed: int) -> Tensor:
    """Normal numbers, others for each seed, that leave torch's generators as they are."""
    generator = torch.Generator(device=like.device).manual_seed(seed)
    wide = torch.randn(like.shape, generator=generator, device=like.device, dtype=torch.float32)
    return wide.to(like.dtype)
