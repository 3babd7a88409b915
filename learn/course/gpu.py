"""The host side of a CUDA kernel, by hand: load a cubin, describe tensors for the copy engine, launch, time.

torch gives memory, streams and events; the launch itself is the driver's, through ctypes, so that nothing is hidden.
"""

from __future__ import annotations

import ctypes
import statistics
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch

from . import build, lines

_SUPPORT = build.LEARN / "support"


@cache
def _driver() -> ctypes.CDLL:
    torch.zeros(1, device="cuda")  # makes torch's context the current one
    return ctypes.CDLL("libcuda.so.1")


def _check(status: int, what: str) -> None:
    if status != 0:
        text = ctypes.c_char_p()
        _driver().cuGetErrorString(status, ctypes.byref(text))
        raise RuntimeError(f"{what}: {(text.value or b'unknown error').decode()} ({status})")


def architecture() -> str:
    major, minor = torch.cuda.get_device_capability()
    return f"sm_{major}{minor}" + ("a" if major >= 9 else "")


class TensorMap:
    """What the copy engine knows of a bf16 tensor [..., rows, columns]: boxes of `box_rows` x 64 elements, swizzled by
    128 bytes."""

    def __init__(self, tensor: torch.Tensor, box_rows: int) -> None:
        assert tensor.dtype == torch.bfloat16 and tensor.is_contiguous()
        rows, columns = tensor.shape[-2:]
        batch = tensor.numel() // (rows * columns)
        self._memory = ctypes.create_string_buffer(128 + 64)
        self.address = (ctypes.addressof(self._memory) + 63) // 64 * 64
        sizes = (ctypes.c_uint64 * 3)(columns, rows, batch)
        strides = (ctypes.c_uint64 * 2)(columns * 2, rows * columns * 2)
        box = (ctypes.c_uint32 * 3)(64, box_rows, 1)
        steps = (ctypes.c_uint32 * 3)(1, 1, 1)
        bf16, swizzle_128, promote_256 = 9, 3, 3
        status = _driver().cuTensorMapEncodeTiled(
            ctypes.c_void_p(self.address), bf16, 3, ctypes.c_void_p(tensor.data_ptr()), sizes, strides, box, steps,
            0, swizzle_128, promote_256, 0,
        )  # fmt: skip
        _check(status, "cuTensorMapEncodeTiled")


class Kernel:
    """A function of a CUDA source, compiled for this GPU."""

    def __init__(self, source: Path, entry: str, shared_bytes: int = 0) -> None:
        cubin, self.report = build.compile_cuda(source, entry, architecture())
        self._shared_bytes = shared_bytes
        module, self._function = ctypes.c_void_p(), ctypes.c_void_p()
        driver = _driver()
        _check(driver.cuModuleLoadData(ctypes.byref(module), cubin.read_bytes()), f"loading {entry}")
        _check(driver.cuModuleGetFunction(ctypes.byref(self._function), module, entry.encode()), entry)
        if shared_bytes > 0:
            attribute = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            _check(driver.cuFuncSetAttribute(self._function, attribute, shared_bytes), f"{entry}: shared memory")

    def __call__(self, grid: tuple[int, int], block: int, *arguments: Any) -> None:
        """Tensors are passed by address, numbers as int32 or float, tensor maps by value."""
        values: list[Any] = []
        for argument in arguments:
            if isinstance(argument, torch.Tensor):
                values.append(ctypes.c_void_p(argument.data_ptr()))
            elif isinstance(argument, TensorMap):
                values.append((ctypes.c_char * 128).from_address(argument.address))
            elif isinstance(argument, float):
                values.append(ctypes.c_float(argument))
            else:
                values.append(ctypes.c_int32(argument))
        pointers = (ctypes.c_void_p * len(values))(*[ctypes.addressof(value) for value in values])
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        status = _driver().cuLaunchKernel(
            self._function, grid[0], grid[1], 1, block, 1, 1, self._shared_bytes, stream, pointers, None
        )
        _check(status, "cuLaunchKernel")


def seconds_of(run: Callable[[], object], total: float = 0.15) -> float:
    """The median over groups of launches, timed by events on the GPU."""
    for _ in range(3):
        run()
    torch.cuda.synchronize()
    once = _group(run, 2)
    count = max(1, min(50, int(0.01 / once)))
    return statistics.median(_group(run, count) for _ in range(max(5, min(25, int(total / (once * count))))))


def _group(run: Callable[[], object], count: int) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(count):
        run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3 / count


# ---- roofs ----


def multiprocessors() -> int:
    return torch.cuda.get_device_properties(0).multi_processor_count


