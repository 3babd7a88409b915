"""A match and its candidates as graphs of their own, on values made for the occasion: do they agree, what do they take.

Both are compiled as the model's graph will be, with the neighbours that Inductor would fuse. Values are random; a mask,
and whatever else is derived, is computed as the model computes it, from random inputs. Of the model's own tensors
(weights, caches) there are several copies, so that a run finds them in memory and not in the cache, as in the model.
"""

from __future__ import annotations

import contextlib
import math
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
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
_REPEATS = 10  # runs in one CUDA graph
_CACHE_BYTES = 128 << 20  # more than the last level of a cache holds
T = TypeVar("T")
Run = Callable[..., list[Tensor]]  # with the number of the turn, which chooses the copy of the values


class Rejected(Exception):
    """Why a candidate may not take the place of what it was found in."""


def _is_float(one: Any) -> bool:
    return isinstance(one, Tensor) and one.dtype in _TOLERANCES


class Trial:
    """The inputs of one match with its neighbours (`nodes`), and runs of it and of its candidates."""

    def __init__(self, region: Region, match: Match, nodes: Sequence[Node], settings: Settings) -> None:
        self.region, self.match, self.nodes, self.settings = region, match, nodes, settings
        reads = [region.current(one) for candidate in match.candidates for one in candidate.reads]
        inside = set(nodes)
        self.inputs = list(dict.fromkeys([*inputs_of(nodes), *(one for one in reads if one not in inside)]))
        self.outputs = [node for node in nodes if any(user not in inside for user in node.users)]
        self.wants_gradient = region.wants_gradient(self.outputs)
        floats = [one.dtype for one in map(value, (*nodes, *self.inputs)) if _is_float(one)]
        self.narrowest = max(floats, key=lambda kind: _TOLERANCES[kind], default=torch.float32)
        self.sets = _sets(self.inputs, _values(region, match, self.inputs, self.wants_gradient))
        self._gradients: list[Tensor] = []

    def reference(self, without_dropout: bool = False) -> Run:
        """The nodes as they are; `without_dropout`: those of the match without it, not compiled."""
        graph, at = self._graph()
        for node in self.nodes:
            at[node] = graph.node_copy(node, lambda one: at[one])
            if without_dropout and node in self.match.nodes:
                _drop_nothing(at[node])
        return self._runs(graph, [at[node] for node in self.outputs], not without_dropout)

    def candidate(self, candidate: Candidate, without_dropout: bool = False) -> Run:
        graph, at = self._graph()
        replaced = set(self.match.nodes)
        place = next(node for node in self.nodes if node in self.match.outputs)
        wants_gradient = self.region.wants_gradient(self.match.outputs)
        emitter = Emitter(graph, self.region.mode, wants_gradient, without_dropout)
        for node in self.nodes:
            if node is place:
                made = candidate.emit(emitter, lambda one: at[self.region.current(one)])
                at.update(zip(self.match.outputs, made))
            if node not in replaced:
                at[node] = graph.node_copy(node, lambda one: at[one])
        return self._runs(graph, [at[node] for node in self.outputs], not without_dropout)

    def _graph(self) -> tuple[fx.Graph, dict[Node, Node]]:
        graph = fx.Graph()
        at = {}
        for i, node in enumerate(self.inputs):
            at[node] = graph.placeholder(f"input_{i}")
            at[node].meta["val"] = value(node)
        return graph, at

    def _runs(self, graph: fx.Graph, outputs: Sequence[Node], may_compile: bool) -> Run:
        """Compiles the graph; a run gives outputs and, where gradients are wanted, those of the inputs."""
        graph.output(tuple(outputs))
        module = fx.GraphModule({}, graph)
        leaves = [[one for one in values if isinstance(one, Tensor) and one.requires_grad] for values in self.sets]
        with torch.set_grad_enabled(self.wants_gradient):
            is_compiled = self.settings.choose == "timed" and may_compile
            compiled = self.settings.compile(module, list(self.sets[0]), in_trial=True) if is_compiled else module

        def run(turn: int = 0) -> list[Tensor]:
            turn %= len(self.sets)
            with torch.set_grad_enabled(self.wants_gradient):
                results = list(compiled(*self.sets[turn]))
                if not self.wants_gradient:
                    return results
                found = [one for one in results if one.requires_grad]
                gradients = torch.autograd.grad(found, leaves[turn], self._gradients_for(found), allow_unused=True)
                return [*(one.detach() for one in results), *(one for one in gradients if one is not None)]

        return run

    def _gradients_for(self, outputs: Sequence[Tensor]) -> list[Tensor]:
        """Gradients in the memory order of the outputs, which is the one that a model's have."""
        if len(self._gradients) != len(outputs):
            made = [(one, _normal(one, -1 - seed)) for seed, one in enumerate(outputs)]
            self._gradients = [torch.empty_like(one).copy_(normal) for one, normal in made]
        return self._gradients


