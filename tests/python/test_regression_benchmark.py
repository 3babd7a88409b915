"""The regression benchmark: the first run is the baseline, a slower one fails and leaves the baseline as it was."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
import regression_benchmark


def wait(seconds: float) -> None:
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


def test_slower_is_told_from_the_same(tmp_path: Path) -> None:
    baseline = tmp_path / "baseline.json"
    same = {"work": lambda: wait(1e-3)}
    assert regression_benchmark.compared(baseline, same, "cpu", 30, 0.5) == []
    (slower,) = regression_benchmark.compared(baseline, {"work": lambda: wait(4e-3)}, "cpu", 30, 0.5)
    assert slower.change == "slower" and slower.ratio > 2
    assert len(regression_benchmark.PerformanceHistory(baseline).runs) == 1
    (change,) = regression_benchmark.compared(baseline, same, "cpu", 30, 0.5)
    assert change.change in ("none", "machine", "faster")
    assert len(regression_benchmark.PerformanceHistory(baseline).runs) == 2


def test_the_command_stores_its_baseline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import torch

    threads = torch.get_num_threads()
    monkeypatch.setattr(sys, "argv", ["regression_benchmark.py", "--quick", "--baseline", str(tmp_path / "b.json")])
    assert regression_benchmark.main() == 0
    assert "stored as the baseline" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", [*sys.argv, "--threshold", "1000"])
    assert regression_benchmark.main() == 0
    assert "0 of 7 slower" in capsys.readouterr().out
    torch.set_num_threads(threads)
