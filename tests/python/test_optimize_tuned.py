"""Tuning inside kernel_pytorch.optimize: only what pays, within the budget, kept only if the whole is faster, and gone
after restore, after an error and after Ctrl-C.

What a clock says decides nothing here: each test says which candidate is faster and whether the whole is.
"""

from __future__ import annotations

import copy
import dataclasses
import gc
import os
import signal
import time
from contextlib import contextmanager

import pytest

torch = pytest.importorskip("torch")
from forced_verdicts import take_first  # noqa: E402
from kernel_pytorch._optimize import choose, measure, tuned, whole  # noqa: E402
from kernel_pytorch._optimize import optimize as steps  # noqa: E402
from torch import nn  # noqa: E402

import kernel_pytorch  # noqa: E402
from kernel_pytorch.tuning import autotune_scope  # noqa: E402

SAVES = tuned.confirms_tuning
OTHER = {"cpu stores=cached": "stores=stream", "cpu stores=stream": "stores=cached"}


class Norms(nn.Module):
    """Norms and little else, so that they are worth tuning."""

    def __init__(self, *widths):
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(width) for width in widths)

    def forward(self, x):
        outputs = [norm(x[:, : norm.normalized_shape[0]]) for norm in self.norms]
        return outputs[0] if len(outputs) == 1 else outputs


@pytest.fixture(autouse=True)
def by_decree(monkeypatch):
    """Every part is taken, and the whole is faster."""
    monkeypatch.setattr(choose, "judge", take_first)
    monkeypatch.setattr(whole, "pays", lambda before, after: True)
    monkeypatch.setattr(tuned, "confirms_tuning", lambda before, after, expected: True)
    monkeypatch.setattr(measure, "LEAST", 2)
    monkeypatch.setattr(measure, "MOST", 2)
    kernel_pytorch.cache.clear()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    gc.collect()  # models of this test, and their choices with them
    assert norm_tiers(torch.randn(4, 32)) <= {"heuristic", "persistent"}


@pytest.fixture
def other_is_faster(monkeypatch):
    """The tuner measures as ever, then the config that the heuristic does not take is declared the faster one."""

    @contextmanager
    def scope(request, progress):
        with autotune_scope(request, progress) as report:
            yield report
        for index, one in enumerate(report.tuned):
            after = dataclasses.replace(one.after, config=OTHER[one.before.name], median_us=one.before.median_us / 2)
            report.tuned[index] = dataclasses.replace(one, after=after, gains=True)

    monkeypatch.setattr(tuned.tuning, "autotune_scope", scope)


def tiers(function, *args):
    with kernel_pytorch.record() as decisions:
        function(*args)
    return {one.tier for one in decisions}


def norm_tiers(x):
    """Of a norm such as those of `Norms`: what is measured with a weight is not taken without one."""
    return tiers(kernel_pytorch.functional.rms_norm, x, torch.ones(x.shape[-1]))


def decisions_of(model, x):
    with kernel_pytorch.record() as decisions:
        model(x)
    return {(one.key.problem, f"{one.kernel} {one.config}", one.tier) for one in decisions}


def optimize(model, x, **options):
    return kernel_pytorch.optimize(model, x, budget_seconds=20, **options)


def rows_of(result):
    return [row for row in result.report.data["tuning"] if row["op"] == "rms_norm_forward"]


@pytest.mark.parametrize("goal", ["inference", "train"])
def test_what_is_faster_is_in_force_until_restore(goal, other_is_faster):
    model, x = Norms(512).train(goal == "train"), torch.randn(600, 512)
    want = model(x)
    said = []
    result = optimize(model, x, goal=goal, progress=said.append)
    (row,) = rows_of(result)
    assert row["kept"] and row["reason"] == "2.00x"
    assert row["to"] == f"cpu {OTHER[row['from']]}"
    assert row["from_us"] == 2 * row["to_us"] > 0
    assert row["calls"] == 1
    assert 0.02 <= row["share"] <= 1
    assert any(line.startswith("tuning rms_norm_forward, 1 of ") for line in said)
    assert decisions_of(model, x) == {(row["problem"], row["to"], "overlay")}
    torch.testing.assert_close(model(x), want)
    assert f"{row['from']} -> {row['to']}" in str(result.report)
    assert "taken" in result.report.to_html()
    assert type(result.report).from_json(result.report.to_json()).data["tuning"] == result.report.data["tuning"]

    copied = copy.deepcopy(model)
    result.restore()
    assert norm_tiers(x) == {"overlay"}  # the copy's
    del copied
    gc.collect()
    assert norm_tiers(x) == {"heuristic"}
    assert kernel_pytorch.cache.list() == ()
    assert torch.equal(model(x), want)


