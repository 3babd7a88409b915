"""What begins and carries a stream of rows: convolutions of patches, rows that lie apart, residual sums."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from forced_clock import everything_is_kept
from kernel_pytorch._optimize.patterns.deferred import summed, sums
from torch import Tensor, nn
from torch.nn import functional as F

import kernel_pytorch

WIDTH = 16


@pytest.fixture(autouse=True)
def everything_pays() -> Iterator[None]:
    torch.manual_seed(0)
    with everything_is_kept():
        yield


def optimize(model: nn.Module, inputs: Any, *patterns: str, **options: Any) -> Any:
    return kernel_pytorch.optimize(model, inputs, budget_seconds=20, patterns=patterns, tune="off", **options)


def kept(result: Any) -> list[str]:
    return [one["pattern"] for one in result.report.data["replacements"]]


def refused(result: Any) -> str:
    return "; ".join(one["reason"] for one in result.report.data["refusals"])


def close(one: Tensor, other: Tensor) -> None:
    torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


PATCHES = [
    (nn.Conv2d(3, WIDTH, 4, 4), (2, 3, 8, 12)),
    (nn.Conv2d(3, WIDTH, (2, 5), (2, 5), bias=False), (2, 3, 7, 13)),  # what is less than a patch is left
    (nn.Conv2d(3, WIDTH, 14, 14), (2, 3, 28, 28)),
    (nn.Conv1d(3, WIDTH, 3, 3, padding="valid"), (2, 3, 10)),
    (nn.Conv3d(3, WIDTH, (2, 4, 4), (2, 4, 4)), (5, 3, 2, 4, 4)),  # one patch an image: nothing is copied
]


@pytest.mark.parametrize("way", [0, 1], ids=["torch's", "ours"])
@pytest.mark.parametrize(("layer", "shape"), PATCHES, ids=[str(tuple(layer.kernel_size)) for layer, _ in PATCHES])
def test_a_convolution_of_patches_is_a_product(layer: nn.Module, shape: tuple[int, ...], way: int) -> None:
    model, x = nn.Sequential(copy.deepcopy(layer)).eval(), torch.randn(shape)
    batch = torch.randn(3, *(size + 1 if index else size for index, size in enumerate(shape[1:])))  # another shape
    last = x.to(memory_format=torch.channels_last) if x.dim() == 4 else x.transpose(0, 1).contiguous().transpose(0, 1)
    with torch.no_grad():
        expected = [model(one) for one in (x, batch, last)]
        from kernel_pytorch._optimize.patterns.streams import patches

        before = patches.runs_here
        try:
            if not way:
                patches.runs_here = lambda x: False
            result = optimize(model, x, "patches")
        finally:
            patches.runs_here = before
        assert kept(result) == ["patches"]
        for inputs, output in zip((x, batch, last), expected):
            found = model(inputs)
            close(found, output)
            assert found.flatten(2).transpose(1, 2).is_contiguous()
        unbatched = model(x[0])  # is the original's
        close(unbatched, expected[0][0])
        assert torch.equal(result.restore()(x), expected[0])


def test_gradients_of_a_product_of_patches() -> None:
    model, x = nn.Sequential(nn.Conv2d(3, 8, 4, 4)), torch.randn(2, 3, 9, 8, requires_grad=True)
    expected = torch.autograd.grad(model(x).square().sum(), [x, *model.parameters()])
    result = optimize(model, x, "patches", goal="train")
    assert kept(result) == ["patches"]
    for one, other in zip(torch.autograd.grad(model(x).square().sum(), [x, *model.parameters()]), expected):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "layer",
    [
        nn.Conv2d(4, 8, 3, 2),
        nn.Conv2d(4, 8, 4, 4, padding=1),
        nn.Conv2d(4, 8, 2, 2, groups=2),
        nn.Conv2d(4, 8, 2, 2, dilation=2),
        nn.Conv2d(4, 8, 1),
        nn.ConvTranspose2d(4, 8, 2, 2),
    ],
)
def test_other_convolutions_are_left(layer: nn.Module) -> None:
    assert kept(optimize(nn.Sequential(layer).eval(), torch.randn(2, 4, 16, 16), "patches")) == []


def test_a_hook_on_the_convolution_stays() -> None:
    model, seen = nn.Sequential(nn.Conv2d(3, 8, 4, 4)).eval(), []
    model[0].register_forward_hook(lambda *_: seen.append(1))
    result = optimize(model, torch.randn(2, 3, 8, 8), "patches")
    assert "has hooks" in refused(result)
    seen.clear()
    model(torch.randn(2, 3, 8, 8))
    assert seen == [1]


class Viewing(nn.Module):
    """Counts on the layout that a convolution leaves."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.head = nn.Conv2d(3, 8, 4, 4), nn.Linear(32, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.convolution(x).view(x.shape[0], -1))


