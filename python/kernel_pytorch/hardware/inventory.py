"""Every kind of device that torch or this library knows: what is there with its memory and bandwidth, what it computes
and why not, and for what is not there the cure. Works without torch, which then counts as missing.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from .. import _devices, _library, _supports

if TYPE_CHECKING:
    import torch

__all__ = ["DeviceDescription", "describe_devices"]

# A question to the core for each type: an op whose kernels decide it.
_QUESTIONS: dict[str, tuple[str, tuple[int, ...], str]] = {
    "fp32": ("matmul", (64, 64, 64), "fp32"),
    "bf16": ("matmul", (64, 64, 64), "bf16"),
    "fp16": ("matmul", (64, 64, 64), "fp16"),
    "fp64": ("matmul", (64, 64, 64), "fp64"),
    "fp8": ("scaled_matmul", (64, 64, 64), "bf16"),
    "int4": ("quantized_matmul", (64, 64, 64), "bf16"),
}
_TORCH_TYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "fp64": "float64", "fp8": "float8_e4m3fn"}
_COPY_BYTES = 64 << 20  # beyond most caches
_PORTABLE = "portable"


@dataclass(frozen=True)
class DeviceDescription:
    """One device, or a kind of device that is not there.

    `kernels` says whose run there: "kernel_pytorch", or "portable" (every op as torch operations, or by the CPU's
    kernels on copies). `bandwidth` is in bytes per second, None where neither the device tells it nor it was measured;
    `bandwidth_from` says which. `unsupported` names types with the reason. `missing` is empty where it is there.
    """

    device: str
    name: str = ""
    missing: str = ""
    kernels: str = ""
    memory_bytes: int | None = None
    bandwidth: float | None = None
    bandwidth_from: str = ""
    supported: tuple[str, ...] = ()
    unsupported: dict[str, str] = field(default_factory=dict)

    @property
    def is_present(self) -> bool:
        return not self.missing


def describe_devices(measure: bool = False) -> list[DeviceDescription]:
    """Every device, those of our kernels first, then torch's others; kinds that are not there come last with the cure.

    Args:
        measure: times a copy on each device (a few of 64 MiB) for its bandwidth; needs torch. Without it only a GPU's
            specification tells one.
    """
    has_torch = importlib.util.find_spec("torch") is not None
    found = [_ours(info, measure and has_torch) for info in _devices.devices()]
    if not has_torch:
        cure = "torch is not installed: pip install 'torch>=2.11'"
        return found + [DeviceDescription(kind, missing=cure) for kind in ("xpu", "mps", "xla")]
    for kind, devices in _torch_devices().items():
        found += [_others(device, kind, measure) for device in devices]
    listed = {one.device.split(":")[0] for one in found}
    return found + [DeviceDescription(kind, missing=why()) for kind, why in _ABSENCES.items() if kind not in listed]


def _ours(info: _devices.DeviceInfo, measure: bool) -> DeviceDescription:
    supported, unsupported = [], {}
    for name, (op, shape, dtype) in _QUESTIONS.items():
        try:
            kernels = _supports.supports(op, shape, dtype, info.device)
        except _library.KernelPyTorchError as error:
            unsupported[name] = str(error)
            continue
        if any(kernel.supported for kernel in kernels):
            supported.append(name)
        else:
            unsupported[name] = "; ".join(dict.fromkeys(kernel.reason for kernel in kernels))
    bandwidth, source = _bandwidth_of(info, measure)
    return DeviceDescription(
        info.device,
        info.name,
        "",
        "kernel_pytorch",
        info.memory_bytes,
        bandwidth,
        source,
        tuple(supported),
        unsupported,
    )


def _bandwidth_of(info: _devices.DeviceInfo, measure: bool) -> tuple[float | None, str]:
    if measure and (info.cuda is None or _torch_sees(info.device)):
        return _measured(info.device)
    if info.cuda is not None and info.cuda.memory_clock_khz > 0 and info.cuda.memory_bus_bits > 0:
        # Two transfers for each cycle of the clock that the driver tells.
        return 2.0 * info.cuda.memory_clock_khz * 1e3 * info.cuda.memory_bus_bits / 8, "memory clock and bus"
    return None, "not told; describe_devices(measure=True) times a copy"


def _torch_sees(device: str) -> bool:
    import torch  # optional: asked for only where it is there

    return torch.cuda.is_available() and int(device.split(":")[1]) < torch.cuda.device_count()


def _measured(device: str) -> tuple[float, str]:
    import torch  # optional: asked for only where it is there

    source = torch.empty(_COPY_BYTES, dtype=torch.uint8, device=device).fill_(1)
    target = torch.empty_like(source)
    wait = _waiting(source.device)
    seconds = []
    for _ in range(6):
        wait()
        start = time.perf_counter()
        target.copy_(source)
        wait()
        seconds.append(time.perf_counter() - start)
    median = sorted(seconds[1:])[2]  # the first warms up
    return 2 * _COPY_BYTES / median, "a copy, measured now: bytes read and written"


def _waiting(device: torch.device) -> Callable[[], Any]:
    import torch  # optional: asked for only where it is there

    if device.type == "cpu":
        return lambda: None
    return lambda: torch.get_device_module(device).synchronize()


def _torch_devices() -> dict[str, list[torch.device]]:
    """Those of torch that the library has no kernels for, by kind."""
    import torch  # optional: asked for only where it is there

    from . import detect_available_devices  # this module is imported by its package

    is_rocm = bool(getattr(torch.version, "hip", None)) and not _devices.has_amd_kernels()
    found = detect_available_devices()
    return {kind: devices for kind, devices in found.items() if kind != "cpu" and (kind != "cuda" or is_rocm)}


def _others(device: torch.device, kind: str, measure: bool) -> DeviceDescription:
    import torch  # optional: asked for only where it is there

    supported, unsupported = [], {}
    for name, dtype in _TORCH_TYPES.items():
        try:
            torch.zeros(2, device=device).to(getattr(torch, dtype))
            supported.append(name)
        except (RuntimeError, TypeError, NotImplementedError) as error:  # the device's own reason
            unsupported[name] = str(error).split("\n")[0]
    memory, name_of_it = _memory_and_name(device, kind)
    bandwidth, source = _measured(str(device)) if measure else (None, "torch does not tell it; measure=True")
    return DeviceDescription(
        str(device), name_of_it, "", _PORTABLE, memory, bandwidth, source, tuple(supported), unsupported
    )


def _memory_and_name(device: torch.device, kind: str) -> tuple[int | None, str]:
    import torch  # optional: asked for only where it is there

    if kind == "mps":
        return int(torch.mps.recommended_max_memory()), "Apple GPU"
    module: Any = torch.get_device_module(device) if kind != "xla" else None
    if module is None or not hasattr(module, "get_device_properties"):
        return None, kind
    properties = module.get_device_properties(device)
    return getattr(properties, "total_memory", None), getattr(properties, "name", kind)


def _why_no_cuda() -> str:
    absence = _devices.cuda_absence()
    return absence or "the driver has a GPU that torch does not see; look at CUDA_VISIBLE_DEVICES"


def _why_no_xpu() -> str:
    import torch  # optional: asked for only where it is there

    return f"torch {torch.__version__} sees no Intel GPU; install the xpu build of torch and the GPU's driver"


def _why_no_mps() -> str:
    import torch  # optional: asked for only where it is there

    if not torch.backends.mps.is_built():
        return f"torch {torch.__version__} is built without MPS; on a Mac with Apple silicon: pip install torch"
    return "torch is built with MPS and sees no GPU; macOS 14 or newer is needed"


def _why_no_xla() -> str:
    from ..backends.tpu import TPUBackend  # needs torch, which this module does not

    return TPUBackend().missing() or "torch_xla lists no device; look at PJRT_DEVICE"


_ABSENCES: dict[str, Callable[[], str]] = {
    "cuda": _why_no_cuda,
    "xpu": _why_no_xpu,
    "mps": _why_no_mps,
    "xla": _why_no_xla,
}
