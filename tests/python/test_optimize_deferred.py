"""Attention that a module writes out itself becomes one call of ours; what is not attention stays what it was."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from forced_clock import everything_is_kept
from kernel_pytorch._optimize.patterns.deferred.functions import Deferring
from kernel_pytorch._optimize.patterns.deferred.scores import Scores
from torch import Tensor, nn
from torch.nn import functional as F

import kernel_pytorch

HEADS, SIZE, LENGTH = 4, 8, 7
KEPT = "deferred attention"
Step = Callable[..., Any]


@pytest.fixture(autouse=True)
def everything_pays() -> Iterator[None]:
    with everything_is_kept():
        yield


def drawn(*shape: int, seed: int = 5) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def hidden(share: float = 0.3) -> Tensor:
    found = torch.rand(2, 1, LENGTH, LENGTH, generator=torch.Generator().manual_seed(3)) < share
    return found & ~torch.eye(LENGTH, dtype=torch.bool)


def sums(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = torch.matmul(q, k.transpose(-1, -2)) / SIZE**0.5
    scores += drawn(1, HEADS, LENGTH, LENGTH)
    scores = scores.masked_fill(hidden(), torch.finfo(scores.dtype).min) + 0
    weights = F.softmax(scores.float(), dim=-1).type_as(scores)
    return F.dropout(weights, 0.1, training=False) @ v


def einsums(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = torch.einsum("...qhd,...khd->...hqk", q.transpose(1, 2), k.transpose(1, 2)) * 0.3
    return torch.einsum("bhqk,bkhd->bhqd", scores.softmax(-1), v.transpose(1, 2))


def alibi(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Bloom's: batch and heads in one dimension, and the sum inside the product."""
    rows = [one.reshape(-1, LENGTH, SIZE) for one in (q, k, v)]
    slopes = drawn(len(q) * HEADS, 1, LENGTH)
    scores = slopes.baddbmm(rows[0], rows[1].transpose(1, 2), beta=1.0, alpha=0.2).view(len(q), HEADS, LENGTH, LENGTH)
    weights = F.softmax(scores + drawn(1, 1, LENGTH, LENGTH), dim=-1, dtype=torch.float32).to(q.dtype)
    return torch.bmm(weights.view(len(q) * HEADS, LENGTH, LENGTH), rows[2]).view_as(q)


