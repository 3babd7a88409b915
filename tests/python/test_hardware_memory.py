"""HardwareAbstractionLayer: what it says of memory against the allocator's own record of real steps."""

from __future__ import annotations

import copy
import gc
import itertools
import json
import pickle
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from kernel_pytorch.core import OptimizedLinear
from kernel_pytorch.hardware import HardwareAbstractionLayer, detect_available_devices, device_info
from kernel_pytorch.hardware.memory import dry_run, guess_inputs, with_batch
from kernel_pytorch.precision import FP8LinearLayer
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

import kernel_pytorch
from kernel_pytorch import functional


class Ours(nn.Module):
    """A gated block on this library's ops."""

    def __init__(self, dim: int = 256) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.gate_up, self.down = nn.Linear(dim, 8 * dim), nn.Linear(4 * dim, dim)
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(functional.rms_norm(x, self.weight)).unflatten(-1, (3, 4, -1)).unbind(2)
        attended = functional.attention(query, key, value, layout="bshd", causal=True)
        normed, x = functional.rms_norm(self.out(attended.flatten(2)), self.weight, residual=x)
        return x + self.down(functional.swiglu_packed(self.gate_up(normed)))


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 64))


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(128, 4, 512, batch_first=True, dropout=0.1)
    return nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)


def convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(32, 64, 3), nn.GELU()
    )


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "mlp": (mlp, (256,)),
    "encoder": (encoder, (64, 128)),
    "convolutions": (convolutions, (3, 48, 48)),
    "ours": (Ours, (96, 256)),
}


def step(model: nn.Module, optimizer: torch.optim.Optimizer | None, x: Tensor) -> None:
    if optimizer is None:
        with torch.no_grad():
            model(x)
        return
    output = model(x)
    torch.autograd.backward([output], [torch.ones_like(output)])
    del output
    optimizer.step()
    optimizer.zero_grad()


def cpu_peak(make: Callable[[], nn.Module], shape: tuple[int, ...], training: bool) -> int:
    """The most bytes that torch's CPU allocator had given out, from an empty beginning. The library's workspace, which
    grows with the machine's cores and caches and stays from call to call, is there before."""
    first = make().train(training)
    step(first, torch.optim.SGD(first.parameters()) if training else None, torch.zeros(shape))
    del first
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        model = make().train(training)
        optimizer = torch.optim.AdamW(model.parameters(), foreach=False) if training else None
        x = torch.zeros(shape)
        for _ in range(2):
            step(model, optimizer, x)
    total = peak = 0
    events = profiler.profiler.kineto_results.events()  # type: ignore[union-attr]
    for event in sorted((event for event in events if event.name() == "[memory]"), key=lambda event: event.start_ns()):
        total += event.nbytes()
        peak = max(peak, total)
    return peak


BATCH = 8


@pytest.fixture(scope="module")
def cpu_peaks() -> dict[str, int]:
    """Measured in a process of its own: collecting what other tests left behind, compiled graphs among it, has crashed
    there now and then, inside the interpreter."""
    child = subprocess.run([sys.executable, __file__], capture_output=True, text=True)
    assert child.returncode == 0, child.stderr
    peaks: dict[str, int] = json.loads(child.stdout)
    return peaks


def main() -> None:
    cases = itertools.product(MODELS.items(), (True, False))
    print(json.dumps({f"{n} {t}": cpu_peak(make, (BATCH, *shape), t) for (n, (make, shape)), t in cases}))


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", list(MODELS))
def test_estimates_are_within_a_tenth_of_the_measured_peak(
    name: str, training: bool, cpu_peaks: dict[str, int]
) -> None:
    make, shape = MODELS[name]
    measured = cpu_peaks[f"{name} {training}"]
    model = make()
    layer = HardwareAbstractionLayer(["cpu"])
    estimated = layer.estimate_memory_usage(model, BATCH, torch.zeros(1, *shape), training=training)
    assert abs(estimated * 1e9 / measured - 1) < 0.1, (estimated * 1e9, measured)


