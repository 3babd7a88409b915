"""Histories of timings: what is slower is told from noise and from the machine, by the statistic that kpt has."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest
from kernel_pytorch._library import KernelPyTorchError
from kernel_pytorch._paths import program_path
from kernel_pytorch.utils.performance import PerformanceHistory, compare_files


def samples(us: float, machine: float = 1.0, count: int = 60, seed: int = 0) -> tuple[list[float], list[float]]:
    """Times with a tail, and those of a copy in the same rounds."""
    draw = random.Random(f"{us} {machine} {seed}")
    times = [us * machine * (1 + 0.02 * draw.expovariate(1)) for _ in range(count)]
    return times, [50 * machine * (1 + 0.02 * draw.expovariate(1)) for _ in range(count)]


def history_of(path: Path, *runs: tuple[float, float]) -> PerformanceHistory:
    history = PerformanceHistory(path)
    for seed, (us, machine) in enumerate(runs):
        times, control = samples(us, machine, seed=seed)
        history.record({"block": times, "steady": samples(30, machine, seed=seed)[0]}, control)
    return history


@pytest.mark.parametrize(
    ("us", "machine", "change"),
    [(100, 1, "none"), (102, 1, "none"), (115, 1, "slower"), (85, 1, "faster"), (100, 1.3, "machine")],
)
def test_changes_are_told_apart(tmp_path: Path, us: float, machine: float, change: str) -> None:
    history = history_of(tmp_path / "history.json", (100, 1), (100, 1), (us, machine))
    found = {row.name: row for row in history.compare()}
    assert found["block"].change == change
    assert found["steady"].change == ("none" if machine == 1 else "machine")
    assert found["block"].ratio == pytest.approx(us * machine / 100, rel=0.02)
    assert [row.name for row in history.regressions()] == (["block"] if change == "slower" else [])


def test_baseline_can_be_the_newest_runs_only(tmp_path: Path) -> None:
    history = history_of(tmp_path / "history.json", (50, 1), (50, 1), (100, 1), (100, 1))
    assert history.compare(baseline_runs=1)[0].change == "none"
    assert history.regressions()[0].name == "block"
    with pytest.raises(ValueError, match="baseline_runs is 0"):
        history.compare(baseline_runs=0)


def test_kpt_says_the_same(tmp_path: Path) -> None:
    before, after = tmp_path / "before.json", tmp_path / "after.json"
    history_of(before, (100, 1))
    history_of(after, (120, 1))
    here = compare_files(before, after)
    program = str(program_path("kpt"))
    done = subprocess.run([program, "bench", "--compare", before, after, "--json"], capture_output=True, text=True)
    assert done.returncode == 1, done.stderr
    rows = json.loads(done.stdout)["rows"]
    assert [row["change"] for row in rows] == [row.change for row in here] == ["slower", "none"]
    assert [row["p"] for row in rows] == [row.p for row in here]
    again = subprocess.run([program, "bench", "--compare", before, before], capture_output=True, text=True)
    assert again.returncode == 0 and "0 slower, 0 faster" in again.stdout


def test_measuring_takes_a_copy_along(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    history = PerformanceHistory(tmp_path / "history.json")
    assert history.compare() == [] and history.runs == []
    taken = history.measure({"nap": lambda: time.sleep(0.0005)}, device="cpu", iterations=30)
    assert len(taken["nap"]) == 30
    (run,) = history.runs
    (series,) = run["series"]
    assert series["name"] == "nap" and len(series["control_us"]) == 30 and run["fingerprint"]
    history.measure({"nap": lambda: time.sleep(0.02)}, device="cpu", iterations=30)
    assert [row.name for row in history.regressions()] == ["nap"], history.compare()


def test_processes_that_record_at_once_lose_nothing(tmp_path: Path) -> None:
    script = (
        "import sys\nfrom kernel_pytorch.utils.performance import PerformanceHistory\n"
        "for i in range(5): PerformanceHistory(sys.argv[1]).record({sys.argv[2]: [1.0, 2.0]})\n"
    )
    path = tmp_path / "history.json"
    workers = [subprocess.Popen([sys.executable, "-c", script, str(path), name]) for name in "abc"]
    assert [worker.wait(60) for worker in workers] == [0, 0, 0]
    names = [run["series"][0]["name"] for run in PerformanceHistory(path).runs]
    assert sorted(names) == sorted("abc" * 5)


@pytest.mark.parametrize("values", [[], [0.0], [-1.0], [float("inf")], [float("nan")]])
def test_what_is_no_time_is_not_kept(tmp_path: Path, values: list[float]) -> None:
    history = PerformanceHistory(tmp_path / "history.json")
    with pytest.raises((KernelPyTorchError, ValueError)):
        history.record({"block": values})
    assert not history.path.exists()


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "{}", '{"format": "kernel_pytorch samples", "version": 9, "runs": []}']
)
def test_other_files_are_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "history.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"history\.json"):
        PerformanceHistory(path).record({"block": [1.0]})
    assert path.read_text() == text
