"""Attention of queries that are here with keys that come by: forward and backward over pieces, as autograd sees them.

The kernels add up parts in fp32 (functional.attention_part_). Keys and values travel as one buffer, the next on its way
while the kernels work on this one; backward sends the fp32 gradients of keys and values one step behind them, and the
last step brings them home.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..._ops import attention_part
from ..._ops.attention import captured_gradients
from ..._ops.support.casting import statistics_dtype
from ._exchange import GRADIENTS, Exchange, Incoming
from ._pieces import Bounds, Packs, Piece, join, pieces_of


class Part(NamedTuple):
    """What one call of the kernels computes: runs of rows here and of the keys that came by, and their places."""

    numbers: range  # of the query pieces
    queries: Piece
    keys: Piece
    diagonal: int | None = None  # of a join of pieces: rows count, not places
    is_join: bool = False


@dataclasses.dataclass
class Call:
    """One call of context parallel attention, of tensors [batch, sequence, heads, size] or with heads before it."""

    exchange: Exchange | None  # None: one process
    schedule: str
    options: Any  # AttentionOptions, without what depends on the part
    bounds: Bounds
    queries: list[Piece]
    keys: list[list[Piece]]  # of each member, as they come by
    mask: Tensor | None = None  # of these queries and all keys, like bias
    key_segments: Tensor | None = None  # of all keys, in order of place
    packs: Packs | None = None

    @property
    def dim(self) -> int:
        return 2 if self.options.heads_first else 1

    def rows(self, tensor: Tensor, piece: Piece) -> Tensor:
        return tensor.narrow(self.dim, piece.start, piece.length)

    def statistics(self, tensor: Tensor, piece: Piece) -> Tensor:
        """Statistics of a piece's rows, contiguous; the tensor itself if the piece has all rows."""
        return tensor.narrow(2, piece.start, piece.length).contiguous()

    def parts(self, keys: list[Piece], bias: Tensor | None, sinks_left: list[bool]) -> Iterator[Part]:
        """Every part with work: one of all pieces where that can be, since each reads and writes its rows once."""
        can_join = len(self.keys) > 1 and bias is None and not self.counts_places()  # one process wants its chunks
        joined = join(self.bounds, self.queries, keys) if can_join else None
        if joined is not None:
            end = joined.queries.start + joined.queries.length
            numbers = [i for i, one in enumerate(self.queries) if joined.queries.start <= one.start < end]
            if len({sinks_left[i] for i in numbers}) == 1:
                yield Part(range(numbers[0], numbers[-1] + 1), *joined, is_join=True)
                return
        for i, queries in enumerate(self.queries):
            for piece in keys:
                begin, end = self.bounds.keys_seen(queries, piece)
                is_shared = self.packs is None or self.packs.share_a_sequence(queries, piece)
                if begin < end and is_shared:
                    cut = Piece(begin, end - begin, piece.start + begin - piece.first)
                    yield Part(range(i, i + 1), queries, cut)

    def counts_places(self) -> bool:
        """Whether anything besides bounds depends on the positions of queries and keys."""
        options = self.options
        tensors = (self.mask, options.alibi_slopes, options.query_segment_ids, options.key_lengths)
        has_one = any(tensor is not None for tensor in tensors)
        return has_one or bool(options.dropout_p or options.score_mod or options.mask_mod)

    def part_options(self, part: Part, bias: Tensor | None, sinks: Tensor | None) -> Any:
        queries, options = part.queries, self.options
        if part.is_join:
            bounds = {"causal": part.diagonal is not None, "causal_offset": part.diagonal or 0}
            return options._replace(**bounds, window_left=-1, window_right=-1, sinks=sinks)
        begin, end = part.keys.first, part.keys.end
        changes: dict[str, Any] = {"causal_offset": self.bounds.offset, "sinks": sinks}
        if self.bounds.are_kept(queries, begin, end):
            changes.update(causal=False, window_left=-1, window_right=-1)
        changes["bias"] = None if bias is None else _cut(bias, queries, begin, end)
        changes["mask"] = None if self.mask is None else _cut(self.mask, queries, begin, end)
        if options.query_segment_ids is not None and self.key_segments is not None:
            changes["query_segment_ids"] = options.query_segment_ids.narrow(1, queries.start, queries.length)
            changes["key_segment_ids"] = self.key_segments.narrow(1, begin, end - begin)
        if options.key_lengths is not None:
            changes["key_lengths"] = options.key_lengths - begin
        return options._replace(**changes)


def _cut(tensor: Tensor, queries: Piece, begin: int, end: int) -> Tensor:
    """The part of a bias or mask of all keys that a part sees; dimensions of size 1 broadcast."""
    if tensor.shape[-2] != 1:
        tensor = tensor.narrow(-2, queries.start, queries.length)
    return tensor.narrow(-1, begin, end - begin)


