"""Mixtures of experts: routing, grouped products, the experts' MLPs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kernel_pytorch import functional as F

from .case import Case
from .draw import Draw
from .run import generates

GATES = {"swiglu": torch.nn.functional.silu, "geglu": torch.nn.functional.gelu, "reglu": torch.relu}


def activated(v: Tensor, name: str | None) -> Tensor:
    if name is None:
        return v
    if name == "silu":
        return torch.nn.functional.silu(v)
    gate, up = (v[..., ::2], v[..., 1::2]) if name.endswith("_interleaved") else v.chunk(2, -1)
    return GATES[name.removesuffix("_interleaved")](gate) * up


def _activation(d: Draw) -> str | None:
    return d.choice((None, "silu", "swiglu", "swiglu_interleaved", "geglu", "reglu_interleaved"))


def _routing(d: Draw, tokens: int, experts: int, k: int, dtype: torch.dtype) -> F.Routing:
    logits = d.normal([tokens, experts], torch.float64 if dtype is torch.float64 else torch.float32)
    return F.route(logits, k, capacity=d.choice((None, None, 1, 5)))


def check_rows(routing: F.Routing, tokens: int, k: int, experts: int) -> str | None:
    """The pairs that were kept have rows of their own, sorted by expert."""
    kept = routing.row_of_token >= 0
    rows = routing.row_of_token[kept].long()
    here = (routing.experts >= 0) & (routing.experts < experts)
    if sorted(rows.tolist()) != list(range(len(rows))) or int(routing.dropped) != int(here.sum()) - len(rows):
        return "rows are not those of the pairs that were kept"
    token = torch.arange(tokens)[:, None].expand(tokens, k)[kept]
    if not torch.equal(routing.token_of_row[rows].long(), token):
        return "token_of_row is not the inverse"
    if not torch.equal(torch.bucketize(rows, routing.offsets.long(), right=True), routing.experts[kept].long()):
        return "rows are not sorted by expert"
    return None


@generates("route")
def route(d: Draw, name: str) -> Case:
    tokens, experts = d.size(60), max(1, d.size(70))
    k = d.between(1, min(experts, 16))
    options: dict[str, Any] = {"score": d.choice(("softmax", "sigmoid")), "renormalize": d.maybe(0.7)}
    options["capacity"] = d.choice((None, None, 1, 7))
    case = Case((d.tensor([tokens, experts], d.dtype()), k), options, names=("moe_route",), gradients=False)

    case.check = lambda routing, case: check_rows(routing, tokens, k, experts)
    if d.maybe(0.15):
        wrong = d.choice((dict(k=0), dict(k=experts + 1), dict(capacity=-1), dict(groups=experts + 1)))
        case.args = (case.args[0], wrong.pop("k", k))
        case.options.update(wrong)
        case.refused, case.check = "a number is out of range", None
    return case


@generates("route_chosen")
def route_chosen(d: Draw, name: str) -> Case:
    tokens, k, experts = d.size(60), d.between(1, 16), d.between(1, 70)
    chosen = d.integers([tokens, k], -1, experts + 2, d.choice((torch.int32, torch.int64)))
    options = {"capacity": d.choice((None, None, 1, 7))}
    case = Case((chosen, d.normal([tokens, k], d.dtype()), experts), options, names=("moe_permute",), gradients=False)
    case.check = lambda routing, case: check_rows(routing, tokens, k, experts)
    if d.maybe(0.15):
        case.args, case.refused = (*case.args[:2], d.choice((0, -1, 2000))), "there are no such experts"
    return case


@generates("grouped_matmul")
def grouped_matmul(d: Draw, name: str) -> Case:
    dtype, activation = d.dtype(), _activation(d)
    rows, groups, k = d.size(60), max(1, d.size(9)), d.size(60)
    n = d.size(40) * (1 if activation in (None, "silu") else 2)
    ends = sorted(d.between(0, rows) for _ in range(groups))
    gathers, source = d.maybe(0.4), max(1, d.size(30))
    gather = d.integers([rows], 0, source, torch.int32) if gathers else None
    x, weight = d.tensor([source if gathers else rows, k], dtype), d.tensor([groups, k, n], dtype)
    bias = d.tensor([groups, n], dtype) if d.maybe() else None

    def reference(x: Tensor, weight: Tensor, offsets: Tensor, bias: Any, gather: Any, activation: Any) -> Tensor:
        x = x if gather is None else x[gather.long()]
        parts, begin = [], 0
        for group, end in enumerate(ends):
            v = x[begin:end] @ weight[group]
            parts.append(activated(v if bias is None else v + bias[group], activation))
            begin = end
        columns = n if activation in (None, "silu") else n // 2
        return torch.cat([*parts, x.new_zeros(rows - begin, columns)])

    options = {"bias": bias, "gather": gather, "activation": activation}
    case = Case((x, weight, torch.tensor(ends)), options, reference, terms=max(k, rows), roundings=3.0)
    if d.maybe(0.1) and rows:
        case.args = (x, weight, torch.tensor([rows + 1] * groups))
        case.refused = "the groups leave the rows"
    return case


@generates("moe_combine")
def moe_combine(d: Draw, name: str) -> Case:
    dtype, tokens, experts = d.dtype(), d.size(30), d.between(1, 9)
    routing = _routing(d, tokens, experts, d.between(1, experts), dtype)

    def reference(y: Tensor, routing: F.Routing, weighted: bool) -> Tensor:
        rows = routing.row_of_token.long()
        factors = (routing.weights.double() if weighted else torch.ones_like(rows, dtype=y.dtype)) * (rows >= 0)
        return (y[rows.clamp(min=0)] * factors[..., None]).sum(1) if tokens else y.new_zeros(0, y.shape[1])

    y = d.tensor([routing.experts.numel(), d.size(50)], dtype)
    return Case((y, routing), {"weighted": d.maybe(0.7)}, reference, terms=experts, roundings=2.0)


@generates("moe_mlp")
def moe_mlp(d: Draw, name: str) -> Case:
    dtype, activation = d.dtype(), _activation(d)
    tokens, experts, size, inner = d.size(30), d.between(1, 6), d.size(30), d.size(20)
    routing = _routing(d, tokens, experts, d.between(1, experts), dtype)
    columns = inner * (1 if activation in (None, "silu") else 2)
    x = d.tensor([tokens, size], dtype)
    gate_up, down = d.tensor([experts, size, columns], dtype, scale=0.3), d.tensor([experts, inner, size], dtype)

    def reference(x: Tensor, routing: F.Routing, gate_up: Tensor, down: Tensor, activation: Any) -> Tensor:
        y = activated(torch.einsum("td,edn->etn", x, gate_up), activation) @ down
        chosen = torch.nn.functional.one_hot(routing.experts.long(), experts).to(x.dtype)
        weights = routing.weights.double() * (routing.row_of_token >= 0)
        return torch.einsum("tk,tke,etd->td", weights, chosen, y)

    terms = max(size, inner, tokens, 1) * experts
    return Case((x, routing, gate_up, down), {"activation": activation}, reference, terms=terms, roundings=6.0)
