"""Keys and values of many requests in pages of equal size. Who owns which page is decided in C++
(plan/page_allocator.h): pages are shared by forks and by prompts that begin alike, and copied before they differ."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .._library import check, load
from ..functional import append_kv

CODES = {torch.float8_e4m3fn: None, torch.int8: 127.0}  # of caches in few bits: the largest code where there are scales

_Int32s = ctypes.POINTER(ctypes.c_int32)
_Int64s = ctypes.POINTER(ctypes.c_int64)
_ARGUMENTS = {
    "create": [ctypes.c_int64, ctypes.c_int64, ctypes.POINTER(ctypes.c_void_p)],
    "destroy": [ctypes.c_void_p],
    "begin": [ctypes.c_void_p, _Int32s, ctypes.c_size_t, _Int64s, _Int64s],
    "reserve": [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, _Int32s],
    "extend": [ctypes.c_void_p, ctypes.c_int64, _Int32s, ctypes.c_size_t, _Int64s, _Int32s],
    "fork": [ctypes.c_void_p, ctypes.c_int64, _Int64s],
    "release": [ctypes.c_void_p, ctypes.c_int64],
    "table": [ctypes.c_void_p, ctypes.c_int64, _Int32s, ctypes.c_size_t, _Int64s],
    "counts": [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, _Int64s],
}


@dataclass(frozen=True)
class LayerShape:
    """What a layer keeps of a token: `heads` keys of `size` and values of `value_size`."""

    heads: int
    size: int
    value_size: int


class PageAllocator:
    """The C++ allocator: numbers alone, no memory."""

    def __init__(self, pages: int, page_size: int) -> None:
        library = load()
        self._functions = {}
        for name, arguments in _ARGUMENTS.items():
            function = getattr(library, f"kp_pages_{name}")
            function.argtypes = arguments
            function.restype = None if name == "destroy" else ctypes.c_int
            self._functions[name] = function
        self._handle = ctypes.c_void_p()
        self.pages, self.page_size = pages, page_size
        check(self._functions["create"](pages, page_size, ctypes.byref(self._handle)))
        self._copy = (ctypes.c_int32 * 3)()

    def __del__(self) -> None:
        handle = getattr(self, "_handle", None)
        if handle:
            self._functions["destroy"](handle)

    def begin(self, prompt: Sequence[int]) -> tuple[int, int]:
        """A request, and how many tokens of its prompt's front are in shared pages already."""
        request, shared = ctypes.c_int64(), ctypes.c_int64()
        tokens = (ctypes.c_int32 * len(prompt))(*prompt)
        check(self._functions["begin"](self._handle, tokens, len(prompt), ctypes.byref(request), ctypes.byref(shared)))
        return request.value, shared.value

    def reserve(self, request: int, tokens: int) -> tuple[int, int, int] | None:
        """Pages for that many tokens more; (from, to, rows) of a copy to make first."""
        check(self._functions["reserve"](self._handle, request, tokens, self._copy))
        return tuple(self._copy) if self._copy[2] else None

    def extend(self, request: int, tokens: Sequence[int]) -> tuple[list[int], tuple[int, int, int] | None]:
        """Adds tokens: their slots, and the copy to make first."""
        count = len(tokens)
        slots = (ctypes.c_int64 * count)()
        given = (ctypes.c_int32 * count)(*tokens)
        check(self._functions["extend"](self._handle, request, given, count, slots, self._copy))
        return list(slots), tuple(self._copy) if self._copy[2] else None

    def fork(self, request: int) -> int:
        forked = ctypes.c_int64()
        check(self._functions["fork"](self._handle, request, ctypes.byref(forked)))
        return forked.value

    def release(self, request: int) -> None:
        check(self._functions["release"](self._handle, request))

    def table(self, request: int, room: int) -> list[int]:
        """Its pages, -1 behind them."""
        table, count = (ctypes.c_int32 * room)(), ctypes.c_int64()
        check(self._functions["table"](self._handle, request, table, room, ctypes.byref(count)))
        if count.value > room:
            raise ValueError(f"pages: request {request} has {count.value} pages, a table has room for {room}")
        return list(table)

    def _counts(self, request: int, tokens: int) -> ctypes.Array[ctypes.c_int64]:
        counts = (ctypes.c_int64 * 4)()
        check(self._functions["counts"](self._handle, request, tokens, counts))
        return counts

    def available(self) -> int:
        return self._counts(0, 0)[0]

    def pages_for(self, request: int, tokens: int) -> int:
        return self._counts(request, tokens)[1]

    def shared_tokens(self) -> int:
        return self._counts(0, 0)[2]


