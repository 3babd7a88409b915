"""The log of GPU tests counts what happened: a crash and a hang are no silence, and a shaky test is named."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
SAMPLE = """
import os, pathlib, time
import pytest
pytestmark = pytest.mark.gpu
def test_passes(): pass
def test_fails(): assert 1 == 2
def test_skips(): pytest.skip("no such device")
@pytest.mark.parametrize("value", [1, 2])
def test_values(value): assert value < 2
def test_fails_next_to_others():
    seen = pathlib.Path(__file__).with_name("seen")
    if not seen.exists():
        seen.write_text("")
        raise AssertionError("memory was taken")
@pytest.fixture
def broken():
    yield
    raise RuntimeError("not given back")
def test_fixture_fails(broken): pass
"""


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("gpu_tests")
    (folder / "pytest.ini").write_text("[pytest]\nmarkers = gpu\n")
    (folder / "test_sample.py").write_text(SAMPLE)
    head = "import os, time, pytest\npytestmark = pytest.mark.gpu\n"
    (folder / "test_crash.py").write_text(
        head + "def test_before(): pass\ndef test_dies(): os._exit(3)\ndef test_after(): pass\n"
    )
    (folder / "test_hang.py").write_text(head + "def test_before(): pass\ndef test_hangs(): time.sleep(600)\n")
    (folder / "test_import.py").write_text("import a_module_that_nobody_has\n")
    (folder / "test_other.py").write_text("def test_without_a_mark(): assert False\n")
    output = folder / "log.json"
    words = ["--output", output, "--minutes", "5", "--seconds-per-process", "15", "--no-verify", folder]
    done = subprocess.run([sys.executable, ROOT / "tools/gpu_tests.py", *words], capture_output=True, text=True)
    assert done.returncode == 1, done.stdout + done.stderr
    run = dict(json.loads(output.read_text())["runs"][0])
    run["text"] = done.stdout
    return run


def counts(log: dict[str, Any], file: str) -> list[int]:
    row = next(row for row in log["figures"] if row["what"].endswith(file))
    return [int(row[column]) for column in log["columns"][1:5]]


def test_outcomes_are_counted_by_file(log: dict[str, Any]) -> None:
    assert log["columns"] == ["what", "passed", "failed", "skipped", "not reached", "seconds"]
    assert counts(log, "test_sample.py") == [3, 3, 1, 0]  # the one that failed next to others passed alone
    assert counts(log, "test_crash.py") == [2, 1, 0, 0]  # the process died, and the rest ran in another
    assert counts(log, "test_hang.py") == [1, 0, 0, 1]
    assert counts(log, "test_import.py") == [0, 1, 0, 0]
    assert counts(log, "all") == [6, 5, 1, 1]
    assert "test_other.py" not in log["text"]


def test_what_failed_and_what_was_not_reached_is_named(log: dict[str, Any]) -> None:
    failed = {each["name"].split("/")[-1]: each["reason"] for each in log["failed"]}
    assert set(failed) == {
        "test_sample.py::test_fails",
        "test_sample.py::test_values[2]",
        "test_sample.py::test_fixture_fails",
        "test_crash.py::test_dies",
        "test_import.py",
    }
    assert "a_module_that_nobody_has" in failed["test_import.py"]
    missed = {each["name"].split("/")[-1]: each["reason"] for each in log["not reached"]}
    assert set(missed) == {"test_hang.py::test_hangs"}
    assert "stopped after 15 s" in missed["test_hang.py::test_hangs"]
    assert [name.split("/")[-1] for name in log["failed next to others, passed alone"]] == [
        "test_sample.py::test_fails_next_to_others"
    ]


def test_the_log_says_where_it_comes_from(log: dict[str, Any]) -> None:
    machine = log["machine"]
    assert re.match(r"[0-9a-f]{40}", machine["commit"])
    assert machine["command"].startswith("python tools/gpu_tests.py --output log.json")
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", machine["date"])
    assert machine["device"] and machine["torch"]
    assert log["text"].splitlines()[-1].split() == ["all", "6", "5", "1", "1", log["figures"][-1]["seconds"]]
