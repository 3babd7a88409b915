"""Parts that `optimize` recognises by what they compute, whatever they are called and in whatever order they run."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from forced_clock import everything_is_kept
from kernel_pytorch._optimize.verify import perturbed
from torch import Tensor, nn
from torch.nn import functional as F

import kernel_pytorch

SIZE = 32


@pytest.fixture(autouse=True)
def everything_pays() -> Iterator[None]:
    with everything_is_kept():
        yield


def optimized(model: nn.Module, *inputs: Tensor, goal: str = "inference") -> dict[str, list[str]]:
    """Paths by pattern of what was kept; the model computes what it did, restored too."""
    with torch.no_grad():
        before = model(*inputs)
    result = kernel_pytorch.optimize(model, inputs, goal, budget_seconds=30, tune="off")
    with torch.no_grad():
        torch.testing.assert_close(model(*inputs), before, rtol=1e-4, atol=1e-4)
    kept: dict[str, list[str]] = {}
    for one in result.report.data["replacements"]:
        kept.setdefault(one["pattern"], []).append(one["path"])
    result.restore()
    with torch.no_grad():
        assert torch.equal(model(*inputs), before)
    return kept


class Attention(nn.Module):
    """Three projections by any names, called in any order, some without a bias."""

    def __init__(
        self, names: tuple[str, str, str], order: tuple[int, int, int], biases: tuple[bool, bool, bool]
    ) -> None:
        super().__init__()
        for name, bias in zip(names, biases):
            self.add_module(name, nn.Linear(SIZE, SIZE, bias=bias))
        self.names, self.order = names, order
        self.out = nn.Linear(SIZE, SIZE)

    def forward(self, x: Tensor) -> Tensor:
        found = {i: self._modules[self.names[i]](x).unflatten(-1, (4, -1)).transpose(1, 2) for i in self.order}
        return self.out(F.scaled_dot_product_attention(found[0], found[1], found[2]).transpose(1, 2).flatten(2))


@pytest.mark.parametrize("goal", ["inference", "train"])
@pytest.mark.parametrize("order", [(0, 1, 2), (1, 2, 0)])
@pytest.mark.parametrize("biases", [(True, True, True), (True, False, True), (False, False, False)])
def test_projections_of_any_name_order_and_bias(order: Any, biases: Any, goal: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Attention(("to_q", "to_k", "to_v"), order, biases)).eval()
    kept = optimized(model, torch.randn(2, 6, SIZE), goal=goal)
    assert kept.get("qkv") == ["0"] and "0" in kept.get("attention", [])


def test_a_missing_bias_stays_zero_when_the_others_change() -> None:
    torch.manual_seed(0)
    model = Attention(("q_proj", "k_proj", "v_proj"), (0, 1, 2), (True, False, True)).eval()
    x = torch.randn(2, 6, SIZE)
    result = kernel_pytorch.optimize(model, x, budget_seconds=30, tune="off")
    with torch.no_grad():
        model.q_proj.bias.add_(1.0)
        ours = model(x)
        assert not hasattr(model.k_proj, "bias") or model.k_proj.bias is None
        torch.testing.assert_close(ours, result.restore()(x), rtol=1e-4, atol=1e-4)


class QuickMlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(SIZE, 64), nn.Linear(64, SIZE)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.fc1(x)
        return self.fc2(hidden * torch.sigmoid(1.702 * hidden))


@pytest.mark.parametrize("goal", ["inference", "train"])
def test_quick_gelu(goal: str) -> None:
    assert optimized(QuickMlp().eval(), torch.randn(5, SIZE), goal=goal).get("mlp") == [""]


class OwnLinear(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        product = input @ self.weight.T
        return product if self.bias is None else product + self.bias


class OtherLinear(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * 1.5


@pytest.mark.parametrize(("kind", "is_known"), [(OwnLinear, True), (OtherLinear, False)])
def test_a_class_derived_from_linear_is_one_by_its_numbers(kind: Any, is_known: bool) -> None:
    model = nn.Sequential(kind(SIZE, 64), nn.GELU(), kind(64, SIZE)).eval()
    assert ("mlp" in optimized(model, torch.randn(5, SIZE))) == is_known


class Norm(nn.Module):
    """RMSNorm with names and an epsilon of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.rand(SIZE) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * self.gamma


class NotQuite(Norm):
    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 3e-4) * self.gamma