def _drop_nothing(node: Node) -> None:
    schema = getattr(node.target, "_schema", None)
    names = [one.name for one in schema.arguments] if schema is not None else []
    if "dropout_p" in names:
        node.update_arg(names.index("dropout_p"), 0.0)


@contextlib.contextmanager
def own_random_numbers(device: torch.device) -> Iterator[Callable[[], None]]:
    """Leaves torch's generators as they were; what it gives sets them to one state, so that two runs draw the same."""
    generators = [torch.default_generator]
    if device.type == "cuda":
        generators.append(torch.cuda.default_generators[torch.cuda.current_device()])
    before = [one.get_state() for one in generators]

    def begin_anew() -> None:
        for one in generators:
            one.manual_seed(1)

    try:
        yield begin_anew
    finally:
        for one, state in zip(generators, before):
            one.set_state(state)


def check_agreement(expected: Sequence[Tensor], found: Sequence[Tensor], narrowest: torch.dtype) -> None:
    """Raises Rejected where the candidate's values are not the reference's: the largest difference is within what two
    orders of summation in the narrowest type may show, and the differences as a whole are much smaller than the values.
    """
    tolerance = _TOLERANCES[narrowest]
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
        if not difference <= tolerance * max(largest, 1e-3):
            raise Rejected(f"differs by {difference:.2g}, the largest value being {largest:.2g}")
        size, distance = wide.norm().item(), (wide - other).norm().item()
        if not distance <= 0.5 * tolerance * max(size, 1e-3 * one.numel() ** 0.5):
            raise Rejected(f"differs by {distance / size:.2g} of its size")


@dataclass(frozen=True)
class Time:
    """Medians, in seconds. `host`: until a call returns, where the device is another one. `noise`: the standard error
    of the difference from the first of the times that were measured in turns.
    """

    device: float
    host: float = 0.0
    noise: float = 0.0

    def __str__(self) -> str:
        return f"{self.device * 1e6:.1f} us" + (f" (host {self.host * 1e6:.0f} us)" if self.host else "")


def times(
    runs: dict[str, Callable[..., Any]], device: torch.device, seconds: float, turns: int = 11
) -> dict[str, Time]:
    """What one run of each takes, measured in so many turns at least."""
    if device.type == "cuda":
        host = _medians({name: partial(_host_seconds, run) for name, run in runs.items()}, seconds / 2)
        graphs = {name: partial(_replay_seconds, _captured(run)) for name, run in runs.items()}
        found = _medians(graphs, seconds / 2, turns)
        return {name: Time(one, host[name][0], noise) for name, (one, noise) in found.items()}
    clocks = {name: _Clock(run) for name, run in runs.items()}
    return {name: Time(one, noise=noise) for name, (one, noise) in _medians(clocks, seconds, turns).items()}


def _medians(
    measured: Mapping[str, Callable[[], float]], seconds: float, turns: int = 11
) -> dict[str, tuple[float, float]]:
    """The median of each measurement, at least `turns` and at most 200 of them, with the error of its difference from
    the first one's: whatever slows a turn down slows both.
    """
    taken: dict[str, list[float]] = {name: [] for name in measured}
    for one in measured.values():
        one()
    end = time.perf_counter() + seconds
    for turn in range(200):
        if turn >= turns and time.perf_counter() > end:
            break
        for name, one in measured.items():
            taken[name].append(one())
    first = next(iter(taken.values()))
    return {
        name: (statistics.median(all_), _error([b - a for a, b in zip(first, all_)])) for name, all_ in taken.items()
    }


def _error(taken: list[float]) -> float:
    """The standard error of a median, from the median distance to it: that of a normal distribution is 0.67 of its
    deviation, and the error of a median 1.25 of a mean's.
    """
    middle = statistics.median(taken)
    return 1.25 / 0.67 * statistics.median(abs(one - middle) for one in taken) / math.sqrt(len(taken))


