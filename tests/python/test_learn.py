"""The course: every step runs and is right, every exercise is open until it is solved, every page is whole."""

from __future__ import annotations

import json
import re
import runpy
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from kernel_pytorch._paths import program_path

LEARN = Path(__file__).resolve().parents[2] / "learn"
sys.path.insert(0, str(LEARN))
from course import build, report, run  # noqa: E402  the folder is not a package of the project
from course.catalog import STEPS, Step  # noqa: E402
from course.lines import Result  # noqa: E402

CPU_STEPS = [step for step in STEPS if not step.needs_gpu]
GPU_STEPS = [step for step in STEPS if step.needs_gpu]


def named(step: Step) -> str:
    return str(step.number)


@pytest.fixture(autouse=True, scope="module")
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KERNEL_PYTORCH_CACHE_DIR", str(tmp_path_factory.mktemp("learn")))
        yield


def assert_complete(result: Result) -> None:
    assert not result.failure
    assert result.problem and result.roofs
    own = [row for row in result.rows if row.name[0].isdigit()]
    assert own and all(row.predicted and row.how and row.seconds > 0 for row in own)


@pytest.mark.parametrize("step", CPU_STEPS, ids=named)
def test_a_step_predicts_and_measures(step: Step) -> None:
    heard: list[str] = []
    assert_complete(run.run(step, quick=True, hear=heard.append))
    kinds = [line.split("\t")[0] for line in heard]
    if step.number != 5:  # whose bf16 part follows the others
        assert max(i for i, kind in enumerate(kinds) if kind == "predicted") < kinds.index("measured")


@pytest.mark.parametrize("step", GPU_STEPS, ids=named)
def test_without_a_gpu_a_step_compiles_and_its_result_is_checked_where_a_cpu_can(step: Step) -> None:
    result = run.preview(step)
    assert not result.failure
    assert len(result.notes) == 1 + step.runs_on_cpu
    assert all("0 bytes spilled" in note or "error" in note for note in result.notes)


def test_without_nvrtc_a_step_says_so_and_is_checked_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KERNEL_PYTORCH_NVRTC", "/no/such/libnvrtc.so")
    monkeypatch.setenv("KERNEL_PYTORCH_CACHE_DIR", str(tmp_path))  # nothing is compiled there yet
    result = run.preview(STEPS[6])
    assert not result.failure and "error" in result.notes[0] and "NVRTC" in result.notes[1]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("step", GPU_STEPS, ids=named)
def test_a_step_runs_on_the_gpu(step: Step) -> None:
    assert_complete(run.run(step, quick=True))


@pytest.mark.parametrize("step", STEPS, ids=named)
def test_exercises_are_open_until_they_are_solved(step: Step, capfd: pytest.CaptureFixture[str]) -> None:
    assert run.check(step, step.exercises) == 1
    assert capfd.readouterr().out.endswith("0 of 3 solved\n")
    assert run.check(step, step.answers) == 0
    assert capfd.readouterr().out.endswith("3 of 3 solved\n")


def test_one_solution_is_one_solution(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    mine = tmp_path / "mine.cpp"
    text = STEPS[10].exercises.read_text()
    mine.write_text(text.replace("return products;", "return overlapped ? (products > exponentials ? products : "
                                 "exponentials) : products + exponentials;"))  # fmt: skip
    assert run.check(STEPS[10], mine) == 1
    assert "solved exercise 2" in capfd.readouterr().out
    mine.write_text("int f( {")
    with pytest.raises(RuntimeError, match="does not compile"):
        run.check(STEPS[10], mine)


def test_a_wrong_kernel_is_noticed(tmp_path: Path) -> None:
    folder = tmp_path / "03_simd"
    folder.mkdir()
    (tmp_path / "support").symlink_to(LEARN / "support")
    source = (LEARN / "03_simd/rms_norm.cpp").read_text()
    (folder / "rms_norm.cpp").write_text(source.replace("for (; i < columns; ++i) sum", "for (; false;) sum").replace(
        "4 * kLanes <= columns", "8 * kLanes <= columns"))  # fmt: skip
    program = build.compile_cpp(folder / "rms_norm.cpp", build.STEP)
    done = subprocess.run([program, "--quick"], capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "wrong\t3 SIMD" in done.stdout


def test_the_command_runs_a_step_and_collects_results(tmp_path: Path) -> None:
    kpt, page, result = program_path("kpt"), tmp_path / "page.html", tmp_path / "result.json"
    listed = subprocess.run([kpt, "learn"], capture_output=True, text=True, check=True).stdout
    assert all(step.title in listed for step in STEPS)
    shown = subprocess.run(
        [kpt, "learn", "2", "--quick", "--json", result, "--html", page], capture_output=True, text=True, check=True
    ).stdout
    assert "1 Python loop" in shown and "predicted  2 plain loop" in shown
    assert json.loads(result.read_text())["rows"][0]["name"] == "2 plain loop"
    assert "kpt learn 12" in page.read_text()
    for words, reason in ((["13"], "steps 1 to 12"), (["3", "--check", "missing.cpp"], "is not there")):
        failed = subprocess.run([kpt, "learn", *words], capture_output=True, text=True, check=False)
        assert failed.returncode == 1 and reason in failed.stderr


def test_a_page_holds_results_and_a_roofline() -> None:
    results = {str(number): {**asdict(run.run(STEPS[number - 1], quick=True)), "date": "today"} for number in (3, 5)}
    text = report.page(results)
    assert text.count("<svg") == 1 and text.count("<circle") == sum(len(each["rows"]) for each in results.values())
    assert re.search(r"<polyline points=\"[\d., ]+\"", text)
    assert all(row["name"] in text for each in results.values() for row in each["rows"])


@pytest.mark.parametrize("step", STEPS, ids=named)
def test_a_page_has_its_parts(step: Step) -> None:
    text = (step.path / "README.md").read_text()
    assert text.startswith(f"# Step {step.number}: {step.title}\n")
    for part in ("## What the hardware does", "## Two numbers", "## Measured", "## Exercises"):
        assert part in text
    assert "bytes" in text and "FLOP" in text
    assert f"[{step.title}]({step.folder}/README.md)" in (LEARN / "README.md").read_text()


def test_a_run_of_steps_is_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(LEARN.parent / "benchmarks"))
    monkeypatch.setattr(
        sys, "argv", ["course.py", "--quick", "--steps", "2", "3", "--output", str(tmp_path / "run.json")]
    )
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(LEARN.parent / "benchmarks/course.py"), run_name="__main__")
    assert end.value.code == 0
    (stored,) = json.loads((tmp_path / "run.json").read_text())["runs"]
    assert list(stored["steps"]) == ["2", "3"] and stored["figures"][0]["what"] == "2 plain loop"
    assert stored["machine"]["commit"]
