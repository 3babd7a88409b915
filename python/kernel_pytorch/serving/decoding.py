"""Steps of decoding as CUDA graphs. What a step needs is on the device: tokens, positions, lengths and tables. A graph
feeds each request's last token, samples the next, and moves everything on by one, so the host replays it again before
it has seen a token, and reads the tokens of one step while the next is computed. New pages are the only thing it
writes between steps. Batches are padded to a few sizes, each a graph; rows without a request have no keys and write
nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .._ops.sample import sampled
from .attention import Batch
from .requests import Request


def _sizes(most: int) -> list[int]:
    """1, 2, 4, 8, then multiples of 8 up to 64, of 16 beyond."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, max(most, 64) + 16, 16)]
    return [size for size in sizes if size < most] + [most]


class Decoder:
    def __init__(self, engine: Any) -> None:
        self.engine = engine
        most, device = engine.max_batch, engine.device
        self.sizes = _sizes(most)

        def make(dtype: torch.dtype, *shape: int) -> Tensor:
            return torch.zeros(most, *shape, dtype=dtype, device=device)

        self.tokens, self.positions, self.seeds = (make(torch.int64) for _ in range(3))
        self.seq_lens, self.active, self.top_k = (make(torch.int32) for _ in range(3))
        self.temperature, self.top_p, self.min_p = (make(torch.float32) for _ in range(3))
        self.tables = make(torch.int32, engine.table_room)
        self.graphs: dict[int, Any] = {}
        self.pool: Any = None
        self.results = [torch.zeros(most, dtype=torch.int64).pin_memory() for _ in range(2)]
        self.events = [torch.cuda.Event() for _ in range(2)]  # type: ignore[no-untyped-call]
        self.starts: list[int] = []  # of each row: the position of its token in the first step of a run
        self.rooms: list[int] = []  # the position from which on it has no page

    def _step(self, size: int) -> None:
        engine, page = self.engine, self.engine.cache.page_size
        positions, active, tables = self.positions[:size], self.active[:size], self.tables[:size]
        pages = tables.gather(1, (positions // page)[:, None])[:, 0].long()
        slots = torch.where(active > 0, pages * page + positions % page, -1)
        batch = Batch(engine.cache, slots, tables, self.seq_lens[:size], batch_invariant=engine.batch_invariant)
        logits = engine.served.logits(self.tokens[:size], positions, batch, None)
        positions.add_(active)
        numbers = (self.temperature, self.top_k, self.top_p, self.min_p, self.seeds, self.positions)
        tokens = sampled(logits, *(number[:size] for number in numbers))
        self.tokens[:size].copy_(tokens.clamp_min_(0))
        self.seq_lens[:size].add_(active)

    def _graph(self, size: int) -> Any:
        if size in self.graphs:
            return self.graphs[size]
        self.engine.served.prepare(size)
        self.active.zero_()
        self.seq_lens.zero_()
        self.positions.zero_()
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                self._step(size)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool):
            self._step(size)
        self.pool = graph.pool()
        self.graphs[size] = graph
        return graph

    def _fill(self, target: Tensor, values: Sequence[Any]) -> None:
        target[: len(values)].copy_(torch.tensor(values, dtype=target.dtype).pin_memory(), non_blocking=True)

    def _load(self, requests: Sequence[Request], size: int) -> None:
        """The state of these requests; rows behind them are inactive."""
        padding = size - len(requests)
        sampling = [request.sampling for request in requests]
        self._fill(self.tokens, [request.next_tokens(1)[0] for request in requests] + [0] * padding)
        self._fill(self.positions, [request.computed for request in requests] + [0] * padding)
        self._fill(self.seq_lens, [request.computed + 1 for request in requests] + [0] * padding)
        self._fill(self.active, [1] * len(requests) + [0] * padding)
        self._fill(self.temperature, [s.temperature for s in sampling])
        self._fill(self.top_k, [s.top_k for s in sampling])
        self._fill(self.top_p, [s.top_p for s in sampling])
        self._fill(self.min_p, [s.min_p for s in sampling])
        self._fill(self.seeds, [s.seed for s in sampling])

    def _write_tables(self, rows: Sequence[int], requests: Sequence[Request]) -> None:
        if not rows:
            return
        tables = self.engine.cache.table([requests[row].handle for row in rows], self.engine.table_room)
        if len(rows) == len(requests):
            self.tables[: len(rows)].copy_(tables.pin_memory(), non_blocking=True)
        else:
            self.tables[torch.tensor(rows, device=self.tables.device)] = tables.to(self.tables.device)

    def _has_pages(self, requests: Sequence[Request], step: int) -> bool:
        """Pages for the tokens of a step that is about to be launched; False: there are too few."""
        cache = self.engine.cache
        rows = [row for row, request in enumerate(requests) if self.starts[row] + step == self.rooms[row]]
        if sum(cache.allocator.pages_for(requests[row].handle, 1) for row in rows) > cache.allocator.available():
            return False
        for row in rows:
            cache.reserve(requests[row].handle, 1)
            self.rooms[row] += cache.page_size
        self._write_tables(rows, requests)
        return True

    def _launch(self, graph: Any, size: int, step: int) -> None:
        graph.replay()
        self.results[step % 2][:size].copy_(self.tokens[:size], non_blocking=True)
        self.events[step % 2].record()

    def _see(self, requests: Sequence[Request], step: int, is_fed: bool) -> bool:
        """Takes the tokens of a step; whether none of the requests ends. `is_fed`: the next step is under way."""
        self.events[step % 2].synchronize()
        engine, ended = self.engine, False
        for request, token in zip(requests, self.results[step % 2].tolist()):
            if request.reason:  # ended a step ago
                continue
            if request.take(token, engine.tokenizer):
                ended = True
            elif is_fed:
                engine.cache.extend(request.handle, [token])
                request.computed += 1
        return not ended

    def run(self, running: Sequence[Request]) -> None:
        """Until a request ends, pages are missing, or another request came."""
        engine = self.engine
        requests = [request for request in list(running) if request.handle and engine.make_room(request, 1)]
        requests = [request for request in requests if request.handle]  # others' needs may have undone one
        if not requests:
            return
        size = next(size for size in self.sizes if size >= len(requests))
        graph = self._graph(size)
        page = engine.cache.page_size
        self._load(requests, size)
        self._write_tables(range(len(requests)), requests)
        self.starts = [request.computed for request in requests]
        self.rooms = [(start // page + 1) * page for start in self.starts]
        for request in requests:
            engine.cache.extend(request.handle, request.next_tokens(1))
            request.computed += 1
        self._launch(graph, size, 0)
        launched, seen, waiting, goes_on = 1, 0, len(engine.waiting), True
        while seen < launched:
            if goes_on and self._has_pages(requests, launched):
                self._launch(graph, size, launched)
                launched += 1
            goes_on = self._see(requests, seen, seen + 1 < launched) and goes_on
            seen += 1
            if engine.poll is not None:
                engine.poll()
            goes_on = goes_on and len(engine.waiting) == waiting