class _KeyValue:
    """Keys and values of one member, in one buffer that travels."""

    def __init__(self, buffer: Tensor, key: Tensor, value: Tensor) -> None:
        self.buffer, self.like = buffer, (key, value)
        self.key = buffer[: key.numel()].view(key.shape)
        self.value = buffer[key.numel() :].view(value.shape)

    @classmethod
    def of(cls, key: Tensor, value: Tensor) -> _KeyValue:
        return cls(torch.cat([key.reshape(-1), value.reshape(-1)]), key, value)

    @classmethod
    def sums(cls, key: Tensor, value: Tensor, dtype: torch.dtype, is_written: bool = False) -> _KeyValue:
        """Zeros like them, or what a kernel will write."""
        make = torch.empty if is_written else torch.zeros
        return cls(make(key.numel() + value.numel(), dtype=dtype, device=key.device), key, value)

    def with_buffer(self, buffer: Tensor) -> _KeyValue:
        return _KeyValue(buffer, *self.like)


Blocks = Iterator[tuple[list[Piece], Tensor, Tensor]]


def _blocks(call: Call, key: Tensor, value: Tensor) -> Blocks:
    """Keys and values of every member: as they come by, or gathered."""
    exchange = call.exchange
    if exchange is None:
        yield call.keys[0], key, value
        return
    mine = _KeyValue.of(key, value)
    if call.schedule == "allgather":
        all_of_them = [mine.with_buffer(buffer) for buffer in exchange.gather(mine.buffer)]
        keys = torch.cat([one.key for one in all_of_them], call.dim)
        values = torch.cat([one.value for one in all_of_them], call.dim)
        yield call.keys[0], keys, values
        return
    for step in range(exchange.size):
        incoming = exchange.shift(mine.buffer) if step + 1 < exchange.size else None
        yield call.keys[(exchange.member - step) % exchange.size], mine.key, mine.value
        if incoming is not None:
            mine = mine.with_buffer(incoming.wait())


def forward_pieces(
    call: Call,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None = None,
    sinks: Tensor | None = None,
    blocks: Blocks | None = None,
) -> tuple[Tensor, Tensor]:
    """Output in fp32 and lse; `blocks` are given by whoever simulates a group."""
    layout = "bhsd" if call.options.heads_first else "bshd"
    output, lse = attention_part.empty_parts(query, value, layout)
    sinks_left = [sinks is not None] * len(call.queries)

    def add(part: Part, keys: Tensor, values: Tensor) -> None:
        queries = part.queries
        options = call.part_options(part, bias, sinks if sinks_left[part.numbers[0]] else None)
        for i in part.numbers:
            sinks_left[i] = False
        of_rows = call.statistics(lse, queries)
        attention_part.part(
            call.rows(query, queries), call.rows(keys, part.keys), call.rows(values, part.keys), queries.first,
            part.keys.first, *options, call.rows(output, queries), of_rows,
        )  # fmt: skip
        if of_rows.data_ptr() != lse.data_ptr() or queries.length != lse.shape[2]:
            lse.narrow(2, queries.start, queries.length).copy_(of_rows)

    for pieces, keys, values in _blocks(call, key, value) if blocks is None else blocks:
        for part in call.parts(pieces, bias, sinks_left):
            add(part, keys, values)
    for i in range(len(call.queries)):
        if sinks_left[i]:  # rows that see no key at all
            add(Part(range(i, i + 1), call.queries[i], Piece(0, 0, 0)), key, value)
    return output, lse


class _Gradients:
    """Accumulated gradients of the tensors that do not travel."""

    def __init__(self, call: Call, saved: Any, wanted: tuple[bool, bool, int]) -> None:
        query, bias, sinks, captured = saved
        self.wants_bias, self.wants_sinks, self.wants_captured = wanted
        dtype = statistics_dtype(query)
        self.query = torch.zeros(query.shape, dtype=dtype, device=query.device)
        self.bias = torch.zeros(bias.shape, dtype=dtype, device=query.device) if self.wants_bias else None
        self.sinks = torch.zeros(sinks.shape, dtype=dtype, device=query.device) if self.wants_sinks else None
        elements = sum(tensor.numel() for i, tensor in enumerate(captured) if self.wants_captured >> i & 1)
        self.captured = torch.zeros(elements, dtype=dtype, device=query.device)
        self.sinks_left = [self.wants_sinks] * len(call.queries)


