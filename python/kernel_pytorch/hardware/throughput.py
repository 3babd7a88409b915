"""How long a step takes by its sizes, so that the batch beyond which throughput hardly grows has one answer.

Every operation takes the longest of three times: that of starting it, of its products at the rate of the device's
units, and of its bytes at the rate of the memory. The rates follow from the description of the device, not from a
measurement: a measured rate differs from run to run, and the batch with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .._devices import DeviceInfo

__all__ = ["Rates", "StepTime", "Work", "rates_of", "step_time"]


@dataclass(frozen=True)
class Work:
    """The work of one operation."""

    flops: float
    bytes: float


@dataclass(frozen=True)
class Rates:
    """A device's operations and bytes per second, and the microseconds to start an operation."""

    flops_per_second: float
    bytes_per_second: float
    start_us: float

    def microseconds(self, work: Work) -> float:
        return max(work.flops / self.flops_per_second, work.bytes / self.bytes_per_second) * 1e6


@dataclass(frozen=True)
class StepTime:
    """fixed_us + batch * sample_us."""

    fixed_us: float
    sample_us: float


_CPU_CLOCK_HZ = 2.5e9  # of servers under vector load
_CPU_BYTES_PER_SECOND = 10e9  # of one core, and of eight that share a memory controller eight times that
# Operations a cycle and core by instruction level: half of two units' multiply-adds, which sizes of layers reach.
_CPU_FLOPS_PER_CYCLE = {"v2": 8, "v3": 16, "v4": 32}
# Operations per cycle and multiprocessor of the tensor cores for 16-bit types; fp32 runs on the other units.
_TENSOR_FLOPS_PER_CYCLE = {8: 1024, 9: 4096, 10: 8192, 12: 1024}
_CUDA_FP32_FLOPS_PER_CYCLE = 256


def rates_of(info: DeviceInfo, element_bytes: int) -> Rates:
    """The rates of a device for GEMMs with elements of this size."""
    if info.cuda is not None:
        cuda = info.cuda
        major, minor = cuda.compute_capability
        wide = 2048 if (major, minor) == (8, 0) else _TENSOR_FLOPS_PER_CYCLE.get(major, 1024)
        per_cycle = wide if element_bytes < 4 else _CUDA_FP32_FLOPS_PER_CYCLE * 4 / element_bytes
        flops = cuda.multiprocessors * cuda.clock_khz * 1e3 * per_cycle
        return Rates(flops, 2.0 * cuda.memory_clock_khz * 1e3 * cuda.memory_bus_bits / 8, start_us=5.0)
    assert info.cpu is not None
    per_cycle = _CPU_FLOPS_PER_CYCLE.get(info.cpu.isa[:2], 8) * 4 / max(element_bytes, 4)
    cores = info.cpu.cores
    return Rates(cores * _CPU_CLOCK_HZ * per_cycle, _CPU_BYTES_PER_SECOND * min(cores, 8), start_us=3.0)


def step_time(
    rates: Rates, batches: tuple[int, int], small: Sequence[Work], large: Sequence[Work], update: Work
) -> StepTime:
    """From the operations of a step at two batches, the first the smaller; `update` is the optimizer's.

    Steps whose operations differ in number (a loop over samples) are taken as one operation each.
    """
    samples = batches[1] - batches[0]
    starts = rates.start_us * len(small)
    if len(small) != len(large):
        small, large = [_sum(small)], [_sum(large)]
    sample_us, weights_us = 0.0, 0.0
    for few, many in zip(small, large, strict=True):
        each = Work(max(many.flops - few.flops, 0.0) / samples, max(many.bytes - few.bytes, 0.0) / samples)
        sample_us += rates.microseconds(each)
        weights_us += rates.microseconds(Work(0.0, max(few.bytes - batches[0] * each.bytes, 0.0)))
    return StepTime(max(starts, weights_us) + rates.microseconds(update), sample_us)


def _sum(work: Sequence[Work]) -> Work:
    return Work(sum(one.flops for one in work), sum(one.bytes for one in work))
