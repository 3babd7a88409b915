"""States in the host's memory: the same bits as states beside the parameters, whichever way subgroups go.

Without a GPU, "staged" runs the whole pipeline, copies and buffers included, with a CPU in the device's place.
"""

from __future__ import annotations

import copy
import cProfile
import io
import pickle
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from kernel_pytorch.optim import AdamW, Offload, release_gradients
from kernel_pytorch.optim.offload.lanes import OneLane
from kernel_pytorch.optim.offload.pipeline import OffloadedStates, balanced
from kernel_pytorch.optim.offload.rates import plan
from kernel_pytorch.optim.offload.slabs import Field

SIZES = [(7, 3), (40, 33), (0,), (5000,), (1,), (300, 20), (2500,)]
FORMATS: list[tuple[torch.dtype, dict[str, Any]]] = [
    (torch.float32, {}),
    (torch.bfloat16, {"master_weights": True}),
    (torch.bfloat16, {"state_dtype": None, "amsgrad": True}),
    (torch.bfloat16, {"state": "compact"}),
    (torch.float16, {"state": "8bit"}),
    (torch.float64, {}),
]
WAYS = [
    Offload("host", 1500),
    Offload("stream", 1500),
    Offload("interleave", 1500, device_share=0.5),
    Offload("interleave", 700, device_share=0.3),
]
DEVICES = ["cpu", "staged", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    if request.param == "staged":
        made = OffloadedStates.__init__

        def stage(self: OffloadedStates, *arguments: Any) -> None:
            made(self, *arguments)
            self._is_direct = False

        monkeypatch.setattr(OffloadedStates, "__init__", stage)
    yield "cuda" if request.param == "cuda" else "cpu"


def make(dtype: torch.dtype, device: str) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    made = [torch.randn(size, generator=generator).to(device, dtype) for size in SIZES]
    made[1] = made[1].t()
    return [torch.nn.Parameter(one) for one in made]


def give_gradients(lists: list[list[torch.nn.Parameter]], step: int, skipped: int | None = None) -> None:
    """The same to each list; in some steps a parameter has none."""
    generator = torch.Generator().manual_seed(100 + step)
    for place, parameters in enumerate(zip(*lists, strict=True)):
        gradient = torch.randn(parameters[0].shape, generator=generator)
        for parameter in parameters:
            parameter.grad = None if place == skipped else gradient.to(parameter.device, parameter.dtype)


def assert_same(mine: AdamW, theirs: AdamW) -> None:
    a, b = mine.state_dict(), theirs.state_dict()
    assert a["state"].keys() == b["state"].keys()
    for index, entry in a["state"].items():
        assert entry.keys() == b["state"][index].keys()
        for name, value in entry.items():
            assert torch.equal(value.cpu(), b["state"][index][name].cpu()), (index, name)
    for group_a, group_b in zip(mine.param_groups, theirs.param_groups, strict=True):
        for p, q in zip(group_a["params"], group_b["params"], strict=True):
            assert torch.equal(p, q)


@pytest.mark.parametrize("how", WAYS, ids=lambda how: f"{how.mode}-{how.subgroup_elements}")
@pytest.mark.parametrize(("dtype", "options"), FORMATS, ids=lambda value: str(value))
def test_steps_have_the_bits_of_plain_adamw(
    device: str, dtype: torch.dtype, options: dict[str, Any], how: Offload
) -> None:
    if device == "cuda" and dtype is torch.float64:
        pytest.skip("fp64 runs on the CPU")
    here, there = make(dtype, device), make(dtype, device)
    options = {"lr": 1e-2, "max_grad_norm": 3.0, **options}
    plain, offloaded = AdamW(here, **options), AdamW(there, offload=how, **options)
    for step, skipped in enumerate([3, None, 1, None]):
        give_gradients([here, there], step, skipped)
        plain.step()
        offloaded.step()
    assert_same(offloaded, plain)
    assert all(value.device.type == "cpu" for entry in offloaded.state.values() for value in entry.values())


@pytest.mark.parametrize(("dtype", "options"), FORMATS[:5], ids=lambda value: str(value))
def test_checkpoints_continue_in_either(device: str, dtype: torch.dtype, options: dict[str, Any]) -> None:
    here, there = make(dtype, device), make(dtype, device)
    plain, offloaded = AdamW(here, **options), AdamW(there, offload=WAYS[2], **options)
    for step in range(2):
        give_gradients([here, there], step)
        plain.step()
        offloaded.step()
    file = io.BytesIO()
    torch.save(offloaded.state_dict(), file)
    file.seek(0)
    saved = torch.load(file, map_location=device)
    weights = [parameter.detach().clone() for parameter in there]
    others = [[torch.nn.Parameter(weight.clone()) for weight in weights] for _ in range(2)]
    resumed, moved = AdamW(others[0], offload=WAYS[3], **options), AdamW(others[1], **options)
    resumed.load_state_dict(saved)
    moved.load_state_dict(saved)
    offloaded.load_state_dict(plain.state_dict())  # into slabs that are in use
    for step in range(2, 4):
        give_gradients([here, there, *others], step, skipped=5 if step == 2 else None)
        for optimizer in (plain, offloaded, resumed, moved):
            optimizer.step()
    for optimizer in (offloaded, resumed, moved):
        assert_same(optimizer, plain)


def test_a_torch_state_is_taken_over(device: str) -> None:
    here, there = make(torch.float32, device), make(torch.float32, device)
    theirs = torch.optim.AdamW(here, lr=1e-2)
    give_gradients([here, there], 0)
    theirs.step()
    for p, q in zip(there, here, strict=True):
        p.data.copy_(q.data)
    ours = AdamW(there, lr=1e-2, offload="stream")
    ours.load_state_dict(theirs.state_dict())
    give_gradients([here, there], 1)
    theirs.step()
    ours.step()
    for p, q in zip(there, here, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)
    torch.optim.AdamW(here, lr=1e-2).load_state_dict(ours.torch_state_dict())


@pytest.mark.parametrize("how", WAYS[:3], ids=lambda how: how.mode)
@pytest.mark.parametrize(("dtype", "options"), FORMATS[:4], ids=lambda value: str(value))
def test_an_overflow_changes_nothing(device: str, dtype: torch.dtype, options: dict[str, Any], how: Offload) -> None:
    here, there = make(dtype, device), make(dtype, device)
    plain, offloaded = AdamW(here, **options), AdamW(there, offload=how, **options)
    for step, found in enumerate([1.0, 0.0, 1.0]):
        give_gradients([here, there], step)
        for optimizer in (plain, offloaded):
            optimizer.grad_scale = torch.tensor(8.0, device=device)  # type: ignore[attr-defined]
            optimizer.found_inf = torch.tensor(found, device=device)  # type: ignore[attr-defined]
            optimizer.step()
    assert_same(offloaded, plain)
    assert {float(entry["step"]) for entry in offloaded.state.values()} == {1.0}


def test_gradients_are_released_into_a_stream(device: str) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(40, 30), torch.nn.GELU(), torch.nn.Linear(30, 20)).to(device)
    other = copy.deepcopy(model)
    plain, streamed = AdamW(model.parameters()), AdamW(other.parameters(), offload=Offload("stream", 500))
    release_gradients(streamed)
    for step in range(3):
        x = torch.randn(8, 40, generator=torch.Generator().manual_seed(step)).to(device)
        for one, optimizer in ((model, plain), (other, streamed)):
            optimizer.zero_grad()
            one(x).square().mean().backward()
            optimizer.step()
        assert all(parameter.grad is None for parameter in other.parameters())
    assert_same(streamed, plain)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])