def test_norms_of_unusual_names() -> None:
    assert optimized(nn.Sequential(Norm(), nn.Linear(SIZE, SIZE)).eval(), torch.randn(5, SIZE)).get("rms_norm") == ["0"]
    assert "rms_norm" not in optimized(nn.Sequential(NotQuite(), nn.Linear(SIZE, SIZE)).eval(), torch.randn(5, SIZE))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_norm_without_epsilon_has_torchs_in_every_type(dtype: torch.dtype) -> None:
    model = nn.Sequential(nn.RMSNorm(SIZE), nn.RMSNorm(SIZE)).to(dtype).eval()
    original = copy.deepcopy(model)
    result = kernel_pytorch.optimize(model, torch.randn(5, SIZE, dtype=dtype), budget_seconds=30, tune="off")
    assert [one["path"] for one in result.report.data["replacements"]] == ["0", "1"]
    for other, tolerance in ((dtype, 1e-2), (torch.float64, 1e-12), (torch.bfloat16, 1e-2)):
        x = (torch.randn(5, SIZE) * 1e-5).to(other)  # rows small enough for the epsilon to count
        torch.testing.assert_close(model.to(other)(x), original.to(other)(x), rtol=tolerance, atol=0)


class SelfAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(SIZE, 4, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x, x, x, need_weights=False)[0]


def test_torchs_fused_multihead_attention_runs_on_our_kernel() -> None:
    model, x = SelfAttention().eval(), torch.randn(2, 6, SIZE)
    result = kernel_pytorch.optimize(model, x, budget_seconds=30, tune="off")
    with torch.no_grad(), torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        model(x)
    names = {event.name for event in profile.events()}
    assert any(name.startswith("kernel_pytorch::attention") for name in names)
    assert "aten::_native_multi_head_attention" not in names
    result.restore()


class Tables(nn.Module):
    """Keeps what it derives from its parameters while it is evaluated, as position biases are kept."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.bias = nn.LayerNorm(SIZE), nn.Parameter(torch.randn(SIZE))
        self.tables: dict[str, Tensor] = {}
        self.last: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if "table" not in self.tables:
            self.tables["table"] = self.bias * 2
        self.last = x
        return F.gelu(self.norm(x)) + self.tables["table"]


def test_what_a_module_keeps_of_its_parameters_is_not_that_of_a_trial() -> None:
    model, x = Tables().eval(), torch.randn(4, SIZE)
    with torch.no_grad(), perturbed(model):
        model(x)
    assert not model.tables and model.last is None
    kernel_pytorch.optimize(model, x, budget_seconds=30, tune="off")
    assert not model.tables and model.last is None
    with torch.no_grad():
        expected = F.gelu(F.layer_norm(x, (SIZE,))) + model.bias * 2
        torch.testing.assert_close(model(x), expected, rtol=1e-4, atol=1e-4)


def test_a_model_that_reads_its_own_mask_gets_one() -> None:
    masking = pytest.importorskip("transformers.masking_utils")
    from kernel_pytorch.compat.transformers import attention_mask

    padding = torch.ones(2, 5, dtype=torch.bool)
    options = {"mask_function": masking.causal_mask_function, "device": torch.device("cpu")}
    for given in (None, padding):
        whole = attention_mask(2, 5, 5, attention_mask=given, allow_is_causal_skip=False, **options)
        assert whole is not None and whole.shape[-2:] == (5, 5)
        assert torch.equal(whole.expand(2, 1, 5, 5)[0, 0], torch.ones(5, 5, dtype=torch.bool).tril())
        assert attention_mask(2, 5, 5, attention_mask=given, **options) is None


class Processor:
    """How diffusers' attention holds its computation: an object that is called with the layer."""

    def __init__(self, heads: int) -> None:
        self.heads = heads

    def __call__(self, layer: Any, x: Tensor) -> Tensor:
        query, key, value = (one(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for one in layer.layers)
        return F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2)


class Processed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(SIZE, SIZE) for _ in range(3))
        self.processor = Processor(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.processor(self, x)


def test_attention_inside_an_object_that_a_module_holds() -> None:
    model, x = Processed().eval(), torch.randn(2, 6, SIZE)
    processor = model.processor
    assert optimized(model, x).get("attention") == [""]
    assert model.processor is processor
    expected = model(x)
    kernel_pytorch.optimize(model, x, budget_seconds=30, tune="off")
    assert isinstance(model.processor, Processor) and type(model.processor) is not Processor
    loaded, copied = pickle.loads(pickle.dumps(model)), copy.deepcopy(model)
    assert type(loaded.processor) is Processor and type(copied.processor) is not Processor
    for one in (loaded, copied, kernel_pytorch.restore(copied)):
        torch.testing.assert_close(one(x), expected, rtol=1e-4, atol=1e-4)
    assert type(copied.processor) is Processor


class Noisy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(SIZE)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        order = torch.rand(x.shape[0]).argsort()
        return self.norm(x[order]), order


def test_a_model_that_draws_random_numbers_is_compared_on_the_same() -> None:
    result = kernel_pytorch.optimize(Noisy().eval(), torch.randn(64, SIZE), budget_seconds=30, tune="off")
    assert [one["pattern"] for one in result.report.data["replacements"]] == ["layer_norm"]
