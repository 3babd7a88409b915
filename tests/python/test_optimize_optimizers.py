"""optimize(..., optimizer=): torch's AdamW keeps its identity, groups and state, and steps on our kernel."""

from __future__ import annotations

import copy

import pytest

torch = pytest.importorskip("torch")
from kernel_pytorch._optimize import optimizers  # noqa: E402
from test_optimize import always, one_thread, optimize  # noqa: E402, F401
from torch import nn  # noqa: E402


@pytest.fixture
def taken(always, monkeypatch):  # noqa: F811
    monkeypatch.setattr(optimizers, "pays", lambda before, after: True)


def model_of(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Embedding(40, 16), nn.LayerNorm(16), nn.Linear(16, 8))


def groups_of(model):
    return [
        {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 0.1, "lr": 3e-3},
        {"params": [p for p in model.parameters() if p.dim() == 1], "weight_decay": 0.0},
    ]


def train(model, optimizer, scheduler=None, steps=4, seed=1):
    torch.manual_seed(seed)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randint(0, 40, (5, 7))).square().mean().backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()


def values(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def replacement(result):
    return [one for one in result.report.data["replacements"] if one["pattern"] == "optimizer"]


@pytest.mark.parametrize("when", ["before", "after"])
def test_the_same_optimizer_goes_on(taken, when):
    plain, model = model_of(), model_of()
    options = dict(lr=1e-2, betas=(0.8, 0.9), amsgrad=True)
    reference, optimizer = (torch.optim.AdamW(groups_of(m), **options) for m in (plain, model))
    schedulers = [torch.optim.lr_scheduler.StepLR(one, 2, 0.5) for one in (reference, optimizer)] * (when == "before")
    train(plain, reference, schedulers[0] if schedulers else None)
    train(model, optimizer, schedulers[1] if schedulers else None)
    result = optimize(model, torch.randint(0, 40, (5, 7)), goal="train", optimizer=optimizer)
    assert len(replacement(result)) == 1
    assert "step" in vars(optimizer)
    if when == "after":
        schedulers = [torch.optim.lr_scheduler.StepLR(one, 2, 0.5) for one in (reference, optimizer)]
    train(plain, reference, schedulers[0])
    train(model, optimizer, schedulers[1])
    torch.testing.assert_close(values(model), values(plain), rtol=2e-5, atol=2e-6)
    mine, theirs = optimizer.state_dict(), reference.state_dict()
    assert mine["param_groups"] == theirs["param_groups"]
    assert {i: sorted(s) for i, s in mine["state"].items()} == {i: sorted(s) for i, s in theirs["state"].items()}
    assert all(float(mine["state"][i]["step"]) == 8.0 for i in mine["state"])
    result.restore()
    assert getattr(vars(optimizer).get("step"), "__self__", None) is None  # a scheduler's wrapper at most
    train(plain, reference, schedulers[0])
    train(model, optimizer, schedulers[1])
    torch.testing.assert_close(values(model), values(plain), rtol=2e-5, atol=2e-6)


def test_a_fresh_optimizer_and_a_closure(taken):
    plain, model = model_of(), model_of()
    reference, optimizer = (torch.optim.Adam(m.parameters(), lr=1e-2) for m in (plain, model))
    optimize(model, torch.randint(0, 40, (5, 7)), goal="train", optimizer=optimizer)
    for one, its in ((reference, plain), (optimizer, model)):
        ids = torch.arange(35).view(5, 7)

        def closure(one=one, its=its, ids=ids):
            one.zero_grad()
            loss = its(ids).square().mean()
            loss.backward()
            return loss

        assert one.step(closure).item() > 0
    torch.testing.assert_close(values(model), values(plain), rtol=2e-5, atol=2e-6)
    copied = copy.deepcopy(model)  # has no optimizer, and takes none along
    assert copied(torch.arange(3)).shape == (3, 8)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda p: torch.optim.SGD(p, lr=0.1), "torch.optim.AdamW has"),
        (lambda p: torch.optim.Adam(p, weight_decay=0.1), "weight_decay is added to the gradient"),
        (lambda p: torch.optim.AdamW(p, differentiable=True, foreach=False), "differentiable"),
    ],
)
def test_refusals_say_why(taken, make, words):
    model = model_of()
    optimizer = make(model.parameters())
    result = optimize(model, torch.randint(0, 40, (5, 7)), goal="train", optimizer=optimizer)
    reasons = [one["reason"] for one in result.report.data["refusals"] if one["pattern"] == "optimizer"]
    assert len(reasons) == 1 and words in reasons[0]
    assert "step" not in vars(optimizer)


def test_hooks_are_not_passed_by(taken):
    model = model_of()
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.register_step_post_hook(lambda *arguments: None)
    result = optimize(model, torch.randint(0, 40, (5, 7)), goal="train", optimizer=optimizer)
    assert any("hooks around its step" in one["reason"] for one in result.report.data["refusals"])


def test_embeddings(taken):
    model, plain = model_of(), model_of()
    ids = torch.randint(0, 40, (5, 7))
    result = optimize(model, ids, goal="train")
    assert any(one["pattern"] == "embedding" for one in result.report.data["replacements"])
    for one in (model, plain):
        one(ids).square().sum().backward()
    torch.testing.assert_close(model[0].weight.grad, plain[0].weight.grad)
    result.restore()
    model[0].max_norm = 1.0
    result = optimize(model, ids, goal="train")
    assert any("max_norm" in one["reason"] for one in result.report.data["refusals"])
