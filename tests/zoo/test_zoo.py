"""A sample of the zoo, and that a failure, a crash and a hang are rows; `make zoo` is all of it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch
from torch import nn

sys.path[:0] = [str(Path(__file__).resolve().parents[1]), str(Path(__file__).resolve().parents[1] / "python")]
from zoo import checks, command, compiled, models, shrink  # noqa: E402
from zoo.case import Case  # noqa: E402
from zoo.coverage import Coverage  # noqa: E402

# torch's own and odd modules, and of Hugging Face's: decoders with caches, MoE, state spaces, encoders, images, sound.
SAMPLE = [
    *(name for name in models.names() if name.startswith("torch/")),
    *(f"transformers/{name}" for name in ("llama", "gemma3_text", "gpt_oss", "mamba", "t5", "bert", "clip", "whisper")),
]


def test_a_sample_passes_everything() -> None:
    rows = command.run(SAMPLE, budget=0.0)
    failed = {row["model"]: row["failures"] for row in rows if row["outcome"] == "fails"}
    assert not failed, failed
    assert sum(row["outcome"] == "passes" for row in rows) == len(SAMPLE)
    assert "pass everything (100.0 %)" in command.table(command.summary(rows))


@pytest.mark.parametrize("name", ["torch/block", "transformers/olmo"])
def test_the_compile_backend_passes(name: str) -> None:
    row = compiled.row_of(name)
    assert row["outcome"] == "passes" and row["replaced"]["attention"] >= 2, row


def test_a_crash_is_a_row_and_the_rest_goes_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A sitecustomize breaks one model in the worker; those after it are another's."""
    (tmp_path / "sitecustomize.py").write_text(_BREAKING)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    rows = command.run(["torch/mlp", "torch/block"], budget=0.0)
    assert [row["outcome"] for row in rows] == ["fails", "passes"]
    assert "the process died" in rows[0]["failures"]["process"]


_BREAKING = """
import importlib.abc, os, sys
class Breaker(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "zoo.models":
            from zoo import torch_models
            torch_models.MODELS["mlp"] = os.abort
        return None
sys.meta_path.insert(0, Breaker())
"""


class Passing(nn.Module):
    """What a check must see: a part that is passed by, a value that is off, a buffer that moved."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.ReLU()
        self.register_buffer("count", torch.zeros(()))
        self.skips, self.factor = False, 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        return (hidden.clamp(min=0) if self.skips else self.second(hidden)) * self.factor


def test_checks_see_what_is_wrong() -> None:
    model = Passing()
    before = checks.Before(Case(model, (torch.randn(4, 8),), (torch.randn(2, 8),)))
    assert not any(checks.check(before).values())
    model.skips = True
    assert "hooks of second" in " ".join(checks.check(before).values())
    model.skips, model.factor = False, 1.01
    assert {name for name, text in checks.check(before).items() if text} >= {"values", "another shape", "deepcopy"}
    assert checks.check_restored(before)["restore"]
    model.factor = 1.0
    model.count += 1
    assert "count changed" in checks.check(before)["state_dict"]
    assert not checks.check_restored(before)["restore"]


def test_coverage_counts_what_is_left() -> None:
    case = models.build("torch/block")
    found = Coverage(case).after()
    assert {kind: exist for kind, (_, exist) in found.items()} == {
        "norms": 2,
        "mlp": 1,
        "qkv": 1,
        "moe": 0,
        "attention": 1,
    }
    assert all(seen == 0 for seen, _ in found.values())


def test_configurations_become_small_by_their_names() -> None:
    import transformers

    small = shrink.shrunk(transformers.LlamaConfig(num_key_value_heads=8))
    assert (small.hidden_size, small.num_hidden_layers, small.num_attention_heads) == (32, 2, 4)
    assert (small.num_key_value_heads, small.head_dim, small.vocab_size) == (2, 8, 128)
