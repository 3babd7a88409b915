"""Buckets of shapes: which sizes inputs are padded to, learned from what is seen. Plans are C++ (plan/bucket_plan)."""

from __future__ import annotations

import bisect
import copy
import enum
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .. import _library
from .. import _torch as _torch  # first: it says what is missing where torch is missing or old
from .padding import PaddingStrategy, pad, unpad

import torch  # isort: skip
from torch import Tensor

__all__ = ["BucketingStrategy", "DynamicShapeBucketing", "ShapeBucket", "create_optimal_bucketing_system"]

_MOST_LENGTHS = 40_000  # of one plan: a request to the library is at most a megabyte


class BucketingStrategy(enum.Enum):
    """How the buckets of each dimension are chosen from the sizes seen."""

    GEOMETRIC = "geometric"  # equal ratios
    LINEAR = "linear"  # equal steps
    ADAPTIVE = "adaptive"  # least cost, with old sizes fading; changed where that gains enough
    HARDWARE_AWARE = "hardware_aware"  # least cost, at sizes that fill the device's tiles
    MEMORY_OPTIMAL = "memory_optimal"  # least padding
    OPTIMAL = "optimal"  # least cost

    @classmethod
    def _missing_(cls, value: object) -> BucketingStrategy:
        known = ", ".join(each.value for each in cls)
        raise ValueError(f'bucketing: strategy is "{value}"; it is one of {known}')


@dataclass
class ShapeBucket:
    """One set of sizes that inputs are padded to. `elements` counts what was real, `padded_elements` what was run."""

    id: int
    shape: tuple[int, ...]
    usage: int = 0
    elements: int = 0
    padded_elements: int = 0

    @property
    def padding_overhead(self) -> float:
        return self.padded_elements / self.elements - 1 if self.elements else 0.0


