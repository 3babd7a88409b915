"""Backends say what is missing and the cure, and prepare models where they can."""

from __future__ import annotations

import collections
import sys
from types import ModuleType, SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from kernel_pytorch._optimize.changes import changes_of  # noqa: E402
from kernel_pytorch.backends import BackendUnavailableError, available_backends  # noqa: E402
from kernel_pytorch.backends.amd import AMDBackend  # noqa: E402
from kernel_pytorch.backends.intel import IntelBackend  # noqa: E402
from kernel_pytorch.backends.nvidia import NVIDIABackend  # noqa: E402
from kernel_pytorch.backends.tpu import TPUBackend  # noqa: E402

import kernel_pytorch as kpt  # noqa: E402

ALL = (NVIDIABackend, AMDBackend, TPUBackend, IntelBackend)
nn = torch.nn


@pytest.fixture(autouse=True)
def one_thread():
    """Of all there is on a busy machine, waiting for each other's threads takes longest."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


CALLS = collections.Counter()  # not attributes of the models: optimize puts those back after its trials


class Norms(nn.Module):
    """Large enough for the kernels to pay, small enough for a test."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.Sequential(*(nn.LayerNorm(512) for _ in range(2)))

    @property
    def calls(self) -> int:
        return CALLS[id(self)]

    def forward(self, x, scale=1.0):
        CALLS[id(self)] += 1
        return self.norms(x) * scale


@pytest.mark.parametrize("kind", ALL)
def test_an_absent_backend_names_what_is_missing_and_the_cure(kind) -> None:
    backend = kind()
    info = backend.get_device_info()
    assert info["backend"] == backend.name
    assert info["available"] == backend.is_available() == (not info["missing"]) == bool(info["devices"])
    if backend.is_available():
        assert backend.device.type in ("cpu", "cuda", "xpu", "xla")
        return
    model = nn.Linear(2, 2)
    with pytest.raises(BackendUnavailableError) as raised:
        backend.prepare_model(model)
    assert str(raised.value).startswith(f"{kind.__name__}: ") and info["missing"] in str(raised.value)
    assert any(word in info["missing"] for word in ("install", "look at", "set ", "use "))
    assert model.weight.device.type == "cpu"
    with pytest.raises(BackendUnavailableError):
        _ = backend.device


@pytest.mark.parametrize(
    ("capability", "is_h100", "is_blackwell", "supports_fp8"),
    [
        ((8, 0), False, False, False),
        ((8, 9), False, False, True),
        ((9, 0), True, False, True),
        ((10, 0), False, True, True),
    ],
)
def test_nvidia_knows_the_generation(monkeypatch, capability, is_h100, is_blackwell, supports_fp8) -> None:
    monkeypatch.setattr(NVIDIABackend, "missing", lambda self: "")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    backend = NVIDIABackend()
    assert (backend.is_h100, backend.is_blackwell, backend.supports_fp8) == (is_h100, is_blackwell, supports_fp8)


@pytest.mark.gpu
def test_nvidia_tells_its_memory() -> None:
    held = torch.zeros(1 << 20, device="cuda")
    stats = NVIDIABackend().get_memory_stats()
    assert held.nbytes <= stats["allocated_bytes"] <= stats["reserved_bytes"] <= stats["total_bytes"]
    assert stats["peak_allocated_bytes"] >= stats["allocated_bytes"] and 0 < stats["free_bytes"] < stats["total_bytes"]


def test_available_backends_are_those_that_say_so() -> None:
    assert {type(backend) for backend in available_backends()} == {kind for kind in ALL if kind().is_available()}


@pytest.mark.parametrize(
    ("version", "seen", "words"),
    [
        ({"hip": "6.2", "cuda": None}, False, "built for AMD GPUs"),
        ({"hip": None, "cuda": None}, False, "built without CUDA; install a CUDA build"),
        ({"hip": None, "cuda": "13.0"}, False, "no CUDA device: "),
    ],
)
def test_nvidia_says_which_piece_is_missing(monkeypatch, version, seen, words) -> None:
    for name, value in version.items():
        monkeypatch.setattr(torch.version, name, value, raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: seen)
    assert words in NVIDIABackend().missing()


def test_nvidia_wants_a_device_that_the_kernels_run_on(monkeypatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "Tesla T4")
    assert "Tesla T4 has compute capability 7.5; the kernels need 8.0" in NVIDIABackend().missing()
    assert "no device cuda:3; there are 1" in NVIDIABackend(SimpleNamespace(device_id=3)).missing()


