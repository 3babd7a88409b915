"""kernel_pytorch's explain, tune, overlay, record and cache over ctypes; none of it needs torch."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import kernel_pytorch
from kernel_pytorch import _library
from kernel_pytorch.tuning import TuneProgress

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