@pytest.mark.gpu
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", ["mlp", "encoder", "ours"])  # cuDNN's convolutions take memory of their own
def test_estimates_are_within_a_tenth_of_the_measured_peak_on_cuda(name: str, training: bool) -> None:
    make, shape = MODELS[name]
    batch = 512
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    model = make().cuda().bfloat16().train(training)
    optimizer = torch.optim.AdamW(model.parameters()) if training else None
    x = torch.zeros(batch, *shape, device="cuda", dtype=torch.bfloat16)
    step(model, optimizer, x)
    torch.cuda.reset_peak_memory_stats()
    step(model, optimizer, x)
    measured = torch.cuda.max_memory_allocated() - before
    layer = HardwareAbstractionLayer(["cuda"])
    estimated = layer.estimate_memory_usage(model, batch, x[:1], training=training) * 1e9
    assert abs(estimated - measured) < 0.1 * measured + (64 << 20), (estimated, measured)  # cuBLAS's own beside it


def test_the_parts_are_what_they_should_be() -> None:
    model = mlp()
    size = sum(parameter.nbytes for parameter in model.parameters())
    estimate = HardwareAbstractionLayer(["cpu"]).memory_estimate(model, 4096)
    assert estimate.parameters == size and estimate.inputs == 4096 * 256 * 4
    assert estimate.optimizer == 2 * size
    assert estimate.activations > 4096 * 1024 * 4 * 3  # what gelu, relu and the products keep
    forward = HardwareAbstractionLayer(["cpu"]).memory_estimate(model.eval(), 4096)
    assert forward.gradients == forward.optimizer == 0 and forward.activations < estimate.activations
    assert estimate.flops == pytest.approx(3 * forward.flops - 2 * 4096 * 256 * 1024)  # no gradient of the input
    assert model[0].weight.grad is None and not model.training  # the model itself was not run
    plain = dry_run(model, torch.zeros(8, 256), training=True, optimizer="sgd")
    assert plain.optimizer == 0 and plain.gradients <= size


def test_a_model_larger_than_this_machine_costs_nothing_to_ask_about() -> None:
    with torch.device("meta"):
        model = nn.Sequential(*[nn.Linear(32768, 32768, bias=False) for _ in range(64)])
    layer = HardwareAbstractionLayer(["cpu"])
    parameters = 64 * 32768**2 * 4 / 1e9
    assert layer.estimate_memory_usage(model, 2, training=True) > 4 * parameters
    with pytest.raises(ValueError, match="one sample needs"):
        layer.get_optimal_batch_size(model, memory_limit_gb=10.0)


def test_the_batch_fits_and_more_memory_never_gives_less() -> None:
    layer = HardwareAbstractionLayer(["cpu"])
    model = encoder()
    sample = torch.zeros(1, 64, 128)
    batches = [layer.get_optimal_batch_size(model, sample, memory_limit_gb=limit) for limit in (0.03, 0.5)]
    assert batches == sorted(batches) and batches[0] >= 1
    assert layer.estimate_memory_usage(model, batches[0], sample) <= 0.03
    assert "samples" in layer.batch_reason
    wide = nn.Sequential(
        nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 512)
    )  # small batches: the optimizer is the peak
    batch = layer.get_optimal_batch_size(wide, memory_limit_gb=0.1)
    assert layer.estimate_memory_usage(wide, batch) <= 0.09
    assert "throughput" in layer.batch_reason or layer.estimate_memory_usage(wide, 2 * batch) > 0.09
    with pytest.raises(ValueError, match="one sample needs"):
        layer.get_optimal_batch_size(wide, memory_limit_gb=0.01)


