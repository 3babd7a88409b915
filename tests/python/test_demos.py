"""The demos run and agree with plain torch, each in this process, so that torch is loaded once."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest
import torch

DEMOS = Path(__file__).resolve().parents[2] / "demos"
EVERY = sorted(path.relative_to(DEMOS) for path in DEMOS.glob("*/*.py"))


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    threads, path = torch.get_num_threads(), list(sys.path)
    yield
    torch.set_num_threads(threads)
    sys.path[:] = path


@pytest.mark.parametrize("demo", EVERY, ids=str)
def test_a_demo_passes(demo: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", [str(demo), "--quick", "--validate"])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(DEMOS / demo))
    shown = capsys.readouterr().out
    assert end.value.code == 0, shown
    assert "  ok " in shown and "FAILED" not in shown


def test_strategies_are_compared(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["shapes.py", "--quick", "--validate", "--compare-strategies"])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(DEMOS / "compiler/shapes.py"))
    assert end.value.code == 0 and "geometric" in capsys.readouterr().out


def test_a_wrong_result_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["ring.py", "--quick", "--validate"])
    monkeypatch.syspath_prepend(str(DEMOS))
    import common

    demo = common.Demo("a demo")
    demo.check("wrong", torch.ones(3), torch.zeros(3) + 2, 0.1)
    with pytest.raises(SystemExit) as end:
        demo.finish()
    assert end.value.code == 1
