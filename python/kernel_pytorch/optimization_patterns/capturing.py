"""Capturing a call as a CUDA graph and timing both, with what torch leaves to its callers.

A capture that breaks off leaves torch on the capturing stream, its allocator pointing at the graph and its random
generator waiting for the capture's end. So calls are looked at first for what a graph cannot hold, and where a capture
fails nevertheless all three are put right.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from .results import Results
from .spared_work import Plan, Watching, plan_of

__all__ = [
    "StreamOrder",
    "ambient",
    "autocast_as",
    "capture",
    "eager_us",
    "is_capturing",
    "knowing",
    "looked_at",
    "numbers_asked_for",
    "replay_us",
    "uncached_autocast",
    "uploaded",
]

_WARM_CALLS, _TIMED_CALLS = 3, 5
# Their results' shapes or values are needed on the host.
_WAITING = (
    "_local_scalar_dense",
    "nonzero",
    "masked_select",
    "_unique",
    "_unique2",
    "unique_dim",
    "unique_consecutive",
)

_capture_lock = threading.Lock()  # torch allows one at a time in a process


class _Waits(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Looks for what a call asks the device for. A number that is made of constants alone, such as whether positions
    that a model counts itself are in order, is the same in every call: it is noted for the capture to use."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found = ""
        self.constants: list[Any] = []
        self.uploads: list[tuple[Tensor, Tensor]] = []  # of the host's numbers, to the device
        self._constant: dict[int, Any] = {}  # storages, kept so that no other takes their place

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        is_constant = all(_storage(tensor) in self._constant for tensor in tensors)
        result = function(*args, **(kwargs or {}))
        name = function.overloadpacket.__name__
        if name == "_local_scalar_dense" and is_constant:
            self.constants.append(result)
        elif name in _WAITING or (name == "_to_copy" and args[0].is_cuda and not result.is_cuda):
            self.found = self.found or f"aten::{name}"
        elif name == "_to_copy" and args[0].is_cpu and not result.is_cpu:
            self.uploads.append((args[0].clone(), result.clone()))
        if is_constant and torch.Tag.nondeterministic_seeded not in function.tags:
            for made in pytree.tree_leaves(result):
                if isinstance(made, Tensor) and _storage(made) is not None:
                    self._constant[_storage(made)] = made.untyped_storage()
        elif function._schema.is_mutable:
            for tensor in tensors:
                self._constant.pop(_storage(tensor), None)
        return result


def _storage(tensor: Tensor) -> Any:
    return tensor.untyped_storage()._cdata if type(tensor) is Tensor else None


class _Known(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Answers from a list where the host asks for a number."""

    def __init__(self, values: list[Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.rest = list(values)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.overloadpacket.__name__ == "_local_scalar_dense" and self.rest:
            return self.rest.pop(0)
        return function(*args, **(kwargs or {}))


class _Uploaded(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The host's numbers are where an earlier call put them."""

    def __init__(self, uploads: list[tuple[Tensor, Tensor]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.rest = list(uploads)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = function.overloadpacket.__name__, kwargs or {}
        to = kwargs.get("device")
        if name == "_to_copy" and args[0].is_cpu and to is not None and torch.device(to).type != "cpu":
            source, known = self.rest.pop(0) if self.rest else (None, None)
            if source is None or known is None or source.dtype != args[0].dtype or not torch.equal(source, args[0]):
                raise RuntimeError("the host sent other numbers to the device than in the run before")
            return known.clone()  # in memory of the graph's: a call may change it
        return function(*args, **kwargs)


@contextlib.contextmanager
def uploaded(uploads: list[tuple[Tensor, Tensor]]) -> Iterator[None]:
    """A call whose numbers of the host these are can be captured: nothing is sent while it runs."""
    if not uploads:
        yield
        return
    with _Uploaded(uploads):
        yield


class Looked(NamedTuple):
    """What a call asks of the device and sends to it. `waits`: the first op by which the host waits for it, or ""."""

    waits: str
    constants: list[Any]  # numbers that it asks for and that are the same in every call
    uploads: list[tuple[Tensor, Tensor]]
    spared: Plan | None = None

    @contextlib.contextmanager
    def known(self) -> Iterator[None]:
        """Inside, the call can be captured."""
        with knowing(self.constants), uploaded(self.uploads):
            yield


def looked_at(call: Callable[[], Any], spares: bool = False) -> Looked:
    """Runs it once. `spares`: its results are copied out of the graph, and some copies can be left out."""
    mode, watching = _Waits(), Watching()
    with mode, watching if spares else contextlib.nullcontext():
        output = call()
    spared = plan_of(call, watching, Results(output).tensors) if spares and not mode.found else None
    return Looked(mode.found, mode.constants, mode.uploads, spared)


def numbers_asked_for(call: Callable[[], Any]) -> tuple[str, list[Any]]:
    """The first op of a call by which the host waits for the device, or "", and the numbers that it got from the device
    and that are the same in every call. Runs it once."""
    found = looked_at(call)
    return found.waits, found.constants


_pretends = threading.local()  # within `knowing`


def is_capturing() -> bool:
    """Whether a stream captures, whatever `knowing` lets others believe."""
    return getattr(_pretends, "depth", 0) > 0 or torch.cuda.is_current_stream_capturing()


@contextlib.contextmanager
def knowing(values: list[Any]) -> Iterator[None]:
    """A call whose `numbers_asked_for` are these gets them without asking, and goes the way that it went before."""
    # Code that asks whether a stream captures does so to avoid such a question, by another and slower way (transformers
    # builds whole masks then). Here it need not.
    mode, before = _Known(values), torch.cuda.is_current_stream_capturing
    torch.cuda.is_current_stream_capturing = lambda: False
    _pretends.depth = getattr(_pretends, "depth", 0) + 1
    try:
        with mode if values else contextlib.nullcontext():
            yield
    finally:
        _pretends.depth -= 1
        torch.cuda.is_current_stream_capturing = before
    if mode.rest:
        raise RuntimeError("the host asked for fewer numbers than in the run before")


def capture(
    call: Callable[[], Any], device: torch.device, pool: Any, stream: torch.cuda.Stream, within: Any = None
) -> tuple[torch.cuda.CUDAGraph, Any]:
    """The graph of a call, and what it returned: memory that replays write to. `within` is entered for the call alone,
    and not for the cells of its generator that torch fills when a capture begins."""
    graph = torch.cuda.CUDAGraph()
    before = torch.cuda.current_stream(device)
    with _capture_lock:
        try:
            began = torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local")
            with began, within or contextlib.nullcontext():
                output = call()
        except BaseException:
            # Kept for ever: torch's allocators point to it, and its end would be the process', in a destructor.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(graph))
            torch.cuda.set_stream(before)
            # Where the capture ended in order, allocation has ended too.
            with contextlib.suppress(RuntimeError, AttributeError):
                torch._C._cuda_endAllocateToPool(device.index or 0, pool)
            torch.cuda.synchronize(device)
            _end_for_generators(device)
            raise
    return graph, output


def _end_for_generators(device: torch.device) -> None:
    """A small capture that ends in order: the device's generator then takes none for under way any more. Its state
    stays the same object, so that earlier graphs go on drawing from it."""
    with torch.cuda.device(device):
        cell = torch.zeros(1, device=device)
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            cell.zero_()


class StreamOrder:
    """Replays that share memory follow one another, whichever stream of a device they are on."""

    def __init__(self) -> None:
        self._last: dict[torch.device, tuple[Any, Any]] = {}

    @contextlib.contextmanager
    def kept(self, device: torch.device) -> Iterator[None]:
        """Around a replay: after those of other streams, and they after it."""
        stream = torch.cuda.current_stream(device)
        last = self._last.get(device)
        if last is not None and last[0] != stream:
            stream.wait_event(last[1])
        try:
            yield
        finally:
            event = last[1] if last is not None else torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(stream)
            self._last[device] = (stream, event)


def ambient() -> tuple[bool, torch.dtype | None]:
    """Autocast on GPUs, which a capture depends on besides its arguments."""
    enabled = torch.is_autocast_enabled("cuda")
    return (enabled, torch.get_autocast_dtype("cuda") if enabled else None)


def uncached_autocast() -> Any:
    """The caller's autocast without its cache of cast weights."""
    enabled = torch.is_autocast_enabled("cuda")
    return torch.autocast("cuda", dtype=torch.get_autocast_dtype("cuda"), enabled=enabled, cache_enabled=False)


def autocast_as(state: tuple[bool, torch.dtype | None]) -> Any:
    """Autocast on GPUs as `ambient` found it elsewhere."""
    enabled, dtype = state
    if not enabled and not torch.is_autocast_enabled("cuda"):
        return contextlib.nullcontext()
    return torch.autocast("cuda", dtype=dtype or torch.get_autocast_dtype("cuda"), enabled=enabled)


def eager_us(call: Callable[[], Any]) -> float:
    """Microseconds of a call as it is, host and device together; the first ones, which compile and choose, are on a
    stream of their own, as captures want it."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    try:
        with torch.cuda.stream(stream):
            for _ in range(_WARM_CALLS):
                call()
    finally:
        torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(_TIMED_CALLS):
        call()
    torch.cuda.synchronize()
    return (time.perf_counter() - begin) / _TIMED_CALLS * 1e6


def replay_us(replay: Callable[[], Any]) -> float:
    replay()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    begin.record()
    for _ in range(_TIMED_CALLS):
        replay()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / _TIMED_CALLS * 1e3
