"""kernel_pytorch.optimize on small models: same numbers, same parameters, exact way back, whatever happens half way."""

from __future__ import annotations

import copy

import pytest

torch = pytest.importorskip("torch")
from forced_verdicts import take_first, take_none  # noqa: E402
from kernel_pytorch._optimize import choose, demo_models, measure, whole  # noqa: E402
from kernel_pytorch._optimize.changes import KEY  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402

import kernel_pytorch  # noqa: E402

DEMOS = {
    "llama": (lambda: demo_models.Llama(32, 2, 4, 2, 96, 64), lambda: torch.randint(96, (2, 11))),
    "gpt": (lambda: demo_models.GPT(32, 2, 4, 96, 64), lambda: torch.randint(96, (2, 11))),
    "bert": (lambda: demo_models.Bert(32, 2, 4, 96, 64), lambda: torch.randint(96, (2, 11))),
    "vit": (lambda: demo_models.ViT(32, 2, 4, 32, 8, 10), lambda: torch.randn(2, 3, 32, 32)),
}


@pytest.fixture
def always(monkeypatch):
    """Every part that verifies is taken, however long it takes here: tests are about numbers."""
    monkeypatch.setattr(choose, "judge", take_first)
    monkeypatch.setattr(whole, "pays", lambda before, after: True)
    monkeypatch.setattr(measure, "LEAST", 2)
    monkeypatch.setattr(measure, "MOST", 2)