def test_a_model_that_is_dropped_takes_its_choices_along(other_is_faster):
    x = torch.randn(600, 512)
    result = optimize(Norms(512), x)
    assert rows_of(result)[0]["kept"]
    assert norm_tiers(x) == {"overlay"}
    del result
    gc.collect()
    assert norm_tiers(x) == {"heuristic"}


def test_choices_go_where_the_whole_is_not_faster(other_is_faster, monkeypatch):
    monkeypatch.setattr(tuned, "confirms_tuning", lambda before, after, expected: False)
    model, x = Norms(512), torch.randn(600, 512)
    result = optimize(model, x)
    (row,) = rows_of(result)
    assert not row["kept"]
    assert row["reason"].startswith("2.00x alone, not kept: all of them save ")
    assert {tier for _, _, tier in decisions_of(model, x)} == {"heuristic"}
    assert result.report.data["replacements"]


@pytest.mark.parametrize(
    ("before", "after", "expected", "saves"),
    [
        (1000.0, 950.0, 60.0, True),
        (1000.0, 950.0, 120.0, False),  # less than half of what the problems save by themselves
        (1000.0, 999.0, 1.0, False),  # no clock tells this
        (1000.0, 1050.0, 60.0, False),
    ],
)
def test_the_whole_has_to_save_what_its_problems_save(before, after, expected, saves):
    timings = [measure.Timing(value, value - 1, value + 1, 9) for value in (before, after)]
    assert SAVES(*timings, expected) is saves


def test_choices_go_where_the_whole_computes_something_else(other_is_faster, monkeypatch):
    right = whole.check_whole
    model, x = Norms(512), torch.randn(600, 512)

    def check(*args):
        in_force = {tier for _, _, tier in decisions_of(model, x)} == {"overlay"}
        return ("output differs by 1", []) if in_force else right(*args)

    monkeypatch.setattr(steps, "check_whole", check)
    result = optimize(model, x)
    (row,) = rows_of(result)
    assert (row["kept"], row["reason"]) == (False, "2.00x alone; with it the whole model's output differs by 1")
    assert {tier for _, _, tier in decisions_of(model, x)} == {"heuristic"}


def test_choices_go_with_the_replacements_that_do_not_pay(other_is_faster, monkeypatch):
    monkeypatch.setattr(whole, "pays", lambda before, after: False)
    model, x = Norms(512), torch.randn(600, 512)
    result = optimize(model, x)
    (row,) = rows_of(result)
    assert not row["kept"]
    assert "all was undone" in row["reason"]
    assert not result.report.is_changed
    assert not decisions_of(model, x)  # torch's own norm
    assert norm_tiers(x) == {"heuristic"}


def test_a_model_of_our_ops_is_tuned_without_a_replacement(other_is_faster):
    class Ours(nn.Module):
        def forward(self, x):
            return kernel_pytorch.functional.rms_norm(x)

    model, x = Ours(), torch.randn(600, 512)
    result = optimize(model, x)
    assert not result.report.data["replacements"]
    assert rows_of(result)[0]["kept"]
    assert "nothing was replaced" not in result.report.headline
    assert {tier for _, _, tier in decisions_of(model, x)} == {"overlay"}
    kernel_pytorch.restore(model)
    assert {tier for _, _, tier in decisions_of(model, x)} == {"heuristic"}