class PagedCache:
    """Memory for the keys and values of all layers, in pages, and the requests that own them.

    Args:
        layers: what each layer keeps of a token.
        pages: how many; all layers use the same tables.
        page_size: tokens of a page.
        dtype: of keys and values; float8_e4m3fn keeps them as they are in 8 bits, int8 with a scale of each token and
            head, which `append` finds.
        device: where they lie.
    """

    def __init__(
        self,
        layers: Sequence[LayerShape],
        pages: int,
        page_size: int = 64,
        *,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str = "cpu",
    ) -> None:
        self.layers, self.page_size = tuple(layers), page_size
        self.allocator = PageAllocator(pages, page_size)
        rows = [(pages, page_size, layer.heads) for layer in layers]
        self.keys, self.values = (
            [torch.empty(*row, size, dtype=dtype, device=device) for row, size in zip(rows, sizes)]
            for sizes in ([layer.size for layer in layers], [layer.value_size for layer in layers])
        )
        # A slot more than the pages have takes the scales of tokens that are not kept.
        scaled = rows if CODES.get(dtype) else []
        self._key_slots, self._value_slots = (
            [torch.ones(pages * page_size + 1, heads, device=device) for _, _, heads in scaled] for _ in range(2)
        )
        self.key_scales, self.value_scales = (
            [slots[:-1].view(pages, page_size, -1) for slots in every] for every in (self._key_slots, self._value_slots)
        )

    def append(self, layer: int, key: Tensor, value: Tensor, slots: Tensor) -> dict[str, Any]:
        """Writes a layer's new rows, [tokens, heads, size], into their slots: the scales for `paged_attention`."""
        scales: dict[str, Any] = {}
        largest = CODES.get(self.keys[layer].dtype)
        if largest is not None:
            places = torch.where(slots < 0, self._key_slots[layer].shape[0] - 1, slots).long()
            for rows, every in ((key, self._key_slots), (value, self._value_slots)):
                amounts = rows.abs().amax(-1).float() / largest
                every[layer].index_copy_(0, places, torch.where(amounts > 0, amounts, 1.0))
            scales = {"key_scale": self.key_scales[layer], "value_scale": self.value_scales[layer]}
        append_kv(key, value, self.keys[layer], self.values[layer], slots, **scales)
        return scales

    def begin(self, prompt: Sequence[int]) -> tuple[int, int]:
        """A new request, and the tokens of its prompt's front that need not be computed: others have done it."""
        return self.allocator.begin(prompt)

    def reserve(self, request: int, tokens: int) -> None:
        """Makes sure that so many more tokens have pages."""
        self._copy(self.allocator.reserve(request, tokens))

    def extend(self, request: int, tokens: Sequence[int]) -> list[int]:
        """The slots into which `append_kv` writes these tokens, which now belong to the request."""
        slots, copy = self.allocator.extend(request, tokens)
        self._copy(copy)
        return slots

    def fork(self, request: int) -> int:
        """Another request with the same tokens, in the same pages until one of the two adds to them."""
        return self.allocator.fork(request)

    def release(self, request: int) -> None:
        """Gives the pages back; full ones stay findable until their memory is needed."""
        self.allocator.release(request)

    def table(self, requests: Sequence[int], room: int) -> Tensor:
        """block_tables of `paged_attention`, int32 [requests, room], on the host."""
        return torch.tensor([self.allocator.table(request, room) for request in requests], dtype=torch.int32)

    def _copy(self, copy: tuple[int, int, int] | None) -> None:
        if copy is None:
            return
        source, target, rows = copy
        for memory in (*self.keys, *self.values, *self.key_scales, *self.value_scales):
            memory[target, :rows] = memory[source, :rows]
