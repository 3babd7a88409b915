"""budget_seconds bounds the whole call of optimize, and what found no time is said."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

torch = pytest.importorskip("torch")

from kernel_pytorch._optimize import budget as module  # noqa: E402
from kernel_pytorch._optimize import measure  # noqa: E402
from kernel_pytorch._optimize.measure import warm_up  # noqa: E402
from torch import nn  # noqa: E402

import kernel_pytorch  # noqa: E402

pytestmark = pytest.mark.hurried


@pytest.fixture(autouse=True)
def one_thread():
    """Small tensors: on a busy machine threads would wait for one another."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class Slow(nn.Module):
    """Parts that could be replaced, in a model that takes its time whatever the machine does."""

    def __init__(self, parts: int, seconds: float) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.Sequential(nn.LayerNorm(64 + 8 * i), nn.GELU()) for i in range(parts))
        self.seconds = seconds

    def forward(self, x):
        time.sleep(self.seconds)
        return sum(norm(x[..., : 64 + 8 * i]).mean() for i, norm in enumerate(self.norms))


def run(model, seconds):
    x = torch.randn(64, 1024)
    warm_up()
    begin = time.monotonic()
    result = kernel_pytorch.optimize(model.eval(), x, budget_seconds=seconds)
    return result, time.monotonic() - begin


def test_a_budget_too_small_for_one_measurement_ends_after_the_start() -> None:
    result, taken = run(Slow(2, 0.3), 0.5)
    assert taken < 0.75 + 2 * 0.3 + 3.0  # the start: two runs and the machine's roofs
    notes = " ".join(result.report.data["notes"])
    assert "one run of the model takes" in notes and "give budget_seconds" in notes
    assert not result.report.data["replacements"] and str(result.report)


def test_the_whole_call_keeps_to_its_budget() -> None:
    result, taken = run(Slow(60, 0.05), 2.0)
    step = result.report.measurement("before")["median_us"] / 1e6
    assert taken < 3.0 + 3 * step + 3.0
    reasons = [one["reason"] for one in result.report.data["refusals"]]
    assert any(one.startswith("not tried: ") for one in reasons), reasons


def test_shares_keep_back_what_the_end_needs(monkeypatch) -> None:
    now = [100.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    budget = module.Budget(10.0)
    budget.start(0.5)  # the last steps take 8 s, so that at most 7 of 15 are free
    assert budget.left("parts") == pytest.approx(5.5) and budget.left("whole") == pytest.approx(7.0)
    now[0] += 6.5
    assert budget.is_spent("parts") and not budget.is_spent("whole") and not budget.is_too_small


def test_what_can_be_left_out_ends_before_the_whole_call_must(monkeypatch) -> None:
    now = [100.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    budget = module.Budget(10.0)
    budget.start(0.5)
    now[0] += 12.0
    assert budget.may_take(2.9) and not budget.may_take(3.1)


def test_kernels_are_not_listed_where_no_time_is_left(monkeypatch) -> None:
    monkeypatch.setattr(module.Budget, "may_take", lambda self, seconds: False)
    result, _ = run(Slow(2, 0.0), 1.0)
    assert "memory and kernels before are not listed: the budget was spent" in result.report.data["notes"]
    assert result.report.measurement("before")["launches"] is None and str(result.report)


def test_progress_is_one_line_on_a_terminal_and_only_of_long_work(monkeypatch, capsys) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with module.shown_progress(None) as say:
        say("at once")
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(module, "_SILENT_SECONDS", -1.0)
    with module.shown_progress(None) as say:
        say("part 1 of 2")
    told = capsys.readouterr().err
    assert "optimize: part 1 of 2" in told and told.endswith("\r\033[K") and "\n" not in told
    lines: list[str] = []
    with module.shown_progress(lines.append) as say:
        say("mine")
    assert lines == ["mine"] and capsys.readouterr().err == ""


def test_the_profiler_says_nothing() -> None:
    program = (
        "import torch, kernel_pytorch\n"
        "kernel_pytorch.optimize(torch.nn.LayerNorm(64).eval(), torch.randn(8, 64), budget_seconds=0.5)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    assert done.stderr == ""


def test_runs_that_take_long_get_the_turns_that_a_verdict_wants_while_there_is_time() -> None:
    torch.set_num_threads(2)  # by the clock on the wall

    def turns(most_seconds: float) -> int:
        way = (lambda: None, lambda: time.sleep(0.011))
        ways = {"before": way, "after": way}
        found = measure.interleaved(ways, torch.device("cpu"), 0.001, most_seconds=most_seconds)
        return found["after"].samples

    assert turns(0.0) == measure.FEWEST and turns(60.0) == measure.LEAST
