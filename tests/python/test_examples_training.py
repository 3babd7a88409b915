"""examples/torch: training under other libraries' loops learns, and leaves the model as it was."""

from __future__ import annotations

import re
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

EXAMPLES = Path(__file__).resolve().parents[2] / "examples/torch"


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the models are small
    yield
    torch.set_num_threads(threads)


def run(name: str, words: list[str], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> str:
    monkeypatch.setattr(sys, "argv", [name, *words])
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    return capfd.readouterr().out


@pytest.mark.parametrize("lora", [False, True], ids=["all parameters", "LoRA"])
def test_the_trainer_of_hugging_face(
    lora: bool, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    for package in ("transformers", "accelerate", *(["peft"] if lora else [])):
        pytest.importorskip(package)
    words = ["--steps", "20", "--budget", "0.5", "--length", "32", *(["--lora"] if lora else [])]
    shown = run("huggingface_trainer.py", words, monkeypatch, capfd)
    found = re.search(r"loss ([\d.]+) at first, ([\d.]+) at the end; saved (.*)", shown)
    assert found and float(found[2]) < float(found[1]) - (0.05 if lora else 0.5), shown
    assert ("adapter_model.safetensors" in found[3]) == lora
    trained, everything = map(int, re.search(r"training ([\d,]+) of ([\d,]+)", shown.replace(",", "")).groups())
    assert (trained < everything / 5) == lora


def test_a_callback_of_lightning(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("lightning")
    shown = run("lightning_callback.py", ["--steps", "120", "--budget", "0.5"], monkeypatch, capfd)
    assert float(re.search(r"([\d.]+)% of new samples are right after 120 steps", shown)[1]) > 75, shown
    assert "against before" in shown  # the report
