"""Routing, grouped products and the experts' MLPs against a mixture that computes every expert for every token."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from kernel_pytorch import functional as F

GATES = ("swiglu", "swiglu_interleaved", "swiglu_clamped", "swiglu_clamped_interleaved", "geglu", "gelu", None)


def activate(v: Tensor, name: str | None) -> Tensor:
    if name is None:
        return v
    if name == "gelu":
        return torch.nn.functional.gelu(v)
    gate, up = (v[..., ::2], v[..., 1::2]) if name.endswith("_interleaved") else v.chunk(2, -1)
    if "clamped" in name:
        gate, up = gate.clamp(max=0.7), up.clamp(-0.7, 0.7)
        return gate * torch.sigmoid(1.702 * gate) * (up + 1)
    return (torch.nn.functional.silu(gate) if name.startswith("swiglu") else torch.nn.functional.gelu(gate)) * up


def dense(x: Tensor, routing: F.Routing, weights: Tensor, p: dict[str, Tensor | None], name: str | None) -> Tensor:
    """Every expert of every token; those that were not chosen, or dropped, count nothing."""
    gate_up, down = p["gate_up"], p["down"]
    assert gate_up is not None and down is not None
    v = torch.einsum("td,edn->etn", x, gate_up)
    v = v if p["gate_up_bias"] is None else v + p["gate_up_bias"][:, None]
    y = torch.einsum("etn,end->etd", activate(v, name), down)
    y = y if p["down_bias"] is None else y + p["down_bias"][:, None]
    chosen = torch.nn.functional.one_hot(routing.experts.long(), gate_up.shape[0]).to(x.dtype)
    kept = (routing.row_of_token >= 0).to(x.dtype)
    return torch.einsum("tk,tke,etd->td", weights * kept, chosen, y)


def parameters(experts: int, size: int, inner: int, name: str | None, bias: bool, dtype: torch.dtype) -> dict[str, Any]:
    columns = inner if name in (None, "gelu") else 2 * inner
    shapes = {"gate_up": (experts, size, columns), "down": (experts, inner, size)}
    made: dict[str, Any] = {key: torch.randn(shape, dtype=dtype) * 0.3 for key, shape in shapes.items()}
    made["gate_up_bias"] = torch.randn(experts, columns, dtype=dtype) if bias else None
    made["down_bias"] = torch.randn(experts, size, dtype=dtype) if bias else None
    return made


def reference_route(logits: Tensor, k: int, score: str, bias: Tensor | None, groups: int, group_k: int) -> Tensor:
    """The chosen experts, by a stable sort."""
    scores = logits.softmax(-1) if score == "softmax" else logits.sigmoid()
    keys = scores if bias is None else scores + bias
    if groups > 1:
        each = keys.unflatten(-1, (groups, -1))
        quality = each.topk(min(2, each.shape[-1]), -1).values.sum(-1)
        kept = quality.sort(dim=-1, descending=True, stable=True).indices[..., :group_k]
        mask = torch.zeros_like(quality).scatter_(-1, kept, 1.0)[..., None].expand_as(each).flatten(-2)
        keys = keys.masked_fill(mask == 0, float("-inf"))
    return keys.sort(dim=-1, descending=True, stable=True).indices[..., :k]


def check_rows(routing: F.Routing, tokens: int, k: int, experts: int, capacity: int | None) -> None:
    """The permutation: sorted by expert, stable, complete but for what was dropped."""
    chosen = routing.experts.flatten().tolist()
    rows, token_of_row, next_row = routing.row_of_token.flatten().tolist(), routing.token_of_row.tolist(), 0
    for expert in range(experts):
        pairs = [pair for pair, one in enumerate(chosen) if one == expert]
        assert routing.counts[expert] == len(pairs)
        for rank, pair in enumerate(pairs):
            if capacity is not None and rank >= capacity:
                assert rows[pair] == -1 and routing.weights.flatten()[pair] == 0
                continue
            assert rows[pair] == next_row and token_of_row[next_row] == pair // k
            next_row += 1
        assert routing.offsets[expert] == next_row
    assert token_of_row[next_row:] == [-1] * (tokens * k - next_row)
    assert routing.dropped == tokens * k - next_row


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize(("tokens", "experts", "k", "groups", "group_k", "capacity"), [
    (200, 64, 6, 8, 3, None), (77, 33, 4, 1, 1, 9), (5, 3, 3, 1, 1, None), (1, 1, 1, 1, 1, None), (0, 4, 2, 1, 1, None),
    (50, 1024, 16, 1, 1, 1), (64, 32, 2, 16, 2, None),
])  # fmt: skip
def test_route(score: str, tokens: int, experts: int, k: int, groups: int, group_k: int, capacity: int | None) -> None:
    torch.manual_seed(tokens)
    logits = torch.randn(tokens, experts)
    bias = torch.randn(experts) if groups == 8 else None
    options: dict[str, Any] = dict(score=score, bias=bias, groups=groups, group_k=group_k, capacity=capacity)
    routing = F.route(logits, k, scale=2.0, **options)
    assert torch.equal(routing.experts.long(), reference_route(logits, k, score, bias, groups, group_k))
    check_rows(routing, tokens, k, experts, capacity)
    wide = logits.double()
    scores = (wide.softmax(-1) if score == "softmax" else wide.sigmoid()).gather(-1, routing.experts.long())
    expected = 2.0 * scores / scores.sum(-1, keepdim=True) * (routing.row_of_token >= 0)
    torch.testing.assert_close(routing.weights.double(), expected, rtol=1e-5, atol=1e-6)
    plain = F.route(logits, k, renormalize=False, **options).weights.double()
    torch.testing.assert_close(plain, scores * (routing.row_of_token >= 0), rtol=1e-5, atol=1e-6)
    if tokens:
        shares = wide.softmax(-1) if score == "softmax" else wide.sigmoid() / wide.sigmoid().sum(-1, keepdim=True)
        aux = experts * (routing.counts / (tokens * k) * shares.mean(0)).sum()
        torch.testing.assert_close(routing.aux_loss.double(), aux, rtol=1e-5, atol=0)
        torch.testing.assert_close(routing.z_loss.double(), wide.logsumexp(-1).square().mean(), rtol=1e-5, atol=1e-6)
    else:
        assert routing.aux_loss == 0 and routing.z_loss == 0


def test_ties_go_to_the_lower_index_and_nan_to_none() -> None:
    logits = torch.tensor([[1.0, 2.0, 2.0, 2.0], [float("nan"), 0.0, 0.0, -1.0], [float("-inf")] * 3 + [0.0]])
    assert F.route(logits, 2).experts.tolist() == [[1, 2], [1, 2], [3, 0]]


def test_leading_dimensions_and_narrow_types() -> None:
    logits = torch.randn(2, 3, 8).bfloat16()
    routing = F.route(logits, 2)
    assert routing.weights.shape == routing.experts.shape == routing.row_of_token.shape == (2, 3, 2)
    assert routing.weights.dtype is torch.float32 and routing.token_of_row.shape == (12,)
    x, p = torch.randn(2, 3, 16).bfloat16(), parameters(8, 16, 8, "swiglu", False, torch.bfloat16)
    assert F.moe_mlp(x, routing, **p).shape == x.shape


def test_routes_of_experts_that_were_chosen() -> None:
    torch.manual_seed(9)
    routing = F.route(torch.randn(50, 7), 3, capacity=12)
    again = F.route_chosen(routing.experts, routing.weights, 7, capacity=12)
    for name in ("weights", "experts", "offsets", "counts", "token_of_row", "row_of_token", "dropped"):
        assert torch.equal(getattr(again, name), getattr(routing, name)), name
    elsewhere = F.route_chosen(torch.tensor([[0, 9], [-1, 1]]), torch.ones(2, 2), 2)  # experts of other devices
    assert elsewhere.row_of_token.tolist() == [[0, -1], [-1, 1]] and elsewhere.counts.tolist() == [1, 1]


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize("renormalize", [True, False])
@pytest.mark.parametrize("capacity", [None, 3])
def test_gradients_of_the_routing(score: str, renormalize: bool, capacity: int | None) -> None:
    torch.manual_seed(0)
    logits = torch.randn(9, 6, dtype=torch.float64, requires_grad=True)

    def results(logits: Tensor) -> Any:
        routing = F.route(logits, 3, score=score, renormalize=renormalize, scale=1.5, capacity=capacity)
        return routing.weights, routing.aux_loss, routing.z_loss

    assert torch.autograd.gradcheck(results, logits)
    # And of the kernel, against the double one.
    narrow = logits.detach().float().requires_grad_()
    for some, wide in zip(results(narrow), results(logits)):
        (gradient,) = torch.autograd.grad(some.square().sum(), narrow, retain_graph=True)
        (expected,) = torch.autograd.grad(wide.square().sum(), logits, retain_graph=True)
        torch.testing.assert_close(gradient.double(), expected, rtol=1e-4, atol=1e-6)


def test_500_routings_against_every_expert() -> None:
    generator = torch.Generator().manual_seed(3)

    def between(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=generator))

    torch.manual_seed(4)
    for i in range(500):
        tokens, experts = between(0, 20), between(1, 9)
        k, name, transposed = between(1, experts), GATES[i % len(GATES)], i % 3 == 0
        p = parameters(experts, between(1, 12), between(1, 9), name, i % 2 == 0, torch.float32)
        x = torch.randn(tokens, p["gate_up"].shape[1])
        logits = torch.randn(tokens, experts) * between(0, 8)  # 0: all alike; large: few experts
        routing = F.route(logits, k, capacity=between(1, 9) if i % 4 == 1 else None)
        given = dict(p, gate_up=p["gate_up"].mT.contiguous(), down=p["down"].mT.contiguous()) if transposed else p
        output = F.moe_mlp(x, routing, **given, activation=name, transposed=transposed, limit=0.7)
        wide = {key: None if value is None else value.double() for key, value in p.items()}
        expected = dense(x.double(), routing, routing.weights.double(), wide, name)
        torch.testing.assert_close(output.double(), expected, rtol=1e-4, atol=1e-5, msg=f"routing {i} of {name}")


@pytest.mark.parametrize("name", GATES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_gradients_of_the_experts(name: str | None, dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    tokens, experts, k = 7, 4, 2
    p = parameters(experts, 6, 5, name, True, dtype)
    x = torch.randn(tokens, 6, dtype=dtype)
    routing = F.route(torch.randn(tokens, experts, dtype=dtype), k, capacity=3)
    leaves = [x, routing.weights.clone(), *p.values()]
    names = list(p)

    def output(x: Tensor, weights: Tensor, *rest: Tensor) -> Tensor:
        routed = routing._replace(weights=weights)
        return F.moe_mlp(x, routed, **dict(zip(names, rest)), activation=name, limit=0.7)

    if dtype is torch.float64:
        assert torch.autograd.gradcheck(output, [leaf.requires_grad_() for leaf in leaves], atol=1e-4)
        return
    wide = [leaf.double().requires_grad_() for leaf in leaves]
    leaves = [leaf.requires_grad_() for leaf in leaves]
    upstream = torch.randn(tokens, 6)
    expected = torch.autograd.grad(
        dense(wide[0], routing, wide[1], dict(zip(names, wide[2:])), name), wide, upstream.double()
    )
    for found, one in zip(torch.autograd.grad(output(*leaves), leaves, upstream), expected):
        torch.testing.assert_close(found.double(), one, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_expert_takes_all(dtype: torch.dtype) -> None:
    torch.manual_seed(2)
    p = parameters(4, 16, 8, "swiglu", False, dtype)
    p = {key: None if value is None else value.requires_grad_() for key, value in p.items()}
    x = torch.randn(33, 16).to(dtype)
    logits = torch.zeros(33, 4)
    logits[:, 2] = 9
    routing = F.route(logits, 1)
    output = F.moe_mlp(x, routing, **p)
    expected = activate(x.double() @ p["gate_up"][2].double(), "swiglu") @ p["down"][2].double()
    torch.testing.assert_close(output.double(), expected, rtol=3e-2, atol=3e-2)
    output.float().sum().backward()
    for weight in (p["gate_up"], p["down"]):  # experts without tokens have gradients of exactly 0
        assert torch.count_nonzero(weight.grad[[0, 1, 3]]) == 0 and torch.count_nonzero(weight.grad[2]) > 0


def test_repeated_runs_are_bitwise_equal() -> None:
    torch.manual_seed(5)
    p = {k: v for k, v in parameters(6, 24, 16, "swiglu", True, torch.float32).items()}
    leaves = [torch.randn(40, 24), torch.randn(40, 6), *p.values()]

    def run() -> list[Tensor]:
        given = [leaf.clone().requires_grad_() for leaf in leaves]
        routing = F.route(given[1], 2)
        output = F.moe_mlp(given[0], routing, **dict(zip(p, given[2:])))
        loss = output.square().sum() + routing.aux_loss + routing.z_loss
        return [output, *torch.autograd.grad(loss, given)]

    first = run()
    for _ in range(100):
        assert all(torch.equal(a, b) for a, b in zip(first, run()))


def loop(x: Tensor, weight: Tensor, ends: list[int], bias: Tensor | None = None) -> Tensor:
    starts = [0, *ends[:-1]]
    parts = [x[a:b] @ weight[g] + (0 if bias is None else bias[g]) for g, (a, b) in enumerate(zip(starts, ends))]
    return torch.cat([*parts, x.new_zeros(len(x) - ends[-1], weight.shape[-1])])


@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize("gathers", [False, True])
def test_grouped_matmul_and_its_gradients(transpose: bool, gathers: bool) -> None:
    torch.manual_seed(6)
    ends = [0, 5, 6, 6, 17]
    for dtype, tolerance in ((torch.float64, 1e-9), (torch.float32, 1e-4), (torch.bfloat16, 4e-2)):
        source, weight, bias = torch.randn(9, 8), torch.randn(5, 8, 12) / 3, torch.randn(5, 12)
        gather = torch.randint(0, 9, (20,), dtype=torch.int32) if gathers else None
        x = source if gathers else torch.randn(20, 8)
        wide = [t.to(dtype).double().requires_grad_() for t in (x, weight, bias)]
        leaves = [t.detach().to(dtype).requires_grad_() for t in wide]
        stored = leaves[1].mT.contiguous().detach().requires_grad_() if transpose else leaves[1]
        offsets = torch.tensor([0, *ends] if transpose else ends)
        rows = wide[0] if gather is None else wide[0][gather.long()]
        expected = loop(rows, wide[1], ends, wide[2])
        output = F.grouped_matmul(leaves[0], stored, offsets, bias=leaves[2], gather=gather, transpose_weight=transpose)
        torch.testing.assert_close(output.double(), expected, rtol=tolerance, atol=tolerance)
        upstream = torch.randn(20, 12).to(dtype)
        expected_grads = torch.autograd.grad(expected, wide, upstream.double())
        grads = list(torch.autograd.grad(output, [leaves[0], stored, leaves[2]], upstream))
        if transpose:
            assert grads[1].is_contiguous()
            grads[1] = grads[1].mT
        for found, one in zip(grads, expected_grads):
            torch.testing.assert_close(found.double(), one, rtol=tolerance, atol=tolerance * 3)
        for name in GATES:
            with torch.no_grad():
                given = dict(bias=leaves[2], gather=gather, transpose_weight=transpose, activation=name, limit=0.7)
                fused = F.grouped_matmul(leaves[0], stored, offsets, **given)
                torch.testing.assert_close(
                    fused.double()[: ends[-1]],
                    activate(expected, name)[: ends[-1]],
                    rtol=tolerance, atol=tolerance,
                )  # fmt: skip
            apart = F.grouped_matmul(leaves[0], stored, offsets, **given)
            torch.testing.assert_close(apart[: ends[-1]], fused[: ends[-1]], rtol=tolerance, atol=tolerance)


def test_combine_is_the_weighted_sum_of_rows() -> None:
    torch.manual_seed(7)
    routing = F.route(torch.randn(11, 5, dtype=torch.float64), 3, capacity=5)
    y = torch.randn(33, 6, dtype=torch.float64, requires_grad=True)
    weights = routing.weights.clone().requires_grad_()

    def combined(y: Tensor, weights: Tensor) -> Tensor:
        return F.moe_combine(y, routing._replace(weights=weights))

    rows = routing.row_of_token.long()
    expected = (y[rows.clamp(min=0)] * (weights * (rows >= 0))[..., None]).sum(1)
    torch.testing.assert_close(combined(y, weights), expected)
    assert torch.autograd.gradcheck(combined, (y, weights))
    plain = F.moe_combine(y, routing, weighted=False)
    torch.testing.assert_close(plain, (y[rows.clamp(min=0)] * (rows >= 0)[..., None]).sum(1))


def test_only_what_backward_needs_is_kept() -> None:
    p = parameters(8, 64, 32, "swiglu", False, torch.float32)
    x = torch.randn(128, 64, requires_grad=True)
    routing = F.route(torch.randn(128, 8), 2)
    kept: dict[int, int] = {}
    weights = {value.data_ptr() for value in p.values() if value is not None}

    def note(tensor: Tensor) -> Tensor:
        if tensor.data_ptr() not in weights:
            kept[tensor.data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        F.moe_mlp(x, routing, **{key: v if v is None else v.requires_grad_() for key, v in p.items()})
    least = 4 * (128 * 64 + 256 * 64)  # x, and what the gates were taken of
    indices = sum(t.untyped_storage().nbytes() for t in (routing.weights, routing.experts, routing.offsets,
                                                         routing.token_of_row, routing.row_of_token))  # fmt: skip
    assert sum(kept.values()) <= least + indices


@pytest.mark.parametrize(("change", "message"), [
    (dict(k=0), "k is 0"), (dict(k=9), "k is 9"), (dict(groups=3), "8 experts are in 3 groups"),
    (dict(groups=4, group_k=5), "group_k is 5"), (dict(groups=8, group_k=1), "k is 2"), (dict(capacity=0), "capacity"),
    (dict(group_top=3, groups=4), "group_top is 3"), (dict(score="tanh"), "tanh"),
])  # fmt: skip
def test_bad_routes_say_what_to_do(change: dict[str, Any], message: str) -> None:
    with pytest.raises((RuntimeError, ValueError), match=message):
        F.route(torch.randn(4, 8), **{"k": 2, **change})


def test_bad_groups_say_what_to_do() -> None:
    x, weight = torch.randn(6, 4), torch.randn(3, 4, 5)
    with pytest.raises(RuntimeError, match="offsets"):
        F.grouped_matmul(x, weight, torch.tensor([2, 1, 6]))
    with pytest.raises(RuntimeError, match="offsets"):
        F.grouped_matmul(x, weight, torch.tensor([2, 4, 7]))
    with pytest.raises(RuntimeError, match="even number"):
        F.grouped_matmul(x, weight, torch.tensor([2, 4, 6]), activation="swiglu")
    with pytest.raises(ValueError, match="activation"):
        F.grouped_matmul(x, weight, torch.tensor([2, 4, 6]), activation="mish")
    with pytest.raises(RuntimeError, match="b must be"):
        F.grouped_matmul(x, weight.mT, torch.tensor([2, 4, 6]))


def test_compiled_whole() -> None:
    torch.manual_seed(8)
    p = parameters(4, 16, 8, "swiglu", False, torch.float32)

    def layer(x: Tensor, logits: Tensor) -> Tensor:
        routing = F.route(logits, 2)
        return F.moe_mlp(x, routing, **p) + 0.01 * routing.aux_loss

    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    x, logits = torch.randn(10, 16, requires_grad=True), torch.randn(10, 4, requires_grad=True)
    torch.testing.assert_close(compiled(x, logits), layer(x, logits))
    expected = torch.autograd.grad(layer(x, logits).square().sum(), (x, logits))
    found = torch.autograd.grad(compiled(x, logits).square().sum(), (x, logits))
    for one, other in zip(found, expected):
        torch.testing.assert_close(one, other)