def test_amd_on_a_rocm_torch_moves_the_model_and_claims_no_kernels(monkeypatch) -> None:
    monkeypatch.setattr(torch.version, "hip", "6.2", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    properties = SimpleNamespace(name="MI300X", total_memory=1, gcnArchName="gfx942", multi_processor_count=304)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    backend = AMDBackend()
    info = backend.get_device_info()
    assert info["available"] and info["kernels"] == "torch" and info["devices"][0]["architecture"] == "gfx942"
    monkeypatch.setattr(AMDBackend, "_device", lambda self: torch.device("meta"))
    model = backend.prepare_model(nn.Linear(2, 2), optimization_level="aggressive")
    assert model.weight.device.type == "meta" and changes_of(model) is None


def test_tpu_reads_torch_xla(monkeypatch) -> None:
    if "torch_xla" not in TPUBackend().missing():
        pytest.skip("torch_xla is here")
    package, runtime = ModuleType("torch_xla"), ModuleType("torch_xla.runtime")
    package.__spec__ = SimpleNamespace()  # type: ignore[assignment]
    runtime.device_type = lambda: "CPU"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch_xla", package)
    monkeypatch.setitem(sys.modules, "torch_xla.runtime", runtime)
    assert "torch_xla's device is a CPU, not a TPU" in TPUBackend().missing()
    runtime.device_type = lambda: "TPU"  # type: ignore[attr-defined]
    runtime.addressable_device_count = lambda: 4  # type: ignore[attr-defined]
    assert len(TPUBackend().get_device_info()["devices"]) == 4

    def broken():
        raise RuntimeError("no accelerator")

    runtime.device_type = broken  # type: ignore[attr-defined]
    assert "finds no device (RuntimeError: no accelerator)" in TPUBackend().missing()


def intel(monkeypatch) -> IntelBackend:
    """On whatever CPU this is: what it prepares there is what it prepares on an Intel."""
    monkeypatch.setattr(IntelBackend, "missing", lambda self: "")
    return IntelBackend()


def test_intel_describes_the_cpu(monkeypatch) -> None:
    (cpu,) = intel(monkeypatch).get_device_info()["devices"]
    assert cpu["device"] == "cpu" and cpu["cores"] >= 1 and cpu["isa"]
    with pytest.raises(ValueError, match="device_type is 'gpu'"):
        IntelBackend(SimpleNamespace(device_type="gpu"))
    gpu = IntelBackend(SimpleNamespace(device_type="xpu"))
    assert gpu.get_device_info()["kernels"] == "torch" and IntelBackend.has_our_kernels


def test_prepared_models_compute_the_same(monkeypatch) -> None:
    x = torch.randn(128, 512)
    model = Norms().eval()
    with torch.no_grad():
        want = model(x)
        prepared = intel(monkeypatch).prepare_model(model, sample_inputs=x, budget_seconds=0.3)
        assert prepared is model
        torch.testing.assert_close(model(x), want, rtol=1e-4, atol=1e-5)
        kpt.restore(model)
        assert torch.equal(model(x), want)


def test_without_a_sample_the_first_call_is_it(monkeypatch) -> None:
    x = torch.randn(128, 512)
    model = Norms().eval()
    with torch.no_grad():
        want = model(x, scale=2.0)
        assert intel(monkeypatch).prepare_model(model, budget_seconds=0.3) is model
        calls = model.calls
        torch.testing.assert_close(model(x, scale=2.0), want, rtol=1e-4, atol=1e-5)
        assert model.calls > calls + 1  # it was measured
        calls = model.calls
        torch.testing.assert_close(model(x, scale=2.0), want, rtol=1e-4, atol=1e-5)
        assert model.calls == calls + 1  # and only once


def test_levels_are_checked(monkeypatch) -> None:
    with pytest.raises(ValueError, match="is 'best'; it is one of conservative, balanced, aggressive"):
        intel(monkeypatch).prepare_model(nn.Linear(2, 2), optimization_level="best")


@pytest.mark.parametrize("kind", ALL)
@pytest.mark.parametrize("method", ["synchronize", "empty_cache", "clear_cache", "cleanup", "get_memory_stats"])
def test_methods_of_an_absent_backend_raise_with_the_cure(kind, method) -> None:
    backend = kind()
    if backend.is_available():
        getattr(backend, method)()
        return
    with pytest.raises(BackendUnavailableError, match=kind.__name__):
        getattr(backend, method)()
    with pytest.raises(BackendUnavailableError, match=kind.__name__):
        backend.prepare_data({"x": torch.zeros(2)})
    assert backend.get_all_devices() == []


def test_a_cpu_backend_has_the_methods(monkeypatch) -> None:
    backend = intel(monkeypatch)
    backend.cleanup()
    stats = backend.get_memory_stats()
    assert stats["free_bytes"] > 0 and stats["total_bytes"] > 0
    assert len(backend.get_all_devices()) == 1
    x = torch.zeros(2)
    moved = backend.prepare_data({"x": [x, "text"]})
    assert moved["x"][0].device == backend.device and moved["x"][1] == "text"


def test_nvidia_without_a_device(monkeypatch) -> None:
    backend = NVIDIABackend()
    if backend.is_available():
        pytest.skip("there is one")
    assert backend.devices == []
    with pytest.raises(ValueError, match=r"no device cuda:7; there are 0"):
        backend.set_device(7)
    with pytest.raises(BackendUnavailableError):
        backend.get_optimal_attention_kernel(128)


def test_a_tpu_saves_and_loads_by_the_host(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(TPUBackend, "missing", lambda self: "")
    monkeypatch.setattr(TPUBackend, "_device", lambda self: torch.device("cpu"))
    monkeypatch.setattr(TPUBackend, "synchronize", lambda self: None)
    model, other = nn.Linear(3, 2), nn.Linear(3, 2)
    backend = TPUBackend()
    backend.save_model(model, tmp_path / "model.pt")
    assert backend.load_model(other, tmp_path / "model.pt") is other and torch.equal(other.weight, model.weight)
    memory = ModuleType("torch_xla.core.xla_model")
    memory.get_memory_info = lambda device: {"bytes_used": 3, "bytes_limit": 16}  # type: ignore[attr-defined]
    for name in ("torch_xla", "torch_xla.core"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "torch_xla.core.xla_model", memory)
    assert backend.get_memory_stats() == {"allocated_bytes": 3, "free_bytes": 13, "total_bytes": 16}