def test_code_that_needs_the_layout_keeps_the_convolution() -> None:
    model, x = Viewing().eval(), torch.randn(2, 3, 8, 8)
    expected = model(x)
    result = optimize(model, x, "patches", "linears")
    assert "patches" not in kept(result)
    assert "the model with it raised" in refused(result)
    close(model(x), expected)


class Block(nn.Module):
    """x + attention-like(norm(x)) * scale, then the same with an MLP; spelled in torch's functions."""

    def __init__(self, scaled: bool = False) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.mix, self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)
        self.scales = nn.ParameterList([nn.Parameter(torch.randn(WIDTH)) for _ in range(2)] if scaled else [])

    def forward(self, x: Tensor) -> Tensor:
        added = self.mix(self.first(x))
        x = x + (self.scales[0] * added if len(self.scales) else added)
        added = self.down(F.gelu(self.up(self.second(x))))
        return (added * self.scales[1] if len(self.scales) else added) + x


class Encoder(nn.Module):
    def __init__(self, scaled: bool = False, returns: str = "tensor") -> None:
        super().__init__()
        self.embed = nn.Conv1d(4, WIDTH, 3, padding=1)
        self.blocks = nn.ModuleList([Block(scaled) for _ in range(2)])
        self.norm = nn.LayerNorm(WIDTH)
        self.returns = returns

    def forward(self, x: Tensor) -> Any:
        x = self.embed(x).transpose(1, 2)
        states = [x]
        for block in self.blocks:
            states.append(block(states[-1]))
        output = self.norm(states[-1])
        if self.returns == "tensor":
            return output
        return {"dict": dict, "dataclass": Output}[self.returns](last=output, states=tuple(states), newest=states[-1])


@dataclass
class Output:
    last: Tensor
    states: tuple[Tensor, ...]
    newest: Tensor


def test_rows_that_lie_apart_are_copied_once() -> None:
    model, x, strides = Encoder().eval(), torch.randn(2, 4, 9), []
    expected = model(x)
    result = optimize(model, x, "layouts")
    assert kept(result) == ["layout"]
    assert result.report.data["replacements"][0]["path"] == "blocks.0"
    model.blocks[1].register_forward_pre_hook(lambda _, args: strides.append(args[0].stride(-1)))
    with torch.no_grad():
        assert torch.equal(model(x), expected)
        torch.testing.assert_close(model(x[:1, :, :5]), copy.deepcopy(result.restore())(x[:1, :, :5]))
    assert strides[0] == 1  # by the time of the second block
    model.blocks[1]._forward_pre_hooks.clear()
    assert torch.equal(model(x), expected)


def joined_norms(model: nn.Module, x: Tensor, monkeypatch: pytest.MonkeyPatch) -> int:
    """Norms of a run that compute the sum before them."""
    count, before = [], sums.layer_norm

    def counting(*args: Any, **kwargs: Any) -> Any:
        count.append(kwargs.get("residual") is not None)
        return before(*args, **kwargs)

    monkeypatch.setattr(sums, "layer_norm", counting)
    with torch.no_grad():
        model(x)
    monkeypatch.setattr(sums, "layer_norm", before)
    return sum(count)


