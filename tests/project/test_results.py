"""Stored results: each says where it comes from and is counted or says why not, and the summary counts rightly."""

from __future__ import annotations

import json
import re
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

import provenance  # noqa: E402 (benchmarks/ is on the path now)
import summary  # noqa: E402
import table  # noqa: E402

RESULTS = sorted((ROOT / "benchmarks/results").iterdir())
JSON_RESULTS = [path for path in RESULTS if path.suffix == ".json"]
COMMIT = re.compile(rf"[0-9a-f]{{40}}({provenance.CHANGED})?")
RECORDED_SINCE = "2026-11-17"  # older runs recorded neither; `provenance` in the file says what was found out later
CONDITIONS_SINCE = "2026-11-19"  # older runs did not record the state of their machine


def complaint_about(machine: dict[str, Any]) -> str:
    """Why a run may not be stored; "" where it may."""
    if not COMMIT.fullmatch(str(machine.get("commit", ""))):
        return f"commit is {machine.get('commit')!r}: set KP_COMMIT where there is no git"
    if not machine.get("command"):
        return "no command"
    if machine["date"] >= RECORDED_SINCE and ("provenance" in machine or machine["command"] == "not recorded"):
        return "a run of today records its commit and command itself"
    if machine["date"] < RECORDED_SINCE and "provenance" not in machine:
        return "commit and command of an old run need a word on where they are from (provenance)"
    if machine["date"] >= CONDITIONS_SINCE and "cpus_busy_with_others" not in machine.get("conditions", {}):
        return "no conditions: the script stores provenance.record()"
    return ""


@pytest.mark.parametrize("path", JSON_RESULTS, ids=lambda path: path.name)
def test_every_run_carries_commit_and_command(path: Path) -> None:
    stored = json.loads(path.read_text())
    assert stored["benchmark"] and stored["runs"]
    for run in stored["runs"]:
        assert complaint_about(run["machine"]) == "", path.name


@pytest.mark.parametrize("path", [path for path in RESULTS if path.suffix != ".json"], ids=lambda path: path.name)
def test_notes_carry_commit_and_command(path: Path) -> None:
    lines = path.read_text().splitlines()
    assert re.match(r"# commit: [0-9a-f]{40}\b", lines[0]) and re.match(r"# command: \S+", lines[1]), path.name


def test_commits_exist_in_the_history() -> None:
    if (
        subprocess.run(["git", "rev-parse", "--is-shallow-repository"], cwd=ROOT, capture_output=True).stdout
        != b"false\n"
    ):
        pytest.skip("the history is not here")
    commits = {run["machine"]["commit"][:40] for path in JSON_RESULTS for run in json.loads(path.read_text())["runs"]}
    for commit in commits:
        known = subprocess.run(["git", "cat-file", "-e", f"{commit}^{{commit}}"], cwd=ROOT, capture_output=True)
        assert known.returncode == 0, f"no commit {commit}"


@pytest.mark.parametrize(
    "change",
    [
        {"commit": ""},
        {"commit": "unknown: no git here, set KP_COMMIT"},
        {"command": ""},
        {"command": "not recorded"},
        {"provenance": "guessed"},
        {"date": "2026-11-01"},
        {"date": CONDITIONS_SINCE},
    ],
)
def test_a_run_without_them_is_refused(change: dict[str, str]) -> None:
    machine = {"commit": "a" * 40, "command": "python benchmarks/x.py", "date": "2026-11-17"}
    assert complaint_about(machine) == ""
    assert complaint_about({**machine, "commit": "a" * 40 + provenance.CHANGED}) == ""
    assert complaint_about({**machine, **change}) != ""


