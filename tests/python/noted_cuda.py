"""CUDA graphs without a GPU: the ops of a call are noted and run again into the same memory, as a CUDA graph does."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode


class NotedGraph(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple[Any, ...], dict[str, Any], Any]] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        self.calls.append((function, args, kwargs or {}, result))
        return result

    def replay(self) -> None:
        for function, args, kwargs, result in self.calls:
            again = function(*args, **kwargs)
            for old, new in zip(pytree.tree_leaves(result), pytree.tree_leaves(again), strict=True):
                if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)

    def pool(self) -> int:
        return 0


class Clock:
    """Stands for streams and events."""

    now = 0.0

    def __init__(self, enable_timing: bool = False) -> None:
        self.at = 0.0

    def record(self, stream: object = None) -> None:
        self.at = Clock.now
        Clock.now += 0.001

    def elapsed_time(self, other: Clock) -> float:
        return other.at - self.at

    def synchronize(self) -> None: ...
    def wait_stream(self, stream: object) -> None: ...
    def wait_event(self, event: object) -> None: ...


class NotedCuda:
    CUDAGraph, Stream, Event = NotedGraph, Clock, Clock
    _stream = Clock()
    memory = 0

    @staticmethod
    @contextlib.contextmanager
    def graph(
        graph: NotedGraph, pool: object = None, stream: object = None, capture_error_mode: str = ""
    ) -> Iterator[None]:
        NotedCuda.memory += 1000
        torch.zeros(1).fill_(1)  # as torch fills cells of its random generator, before what is captured
        with graph:
            yield

    @staticmethod
    def current_stream(device: object = None) -> Clock:
        return NotedCuda._stream

    @staticmethod
    def memory_reserved(device: object) -> int:
        return NotedCuda.memory

    is_current_stream_capturing = staticmethod(lambda: False)
    device = stream = staticmethod(lambda *_: contextlib.nullcontext())
    synchronize = empty_cache = set_stream = graph_pool_handle = staticmethod(lambda *_: None)

    @staticmethod
    def install(monkeypatch: pytest.MonkeyPatch) -> None:
        """In torch.cuda's place, as far as graphs ask it."""
        for name in vars(NotedCuda):
            if not name.startswith("_") and name not in ("install", "memory"):
                monkeypatch.setattr(torch.cuda, name, getattr(NotedCuda, name))