class _Clock:
    """Seconds of a run on the CPU, another turn each time. One thread has a clock of its own, which stands still while
    others have the processor."""

    def __init__(self, run: Callable[..., Any]) -> None:
        self.run, self.turn = run, 0
        self.now: Callable[[], float] = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter

    def __call__(self) -> float:
        self.turn += 1
        begin = self.now()
        self.run(self.turn)
        return self.now() - begin


def _host_seconds(run: Callable[..., Any], repeats: int = 5) -> float:
    """Until a run has been launched; few at a time, so that the device's queue is never full."""
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for turn in range(repeats):
        run(turn)
    return (time.perf_counter() - begin) / repeats


def _replay_seconds(graph: torch.cuda.CUDAGraph) -> float:
    begin_event, end_event = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    begin_event.record()
    graph.replay()
    end_event.record()
    end_event.synchronize()
    return float(begin_event.elapsed_time(end_event)) / 1e3 / _REPEATS


def _captured(run: Callable[..., Any]) -> torch.cuda.CUDAGraph:
    """Device time: a CUDA graph of several runs, so that the host's share does not count."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for turn in range(3):
            run(turn)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for turn in range(_REPEATS):
            run(turn)
    return graph


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


def _values(region: Region, match: Match, inputs: Sequence[Node], wants_gradient: bool) -> list[Any]:
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
    wanted = marked if wants_gradient else []
    below = {region.current(node): limit for node, limit in match.indices.items()}

    def made(node: Node, seed: int) -> Any:
        if node in derived:
            return evaluate(node)
        return _indices(node, below[node], seed) if node in below else _made(node, node in wanted, seed)

    with torch.no_grad():
        return [made(node, seed) for seed, node in enumerate(inputs)]


def _sets(inputs: Sequence[Node], values: list[Any]) -> list[list[Any]]:
    """The values, and copies of those that are the model's own until they are too large for a cache together."""
    is_own = [
        node.op == "placeholder" and isinstance(one, Tensor) and 0 not in one.stride()
        for node, one in zip(inputs, values)
    ]
    size = sum(one.numel() * one.element_size() for one, own in zip(values, is_own) if own)
    count = min(_REPEATS, 1 + _CACHE_BYTES // max(size, 1)) if size > _CACHE_BYTES // _REPEATS else 1

    def copied(one: Any) -> Any:
        made = torch.empty_strided(one.size(), one.stride(), dtype=one.dtype, device=one.device)
        return made.copy_(one.detach()).requires_grad_(one.requires_grad)

    copies = [[copied(one) if own else one for one, own in zip(values, is_own)] for _ in range(count - 1)]
    return [values, *copies]


def _sizes(fake: Tensor) -> list[int]:
    return [hint(size) for size in fake.shape]


def _made(node: Node, requires_grad: bool, seed: int = 0) -> Any:
    fake = value(node)
    if not isinstance(fake, Tensor):
        return hint(fake)
    sizes, strides = _sizes(fake), [hint(stride) for stride in fake.stride()]
    own = [1 if stride == 0 else size for size, stride in zip(sizes, strides)]  # of an expanded tensor one element
    made = torch.empty_strided(own, strides, dtype=fake.dtype, device=fake.device)
    if not fake.is_floating_point():
        may_be_mask = made.dim() > 1 or fake.dtype is torch.bool
        made.fill_(1 if may_be_mask else 0)  # 0 is a class, or an index, of whatever there is
        if made.dim() > 1 and made.shape[-1] > 1:
            made[..., -1] = 0  # padding
        return made.expand(sizes)
    made = made.copy_(_normal(made, seed)).expand(sizes)
    return made.detach().requires_grad_() if requires_grad else made


def _indices(node: Node, limit: int, seed: int) -> Tensor:
    fake = value(node)
    generator = torch.Generator(device=fake.device).manual_seed(seed)
    return torch.randint(limit, _sizes(fake), generator=generator, device=fake.device, dtype=fake.dtype)


def _normal(like: Tensor, seed: int) -> Tensor:
    """Normal numbers, others for each seed, that leave torch's generators as they are."""
    generator = torch.Generator(device=like.device).manual_seed(seed)
    wide = torch.randn(like.shape, generator=generator, device=like.device, dtype=torch.float32)
    return wide.to(like.dtype)
