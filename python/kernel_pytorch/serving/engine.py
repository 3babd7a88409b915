"""Continuous batching: every step feeds one token of each request that is decoding, and chunks of the prompts of others
next to them. Steps of decoding alone run as CUDA graphs on a GPU (decoding.py), one step ahead of the host.

One engine serves one model on one device, from one thread.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .._modules import evaluating
from ..functional import sample
from .attention import Batch
from .decoding import Decoder
from .models import Served, serve
from .pages import CODES, PagedCache
from .requests import Completion, OnToken, Request, Sampling, check_prompt

_CPU_SHARE, _GPU_SHARE = 0.3, 0.85  # of the memory that is free


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0] * _GPU_SHARE)
    return int(os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") * _CPU_SHARE)


def numbers(requests: Sequence[Request], device: torch.device) -> dict[str, Tensor]:
    """The numbers of `functional.sample`, one of each request; none where all are greedy."""
    sampling = [request.sampling for request in requests]
    columns = {
        "temperature": ([s.temperature for s in sampling], torch.float32),
        "top_k": ([s.top_k for s in sampling], torch.int32),
        "top_p": ([s.top_p for s in sampling], torch.float32),
        "min_p": ([s.min_p for s in sampling], torch.float32),
        "seeds": ([s.seed for s in sampling], torch.int64),
        "positions": ([request.length for request in requests], torch.int64),
    }
    return {name: torch.tensor(values, dtype=dtype, device=device) for name, (values, dtype) in columns.items()}


class Engine:
    """Requests come by `add` at any time; `step` computes until none is left.

    Args:
        model: a causal language model of Hugging Face's transformers, on its device, in its type.
        tokenizer: for stop strings.
        max_batch: requests that decode at once.
        max_tokens: tokens of a step, prompts' chunks included.
        max_length: tokens of a request at most; None: what the model has positions for.
        cache_tokens: tokens that the cache holds; None: as many as fit into most of the free memory, and no more than
            max_batch requests can need.
        page_size: tokens of a page.
        cache_dtype: float8_e4m3fn or int8 (with a scale of each token and head) keep keys and values in 8 bits; None:
            the model's type.
        cuda_graphs: decode by CUDA graphs on a GPU.
        fused: use kernels for whole layers where the model's parts are known ones.
        batch_invariant: attention's bits do not depend on the batch (products' may).
    """

    def __init__(
        self,
        model: Any,
        *,
        tokenizer: Any = None,
        max_batch: int = 64,
        max_tokens: int = 2048,
        max_length: int | None = None,
        cache_tokens: int | None = None,
        page_size: int | None = None,
        cache_dtype: torch.dtype | None = None,
        cuda_graphs: bool = True,
        fused: bool = True,
        batch_invariant: bool = False,
    ) -> None:
        if max_batch < 1 or max_tokens < max_batch:
            raise ValueError(
                f"Engine: max_batch is {max_batch}, max_tokens {max_tokens}; a step must have room for one token of "
                "each request"
            )
        self.model, self.tokenizer = model, tokenizer
        weight = next(model.parameters())
        self.device: torch.device = weight.device
        self.dtype: torch.dtype = weight.dtype
        self.served: Served = serve(model, fused=fused)
        self.cache_dtype = self._cache_dtype(cache_dtype)
        self.max_batch, self.max_tokens = max_batch, max_tokens
        self.vocabulary = model.get_input_embeddings().weight.shape[0]
        positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
        self.max_length = min(max_length or 2**31, positions or max_length or 4096)
        self.served.keep_angles(self.max_length)
        page = page_size or (64 if self.device.type == "cuda" else 16)
        self.table_room = -(-self.max_length // page)
        pages = self._pages(page, cache_tokens)
        self.cache = PagedCache(self.served.layers, pages, page, dtype=self.cache_dtype, device=self.device)
        self.batch_invariant = batch_invariant
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.finished: dict[int, Request] = {}
        self.next_number = 0
        self.poll: Callable[[], None] | None = None  # called between steps of a long run; it may add requests
        self.decoder = Decoder(self) if cuda_graphs and self.device.type == "cuda" else None

    def _cache_dtype(self, wanted: torch.dtype | None) -> torch.dtype:
        if wanted is None or wanted == self.dtype:
            return self.dtype
        if wanted not in CODES:
            raise ValueError(f"Engine: cache_dtype is {wanted}; it is float8_e4m3fn, int8 or the model's {self.dtype}")
        if getattr(self.served, "is_latent", False):
            raise ValueError(
                f"Engine: cache_dtype is {wanted}, {type(self.model).__name__} keeps latent rows, which stay in its "
                "own type; leave it out"
            )
        return wanted

    def _pages(self, page_size: int, cache_tokens: int | None) -> int:
        most = self.table_room * self.max_batch
        if cache_tokens is None:
            element = torch.empty((), dtype=self.cache_dtype).element_size()
            scales = 8 if CODES.get(self.cache_dtype) else 0  # of a token's key and value of a head
            layers = self.served.layers
            token = sum(layer.heads * ((layer.size + layer.value_size) * element + scales) for layer in layers)
            pages = min(most, _free_bytes(self.device) // (token * page_size))
        else:
            pages = -(-cache_tokens // page_size)
        if pages < 1:
            raise ValueError(f"Engine: the cache has no room for a page of {page_size} tokens")
        return pages

    def add(self, prompt: Sequence[int], sampling: Sampling | None = None, on_token: OnToken | None = None) -> int:
        """Its number, which `on_token(number, token)` gets and `completion` takes."""
        sampling = sampling or Sampling()
        if sampling.stop_strings and self.tokenizer is None:
            raise ValueError("generate: stop strings need a tokenizer")
        room = min(self.max_length, self.cache.allocator.pages * self.cache.page_size)
        tokens = check_prompt(prompt, self.vocabulary, room, sampling)
        request = Request(self.next_number, tokens, sampling, on_token)
        self.next_number += 1
        self.waiting.append(request)
        return request.number

    def completion(self, number: int) -> Completion | None:
        """Of a request that has ended, once."""
        request = self.finished.pop(number, None)
        return None if request is None else request.completion()

    def cancel(self, number: int) -> None:
        """Ends a request, with the tokens that it has; also from `on_token`."""
        for request in self.waiting:
            if request.number == number:
                request.reason = "cancelled"
                self.waiting.remove(request)
                self.finished[number] = request
                return
        for request in self.running:
            if request.number == number:
                request.reason = "cancelled"  # its pages are given back when the step has ended

    @property
    def is_busy(self) -> bool:
        return bool(self.waiting or self.running)

    def run(self) -> None:
        """Until every request has ended, in evaluation mode: a model that is being trained drops nothing out."""
        with evaluating(self.model):
            while self.is_busy:
                self._step()

    def step(self) -> None:
        """One batch, in evaluation mode; or several, where requests do nothing but decode on a GPU and none is waiting
        for room."""
        with evaluating(self.model):
            self._step()

    @torch.no_grad()
    def _step(self) -> None:
        self._collect()
        self._admit()
        if not self.running:
            return
        decoding = [request for request in self.running if request.length - request.computed == 1]
        if self.decoder is not None and len(decoding) == len(self.running):
            self.decoder.run(self.running)
        else:
            self._mixed()
        self._collect()

    def _collect(self) -> None:
        """Gives back what belongs to requests that have ended."""
        for request in [request for request in self.running if request.reason]:
            self._release(request)
            self.running.remove(request)
            self.finished[request.number] = request

    def _release(self, request: Request) -> None:
        self.cache.release(request.handle)
        request.handle, request.computed = 0, 0

    def _admit(self) -> None:
        """Takes requests in their order while a place and pages for all of their tokens so far are free."""
        allocator = self.cache.allocator
        while self.waiting and len(self.running) < self.max_batch:
            request = self.waiting[0]
            handle, shared = self.cache.begin(request.prompt + request.tokens)
            needed = allocator.pages_for(handle, request.length + 1 - shared)
            if needed > allocator.available() - len(self.running):
                self.cache.release(handle)
                if self.running:
                    return
                raise MemoryError(f"generate: a request needs {needed} pages, {allocator.available()} are free")
            request.handle, request.computed = handle, shared
            self.running.append(self.waiting.popleft())

    def make_room(self, request: Request, tokens: int) -> bool:
        """Reserves pages; where there are too few, requests that came last give theirs up and begin again later. False:
        this one had to."""
        allocator = self.cache.allocator
        while allocator.pages_for(request.handle, tokens) > allocator.available():
            last = self.running.pop()
            self._release(last)
            self.waiting.appendleft(last)
            if last is request:
                return False
        self.cache.reserve(request.handle, tokens)
        return True

    def _mixed(self) -> None:
        """One step of everything: each decoding request's token, then as much of the prompts as there is room for."""
        room = self.max_tokens
        fed: list[tuple[Request, list[int]]] = []
        order = sorted(self.running, key=lambda request: request.length - request.computed > 1)
        for request in order:
            if room == 0:
                break
            tokens = request.next_tokens(room)
            if request.handle and self.make_room(request, len(tokens)):
                fed.append((request, tokens))
                room -= len(tokens)
        fed = [(request, tokens) for request, tokens in fed if request.handle]  # others' needs may have undone one
        if not fed:
            return
        slots: list[int] = []
        positions: list[int] = []
        text: list[int] = []
        ends = [0]
        for request, tokens in fed:
            slots += self.cache.extend(request.handle, tokens)
            positions += range(request.computed, request.computed + len(tokens))
            text += tokens
            request.computed += len(tokens)
            ends.append(len(text))

        def whole(values: list[int], dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.tensor(values, dtype=dtype, device=self.device)

        batch = Batch(
            self.cache,
            whole(slots),
            self.cache.table([request.handle for request, _ in fed], self._room_of(fed)).to(self.device),
            whole([request.computed for request, _ in fed], torch.int32),
            whole(ends, torch.int32),
            max(len(tokens) for _, tokens in fed),
            self.batch_invariant,
            is_fresh=all(request.computed == len(tokens) for request, tokens in fed),
        )
        ready = [i for i, (request, _) in enumerate(fed) if request.computed == request.length]
        rows = whole([ends[i + 1] - 1 for i in ready])
        self.served.prepare(len(text))
        logits = self.served.logits(whole(text), whole(positions), batch, rows)
        if not ready:
            return
        requests = [fed[i][0] for i in ready]
        tokens = sample(logits, **numbers(requests, self.device)).tolist()
        for request, token in zip(requests, tokens):
            request.take(token, self.tokenizer)

    def _room_of(self, fed: Sequence[tuple[Request, list[int]]]) -> int:
        return max(-(-(request.computed + 1) // self.cache.page_size) + 1 for request, _ in fed)
