"""Patterns of the compile backend in the spellings that models use: each is replaced, with eager's values."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from compile_models import Compiled  # noqa: E402
from kernel_pytorch.compile_backend import choice, trial  # noqa: E402
from kernel_pytorch.compile_backend.trial import Rejected, check_agreement  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn import functional  # noqa: E402


@pytest.fixture(autouse=True)
def fresh() -> Any:
    torch.manual_seed(0)
    choice.forget()
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def check(found: Compiled, function: Any, arguments: list[Any], replaced: dict[str, int], tolerance: float) -> None:
    """Values and the gradients of all that want one."""
    leaves = [one for one in arguments if one.requires_grad]
    outputs = [call(*arguments) for call in (found, function)]
    assert found.replaced == replaced, str(found.report)
    pairs = [one if isinstance(one, tuple) else (one,) for one in outputs]
    torch.testing.assert_close(*pairs, atol=tolerance, rtol=tolerance)
    if leaves:
        gradients = [torch.autograd.grad([one.float().square().sum() for one in pair], leaves) for pair in pairs]
        torch.testing.assert_close(*gradients, atol=8 * tolerance, rtol=8 * tolerance)


def half_turned(x: Any) -> Any:
    return torch.cat((-x[..., x.shape[-1] // 2 :], x[..., : x.shape[-1] // 2]), -1)


def pair_turned(x: Any) -> Any:
    return torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)


@pytest.mark.parametrize("kind", ["halves", "pairs", "some columns", "fp32 tables", "fp32 inside", "positions first"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rope(kind: str, dtype: Any) -> None:
    columns = 8 if kind == "some columns" else 16

    def turn(x: Any, cos: Any, sin: Any) -> Any:
        turned = pair_turned if kind == "pairs" else half_turned
        if kind == "some columns":
            front, rest = x[..., :columns], x[..., columns:]
            return torch.cat((front * cos + turned(front) * sin, rest), -1)
        if kind == "fp32 inside":
            wide = x.float()
            return (wide * cos + turned(wide) * sin).to(x.dtype)
        return (x * cos + turned(x) * sin).to(x.dtype)

    def attend(q: Any, k: Any, angles: Any) -> Any:
        both = angles.repeat_interleave(2, -1) if kind == "pairs" else torch.cat((angles, angles), -1)
        cos, sin = both.cos(), both.sin()
        if not kind.startswith("fp32"):
            cos, sin = cos.to(q.dtype), sin.to(q.dtype)
        place = 2 if kind == "positions first" else 1
        cos, sin = cos.unsqueeze(place), sin.unsqueeze(place)
        return turn(q, cos, sin), turn(k, cos, sin)

    shape = (2, 6, 4, 16) if kind == "positions first" else (2, 4, 6, 16)
    q, k = (torch.randn(shape, dtype=dtype, requires_grad=True) for _ in range(2))
    tolerance = 1e-5 if dtype is torch.float32 else 3e-2
    check(Compiled(attend), attend, [q, k, torch.randn(1, 6, columns // 2)], {"rope": 1}, tolerance)


@pytest.mark.parametrize("norm_first", [False, True])
def test_norms_of_heads_with_their_rope(norm_first: bool) -> None:
    """The norm before the heads are moved to the front, or behind; queries and keys with unlike numbers of heads."""

    def norm(x: Any, weight: Any) -> Any:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * weight

    def attend(q: Any, k: Any, w: Any, v: Any, angles: Any) -> Any:
        both = torch.cat((angles, angles), -1)
        cos, sin = both.cos().unsqueeze(1), both.sin().unsqueeze(1)
        if norm_first:
            q, k = norm(q, w).transpose(1, 2), norm(k, v).transpose(1, 2)
        else:
            q, k = norm(q.transpose(1, 2), w), norm(k.transpose(1, 2), v)
        return q * cos + half_turned(q) * sin, k * cos + half_turned(k) * sin

    q, k = (torch.randn(2, 6, heads, 16, requires_grad=True) for heads in (4, 2))
    weights = [torch.rand(16, requires_grad=True) for _ in range(2)]
    check(Compiled(attend), attend, [q, k, *weights, torch.randn(1, 6, 8)], {"norm_rope": 1}, 1e-5)


class Packed(nn.Module):
    """Gate and up as one weight."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.both, self.down = kind, nn.Linear(16, 48, bias=False), nn.Linear(24, 16, bias=False)

    def forward(self, x: Any) -> Any:
        whole = self.both(x)
        if self.kind == "slices":
            up, gate = whole[..., :24], whole[..., 24:]
        elif self.kind == "split":
            gate, up = whole.split(24, -1)
        else:
            gate, up = whole.chunk(2, dim=-1)
        return self.down(functional.silu(gate) * up)


@pytest.mark.parametrize("kind", ["chunk", "split", "slices"])
@pytest.mark.parametrize("trained", [False, True])
def test_gates_in_one_weight(kind: str, trained: bool) -> None:
    layer, x = Packed(kind).requires_grad_(trained), torch.randn(5, 7, 16, requires_grad=trained)
    found = Compiled(layer)
    expected = {"gated_mlp": 1} if trained else {"gated_linear": 1}
    check(found, layer, [x], expected, 1e-5)
    if trained:
        gradients = [
            torch.autograd.grad(call(x).square().sum(), list(layer.parameters())) for call in (layer, found.call)
        ]
        torch.testing.assert_close(*gradients, atol=1e-4, rtol=1e-4)


