"""A mixture of experts: which experts a token goes to, and their MLPs."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from .grouped_matmul import activation_of
from .quantized_grouped_matmul import quantized_grouped_matmul
from .quantized_matmul import QuantizedWeight
from .support.casting import autocast, statistics_dtype
from .support.declare import differentiable, without_gradient


class Routing(NamedTuple):
    """Where the tokens go: what `route` returns and `moe_mlp` takes.

    Rows are pairs (token, expert) sorted by expert, within an expert by token.
    """

    weights: Tensor  # [..., k]: how much each expert counts; fp32
    experts: Tensor  # [..., k]: which they are; int32, as all that follow
    offsets: Tensor  # [experts]: where an expert's rows end
    counts: Tensor  # [experts]: how many pairs chose it, dropped ones too
    token_of_row: Tensor  # [tokens * k]: -1 behind the last row
    row_of_token: Tensor  # [..., k]: -1 where a pair was dropped
    dropped: Tensor  # []: how many pairs were
    aux_loss: Tensor  # []: 1 where experts are used alike
    z_loss: Tensor  # []: the mean squared logsumexp of the logits


def route(
    logits: Tensor,
    k: int,
    *,
    score: str = "softmax",
    bias: Tensor | None = None,
    groups: int | None = None,
    group_k: int | None = None,
    group_top: int = 2,
    renormalize: bool = True,
    scale: float = 1.0,
    capacity: int | None = None,
) -> Routing:
    """The k best experts of each token, their weights, and the rows sorted by expert, without a word to the host.

    Args:
        logits: [..., experts], 1 to 1024 experts; fp32, bf16, fp16 and fp64. Scores are fp32.
        k: experts of a token, up to 16. Of equal scores the lower index goes first.
        score: "softmax" over all experts, or "sigmoid" of each.
        bias: [experts], added to scores for the choice alone; weights do not know it, and it has no gradient.
        groups: experts are so many groups of neighbours, up to 32; only the group_k best of a token are chosen from.
        group_k: how many.
        group_top: a group is as good as its best expert (1) or its best two together (2).
        renormalize: whether the weights of a token sum to `scale`; otherwise they are its scores times `scale`.
        scale: of the weights.
        capacity: an expert keeps its first so many tokens; others are dropped, with weight 0. None drops nothing.

    Returns:
        A Routing. weights, aux_loss and z_loss have gradients.
    """
    if capacity is not None and capacity < 1:
        raise ValueError(f"route: capacity is {capacity}; it must be positive, or None to drop nothing")
    rows = _rows(logits)
    wide = None if bias is None else bias.detach().to(statistics_dtype(rows))
    limits = (groups or 1, group_k or groups or 1, group_top)
    routed = Routing(*_route(rows, wide, k, score, *limits, renormalize, scale, capacity or 0))
    if logits.dim() == 2:
        return routed
    leading = (*logits.shape[:-1], k)
    pairs = {name: getattr(routed, name).view(leading) for name in ("weights", "experts", "row_of_token")}
    return routed._replace(**pairs)


def route_chosen(experts: Tensor, weights: Tensor, num_experts: int, *, capacity: int | None = None) -> Routing:
    """The Routing of experts that were chosen already, as a model's own router leaves them.

    Args:
        experts: [..., k], integers; those outside [0, num_experts) are experts of another device and count nothing.
        weights: [..., k], how much each of them counts.
        num_experts: up to 1024.
        capacity: as in `route`.

    Returns:
        A Routing with these weights (0 where a pair was dropped) and losses of 0.
    """
    if capacity is not None and capacity < 1:
        raise ValueError(f"route_chosen: capacity is {capacity}; it must be positive, or None to drop nothing")
    if experts.shape != weights.shape:
        raise ValueError(
            f"route_chosen: experts have shape {list(experts.shape)}, weights {list(weights.shape)}; they must be equal"
        )
    chosen = _rows(experts).int()
    offsets, counts, token_of_row, row_of_token, dropped = _permute(chosen, num_experts, capacity or 0)
    row_of_token = row_of_token.view(experts.shape)
    wide = weights.to(statistics_dtype(weights))
    if capacity is not None:
        wide = wide * (row_of_token >= 0)
    none = wide.new_zeros(())
    return Routing(wide, chosen.view(experts.shape), offsets, counts, token_of_row, row_of_token, dropped, none, none)


def moe_combine(y: Tensor, routing: Routing, *, weighted: bool = True) -> Tensor:
    """The sum of each token's rows of y, times its weights unless they are not wanted.

    Args:
        y: [tokens * k, columns], rows as the routing sorts them.
        routing: what `route` returned.
        weighted: whether the routing's weights are applied.

    Returns:
        [..., columns], of y's type. Pairs that were dropped add nothing.
    """
    rows = _rows(routing.row_of_token)
    weights = routing.weights.reshape(rows.shape) if weighted else None
    return _combine(y, rows, weights).reshape(*routing.row_of_token.shape[:-1], y.shape[-1])  # type: ignore[no-any-return]


def moe_mlp(
    x: Tensor,
    routing: Routing,
    gate_up: Tensor | QuantizedWeight,
    down: Tensor | QuantizedWeight,
    *,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    activation: str | None = "swiglu",
    transposed: bool = False,
    limit: float = 7.0,
    slope: float = 1.702,
) -> Tensor:
    """For each token the weighted sum of its experts' MLPs: two grouped products, their activation, and the sum.

    No copy of x in the order of experts is made or kept: backward needs x, what the activation was taken of, and the
    routing. Results are bitwise repeatable.

    Args:
        x: [..., size], the tokens that were routed.
        routing: what `route` returned for them.
        gate_up: [experts, size, columns]; with a gate columns are gates and ups. Or in few bits: what `quantize_weight`
            made of [experts * columns, size], as transposed ones lie; then so is down.
        down: [experts, inner, size].
        gate_up_bias: [experts, columns].
        down_bias: [experts, size].
        activation: as in `grouped_matmul`: swiglu (gates are the first half of the columns), swiglu_interleaved,
            swiglu_clamped_interleaved (gpt-oss), gelu, ...
        transposed: whether gate_up is [experts, columns, size] and down [experts, size, inner], as linear layers have
            them.
        limit, slope: of swiglu_clamped.

    Returns:
        [..., size], of x's type.
    """
    if isinstance(gate_up, QuantizedWeight) or isinstance(down, QuantizedWeight):
        return _few_bits_mlp(x, routing, gate_up, down, gate_up_bias, down_bias, activation, limit, slope)
    x, gate_up, down = autocast(x, gate_up, down)
    pairs = [_rows(one) for one in (routing.weights, routing.experts, routing.row_of_token)]
    chosen = activation_of("moe_mlp", activation, limit, slope)
    tensors = (gate_up, down, gate_up_bias, down_bias, pairs[0], pairs[1], routing.offsets, routing.token_of_row)
    return _moe_mlp(_rows(x), *tensors, pairs[2], *chosen, transposed).reshape(x.shape)  # type: ignore[no-any-return]


def _few_bits_mlp(
    x: Tensor, routing: Routing, gate_up: Any, down: Any, gate_up_bias: Tensor | None, down_bias: Tensor | None,
    activation: str | None, limit: float, slope: float,
) -> Tensor:  # fmt: skip
    if not (isinstance(gate_up, QuantizedWeight) and isinstance(down, QuantizedWeight)):
        raise TypeError("moe_mlp: one of gate_up and down is in few bits; give both as QuantizedWeight, or neither")
    ends = routing.offsets
    hidden = quantized_grouped_matmul(
        _rows(x), gate_up, ends, bias=gate_up_bias, activation=activation, gather=routing.token_of_row, limit=limit,
        slope=slope,
    )  # fmt: skip
    return moe_combine(quantized_grouped_matmul(hidden, down, ends, bias=down_bias), routing).reshape(x.shape)


def _rows(x: Tensor) -> Tensor:
    """[rows, columns]; a vector is one row."""
    return x if x.dim() == 2 else x.flatten(0, -2) if x.dim() > 2 else x[None]


_INSTEAD = "a loop over the experts"
_route = differentiable("moe_route", name="route", instead="torch.topk of torch.softmax")
_combine = differentiable("moe_combine", instead=_INSTEAD)
_moe_mlp = differentiable("moe_mlp", instead=_INSTEAD)
_permute = without_gradient("moe_permute")
