"""kernel_pytorch.optim against torch.optim: values over steps and options, state both ways, what frameworks around an
optimizer expect of it, and bad input."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from kernel_pytorch.optim import AdamW, clip_grad_norm_
from optim_parameters import assert_same, make_parameters, set_gradients
from torch import Tensor


@pytest.mark.parametrize("amsgrad", [False, True])
@pytest.mark.parametrize("maximize", [False, True])
def test_follows_torch_for_many_steps(amsgrad: bool, maximize: bool) -> None:
    ours, theirs = make_parameters(), make_parameters()
    options: dict[str, Any] = dict(lr=0.02, betas=(0.8, 0.98), eps=1e-6, weight_decay=0.1)
    mine = AdamW(ours, amsgrad=amsgrad, maximize=maximize, **options)
    reference = torch.optim.AdamW(theirs, amsgrad=amsgrad, maximize=maximize, **options)
    for step in range(20):
        set_gradients(step, ours, theirs)
        mine.step()
        reference.step()
    assert_same(ours, theirs, rtol=1e-5, atol=2e-6)


def test_fp64_follows_torch_exactly() -> None:
    ours, theirs = make_parameters(torch.float64), make_parameters(torch.float64)
    mine, reference = AdamW(ours, lr=0.02), torch.optim.AdamW(theirs, lr=0.02)
    for step in range(5):
        set_gradients(step, ours, theirs)
        mine.step()
        reference.step()
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-13)


def test_fp64_states_load_exactly() -> None:
    ours, again = make_parameters(torch.float64), make_parameters(torch.float64)
    mine, other = AdamW(ours, lr=0.02), AdamW(again, lr=0.02)
    set_gradients(0, ours)
    mine.step()
    other.load_state_dict(mine.state_dict())
    for a, b in zip(ours, again, strict=True):
        for name, value in mine.state[a].items():
            assert torch.equal(value, other.state[b][name]) and value.dtype is other.state[b][name].dtype, name


def test_bf16_state_of_the_parameters_type_is_torchs() -> None:
    ours, theirs = make_parameters(torch.bfloat16), make_parameters(torch.bfloat16)
    mine, reference = AdamW(ours, lr=0.02, state_dtype=None), torch.optim.AdamW(theirs, lr=0.02, fused=True)
    for step in range(5):
        set_gradients(step, ours, theirs)
        mine.step()
        reference.step()
    assert mine.state[ours[3]]["exp_avg"].dtype is torch.bfloat16
    assert_same(ours, theirs, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_master_weights_follow_fp32(dtype: torch.dtype) -> None:
    ours = make_parameters(dtype)
    theirs = [torch.nn.Parameter(p.detach().float()) for p in ours]
    mine, reference = AdamW(ours, lr=1e-3, master_weights=True), torch.optim.AdamW(theirs, lr=1e-3)
    for step in range(10):
        set_gradients(step, ours)
        for a, b in zip(ours, theirs, strict=True):
            assert a.grad is not None
            b.grad = a.grad.float()
        mine.step()
        reference.step()
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine.state[a]["master"], b.detach(), rtol=1e-5, atol=1e-6)
        assert torch.equal(a, mine.state[a]["master"].to(dtype))


def test_learning_rate_schedulers_and_groups() -> None:
    ours, theirs = make_parameters(), make_parameters()
    groups = [
        [{"params": p[:4], "weight_decay": 0.3}, {"params": p[4:], "lr": 0.5, "amsgrad": True}] for p in (ours, theirs)
    ]
    mine, reference = AdamW(groups[0], lr=0.1), torch.optim.AdamW(groups[1], lr=0.1)
    schedules = [torch.optim.lr_scheduler.OneCycleLR(o, 0.3, total_steps=9) for o in (mine, reference)]
    for step in range(8):
        set_gradients(step, ours, theirs)
        mine.step()
        reference.step()
        for schedule in schedules:
            schedule.step()
    assert_same(ours, theirs, rtol=1e-4, atol=1e-5)
    late = torch.nn.Parameter(torch.ones(3))
    mine.add_param_group({"params": [late]})
    late.grad = torch.ones(3)
    mine.step()
    assert (late < 1).all()


def test_learning_rate_tensor_and_closure() -> None:
    ours, theirs = make_parameters(), make_parameters()
    mine, reference = AdamW(ours, lr=torch.tensor(0.05)), torch.optim.AdamW(theirs, lr=0.05)
    set_gradients(0, ours, theirs)
    saw_gradients = []

    def closure() -> float:
        saw_gradients.append(torch.is_grad_enabled())
        return 1.5

    assert mine.step(closure) == 1.5
    assert saw_gradients == [True]
    reference.step()
    assert_same(ours, theirs, rtol=1e-5, atol=1e-6)


def test_parameters_without_gradient_are_left_alone() -> None:
    ours = make_parameters()
    mine = AdamW(ours)
    set_gradients(0, ours)
    ours[3].grad = None
    before = ours[3].detach().clone()
    mine.step()
    assert torch.equal(ours[3], before) and ours[3] not in mine.state
    for parameter in ours:
        parameter.grad = None
    mine.step()  # nothing to do
    set_gradients(1, ours)
    mine.step()
    assert mine.state[ours[3]]["step"].item() == 1 and mine.state[ours[2]]["step"].item() == 2


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("amsgrad", [False, True])
def test_state_dicts_load_both_ways(fused: bool, amsgrad: bool) -> None:
    ours, theirs = make_parameters(), make_parameters()
    mine = AdamW(ours, lr=0.03, amsgrad=amsgrad)
    reference = torch.optim.AdamW(theirs, lr=0.03, amsgrad=amsgrad, fused=fused)
    for step in range(3):
        set_gradients(step, ours, theirs)
        mine.step()
        reference.step()
    from_torch, from_ours = make_parameters(), make_parameters()
    for target, source in zip([*from_torch, *from_ours], [*theirs, *ours], strict=True):
        target.data.copy_(source.data)
    mine_again = AdamW(from_torch, lr=7.0)
    mine_again.load_state_dict(copy.deepcopy(reference.state_dict()))
    reference_again = torch.optim.AdamW(from_ours, lr=7.0)
    reference_again.load_state_dict(copy.deepcopy(mine.state_dict()))
    assert mine_again.param_groups[0]["lr"] == 0.03 and mine_again.param_groups[0]["amsgrad"] is amsgrad
    names = {"step", "exp_avg", "exp_avg_sq"} | ({"max_exp_avg_sq"} if amsgrad else set())
    assert set(mine.state[ours[3]]) == set(reference.state[theirs[3]]) == names
    for step in range(3, 6):
        set_gradients(step, ours, theirs, from_torch, from_ours)
        for optimizer in (mine, reference, mine_again, reference_again):
            optimizer.step()
    assert_same(from_torch, theirs, rtol=1e-5, atol=1e-6)
    assert_same(from_ours, theirs, rtol=1e-5, atol=1e-6)
    assert mine_again.state[from_torch[0]]["step"].item() == 6


def test_state_dict_keeps_masters_and_types_exactly(tmp_path: Any) -> None:
    options: dict[str, Any] = dict(lr=1e-3, master_weights=True, stochastic_rounding=True, seed=5)
    ours = make_parameters(torch.bfloat16)
    mine = AdamW(ours, **options)
    set_gradients(0, ours)
    mine.step()
    torch.save(mine.state_dict(), tmp_path / "state.pt")
    again = [torch.nn.Parameter(p.detach().clone()) for p in ours]
    loaded = AdamW(again, **{**options, "seed": 6})
    loaded.load_state_dict(torch.load(tmp_path / "state.pt"))
    for a, b in zip(ours, again, strict=True):
        for name, value in mine.state[a].items():
            assert torch.equal(value, loaded.state[b][name]) and value.dtype is loaded.state[b][name].dtype, name
            assert value is not loaded.state[b][name]
    set_gradients(1, ours, again)
    mine.step()
    loaded.step()
    for a, b in zip(ours, again, strict=True):
        assert torch.equal(a, b)  # the random bits too


def test_loading_does_not_share_memory() -> None:
    ours, again = make_parameters(), make_parameters()
    mine, other = AdamW(ours), AdamW(again)
    set_gradients(0, ours, again)
    mine.step()
    other.load_state_dict(mine.state_dict())
    kept = mine.state[ours[3]]["exp_avg"].clone()
    other.step()
    assert torch.equal(mine.state[ours[3]]["exp_avg"], kept)


def test_steps_follow_the_parameters_of_a_copied_optimizer() -> None:
    ours = make_parameters()
    mine = AdamW(ours)
    set_gradients(0, ours)
    mine.step()
    twin = copy.deepcopy(mine)
    set_gradients(1, ours, [p for p in twin.param_groups[0]["params"]])
    mine.step()
    twin.step()
    assert_same(ours, twin.param_groups[0]["params"], rtol=0, atol=0)


def test_grad_scaler_unscales_and_skips_inside_the_step() -> None:
    ours, theirs = make_parameters(), make_parameters()
    mine, reference = AdamW(ours, lr=0.02), torch.optim.AdamW(theirs, lr=0.02, fused=True)
    scalers = [torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2) for _ in range(2)]
    for scaler in scalers:
        scaler.scale(torch.ones(()))  # makes the scale
    for step in range(6):
        set_gradients(step, ours, theirs, scale=scalers[0].get_scale())
        if step == 3:
            for parameters in (ours, theirs):
                grad = parameters[4].grad
                assert grad is not None
                grad[17] = float("inf")
        before = [p.detach().clone() for p in ours]
        for scaler, optimizer in zip(scalers, (mine, reference), strict=True):
            scaler.step(optimizer)
            scaler.update()
        assert all(map(torch.equal, before, ours)) == (step == 3)
    assert scalers[0].get_scale() == scalers[1].get_scale()
    assert mine.state[ours[0]]["step"].item() == 5
    assert_same(ours, theirs, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("max_norm", [0.5, 1e6])
def test_clipping_inside_the_step_is_clipping_before_it(max_norm: float) -> None:
    ours, theirs = make_parameters(), make_parameters()
    mine = AdamW([{"params": ours[:3]}, {"params": ours[3:]}], lr=0.02, max_grad_norm=max_norm)
    reference = torch.optim.AdamW(theirs, lr=0.02)
    for step in range(3):
        set_gradients(step, ours, theirs)
        gradient = ours[3].grad
        assert gradient is not None
        kept = gradient.clone()
        norm = torch.nn.utils.clip_grad_norm_(theirs, max_norm)
        mine.step()
        reference.step()
        assert mine.grad_norm is not None
        torch.testing.assert_close(mine.grad_norm, norm)
        assert torch.equal(gradient, kept)
    assert_same(ours, theirs, rtol=2e-5, atol=2e-6)


def test_clip_grad_norm_is_torchs() -> None:
    ours, theirs = make_parameters(), make_parameters()
    set_gradients(0, ours, theirs)
    ours[2].grad = theirs[2].grad = None
    assert ours[5].grad is not None
    ours[5].grad = ours[5].grad.t().contiguous().t()  # another order of dimensions
    norms = [clip_grad_norm_(ours, 0.1), torch.nn.utils.clip_grad_norm_(theirs, 0.1)]
    torch.testing.assert_close(*norms)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a.grad, b.grad)
    assert clip_grad_norm_([torch.nn.Parameter(torch.ones(2))], 1.0) == 0
    strided = torch.nn.Parameter(torch.ones(4))
    strided.grad = torch.full((1,), 2.0).expand(4)
    assert AdamW([strided], max_grad_norm=1.0)._total_norm() == 4.0
    ours[0].grad = torch.tensor(float("nan"))
    with pytest.raises(RuntimeError, match="norm of the gradients is nan"):
        clip_grad_norm_(ours, 1.0, error_if_nonfinite=True)


def test_stochastic_rounding_keeps_small_updates() -> None:
    def run(**options: Any) -> Tensor:
        parameter = torch.nn.Parameter(torch.ones(4096, dtype=torch.bfloat16))
        optimizer = AdamW([parameter], lr=1e-4, weight_decay=0.0, **options)
        for _ in range(20):
            parameter.grad = torch.ones_like(parameter)
            optimizer.step()
        return parameter.detach().float()

    assert (run() == 1).all()
    rounded = run(stochastic_rounding=True, seed=3)
    # 20 steps of 1e-4 in units of 2^-8: a sum of 20 coins, each worth a unit with probability 0.0256.
    assert abs(rounded.mean().item() - (1 - 20e-4)) < 4 * 2**-8 * (20 * 0.0256 / 4096) ** 0.5
    assert torch.equal(rounded, run(stochastic_rounding=True, seed=3))
    assert not torch.equal(rounded, run(stochastic_rounding=True, seed=4))
    torch.manual_seed(9)
    first = run(stochastic_rounding=True)
    torch.manual_seed(9)
    assert torch.equal(first, run(stochastic_rounding=True))
    by_step = torch.stack([rounded == 1 - k * 2**-8 for k in range(4)]).float().mean(1)
    assert (by_step[:3] > 0.05).all()  # elements go their own ways


def test_stochastic_rounding_does_not_depend_on_threads() -> None:
    results = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        ours = make_parameters(torch.bfloat16)
        mine = AdamW(ours, lr=1e-3, state_dtype=torch.bfloat16, stochastic_rounding=True, seed=1)
        for step in range(3):
            set_gradients(step, ours)
            mine.step()
        results.append(ours)
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_mixed_types_and_layouts_in_one_group() -> None:
    ours = [
        torch.nn.Parameter(torch.randn(4, 3, 5, 5).to(memory_format=torch.channels_last)),
        torch.nn.Parameter(torch.randn(6, 4).t()),
        torch.nn.Parameter(torch.randn(33, dtype=torch.float64)),
        torch.nn.Parameter(torch.randn(33, dtype=torch.bfloat16)),
        torch.nn.Parameter(torch.randn(33, dtype=torch.float16)),
    ]
    theirs = [torch.nn.Parameter(p.detach().double()) for p in ours]
    mine, reference = AdamW(ours, lr=0.01), torch.optim.AdamW(theirs, lr=0.01)
    for _ in range(3):
        for a, b in zip(ours, theirs, strict=True):
            a.grad = torch.randn(a.shape, dtype=a.dtype)  # contiguous, whatever the parameter is
            b.grad = a.grad.double()
        mine.step()
        reference.step()
    for a, b in zip(ours, theirs, strict=True):
        small = a.dtype in (torch.bfloat16, torch.float16)
        torch.testing.assert_close(a.double(), b, rtol=1e-2 if small else 1e-5, atol=3e-2 if small else 1e-6)


def test_autograd_notices_that_parameters_changed() -> None:
    parameter = torch.nn.Parameter(torch.ones(3))
    loss = (parameter**2).sum()
    parameter.grad = torch.ones(3)
    AdamW([parameter]).step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_bad_input_is_named() -> None:
    parameter = torch.nn.Parameter(torch.ones(3))
    for options, text in [
        (dict(lr=-1.0), "lr is -1.0"),
        (dict(betas=(1.0, 0.9)), r"betas\[0\] is 1.0"),
        (dict(eps=-1e-8), "eps is -1e-08"),
        (dict(weight_decay=-1.0), "weight_decay is -1.0"),
        (dict(max_grad_norm=0.0), "max_grad_norm is 0.0"),
        (dict(differentiable=True), "differentiable=True is not supported"),
        (dict(state_dtype=torch.float16), "state_dtype is torch.float16"),
        (dict(lr=torch.ones(2)), "lr is a tensor of 2 elements"),
    ]:
        with pytest.raises(ValueError, match=text):
            AdamW([parameter], **options)  # type: ignore[arg-type]
    sparse = torch.nn.Parameter(torch.ones(4, 2))
    sparse.grad = torch.sparse_coo_tensor([[1]], torch.ones(1, 2), (4, 2))
    with pytest.raises(RuntimeError, match="a gradient is sparse"):
        AdamW([sparse]).step()
    gaps = torch.ones(8)[::2].requires_grad_()
    gaps.grad = torch.ones(4)
    with pytest.raises(RuntimeError, match="leave gaps or overlap; make it contiguous"):
        AdamW([gaps]).step()
    many = torch.nn.Parameter(torch.ones(2, dtype=torch.complex64))
    many.grad = torch.ones(2, dtype=torch.complex64)
    with pytest.raises(RuntimeError, match="complex64"):
        AdamW([many]).step()


def test_op_is_sound() -> None:
    ours = [torch.randn(5), torch.randn(2, 3)]
    lists = [[p.clone().abs() for p in ours] for _ in range(4)]
    steps = [torch.zeros(()), torch.ones(())]
    rates = ("adamw", "plain", 1e-3, 0.9, 0.99, 1e-8, 0.01, 0.0, 0.0, False, False)
    gradients, *states = lists
    arguments = (ours, gradients, [], [], *states[:3], [], [], steps, None, None, None, None, None, *rates)
    torch.library.opcheck(torch.ops.kernel_pytorch.optimizer_step_.default, arguments)
    torch.library.opcheck(torch.ops.kernel_pytorch.reduce_norm.default, (ours,))
    with pytest.raises(RuntimeError, match="gradients has 1 tensors, parameters 2"):
        torch.ops.kernel_pytorch.optimizer_step_(ours, gradients[:1], *arguments[2:])