@pytest.mark.parametrize("scaled", [False, True])
def test_sums_are_part_of_norms_or_of_scales(scaled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = Encoder(scaled).eval(), torch.randn(2, 4, 9)
    passes, before = [], summed.gated_activation
    with torch.no_grad():
        expected, other = model(x), model(x[:1, :, :5])
        result = optimize(model, x, "layouts", "sums")
        assert sorted(kept(result)) == ["layout", "residual sums"]
        assert joined_norms(model, x, monkeypatch) == (0 if scaled else 4)  # the last is the model's own norm
        monkeypatch.setattr(summed, "gated_activation", lambda *a, **k: passes.append(1) or before(*a, **k))
        output = model(x)
        assert len(passes) == (4 if scaled else 0)
        assert type(output) is Tensor
        close(output, expected)
        close(model(x[:1, :, :5]), other)  # another shape
        for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            close(copied(x), expected)
    passes.clear()
    close(model(x), expected)  # with gradients it is the original
    assert passes == [] and model(x).requires_grad
    with torch.no_grad():
        assert torch.equal(result.restore()(x), expected)


def test_sums_that_are_off_by_little_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole model is judged as a part is, by its error against a wider type."""
    before = sums.layer_norm

    def wrong(*args: Any, **kwargs: Any) -> Any:
        output, total = before(*args, **kwargs)
        return output, total * 1.05

    for is_right in (True, False):
        model, x = Encoder().eval().bfloat16(), torch.randn(2, 4, 9).bfloat16()
        monkeypatch.setattr(sums, "layer_norm", before if is_right else wrong)
        assert ("residual sums" in kept(optimize(model, x, "layouts", "sums"))) == is_right


def test_sums_meet_parts_that_were_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = Encoder().eval(), torch.randn(2, 4, 9)
    with torch.no_grad():
        expected = model(x)
        result = optimize(model, x, "layouts", "norms", "linears", "sums")
        assert {"layer_norm", "residual sums"} <= set(kept(result))
        close(model(x), expected)
        assert joined_norms(model, x, monkeypatch) == 0  # by the replaced norms themselves


@pytest.mark.parametrize("returns", ["dict", "dataclass"])
def test_nobody_gets_a_sum_that_is_not_computed(returns: str) -> None:
    model, x = Encoder(returns=returns).eval(), torch.randn(2, 4, 9)
    with torch.no_grad():
        expected = model(x)
        result = optimize(model, x, "layouts", "sums")
        assert "residual sums" in kept(result)
        found = model(x)
    held, wanted = (one if returns == "dict" else vars(one) for one in (found, expected))
    for name in ("last", "newest"):
        assert type(held[name]) is Tensor
        close(held[name], wanted[name])
    for one, other in zip(held["states"], wanted["states"]):
        assert type(one) is Tensor
        close(one, other)


def test_a_sum_whose_terms_change_before_it_is_used_is_left() -> None:
    class Changing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            added = self.first(x)
            total = x + added
            added.mul_(2.0)
            return self.norm(total) + added

    model, x = Changing().eval(), torch.randn(2, 5, WIDTH)
    with torch.no_grad():
        expected = model(x)
        result = optimize(model, x, "sums")
        assert kept(result) == []
        assert "changed in place" in refused(result)
        assert torch.equal(model(x), expected)


def test_hooks_get_computed_sums() -> None:
    model, x, seen = Encoder().eval(), torch.randn(2, 4, 9), []
    model.blocks[0].register_forward_hook(lambda _, args, output: seen.append(output.mean()))
    with torch.no_grad():
        expected = model(x)
        result = optimize(model, x, "sums", "layouts")
        assert "hooks" in refused(result) and "residual sums" not in kept(result)
        close(model(x), expected)
    assert seen


@pytest.mark.parametrize(
    "use", [Tensor.mean, lambda h: h[0], lambda h: torch.cat([h, h]), lambda h: h.t(), torch.relu_]
)
def test_any_use_computes_the_sum(use: Any) -> None:
    x, y = torch.randn(3, WIDTH), torch.randn(3, WIDTH)
    with torch.no_grad(), sums.Summing():
        total = x + y
        assert type(total) is summed.Summed
        assert total.shape == x.shape and total.size(-1) == WIDTH
        found = use(total)
    assert torch.equal(found, use(x + y))


class Attending(nn.Module):
    """Whisper's way: heads are copied before attention, and the MLP's layers are the block's own."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.last = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.up, self.down = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)
        self.act = nn.GELU()

    def heads(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:2], 2, -1).transpose(1, 2).contiguous()

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (self.heads(one) for one in self.qkv(self.norm(x)).chunk(3, -1))
        attended = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        x = x + attended
        return x + self.down(F.dropout(self.act(self.up(self.last(x))), 0.1, self.training))