def windows(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Swin's: a bias of heads, then a mask of windows at another view."""
    scores = (q * 0.3) @ k.transpose(-2, -1) + drawn(1, HEADS, LENGTH, LENGTH)
    scores = scores.view(1, 2, HEADS, LENGTH, LENGTH) + drawn(1, 2, 1, LENGTH, LENGTH, seed=6)
    return scores.view(-1, HEADS, LENGTH, LENGTH).softmax(-1) @ v


def softcap(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (torch.tanh(q @ k.mT / 3.0) * 3.0).softmax(-1) @ v


def where(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = torch.where(hidden(), torch.tensor(-1e9), q @ k.mT * drawn(HEADS, 1, 1).abs())
    return torch.matmul(scores.softmax(-1), v)


def zeroed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """DeBERTa's: hidden before and after the softmax, rows that see nothing too."""
    mask = hidden() | (torch.arange(LENGTH) == 2)[:, None]
    scores = (q @ k.mT).masked_fill(mask, -3e38)
    return scores.softmax(-1).masked_fill(mask, 0.0) @ v


def sees_nothing(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """A finite number in a whole row makes its scores equal; they are not zeros."""
    mask = (torch.arange(LENGTH) == 2)[:, None].expand(LENGTH, LENGTH)
    return (q @ k.mT).masked_fill(mask, -1e9).softmax(-1) @ v


def minus_infinity(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.mT
    scores.masked_fill_(hidden().expand_as(scores), float("-inf"))
    return scores.softmax(dim=-1).nan_to_num() @ v


def five_dimensions(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    rows = [one.unflatten(0, (1, 2)) for one in (q, k, v)]
    return F.scaled_dot_product_attention(rows[0], rows[1], rows[2]).flatten(0, 1)


class Module(nn.Module):
    """Its function is no global, so that nothing but its calls shows what it does."""

    def __init__(self, function: Step) -> None:
        super().__init__()
        self.function = (function,)
        self.project, self.out = nn.Linear(32, 96), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Any:
        q, k, v = self.project(x).view(len(x), LENGTH, 3, HEADS, SIZE).permute(2, 0, 3, 1, 4)
        found = self.function[0](q, k, v)
        return self.out(found.transpose(1, 2).flatten(2)) if isinstance(found, Tensor) else found


TRAINED = [einsums, alibi, windows, softcap, minus_infinity, five_dimensions]
FILLED = [sums, where, zeroed, sees_nothing]  # with finite numbers, whose rows of nothing have no gradients
CASES = [(one, "inference") for one in (*TRAINED, *FILLED)] + [(one, "train") for one in TRAINED]


@pytest.mark.parametrize(("function", "goal"), CASES)
def test_written_attention_is_one_call(function: Step, goal: str) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(Module(function)).eval(), torch.randn(2, LENGTH, 32)
    before = model(x)
    result = kernel_pytorch.optimize(model, x, goal, budget_seconds=30, tune="off")
    kept = [one["path"] for one in result.report.data["replacements"] if one["pattern"] == KEPT]
    assert kept == ["0"], result.report.data["refusals"]
    torch.testing.assert_close(model(x), before, rtol=1e-4, atol=1e-5)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        torch.testing.assert_close(other(x), before, rtol=1e-4, atol=1e-5)
    result.restore()
    assert torch.equal(model(x), before)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_scores_that_are_widened_between(dtype: torch.dtype) -> None:
    """In 16 bits with a softmax in fp32 and a mask of fp32: the type is the model's, and the error no more than its."""

    def widened(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = (q @ k.mT).float() * 0.3 + drawn(1, HEADS, LENGTH, LENGTH)
        return F.softmax(scores, dim=-1).to(v.dtype) @ v

    torch.manual_seed(0)
    q, k, v = (torch.randn(2, HEADS, LENGTH, SIZE).to(dtype) for _ in range(3))
    exact = widened(q.double(), k.double(), v.double())
    plain = widened(q, k, v)
    heard: list[Any] = []
    with Deferring(heard.append):
        ours = widened(q, k, v)
    assert len(heard) == 1 and ours.dtype is dtype
    assert (ours - exact).norm() <= 1.25 * (plain - exact).norm()


@pytest.mark.parametrize("function", FILLED)
def test_gradients_of_filled_scores_are_the_originals(function: Step) -> None:
    torch.manual_seed(0)
    model, x = Module(function).eval(), torch.randn(2, LENGTH, 32)
    parameters = list(model.parameters())
    before = torch.autograd.grad(model(x).square().sum(), parameters)
    with Deferring():
        again = torch.autograd.grad(model(x).square().sum(), parameters)
    assert all(torch.equal(one, other) for one, other in zip(again, before))


def outlook(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Weights from a product, and rows that are permuted before the softmax: no scores of queries and keys."""
    return (q @ k.mT).permute(0, 1, 3, 2).softmax(-1) @ v


def over_queries(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT).softmax(-2) @ v


def little(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """What is filled in still shows a score."""
    return (q @ k.mT).masked_fill(hidden(), -2.0).softmax(-1) @ v


def dropped_later(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT).softmax(-1).masked_fill(hidden(), 0.0) @ v


@pytest.mark.parametrize("function", [outlook, over_queries, little, dropped_later])
def test_what_is_something_else_is_computed_as_before(function: Step) -> None:
    torch.manual_seed(0)
    model, x = Module(function).eval(), torch.randn(2, LENGTH, 32)
    with torch.no_grad():
        before = model(x)
        heard: list[Any] = []
        with Deferring(heard.append):
            again = model(x)
    assert torch.equal(again, before) and not heard


def both(q: Tensor, k: Tensor, v: Tensor) -> Any:
    weights = (q @ k.mT).softmax(-1)
    return weights @ v, weights


def test_probabilities_that_are_returned_are_computed_when_they_are_read() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(Module(both)).eval(), torch.randn(2, LENGTH, 32)
    with torch.no_grad():
        before = model(x)
        kernel_pytorch.optimize(model, x, budget_seconds=30, tune="off")
        attended, weights = model(x)
        assert type(weights) is Scores and weights.shape == before[1].shape
        torch.testing.assert_close(attended, before[0], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(weights * 1.0, before[1])
        assert torch.equal(pickle.loads(pickle.dumps(weights)), weights * 1.0)
    with torch.inference_mode():
        assert type(model(x)[1]) is Tensor


def test_probabilities_that_are_returned_have_their_gradient() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(Module(both)), torch.randn(2, LENGTH, 32)

    def gradient() -> Tensor:
        attended, weights = model(x)
        return torch.autograd.grad(attended.sum() + (weights * drawn(*weights.shape)).sum(), model[0].project.weight)[0]

    before = gradient()
    result = kernel_pytorch.optimize(model, x, "train", budget_seconds=30, tune="off")
    assert KEPT in {one["pattern"] for one in result.report.data["replacements"]}, result.report.data["refusals"]
    torch.testing.assert_close(gradient(), before, rtol=1e-4, atol=1e-5)


def test_scores_of_tensors_that_were_written_to_raise() -> None:
    q, k, v = (torch.randn(2, HEADS, LENGTH, SIZE) for _ in range(3))
    with Deferring():
        weights = (q @ k.mT).softmax(-1)
        k.zero_()
        with pytest.raises(RuntimeError, match="changed in place before"):
            weights @ v
        with pytest.raises(RuntimeError, match="changed in place before"):
            weights.sum()


def test_under_autocast_it_is_the_original() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(Module(einsums)).eval(), torch.randn(2, LENGTH, 32)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        before = model(x)
    kernel_pytorch.optimize(model, x, budget_seconds=30, tune="off", patterns=["deferred_attention"])
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(model(x), before)


class Trained(Module):
    """With a dropout between, which is drawn where the original draws it."""

    def __init__(self) -> None:
        super().__init__(lambda q, k, v: self.drop((q @ k.mT).softmax(-1)) @ v)
        self.drop = nn.Dropout(0.5)


def test_a_dropout_that_drops_is_the_originals() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(Trained()).train(), torch.randn(2, LENGTH, 32)
    torch.manual_seed(1)
    before = model(x)
    result = kernel_pytorch.optimize(model, x, "train", budget_seconds=30, tune="off")
    assert KEPT in [one["pattern"] for one in result.report.data["replacements"]]
    seen: list[Any] = []
    model[0].drop.register_forward_hook(lambda module, args, output: seen.append(output.shape))
    torch.manual_seed(1)
    torch.testing.assert_close(model(x), before, rtol=1e-5, atol=1e-6)
    assert seen