def test_copies_go_on_by_themselves(device: str, copied: Any) -> None:
    here = make(torch.float32, device)
    optimizer = AdamW(here, offload=WAYS[1])
    give_gradients([here], 0)
    optimizer.step()
    optimizer._offloaded.finish()
    other = copied(optimizer)
    there = other.param_groups[0]["params"]
    give_gradients([here, there], 1)
    optimizer.step()
    other.step()
    assert_same(other, optimizer)


def test_groups_keep_their_own_rates(device: str) -> None:
    here, there = make(torch.float32, device), make(torch.float32, device)
    pair = []
    for parameters, how in ((here, None), (there, WAYS[2])):
        groups = [{"params": parameters[:3], "lr": 1e-1}, {"params": parameters[3:], "weight_decay": 0.5}]
        pair.append(AdamW(groups, lr=torch.tensor(1e-3), offload=how))
    for step in range(3):
        give_gradients([here, there], step)
        for optimizer in pair:
            optimizer.step()
    assert_same(pair[1], pair[0])


def test_an_interrupt_leaves_a_whole_step(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    here, there = make(torch.float32, device), make(torch.float32, device)
    plain, offloaded = AdamW(here), AdamW(there, offload=WAYS[2])
    call, calls = offloaded._call, []

    def interrupted(*arguments: Any, **options: Any) -> None:
        calls.append(1)
        if len(calls) == 3:
            signal.raise_signal(signal.SIGINT)
        call(*arguments, **options)

    monkeypatch.setattr(offloaded, "_call", interrupted)
    give_gradients([here, there], 0)
    plain.step()
    with pytest.raises(KeyboardInterrupt):
        offloaded.step()
    assert len(calls) > 3
    assert_same(offloaded, plain)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full here")
def test_a_full_disk_loses_nothing(device: str, tmp_path: Path) -> None:
    here, there = make(torch.float32, device), make(torch.float32, device)
    plain, offloaded = AdamW(here), AdamW(there, offload=WAYS[2])
    for step in range(3):
        give_gradients([here, there], step)
        plain.step()
        offloaded.step()
        with pytest.raises((OSError, RuntimeError)):
            torch.save(offloaded.state_dict(), "/dev/full")
    assert_same(offloaded, plain)
    torch.save(offloaded.state_dict(), tmp_path / "state")
    offloaded.load_state_dict(torch.load(tmp_path / "state"))
    assert_same(offloaded, plain)


def test_work_is_as_long_in_many_parameters_as_in_few() -> None:
    """Four times the parameters are about four times the calls: none of them looks at all others."""

    def calls_of(count: int) -> int:
        parameters = [torch.nn.Parameter(torch.ones(8)) for _ in range(count)]
        optimizer = AdamW(parameters, offload=Offload("host", 64))
        release_gradients(optimizer)
        for _ in range(2):
            profile = cProfile.Profile()
            with profile:
                torch.stack(list(parameters)).sum().backward()
        return sum(entry.callcount for entry in profile.getstats())

    assert calls_of(160) < 5 * calls_of(40)


def test_shares_follow_what_steps_took(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan gives the device nearly all; its subgroups then take a third of the CPU's time. Bits stay."""
    made = OffloadedStates.__init__

    def stage(self: OffloadedStates, *arguments: Any) -> None:
        made(self, *arguments)
        self._is_direct = False

    def seconds(_self: OneLane, _begin: Any, end: Any) -> float:
        (states,) = offloaded._offloaded.all()
        assert states.on_device is not None
        return {"down": states.on_device, "results": 3 * (len(states.slabs.subgroups) - states.on_device)}[end]

    monkeypatch.setattr(OffloadedStates, "__init__", stage)
    monkeypatch.setattr(OneLane, "mark", lambda self, lane, timed=False: lane)
    monkeypatch.setattr(OneLane, "seconds", seconds)
    here, there = make(torch.float32, "cpu"), make(torch.float32, "cpu")
    rates = {"up": 5e9, "down": 5e9, "host_memory": 1e11, "cpu": 4e8, "device": 1e9}
    plain, offloaded = AdamW(here), AdamW(there, offload=Offload("interleave", 512, rates=rates))
    shares = []
    for step in range(4):
        give_gradients([here, there], step)
        plain.step()
        offloaded.step()
        (states,) = offloaded._offloaded.all()
        shares.append(states.on_device)
    count = len(states.slabs.subgroups)
    assert states.plan is not None and shares[0] == states.plan["on_device"] == count - 1
    assert shares[-2:] == [round(0.75 * count)] * 2, (shares, count)
    assert_same(offloaded, plain)
    assert balanced(10, 20, 1.0, 1.1) == 10, "less than one subgroup's time apart"
    assert balanced(1, 20, 9.0, 1.0) == 1 and balanced(19, 20, 1.0, 9.0) == 19


def test_fewer_threads_where_the_link_would_wait() -> None:
    """All threads of the CPU halve the link's rate, which then decides; half of them leave it whole."""
    best = {"up": 50e9, "down": 50e9, "host_memory": 170e9, "cpu": 5e9, "device": 1e11}
    beside = [
        {"threads": 16, "up": 20e9, "down": 20e9, "cpu": 3.3e9},
        {"threads": 8, "up": 48e9, "down": 48e9, "cpu": 2.6e9},
        {"threads": 2, "up": 50e9, "down": 50e9, "cpu": 0.8e9},
    ]
    fields = [Field(name, torch.float32) for name in ("exp_avg", "exp_avg_sq", "master")]
    plain = plan(best, fields, torch.bfloat16, 1 << 28, 64, None)
    chosen = plan({**best, "beside": beside}, fields, torch.bfloat16, 1 << 28, 64, None)
    assert chosen["threads"] == 8 and chosen["bound_seconds"] == plain["bound_seconds"] < chosen["predicted_seconds"]
    assert "beside 8 threads of the CPU" in chosen["reason"]
    assert "threads" not in plan({**best, "beside": beside}, fields, torch.bfloat16, 1 << 28, 64, 0.5)


def test_explain_and_bad_words() -> None:
    parameters = make(torch.float32, "cpu")
    optimizer = AdamW(parameters, offload="interleave")
    assert "no step has been taken" in optimizer.explain()
    give_gradients([parameters], 0)
    optimizer.step()
    assert "nothing is sent" in optimizer.explain()
    assert "states are where the parameters are" in AdamW(parameters).explain()
    with pytest.raises(ValueError, match='offload is "disk"; it must be None, "host", "interleave" or "stream"'):
        AdamW(parameters, offload="disk")
    with pytest.raises(ValueError, match="stochastic_rounding"):
        AdamW(parameters, offload="host", stochastic_rounding=True)
    with pytest.raises(ValueError, match="device_share is 2"):
        Offload("interleave", device_share=2)


@pytest.mark.gpu
def test_a_plan_is_measured_and_told() -> None:
    parameters = [torch.nn.Parameter(torch.randn(1 << 22, device="cuda")) for _ in range(4)]
    optimizer = AdamW(parameters, offload="interleave")
    give_gradients([parameters], 0)
    optimizer.step()
    text = optimizer.explain()
    assert "predicted, bound" in text and "subgroups on the device" in text
