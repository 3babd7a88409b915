"""Gains too small to be told one by one: the whole decides on all of them together."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from forced_verdicts import by_clocks_alone  # noqa: E402
from kernel_pytorch._optimize import choose, demo_models, measure, together, whole  # noqa: E402
from kernel_pytorch._optimize.budget import Budget  # noqa: E402
from kernel_pytorch._optimize.changes import Changes  # noqa: E402
from kernel_pytorch._optimize.measure import Timing  # noqa: E402
from kernel_pytorch._optimize.sites import Call, Proposal, Way  # noqa: E402
from test_optimize import one_thread, optimize, patterns  # noqa: E402, F401

import kernel_pytorch  # noqa: E402


def timings(after):
    return {"before": Timing(1000.0, 999.0, 1001.0, 9), "after": Timing(after, after - 1, after + 1, 9)}


@pytest.fixture
def clocks(monkeypatch):
    """What the clock says of each part, and of the whole with all of them."""

    def set_to(part, all_parts):
        monkeypatch.setattr(choose, "interleaved", lambda *_: timings(part))
        monkeypatch.setattr(together, "interleaved", lambda *_: timings(all_parts))
        monkeypatch.setattr(choose, "judge", by_clocks_alone)
        monkeypatch.setattr(whole, "pays", lambda *_: True)

    return set_to


def sample():
    torch.manual_seed(0)
    return demo_models.Llama(64, 2, 4, 2, 96, 32), torch.randint(96, (2, 16))


def note(result):
    return next((line for line in result.report.data["notes"] if "small gain" in line), "")


@pytest.mark.parametrize("goal", ["train", "inference"])
def test_they_are_taken_where_the_whole_is_faster(goal, clocks) -> None:
    clocks(996.0, 990.0)
    model, x = sample()
    before = model(x)
    result = optimize(model, x, goal=goal)
    assert "rms_norm" in patterns(result) and "were taken" in note(result), result.report
    refused = {(one["path"], one["pattern"]) for one in result.report.data["refusals"]}
    assert not refused & {(one["path"], one["pattern"]) for one in result.report.data["replacements"]}
    torch.testing.assert_close(model(x), before, rtol=1e-3, atol=1e-3)
    kernel_pytorch.restore(model)
    assert torch.equal(model(x), before)


def test_they_are_left_where_it_is_not(clocks) -> None:
    clocks(996.0, 999.0)
    model, x = sample()
    result = optimize(model, x, goal="inference")
    assert not patterns(result) and "were left" in note(result)
    assert all("forward" not in vars(part) for part in model.modules())


def test_a_part_that_is_slower_is_not_among_them(clocks) -> None:
    clocks(1001.0, 900.0)
    model, x = sample()
    result = optimize(model, x, goal="inference")
    assert not patterns(result) and not note(result)


def two_clocks(monkeypatch, device, calls):
    """A GPU's own time of every part, and that of its calls."""
    told = [tuple(timings(device).values()), tuple(timings(calls).values())]
    monkeypatch.setattr(choose.Chooser, "_time", lambda *_: told)
    monkeypatch.setattr(choose, "judge", by_clocks_alone)
    monkeypatch.setattr(whole, "pays", lambda *_: True)


@pytest.mark.parametrize(("all_parts", "kept"), [(990.0, True), (1010.0, False)])
def test_parts_with_longer_calls_are_left_to_the_whole(all_parts, kept, monkeypatch) -> None:
    two_clocks(monkeypatch, device=900.0, calls=1100.0)
    monkeypatch.setattr(together, "interleaved", lambda *_: timings(all_parts))
    model, x = sample()
    before = model(x)
    result = optimize(model, x, goal="inference")
    assert bool(patterns(result)) == kept
    words = "1.11x alone by the device's own time, not kept: calls take longer, the whole is 0.99x"
    assert any(words in one["reason"] for one in result.report.data["refusals"]) != kept
    torch.testing.assert_close(model(x), before, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("device", "calls", "kept"), [(1000.0, 900.0, True), (1100.0, 900.0, False), (900.0, 1000.0, True)]
)
def test_less_time_of_one_clock_and_no_more_of_the_other_is_enough(device, calls, kept, monkeypatch) -> None:
    two_clocks(monkeypatch, device, calls)
    model, x = sample()
    result = optimize(model, x, goal="inference")
    assert bool(patterns(result)) == kept
    if not kept:
        reasons = [one["reason"] for one in result.report.data["refusals"]]
        assert any("1100 us against 1000 us as it is by the device's own time (0.91x)" in one for one in reasons)


def test_a_ratio_above_one_is_not_called_slower(clocks) -> None:
    clocks(996.0, 1001.0)
    model, x = sample()
    reasons = [one["reason"] for one in optimize(model, x, goal="inference").report.data["refusals"]]
    told = [one for one in reasons if "us against" in one]
    assert told and all(one.startswith("no clear gain of its own. ") for one in told)


def test_turns_of_the_device_alone_are_timed_on_a_cpu_as_others() -> None:
    device, runs = torch.device("cpu"), []
    found = measure.interleaved({"one": (lambda: None, lambda: runs.append(1))}, device, 0.01, queued=True)
    assert found["one"].samples >= measure.LEAST and len(runs) > found["one"].samples


@pytest.mark.parametrize(("seen_us", "expected"), [(7.0, 7.0), (0.0, 50.0)])
def test_a_run_too_long_for_the_queue_is_timed_by_its_kernels(seen_us, expected, monkeypatch) -> None:
    monkeypatch.setattr(measure, "_asking_us", lambda *_: 2 * measure._QUEUE_US)
    monkeypatch.setattr(measure, "kernels_us", lambda *_: seen_us)
    monkeypatch.setattr(measure, "once_us", lambda *_: 50.0)  # what is left where no profiler sees kernels
    way = {"one": (lambda: None, lambda: None)}
    assert measure.interleaved(way, torch.device("cpu"), 0.01, queued=True)["one"].median_us == expected
    assert measure.interleaved(way, torch.device("cpu"), 0.01, queued=False)["one"].median_us == 50.0


@pytest.mark.gpu
def test_kernels_of_a_run_that_waits_are_timed_without_the_waits() -> None:
    x = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)

    def waits() -> None:
        for _ in range(3):
            x @ x
            torch.cuda.synchronize()
            time.sleep(0.01)

    waits()
    alone = measure.once_us(lambda: x @ x, x.device, 10)
    assert 0.5 * 3 * alone < measure.kernels_us(waits, x.device) < 2 * 3 * alone + 100.0


def test_of_two_ways_that_the_clock_cannot_tell_apart_the_earlier_is_taken(monkeypatch) -> None:
    first, second = timings(900.0), timings(895.0)
    for later, expected in ((second, 0), (timings(880.0), 1)):
        told = iter([first, later])
        monkeypatch.setattr(choose.Chooser, "_time", lambda *_, told=told: [tuple(next(told).values())])
        monkeypatch.setattr(choose.Chooser, "check", lambda *_, **__: (None, []))
        chooser = choose.Chooser(SimpleNamespace(compiled=False), Changes(), Budget(60.0))
        change = SimpleNamespace(apply=lambda: None, undo=lambda: None)
        ways = [Way(name, lambda change=change: change) for name in ("less work", "more work")]
        proposal = Proposal("pattern", "path", torch.nn.Identity(), "source", ways)
        assert chooser._decide(proposal, Call((), {}), 0.0, 0.0).way == expected