class Dropping(nn.Module):
    """Attention with dropout between dropouts, as GPT-2 has them."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.project, self.p = nn.LayerNorm(32), nn.Linear(32, 96), 0.5

    def forward(self, x: Any) -> Any:
        q, k, v = self.project(functional.dropout(self.norm(x), 0.1, True)).view(2, 64, 3, 2, 16).unbind(2)
        q, k, v = (one.transpose(1, 2) for one in (q, k, v))
        return functional.scaled_dot_product_attention(q, k, v, dropout_p=self.p, is_causal=True)


@pytest.mark.parametrize("choose", ["always", "timed"])
def test_dropout(choose: str) -> None:
    """Chosen with dropout in the part and around it; torch's numbers decide what is dropped; a choice draws none."""
    layer, x = Dropping(), torch.randn(2, 64, 32, requires_grad=True)
    options = {"kernel_pytorch.choose": choose, "kernel_pytorch.inner": "aot_eager"}
    before = torch.get_rng_state()
    found = Compiled(layer, options)
    for graph_input in (x, x):
        torch.set_rng_state(before)
        first = found(graph_input)
    if choose == "always":
        assert found.replaced["attention"] == 1 and found.replaced["norm"] == 1, str(found.report)
        torch.set_rng_state(before)
        assert found(x).equal(first) and not found(x).equal(first)
        many = torch.stack([found(x).detach() for _ in range(200)]).mean(0)
        layer.p = 0.0
        plain = torch.stack([layer(x).detach() for _ in range(200)]).mean(0)
        assert (many - plain).abs().mean() < 0.1 * plain.abs().mean() + 0.05
        (gradient,) = torch.autograd.grad(found(x).square().sum(), [x])
        assert gradient.abs().sum() > 0
    assert all("differs" not in line.reason for graph in found.report.graphs for line in graph.lines), str(found.report)


def test_a_choice_leaves_the_random_numbers_alone() -> None:
    layer, x = Dropping(), torch.randn(2, 64, 32)
    states = []
    for choose in ("never", "always"):
        torch._dynamo.reset()
        torch.manual_seed(3)
        Compiled(layer.norm, {"kernel_pytorch.choose": choose})(x)
        states.append(torch.get_rng_state())
    assert states[0].equal(states[1])


def test_terms_that_always_hold_are_no_mask() -> None:
    """A cache that is a window: every key of it is within the window of the one query, and before it."""

    def attend(q: Any, k: Any) -> Any:
        keys, query = torch.arange(5) + 8, torch.arange(1)[:, None] + 12
        mask = (keys > query - 5) & (keys <= query)
        return functional.scaled_dot_product_attention(q, k, k, mask[None, None])

    found = Compiled(attend)
    check(found, attend, [torch.randn(2, 3, 1, 16), torch.randn(2, 3, 5, 16)], {"attention": 1}, 1e-5)
    assert found.report.graphs[0].lines[0].detail == "keeps everything"


def test_lengths_of_keys_with_a_batch_of_any_size() -> None:
    def attend(q: Any, k: Any, filled: Any) -> Any:
        mask = torch.arange(k.shape[2]) <= filled.view(1, 1, 1, 1)
        return functional.scaled_dot_product_attention(q, k, k, mask.expand(q.shape[0], -1, -1, -1))

    found = Compiled(attend, dynamic=True)
    for batch in (2, 3, 5):
        arguments = [torch.randn(batch, 3, 1, 16), torch.randn(batch, 3, 9, 16), torch.tensor([4])]
        torch.testing.assert_close(found(*arguments), attend(*arguments), atol=1e-5, rtol=1e-5)
    assert found.problems == [] and found.replaced["attention"] >= 1, str(found.report)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_a_kernel_that_is_wrong_by_five_hundredths_is_refused(dtype: Any) -> None:
    x = torch.randn(64, 64)
    check_agreement([x.to(dtype)], [(x * (1 + 1e-3 * (dtype is not torch.float32))).to(dtype)], dtype)
    with pytest.raises(Rejected):
        check_agreement([x.to(dtype)], [(x * 1.05).to(dtype)], dtype)
    with pytest.raises(Rejected):
        check_agreement([x.to(dtype)], [(x + 0.05 * torch.randn(64, 64)).to(dtype)], dtype)
    assert trial.Rejected is Rejected


def test_tables_are_no_part_of_a_trial() -> None:
    """Indices of a trial would be made up; one beyond a table ends a process on a GPU."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.norm, self.head = nn.Embedding(1, 16), nn.LayerNorm(16), nn.Linear(16, 1, bias=False)

        def forward(self, ids: Any, labels: Any) -> Any:
            hidden = self.norm(self.table(ids))
            return functional.cross_entropy(self.head(hidden).view(-1, 1), labels.view(-1))

    block, zeros = Block(), torch.zeros(2, 3, dtype=torch.int64)
    found = Compiled(block)
    torch.testing.assert_close(found(zeros, zeros), block(zeros, zeros))
    assert found.replaced["norm"] == 1 and found.replaced["linear_cross_entropy"] == 1, str(found.report)
