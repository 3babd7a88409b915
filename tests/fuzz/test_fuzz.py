"""A short run of the fuzzer, and that it leaves nothing out; `make fuzz` is the long one."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

import torch

from kernel_pytorch import functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from fuzz import run as running
from fuzz.case import Case, difference
from fuzz.command import main, run_calls
from fuzz.generators import GENERATORS, draw_case
from fuzz.worker import LIMIT_SECONDS

CALLS = 20


def test_every_function_has_a_generator() -> None:
    functions = {name for name in F.__all__ if not isinstance(getattr(F, name), type)}
    assert functions == set(GENERATORS)


def test_a_short_run_finds_nothing() -> None:
    tallies = run_calls(sorted(GENERATORS), seed=0, first=0, calls=CALLS)
    found = {name: tally.findings for name, tally in tallies.items() if tally.findings}
    assert not found, found
    assert all(tally.calls == CALLS for tally in tallies.values())
    assert all(tally.values > CALLS / 4 for tally in tallies.values())
    assert sum(tally.refused for tally in tallies.values()) > CALLS


def test_calls_are_the_same_for_the_same_seed() -> None:
    for name in ("attention", "quantize"):
        first, second = (draw_case(name, 3, 5) for _ in range(2))
        assert first.text() == second.text()
        assert all(torch.equal(a, b) for a, b in zip(first.tensors(), second.tensors()))


def test_wrong_values_and_silent_acceptance_are_findings(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case((torch.tensor([1.0, -2.0]),), {}, torch.relu)
    assert running.run_case("relu", case, lambda _: None) == ("value", "")
    monkeypatch.setattr(F, "relu", lambda x: x * 1.001)
    outcome, text = running.run_case("relu", case, lambda _: None)
    assert outcome == "finding" and "output 0: 2 of 2 wrong" in text
    outcome, text = running.run_case("relu", Case(case.args, {}, torch.relu, refused="it is wrong"), lambda _: None)
    assert (outcome, text) == ("finding", "accepted although it is wrong")

    def raising(x: torch.Tensor) -> None:
        raise RuntimeError("something is odd")

    monkeypatch.setattr(F, "relu", raising)
    assert running.run_case("relu", case, lambda _: None)[1].startswith("refused a valid call")
    refused = Case(case.args, {}, torch.relu, refused="it is wrong")
    assert "names none of relu" in running.run_case("relu", refused, lambda _: None)[1]


def test_differences_follow_the_table() -> None:
    ones = torch.ones(4, dtype=torch.float64)
    case = Case(())
    for dtype, step in ((torch.float32, 1e-4), (torch.bfloat16, 2.0**-5), (torch.float64, 1e-8)):
        assert difference(ones.to(dtype), ones, case, "x") is None
        assert difference((ones + step).to(dtype), ones, case, "x") is not None
    assert difference(torch.tensor([torch.nan]), torch.ones(1), case, "x") is not None
    assert difference(torch.tensor([torch.inf], dtype=torch.float16), torch.tensor([1e6]), case, "x") is None


@pytest.mark.parametrize("death", ["import os; os.abort()", f"import time; time.sleep({LIMIT_SECONDS + 20})"])
def test_crashes_and_hangs_are_findings(death: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sitecustomize breaks relu in the worker; the calls after the one that died are made by another."""
    breaking = "import importlib.abc, sys\n" + BREAKING.replace("DEATH", death)
    (tmp_path / "sitecustomize.py").write_text(breaking)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    tally = run_calls(["relu"], seed=0, first=0, calls=2)["relu"]
    assert tally.calls == 2 and [call for call, _ in tally.findings] == [0]
    expected = "died (" if "abort" in death else "no end after five seconds"
    assert tally.findings[0][1].startswith(expected), tally.findings


BREAKING = """
class Breaker(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "fuzz.generators":
            from kernel_pytorch import functional as F
            relu, argument = F.relu, sys.argv[2] if len(sys.argv) > 2 else ""
            def broken(*args, **options):
                if argument == "0":
                    DEATH
                return relu(*args, **options)
            F.relu = broken
        return None
sys.meta_path.insert(0, Breaker())
"""


def test_the_command_reports_by_its_status(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--calls", "2", "--only", "relu", "--jobs", "1"]) == 0
    assert "1 functions, 2 calls, 0 findings" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["--only", "no_such_function"])
