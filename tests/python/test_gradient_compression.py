"""Codes of gradients, and the communication hooks that send them, in two processes over gloo."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as distributed
from kernel_pytorch.advanced_memory import (
    AdaptiveCompressionOptimizer,
    GradientCompressor,
    QuantizedGradientAccumulation,
    fit_memory,
)
from kernel_pytorch.advanced_memory._codes import CODES
from memory_models import Block, Model, gradients, tokens_for
from ranks import member, spawn_to_the_end
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel


def round_trip(code: Any, x: Tensor) -> Tensor:
    rows, columns = x.shape
    return code.decode_(code.encode(x.flatten(), rows, columns), columns, torch.empty(x.numel())).view(x.shape)


@pytest.mark.parametrize("name", CODES)
def test_codes_say_most_of_a_row(name: str) -> None:
    code = CODES[name]()
    x = torch.randn(3, code.padded(1000), generator=torch.Generator().manual_seed(0))
    x *= torch.tensor([[1e-6], [1.0], [1e4]])
    x[:, -7:] = 0
    back = round_trip(code, x)
    kept = {"int8": 0.99, "int4": 0.9, "onebit": 0.3, "topk": 0.03}[name]
    for row, decoded in zip(x, back, strict=True):
        assert float((row - decoded).square().sum()) <= (1 - kept) * float(row.square().sum())
    if name in ("int8", "int4"):
        steps = {"int8": 254, "int4": 14}[name]
        blocks = x.unflatten(1, (-1, code.block)).abs().amax(-1, keepdim=True)
        assert bool(((x - back).unflatten(1, (-1, code.block)).abs() <= blocks / steps * 1.001).all())
    if name == "topk":
        assert bool(((back == 0) | (back == x)).all()), "what is sent is exact"
    assert torch.equal(round_trip(code, torch.zeros_like(x)), torch.zeros_like(x))


@pytest.mark.parametrize("name", CODES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_errors_are_what_codes_leave_out(name: str, dtype: torch.dtype) -> None:
    code, count, rows = CODES[name](), 1700, 3
    columns = code.padded(-(-count // rows))
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(count, generator=generator).to(dtype)
    error = 0.1 * torch.randn(count, generator=generator)
    wanted, total = x.float() + error, torch.zeros(count)
    message = code.encode(x, rows, columns, error)
    assert message.shape == (rows, code.row_bytes(columns))
    torch.testing.assert_close(code.decode_(message, columns, torch.empty(count)) + error, wanted, rtol=0, atol=1e-6)
    # The mean over processes, added to what is there; and the other way of keeping errors.
    both = torch.cat([message[:1], message[1:2]])
    halves = code.decode_(both, columns, total[:columns].clone().fill_(2.0), mean=True, adds=True)
    each = [code.decode_(one, columns, torch.empty(columns)) for one in (both[:1], both[1:])]
    torch.testing.assert_close(halves, 2 + (each[0] + each[1]) / 2, rtol=1e-6, atol=1e-6)
    before = error.clone()
    decoded = code.decode_(code.encode(x, rows, columns, error, carries=False, gain=3), columns, total)
    torch.testing.assert_close(error, before + 3 * (x.float() - decoded), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", [name for name in CODES if name != "topk"])
@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_codes_of_infinities_are_not_numbers(name: str, bad: float) -> None:
    code = CODES[name]()
    x, error = torch.ones(4 * 256), torch.zeros(4 * 256)
    x[256] = bad
    back = code.decode_(code.encode(x, 1, x.numel(), error), x.numel(), torch.empty_like(x)).view(4, -1)
    assert not bool(back[1].isfinite().all()) and bool(back[0].isfinite().all())
    assert bool(error.isfinite().all()), "a step with infinities is skipped, and must leave nothing behind"


def test_messages_that_do_not_fit_are_refused() -> None:
    code = CODES["int8"]()
    message = code.encode(torch.ones(300), 2, 256)
    with pytest.raises(Exception, match="room for 256"):
        code.decode_(message, 256, torch.empty(300), mean=True)
    with pytest.raises(Exception, match="error must be fp32 and as long as x"):
        code.encode(torch.ones(300), 2, 256, torch.zeros(299))
    with pytest.raises(Exception, match="flatten it"):
        code.encode(torch.ones(30, 10), 2, 256)


def make_model(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(40, 30), nn.Tanh(), nn.Linear(30, 20), nn.Tanh(), nn.Linear(20, 10))


def parallel(model: nn.Module) -> DistributedDataParallel:
    return DistributedDataParallel(model, bucket_cap_mb=0.004)  # several buckets, which change after the first step


def step(model: nn.Module, batch: Tensor) -> list[Tensor]:
    model.zero_grad()
    model(batch).square().mean().backward()
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


def batch_of(rank: int) -> Tensor:
    return torch.randn(16, 40, generator=torch.Generator().manual_seed(10 + rank))


def mean_gradients(members: int) -> list[Tensor]:
    each = [step(make_model(), batch_of(rank)) for rank in range(members)]
    return [torch.stack(parts).mean(0) for parts in zip(*each, strict=True)]


def size(tensors: Any) -> float:
    return float(sum(tensor.square().sum() for tensor in tensors)) ** 0.5


def check_methods(rank: int, members: int) -> None:
    exact = mean_gradients(members)
    limits = {"none": 1e-6, "int8": 0.05, "int4": 0.6, "onebit": 1.5, "topk": 1.5, "powersgd": 1.2}
    for method, one_step in limits.items():
        model = parallel(make_model())
        compressor = GradientCompressor(model, method, warmup_steps=2 if method == "powersgd" else 1)
        warm = step(model, batch_of(rank))
        assert size(a - b for a, b in zip(warm, exact, strict=True)) <= 1e-6 * size(exact), "warm-up"
        total = [torch.zeros_like(gradient) for gradient in exact]
        rounds = 1 if method in ("none", "powersgd") else 6
        for _ in range(rounds):
            found = step(model, batch_of(rank))
            assert size(a - b for a, b in zip(found, exact, strict=True)) <= one_step * size(exact), method
            total = [a + b for a, b in zip(total, found, strict=True)]
        if rounds > 1:  # nothing is lost: what arrived and what every process has yet to send are all gradients
            for (name, _), sent, one in zip(make_model().named_parameters(), total, exact, strict=True):
                left = compressor.state_dict()["errors"][name].clone()
                distributed.all_reduce(left)
                torch.testing.assert_close(sent + left / members, rounds * one, rtol=1e-4, atol=1e-5)
        for one in found:
            others = [torch.empty_like(one) for _ in range(members)]
            distributed.all_gather(others, one)
            assert all(torch.equal(others[0], other) for other in others), "every process has the same gradients"
        report = compressor.report()
        if method in CODES:
            assert report["pays"] in (True, False) and "pay" in report["reason"] and 0 < report["left_out"] < 1, report
            limit = {"int8": 0.3, "int4": 0.2, "onebit": 0.1, "topk": 0.1}[method]
            assert report["bytes"][method] < limit * report["bytes"]["none"] + 3000


def check_checkpoints(rank: int, members: int) -> None:
    model = parallel(make_model())
    compressor = GradientCompressor(model, "onebit", warmup_steps=0)
    for _ in range(3):
        step(model, batch_of(rank))
    file = io.BytesIO()
    torch.save(compressor.state_dict(), file)
    file.seek(0)
    assert set(compressor.state_dict()["errors"]) == {name for name, _ in make_model().named_parameters()}
    expected = step(model, batch_of(rank))
    # Another process, whose DDP has not rebuilt its buckets yet.
    again = parallel(make_model())
    restored = GradientCompressor(again, "onebit", warmup_steps=0)
    loaded = torch.load(file)
    restored.load_state_dict(loaded)
    assert restored.step == 3
    assert all(torch.equal(error, loaded["errors"][name]) for name, error in restored.state_dict()["errors"].items())
    for name, error in compressor.state_dict()["errors"].items():
        assert error.shape == dict(make_model().named_parameters())[name].shape
    found = step(again, batch_of(rank))
    assert size(a - b for a, b in zip(found, expected, strict=True)) <= 1.2 * size(expected), (
        "other buckets, other blocks"
    )
    other = GradientCompressor(parallel(make_model()), "int8", warmup_steps=0)
    other.load_state_dict(compressor.state_dict())  # what is left to send is a gradient, whatever the code
    power = GradientCompressor(parallel(make_model()), "powersgd")
    with pytest.raises(ValueError, match="errors of powersgd are torch's own"):
        power.load_state_dict(compressor.state_dict())


def check_infinities(rank: int, members: int) -> None:
    model = parallel(make_model())
    compressor = GradientCompressor(model, "int8", warmup_steps=0)
    batch = batch_of(rank)
    found = step(model, batch * (float("inf") if rank == 0 else 1))
    assert not all(bool(one.isfinite().all()) for one in found), "a scaler must see it"
    assert all(bool(error.isfinite().all()) for error in compressor.state_dict()["errors"].values())
    assert all(bool(one.isfinite().all()) for one in step(model, batch))


def check_adaptive(rank: int, members: int) -> None:
    model = parallel(make_model())
    adaptive = AdaptiveCompressionOptimizer(model, ("int8", "topk"), trials=2, warmup_steps=1)
    assert adaptive.methods == ("none", "int8", "topk")
    for _ in range(1 + 2 * 3 + 1):
        step(model, batch_of(rank))
    methods: list[Any] = [None] * members
    distributed.all_gather_object(methods, adaptive.method)
    assert len(set(methods)) == 1 and set(adaptive.seconds_per_number()) == {"none", "int8", "topk"}
    assert not adaptive._measures(), "once it is chosen nothing makes the host wait"


def check_accumulation(rank: int, members: int) -> None:
    plain, quantized = parallel(make_model()), parallel(make_model())
    accumulation = QuantizedGradientAccumulation(quantized, steps=3)
    batches = [batch_of(rank) * (1 + place) for place in range(3)]
    for place, batch in enumerate(batches):
        with plain.no_sync() if place < 2 else torch.enable_grad():
            plain(batch).square().mean().backward()
        with accumulation.micro_step():
            quantized(batch).square().mean().backward()
        assert accumulation.is_complete == (place == 2)
        if place < 2:
            assert all(parameter.grad is None for parameter in quantized.parameters())
    pairs = list(zip(quantized.parameters(), plain.parameters(), strict=True))
    assert size(a.grad - b.grad for a, b in pairs) <= 0.01 * size(b.grad for _, b in pairs)
    assert not accumulation._sums


def check_fit(rank: int, members: int) -> None:
    """A model that fit_memory treats, inside DDP: the same gradients, reduced once."""
    torch.manual_seed(0)
    plain, inner = Model([Block() for _ in range(3)]), Model([Block() for _ in range(3)])
    inner.load_state_dict(plain.state_dict())
    tokens = tokens_for().roll(rank)
    ddp, fitted = DistributedDataParallel(plain), DistributedDataParallel(inner)
    with fit_memory(fitted, tokens, "1GiB") as free:
        budget = int(free.plan["least_bytes"] * 1.1)
    with fit_memory(fitted, tokens, budget) as fit:
        assert fit.predicted_peak < free.everything_peak
        assert all(parameter.grad is None for parameter in inner.parameters()), "measuring reduces nothing"
        exact = gradients(ddp, tokens)
        for mine, theirs in zip(gradients(fitted, tokens), exact, strict=True):
            assert torch.equal(mine, theirs)


def work(rank: int, folder: str) -> None:
    with member(rank, folder, 2):
        for check in (
            check_methods,
            check_checkpoints,
            check_infinities,
            check_adaptive,
            check_accumulation,
            check_fit,
        ):
            check(rank, 2)


def test_hooks_in_two_processes(tmp_path: Path) -> None:
    spawn_to_the_end(work, tmp_path, 2)


def test_accumulation_without_processes() -> None:
    plain, quantized = make_model(), make_model()
    accumulation = QuantizedGradientAccumulation(quantized, steps=4)
    for place in range(4):
        batch = batch_of(place)
        plain(batch).square().mean().backward()
        with accumulation.micro_step():
            quantized(batch).square().mean().backward()
    pairs = list(zip(quantized.parameters(), plain.parameters(), strict=True))
    assert size(a.grad - b.grad for a, b in pairs) <= 0.02 * size(b.grad for _, b in pairs)
    with pytest.raises(ValueError, match="1 or more"):
        QuantizedGradientAccumulation(plain, steps=0)


def test_refusals() -> None:
    with pytest.raises(TypeError, match="DistributedDataParallel"):
        GradientCompressor(make_model())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match='method is "int3"'):
        GradientCompressor(make_model(), "int3")  # type: ignore[arg-type]
