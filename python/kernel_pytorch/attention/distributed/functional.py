"""Attention of a sequence that the members of a process group hold in parts, and how to cut and join such sequences."""

from __future__ import annotations

import zlib
from typing import Any

import torch
import torch.distributed as distributed
from torch import Tensor
from torch._compile import _disable_dynamo

from ..._ops.attention import attention_options
from ..._ops.support.autograd import wants_gradient
from ..._ops.support.casting import autocast, statistics_dtype
from ..._ops.support.masks import Sizes, join_masks
from ..._ops.support.seed import seed_for
from ...functional import attention
from ._exchange import Exchange
from ._function import Call, PiecesAttention, key_pieces
from ._pieces import SCHEDULES, Bounds, Packs, pieces_of

_WHAT = "context_parallel_attention"


def context_parallel_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    group: Any = None,
    schedule: str = "ring",
    layout: str = "bshd",
    cu_seqlens: Tensor | None = None,
    key_chunk: int | None = None,
    return_lse: bool = False,
    **options: Any,
) -> Any:
    """functional.attention of a sequence of which every member of `group` holds a part; equal to it within rounding.

    Every member calls it with tensors of the same shapes and the same options; it gets the rows of its own queries. A
    member that died, hangs or disagrees is named by a ContextParallelError on all members, within the group's time-out.

    Args:
        query, key, value: this member's part, [batch, sequence, heads, size] (or layout="bhsd"), or with cu_seqlens
            [tokens, heads, size]. Which part: see `schedule` and shard_sequence.
        group: a torch.distributed process group; None is this process alone (torch.distributed.group.WORLD is all).
        schedule: how keys reach queries.
            "ring": member i holds run i of the sequence; keys go round while the kernels work on those that came last.
            "zigzag": a ring where member i holds run i from both ends, so that causal members have equal work.
            "allgather": as "ring", but all keys are fetched first: no merging, memory for all keys.
            "ulysses": as "ring", but members exchange sequence for heads, which must be a multiple of the members.
        cu_seqlens: [sequences + 1], where sequences begin in the pack of all members' tokens; the same for all members.
        key_chunk: for one process: keys are streamed in chunks of this many, forward and backward.
        options: those of functional.attention. causal, window and alibi_slopes count places of the whole sequence;
            bias, mask and attention_mask are of this member's queries and all keys, in order of place; segment ids
            are this member's; key_lengths, sinks, seed and captured tensors are the same for all. With
            seed=None the first member draws it. Gradients of bias, sinks and captured tensors are this member's share:
            sum them over the group as those of any parameter. block_mask is not taken: give its mask_mod.

    Returns:
        The output, and with return_lse the lse [batch, heads, queries], both of this member's queries.
    """
    if schedule not in SCHEDULES:
        raise ValueError(f'{_WHAT}: schedule is "{schedule}"; use one of {", ".join(SCHEDULES)}')
    if options.get("block_mask") is not None:
        raise ValueError(f"{_WHAT}: block_mask lists tiles of the whole, which parts do not have; give its mask_mod")
    for name in ("cu_seqlens_q", "cu_seqlens_k"):
        if options.get(name) is not None:
            raise ValueError(f"{_WHAT}: {name} is given; queries and keys are cut alike, give cu_seqlens")
    query, key, value = autocast(query, key, value)
    options = _with_one_mask(query, key, layout, cu_seqlens, group, options)
    if key_chunk is None and (group is None or distributed.get_world_size(group) == 1):
        packs: dict[str, Any] = {} if cu_seqlens is None else {"cu_seqlens_q": cu_seqlens, "cu_seqlens_k": cu_seqlens}
        return attention(query, key, value, layout=layout, return_lse=return_lse, **packs, **options)
    output, lse = _by_parts(group, query, key, value, schedule, layout, cu_seqlens, key_chunk, options)
    return (output, lse) if return_lse else output


def _with_one_mask(
    query: Tensor, key: Tensor, layout: str, cu_seqlens: Tensor | None, group: Any, options: dict[str, Any]
) -> dict[str, Any]:
    """attention_mask, mask and bias as at most one mask of bools and one bias."""
    names = ("mask", "bias", "attention_mask")
    given = [options.get(name) for name in names]
    if all(one is None for one in given) or cu_seqlens is not None:  # of packs attention reads it, or it is refused
        return options
    members = 1 if group is None else distributed.get_world_size(group)
    heads = query.shape[1 if layout == "bhsd" else 2]
    sizes = Sizes(query.shape[0], heads, _sequence(query, layout), _sequence(key, layout) * members)
    mask, bias = join_masks(_WHAT, given[0], given[1], given[2], sizes)
    return {**{name: option for name, option in options.items() if name not in names}, "mask": mask, "bias": bias}


