"""kernel_pytorch.hardware, with torch and (in a process that cannot import it) without."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from kernel_pytorch import KernelPyTorchError, hardware


def test_devices_describe_themselves() -> None:
    cpu, *others = hardware.devices()
    assert cpu.device == "cpu"
    assert cpu.cpu is not None
    assert 1 <= cpu.cpu.cores <= len(os.sched_getaffinity(0))
    assert cpu.memory_bytes > 1 << 20
    assert cpu.fingerprint
    for index, other in enumerate(others):
        assert other.device == f"cuda:{index}"
        assert other.cuda is not None
        assert other.cuda.compute_capability >= (5, 0)
    assert bool(hardware.cuda_absence()) == (not others)


def test_device_info_of_each_spelling() -> None:
    assert hardware.device_info() == hardware.device_info("cpu") == hardware.devices()[0]
    torch = pytest.importorskip("torch")
    assert hardware.device_info(torch.device("cpu")) == hardware.devices()[0]
    with pytest.raises(KernelPyTorchError, match="cuda:99"):
        hardware.device_info("cuda:99")


def test_detect_available_devices_gives_torch_devices() -> None:
    torch = pytest.importorskip("torch")
    found = hardware.detect_available_devices()
    assert set(found) >= {"cuda", "xpu", "mps", "xla", "cpu"} and list(found)[-1] == "cpu"
    assert found["cpu"] == [torch.device("cpu")]
    assert found["cuda"] == [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    for kind, devices in found.items():
        assert all(device.type == kind for device in devices)


@pytest.mark.parametrize(
    ("kind", "patches"),
    [
        ("cuda", {"version.hip": "6.2", "cuda.is_available": lambda: True, "cuda.device_count": lambda: 2}),
        ("xpu", {"xpu.is_available": lambda: True, "xpu.device_count": lambda: 2}),
        ("mps", {"backends.mps.is_available": lambda: True}),
    ],
)
def test_detect_available_devices_lists_what_torch_has_of_other_vendors(monkeypatch, kind, patches) -> None:
    torch = pytest.importorskip("torch")
    for path, value in patches.items():
        owner, name = torch, path
        while "." in name:
            first, name = name.split(".", 1)
            owner = getattr(owner, first)
        monkeypatch.setattr(owner, name, value, raising=False)
    found = hardware.detect_available_devices()
    assert found[kind] == [torch.device(kind, index) for index in range(1 if kind == "mps" else 2)]
    layer = hardware.HardwareAbstractionLayer()
    assert layer.device == found[kind][0] and not layer.has_our_kernels and kind in repr(layer)


def test_detect_available_devices_without_torch() -> None:
    # A finder that denies torch is what a Python without torch looks like to find_spec and to import.
    program = (
        "import sys\n"
        "class Deny:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'torch' or name.startswith('torch.'):\n"
        "            raise ModuleNotFoundError(name)\n"
        "sys.meta_path.insert(0, Deny())\n"
        "import importlib.util\n"
        "real = importlib.util.find_spec\n"
        "importlib.util.find_spec = lambda name, package=None: None if name == 'torch' else real(name, package)\n"
        "from kernel_pytorch.hardware import detect_available_devices\n"
        "found = detect_available_devices()\n"
        "assert found['cpu'] == ['cpu'], found\n"
        "assert all(isinstance(name, str) for name in found['cuda'])\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_cuda_can_be_turned_off() -> None:
    program = (
        "from kernel_pytorch import hardware\n"
        "assert [info.device for info in hardware.devices()] == ['cpu']\n"
        "assert 'KERNEL_PYTORCH_DISABLE_CUDA' in hardware.cuda_absence()\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, env={**os.environ, "KERNEL_PYTORCH_DISABLE_CUDA": "1"})


def test_the_machine_is_described() -> None:
    cpu = hardware.device_info().cpu
    assert cpu is not None
    assert cpu.cores <= cpu.physical_cores <= cpu.logical_cpus == len(os.sched_getaffinity(0))
    assert cpu.sockets >= 1 and cpu.threads_per_core >= 1 and cpu.slow_cores < cpu.physical_cores
    assert sum(cpu.numa_node_cpus) in (0, cpu.logical_cpus)
    assert (cpu.quota_cpus > 0) == bool(cpu.quota_file)


def test_describe_devices_lists_every_kind_with_reasons() -> None:
    pytest.importorskip("torch")
    found = hardware.describe_devices()
    kinds = {one.device.split(":")[0] for one in found}
    assert kinds >= {"cpu", "cuda", "xpu", "mps", "xla"} and found[0].device == "cpu"
    cpu = found[0]
    assert cpu.is_present and cpu.kernels == "kernel_pytorch" and cpu.memory_bytes
    assert {"fp32", "bf16", "fp64"} <= set(cpu.supported) and cpu.bandwidth is None and "measure" in cpu.bandwidth_from
    for one in found:
        assert bool(one.missing) != one.is_present and not (one.missing and one.kernels)
        assert all(reason for reason in one.unsupported.values())
        assert not set(one.supported) & set(one.unsupported)
        if one.missing:
            assert one.device in ("cuda", "xpu", "mps", "xla") and one.memory_bytes is None
    (measured,) = [one for one in hardware.describe_devices(measure=True) if one.device == "cpu"]
    assert measured.bandwidth is not None and 1e8 < measured.bandwidth < 1e13 and "measured" in measured.bandwidth_from


def test_describe_devices_of_other_vendors(monkeypatch) -> None:
    """A device of torch that we have no kernels for: what it says of itself, and the reasons of what it refuses."""
    torch = pytest.importorskip("torch")
    from types import SimpleNamespace

    from kernel_pytorch.hardware import inventory

    properties = SimpleNamespace(total_memory=1 << 34, name="Arc")
    module = SimpleNamespace(get_device_properties=lambda _: properties, synchronize=lambda: None)
    device = torch.device("xpu", 0)
    real = torch.zeros

    class Array:
        def to(self, dtype):
            if dtype is torch.float64:
                raise RuntimeError("Required aspect fp64 is not supported\nmore")
            return real(2)

    monkeypatch.setattr(inventory, "_torch_devices", lambda: {"xpu": [device], "mps": []})
    monkeypatch.setattr(torch, "get_device_module", lambda _: module)
    monkeypatch.setattr(torch, "zeros", lambda *_, **__: Array())
    (xpu,) = [one for one in hardware.describe_devices() if one.device.startswith("xpu")]
    assert (xpu.device, xpu.name, xpu.kernels, xpu.memory_bytes) == ("xpu:0", "Arc", "portable", 1 << 34)
    assert xpu.unsupported == {"fp64": "Required aspect fp64 is not supported"} and "bf16" in xpu.supported


def test_the_doctor_advises_within_a_quota(monkeypatch) -> None:
    from dataclasses import replace

    from kernel_pytorch import _devices, _environment

    info = _devices.device_info("cpu")
    assert info.cpu is not None
    limited = replace(info, cpu=replace(info.cpu, quota_cpus=1.5, cores=2))
    monkeypatch.setattr(_devices, "devices", lambda: [limited])
    (finding,) = _environment.look_at_threads(8)
    assert finding.health == "problem" and "1.5 CPUs" in finding.text and finding.cure == "export OMP_NUM_THREADS=2"
    assert not list(_environment.look_at_threads(2))
    monkeypatch.setattr(_devices, "devices", lambda: [replace(info, cpu=replace(info.cpu, quota_cpus=0.0))])
    assert not list(_environment.look_at_threads(64))