def clock() -> float:
    """Cycles per second of an SM at most; each of its four schedulers issues one instruction of a warp per cycle."""
    kilohertz, attribute = ctypes.c_int(), 13  # CU_DEVICE_ATTRIBUTE_CLOCK_RATE
    _check(_driver().cuDeviceGetAttribute(ctypes.byref(kilohertz), attribute, 0), "cuDeviceGetAttribute")
    return kilohertz.value * 1e3


def copy_rate(bytes_: int) -> float:
    """Bytes read and written per second by a copy that moves this many."""
    source = torch.randn(bytes_ // 4, device="cuda").to(torch.bfloat16)
    target = torch.empty_like(source)
    return 2 * source.nbytes / seconds_of(lambda: target.copy_(source))


def latency(bytes_: int, warps_per_sm: int = 0) -> float:
    """Seconds of a load that waits for the one before it, in a region of this size, in lines of 128 bytes.

    0: one warp on the whole GPU. Else so many on every SM at once: what others ask for is in the way.
    """
    count = bytes_ // 128
    order = torch.randperm(count, device="cuda")
    chain = torch.empty(count, 32, dtype=torch.int32, device="cuda")
    chain[order] = (order.roll(-1) * 32).to(torch.int32)[:, None]
    blocks, threads = (multiprocessors() * warps_per_sm // 8, 256) if warps_per_sm else (1, 32)
    warps = blocks * threads // 32
    places = (torch.arange(warps, device="cuda") * (count // warps) * 32).to(torch.int32)
    walk, hops = Kernel(_SUPPORT / "roofs.cu", "walk"), 512 if warps_per_sm else 4096
    return seconds_of(lambda: walk((blocks, 1), threads, chain, hops, places), 0.05) / hops


def _random_words(count: int) -> torch.Tensor:
    return torch.randn(count * 2, device="cuda").to(torch.bfloat16).view(torch.int32)


def mma_rate() -> float:
    """FLOPs per second of mma from registers: 16 x 8 x 16 products, 8 warps per SM."""
    rounds, blocks = 2000, multiprocessors() * 2
    kernel, out = Kernel(_SUPPORT / "roofs.cu", "mma_rate"), torch.zeros(blocks * 128, device="cuda")
    words = _random_words(128 * 8)
    seconds = seconds_of(lambda: kernel((blocks, 1), 128, words, rounds, out))
    return blocks * 4 * rounds * 16 * (2 * 16 * 8 * 16) / seconds


def shared_rate() -> float:
    """Bytes per second that ldmatrix reads from the shared memory of all SMs."""
    rounds, blocks = 2000, multiprocessors() * 4
    kernel = Kernel(_SUPPORT / "roofs.cu", "shared_rate")
    out = torch.zeros(blocks * 256, dtype=torch.int32, device="cuda")
    return blocks * 8 * rounds * 8 * 512 / seconds_of(lambda: kernel((blocks, 1), 256, rounds, out))


def l2_rate() -> float:
    """Bytes per second that all SMs together read from the L2 cache: 16 MiB, which it holds and no L1 cache does."""
    count, rounds, blocks = 1 << 20, 2, multiprocessors() * 4
    kernel, words = Kernel(_SUPPORT / "roofs.cu", "l2_rate"), _random_words(4 << 20)
    out = torch.zeros(blocks * 256, dtype=torch.int32, device="cuda")
    return blocks * rounds * count * 16 / seconds_of(lambda: kernel((blocks, 1), 256, words, count, rounds, out))


def wgmma_rate() -> float:
    """FLOPs per second of wgmma from shared memory: 64 x 256 x 16 products, two warpgroups per SM."""
    rounds, blocks = 4000, multiprocessors()
    kernel = Kernel(_SUPPORT / "roofs.cu", "wgmma_rate", 49152)
    words, out = _random_words(12 * 1024), torch.zeros(blocks * 256, device="cuda")
    seconds = seconds_of(lambda: kernel((blocks, 1), 256, words, rounds, out), 0.3)
    return blocks * 2 * rounds * (2 * 64 * 256 * 64) / seconds


def exp_rate() -> float:
    """Exponentials per second."""
    rounds, blocks = 4000, multiprocessors() * 4
    kernel, out = Kernel(_SUPPORT / "roofs.cu", "exp_rate"), torch.zeros(blocks * 256, device="cuda")
    return blocks * 256 * rounds * 8 / seconds_of(lambda: kernel((blocks, 1), 256, rounds, out))


def error_of(result: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest difference as a share of the largest expected value; NaN stays."""
    return float((result.double() - expected.double()).abs().max() / expected.double().abs().max())


def measure(
    name: str,
    run: Callable[[], torch.Tensor],
    bytes_: float,
    flops: float,
    expected: torch.Tensor,
    allowed: float = 0.01,
) -> None:
    """Times `run`, compares what it returns, and says so."""
    lines.measured(name, seconds_of(run), bytes_, flops, error_of(run(), expected), allowed)
