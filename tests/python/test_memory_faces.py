"""The seeds' names for memory: checkpointing, offload, pools."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kernel_pytorch.advanced_memory import (
    AdaptiveCheckpointing,
    DynamicActivationOffloading,
    DynamicMemoryPool,
    LossyGradientCompression,
    MemoryEfficientBackprop,
    MemoryFragmentationOptimizer,
    MemoryPoolManager,
    SelectiveGradientCheckpointing,
    fit_memory,
)
from memory_models import Block, Model, gradients, tokens_for


def test_important_layers_are_left_alone() -> None:
    model, tokens = Model([Block() for _ in range(3)]), tokens_for()
    selective = SelectiveGradientCheckpointing(importance_threshold=0.7)
    selective.update_importance("blocks.1", 0.9)
    assert not selective.should_checkpoint("blocks.1") and selective.should_checkpoint("blocks.0")
    assert not selective.should_checkpoint("blocks.0", memory_pressure=0.1)
    exact = gradients(model, tokens)
    with selective.apply(model, tokens, "1GiB") as free:
        least = free.plan["least_bytes"]
    with selective.apply(model, tokens, int(1.05 * least)) as fit:
        assert fit.blocks == ["blocks.0", "blocks.2"] and "forward" not in model.blocks[1].__dict__
        assert all(torch.equal(a, b) for a, b in zip(gradients(model, tokens), exact, strict=True))


def test_checkpoints_when_the_budget_is_short() -> None:
    block, x = Block(), torch.randn(2, 64, 64, requires_grad=True)
    plain = torch.autograd.grad(block(x).sum(), list(block.parameters()))
    free = AdaptiveCheckpointing()
    y = free.forward(block, x)
    saved = free.alive
    assert saved > 10 * x.nbytes and not free.last_was_checkpointed, "without a limit nothing is recomputed"
    y.sum().backward()
    del y
    assert free.alive == 0, "backward gives it back"
    tight = AdaptiveCheckpointing(budget=int(2.5 * saved), headroom=0.0)
    outputs, was = [], []
    for _ in range(4):
        outputs.append(tight(block, x))
        was.append(tight.last_was_checkpointed)
    assert was == [False, False, True, True]
    for output in outputs:
        for mine, exact in zip(torch.autograd.grad(output.sum(), list(block.parameters())), plain, strict=True):
            assert torch.equal(mine, exact)
    with torch.no_grad():
        assert torch.equal(tight(block, x), outputs[0])


def test_offload_by_plan_and_by_hand() -> None:
    model, tokens = Model([Block() for _ in range(3)]), tokens_for()
    offloading = DynamicActivationOffloading(offload_device="cpu")
    exact = gradients(model, tokens)
    with offloading.apply(model, tokens, "1GiB") as free:
        middle = (free.plan["least_bytes"] + free.everything_peak) // 2
    with offloading.apply(model, tokens, int(middle)) as fit:
        assert fit.slab_bytes > 0 and all(block["recompute"] == 0 for block in fit.treatments.values())
        assert all(torch.equal(a, b) for a, b in zip(gradients(model, tokens), exact, strict=True))
    x = torch.randn(5, 7).t()
    there = offloading.offload_activations(x)
    x_then = x.clone()
    x.zero_()
    assert torch.equal(offloading.reload_activations(there, "cpu"), x_then)
    with pytest.raises(ValueError, match='"cuda"'):
        DynamicActivationOffloading("cuda")
    with MemoryEfficientBackprop().apply(model, tokens, int(middle)) as fit:
        assert fit.predicted_peak <= middle


def test_pools_on_a_cpu_are_the_system_s() -> None:
    pools = MemoryPoolManager("cpu")
    tensor = pools.pool("long").get_tensor((3, 4), torch.bfloat16)
    assert tensor.shape == (3, 4) and tensor.dtype == torch.bfloat16
    assert pools.reserved_bytes() == {"long": 0} and pools.pool("long") is pools.pool("long")
    pools.release("long")
    with pytest.raises(KeyError, match="no pool is called"):
        pools.release("long")
    assert DynamicMemoryPool("cpu").reserved_bytes() == 0


def segment(*blocks: tuple[int, str], expandable: bool = False) -> dict[str, object]:
    return {
        "total_size": sum(size for size, _ in blocks),
        "is_expandable": expandable,
        "blocks": [{"size": size, "state": state} for size, state in blocks],
    }


def test_fragmentation_is_what_the_largest_free_piece_cannot_use() -> None:
    optimizer = MemoryFragmentationOptimizer("cpu")
    mib = 1 << 20
    broken = [segment((2 * mib, "active_allocated"), (2 * mib, "inactive")) for _ in range(4)]
    report = optimizer.analyze(broken)
    assert (report.reserved, report.allocated, report.free, report.pieces) == (16 * mib, 8 * mib, 8 * mib, 4)
    assert report.largest_free == 2 * mib and report.fragmentation == 0.75
    advice = optimizer.advise(report)
    assert "6 of 16 MiB" in advice[0] and any("expandable_segments" in line for line in advice)
    grown = optimizer.analyze([segment((2 * mib, "active_allocated"), (2 * mib, "inactive"), expandable=True)] * 4)
    assert not any("PYTORCH_ALLOC_CONF" in line for line in optimizer.advise(grown))
    whole = optimizer.analyze([segment((8 * mib, "active_allocated"), (8 * mib, "inactive"))])
    assert whole.fragmentation == 0 and optimizer.advise(whole) == []
    assert optimizer.advise(optimizer.analyze([])) == []
    for call in (optimizer.analyze, optimizer.apply):
        with pytest.raises(ValueError, match="CUDA device"):
            call()


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda m, x: SelectiveGradientCheckpointing().apply(m, x, "1GiB"), "no block's importance is below it"),
        (lambda m, x: _told("blocks.9").apply(m, x, "1GiB"), '"blocks.9" is no block'),
        (lambda m, x: AdaptiveCheckpointing(headroom=3), "headroom is 3"),
        (lambda m, x: MemoryFragmentationOptimizer("cpu", -1), "threshold is -1"),
        (lambda m, x: fit_memory(m, x, float("nan")), "budget is nan"),
        (lambda m, x: fit_memory(m, x, "1GiB", blocks=["nope"]), 'blocks has "nope", which Model has not'),
        (lambda m, x: fit_memory(m.requires_grad_(False), x, "1GiB"), "no parameter of Model requires a gradient"),
    ],
)
def test_what_cannot_be_is_named(call: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        call(Model([Block() for _ in range(2)]), tokens_for())


def _told(name: str) -> SelectiveGradientCheckpointing:
    selective = SelectiveGradientCheckpointing(0.9)
    selective.update_importance(name, 0.1)
    return selective


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
@pytest.mark.parametrize("kind", [DynamicMemoryPool, MemoryPoolManager, MemoryFragmentationOptimizer])
def test_without_a_device_the_default_says_so(kind: Any) -> None:
    with pytest.raises(RuntimeError, match=f'{kind.__name__}: torch sees no CUDA device here; give device="cpu"'):
        kind()


class _SideBySide(torch.nn.Module):
    """Blocks that are no chain, which the plan takes them for: what each of them saves lives until the end."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(
            torch.nn.Sequential(torch.nn.Linear(32, 128), torch.nn.GELU(), torch.nn.Linear(128, 32)) for _ in range(4)
        )

    def forward(self, x: torch.Tensor) -> Any:
        return [block(x) for block in self.blocks][-1]


