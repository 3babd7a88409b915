"""FP8TrainingEngine with inputs and targets as callers have them, and copies of everything that precision hands out."""

from __future__ import annotations

import copy
import io
import math
import pickle
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from kernel_pytorch.attention import FP8AttentionConfig
from kernel_pytorch.precision import FP8Config, FP8Format, FP8TrainingEngine
from torch import Tensor, nn
from transformers import MixtralConfig
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

from kernel_pytorch import core, functional, precision


@pytest.fixture(autouse=True)
def seed() -> Iterator[None]:
    torch.manual_seed(0)
    yield


class Tokens(nn.Module):
    """As a Hugging Face model: keyword arguments in, an object with logits and, of labels, a loss out."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 16)
        self.head = nn.Linear(16, 20)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        logits = self.head(self.embedding(input_ids) * attention_mask[..., None])
        if labels is None:
            return {"logits": logits}
        return {"logits": logits, "loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())}


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 5)

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return self.layer(x) * scale


def test_mappings_and_tuples_are_arguments() -> None:
    batch = {"input_ids": torch.randint(0, 20, (4, 6)), "attention_mask": torch.ones(4, 6)}
    trainer = FP8TrainingEngine(Tokens())
    labels = torch.randint(0, 20, (4, 6))
    by_targets = float(trainer.training_step(batch, labels))
    by_labels = float(trainer.training_step({**batch, "labels": labels}))
    assert by_targets == pytest.approx(by_labels, rel=1e-6)
    plain = FP8TrainingEngine(Classifier())
    x, targets = torch.randn(3, 8), torch.tensor([0, 1, 2])
    assert float(plain.training_step((x, 0.0), targets)) == pytest.approx(math.log(5))
    assert plain.training_step([x][0], targets, return_loss=False).shape == (3, 5)
    with pytest.raises(TypeError, match="targets are None, and the model returns Tensor"):
        plain.training_step(x)


def test_the_loss_is_a_number_without_a_warning() -> None:
    trainer = FP8TrainingEngine(Classifier())
    loss = trainer.training_step(torch.randn(3, 8), torch.tensor([0, 1, 2]))
    before = [p.grad.clone() for p in trainer.model.parameters()]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert float(loss) == loss.item() and int(loss) == int(loss.item())
        assert math.isfinite(loss) and f"{loss:.3f}" == f"{loss.item():.3f}"
        (loss / 4).backward()
        loss.backward()
    assert type(loss * 2) is Tensor
    assert all(torch.equal(p.grad, kept) for p, kept in zip(trainer.model.parameters(), before))


def test_targets_that_do_not_fit_are_named() -> None:
    trainer = FP8TrainingEngine(Classifier())
    with pytest.raises(ValueError, match=r"outputs have shape \(4, 16, 5\) and targets \(4,\).*of shape \(4, 16\)"):
        trainer.training_step(torch.randn(4, 16, 8), torch.zeros(4, dtype=torch.long))
    with pytest.raises(ValueError, match=r"outputs have shape \(4, 5\) and targets \(4, 1\)"):
        trainer.training_step(torch.randn(4, 8), torch.zeros(4, 1))
    last = FP8TrainingEngine(
        Classifier(), loss_function=lambda outputs, targets: nn.functional.cross_entropy(outputs[:, -1], targets)
    )
    assert float(last.training_step(torch.randn(4, 16, 8), torch.zeros(4, dtype=torch.long))) > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_ignored_targets_are_left_out(dtype: torch.dtype) -> None:
    trainer = FP8TrainingEngine(Classifier().to(dtype), FP8Config(loss_scaling=False))
    x = torch.randn(3, 8, dtype=dtype)
    some = torch.tensor([1, -100, 2])
    outputs = trainer.training_step(x, some, return_loss=False)
    expected = nn.functional.cross_entropy(outputs.float(), some)
    trainer.model.zero_grad()
    assert float(trainer.training_step(x, some)) == pytest.approx(float(expected.detach()), rel=2e-3)
    trainer.model.zero_grad()
    assert float(trainer.training_step(x, torch.full((3,), -100))) == 0
    assert all(not p.grad.any() for p in trainer.model.parameters())
    assert trainer.optimizer_step(torch.optim.SGD(trainer.model.parameters(), lr=1.0))
    assert trainer.get_training_statistics()["overflows"] == 0


def test_modes_inside_a_model_in_training_stay() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5))
    trainer = FP8TrainingEngine(model)
    x, targets = torch.randn(3, 8), torch.tensor([0, 1, 2])
    model[1].eval()
    trainer.training_step(x, targets)
    assert not model[1].training
    model.eval()
    trainer.training_step(x, targets)
    assert model.training and model[1].training and model[0].training


def test_a_step_without_gradients_is_no_overflow() -> None:
    trainer = FP8TrainingEngine(Classifier())
    optimizer = torch.optim.SGD(trainer.model.parameters(), lr=0.1)
    for scaler in (None, torch.amp.GradScaler("cpu", enabled=True)):
        assert not trainer.optimizer_step(optimizer, scaler)
        found = trainer.get_training_statistics()
        assert (found["steps"], found["overflows"], found["scale_updates"]) == (0, 0, 0)
    trainer.training_step(torch.randn(3, 8), torch.tensor([0, 1, 2]))
    assert trainer.optimizer_step(optimizer)
    assert trainer.get_training_statistics()["steps"] == 1


def test_formats_and_devices_of_a_trainer() -> None:
    for wrong in ("e3m4", "gpu", FP8Config()):
        with pytest.raises(ValueError, match=r"create_fp8_trainer: forward_format is .*formats are e4m3, e5m2"):
            precision.create_fp8_trainer(Classifier(), wrong)
    with pytest.raises(ValueError, match="FP8Config: backward_format is 'e3m4'; it must be one of e4m3, e5m2"):
        precision.create_fp8_trainer(Classifier(), "e4m3", "e3m4")
    with pytest.raises(ValueError, match="FP8Config: backward_format is 'e3m4'"):
        precision.create_fp8_trainer(Classifier(), "cpu", "e4m3", "e3m4")
    config = precision.create_fp8_trainer(Classifier(), "cpu", FP8Format.E5M2).config
    assert (config.forward_format, config.backward_format) == (FP8Format.E5M2, FP8Format.E5M2)
    config = precision.create_fp8_trainer(Classifier(), torch.device("cpu"), "e5m2", "e4m3").config
    assert (config.forward_format, config.backward_format) == (FP8Format.E5M2, FP8Format.E4M3)
    assert precision.create_fp8_trainer(Classifier()).config.backward_format is FP8Format.E5M2


def test_what_does_not_exist_is_refused() -> None:
    for name in ("fp8_dpa", "fp8_mha", "use_te_linear"):
        assert getattr(FP8Config(), name) is False
        with pytest.raises(ValueError, match=f"FP8Config: {name} is True; .* here.*leave it False"):
            FP8Config(**{name: True})
    with pytest.raises(ValueError, match="attention multiplies in e4m3"):
        FP8AttentionConfig(use_fp8=True, fp8_format="e5m2")
    with pytest.raises(ValueError, match="warp_specialization would have no effect"):
        FP8AttentionConfig(warp_specialization=True)
    with pytest.raises(ValueError, match="fp8_format is 'e3m4'"):
        FP8AttentionConfig(fp8_format="e3m4")
    with pytest.raises(ValueError, match="sequence_length_threshold is -1"):
        FP8AttentionConfig(sequence_length_threshold=-1)


def test_a_scale_must_name_its_convention() -> None:
    x = torch.randn(4, 4)
    for arguments, options in (((2.0,), {}), ((2.0, FP8Format.E4M3), {}), ((), {"scale": 2.0})):
        with pytest.raises(TypeError, match=r"quantize_to_fp8: .*give inverse_scale="):
            precision.quantize_to_fp8(x, *arguments, **options)
    codes, inverse_scale = precision.quantize_to_fp8(x, inverse_scale=0.25)
    assert float(inverse_scale) == 0.25 and torch.equal(codes.float(), (x / 0.25).to(torch.float8_e4m3fn).float())
    for arguments, options in (((2.0,), {}), ((2.0, torch.float32), {}), ((), {"scale": 2.0})):
        with pytest.raises(TypeError, match=r"dequantize_from_fp8: .*give inverse_scale="):
            precision.dequantize_from_fp8(codes, *arguments, **options)
    with pytest.raises(TypeError, match="inverse_scale is missing"):
        precision.dequantize_from_fp8(codes)


def _objects() -> dict[str, Any]:
    """One of each public class of precision, as users get them."""
    model = nn.Sequential(nn.Linear(8, 8), core.AttentionLayer(8, 2, dropout=0.0))
    trainer = FP8TrainingEngine(model)
    x = torch.randn(2, 4, 8)
    trainer.training_step(x, torch.zeros(2, 4, 8))
    trainer.optimizer_step(torch.optim.SGD(model.parameters(), lr=0.1))
    report = precision.fp8_numerics_report(model, lambda: model(x).sum())
    small = nn.Sequential(nn.Linear(64, 8))
    allocator = precision.AdaptivePrecisionAllocator()
    found = allocator.allocate(small)
    ultra = precision.create_ultra_precision_module(nn.Sequential(nn.Linear(64, 8)))
    ultra(torch.randn(2, 64))
    sizes = MixtralConfig(hidden_size=64, intermediate_size=64, num_local_experts=2)
    plain = nn.ModuleDict({"experts": MixtralExperts(sizes)})
    for parameter in plain.parameters():
        nn.init.normal_(parameter)
    experts = precision.convert_model(plain, "int4", experts=True)["experts"]
    return {
        "AdaptivePrecisionAllocator": allocator,
        "AllocationStrategy": precision.AllocationStrategy.ENTROPY_BASED,
        "FP4Quantizer": precision.FP4Quantizer(),
        "LayerAllocation": found.layers[0],
        "LayerSensitivity": allocator.analyze(small)[0],
        "OpenMultiheadAttention": precision.OpenMultiheadAttention(nn.MultiheadAttention(16, 2)),
        "PrecisionAllocation": found,
        "PrecisionConfig": precision.PrecisionConfig(),
        "PrecisionFormat": next(iter(precision.PrecisionFormat)),
        "PrecisionStats": ultra.get_precision_stats(),
        "QuantizationMode": next(iter(precision.QuantizationMode)),
        "RoundedLinear": precision.RoundedLinear(nn.Linear(64, 8), found.layers[0].format),
        "Sparse24Linear": precision.Sparse24Linear(8, 4),
        "SparseTrainingLinear": precision.SparseTrainingLinear(nn.Linear(8, 4)),
        "StructuredSparsity24": precision.StructuredSparsity24(),
        "UltraPrecisionModule": ultra,
        "WeightFormat": found.layers[0].format,
        "FP8Config": FP8Config(skip=("head",)),
        "FP8Format": FP8Format.E5M2,
        "FP8LayerPlan": precision.plan_fp8(nn.Linear(8, 8))[0],
        "FP8LinearLayer": precision.FP8LinearLayer(8, 8),
        "FP8TrainingEngine": trainer,
        "Int8Linear": precision.Int8Linear.from_linear(nn.Linear(32, 8)),
        "LayerNumerics": report["0"],
        "QuantizedEmbedding": precision.QuantizedEmbedding(functional.quantize_weight(torch.randn(8, 32), "int4")),
        "QuantizedExperts": experts,
        "QuantizedLinear": precision.QuantizedLinear.from_linear(nn.Linear(32, 8), format="int4"),
        "QuantizedMatrices": precision.QuantizedMatrices(
            functional.quantize_weight(torch.randn(8, 32), "int4"), 2, torch.float32
        ),
        "TensorNumerics": report["0"].tensors["input"],
    }


def test_no_public_class_is_missing_from_the_copies() -> None:
    assert {name for name in precision.__all__ if isinstance(getattr(precision, name), type)} == set(_objects())


@pytest.mark.parametrize("way", ["deepcopy", "pickle", "torch.save"])
def test_every_public_object_is_copied_pickled_saved_and_shown(way: str) -> None:
    for name, value in _objects().items():
        if way == "deepcopy":
            again = copy.deepcopy(value)
        elif way == "pickle":
            again = pickle.loads(pickle.dumps(value))
        else:
            buffer = io.BytesIO()
            torch.save(value, buffer)
            buffer.seek(0)
            again = torch.load(buffer, weights_only=False)
        assert repr(again) == repr(value) and " object at 0x" not in repr(value), name
        if name == "FP8TrainingEngine":
            _same_training(value, again)


def _same_training(trainer: FP8TrainingEngine, again: FP8TrainingEngine) -> None:
    assert again.model is not trainer.model and repr(again).startswith("FP8TrainingEngine(Sequential, recipe='delayed'")
    x, targets = torch.randn(2, 4, 8), torch.randn(2, 4, 8)
    losses = []
    for engine in (trainer, again):
        optimizer = torch.optim.SGD(engine.model.parameters(), lr=0.1)
        for _ in range(2):
            loss = engine.training_step(x, targets)
            assert engine.optimizer_step(optimizer)
        losses.append((float(loss), engine.get_training_statistics()))
    assert losses[0] == losses[1]
    restored = again.restore_original_model()
    assert type(restored[0]) is nn.Linear and "in_proj" not in restored[1]._modules
