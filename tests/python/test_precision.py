"""kernel_pytorch.precision: codes against torch's, products against exact ones, layers, conversion, the engine."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from kernel_pytorch._ops.float8 import dequantize, quantize, scaled_matmul
from kernel_pytorch.precision import FP8Config, FP8Format, FP8LinearLayer
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from kernel_pytorch import precision

RECIPES = ("delayed", "current", "rowwise", "blockwise")
GRANULARITIES = ("tensor", "row", "1x128", "128x128")


@pytest.fixture(autouse=True)
def seed() -> Iterator[None]:
    torch.manual_seed(0)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # problems of a few thousand elements wait for threads longer than they compute
    yield
    torch.set_num_threads(threads)


def relative(actual: Tensor, expected: Tensor) -> float:
    actual, expected = actual.detach().float(), expected.detach().float()
    return float((actual - expected).norm() / expected.norm())


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_every_bfloat16_rounds_as_torch_does(dtype: torch.dtype) -> None:
    x = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    largest = torch.finfo(dtype).max
    x = x[x.float().abs() <= largest].view(1, -1)
    made = quantize(x, dtype=dtype, scale=torch.ones(1))
    assert made.codes is not None
    assert torch.equal(made.codes.view(torch.uint8), x.to(dtype).view(torch.uint8))


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_codes_and_transposed_codes_decode_to_x(granularity: str, dtype: torch.dtype) -> None:
    x = torch.randn(150, 261).to(dtype)
    made = quantize(x, granularity=granularity, transposed=True)
    assert made.codes is not None and made.transposed is not None and made.transposed_scales is not None
    assert made.codes.shape == (150, 261) and made.transposed.shape == (261, 150)
    assert relative(dequantize(made.codes, made.scales), x) < 0.03
    assert relative(dequantize(made.transposed, made.transposed_scales).t(), x) < 0.03
    strided = quantize(x.t().contiguous().t(), granularity=granularity)
    assert strided.codes is not None and torch.equal(strided.codes.float(), made.codes.float())


def test_quantize_to_fp8_and_back() -> None:
    x = torch.randn(3, 5, 7)
    codes, scale = precision.quantize_to_fp8(x, format=FP8Format.E5M2)
    assert codes.dtype == torch.float8_e5m2 and codes.shape == x.shape and scale.shape == ()
    assert float(scale) == pytest.approx(float(x.abs().max()) / 57344)
    assert relative(precision.dequantize_from_fp8(codes, inverse_scale=scale), x) < 0.06
    codes, scale = precision.quantize_to_fp8(torch.tensor([1.0, 1000.0, -3e5]), inverse_scale=0.5)
    assert precision.dequantize_from_fp8(codes, inverse_scale=scale).tolist() == [1.0, 224.0, -224.0]
    with pytest.raises(ValueError, match="must be torch"):
        quantize(x[0], dtype=torch.int8)
    with pytest.raises(RuntimeError, match="convert it to fp32, bf16 or fp16"):
        quantize(x[0].double())


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_scaled_matmul_is_the_product_of_what_codes_mean(granularity: str) -> None:
    a = quantize(torch.randn(70, 300), granularity=granularity)
    b = quantize(torch.randn(140, 300), granularity=granularity, dtype=torch.float8_e5m2)
    bias = torch.randn(140)
    output = scaled_matmul(a.codes, b.codes, a.scales, b.scales, bias=bias, dtype=torch.float32)
    expected = dequantize(a.codes, a.scales).double() @ dequantize(b.codes, b.scales).double().t() + bias.double()
    assert relative(output, expected) < 1e-6


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layer_follows_linear(recipe: str, dtype: torch.dtype) -> None:
    linear = nn.Linear(200, 300).to(dtype)
    layer = FP8LinearLayer.from_linear(copy.deepcopy(linear), FP8Config(scaling_strategy=recipe))
    x = torch.randn(2, 67, 200, dtype=dtype, requires_grad=True)
    grad = torch.randn(2, 67, 300, dtype=dtype)
    for _ in range(2):  # the second by the scales of the first
        output = layer(x)
        gradients = torch.autograd.grad(output, (x, *layer.parameters()), grad)
        layer.update_fp8_scales()
    assert layer.fp8_ready == (recipe == "delayed")
    plain = linear(x)
    expected = torch.autograd.grad(plain, (x, *linear.parameters()), grad)
    assert output.dtype == dtype and output.shape == plain.shape
    assert 1e-3 < relative(output, plain) < 0.05
    for actual, wanted in zip(gradients, expected):
        assert actual.dtype == wanted.dtype and relative(actual, wanted) < 0.08
    assert relative(gradients[2], expected[2]) < 1e-2


def test_layer_under_autocast_no_grad_and_wrong_shapes() -> None:
    layer = FP8LinearLayer(64, 32, bias=False)
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(torch.randn(4, 64)).dtype == torch.bfloat16
    with torch.no_grad():
        assert layer(torch.randn(0, 64)).shape == (0, 32)
        assert layer(torch.randn(64)).shape == (32,)
    with pytest.raises(ValueError, match="last dimension must be 64"):
        layer(torch.randn(4, 63))
    assert "recipe='delayed'" in repr(layer)
    layer.to(torch.bfloat16)
    assert layer.fp8_scale.dtype == torch.float32
    assert layer(torch.randn(4, 64, dtype=torch.bfloat16)).dtype == torch.bfloat16


def test_stochastic_gradients_are_unbiased() -> None:
    config = FP8Config(scaling_strategy="current", stochastic_gradients=True, backward_format=FP8Format.E4M3)
    layer = FP8LinearLayer(16, 16, bias=False, fp8_config=config)
    with torch.no_grad():
        layer.weight.copy_(torch.eye(16))
    x = torch.randn(4, 16, requires_grad=True)
    grad = torch.rand(4, 16)
    draws = torch.stack([torch.autograd.grad(layer(x), x, grad)[0] for _ in range(400)])
    assert draws.std(0).max() > 0
    assert relative(draws.mean(0), grad) < 5e-3


@pytest.mark.parametrize("recipe", RECIPES)
def test_compile_and_checkpointing_change_nothing(recipe: str) -> None:
    model = nn.Sequential(nn.Linear(48, 64), nn.GELU(), nn.Linear(64, 32))
    precision.convert_model_to_fp8(model, FP8Config(scaling_strategy=recipe))
    x = torch.randn(24, 48)
    model(x).sum().backward()
    precision.update_fp8_scales(model)
    # Inductor for the recipe with the most state; the others are the same graph with less of it.
    compiled = torch.compile(model, fullgraph=True, backend="inductor" if recipe == "delayed" else "aot_eager")
    results = []
    for run in (model, compiled, lambda x: checkpoint(model, x, use_reentrant=False)):
        model.zero_grad()
        output = run(x)
        output.square().sum().backward()
        results.append((output.detach(), [p.grad.clone() for p in model.parameters()], model[0].fp8_amax.clone()))
    for output, gradients, amax in results[1:]:
        assert torch.allclose(output, results[0][0], rtol=1e-5, atol=1e-5)
        assert all(relative(a, b) < 2e-3 for a, b in zip(gradients, results[0][1]))
        assert torch.allclose(amax, results[0][2], rtol=1e-5)
    assert bool((results[0][2] > 0).all())


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 32)
        self.attention = nn.MultiheadAttention(32, 2, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
        self.head = nn.Linear(32, 50, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        x = x + self.attention(x, x, x, need_weights=False)[0]
        return self.head(x + self.mlp(x))


def test_conversion_keeps_parameters_and_says_what_stays() -> None:
    model = Block()
    keys, parameters = list(model.state_dict()), [id(p) for p in model.parameters()]
    copied = precision.convert_model_to_fp8(model, inplace=False)
    assert copied is not model and not precision.fp8_layers(model)
    converted = precision.convert_model_to_fp8(model)
    assert converted is model
    assert list(precision.fp8_layers(model)) == ["mlp.0", "mlp.2", "head"]
    assert list(model.state_dict()) == keys and [id(p) for p in model.parameters()] == parameters
    assert model.head.weight is model.embedding.weight
    assert type(model.attention.out_proj) is not FP8LinearLayer
    plans = {plan.name: plan for plan in model.fp8_plan}
    assert "reads the weights" in plans["attention"].reason and not plans["attention"].converts
    assert "multiplied in fp32" in plans["mlp.0"].reason and plans["mlp.0"].converts
    model(torch.randint(0, 50, (2, 8))).sum().backward()
    precision.restore_from_fp8(model)
    assert not precision.fp8_layers(model) and type(model.mlp[0]) is nn.Linear
    assert [id(p) for p in model.parameters()] == parameters
    model.load_state_dict(copied.state_dict())

    class Odd(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return x

    plan = precision.plan_fp8(nn.ModuleList([Odd(4, 4), nn.Linear(4, 4).double()]))
    assert "forward of its own" in plan[0].reason and "float64" in plan[1].reason
    assert not any(entry.converts for entry in plan)


def test_layers_named_to_be_skipped_stay() -> None:
    model = nn.ModuleDict(
        {"head": nn.Linear(8, 8), "body": nn.ModuleDict({"head": nn.Linear(8, 8), "up": nn.Linear(8, 8)})}
    )
    plan = precision.plan_fp8(model, FP8Config(skip=("head",)))
    assert [(entry.name, entry.converts) for entry in plan] == [
        ("head", False),
        ("body.head", False),
        ("body.up", True),
    ]
    assert "skip" in plan[0].reason
    whole = precision.plan_fp8(model, FP8Config(skip=("body.head",)))
    assert [entry.converts for entry in whole] == [True, False, True]


@pytest.mark.parametrize("recipe", RECIPES)
def test_engine_trains_and_skips_overflows(recipe: str, tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 4))
    trainer = precision.create_fp8_trainer(
        model, FP8Format.E4M3, FP8Format.E5M2, scaling_strategy=recipe, max_grad_norm=1.0
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    x = torch.randn(256, 16)
    targets = x[:, :4].argmax(1)
    with trainer:
        losses = []
        for _ in range(40):
            loss = trainer.training_step(x, targets)
            loss.backward()  # what callers of other engines do: nothing is left to do
            losses.append(float(loss.detach()))
            assert trainer.optimizer_step(optimizer)
            assert all(p.grad is None for p in model.parameters())
        assert losses[-1] < 0.5 * losses[0]
        before = [p.detach().clone() for p in model.parameters()]
        bad = x.clone()
        bad[0, 0] = float("inf")
        trainer.training_step(bad, targets)
        assert not trainer.optimizer_step(optimizer)
        assert all(torch.equal(a, b) for a, b in zip(before, model.parameters()))
        statistics = trainer.get_training_statistics()
        assert statistics["overflows"] == 1 and statistics["steps"] == 41 and statistics["fp8_enabled"]
        assert "0" in statistics["last_overflow_layers"] and statistics["recipe"] == recipe
        assert all(torch.isfinite(torch.tensor(list(row.values()))).all() for row in statistics["scale_info"].values())
        trainer.training_step(x, targets)
        assert trainer.optimizer_step(optimizer)
    trainer.save_checkpoint(tmp_path / "a.pt", optimizer, epoch=3)
    other = precision.FP8TrainingEngine(copy.deepcopy(model), trainer.config)
    assert other.load_checkpoint(tmp_path / "a.pt", torch.optim.AdamW(other.model.parameters())) == {"epoch": 3}
    model.eval(), other.model.eval()
    assert torch.equal(model(x), other.model(x))
    assert torch.equal(model[0].fp8_scale, other.model[0].fp8_scale)
    restored = trainer.restore_original_model()
    assert type(restored[0]) is nn.Linear
    torch.save(restored.state_dict(), tmp_path / "old.pt")  # a checkpoint that never heard of FP8
    other.load_checkpoint(tmp_path / "old.pt")
    assert torch.equal(other.model[0].weight, restored[0].weight)


def test_engine_scales_the_loss_of_float16() -> None:
    trainer = precision.create_fp8_trainer(nn.Linear(32, 32).half(), "cpu", scaling_interval=2, initial_scale=1024.0)
    assert trainer.config.forward_format is FP8Format.E4M3
    optimizer = torch.optim.SGD(trainer.model.parameters(), lr=0.1)
    x = torch.randn(8, 32).half()
    trainer.setup_fp8_training()
    with torch.no_grad():
        expected = float((trainer.model(x) - x).square().mean())
    assert float(trainer.training_step(x, x).detach()) == pytest.approx(expected, rel=1e-2)
    norm = float(trainer.model.weight.grad.float().norm())
    assert norm > 50  # scaled
    assert trainer.optimizer_step(optimizer)
    trainer.training_step(x, x, backward=False).backward()
    assert trainer.optimizer_step(optimizer)
    assert trainer.loss_scale == 2048
    assert trainer.training_step(x, x, return_loss=False).shape == (8, 32)
    trainer.model.weight.grad[0, 0] = float("nan")
    assert not trainer.optimizer_step(optimizer)
    assert trainer.loss_scale == 1024
    counted = trainer.get_training_statistics()
    assert not trainer.optimizer_step(optimizer)  # nothing was computed
    assert trainer.get_training_statistics() == counted and trainer.loss_scale == 1024


def test_bad_configurations_are_named() -> None:
    for options, words in (
        ({"scaling_strategy": "often"}, "scaling_strategy is 'often'"),
        ({"margin": -1}, "margin is -1"),
        ({"amax_history_len": 0}, "amax_history_len is 0"),
        ({"convert": "some"}, "convert is 'some'"),
        ({"backoff_factor": 2.0}, "backoff_factor"),
    ):
        with pytest.raises(ValueError, match=words):
            FP8Config(**options)
    assert FP8Config().recipe == "delayed" and FP8Config(enable_amax_history=False).recipe == "current"


def test_delayed_scales_follow_the_history() -> None:
    config = FP8Config(scaling_strategy="delayed", margin=0, amax_history_len=2)
    layer = FP8LinearLayer(8, 8, fp8_config=config)
    for factor, expected in ((4.0, 4.0), (1.0, 4.0), (1.0, 1.0), (0.0, 1.0), (0.0, None)):
        x = torch.full((3, 8), factor)
        layer(x).sum().backward()
        layer.update_fp8_scales()
        scale = float(layer.fp8_scale[0])
        assert scale == pytest.approx(expected / 448 if expected is not None else 1.0)
    assert float(layer.fp8_scale[2]) == pytest.approx(1.0 / 57344)


def test_numerics_report() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8))
    precision.convert_model_to_fp8(model, FP8Config(scaling_strategy="current"))
    x = torch.randn(32, 64)
    x[0, 0] = 1e5  # most others vanish beside it
    report = precision.fp8_numerics_report(model, lambda: model(x).square().sum())
    assert list(report) == ["0", "2"] and all(p.grad is None for p in model.parameters())
    first = report["0"].tensors["input"]
    assert first.amax == 1e5 and first.underflow > 0.1 and first.saturation == 0
    assert 0 < report["0"].tensors["weight"].error < 0.04 and report["0"].tensors["weight"].underflow < 0.01
    assert 0 < report["2"].tensors["gradient"].error < 0.1 and 0 < report["2"].output_error < 0.1
    model[0].fp8_config.scaling_strategy = "delayed"
    model[0].fp8_ready = True
    model[0].fp8_scale.fill_(1e-3)
    report = precision.fp8_numerics_report(model, lambda: model(x).square().sum())
    assert report["0"].tensors["input"].saturation > 0.3
