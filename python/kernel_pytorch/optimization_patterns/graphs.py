"""CUDA graphs of a module, one for each shape of its inputs, where they pay.

A graph replays with the memory that it was captured with. Weights are therefore taken by reference: their addresses are
noted at the capture and looked at before every replay, so an optimizer step or load_state_dict is simply seen, and a
parameter that was pointed elsewhere (`.data =`, `.to()`, a new Parameter) means a new capture. Inputs are copied in
(unless bound, see bound_graphs.py), outputs copied out (or computed there, see spared_work.py), all on the caller's
stream: nothing waits for the device except a capture.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from .. import _library
from .. import _torch as _torch  # first: it says what is missing where torch is missing or old
from . import capturing
from .addresses import Addresses
from .bound_graphs import Binder, BoundGraph, key_of, places_of
from .results import Results
from .spared_work import Sparing

import torch  # isort: skip
from torch import Tensor, nn
from torch.utils import _pytree as pytree

__all__ = ["CapturedGraph", "GraphDecision", "PyGraph", "graph_absence"]


@dataclass(frozen=True)
class GraphDecision:
    """Whether a shape runs as a graph, and why. Times are of one call, measured; 0 where nothing was."""

    pays: bool
    reason: str
    eager_us: float = 0.0
    graph_us: float = 0.0
    capture_us: float = 0.0
    break_even_calls: float | None = None


def graph_absence(tensors: list[Tensor], module: nn.Module | None = None) -> str:
    """Why a call with these tensors cannot be a graph, or ""."""
    if not tensors or not all(tensor.is_cuda for tensor in tensors):
        if not torch.cuda.is_available():
            return f"no CUDA device: torch {torch.__version__} sees none, so the module runs as it is"
        return "a graph needs all tensors on a CUDA device"
    if len({tensor.device for tensor in tensors}) > 1:
        return "the tensors are on several devices"
    if module is not None and module.training:
        return "the module is in training mode; graphs are for inference"
    if torch.is_grad_enabled() and (
        any(tensor.requires_grad for tensor in tensors)
        or (module is not None and any(parameter.requires_grad for parameter in module.parameters()))
    ):
        return "gradients are wanted; call it under torch.no_grad() or torch.inference_mode()"
    if torch.compiler.is_compiling() or capturing.is_capturing():
        return "it is being traced or captured already"
    return ""


@dataclass
class CapturedGraph:
    """A graph with the tensors that it reads and writes. Use it through PyGraph.locked."""

    graph: Any
    inputs: list[Tensor]
    output: Any
    addresses: Addresses
    decision: GraphDecision
    bytes: int
    results: Results
    looked: capturing.Looked  # with tensors that it reads
    written: list[int] = field(default_factory=list)  # of each input, by former calls; -1: not known
    changes_inputs: bool = False

    def replay(self) -> Any:
        """The result in the graph's memory."""
        self.graph.replay()
        for stands, made in self.results.made():
            stands.copy_(made)
        return self.output


