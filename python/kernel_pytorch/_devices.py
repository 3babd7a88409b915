"""The devices that the library finds, and what it launched on them; `kernel_pytorch.hardware` is the public name.

Works without torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from . import _library

if TYPE_CHECKING:
    import torch

__all__ = [
    "CpuDetails",
    "CudaDetails",
    "DeviceInfo",
    "LaunchCounts",
    "cuda_absence",
    "device_info",
    "devices",
    "has_amd_kernels",
    "launch_counts",
]


@dataclass(frozen=True)
class CpuDetails:
    """The CPU's side of a DeviceInfo. `isa` is what kernels may use, `machine_isa` what the machine has.

    `cores` is how many threads our own pool has: one per physical core of the affinity mask, within the container's
    quota (`quota_cpus`, 0: none). `slow_cores` are the efficiency cores of hybrid machines, `numa_node_cpus` the
    logical CPUs of each NUMA node.
    """

    isa: str
    machine_isa: str
    cores: int
    l1_data_bytes: int
    l2_bytes: int
    l3_bytes: int
    amx_palette_missing: bool
    logical_cpus: int
    physical_cores: int
    slow_cores: int
    threads_per_core: int
    sockets: int
    numa_node_cpus: tuple[int, ...]
    quota_cpus: float
    quota_file: str
    memory_limit_bytes: int
    memory_limit_file: str


@dataclass(frozen=True)
class CudaDetails:
    """A CUDA device's side of a DeviceInfo. `driver_version` is 13000 for 13.0; `gfx` is empty but for AMD's GPUs
    ("gfx90a"), whose `compute_capability` is (0, 0)."""

    gfx: str
    compute_capability: tuple[int, int]
    multiprocessors: int
    l2_bytes: int
    shared_bytes_per_block: int
    shared_bytes_per_multiprocessor: int
    clock_khz: int
    memory_clock_khz: int
    memory_bus_bits: int
    driver_version: int


@dataclass(frozen=True)
class DeviceInfo:
    """A device: its name ("cpu", "cuda:0"), its memory, and the fingerprint under which measurements are kept."""

    device: str
    name: str
    memory_bytes: int
    fingerprint: str
    cpu: CpuDetails | None = None
    cuda: CudaDetails | None = None


@dataclass(frozen=True)
class LaunchCounts:
    """What was handed to the CUDA driver: kernels, and fills of memory (counters, empty sums) by the driver itself."""

    kernels: int
    fills: int

    def __sub__(self, before: LaunchCounts) -> LaunchCounts:
        return LaunchCounts(self.kernels - before.kernels, self.fills - before.fills)


def _read(fields: dict[str, Any]) -> DeviceInfo:
    cpu = fields.get("cpu")
    cuda = fields.get("cuda")
    if cuda is not None:
        cuda = {**cuda, "compute_capability": tuple(cuda["compute_capability"])}
    return DeviceInfo(
        device=fields["device"],
        name=fields["name"],
        memory_bytes=fields["memory_bytes"],
        fingerprint=fields["fingerprint"],
        cpu=CpuDetails(**{**cpu, "numa_node_cpus": tuple(cpu["numa_node_cpus"])}) if cpu is not None else None,
        cuda=CudaDetails(**cuda) if cuda is not None else None,
    )


def devices() -> list[DeviceInfo]:
    """The CPU first, then every CUDA device."""
    return [_read(fields) for fields in _library.call("devices", has_request=False)["devices"]]


def cuda_absence() -> str:
    """Why there is no CUDA device; empty where there is one."""
    absence: str = _library.call("devices", has_request=False)["cuda_absence"]
    return absence


def has_amd_kernels() -> bool:
    """Whether KERNEL_PYTORCH_AMD=1 asks for the library's kernels on AMD's GPUs; this starts no driver."""
    options = _library.call("options", has_request=False)["options"]
    return any(option["variable"] == "KERNEL_PYTORCH_AMD" and option["value"] == "1" for option in options)


def launch_counts() -> LaunchCounts:
    """Our launches since this process began, by all threads; torch's are not in it.

    What a CUDA graph captures is counted once, at its capture: replays are the driver's.
    `kernel_pytorch.utils.profiling.count_launches` gives those of one call.
    """
    return LaunchCounts(**_library.call("launches", has_request=False))


def device_info(device: str | torch.device = "cpu") -> DeviceInfo:
    """The device's DeviceInfo. `device` is "cpu", "cuda", "cuda:1" or a torch.device.

    Raises KernelPyTorchError, with the reason, for a device that is not there.
    """
    name = str(device)
    wanted = {"cuda": "cuda:0", "cpu:0": "cpu"}.get(name, name)
    found = devices()
    for info in found:
        if info.device == wanted:
            return info
    absence = cuda_absence() if wanted.startswith("cuda") else ""
    names = ", ".join(info.device for info in found)
    raise _library.KernelPyTorchError(
        f"no device {name!r} here (there is {names}){'; ' if absence else ''}{absence}", "device"
    )
