"""kernel_pytorch's explain, tune, overlay, record and cache over ctypes; none of it needs torch."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

import kernel_pytorch
from kernel_pytorch import _library
from kernel_pytorch.tuning import AutotuneProgress, TuneProgress, autotune_scope

SHAPE = (32, 256)


@pytest.fixture(autouse=True)
def empty_store() -> None:
    kernel_pytorch.cache.clear()


def test_versions_agree() -> None:
    assert _library.version() == kernel_pytorch.__version__


def test_kernels() -> None:
    listed = kernel_pytorch.kernels()
    assert {"rms_norm_forward", "layer_norm_backward"} <= set(listed)
    assert all(names[-1] == "reference" for names in listed.values())
    assert list(kernel_pytorch.kernels("rms_norm")) == ["rms_norm_forward", "rms_norm_backward"]


def test_explain_shows_every_candidate() -> None:
    explanation = kernel_pytorch.explain("rms_norm_forward", SHAPE, "bfloat16", residual=True)
    assert explanation.tier == "heuristic"
    assert [each.kernel for each in explanation.candidates] == kernel_pytorch.kernels()["rms_norm_forward"]
    assert all(each.supported or each.reason for each in explanation.candidates)
    text = str(explanation)
    assert explanation.kernel in text
    assert "by tier heuristic" in text


def test_explain_takes_torch_words() -> None:
    torch = pytest.importorskip("torch")
    by_words = kernel_pytorch.explain("rms_norm_forward", SHAPE, "bf16", "cpu", weight_dtype="fp32")
    by_torch = kernel_pytorch.explain(
        "rms_norm_forward", torch.Size(SHAPE), torch.bfloat16, torch.device("cpu"), weight_dtype=torch.float32
    )
    assert by_words == by_torch


def test_errors_name_the_cure() -> None:
    with pytest.raises(kernel_pytorch.KernelPyTorchError, match="did you mean rms_norm_forward") as caught:
        kernel_pytorch.explain("rms_norm_foward", SHAPE)
    assert caught.value.code == "invalid argument"
    with pytest.raises(kernel_pytorch.KernelPyTorchError, match="rms_norm_forward and rms_norm_backward; say which"):
        kernel_pytorch.explain("rms_norm", SHAPE)
    with pytest.raises(kernel_pytorch.KernelPyTorchError, match="fp12"):
        kernel_pytorch.explain("rms_norm_forward", SHAPE, "fp12")


def test_tune_remembers_and_cache_round_trips(tmp_path: Path) -> None:
    seen: list[TuneProgress] = []
    report = kernel_pytorch.tune("rms_norm_forward", SHAPE, budget_seconds=5, progress=seen.append)
    assert seen[-1].done == seen[-1].total
    assert report.complete
    best = report.rows[0]
    explanation = kernel_pytorch.explain("rms_norm_forward", SHAPE)
    assert (explanation.kernel, explanation.config, explanation.tier) == (best.kernel, best.config, "memory")
    (measurement,) = kernel_pytorch.cache.list()
    assert (measurement.key, measurement.kernel, measurement.config) == (report.key, best.kernel, best.config)

    file = tmp_path / "measured.json"
    text = kernel_pytorch.cache.export(file)
    assert file.read_text() == text
    assert kernel_pytorch.cache.info().store_rows == 1
    assert kernel_pytorch.cache.clear("rms_norm_forward") == (1, 0)
    assert kernel_pytorch.cache.list() == ()
    assert kernel_pytorch.cache.import_(file) == 1
    assert kernel_pytorch.cache.clear()[0] == 1
    assert kernel_pytorch.cache.import_(text.encode()) == 1
    assert kernel_pytorch.cache.list() == (measurement,)
    assert not kernel_pytorch.cache.verify()


def test_a_bad_import_writes_nothing() -> None:
    for hostile in (b"", b"{}", b"\xff\x00", b"[" * 50_000):
        with pytest.raises(kernel_pytorch.KernelPyTorchError):
            kernel_pytorch.cache.import_(hostile)
    assert kernel_pytorch.cache.list() == ()


def test_an_exception_in_progress_stops_tuning_and_arrives() -> None:
    calls: list[TuneProgress] = []

    def refuse(progress: TuneProgress) -> None:
        calls.append(progress)
        raise ValueError("enough")

    with pytest.raises(ValueError, match="enough"):
        kernel_pytorch.tune("rms_norm_forward", SHAPE, progress=refuse)
    assert len(calls) == 1
    assert len(kernel_pytorch.cache.list()) == 1  # what was measured until then


def test_ctrl_c_keeps_what_was_measured_and_is_raised() -> None:
    def press(progress: TuneProgress) -> None:
        if progress.done == 1:
            os.kill(os.getpid(), signal.SIGINT)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job starts with it ignored
    try:
        with pytest.raises(KeyboardInterrupt):
            kernel_pytorch.tune("rms_norm_forward", SHAPE, progress=press)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
    assert len(kernel_pytorch.cache.list()) == 1


def test_tune_works_off_the_main_thread() -> None:
    reports = []
    thread = threading.Thread(target=lambda: reports.append(kernel_pytorch.tune("rms_norm_forward", SHAPE)))
    thread.start()
    thread.join()
    assert reports[0].rows


def test_overlays_nest_and_end() -> None:
    def chosen() -> tuple[str, str]:
        explanation = kernel_pytorch.explain("rms_norm_forward", SHAPE)
        return explanation.kernel, explanation.tier

    before = chosen()
    with kernel_pytorch.overlay({"rms_norm_forward": "reference"}):
        assert chosen() == ("reference", "overlay")
        with kernel_pytorch.overlay({"rms_norm_forward": before[0]}):
            assert chosen() == (before[0], "overlay")
        assert chosen() == ("reference", "overlay")
    assert chosen() == before
    with (
        pytest.raises(kernel_pytorch.KernelPyTorchError, match=r"it has .*reference"),
        kernel_pytorch.overlay({"rms_norm_forward": "fastest"}),
    ):
        pass
    assert chosen() == before


def test_calls_are_recorded_and_autotuned() -> None:
    torch = pytest.importorskip("torch")
    x = torch.randn(24, 96)
    with kernel_pytorch.record() as decisions:
        for _ in range(3):
            kernel_pytorch.functional.rms_norm(x)
    (decision,) = decisions
    assert (decision.key.op, decision.tier, decision.count) == ("rms_norm_forward", "heuristic", 3)
    with kernel_pytorch.autotune(), kernel_pytorch.record() as decisions:
        kernel_pytorch.functional.rms_norm(x)
        kernel_pytorch.functional.rms_norm(x)
    assert [each.tier for each in decisions] == ["autotune", "memory"]
    with kernel_pytorch.overlay({"rms_norm_forward": "reference"}), kernel_pytorch.record() as decisions:
        kernel_pytorch.functional.rms_norm(x)
    assert [(each.kernel, each.tier) for each in decisions] == [("reference", "overlay")]


def problem_of(rows: int, columns: int = 512) -> str:
    """As functional.rms_norm of one tensor asks: no weight, and no statistics kept for a gradient."""
    return kernel_pytorch.explain("rms_norm_forward", (rows, columns), weight=0, stats=0).key.problem


def test_autotune_keeps_to_its_budget_and_names_what_it_left() -> None:
    torch = pytest.importorskip("torch")
    begin = time.monotonic()
    with kernel_pytorch.autotune(budget_seconds=0.15) as report:
        for columns in range(512, 612):  # several times what a quick machine tunes in that time
            kernel_pytorch.functional.rms_norm(torch.randn(1, columns))
    assert time.monotonic() - begin < 0.15 + 0.5  # one candidate more at most, on a busy machine
    assert report.tuned and report.untuned
    assert len(report.tuned) + len(report.untuned) == 100
    assert all("budget of 0.15 s was spent" in one.reason for one in report.untuned)
    assert report.untuned[-1].key.problem == problem_of(1, 611)
    assert len(kernel_pytorch.cache.list()) == len(report.tuned)
    first = report.tuned[0]
    assert first.key.problem == problem_of(1)
    assert first.before.name == "cpu stores=cached"
    assert 0 < first.after.median_us <= first.before.median_us
    assert first.before.samples >= 3
    assert str(report).count("untuned, the budget") == len(report.untuned)
    with kernel_pytorch.autotune(budget_seconds=0) as report:
        kernel_pytorch.functional.rms_norm(torch.randn(1, 611))
    assert not report.tuned
    assert len(report.untuned) == 1


def test_autotune_of_named_problems_that_remembers_nothing() -> None:
    torch = pytest.importorskip("torch")
    request = {"remembers": False, "only": [{"op": "rms_norm_forward", "problem": problem_of(8), "seconds": 5}]}
    with autotune_scope(request) as report, kernel_pytorch.record() as decisions:
        for rows in (7, 8, 8):
            kernel_pytorch.functional.rms_norm(torch.randn(rows, 512))
    assert [one.key.problem for one in report.tuned] == [problem_of(8)]
    assert not report.untuned
    assert {one.tier for one in decisions} == {"heuristic"}
    assert all(one.candidates >= 2 and one.bytes > 0 for one in decisions)
    assert kernel_pytorch.cache.list() == ()


def test_autotune_tells_where_it_is() -> None:
    torch = pytest.importorskip("torch")
    seen: list[AutotuneProgress] = []
    with kernel_pytorch.autotune(budget_seconds=5, progress=seen.append) as report:
        for rows in (3, 4):
            kernel_pytorch.functional.rms_norm(torch.randn(rows, 512))
    assert {(one.op, one.problem) for one in seen} == {("rms_norm_forward", problem_of(rows)) for rows in (3, 4)}
    assert [one.problems_done for one in seen] == sorted(one.problems_done for one in seen)
    assert all(0 < a.seconds <= b.seconds for a, b in itertools.pairwise(seen))
    assert seen[0].budget_seconds == 5
    assert seen[-1].candidate.best == report.tuned[-1].after.name


def test_an_exception_of_autotunes_progress_arrives_on_leaving() -> None:
    torch = pytest.importorskip("torch")

    def refuse(progress: AutotuneProgress) -> None:
        raise ValueError("enough")

    done = []
    with pytest.raises(ValueError, match="enough"), kernel_pytorch.autotune(progress=refuse) as report:
        for rows in (3, 4):
            done.append(kernel_pytorch.functional.rms_norm(torch.randn(rows, 512)))
    assert len(done) == 2
    assert len(report.untuned) == 1


def test_ctrl_c_while_a_call_tunes_is_raised_when_the_call_is_done() -> None:
    torch = pytest.importorskip("torch")

    def press(progress: AutotuneProgress) -> None:
        if progress.problems_done == 1 and progress.candidate.done == 1:
            os.kill(os.getpid(), signal.SIGINT)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    rows = 0
    try:
        with pytest.raises(KeyboardInterrupt), kernel_pytorch.autotune(progress=press) as report:
            begin = time.monotonic()
            while time.monotonic() - begin < 20:
                rows += 1
                kernel_pytorch.functional.rms_norm(torch.randn(rows % 16 + 1, 512))
        assert time.monotonic() - begin < 10
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
    assert 1 <= len(report.tuned) <= 2
    assert all("interrupted" in one.reason for one in report.untuned)
    with kernel_pytorch.record() as decisions:  # the scope is gone
        kernel_pytorch.functional.rms_norm(torch.randn(77, 512))
    assert decisions[0].tier == "heuristic"


def test_ctrl_c_between_calls_is_as_ever() -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt), kernel_pytorch.autotune():
            signal.raise_signal(signal.SIGINT)
            raise AssertionError("not reached")
    finally:
        signal.signal(signal.SIGINT, before)


def test_importing_loads_neither_torch_nor_the_library() -> None:
    program = (
        "import sys, kernel_pytorch\n"
        "from kernel_pytorch import explain, tune, hardware, cache\n"
        "assert 'torch' not in sys.modules\n"
        "assert not any('libkernel_pytorch' in line for line in open('/proc/self/maps'))\n"
        "explain('rms_norm_forward', (4, 64))\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