class PyGraph(nn.Module):
    """A module whose calls are replays of CUDA graphs, one a shape, wherever that was measured to pay.

    Elsewhere (no CUDA device, training, gradients wanted, a shape whose graph does not pay or cannot be captured) it
    calls the module itself; `explain(*args)` says which and why. Safe to call from several threads and streams.

    Args:
        module: what to run. Its parameters are used in place.
        max_graphs: how many shapes are kept; the one used longest ago goes first.
        memory_limit_gb: of the graphs' memory together; None is no limit.
        expected_calls: with each shape, which a capture has to be earned back in.
        least_gain: share of the eager time that a graph must save.
        copy_outputs: False returns the graph's own memory, which the next replay of any shape may overwrite.
        always: captures without asking whether it pays.
        is_compiled: calls run code of torch.compile, which is not looked into for what a graph cannot hold.
        bind_inputs: calls that come back with tensors in the same memory get a graph that reads them there.
        spares: replays leave out joins with nothing and what depends on constants alone, and large results are computed
            into the caller's memory instead of copied there. The constants take memory.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        max_graphs: int = 32,
        memory_limit_gb: float | None = None,
        expected_calls: int = 10_000,
        least_gain: float = 0.1,
        copy_outputs: bool = True,
        always: bool = False,
        is_compiled: bool = False,
        bind_inputs: bool = False,
        spares: bool = False,
    ) -> None:
        super().__init__()
        if not isinstance(module, nn.Module):
            raise TypeError(f"PyGraph: module is {type(module).__name__}; it must be a torch.nn.Module")
        if max_graphs < 1:
            raise ValueError(f"PyGraph: max_graphs is {max_graphs}; at least 1 is needed")
        self.module = module
        self.training = module.training
        self.max_graphs = max_graphs
        self.memory_limit_gb = memory_limit_gb
        self.expected_calls = expected_calls
        self.least_gain = least_gain
        self.copy_outputs = copy_outputs
        self.always = always
        self.bind_inputs = bind_inputs
        self.spares = spares
        self._is_compiled = is_compiled or hasattr(module, "_orig_mod")  # torch.compile's
        self._begin()

    def _begin(self) -> None:
        """Without a graph."""
        self._lock = threading.RLock()
        self._binder = Binder() if self.bind_inputs else None
        self._graphs: OrderedDict[Hashable, CapturedGraph] = OrderedDict()
        self._plain: dict[Hashable, GraphDecision] = {}
        self._streams: dict[torch.device, torch.cuda.Stream] = {}  # that captures run on
        self._order = capturing.StreamOrder()
        self._counts = {"replays": 0, "plain_calls": 0, "captures": 0, "recaptures": 0, "evictions": 0}

    def __getstate__(self) -> dict[str, Any]:
        """Without graphs, which are of this process and of this object's memory; a copy captures its own."""
        left = {"_lock", "_binder", "_graphs", "_plain", "_streams", "_order", "_counts"}
        return {name: value for name, value in self.__dict__.items() if name not in left}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._begin()

    def extra_repr(self) -> str:
        return f"{len(self._graphs)} of at most {self.max_graphs} graphs, bind_inputs={self.bind_inputs}"

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        binder = self._binder
        places = None if binder is None or self.module.training else places_of(args, kwargs)
        if binder is not None and places is not None:
            with self._lock:
                bound = binder.find(places, capturing.ambient())
                if bound is not None and not capturing.is_capturing():
                    self._counts["replays"] += 1
                    with self._order.kept(bound.device):
                        bound.graph.replay()
                        return bound.results.copied() if self.copy_outputs else bound.output
        leaves, spec = pytree.tree_flatten((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        key = None if graph_absence(tensors, self.module) else key_of(leaves, spec)
        if key is not None:
            with self.locked(key, lambda: tensors, lambda inputs: self._call(leaves, spec, inputs)) as entry:
                if entry is not None:
                    for static, tensor in zip(entry.inputs, tensors, strict=True):
                        static.copy_(tensor, non_blocking=True)
                    entry.graph.replay()
                    output = entry.results.copied() if self.copy_outputs else entry.output
                    if binder is not None and places is not None and not entry.changes_inputs:
                        self._bind(binder, places, entry.inputs[0].device, lambda: self.module(*args, **kwargs))
                    return output
        self._counts["plain_calls"] += 1
        return self.module(*args, **kwargs)

    def explain(self, *args: Any, **kwargs: Any) -> GraphDecision:
        """What becomes of a call with these arguments; captures and measures where it is not known yet."""
        leaves, spec = pytree.tree_flatten((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        absence = graph_absence(tensors, self.module)
        key = key_of(leaves, spec)
        if absence or key is None:
            return GraphDecision(False, absence or "an argument that is no tensor cannot be hashed, or holds state")
        with self.locked(key, lambda: tensors, lambda inputs: self._call(leaves, spec, inputs)) as entry:
            return entry.decision if entry is not None else self.decision(key)

    def statistics(self) -> dict[str, Any]:
        """Counts of calls, captures and evictions; the graphs kept, their bytes, and why shapes run without one."""
        with self._lock:
            return {
                **self._counts,
                "graphs": len(self._graphs),
                "graph_bytes": sum(entry.bytes for entry in self._graphs.values()) + self._bound_bytes(),
                "refusals": [decision.reason for decision in self._plain.values()],
            }

    def decision(self, key: Hashable) -> GraphDecision:
        """The decision about a key that `locked` has seen."""
        with self._lock:
            key = (key, capturing.ambient())
            return self._graphs[key].decision if key in self._graphs else self._plain[key]

    def decisions(self) -> list[GraphDecision]:
        with self._lock:
            return [entry.decision for entry in self._graphs.values()] + list(self._plain.values())

    def forget(self, key: Hashable) -> None:
        """Gives a graph's memory back."""
        with self._lock:
            self._graphs.pop((key, capturing.ambient()), None)
            self._plain.pop((key, capturing.ambient()), None)
            self._unbind()

    def clear(self) -> None:
        """Forgets every graph and decision."""
        with self._lock:
            self._graphs.clear()
            self._plain.clear()
            self._unbind()

    @contextmanager
    def locked(
        self, key: Hashable, examples: Callable[[], list[Tensor]], call: Callable[[list[Tensor]], Any]
    ) -> Iterator[CapturedGraph | None]:
        """The graph of `key`, captured now where it is new, or None where it does not pay. Until the block ends no
        other thread enters, and the next stream to use a graph waits for what this one did: graphs share memory.

        Args:
            examples: tensors like those of the calls to come; they are cloned.
            call: the module on given tensors; what it does is captured.
        """
        key = (key, capturing.ambient())
        with self._lock:
            entry = self._graphs.get(key)
            if entry is not None and not entry.addresses.hold():
                self._counts["recaptures"] += 1
                del self._graphs[key]
                entry = None
            if entry is None and key not in self._plain:
                entry = self._capture(key, examples(), call)
            if entry is None:
                yield None
                return
            self._graphs.move_to_end(key)
            self._counts["replays"] += 1
            with self._order.kept(entry.inputs[0].device):
                yield entry

    def _bind(self, binder: Binder, places: tuple[Any, ...], device: torch.device, call: Callable[[], Any]) -> None:
        """A graph on the caller's tensors, if it is time for one; the call has run before and is only recorded."""
        ambient = capturing.ambient()
        if not binder.is_due(places, ambient):
            return
        held = torch.cuda.memory_reserved(device)
        with torch.cuda.device(device), torch.inference_mode(False), torch.no_grad(), capturing.uncached_autocast():
            looked = self._looked_at(call)
            try:
                graph, output, results = self._captured(looked, call, device)
            except Exception as error:
                binder.refusal = f"cannot be captured: {error}"  # the graph with copies goes on
                return
        self._counts["captures"] += 1
        grown, addresses = max(torch.cuda.memory_reserved(device) - held, 0), Addresses(self.module)
        binder.bound = BoundGraph(places, ambient, graph, output, results, looked, addresses, device, grown)

    def _unbind(self) -> None:
        if self._binder is not None:
            self._binder.clear()

    def _bound_bytes(self) -> int:
        return self._binder.bound.bytes if self._binder is not None and self._binder.bound is not None else 0

    def _call(self, leaves: list[Any], spec: Any, inputs: list[Tensor]) -> Any:
        replaced = iter(inputs)
        args, kwargs = pytree.tree_unflatten(
            [next(replaced) if isinstance(leaf, Tensor) else leaf for leaf in leaves], spec
        )
        return self.module(*args, **kwargs)

    def _capture(
        self, key: Hashable, examples: list[Tensor], call: Callable[[list[Tensor]], Any]
    ) -> CapturedGraph | None:
        device = examples[0].device
        # Static tensors must not be inference tensors: a later call outside inference mode could not write to them.
        # Weights cast by autocast must not come from its cache, which dies with the caller's block.
        with torch.cuda.device(device), torch.inference_mode(False), torch.no_grad(), capturing.uncached_autocast():
            inputs = [example.detach().clone() for example in examples]
            versions = [tensor._version for tensor in inputs]
            looked = self._looked_at(lambda: call(inputs))
            if looked.waits:
                reason = f"cannot be captured: it waits for the device in {looked.waits}"
                self._plain[key] = GraphDecision(False, reason)
                return None
            eager_us = capturing.eager_us(lambda: call(inputs))
            torch.cuda.empty_cache()  # so that what is reserved beyond this is the graph's
            held = torch.cuda.memory_reserved(device)
            begin = time.perf_counter()
            try:
                graph, output, results = self._captured(looked, lambda: call(inputs), device)
            except Exception as error:
                # Whatever is wrong with the module shows again in the plain call that follows.
                self._plain[key] = GraphDecision(False, f"cannot be captured: {error}", eager_us)
                return None
            if results.refusal and self.copy_outputs:
                self._plain[key] = GraphDecision(False, results.refusal, eager_us)
                return None
            capture_us = (time.perf_counter() - begin) * 1e6
            replay_us = capturing.replay_us(lambda: (graph.replay(), results.made()))
        decision = self._decide(inputs, results, eager_us, replay_us, capture_us)
        self._counts["captures"] += 1
        if not decision.pays and not self.always:
            self._plain[key] = decision
            return None
        grown = max(torch.cuda.memory_reserved(device) - held, 0) + sum(tensor.nbytes for tensor in inputs)
        entry = CapturedGraph(graph, inputs, output, Addresses(self.module), decision, grown, results, looked)
        entry.written = [-1] * len(inputs)
        entry.changes_inputs = versions != [tensor._version for tensor in inputs]
        self._graphs[key] = entry
        self._evict()
        return entry

    def _decide(
        self, inputs: list[Tensor], results: Results, eager_us: float, replay_us: float, capture_us: float
    ) -> GraphDecision:
        copied = [*inputs, *results.copies]
        plan = _library.call(
            "graph_plan",
            request={
                "device": f"cuda:{inputs[0].device.index or 0}",
                "eager_us": eager_us,
                "device_us": replay_us,  # of the graph itself, gaps included: no launches are to be added
                "copies": len(copied),
                "copy_bytes": sum(tensor.nbytes for tensor in copied),
                "capture_us": capture_us,
                "calls": self.expected_calls,
                "least_gain": self.least_gain,
            },
        )
        return GraphDecision(
            plan["pays"], plan["reason"], eager_us, plan["graph_us"], capture_us, plan["break_even_calls"]
        )

    def _captured(
        self, looked: capturing.Looked, call: Callable[[], Any], device: torch.device
    ) -> tuple[Any, Any, Results]:
        """The graph of a call, what it returned, and how to make that anew."""
        sparing = None if looked.spared is None else Sparing(looked.spared)
        try:
            with looked.known():
                graph, output = capturing.capture(call, device, self._pool(device), self._stream(device), sparing)
        except Exception:
            self._streams.pop(device)
            if looked.spared is None:
                raise
            return self._captured(looked._replace(spared=None), call, device)
        return graph, output, Results(output, None if sparing is None else sparing.made_for)

    def _looked_at(self, call: Callable[[], Any]) -> capturing.Looked:
        return (
            capturing.Looked("", [], [])
            if self._is_compiled
            else capturing.looked_at(call, self.spares and self.copy_outputs)
        )

    def _pool(self, device: torch.device) -> Any:
        """The memory of a graph that lives, which all share, or a new one."""
        alive = (entry.graph.pool() for entry in self._graphs.values() if entry.inputs[0].device == device)
        return next(alive, None) or torch.cuda.graph_pool_handle()

    def _stream(self, device: torch.device) -> torch.cuda.Stream:
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        return self._streams[device]

    def _evict(self) -> None:
        limit = float("inf") if self.memory_limit_gb is None else self.memory_limit_gb * 1e9
        while len(self._graphs) > 1 and (
            len(self._graphs) > self.max_graphs or sum(entry.bytes for entry in self._graphs.values()) > limit
        ):
            torch.cuda.synchronize()  # no replay may still be running
            self._graphs.popitem(last=False)
            self._counts["evictions"] += 1