def test_a_peak_above_the_budget_is_told() -> None:
    model, x = _SideBySide(), torch.randn(64, 32)
    with fit_memory(model, x, "1GiB") as free:
        assert free.measured_peak > 1.05 * free.predicted_peak
    with pytest.warns(UserWarning, match="the step takes .* predicted were .* give a smaller budget"):
        fit_memory(model, x, (free.measured_peak + free.predicted_peak) // 2).remove()


@pytest.mark.parametrize(("bits", "largest_error"), [(8, 0.005), (4, 0.08), (1, 1.1)])
@pytest.mark.parametrize("shape", [(0,), (1,), (300,), (7, 65, 3)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gradient_in_few_bits(bits: int, largest_error: float, shape: Any, dtype: torch.dtype) -> None:
    compression = LossyGradientCompression(bits)
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    packed = compression.compress(x)
    back = compression.decompress(packed)
    assert back.shape == x.shape and back.dtype == dtype
    assert (
        x.numel() == 0 or float((back - x).float().abs().max()) <= largest_error * float(x.float().abs().max()) + 0.01
    )
    if x.numel() > 1000:
        assert packed.ratio > 0.8 * dtype.itemsize * 8 / (bits + 0.5)


def test_what_codes_leave_out_comes_later() -> None:
    compression = LossyGradientCompression(1, error_feedback=True)
    x = torch.randn(512, generator=torch.Generator().manual_seed(0))
    total = sum(compression.decompress(compression.compress(x, "a")) for _ in range(200))
    plain = sum(compression.decompress(LossyGradientCompression(1).compress(x)) for _ in range(200))
    assert float((total / 200 - x).abs().mean()) < 0.2 * float((plain / 200 - x).abs().mean())
    with pytest.raises(ValueError, match="bits is 3; it must be 8, 4 or 1"):
        LossyGradientCompression(3)
    with pytest.raises(ValueError, match="the message has 1 bits, this has 8"):
        LossyGradientCompression(8).decompress(compression.compress(x))
