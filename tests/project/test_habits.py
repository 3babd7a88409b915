"""Files that a forge or a reader of citations reads agree with the project."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def test_the_citation_has_the_version() -> None:
    version = re.search(r"project\(kernel_pytorch VERSION ([0-9.]+)", (ROOT / "CMakeLists.txt").read_text())
    assert version and f"\nversion: {version[1]}\n" in (ROOT / "CITATION.cff").read_text()


def test_the_workflow_runs_the_gate() -> None:
    yaml = pytest.importorskip("yaml")
    workflow = yaml.safe_load((ROOT / ".github/workflows/gate.yml").read_text())
    (job,) = workflow["jobs"].values()
    commands = [step["run"] for step in job["steps"] if "run" in step]
    assert commands == [".ci/run"] and (ROOT / commands[0]).stat().st_mode & 0o100


def test_templates_name_commands_that_exist() -> None:
    text = "".join(path.read_text() for path in (ROOT / ".github").rglob("*.md"))
    commands = set(re.findall(r"`kpt (\w+)", text))
    sources = {path.stem for path in (ROOT / "kernel_pytorch/cli").glob("*.cpp")}
    assert commands and commands <= sources