def backward_pieces(call: Call, tensors: Any, grad_output: Tensor, grad_lse: Tensor | None, wanted: Any) -> Any:
    """_Gradients, and those of this member's keys and values."""
    query, key, value, output, lse, bias, sinks, captured = tensors
    gradients = _Gradients(call, (query, bias, sinks, captured), wanted)
    statistics: dict[Piece, list[Tensor | None]] = {}

    def add(part: Part, grads: list[Tensor], key_values: list[Tensor], writes_keys: bool = False) -> None:
        grad_keys, grad_values = grads
        keys, values = (call.rows(tensor, part.keys) for tensor in key_values)
        queries = part.queries
        wants_sinks = gradients.sinks_left[part.numbers[0]]
        for i in part.numbers:
            gradients.sinks_left[i] = False
        if queries not in statistics:
            statistics[queries] = [None if one is None else call.statistics(one, queries) for one in (lse, grad_lse)]
        options = call.part_options(part, bias, sinks if wants_sinks else None)
        of_bias, of_sinks, of_captured = attention_part.part_backward(
            *(call.rows(tensor, queries) for tensor in (grad_output, query)), keys, values, call.rows(output, queries),
            *statistics[queries], gradients.wants_captured, queries.first, part.keys.first, writes_keys, *options,
            call.rows(gradients.query, queries), grad_keys, grad_values, gradients.wants_bias, wants_sinks,
        )  # fmt: skip
        if gradients.bias is not None:
            _cut(gradients.bias, queries, part.keys.first, part.keys.end).add_(of_bias)
        if wants_sinks and gradients.sinks is not None:
            gradients.sinks.add_(of_sinks)
        gradients.captured.add_(of_captured)

    exchange, dtype = call.exchange, gradients.query.dtype
    home: Incoming | None = None
    grads = _KeyValue.of(key.new_zeros(0, dtype=dtype), value.new_zeros(0, dtype=dtype))
    for pieces, keys, values in _blocks(call, key, value):
        parts = list(call.parts(pieces, bias, gradients.sinks_left))
        is_join = len(parts) == 1 and parts[0].is_join
        seen = parts[0].keys if is_join else Piece(0, keys.shape[call.dim], 0)
        own = _KeyValue.sums(call.rows(keys, seen), call.rows(values, seen), dtype, is_written=is_join)
        for part in parts:
            within = seen if is_join else part.keys
            shifted = within._replace(start=within.start - seen.start)
            add(part, [call.rows(one, shifted) for one in (own.key, own.value)], [keys, values], writes_keys=is_join)
        grads = own
        if home is not None:  # what the others have found of these keys so far
            grads = _KeyValue(home.wait(), keys, values)
        elif own.key.shape != keys.shape:
            grads = _KeyValue.sums(keys, values, dtype)
        if parts and grads is not own:
            call.rows(grads.key, seen).add_(own.key)
            call.rows(grads.value, seen).add_(own.value)
        if exchange is None or call.schedule == "allgather":
            break
        home = exchange.shift(grads.buffer, GRADIENTS)
    for i in range(len(call.queries)):
        if gradients.sinks_left[i]:
            empty = [one.narrow(call.dim, 0, 0) for one in (key, value)]
            zeros = [torch.zeros_like(one, dtype=dtype) for one in empty]
            add(Part(range(i, i + 1), call.queries[i], Piece(0, 0, 0)), zeros, empty)
    if exchange is not None and call.schedule == "allgather":
        grads = _sum_of_all(call, exchange, grads, key, value)
    elif home is not None:
        grads = _KeyValue(home.wait(), key, value)
    return gradients, grads


def _sum_of_all(call: Call, exchange: Exchange, grads: _KeyValue, key: Tensor, value: Tensor) -> _KeyValue:
    """Everyone's gradients of this member's keys and values, in order of rank."""
    of_members = [
        torch.cat([grad.reshape(-1) for grad in pair])
        for pair in zip(
            grads.key.chunk(exchange.size, call.dim), grads.value.chunk(exchange.size, call.dim), strict=True
        )
    ]
    return _KeyValue(exchange.swap(torch.stack(of_members)).sum(0), key, value)


class PiecesAttention(torch.autograd.Function):
    """(call, query, key, value, bias, sinks, *captured) -> output in the query's type, lse in fp32."""

    @staticmethod
    def forward(
        ctx: Any, call: Call, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, sinks: Tensor | None,
        *captured: Tensor,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        output, lse = forward_pieces(call, query, key, value, bias, sinks)
        output = output.to(query.dtype)
        ctx.call = call
        ctx.save_for_backward(query, key, value, output, lse, bias, sinks, *captured)
        ctx.set_materialize_grads(False)
        return output, lse

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_output: Tensor | None, grad_lse: Tensor | None) -> Any:
        query, key, value, output, lse, bias, sinks, *captured = ctx.saved_tensors
        if grad_output is None:
            grad_output = torch.zeros_like(output)
        needed = ctx.needs_input_grad
        wants_captured = sum(1 << i for i, one in enumerate(needed[6:]) if one)
        tensors = (query, key, value, output, lse, bias, sinks, captured)
        wanted = (needed[4], needed[5], wants_captured)
        gradients, grads = backward_pieces(ctx.call, tensors, grad_output, grad_lse, wanted)
        return (
            None,
            gradients.query.to(query.dtype),
            grads.key.to(key.dtype),
            grads.value.to(value.dtype),
            None if gradients.bias is None else gradients.bias.to(bias.dtype),
            gradients.sinks,
            *captured_gradients(gradients.captured, captured, gradients.wants_captured),
        )


def key_pieces(call_schedule: str, members: int, rows: int, chunk: int | None) -> list[list[Piece]]:
    """The pieces of each key block of _blocks: all keys in one if they are gathered, chunks in one process."""
    if members == 1:
        step = chunk or max(rows, 1)
        return [[Piece(first, min(step, rows - first), first) for first in range(0, rows, step)]]
    if call_schedule == "allgather":
        return [[Piece(0, members * rows, 0)]]
    return [pieces_of(call_schedule, member, members, rows) for member in range(members)]