@pytest.mark.parametrize("attention", [(), ("deferred_attention",)], ids=["torch's attention", "ours"])
def test_attention_needs_no_copies_of_heads(attention: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    model, x, copies = Attending().eval(), torch.randn(2, 6, WIDTH), []
    computed = summed.Copied.computed
    with torch.no_grad():
        expected = model(x)
        result = optimize(model, x, "sums", *attention)
        assert "residual sums" in kept(result)
        monkeypatch.setattr(summed.Copied, "computed", lambda self: copies.append(1) or computed(self))
        close(model(x), expected)
        close(model(x[:1, :3]), result.restore()(x[:1, :3]))
    assert copies == []


def test_a_copy_of_heads_that_is_looked_at_is_one() -> None:
    x = torch.randn(2, 6, 2, 8).transpose(1, 2)
    with torch.no_grad(), sums.Summing():
        late = x.contiguous()
        assert type(late) is summed.Copied
        assert late.is_contiguous() and torch.equal(late.view(2, -1), x.reshape(2, -1))


def test_an_activation_is_part_of_the_product_before_it() -> None:
    model, x = nn.Sequential(Attending(), Attending()).eval(), torch.randn(2, 6, WIDTH)
    with torch.no_grad():
        expected = model(x)
        result = optimize(model, x, "linears", "activations", "flows")
        assert kept(result).count("linear + activation") == 2
        assert "activation" not in kept(result)  # part of them
        found = model(x)
        assert type(found) is Tensor
        close(found, expected)
        close(model(x[:1, :3]), copy.deepcopy(model)(x[:1, :3]))
        alone = model[0].up(x)  # by itself the layer is what it was
        close(alone + 0, F.linear(x, model[0].up.weight, model[0].up.bias))
        close(model[0].act(x), F.gelu(x))
        seen = []
        handle = model[0].up.register_forward_hook(lambda _, args, output: seen.append(output.sum()))
        close(model(x), expected)
        assert seen
        handle.remove()
        with torch.enable_grad():
            assert model(x).requires_grad
        assert torch.equal(result.restore()(x), expected)


def test_a_product_that_others_read_too_is_right() -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.act = nn.Linear(WIDTH, WIDTH), nn.SiLU()
            self.norm = nn.LayerNorm(WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            hidden = self.up(self.norm(x))
            return self.act(hidden) + hidden.mean(-1, keepdim=True)

    model, x = nn.Sequential(Both()).eval(), torch.randn(2, 6, WIDTH)
    with torch.no_grad():
        expected = model(x)
        assert "linear + activation" in kept(optimize(model, x, "activations", "flows"))
        close(model(x), expected)


class Shifting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.layer = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        shifted = torch.roll(x, shifts=(-1, -2), dims=(1, 2))
        return x + torch.roll(self.layer(self.norm(shifted)), (1, 2), (1, -2)) + torch.roll(x, 1, 1)


def test_a_roll_in_two_dimensions_is_one_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x, rolls, before = Shifting().eval(), torch.randn(2, 3, 5, WIDTH), [], sums.rolled
    with torch.no_grad():
        expected, other = model(x), model(x[:, :2])
        result = optimize(model, x, "sums")
        assert kept(result) == ["residual sums"]

        def noted(one: Any) -> Any:
            rolls.append(one)
            return one

        monkeypatch.setattr(sums, "rolled", lambda *a, **k: noted(before(*a, **k)))
        assert torch.equal(model(x), expected)
        assert len(rolls) == 2 and all(one is not None for one in rolls)
        assert torch.equal(model(x[:, :2]), other)
        assert torch.equal(result.restore()(x), expected)


@pytest.mark.parametrize("arguments", [((1, 2), (0, 2)), ((1,), (0,)), ((1, 1), (1, 1)), (3, None)])
def test_other_rolls_are_torchs(arguments: Any) -> None:
    from kernel_pytorch._optimize.patterns.deferred.rolled import rolled

    x = torch.randn(3, 4, 5)
    assert rolled(x, *arguments) is None
    with sums.Summing():
        found = torch.roll(x, *arguments)
    assert torch.equal(found, torch.roll(x, *arguments))
