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