def test_inputs_are_guessed_from_the_first_layer_or_asked_for() -> None:
    assert guess_inputs(encoder()).shape == (1, 128, 128)
    assert guess_inputs(mlp()).shape == (1, 256)
    assert guess_inputs(convolutions()).shape == (1, 3, 224, 224)
    assert guess_inputs(nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 4))).dtype == torch.int64
    with pytest.raises(ValueError, match="give sample_inputs"):
        guess_inputs(nn.ReLU())
    resized = with_batch({"ids": torch.zeros(2, 7, dtype=torch.int64), "scale": torch.tensor(1.0)}, 5)
    assert resized["ids"].shape == (5, 7) and resized["scale"].dim() == 0
    with pytest.raises(ValueError, match="optimizer is 'lion'"):
        dry_run(mlp(), torch.zeros(1, 256), training=True, optimizer="lion")
    with pytest.raises(ValueError, match="at least 1"):
        HardwareAbstractionLayer(["cpu"]).estimate_memory_usage(mlp(), 0)

    class Branches(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x if x.sum() > 0 else -x

    with pytest.raises(RuntimeError, match="Branches does not run without data"):
        dry_run(Branches(), torch.zeros(1, 2), training=False)


def test_devices_and_optimization() -> None:
    layer = HardwareAbstractionLayer()
    found = detect_available_devices()
    assert layer.target_devices == [device for devices in found.values() for device in devices]
    with pytest.warns(UserWarning, match="no target devices"):
        assert HardwareAbstractionLayer([]).device.type == "cpu"
    with pytest.raises(kernel_pytorch.KernelPyTorchError, match="no device"):
        HardwareAbstractionLayer(["cuda:99"])
    cpu = HardwareAbstractionLayer([torch.device("cpu")])
    model = nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 64)).eval()
    x = torch.randn(4, 64)
    with torch.no_grad():
        expected = model(x)
        assert cpu.optimize_for_hardware(model, budget_seconds=0.5) is model and cpu.report is None
        torch.testing.assert_close(model(x), expected, rtol=1e-4, atol=1e-5)  # the first call is the sample
        assert cpu.report is not None and cpu.report.data["model"]["inputs"] == ["4x64 float32"]
        optimized = cpu.optimize_for_hardware(model, x, budget_seconds=2.0)
        torch.testing.assert_close(optimized(x), expected, rtol=1e-4, atol=1e-5)
    assert cpu.report is not None and "Sequential" in str(cpu.report)
    kernel_pytorch.restore(model)
    assert device_info("cpu").memory_bytes > 0


@pytest.mark.parametrize("devices", ["cpu", torch.device("cpu"), ["cpu"], (torch.device("cpu"),), "cpu:0"])
def test_devices_may_be_one_or_several(devices: object) -> None:
    layer = HardwareAbstractionLayer(devices)  # type: ignore[arg-type]
    assert layer.target_devices == [torch.device("cpu")] and repr(layer) == "HardwareAbstractionLayer(['cpu'])"
    with pytest.raises(kernel_pytorch.KernelPyTorchError, match="torch can use"):
        HardwareAbstractionLayer("hpu:3")


def test_optimizing_at_the_first_call_can_be_taken_back() -> None:
    layer, model = HardwareAbstractionLayer("cpu"), nn.Sequential(nn.LayerNorm(64)).eval()
    kernel_pytorch.restore(layer.optimize_for_hardware(model))
    assert not model._forward_pre_hooks
    layer.optimize_for_hardware(layer.optimize_for_hardware(model, budget_seconds=0.3), budget_seconds=0.3)
    assert len(model._forward_pre_hooks) == 1
    twin = pickle.loads(pickle.dumps(model))
    with torch.no_grad():
        twin(torch.randn(2, 64)), copy.deepcopy(model)(torch.randn(2, 64))
    assert layer.report is None and len(model._forward_pre_hooks) == 1 and not twin._forward_pre_hooks


@pytest.mark.parametrize(
    ("make", "least", "most"),
    [
        (lambda: nn.Linear(512, 512), 32, 4096),
        (lambda: OptimizedLinear(512, 512), 32, 4096),
        (lambda: nn.Embedding(1000, 64), 8, 4096),
        (lambda: nn.Conv2d(3, 16, 3), 1, 64),
        (mlp, 32, 4096),
        (lambda: FP8LinearLayer(512, 512), 32, 4096),
    ],
)
def test_batches_are_sensible_and_the_same_from_run_to_run(make, least: int, most: int) -> None:
    layer = HardwareAbstractionLayer("cpu")
    found = {layer.get_optimal_batch_size(make()) for _ in range(3)}
    assert len(found) == 1 and least <= min(found) <= most, (found, layer.batch_reason)


def test_our_products_count_as_torchs() -> None:
    layer = HardwareAbstractionLayer("cpu")
    theirs, ours = (layer.memory_estimate(kind(256, 512), 16) for kind in (nn.Linear, OptimizedLinear))
    assert theirs.flops == ours.flops > 0
    batches = [layer.get_optimal_batch_size(kind(256, 512)) for kind in (nn.Linear, OptimizedLinear)]
    assert max(batches) <= 2 * min(batches)  # ours start fewer operations


if __name__ == "__main__":
    main()
