"""8-bit states of kernel_pytorch.optim: against formulas in double, round trips, conversion from and to torch's and
bitsandbytes' states, Lion and SGD in every format."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from kernel_pytorch.optim import SGD, AdamW, Lion, formats
from optim_parameters import assert_same, make_parameters, set_gradients
from torch import Tensor

CODED = ["compact", "8bit"]


def run(optimizer: Any, parameters: list[Tensor], begin: int, end: int) -> None:
    for step in range(begin, end):
        set_gradients(step, parameters)
        optimizer.step()


def dynamic_map_of_bitsandbytes(signed: bool) -> Tensor:
    """As bitsandbytes.functional.create_dynamic_map(signed, 7, 8) makes it."""
    data: list[float] = []
    for i in range(7):
        items = 2**i + 1 if signed else 2 ** (i + 1) + 1
        boundaries = torch.linspace(0.1, 1, items)
        means = (boundaries[:-1] + boundaries[1:]) / 2.0
        data += (10 ** (-6 + i) * means).tolist()
        if signed:
            data += (-(10 ** (-6 + i)) * means).tolist()
    return torch.tensor(sorted([*data, 0, 1.0]))


@pytest.mark.parametrize("signed", [True, False])
def test_the_dynamic_map_is_that_of_bitsandbytes(signed: bool) -> None:
    torch.testing.assert_close(formats.dynamic_map(signed), dynamic_map_of_bitsandbytes(signed), rtol=3e-7, atol=0)


@pytest.mark.parametrize("form", CODED)
@pytest.mark.parametrize("is_square", [False, True])
def test_codes_are_near_their_values_and_come_back(form: str, is_square: bool) -> None:
    values = torch.randn(5000) * torch.logspace(-3, 3, 5000)
    values = values**2 if is_square else values
    values[64:128] = 0
    codes, scale = formats.encode(values, form, is_square)
    decoded = formats.decode(codes, scale, form, is_square)
    error, group = (decoded - values).abs(), formats.GROUP[form]
    largest = torch.nn.functional.pad(values.abs(), (0, -5000 % group)).view(-1, group).amax(1).repeat_interleave(group)
    if form == "compact" and is_square:
        error, largest = (decoded.sqrt() - values.sqrt()).abs(), largest.sqrt()
        assert (error <= largest[:5000] * 1.0001 / 255).all() and ((decoded > 0) == (values > 0)).all()
    elif form == "compact":
        x = values.abs() / largest[:5000].clamp(min=1e-30)
        assert (error <= largest[:5000] * (1 + x) ** 2 / 4 / 127 * 1.02).all()  # half a code over the slope there
    else:
        scales = scale.repeat_interleave(group)[:5000]
        nearest = (values / scales).sub(dynamic_map_of_bitsandbytes(not is_square).unsqueeze(1)).abs().amin(0) * scales
        assert (error <= nearest * 1.001 + scales * 6e-7).all()  # a negative number never becomes 0
    assert (decoded[64:128] == 0).all() or form == "8bit"
    again, scale_again = formats.encode(decoded, form, is_square)
    if form == "compact" or is_square:
        torch.testing.assert_close(scale_again, scale, rtol=1e-6, atol=0)
        assert ((again.view(torch.uint8).int() - codes.view(torch.uint8).int()).abs() <= 1).all()


def test_masters_have_24_bits() -> None:
    master = torch.cat(
        [torch.randn(4096) * torch.logspace(-38, 38, 4096), torch.tensor([0.0, -0.0, 1e-40, -1e-45, 3.4e38])]
    )
    parameter = torch.nn.Parameter(master.bfloat16())
    correction = formats.make_correction(parameter, master)
    restored = formats.master_of(parameter, correction)
    unit = torch.exp2(torch.floor(torch.log2(master.abs().clamp(min=2.0**-126))) - 7)  # of bf16
    near = master.abs() < 3.3e38  # near the end bf16 is infinite
    assert ((restored - master).abs() <= unit * 2**-8)[near].all()
    zeroed = formats.master_of(torch.zeros_like(parameter), correction)
    assert torch.isfinite(zeroed).all() and (zeroed >= 0).all()


# fp32 follows torch to rounding. Codes of m and v are wrong by half a percent to six, which a step passes on; what
# counts is that errors do not grow: after 30 steps of 0.02 with random gradients.
@pytest.mark.parametrize(("state", "limit"), [("compact", 0.03), ("8bit", 0.05)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_coded_adamw_stays_near_fp32(state: str, limit: float, dtype: torch.dtype) -> None:
    ours = make_parameters(dtype)
    theirs = [torch.nn.Parameter(p.detach().double()) for p in ours]
    mine, exact = AdamW(ours, lr=0.02, state=state), torch.optim.AdamW(theirs, lr=0.02)
    for step in range(30):
        set_gradients(step, ours)
        for a, b in zip(ours, theirs, strict=True):
            assert a.grad is not None
            b.grad = a.grad.double()
        mine.step()
        exact.step()
    for a, b in zip(ours, theirs, strict=True):
        if a.numel() == 0:
            continue
        moved = (mine.master(a).double() - b.detach()).abs()
        rounding = 0.0 if dtype is torch.float32 or state == "compact" else 0.05  # bf16 weights without a correction
        assert moved.mean() < limit * 0.1 + rounding and moved.max() < 0.3, (a.shape, moved.mean(), moved.max())


def test_the_correction_carries_what_bf16_cannot() -> None:
    parameter = torch.nn.Parameter(torch.ones(256, dtype=torch.bfloat16))
    optimizer = AdamW([parameter], lr=2**-14, weight_decay=0.0, state="compact")
    for _ in range(20):
        parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    assert (parameter == 1).all()  # a step is a 64th of the distance to the neighbour
    wanted = torch.full((256,), 1 - 20 * 2**-14)
    torch.testing.assert_close(optimizer.master(parameter), wanted, rtol=0, atol=2**-15)


@pytest.mark.parametrize("make", [lambda p, s: AdamW(p, 1e-2, state=s), lambda p, s: Lion(p, 1e-3, state=s),
                                  lambda p, s: SGD(p, 1e-2, momentum=0.9, state=s)])  # fmt: skip
@pytest.mark.parametrize("state", ["fp32", *CODED])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_saved_state_goes_on_bit_for_bit(make: Any, state: str, dtype: torch.dtype, tmp_path: Any) -> None:
    ours = make_parameters(dtype)
    mine = make(ours, state)
    run(mine, ours, 0, 3)
    torch.save(mine.state_dict(), tmp_path / "state.pt")
    again = [torch.nn.Parameter(p.detach().clone()) for p in ours]
    loaded = make(again, state)
    loaded.load_state_dict(torch.load(tmp_path / "state.pt"))
    for a, b in zip(ours, again, strict=True):
        assert mine.state[a].keys() == loaded.state[b].keys()
        for name, value in mine.state[a].items():
            other = loaded.state[b][name]
            assert torch.equal(value, other) and value.dtype is other.dtype and value is not other, name
    run(mine, ours, 3, 5)
    run(loaded, again, 3, 5)
    assert_same(ours, again, rtol=0, atol=0)


@pytest.mark.parametrize("state", CODED)
def test_states_of_torch_load_and_go_back(state: str) -> None:
    ours, theirs = make_parameters(), make_parameters()
    reference = torch.optim.AdamW(theirs, lr=0.03)
    run(reference, theirs, 0, 5)
    for a, b in zip(ours, theirs, strict=True):
        a.data.copy_(b.data)
    mine = AdamW(ours, lr=7.0, state=state)
    mine.load_state_dict(copy.deepcopy(reference.state_dict()))
    assert mine.param_groups[0]["lr"] == 0.03 and mine.param_groups[0]["state"] == state
    large = ours[-1]
    assert mine.state[large]["exp_avg"].dtype is torch.int8 and mine.state[large]["step"] == 5
    back = [torch.nn.Parameter(p.detach().clone()) for p in ours]
    torch_again = torch.optim.AdamW(back, lr=1.0)
    torch_again.load_state_dict(mine.torch_state_dict())
    assert "state1" not in torch_again.state[back[-1]] and torch_again.state[back[-1]]["exp_avg"].dtype is torch.float32
    for optimizer, parameters in ((mine, ours), (torch_again, back)):
        run(optimizer, parameters, 5, 8)
    run(reference, theirs, 5, 8)
    for a, b, c in zip(ours, back, theirs, strict=True):
        if a.numel():
            assert (a - c).abs().mean() < 5e-3 and (b - c).abs().mean() < 5e-3


def test_formats_convert_into_each_other() -> None:
    ours = make_parameters(torch.bfloat16)
    source = AdamW(ours, lr=0.01, state="compact")
    run(source, ours, 0, 4)
    for options in (dict(state="fp32", master_weights=True), dict(state="8bit")):
        again = [torch.nn.Parameter(p.detach().clone()) for p in ours]
        target = AdamW(again, lr=0.01, **options)  # type: ignore[arg-type]
        target.load_state_dict(copy.deepcopy(source.state_dict()))
        if "master_weights" in options:
            for a, b in zip(ours, again, strict=True):
                assert torch.equal(source.master(a), target.state[b]["master"])
        back = AdamW(ours_again := [torch.nn.Parameter(p.detach().clone()) for p in ours], lr=0.01, state="compact")
        back.load_state_dict(copy.deepcopy(target.state_dict()))
        if "master_weights" in options:
            for a, b in zip(ours, ours_again, strict=True):
                assert torch.equal(source.state[a]["correction"], back.state[b]["correction"])
        run(back, ours_again, 4, 5)


def test_states_of_bitsandbytes_load() -> None:
    parameter = torch.nn.Parameter(torch.randn(100, 50))
    codes = [torch.randint(0, 256, (100, 50), dtype=torch.uint8) for _ in range(2)]
    scales = [torch.rand(20) for _ in range(2)]
    entry = dict(step=7, state1=codes[0], state2=codes[1], absmax1=scales[0], absmax2=scales[1])
    saved = {"state": {0: entry}, "param_groups": [{"lr": 0.1, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.0,
                                                    "params": [0], "state": "8bit"}]}  # fmt: skip
    optimizer = AdamW([parameter], state="8bit")
    optimizer.load_state_dict(saved)
    state = optimizer.state[parameter]
    assert torch.equal(state["exp_avg"].view(torch.uint8), codes[0]) and torch.equal(
        state["exp_avg_sq_scale"], scales[1]
    )
    before = parameter.detach().clone()
    first, second = (dynamic_map_of_bitsandbytes(not i)[codes[i].long()] for i in range(2))
    first, second = (
        x * s.repeat_interleave(256)[:5000].view(100, 50) for x, s in ((first, scales[0]), (second, scales[1]))
    )
    parameter.grad = torch.randn(100, 50)
    optimizer.step()
    m, v = 0.9 * first + 0.1 * parameter.grad, 0.99 * second + 0.01 * parameter.grad**2
    wanted = before - 0.1 / (1 - 0.9**8) * m / (v.sqrt() / (1 - 0.99**8) ** 0.5 + 1e-8)
    torch.testing.assert_close(parameter.detach(), wanted, rtol=1e-5, atol=1e-5)


def lion_step(p: Tensor, m: Tensor, g: Tensor, lr: float, betas: tuple[float, float], decay: float) -> None:
    update = (betas[0] * m + (1 - betas[0]) * g).sign()
    p.mul_(1 - lr * decay).sub_(lr * update)
    m.mul_(betas[1]).add_((1 - betas[1]) * g)


@pytest.mark.parametrize("maximize", [False, True])
def test_lion_follows_its_formula(maximize: bool) -> None:
    ours = make_parameters()
    theirs, momenta = [p.detach().double() for p in ours], [torch.zeros_like(p, dtype=torch.float64) for p in ours]
    mine = Lion(ours, lr=0.01, betas=(0.9, 0.98), weight_decay=0.1, maximize=maximize)
    for step in range(10):
        set_gradients(step, ours)
        for a, b, m in zip(ours, theirs, momenta, strict=True):
            assert a.grad is not None
            lion_step(b, m, -a.grad.double() if maximize else a.grad.double(), 0.01, (0.9, 0.98), 0.1)
        mine.step()
    assert_same(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "options",
    [
        dict(),
        dict(weight_decay=0.1),
        dict(momentum=0.9),
        dict(momentum=0.9, dampening=0.3, weight_decay=0.1),
        dict(momentum=0.8, nesterov=True, weight_decay=0.05),
        dict(momentum=0.9, maximize=True),
    ],
)
def test_sgd_follows_torch(options: dict[str, Any]) -> None:
    ours, theirs = make_parameters(), make_parameters()
    mine, reference = SGD(ours, lr=0.05, **options), torch.optim.SGD(theirs, lr=0.05, **options)
    for step in range(6):
        set_gradients(step, ours, theirs)
        mine.step()
        reference.step()
    assert_same(ours, theirs, rtol=1e-5, atol=2e-6)
    copies = [[torch.nn.Parameter(p.detach().clone()) for p in theirs] for _ in range(2)]
    mine_again, theirs_again = SGD(copies[0], lr=1.0, **options), torch.optim.SGD(copies[1], lr=1.0, **options)
    mine_again.load_state_dict(copy.deepcopy(reference.state_dict()))
    theirs_again.load_state_dict(copy.deepcopy(mine.state_dict()))
    set_gradients(6, ours, *copies)
    for optimizer in (mine, mine_again, theirs_again):
        optimizer.step()
    assert_same(copies[0], ours, rtol=1e-5, atol=2e-6)
    assert_same(copies[1], ours, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("state", CODED)
def test_layouts_clipping_and_scaling_of_coded_states(state: str) -> None:
    make = lambda: [  # noqa: E731
        torch.nn.Parameter(
            torch.randn(8, 32, 5, 5, generator=torch.Generator().manual_seed(1)).to(memory_format=torch.channels_last)
        ),
        torch.nn.Parameter(torch.randn(96, 64, generator=torch.Generator().manual_seed(2)).t()),
    ]
    ours, clipped = make(), make()
    mine = AdamW(ours, lr=0.01, state=state)
    other = AdamW(clipped, lr=0.01, state=state, max_grad_norm=0.5)
    for step in range(3):
        set_gradients(step, ours, clipped)
        torch.nn.utils.clip_grad_norm_(ours, 0.5)
        mine.step()
        other.step()
    assert_same(ours, clipped, rtol=1e-4, atol=1e-4)
    flat = [torch.nn.Parameter(p.detach().contiguous()) for p in ours]
    target = AdamW(flat, lr=0.01, state=state)
    target.load_state_dict(copy.deepcopy(mine.state_dict()))  # codes in another order: converted
    for a, b in zip(ours, flat, strict=True):
        first = formats.decode(mine.state[a]["exp_avg"], mine.state[a]["exp_avg_scale"], state, False)
        again = formats.decode(target.state[b]["exp_avg"], target.state[b]["exp_avg_scale"], state, False)
        torch.testing.assert_close(again, first, rtol=0.2, atol=float(first.abs().max()) / 50)


def test_bad_options_are_named() -> None:
    parameter = torch.nn.Parameter(torch.ones(3))
    for call, text in [
        (lambda: AdamW([parameter], state="4bit"), 'AdamW: state is "4bit"'),
        (lambda: AdamW([parameter], state="compact", amsgrad=True), "amsgrad is for state"),
        (lambda: AdamW([parameter], state="8bit", state_dtype=torch.bfloat16), "state_dtype is for state"),
        (lambda: SGD([parameter], state="compact"), "without momentum"),
        (lambda: SGD([parameter], nesterov=True), "nesterov needs momentum"),
        (lambda: Lion([parameter], betas=(1.0, 0.9)), r"betas\[0\] is 1.0"),
    ]:
        with pytest.raises(ValueError, match=text):
            call()
    double = torch.nn.Parameter(torch.ones(3, dtype=torch.float64))
    double.grad = torch.ones(3, dtype=torch.float64)
    with pytest.raises(RuntimeError, match="must be fp32, bf16 or fp16"):
        AdamW([double], state="compact").step()
