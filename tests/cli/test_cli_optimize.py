"""kpt optimize hands over to Python: words, errors, reports."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from running import Kpt

pytest.importorskip("torch")

MODEL = """
import torch

def factory():
    layers = torch.nn.Linear(16, 64), torch.nn.GELU(), torch.nn.Linear(64, 8)
    return torch.nn.Sequential(torch.nn.Embedding(50, 16), *layers)

def wrong():
    return 3
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "my_model.py").write_text(MODEL)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_model_of_the_users(kpt: Kpt, folder: Path) -> None:
    words = [
        "my_model:factory",
        "--input",
        "2x12:int64<50",
        "--budget",
        "0.2",
        "--json",
        "report.json",
        "--html",
        "report.html",
    ]
    result = kpt("optimize", *words, KERNEL_PYTORCH_PYTHON=sys.executable, OMP_NUM_THREADS="1")
    assert result.returncode == 0, result.stderr
    assert "Sequential" in result.stdout
    data = json.loads((folder / "report.json").read_text())
    assert data["model"]["inputs"] == ["2x12 int64"]
    assert data["command"].startswith("kpt optimize my_model:factory")
    assert "<!doctype html>" in (folder / "report.html").read_text()[:100].lower()


@pytest.mark.parametrize(
    "words, message",
    [
        ([], "module:factory"),
        (["my_model:factory"], "--input"),
        (["my_model:factory", "--demo", "gpt", "--input", "2x2"], "--demo"),
        (["my_model:absent", "--input", "2x2"], "absent"),
        (["--demo", "alexnet"], "alexnet"),
    ],
)
def test_mistakes_are_usage_errors(kpt: Kpt, folder: Path, words: list[str], message: str) -> None:
    result = kpt("optimize", *words, KERNEL_PYTORCH_PYTHON=sys.executable)
    assert result.returncode == 2, result.stderr
    assert message in result.stderr


@pytest.mark.parametrize(
    "words, message",
    [
        (["no_such_module:factory", "--input", "2x2"], "no_such_module"),
        (["my_model:wrong", "--input", "2x2"], "nn.Module"),
        (["my_model:factory", "--input", "2y2"], "2y2"),
    ],
)
def test_mistakes_that_python_finds(
    folder: Path,
    words: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    # In this process: what hands over is tested above, and loading torch for each is seconds.
    from kernel_pytorch._optimize.__main__ import main

    monkeypatch.syspath_prepend(folder)
    monkeypatch.delitem(sys.modules, "my_model", raising=False)
    assert main(words) == 2
    assert message in capsys.readouterr().err


def test_a_python_that_is_not_there(kpt: Kpt) -> None:
    result = kpt("optimize", "--demo", "gpt", KERNEL_PYTORCH_PYTHON="/no/such/python")
    assert result.returncode == 1
    assert "/no/such/python" in result.stderr and "KERNEL_PYTORCH_PYTHON" in result.stderr