class DynamicShapeBucketing:
    """Finds the bucket of a shape, pads to it and back, and adapts to what it sees. Safe to use from several threads.

    Args:
        strategy: see BucketingStrategy.
        max_buckets: of each dimension.
        min_bucket_usage: shapes to see before buckets are changed by themselves.
        memory_limit_gb: of the CUDA graphs that a DynamicShapeModule keeps.
        enable_adaptive_optimization: buckets follow what is seen; False keeps the first plan.
        hardware_info: a device ("cuda:0", torch.device, hardware.DeviceInfo) to plan for; None is CUDA where it is.
        dimensions: that are bucketed; the others keep their size and are part of a bucket. None learns them from
            samples: those that vary, without the last of a floating-point tensor, which holds features.
        cost: of one item at size L, {"floor", "linear", "quadratic", "bucket"}: max(floor, linear L + quadratic L^2),
            and a fixed cost of each bucket. Default: L + L^2 / 8192, a transformer's share of attention; of the batch
            (dimension 0) only the linear part counts.
        alignment: buckets are multiples of it (not those of the batch).
        longest: size of a dimension that must fit, seen or not, {dimension: size}.
        replan_every: shapes between two looks at the plan.
        least_gain: share of the cost that a change of buckets must save.
    """

    def __init__(
        self,
        strategy: BucketingStrategy = BucketingStrategy.HARDWARE_AWARE,
        max_buckets: int = 32,
        min_bucket_usage: int = 10,
        memory_limit_gb: float = 16.0,
        enable_adaptive_optimization: bool = True,
        hardware_info: Any = None,
        *,
        dimensions: Sequence[int] | None = None,
        cost: Mapping[str, float] | None = None,
        alignment: int = 1,
        longest: Mapping[int, int] | None = None,
        replan_every: int = 1000,
        least_gain: float = 0.05,
    ) -> None:
        if max_buckets < 1 or alignment < 1 or replan_every < 1:
            raise ValueError(
                f"DynamicShapeBucketing: max_buckets {max_buckets}, alignment {alignment} and replan_every "
                f"{replan_every} must be positive"
            )
        self.strategy = BucketingStrategy(strategy)
        self.max_buckets = max_buckets
        self.min_bucket_usage = min_bucket_usage
        self.memory_limit_gb = memory_limit_gb
        self.enable_adaptive_optimization = enable_adaptive_optimization
        self.device = _device_name(hardware_info)
        self.dimensions = None if dimensions is None else tuple(sorted(set(dimensions)))
        self.cost = dict(cost) if cost is not None else {"linear": 1.0, "quadratic": 1.0 / 8192}
        self.alignment = alignment
        self.longest = dict(longest or {})
        self.replan_every = replan_every
        self.least_gain = least_gain
        self._lock = threading.RLock()
        self._loose: dict[int, set[int]] = {}  # dimension -> sizes in use that no plan has
        self._seen: dict[int, dict[int, float]] = {}  # dimension -> size -> weight
        self._sizes: dict[int, list[int]] = {}  # dimension -> bucket sizes, ascending
        self._reasons: dict[int, str] = {}
        self._buckets: dict[tuple[int, ...], ShapeBucket] = {}
        self._by_id: dict[int, ShapeBucket] = {}
        self._next_id = 0
        self._observations = 0
        self._since_plan = 0
        self._replans = 0

    def __repr__(self) -> str:
        sizes = ", ".join(f"{dim}: {list(sizes)}" for dim, sizes in self._sizes.items())
        return (
            f"DynamicShapeBucketing({self.strategy.value}, max_buckets={self.max_buckets}, dimensions="
            f"{self.dimensions}, sizes={{{sizes}}}, {self._observations} shapes seen)"
        )

    def __getstate__(self) -> dict[str, Any]:
        with self._lock:
            return {name: copy.copy(value) for name, value in self.__dict__.items() if name != "_lock"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._lock = threading.RLock()

    # ---- what callers use ----

    def dimensions_of(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The bucketed dimensions of a shape."""
        if self.dimensions is None:  # the last of three is taken for features
            return tuple(range(len(shape) if len(shape) < 3 else len(shape) - 1))
        dims = self.dimensions
        return tuple(dim for dim in dims if dim < len(shape))

    def find_optimal_bucket(self, shape: Sequence[int]) -> int:
        """The id of the smallest bucket that the shape fits into; notes that it was seen."""
        shape = tuple(int(size) for size in shape)
        with self._lock:
            self._observe(shape)
            key = self._padded(shape)
            bucket = self._buckets.get(key)
            if bucket is None:
                bucket = ShapeBucket(self._next_id, key)
                self._next_id += 1
                self._buckets[key] = self._by_id[bucket.id] = bucket
            bucket.usage += 1
            bucket.elements += _product(shape)
            bucket.padded_elements += _product(key)
            return bucket.id

    def bucket_shape(self, bucket_id: int) -> tuple[int, ...]:
        with self._lock:
            if bucket_id not in self._by_id:
                raise KeyError(f"DynamicShapeBucketing: there is no bucket {bucket_id}")
            return self._by_id[bucket_id].shape

    def pad_to_bucket_shape(
        self, tensor: Tensor, bucket_id: int, strategy: PaddingStrategy = PaddingStrategy.ZEROS
    ) -> Tensor:
        """The tensor at the bucket's sizes."""
        shape = self.bucket_shape(bucket_id)
        if len(shape) != tensor.dim():
            raise ValueError(f"bucket {bucket_id} is {shape}; a tensor of {tensor.dim()} dimensions does not fit")
        return pad(tensor, dict(enumerate(shape)), PaddingStrategy(strategy))

    def unpad_from_bucket_shape(self, tensor: Tensor, original_shape: Sequence[int]) -> Tensor:
        """The real part of a padded tensor: a view."""
        if len(original_shape) != tensor.dim():
            raise ValueError(f"a tensor of shape {tuple(tensor.shape)} was not padded from {tuple(original_shape)}")
        return unpad(tensor, dict(enumerate(original_shape)))

    def optimize_buckets(self, force: bool = False) -> bool:
        """Plans anew from what was seen, if enough was or `force`; whether buckets changed."""
        with self._lock:
            if not self._seen or (not force and self._observations < self.min_bucket_usage):
                return False
            self._since_plan = 0
            changed = False
            for dim, weights in self._seen.items():
                plan = self._plan(dim, weights, force)
                self._reasons[dim] = plan["reason"]
                if plan["buckets"] != self._sizes.get(dim):
                    self._sizes[dim] = plan["buckets"]
                    changed = True
            if changed:
                self._replans += 1
                self._loose.clear()
                self._drop_old_buckets()
            return changed

    def _drop_old_buckets(self) -> None:
        """The others stay known by id: tensors may still be padded to them."""

        def is_current(key: tuple[int, ...]) -> bool:
            return all(
                key[dim] in self._sizes.get(dim, ()) or key[dim] in self._loose.get(dim, ())
                for dim in self.dimensions_of(key)
            )

        self._buckets = {key: bucket for key, bucket in self._buckets.items() if is_current(key)}

    def sizes(self, dim: int) -> list[int]:
        """The bucket sizes of a dimension, ascending."""
        with self._lock:
            return list(self._sizes.get(dim, ()))

    def get_performance_stats(self) -> dict[str, Any]:
        """Counts and the padding so far."""
        with self._lock:
            elements = sum(bucket.elements for bucket in self._by_id.values())
            padded = sum(bucket.padded_elements for bucket in self._by_id.values())
            return {
                "strategy": self.strategy.value,
                "observations": self._observations,
                "total_buckets": len(self._buckets),
                "replans": self._replans,
                "padding_overhead": padded / elements - 1 if elements else 0.0,
            }

    def get_bucket_analysis(self) -> dict[str, Any]:
        """Every bucket with its use, the sizes of each dimension, and the plans' reasons."""
        with self._lock:
            return {
                "buckets": [
                    {
                        "id": bucket.id,
                        "shape": bucket.shape,
                        "usage": bucket.usage,
                        "padding_overhead": bucket.padding_overhead,
                    }
                    for bucket in sorted(self._by_id.values(), key=lambda bucket: -bucket.usage)
                ],
                "sizes": {dim: list(sizes) for dim, sizes in self._sizes.items()},
                "reasons": dict(self._reasons),
            }

    def learn(self, shapes: Sequence[Sequence[int]]) -> None:
        """Notes shapes without giving them buckets, then plans."""
        with self._lock:
            for shape in shapes:
                self._note(tuple(int(size) for size in shape))
            self.optimize_buckets(force=True)

    # ---- what they stand on ----

    def _note(self, shape: tuple[int, ...]) -> None:
        self._observations += 1
        for dim in self.dimensions_of(shape):
            if shape[dim] > 0:
                weights = self._seen.setdefault(dim, {})
                weights[shape[dim]] = weights.get(shape[dim], 0.0) + 1.0

    def _observe(self, shape: tuple[int, ...]) -> None:
        self._note(shape)
        self._since_plan += 1
        if self.enable_adaptive_optimization and self._since_plan >= self.replan_every:
            self.optimize_buckets()
            for weights in self._seen.values():  # half of what is old: a drift shows within a few plans
                for size in list(weights):
                    weights[size] /= 2
                    if weights[size] < 1e-3:
                        del weights[size]

    def _padded(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(
            self._size_for(dim, size) if dim in self.dimensions_of(shape) else size for dim, size in enumerate(shape)
        )

    def _size_for(self, dim: int, size: int) -> int:
        """A size that the plan has, or one of its own where it covers none and max_buckets allows another. Otherwise
        the dimension is planned from what was seen; a plan that is to stay gets a larger last size.
        """
        sizes, loose = self._sizes.get(dim, []), self._loose.get(dim, set())
        place = bisect.bisect_left(sizes, size)
        if place < len(sizes):
            return sizes[place]
        own = self._provisional(dim, size)
        if own in loose or len(sizes) + len(loose) < self.max_buckets:
            self._loose.setdefault(dim, set()).add(own)
            return own
        if not sizes or self.enable_adaptive_optimization:
            plan = self._plan(dim, self._seen[dim], force=True)
            self._sizes[dim], self._reasons[dim] = plan["buckets"], plan["reason"]
        if not self._sizes[dim] or self._sizes[dim][-1] < size:
            self._sizes[dim] = [*self._sizes[dim][: self.max_buckets - 1], own]
        self._loose.pop(dim, None)
        self._replans += 1
        self._drop_old_buckets()
        sizes = self._sizes[dim]
        return sizes[bisect.bisect_left(sizes, size)]

    def _provisional(self, dim: int, size: int) -> int:
        """For a size that no plan covers: of geometric buckets the next power of two; otherwise at most an eighth more,
        and at most eight such sizes an octave."""
        octave = 1 << max(size.bit_length() - 1, 0)
        if self.strategy is BucketingStrategy.GEOMETRIC:
            return octave if octave == size else 2 * octave
        step = max(octave // 8, 1)
        if dim != 0:
            step = max(step, self.alignment)
        return -(-size // step) * step

    def _plan(self, dim: int, weights: dict[int, float], force: bool) -> dict[str, Any]:
        sizes = sorted(weights)
        if len(sizes) > _MOST_LENGTHS:  # neighbours together, at the larger
            step = -(-len(sizes) // _MOST_LENGTHS)
            grouped = {
                max(sizes[i : i + step]): sum(weights[s] for s in sizes[i : i + step])
                for i in range(0, len(sizes), step)
            }
            weights, sizes = grouped, sorted(grouped)
        current = self._sizes.get(dim, [])
        is_batch = dim == 0 and self.dimensions != (0,)
        strategy = self.strategy.value
        if is_batch and strategy == "hardware_aware":
            strategy = "optimal"  # tiles are filled by tokens, not by rows
        if current and not force and strategy in ("hardware_aware", "optimal", "memory_optimal"):
            best = self._ask(sizes, weights, strategy, current, dim, is_batch)
            keeps = best["current_cost"] > 0 and best["cost"] > (1 - self.least_gain) * best["current_cost"]
            return {"buckets": current, "reason": best["reason"]} if keeps else best
        return self._ask(sizes, weights, strategy, current, dim, is_batch)

    def _ask(
        self, sizes: list[int], weights: dict[int, float], strategy: str, current: list[int], dim: int, is_batch: bool
    ) -> dict[str, Any]:
        cost = {key: value for key, value in self.cost.items() if not (is_batch and key in ("quadratic", "floor"))}
        plan: dict[str, Any] = _library.call(
            "bucket_plan",
            request={
                "lengths": sizes,
                "counts": [round(weights[size], 3) for size in sizes],
                "strategy": strategy,
                "max_buckets": self.max_buckets,
                "alignment": 1 if is_batch else self.alignment,
                "longest": self.longest.get(dim, 0),
                "cost": cost,
                "current": current,
                "least_gain": self.least_gain,
                "device": self.device,
            },
        )
        return plan


def create_optimal_bucketing_system(
    input_samples: Sequence[Tensor | Sequence[int]],
    strategy: BucketingStrategy = BucketingStrategy.HARDWARE_AWARE,
    max_buckets: int = 32,
    **options: Any,
) -> DynamicShapeBucketing:
    """Buckets for inputs like the samples.

    Args:
        input_samples: tensors, or shapes; all of one number of dimensions.
        options: of DynamicShapeBucketing. Without `dimensions`, those that vary are bucketed.
    """
    samples = list(input_samples)
    if not samples:
        raise ValueError("create_optimal_bucketing_system: no samples were given; show it some inputs or their shapes")
    shapes = [tuple(sample.shape) if isinstance(sample, Tensor) else tuple(sample) for sample in samples]
    if len({len(shape) for shape in shapes}) > 1:
        raise ValueError("create_optimal_bucketing_system: the samples have different numbers of dimensions")
    if options.get("dimensions") is None:
        features = isinstance(samples[0], Tensor) and samples[0].is_floating_point() and len(shapes[0]) > 1
        last = len(shapes[0]) - (1 if features else 0)
        varying = [dim for dim in range(last) if len({shape[dim] for shape in shapes}) > 1]
        options["dimensions"] = varying or list(range(1 if last > 1 else 0, last))
    system = DynamicShapeBucketing(strategy, max_buckets, **options)
    system.learn(shapes)
    return system


def _device_name(hardware_info: Any) -> str:
    if hardware_info is None:
        return "cuda:0" if torch.cuda.is_available() else "cpu"
    name = str(getattr(hardware_info, "device", hardware_info))
    return {"cuda": "cuda:0", "cpu:0": "cpu"}.get(name, name)


def _product(shape: Sequence[int]) -> int:
    result = 1
    for size in shape:
        result *= size
    return result
