"""Experts on several devices: tokens travel to their experts and back by all-to-all."""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.distributed as distributed
from torch import Tensor

from ..functional import Routing, moe_combine, moe_mlp, route_chosen

Counts = list[list[int]]  # rows by rank and its experts


@torch.compiler.disable(reason="expert_parallel_mlp reads on the host how many rows each rank sends")  # type: ignore[untyped-decorator,no-untyped-call]
def expert_parallel_mlp(
    x: Tensor, routing: Routing, gate_up: Tensor, down: Tensor, *, group: Any = None, parts: int = 1,
    gate_up_bias: Tensor | None = None, down_bias: Tensor | None = None, **options: Any,
) -> Tensor:  # fmt: skip
    """`functional.moe_mlp` where each rank of a process group has some of the experts and its own tokens.

    Rank r has experts r * local to (r + 1) * local - 1. Every rank calls this, with the same parts and options; one
    with no tokens does too. Nothing is dropped or padded: as many rows travel as there are pairs of a token and an
    expert. How many go where is read on the host once per call. Gradients of the experts are of the sum over all
    ranks' tokens. Results are bitwise repeatable.

    Args:
        x: [..., size], this rank's tokens.
        routing: of them, among all experts of the group.
        gate_up, down, gate_up_bias, down_bias: of this rank's experts, as in `moe_mlp`.
        group: a process group, gloo or NCCL; None: all ranks.
        parts: the rows of a rank's experts travel in so many parts, each of which is multiplied while later ones are
            under way; at most as many as it has experts.
        options: activation, transposed, limit and slope of `moe_mlp`.

    Returns:
        [..., size], of x's type.
    """
    size, local, experts = distributed.get_world_size(group), len(gate_up), len(routing.offsets)
    if experts != size * local:
        raise ValueError(
            f"expert_parallel_mlp: {size} ranks with {local} experts each have {size * local}, the routing is among "
            f"{experts}; route among all experts of the group"
        )
    if not 1 <= parts <= max(local, 1):
        raise ValueError(f"expert_parallel_mlp: parts is {parts}; it must be from 1 to a rank's experts, {local}")
    leaving, arriving = _counts(routing.offsets, size, group)
    cuts = [local * i // parts for i in range(parts + 1)]
    ranges = list(pairwise(cuts))
    sent = routing if parts == 1 else _in_parts(routing, leaving, ranges)
    lengths = [[sum(counts[lo:hi]) for counts in leaving] for lo, hi in ranges]  # by part and rank
    rows = _send_rows(x.reshape(-1, x.shape[-1]), sent, [sum(one) for one in lengths])
    pending: list[Any] = []
    back = [[sum(counts[lo:hi]) for counts in arriving] for lo, hi in ranges]
    received = [_travel(*one, group, pending) for one in zip(rows, lengths, back)]
    results = []
    for i, (lo, hi) in enumerate(ranges):
        pending[i].wait()
        biases = [None if bias is None else bias[lo:hi] for bias in (gate_up_bias, down_bias)]
        there = _of_received([counts[lo:hi] for counts in arriving], routing.weights)
        y = moe_mlp(
            received[i], there, gate_up[lo:hi], down[lo:hi], gate_up_bias=biases[0], down_bias=biases[1], **options
        )
        results.append(_travel(y, back[i], lengths[i], group, pending))
    for work in pending[parts:]:
        work.wait()
    return moe_combine(torch.cat(results), sent).view(x.shape)


def _counts(offsets: Tensor, size: int, group: Any) -> tuple[Counts, Counts]:
    """Rows that leave for each rank's experts, and that arrive from each rank for this one's."""
    leaving = offsets.diff(prepend=offsets.new_zeros(1))
    arriving = torch.empty_like(leaving)
    distributed.all_to_all_single(arriving, leaving, group=group)
    both = torch.stack((leaving, arriving)).view(2, size, -1).tolist()
    return both[0], both[1]


def _in_parts(routing: Routing, leaving: Counts, ranges: list[tuple[int, int]]) -> Routing:
    """The routing with rows sorted by part, then rank, then expert."""
    ends = [0, *accumulate(count for counts in leaving for count in counts)]
    local, device = len(leaving[0]), routing.token_of_row.device
    pieces = [(rank * local + lo, rank * local + hi) for lo, hi in ranges for rank in range(len(leaving))]
    order = torch.cat([torch.arange(ends[lo], ends[hi], device=device) for lo, hi in pieces])
    place = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=device)).int()
    row_of_token = routing.row_of_token
    if len(order):
        row_of_token = torch.where(row_of_token >= 0, place[row_of_token.clamp(min=0).long()], -1)
    return routing._replace(token_of_row=routing.token_of_row[order], row_of_token=row_of_token)


def _of_received(counts: Counts, like: Tensor) -> Routing:
    """The routing of rows that came rank by rank, in the order of experts each: every row has one expert."""
    experts = len(counts[0])
    lengths = torch.tensor(counts, dtype=torch.int64).flatten()
    chosen = torch.arange(experts, dtype=torch.int32).repeat(len(counts)).repeat_interleave(lengths)
    chosen = chosen.to(like.device, non_blocking=True)[:, None]
    return route_chosen(chosen, torch.ones_like(chosen, dtype=like.dtype), experts)


class _Rows(torch.autograd.Function):
    """Tokens in the order of rows, part by part; the gradient of a token is the sum of its rows' in a fixed order."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, routing: Routing, lengths: list[int]) -> tuple[Tensor, ...]:
        ctx.routing = Routing(*(one.detach() for one in routing))
        return torch.split(x.index_select(0, routing.token_of_row[: sum(lengths)]), lengths)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        sums = moe_combine(torch.cat(grads), ctx.routing, weighted=False)
        return sums.view(-1, sums.shape[-1]), None, None


class _Exchange(torch.autograd.Function):
    """Rows for each rank against rows of each rank. Appends a work to `pending` that must be waited for."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, sent: list[int], received: list[int], group: Any, pending: list[Any]) -> Tensor:
        ctx.sent, ctx.received, ctx.group = sent, received, group
        result, work = _exchange(rows, sent, received, group)
        pending.append(work)
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        result, work = _exchange(grads[0], ctx.received, ctx.sent, ctx.group)
        work.wait()
        return result, None, None, None, None


_send_rows: Any = _Rows.apply
_travel: Any = _Exchange.apply


def _exchange(rows: Tensor, sent: list[int], received: list[int], group: Any) -> tuple[Tensor, Any]:
    result = rows.new_empty(sum(received), rows.shape[1])
    return result, distributed.all_to_all_single(result, rows.contiguous(), received, sent, group, async_op=True)