@pytest.fixture(autouse=True)
def one_thread():
    """Small tensors: threads would only wait for one another."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def optimize(model, inputs, **options):
    return kernel_pytorch.optimize(model, inputs, budget_seconds=0.5, **options)


def patterns(result):
    return {one["pattern"] for one in result.report.data["replacements"]}


def run(model, inputs):
    return model(**inputs) if isinstance(inputs, dict) else model(inputs)


def untouched(model):
    return KEY not in vars(model) and not any("forward" in vars(part) for part in model.modules())


@pytest.mark.parametrize("goal", ["inference", "train"])
@pytest.mark.parametrize("name", DEMOS)
def test_bundled_models(name, goal, always):
    torch.manual_seed(0)
    make, inputs = DEMOS[name]
    model, x = make(), inputs()
    model.train(goal == "train")
    reference = copy.deepcopy(model).eval()
    parameters = dict(model.named_parameters())
    names = list(model.state_dict())
    result = optimize(model, x, goal=goal)
    assert result.model is model
    wanted = {"llama": {"gated mlp", "residual + norm"}, "bert": {"linear + residual + norm"}}
    assert patterns(result) >= wanted.get(name, {"mlp", "residual + norm", "attention"})
    assert all(one["ok"] for one in result.report.data["numerics"])
    assert model.training == (goal == "train")
    assert list(model.state_dict()) == names
    assert all(parameter is parameters[key] for key, parameter in model.named_parameters())
    assert all(parameter.grad is None for parameter in model.parameters())
    model.eval()
    torch.testing.assert_close(model(x), reference(x), rtol=1e-4, atol=1e-5)
    result.restore()
    assert untouched(model)
    assert torch.equal(model(x), reference(x))
    reference.load_state_dict(model.state_dict())


def test_a_copy_is_a_model_of_its_own(always):
    make, inputs = DEMOS["llama"]
    model, x = make().eval(), inputs()
    before = model(x)
    optimize(model, x)
    copied = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    torch.testing.assert_close(copied(x), before, rtol=1e-4, atol=1e-5)
    kernel_pytorch.restore(copied)
    assert untouched(copied)
    assert not untouched(model)
    assert torch.equal(copied(x), before)


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("place", ["verify_whole", "compare_whole"])
def test_what_fails_half_way_leaves_the_model_as_it_was(place, error, always, monkeypatch):
    from kernel_pytorch._optimize import optimize as steps

    make, inputs = DEMOS["gpt"]
    model, x = make().eval(), inputs()
    before = model(x)

    def fail(context, *_args):
        assert any("forward" in vars(part) for part in model.modules())
        raise error("in the middle")

    monkeypatch.setattr(steps, place, fail if place == "verify_whole" else lambda m, *rest: fail(*rest))
    with pytest.raises(error):
        optimize(model, x)
    assert untouched(model)
    assert torch.equal(model(x), before)


def test_a_wrong_kernel_is_found_and_reverted(always, monkeypatch):
    from kernel_pytorch._optimize.patterns import norms

    right = norms.Norm.__call__

    def wrong_last_row(self, module, x):
        value = right(self, module, x)
        if x.shape[0] != 6:  # the proof sees six rows
            value = value.clone()
            value[-1, -1] *= 1.01
        return value

    monkeypatch.setattr(norms.Norm, "__call__", wrong_last_row)
    make, inputs = DEMOS["llama"]
    model, x = make().eval(), inputs()
    result = optimize(model, x)
    reasons = [one["reason"] for one in result.report.data["refusals"] if one["pattern"] == "rms_norm"]
    assert reasons and all("differs by" in reason for reason in reasons)
    assert "rms_norm" not in patterns(result)
    assert any(not one["ok"] for one in result.report.data["numerics"])


def test_parts_that_are_not_faster_stay(monkeypatch):
    monkeypatch.setattr(choose, "judge", take_none)
    monkeypatch.setattr(whole, "pays", lambda before, after: False)
    monkeypatch.setattr(measure, "LEAST", 2)
    monkeypatch.setattr(measure, "MOST", 2)
    make, inputs = DEMOS["gpt"]
    model, x = make().eval(), inputs()
    result = optimize(model, x)
    assert not patterns(result)
    assert untouched(model)
    words = ("not faster here", "no clear gain of its own")  # by what the clock says, which here decides nothing
    assert any(one["reason"].startswith(words) for one in result.report.data["refusals"])


class Hooked(nn.Module):
    def __init__(self):
        super().__init__()
        self.mlp = demo_models.SwiGLU(16, 32)
        self.norm = nn.LayerNorm(16)

    def forward(self, x):
        return self.norm(self.mlp(x))


def test_hooks_are_called_and_respected(always):
    model, x = Hooked().eval(), torch.randn(3, 16)
    seen = []
    model.norm.register_forward_hook(lambda *_: seen.append("norm"))
    model.mlp.up_proj.register_forward_hook(lambda *_: seen.append("up"))
    result = optimize(model, x)
    ways = {one["path"]: one["to"] for one in result.report.data["replacements"]}
    assert "own layers" in ways["mlp"]  # those call the hooked layer
    seen.clear()
    model(x)
    assert sorted(seen) == ["norm", "up"]


def test_a_hook_that_comes_later_is_called_too(always):
    model, x = Hooked().eval(), torch.randn(3, 16)
    optimize(model, x)
    seen = []
    model.mlp.gate_proj.register_forward_hook(lambda *_: seen.append("gate"))
    model(x)
    assert seen == ["gate"]


def test_shared_and_subclassed_modules(always):
    class Norm(nn.LayerNorm):
        def forward(self, input):
            return super().forward(input) * 3

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = demo_models.MLP(16, 32, "none", 0.0)
            self.second = self.first
            self.special = Norm(16)

        def forward(self, x):
            return self.special(self.second(self.first(x)))

    model, x = Model().eval(), torch.randn(5, 16)
    before = model(x)
    result = optimize(model, x)
    assert "mlp" in patterns(result)
    assert any(one["path"] == "special" and "something else" in one["reason"] for one in result.report.data["refusals"])
    torch.testing.assert_close(model(x), before, rtol=1e-4, atol=1e-5)
    kernel_pytorch.restore(model)
    assert torch.equal(model(x), before)


def test_what_it_does_not_know_stays(always):
    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(inplace=True))
            self.recurrent = nn.LSTM(16, 16, batch_first=True)

        def forward(self, x):
            return self.recurrent(self.conv(x).flatten(2).transpose(1, 2))[0]

    model, x = Mixed().eval(), torch.randn(2, 3, 8, 8)
    before = model(x)
    result = optimize(model, x)
    assert not patterns(result)
    assert torch.equal(model(x), before)
    assert "inplace" in result.report.data["refusals"][0]["reason"]


def test_dropout_stands_where_it_stood(always):
    class Drops(nn.Module):
        def __init__(self, inner, outer):
            super().__init__()
            self.fc1, self.fc2, self.act = nn.Linear(16, 64), nn.Linear(64, 16), nn.GELU()
            self.one, self.two = nn.Dropout(inner), nn.Dropout(outer)

        def forward(self, x):
            return self.two(self.fc2(self.one(self.act(self.fc1(x)))))

    model, x = Drops(0.0, 1.0), torch.randn(4, 16)
    assert "mlp" in patterns(optimize(model, x, goal="train"))
    assert not model(x).any()
    kernel_pytorch.restore(model)
    model = Drops(1.0, 0.0)
    optimize(model, x, goal="train")
    torch.testing.assert_close(model(x), model.fc2.bias.expand(4, 16))


def test_calls_inside_a_forward(always):
    class Attends(nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv = nn.Linear(32, 96)

        def forward(self, x):
            q, k, v = self.qkv(x).view(*x.shape[:2], 3, 4, 8).permute(2, 0, 3, 1, 4)
            mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
            first = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
            return torch.softmax(first.transpose(1, 2).flatten(2), dim=-1) + F.gelu(x)

    model, x = Attends().eval(), torch.randn(2, 7, 32)
    before = model(x)
    result = optimize(model, x)
    assert "attention" in patterns(result)
    torch.testing.assert_close(model(x), before, rtol=1e-4, atol=1e-5)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        model(x)
    ran = {event.name.removesuffix("_forward") for event in profile.events()}
    assert "kernel_pytorch::attention" in ran
    assert F.gelu is torch.nn.functional.gelu  # nothing outside the module changed


def test_mistakes_are_named():
    model, x = nn.Linear(4, 4), torch.randn(2, 4)
    for options, words in (
        ({"goal": "speed"}, "goal"),
        ({"accuracy": "high"}, "accuracy"),
        ({"budget_seconds": 0}, "budget"),
    ):
        with pytest.raises(ValueError, match=words):
            kernel_pytorch.optimize(model, x, **options)
    with pytest.raises(TypeError, match="sample_inputs"):
        kernel_pytorch.optimize(model, 3)
    with pytest.raises(TypeError, match=r"model is int; it must be a torch\.nn\.Module"):
        kernel_pytorch.optimize(3, x)
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        kernel_pytorch.optimize(model, torch.randn(2, 5))
    assert kernel_pytorch.restore(model) is model


def test_twice_is_an_error(always):
    make, inputs = DEMOS["gpt"]
    model, x = make().eval(), inputs()
    optimize(model, x)
    with pytest.raises(RuntimeError, match="restore"):
        optimize(model, x)


def test_the_report_says_what_happened(always):
    make, inputs = DEMOS["llama"]
    model, x = make().eval(), inputs()
    data = optimize(model, x).report.data
    assert {one["name"] for one in data["measurements"]} == {"before", "after"}
    before, after = (next(one for one in data["measurements"] if one["name"] == n) for n in ("before", "after"))
    assert after["launches"] < before["launches"]
    if data["roofs"] is None:
        assert any("busy" in note for note in data["notes"])
    else:
        assert data["roofs"]["copy_bytes_per_second"] > 0
    assert data["model"]["parameters"] == sum(parameter.numel() for parameter in model.parameters())
    assert any(kernel["ours"] for kernel in data["kernels"]["after"])
    assert not any(kernel["ours"] for kernel in data["kernels"]["before"])
    block = next(one for one in data["replacements"] if one["pattern"] == "residual + norm")
    assert block["predicted_us_before"] > block["predicted_us_after"] > 0