def test_a_new_run_records_both(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KP_COMMIT", raising=False)
    assert COMMIT.fullmatch(provenance.commit())
    monkeypatch.setenv("KP_COMMIT", "b" * 40)
    assert provenance.commit() == "b" * 40
    words = [str(ROOT / "benchmarks/x.py"), "--only", "a b", "--output", "/elsewhere/out.json"]
    assert provenance.command(words) == "python benchmarks/x.py --only 'a b' --output out.json"
    assert complaint_about({**provenance.record(), "date": CONDITIONS_SINCE}) == ""


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.name)
def test_every_file_is_counted_or_says_why_not(path: Path) -> None:
    text = summary.markdown()
    assert f"(benchmarks/results/{path.name})" in text
    if not summary.reason_against(path):
        assert summary.rows_of(path)


def test_every_result_is_shown() -> None:
    shown = set(re.findall(r"<!-- table: benchmarks/results/(\S+) -->", (ROOT / "BENCHMARKS.md").read_text()))
    assert {path.name for path in JSON_RESULTS} <= shown, (
        "BENCHMARKS.md needs a `<!-- table: FILE -->` and `<!-- end -->`"
    )
    missing = shown - {path.name for path in JSON_RESULTS}
    assert missing <= {"h200_tests.json"}  # stored by tools/gpu_tests.py on a machine with a GPU


def test_reasons_belong_to_files() -> None:
    from fnmatch import fnmatch

    for pattern in summary.NO_COMPARISON:
        assert pattern == "*_tests.json" or any(fnmatch(path.name, pattern) for path in RESULTS), pattern


def timing(microseconds: float) -> dict[str, float]:
    return {"median_us": microseconds, "p25_us": microseconds, "p75_us": microseconds}


def test_the_fastest_peer_of_a_row_counts_and_neither_a_copy_nor_our_own_other_way() -> None:
    row = {
        "op": "a",
        "timings": {
            "ours": timing(10),
            "torch": timing(50),
            "torch.compile": timing(8),
            "copy": timing(1),
            "ours, dense": timing(2),
        },
    }
    assert [each.speedup for each in summary.comparisons_of({"rows": [row]})] == [0.8]


def test_rows_of_one_problem_that_name_a_peer_each_are_one_comparison() -> None:
    rows = [
        {"op": "a", "peer": "cudnn", "speedup": 4.0, "timings": {"ours": timing(10), "cudnn": timing(41)}},
        {"op": "a", "peer": "flex", "speedup": 1.5, "timings": {"ours": timing(10), "flex": timing(15)}},
        {"op": "b", "peer": "ours, dense", "speedup": 9.0, "timings": {"ours": timing(10), "ours, dense": timing(90)}},
    ]
    assert summary.comparisons_of({"attention": rows}) == [summary.Comparison("", 1.5, ("cudnn", "flex"))]


def test_other_forms_of_results() -> None:
    def speedups(run: dict[str, Any]) -> list[tuple[str, float]]:
        return [(each.kind, each.speedup) for each in summary.comparisons_of(run)]

    ways = {"eager": 30, "torch.compile": 20, "optimize": 10, "optimize, tolerant": 5}
    models = {"rows": {way: {"median_us": time} for way, time in ways.items()}}
    assert speedups({"results": [models]}) == [("", 2.0), (summary.TOLERANT, 4.0)]
    assert speedups({"traces": [{"seconds": {"ours": [1, 2, 3], "eager": [8], "torch.compile": [4]}}]}) == [("", 2.0)]
    cases = [{"case": "x", "way": "bf16", "us": 30}, {"case": "x", "way": "delayed, accurate: none", "us": 10}]
    assert speedups({"rows": cases}) == [("", 3.0)]
    benchmark = {"rows": [{"kernel": kernel, "median_us": us} for kernel, us in [("a", 9), ("b", 4), ("cublaslt", 2)]]}
    assert speedups({"benchmarks": [benchmark]}) == [("", 0.5)]
    texts = [
        {"what": "a, against torch", "ours": "10 µs (9 to 11)", "torch": "30 µs"},
        {"what": "a, against torch.compile", "ours": "10 µs (9 to 11)", "torch": "0.02 ms"},
        {"what": "b", "ours": "5 ms", "torch": ""},
    ]
    assert speedups({"figures": texts}) == [("", 2.0)]
    columns = [{"what": "a", "ours": "10 µs, 5 TFLOP/s", "grouped_mm": "20 µs, 2.5 TFLOP/s", "compiled": "-"}]
    assert [(each.speedup, each.peers) for each in summary.comparisons_of({"figures": columns})] == [
        (2.0, ("grouped_mm",))
    ]