def _by_parts(*arguments: Any) -> tuple[Tensor, Tensor]:
    """A compiler cannot trace sends. What keeps it out imports it, which takes seconds: only while it is at work."""
    return _untraced_by_parts(*arguments) if torch.compiler.is_compiling() else _eager_by_parts(*arguments)


def _eager_by_parts(
    group: Any, query: Tensor, key: Tensor, value: Tensor, schedule: str, layout: str, cu_seqlens: Tensor | None,
    key_chunk: int | None, options: dict[str, Any],
) -> tuple[Tensor, Tensor]:  # fmt: skip
    exchange = None if group is None or distributed.get_world_size(group) == 1 else Exchange(group, _WHAT)
    if exchange is not None:
        exchange.agree(_header(query, key, value, schedule, layout, cu_seqlens, options))
    if exchange is not None and schedule == "ulysses":
        return _by_heads(exchange, query, key, value, layout, cu_seqlens, options)
    return _by_pieces(exchange, query, key, value, schedule, layout, cu_seqlens, key_chunk, options)


_untraced_by_parts = _disable_dynamo(_eager_by_parts)


def shard_sequence(tensor: Tensor, dim: int = 1, *, group: Any = None, schedule: str = "ring") -> Tensor:
    """This member's part of a whole sequence, for the schedule; its gradient is this member's share."""
    if group is None:
        return tensor
    members, rank = distributed.get_world_size(group), distributed.get_rank(group)
    runs = 2 * members if schedule == "zigzag" else members
    if tensor.shape[dim] % runs:
        raise ValueError(
            f"shard_sequence: dimension {dim} has {tensor.shape[dim]} rows, schedule {schedule!r} cuts it into {runs}"
            " equal runs; pad it"
        )
    pieces = pieces_of(schedule, rank, members, tensor.shape[dim] // members)
    return torch.cat([tensor.narrow(dim, piece.first, piece.length) for piece in pieces], dim)


def gather_sequence(tensor: Tensor, dim: int = 1, *, group: Any = None, schedule: str = "ring") -> Tensor:
    """The whole sequence from everyone's parts, in order of place.

    Differentiable for whoever uses the whole in the same way on every member: the gradient of a part is that of its
    rows here, not a sum over the members.
    """
    if group is None:
        return tensor
    join = _untraced_gathered if torch.compiler.is_compiling() else _gathered
    return join(tensor, dim, group, schedule)


def _gathered(tensor: Tensor, dim: int, group: Any, schedule: str) -> Tensor:
    whole: Tensor = _gather(tensor, dim, Exchange(group, "gather_sequence"), schedule)
    return whole


_untraced_gathered = _disable_dynamo(_gathered)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, dim: int, exchange: Exchange, schedule: str) -> Tensor:
        rows = tensor.shape[dim]
        ctx.dim, ctx.pieces = dim, pieces_of(schedule, exchange.member, exchange.size, rows)
        runs = []
        for member, part in enumerate(exchange.gather(tensor)):
            for piece in pieces_of(schedule, member, exchange.size, rows):
                runs.append((piece.first, part.narrow(dim, piece.start, piece.length)))
        return torch.cat([run for _, run in sorted(runs, key=lambda run: run[0])], dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return torch.cat([grad.narrow(ctx.dim, piece.first, piece.length) for piece in ctx.pieces], ctx.dim), *[
            None
        ] * 3


class _Swap(torch.autograd.Function):
    """Exchange.swap, whose gradient goes back the same way."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, exchange: Exchange) -> Tensor:
        ctx.exchange = exchange
        return exchange.swap(tensor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return ctx.exchange.swap(grad), None


_gather: Any = _Gather.apply
_swap: Any = _Swap.apply
_attend: Any = PiecesAttention.apply


def _header(
    query: Tensor, key: Tensor, value: Tensor, schedule: str, layout: str, cu_seqlens: Tensor | None, options: Any
) -> dict[str, Any]:
    header: dict[str, Any] = {name: list(x.shape) for name, x in (("query", query), ("key", key), ("value", value))}
    header.update(dtype=str(query.dtype), schedule=schedule, layout=layout)
    header["gradients"] = wants_gradient(query, key, value)
    if cu_seqlens is not None:
        starts = cu_seqlens.tolist()
        header["cu_seqlens"] = f"{len(starts)} numbers, sum {sum(starts)}, {zlib.crc32(str(starts).encode()):x}"
    for name, option in sorted(options.items()):
        if isinstance(option, Tensor):
            is_own = name in ("bias", "mask")  # may be broadcast over what differs
            header[name] = [len(option.shape), option.shape[-1]] if is_own else list(option.shape)
        elif isinstance(option, int | float | str | list | tuple | None) and name != "captured":
            header[name] = str(option)[:80] if isinstance(option, str | list | tuple) else option
        else:
            header[name] = getattr(option, "__qualname__", type(option).__name__)[-80:]
    return header


def _sequence(tensor: Tensor, layout: str) -> int:
    return tensor.shape[2 if layout == "bhsd" else 1]


def _by_pieces(
    exchange: Exchange | None, query: Tensor, key: Tensor, value: Tensor, schedule: str, layout: str,
    cu_seqlens: Tensor | None, key_chunk: int | None, options: dict[str, Any],
) -> tuple[Tensor, Tensor]:  # fmt: skip
    if cu_seqlens is not None:
        _refuse_with_packs(options)
        query, key, value, layout = query[None], key[None], value[None], "bshd"
    members = 1 if exchange is None else exchange.size
    rows, keys = _sequence(query, layout), _sequence(key, layout)
    if schedule == "zigzag" and (rows % 2 or keys % 2) and members > 1:
        raise ValueError(f"{_WHAT}: zigzag cuts {rows} queries and {keys} keys in two; use an even number of both")
    own = {name: options.pop(name, None) for name in ("bias", "mask", "sinks", "query_segment_ids", "key_segment_ids")}
    if exchange is not None and options.get("dropout_p"):
        options["seed"] = exchange.broadcast(seed_for(query, options.get("seed")))
    prepared = attention_options(query, key, layout=layout, **options)
    if prepared.key_lengths is not None and keys > rows and prepared.causal_offset is None:
        is_aligned = prepared.causal or max(prepared.window_left, prepared.window_right) >= 0
        if is_aligned or prepared.alibi_slopes is not None:  # each length would need an offset of its own
            raise ValueError(
                f"{_WHAT}: key_lengths move causal, window and alibi_slopes where there are more keys than queries "
                f"({keys * members} and {rows * members}); give causal_offset"
            )
    offset = prepared.causal_offset if prepared.causal_offset is not None else members * (keys - rows)
    right = 0 if prepared.causal else prepared.window_right if prepared.window_right >= 0 else None
    left = -prepared.window_left if prepared.window_left >= 0 else None
    numbers = statistics_dtype(query)
    call = Call(
        exchange,
        schedule,
        prepared._replace(query_segment_ids=own["query_segment_ids"]),
        Bounds(left, right, offset),
        pieces_of(schedule if members > 1 else "ring", 0 if exchange is None else exchange.member, members, rows),
        key_pieces(schedule, members, keys, key_chunk),
        own["mask"],
    )
    _add_segments(call, own, cu_seqlens, keys * members, query.device)
    bias = _whole_bias(own["bias"], query, keys * members)
    if call.mask is not None and call.mask.shape[-1] == 1:
        call.mask = call.mask.expand(*call.mask.shape[:-1], keys * members)
    sinks = None if own["sinks"] is None else own["sinks"].to(numbers)
    output, lse = _attend(call, query, key, value, bias, sinks, *prepared.captured)
    return (output, lse) if cu_seqlens is None else (output[0], lse[0])


def _refuse_with_packs(options: dict[str, Any]) -> None:
    for name in ("bias", "mask", "attention_mask", "score_mod", "mask_mod", "query_segment_ids", "key_lengths"):
        if options.get(name) is not None:
            raise ValueError(f'{_WHAT}: {name} counts places inside a sequence of a pack; use schedule="ulysses"')
    if options.get("dropout_p"):
        raise ValueError(f"{_WHAT}: dropout counts places inside a sequence of a pack; draw it outside of attention")


def _whole_bias(bias: Tensor | None, query: Tensor, keys: int) -> Tensor | None:
    if bias is None:
        return None
    bias = bias if bias.dtype is query.dtype else bias.to(statistics_dtype(query))
    while bias.dim() < 4:
        bias = bias[None]
    if bias.shape[-1] == 1:
        bias = bias.expand(*bias.shape[:-1], keys)
    return bias if bias.stride(-1) == 1 or bias.shape[-1] == 1 else bias.contiguous()


def _add_segments(call: Call, own: dict[str, Any], cu_seqlens: Tensor | None, keys: int, device: torch.device) -> None:
    """Ids of all keys: of packs from where sequences begin, else everyone's own, in order of place."""
    if cu_seqlens is not None:
        places = torch.arange(keys, device=device)
        ids = torch.searchsorted(cu_seqlens.to(places), places, right=True) - 1
        ids = torch.where(ids < cu_seqlens.shape[0] - 1, ids, -1).to(torch.int32)[None]
        call.key_segments = ids
        call.packs = Packs(cu_seqlens.tolist())
        mine = torch.cat([ids.narrow(1, piece.first, piece.length) for piece in call.queries], 1)
        call.options = call.options._replace(query_segment_ids=mine)
        return
    if own["query_segment_ids"] is None:
        return
    query_ids = own["query_segment_ids"].to(torch.int32)
    key_ids = query_ids if own["key_segment_ids"] is None else own["key_segment_ids"].to(torch.int32)
    call.options = call.options._replace(query_segment_ids=query_ids)
    if call.exchange is None:
        call.key_segments = key_ids
        return
    whole = key_ids.new_empty((key_ids.shape[0], keys))
    pieces = [pieces_of(call.schedule, i, call.exchange.size, key_ids.shape[1]) for i in range(call.exchange.size)]
    for of_member, ids in zip(pieces, call.exchange.gather(key_ids), strict=True):
        for piece in of_member:
            whole.narrow(1, piece.first, piece.length).copy_(ids.narrow(1, piece.start, piece.length))
    call.key_segments = whole


def _by_heads(
    exchange: Exchange, query: Tensor, key: Tensor, value: Tensor, layout: str, cu_seqlens: Tensor | None,
    options: dict[str, Any],
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """From a part of the sequence with all heads to the whole with a part of the heads, and back."""
    dims = (0, 1) if cu_seqlens is not None else (2, 1) if layout == "bhsd" else (1, 2)  # of sequence, of heads
    heads, key_heads, members = query.shape[dims[1]], key.shape[dims[1]], exchange.size
    if heads % members or (key_heads % members and members % key_heads):
        raise ValueError(
            f"{_WHAT}: ulysses gives each of {members} ranks as many heads; there are {heads} and {key_heads} of keys."
            ' Use a multiple, or schedule="ring"'
        )
    if options.get("dropout_p"):
        raise ValueError(f'{_WHAT}: dropout draws by head, which ulysses moves; use schedule="ring"')
    if key_heads % members:  # fewer than members: neighbours have the same one
        key, value = (x.repeat_interleave(members // key_heads, dims[1]) for x in (key, value))
    query, key, value = (_to_heads(exchange, x, *dims) for x in (query, key, value))
    own_heads = slice(exchange.member * heads // members, (exchange.member + 1) * heads // members)
    options = _options_of_heads(dict(options), own_heads, exchange, query.shape[dims[0]])
    packs: dict[str, Any] = {} if cu_seqlens is None else {"cu_seqlens_q": cu_seqlens, "cu_seqlens_k": cu_seqlens}
    output, lse = attention(query, key, value, layout=layout, return_lse=True, **packs, **options)
    lse_dims = (1, 0) if cu_seqlens is not None else (2, 1)
    return _to_sequence(exchange, output, *dims), _to_sequence(exchange, lse, *lse_dims)


def _options_of_heads(options: dict[str, Any], heads: slice, exchange: Exchange, rows: int) -> dict[str, Any]:
    for name in ("alibi_slopes", "sinks"):
        if options.get(name) is not None:
            options[name] = options[name][..., heads]
    for name in ("bias", "mask"):
        given = options.get(name)
        if given is None:
            continue
        if given.dim() >= 2 and given.shape[-2] != 1:
            raise ValueError(
                f'{_WHAT}: {name} is of this rank\'s queries, ulysses has all of them; use schedule="ring"'
            )
        options[name] = given[..., heads, :, :] if given.dim() >= 3 and given.shape[-3] != 1 else given
    for name in ("query_segment_ids", "key_segment_ids"):
        if options.get(name) is not None:
            options[name] = torch.cat(exchange.gather(options[name]), 1)
    first = heads.start
    score_mod, mask_mod = options.get("score_mod"), options.get("mask_mod")
    if score_mod is not None:
        options["score_mod"] = lambda score, b, h, q, k, *captured: score_mod(score, b, h + first, q, k, *captured)
    if mask_mod is not None:
        options["mask_mod"] = lambda b, h, q, k, *captured: mask_mod(b, h + first, q, k, *captured)
    return options


def _to_heads(exchange: Exchange, tensor: Tensor, sequence: int, heads: int) -> Tensor:
    parts = torch.stack(tensor.chunk(exchange.size, heads))
    return torch.cat(_swap(parts, exchange).unbind(0), sequence)


def _to_sequence(exchange: Exchange, tensor: Tensor, sequence: int, heads: int) -> Tensor:
    parts = torch.stack(tensor.chunk(exchange.size, sequence))
    return torch.cat(_swap(parts, exchange).unbind(0), heads)