def test_the_cache_is_written_only_where_it_is_asked_for(other_is_faster):
    model, x = Norms(512), torch.randn(600, 512)
    result = optimize(model, x, tune="cache")
    (row,) = rows_of(result)
    (stored,) = [one for one in kernel_pytorch.cache.list() if one.key.op == "rms_norm_forward"]
    assert (stored.key.problem, f"{stored.kernel} {stored.config}") == (row["problem"], row["to"])
    assert any("tuning cache" in note for note in result.report.data["notes"])
    result.restore()
    assert norm_tiers(x) == {"persistent"}
    again = optimize(model, x)  # what is measured already is not measured again
    (row,) = rows_of(again)
    assert (row["kept"], row["to"]) == (False, None)
    assert "chosen before" in row["reason"]


def test_tuning_can_be_off():
    model, x = Norms(512), torch.randn(600, 512)
    assert optimize(model, x, tune="off").report.data["tuning"] == []
    kernel_pytorch.restore(model)
    with pytest.raises(ValueError, match='tune is "on"; it is "model", "cache" or "off"'):
        optimize(model, x, tune="on")


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("place", ["check_whole", "compare_whole"])
def test_an_error_on_the_way_leaves_no_choice(place, error, other_is_faster, monkeypatch):
    model, x = Norms(512), torch.randn(600, 512)
    seen = []

    def fail(*_args):
        seen.append({tier for _, _, tier in decisions_of(model, x)})
        raise error("in the middle")

    monkeypatch.setattr(steps, place, fail)
    with pytest.raises(error):
        optimize(model, x)
    assert seen == [{"overlay"}]
    assert not decisions_of(model, x)
    assert norm_tiers(x) == {"heuristic"}


def test_ctrl_c_while_it_tunes_leaves_everything_as_it_was():
    model, x = Norms(512, 480), torch.randn(600, 512)
    pressed = []

    def press(line):
        if line.startswith("tuning ") and not pressed:
            pressed.append(line)
            os.kill(os.getpid(), signal.SIGINT)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            optimize(model, x, progress=press)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
    assert pressed
    assert not any("forward" in vars(part) for part in model.modules())
    assert norm_tiers(x) == {"heuristic"}
    assert kernel_pytorch.cache.list() == ()


def test_the_budget_is_shared_out_and_what_it_does_not_reach_is_named(monkeypatch):
    model, x = Norms(*range(384, 512, 16)), torch.randn(600, 512)
    took = []
    real = steps.tune_step

    def timed(*args):
        args = (*args[:5], seconds, *args[6:])  # for the problems
        begin = time.monotonic()
        try:
            return real(*args)
        finally:
            took.append(time.monotonic() - begin)

    monkeypatch.setattr(steps, "tune_step", timed)
    for seconds in (0.02, 0.06, 0.2, 0.6):  # noqa: B007 (timed reads it); a busy machine measures nothing in the first
        result = optimize(model, x)
        rows = rows_of(result)
        result.restore()
        measured = [row for row in rows if row["to"] is not None]
        if measured:
            break
    left = [row for row in rows if row["to"] is None]
    assert measured and left
    assert all("budget" in row["reason"] for row in left)
    assert took[-1] < seconds + 5, "eight problems were given less"


def test_without_time_nothing_is_measured_and_all_is_named(monkeypatch):
    monkeypatch.setattr(tuned.tuning, "autotune_scope", lambda *_: pytest.fail("there is no time"))
    real = steps.tune_step
    monkeypatch.setattr(steps, "tune_step", lambda *args: real(*args[:5], -1.0, *args[6:]))
    (row,) = rows_of(optimize(Norms(512), torch.randn(600, 512)))
    assert (row["to"], row["kept"]) == (None, False)
    assert row["reason"].startswith("no time left in the budget")


def test_what_takes_little_of_the_step_is_not_measured():
    class Product(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.norm = nn.Linear(1024, 1024), nn.RMSNorm(1024)

        def forward(self, x):
            return self.norm(self.linear(self.linear(self.linear(x)))[:1])

    assert not rows_of(optimize(Product(), torch.randn(256, 1024)))


def test_the_users_recording_is_left_alone():
    with kernel_pytorch.record() as decisions:
        kernel_pytorch.functional.rms_norm(torch.randn(3, 32))
        result = optimize(Norms(512), torch.randn(600, 512))
    assert any("record is on" in note for note in result.report.data["notes"])
    assert decisions[0].key.problem.startswith("rows=3 ")