def test_the_summary_of_a_folder(tmp_path: Path) -> None:
    machine = {"device": "a machine", "commit": "a" * 40}
    rows = [{"op": str(i), "timings": {"ours": timing(10), "torch": timing(us)}} for i, us in enumerate([5, 20, 30])]
    stored = {"benchmark": "torch_norms", "runs": [{"machine": machine, "rows": rows}]}
    (tmp_path / "some.json").write_text(json.dumps(stored))
    (tmp_path / "x_tests.json").write_text("{}")
    text = summary.markdown(tmp_path)
    assert text.startswith(
        "3 comparisons in 1 files, each with the fastest of its peers: 2 at least as fast, 1 slower; "
    )
    assert "| [norms](benchmarks/results/some.json) | torch | 3 | 2.00x | 0.50x | 3.00x |" in text
    assert "[x_tests.json](benchmarks/results/x_tests.json) (counts of tests)" in text
    (tmp_path / "odd.json").write_text(json.dumps({"benchmark": "odd", "runs": [{"machine": machine, "figures": []}]}))
    with pytest.raises(ValueError, match=r"odd\.json.*NO_COMPARISON"):
        summary.markdown(tmp_path)


def test_a_stored_speedup_is_that_of_its_times() -> None:
    """A row's own figure is the ratio of its medians, or the median of the turns' ratios, which lies near it."""
    ratios = []
    for path in JSON_RESULTS:
        for run in json.loads(path.read_text())["runs"]:
            for row in run.get("attention", []) + run.get("products", []):
                times = row["timings"]
                ratios.append(row["speedup"] / (times[row["peer"]]["median_us"] / times["ours"]["median_us"]))
    assert len(ratios) > 50
    assert abs(statistics.median(ratios) - 1) < 0.005
    assert all(0.85 < ratio < 1.18 for ratio in ratios), (min(ratios), max(ratios))


def test_a_log_of_tests_prints_as_a_table() -> None:
    columns = ["what", "passed", "failed", "skipped", "not reached", "seconds"]
    machine = {"device": "d", "torch": "2", "kernel_pytorch": "1", "date": "2026-11-17", "commit": "a" * 40}
    run = {"machine": machine, "columns": columns, "figures": [dict(zip(columns, ["all", "7", "0", "1", "0", "9"]))]}
    assert table.lines_of(run)[-1] == "| all | 7 | 0 | 1 | 0 | 9 |"


def test_a_benchmark_stores_the_figures_that_it_measured(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    output = tmp_path / "ops.json"
    words = ["--quick", "--device", "cpu", "--only", "relu_squared", "--output", output]
    done = subprocess.run(
        [sys.executable, ROOT / "benchmarks/torch_ops.py", *words], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    (run,) = json.loads(output.read_text())["runs"]
    assert complaint_about(run["machine"]) == ""
    assert run["machine"]["command"] == (
        "python benchmarks/torch_ops.py --quick --device cpu --only relu_squared --output ops.json"
    )
    assert run["rows"] and {row["op"] for row in run["rows"]} == {"relu_squared"}
    for row in run["rows"]:
        times = {way: timing["median_us"] for way, timing in row["timings"].items()}
        assert row["speedup"] == pytest.approx(times["torch"] / times["ours"])
        assert row["share"] == pytest.approx(times["copy"] / times["ours"])
        # Gigabytes per second, between a crawl and the caches of any machine: neither the unit nor the size is off.
        assert 0.05 < row["bytes"] / times["ours"] / 1e3 < 5000, row
        for timing in row["timings"].values():
            assert 0 < timing["p25_us"] <= timing["median_us"] <= timing["p75_us"] and timing["turns"] >= 15
    assert [each.speedup for each in summary.comparisons_of(run)] == [row["speedup"] for row in run["rows"]]
