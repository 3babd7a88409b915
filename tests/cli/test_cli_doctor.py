"""kpt doctor: what it looks at, that every family of ops is tested, what it learns from Python, and each cure."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from running import Kpt

ROOT = Path(__file__).resolve().parents[2]


def json_of(result: subprocess.CompletedProcess[str]) -> Any:
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


def findings_of(report: Any, section: str) -> list[Any]:
    return [finding for finding in report["findings"] if finding["section"] == section]


def test_doctor_examines_this_machine(kpt: Kpt) -> None:
    report = json_of(kpt("doctor", "--json"))
    assert {finding["section"] for finding in report["findings"]} >= {"CPU", "CUDA", "NVRTC", "caches", "self-test"}
    cpu_test = report["self_tests"][0]
    assert cpu_test["device"] == "cpu" and cpu_test["passed"]
    assert cpu_test["copy_gigabytes_per_second"] > 0.1
    assert {option["variable"] for option in report["options"]} >= {"KERNEL_PYTORCH_CACHE_DIR", "NO_COLOR"}
    for finding in report["findings"]:
        assert (finding["health"] == "problem") == bool(finding["cure"])


def test_doctor_ends_with_a_block_to_paste(kpt: Kpt, tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    result = kpt(
        "doctor",
        "--no-self-test",
        "--python-seconds",
        "0",
        HOME=str(home),
        KERNEL_PYTORCH_CACHE_DIR=str(home / "cache"),
    )
    assert result.returncode == 0
    before, block, end = result.stdout.split("```")
    assert "✓" in before
    assert end.strip() == ""
    assert "caches: measurements: ~/cache/" in block
    assert str(home) not in result.stdout


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_doctor_names_the_cure_of_an_unwritable_cache(kpt: Kpt, tmp_path: Path) -> None:
    locked = tmp_path / "locked"
    locked.mkdir(mode=0o500)
    result = kpt("doctor", "--no-self-test", "--python-seconds", "0", KERNEL_PYTORCH_CACHE_DIR=str(locked))
    assert "fix: export KERNEL_PYTORCH_CACHE_DIR=" in result.stdout


def test_doctor_names_the_cure_of_a_cache_that_is_a_file(kpt: Kpt, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("in the way")
    result = kpt("doctor", "--no-self-test", "--python-seconds", "0", KERNEL_PYTORCH_CACHE_DIR=str(file / "cache"))
    assert result.returncode == 0
    assert "✗" in result.stdout
    assert "fix: export KERNEL_PYTORCH_CACHE_DIR=" in result.stdout
    assert "PROBLEM: " in result.stdout


# On CPUs, where weights are packed once and a plan of a few numbers is a loop.
REFERENCE_ALONE = {"sparse_compress", "sparse_decompress", "plan_decode"}


def test_doctor_tests_an_op_of_every_family(kpt: Kpt) -> None:
    listed = [each["op"] for each in json_of(kpt("kernels", "--json"))["operations"]]
    families = {re.sub("_(forward|backward|rescale)$", "", op) for op in listed}
    test = json_of(kpt("doctor", "--python-seconds", "0", "--json"))["self_tests"][0]
    tested = {re.sub("_(forward|backward|rescale)$", "", each["op"]): each for each in test["ops"]}
    assert set(tested) | {re.sub("_(forward|backward|rescale)$", "", op) for op in test["not_reached"]} == families
    assert len(tested) >= 10  # on a machine that is busy with other work the time may be up before the last
    for family, each in tested.items():
        assert each["failures"] == []
        if family in REFERENCE_ALONE:
            continue
        assert each["kernel"] not in ("", "reference"), each  # compared with the reference: another kernel was
        assert each["problem"], each


def test_doctor_reports_torch_the_adapter_and_jax(kpt: Kpt) -> None:
    torch = pytest.importorskip("torch")
    report = json_of(kpt("doctor", "--no-self-test", "--json", KERNEL_PYTORCH_PYTHON=sys.executable))
    (python,), (found,), (adapter,) = (findings_of(report, name) for name in ("Python", "torch", "adapter"))
    assert {python["health"], found["health"], adapter["health"]} == {"good"}
    assert report["version"] in python["text"]
    assert torch.__version__ in found["text"]
    assert re.fullmatch(
        rf"{re.escape(report['version'])}, built with torch \d+\.\d+\S*, loaded with torch "
        rf"{re.escape(torch.__version__)}: rms_norm agrees with torch",
        adapter["text"],
    )
    assert len(findings_of(report, "jax")) == 1


def python_without_torch() -> str:
    """The Python that the virtual environment was made from."""
    program = Path(sys.base_prefix) / "bin/python3"
    if not program.exists() or subprocess.run([program, "-c", "import torch"], capture_output=True).returncode == 0:
        pytest.skip(f"{program} is not there, or has torch")
    return str(program)


def test_without_torch_doctor_and_optimize_say_it_in_one_sentence(kpt: Kpt) -> None:
    python = python_without_torch()
    report = json_of(kpt("doctor", "--no-self-test", "--json", KERNEL_PYTORCH_PYTHON=python, PYTHONPATH=""))
    (finding,) = findings_of(report, "torch")
    assert finding["health"] == "note" and "pip install 'torch>=2.11'" in finding["text"]
    assert findings_of(report, "adapter") == []
    result = kpt("optimize", "--demo", "vit", "--budget", "1", KERNEL_PYTORCH_PYTHON=python, PYTHONPATH="")
    assert result.returncode == 1
    (line,) = result.stderr.splitlines()
    assert line.startswith("kpt: optimize: kernel_pytorch ") and "run `pip install 'torch>=2.11'`" in line
    assert result.stdout == ""


@pytest.mark.parametrize(
    ("script", "wanted", "cure"),
    [
        ("sleep 60", "no answer within 1 s", "kpt doctor --python-seconds 300"),
        ("echo something odd; exit 3", "exit code 3: something odd", "export KERNEL_PYTORCH_PYTHON="),
        ("kill -9 $$", "killed by signal 9", "export KERNEL_PYTORCH_PYTHON="),
        (None, "there is no such program", "export KERNEL_PYTORCH_PYTHON="),
    ],
)
def test_a_python_that_does_not_answer_is_a_finding(
    kpt: Kpt, tmp_path: Path, script: str | None, wanted: str, cure: str
) -> None:
    python = tmp_path / "python"
    if script is not None:
        python.write_text(f"#!/bin/sh\n{script}\n")
        python.chmod(0o755)
    arguments = ("doctor", "--no-self-test", "--python-seconds", "1", "--json")
    report = json_of(kpt(*arguments, KERNEL_PYTORCH_PYTHON=str(python)))
    (finding,) = findings_of(report, "Python")
    assert finding["health"] == "problem" and wanted in finding["text"] and cure in finding["cure"]


def environment_lines(*words: str, **variables: str) -> list[list[str]]:
    done = subprocess.run(
        [sys.executable, "-m", "kernel_pytorch._environment", *words],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        check=True,
    )
    return [line.split("\t") for line in done.stdout.splitlines() if line.count("\t") == 3]


def test_another_version_of_the_package_is_a_problem() -> None:
    (first, *_) = environment_lines("9.9.9", "0")
    assert first[:2] == ["problem", "Python"] and "this kpt is 9.9.9" in first[2] and first[3] == "pip install ."


def test_torch_that_came_after_the_installation(tmp_path: Path) -> None:
    """A package without its adapter, as `pip install .` leaves it where there is no torch."""
    pytest.importorskip("torch")
    package = tmp_path / "python/kernel_pytorch"
    shutil.copytree(ROOT / "python/kernel_pytorch", package, ignore=shutil.ignore_patterns("__pycache__"))
    alone = {"PYTHONPATH": str(tmp_path / "python")}
    done = subprocess.run(
        [sys.executable, "-c", "import kernel_pytorch.functional"],
        env={**os.environ, **alone},
        capture_output=True,
        text=True,
    )
    message = done.stderr.splitlines()[-1]
    assert "built without torch" in message and "run `pip install .` in the checkout again, which builds it" in message
    finding = next(line for line in environment_lines("0.0", "0", **alone) if line[1] == "torch")
    assert finding[0] == "problem" and "built without torch" in finding[2] and finding[3] == "pip install ."
    code = "import sys; sys.modules['torch'] = None; import kernel_pytorch.functional"
    done = subprocess.run([sys.executable, "-c", code], env={**os.environ, **alone}, capture_output=True, text=True)
    assert "`pip install 'torch>=2.11'`, then `pip install .` in the checkout" in done.stderr.splitlines()[-1]
