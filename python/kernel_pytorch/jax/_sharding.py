"""Automatic sharding: which dimensions of a call may lie on several devices, told to XLA's partitioner.

Under jax.set_mesh, in a program that XLA partitions (axes of the type Auto) or whose arrays' types say where they lie
(Explicit), a call is computed on each device's part of the dimensions that are free: leading dimensions, batches, heads
of attention and rope, both sides of a plain product. Sums over a free dimension (gradients of weights, a product's
contraction) are added up by a psum. Every other dimension is whole on each device: what is not is gathered.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from ._dimensions import Dimensions

Array = jax.Array
# The factors of one dimension, the outer first: heads of attention's query are (key heads, heads of a group).
Dimension = tuple[str, ...]


def has_mesh() -> bool:
    """Whether this program is one for several devices that are not told apart in it."""
    return _is_of(AxisType.Auto) or is_explicit()


def is_explicit() -> bool:
    """Whether arrays' types say how they lie on the mesh's devices."""
    return _is_of(AxisType.Explicit)


def _is_of(kind: AxisType) -> bool:
    mesh = jax.sharding.get_abstract_mesh()
    return not mesh.empty and mesh.size > 1 and all(one == kind for one in mesh.axis_types)


def spec_of(array: Any) -> PartitionSpec | None:
    """How an array of an explicit mesh lies on it; None elsewhere."""
    return jax.typeof(array).sharding.spec if is_explicit() else None


def placed(array: Array, spec: PartitionSpec | None) -> Array:
    return array if spec is None else jax.sharding.reshard(array, spec)


def partitioned(
    op: str,
    names: Sequence[str],
    static: Mapping[str, Any],
    local: Callable[..., dict[str, Array]],
    arrays: Sequence[Array],
) -> dict[str, Array]:
    """`local` of arrays that may be sharded. names: of the arrays; static: options and flags by name."""
    from jax.experimental.custom_partitioning import custom_partitioning  # experimental: only for those who shard

    shapes = jax.eval_shape(local, *arrays)
    outputs = list(shapes)
    layout = _Layout(op, names, static, arrays, {name: one.shape for name, one in shapes.items()})
    if is_explicit():
        return _mapped(layout, outputs, local, arrays)
    if not layout.free:
        return local(*arrays)

    @custom_partitioning
    def run(*arrays: Array) -> tuple[Array, ...]:
        made = local(*arrays)
        return tuple(made[name] for name in outputs)

    def partition(mesh: Any, arguments: Any, results: Any) -> Any:
        axes = layout.axes_of(mesh, arguments, results)

        def lower(*parts: Array) -> tuple[Array, ...]:
            made = local(*parts)
            share = layout.share(mesh, axes)
            return tuple(_summed(made[name], layout.missing(name, axes), share) for name in outputs)

        return (
            mesh,
            lower,
            tuple(NamedSharding(mesh, layout.spec(layout.results[name], axes)) for name in outputs),
            tuple(NamedSharding(mesh, layout.spec(one, axes)) for one in layout.operands),
        )

    run.def_partition(partition=partition, sharding_rule=layout.rule(outputs))
    return dict(zip(outputs, run(*arrays)))


def _mapped(
    layout: _Layout, outputs: Sequence[str], local: Callable[..., dict[str, Array]], arrays: Sequence[Array]
) -> dict[str, Array]:
    """`local` on each device's part, as the arrays' types say."""
    mesh = jax.sharding.get_abstract_mesh()
    axes = layout.axes_of(mesh, [jax.typeof(array) for array in arrays], ())
    share = layout.share(mesh, axes)

    def lower(*parts: Array) -> tuple[Array, ...]:
        made = local(*parts)
        return tuple(_summed(made[name], layout.missing(name, axes), share) for name in outputs)

    specs = tuple(layout.spec(one, axes) for one in layout.operands)
    results = tuple(layout.spec(layout.results[name], axes) for name in outputs)
    run = jax.shard_map(lower, in_specs=specs, out_specs=results)
    return dict(zip(outputs, run(*(placed(array, spec) for array, spec in zip(arrays, specs)))))


def _summed(array: Array, axes: tuple[str, ...], share: float) -> Array:
    array = array if share == 1.0 else (array * share).astype(array.dtype)
    return jax.lax.psum(array, axes) if axes else array


class _Layout:
    """The factors of every dimension of a call."""

    def __init__(
        self,
        op: str,
        names: Sequence[str],
        static: Mapping[str, Any],
        arrays: Sequence[Array],
        results: Mapping[str, tuple[int, ...]],
    ) -> None:
        self.op = op
        self.given = dict(zip(names, arrays))
        self.dimensions = Dimensions(op, {**static, **self.given})
        self.values = self.dimensions.values
        self.others = (f"other{i}" for i in itertools.count())
        self.sizes: dict[str, int] = {}
        self.free: tuple[str, ...] = ()
        shapes = [_seen(array) for array in arrays]
        self.operands = [self._dimensions(name, shape) for name, shape in zip(names, shapes)]
        self.results = {name: self._dimensions(name, shape) for name, shape in results.items()}
        for array, dimensions in zip(arrays, self.operands):
            if array.ndim > len(dimensions):  # words of 64-bit integers
                dimensions.append((next(self.others),))
                self.sizes[dimensions[-1][0]] = array.shape[-1]
        self.free = self._free(set(names))

    def rule(self, outputs: Sequence[str]) -> Any:
        from jax.experimental import custom_partitioning as rules  # experimental: only for those who shard

        def mapping(dimensions: Sequence[Dimension]) -> rules.ArrayMapping:
            return rules.ArrayMapping(*(one[0] if len(one) == 1 else rules.CompoundFactor(*one) for one in dimensions))

        results = [self.results[name] for name in outputs]
        # In the order of their first appearance, as Shardy wants them.
        every = dict.fromkeys(factor for one in (*self.operands, *results) for each in one for factor in each)
        single = {each[0] for one in (*self.operands, *results) for each in one if len(each) == 1}
        sizes: Any = {factor: self.sizes[factor] for factor in every if factor not in single}
        return rules.SdyShardingRule(
            tuple(map(mapping, self.operands)),
            tuple(map(mapping, results)),
            need_replication_factors=tuple(factor for factor in every if factor not in self.free),
            **sizes,
        )

    def axes_of(self, mesh: Any, arguments: Any, results: Any) -> dict[str, tuple[str, ...]]:
        """The mesh's axes that each free factor lies on: the first that a tensor has for it, each axis once."""
        axes: dict[str, tuple[str, ...]] = {}
        used: set[str] = set()
        for dimensions, info in zip((*self.operands, *self.results.values()), (*arguments, *results)):
            spec = getattr(info.sharding, "spec", ())
            for dimension, entry in zip(dimensions, spec):
                factor = dimension[0]
                found = entry if isinstance(entry, tuple) else () if entry is None else (entry,)
                count = 1
                for axis in found:
                    count *= mesh.shape[axis]
                if not found or factor not in self.free or factor in axes or used.intersection(found):
                    continue
                if self.sizes[factor] % count == 0:
                    axes[factor] = found
                    used.update(found)
        return axes

    def spec(self, dimensions: Sequence[Dimension], axes: Mapping[str, tuple[str, ...]]) -> PartitionSpec:
        return PartitionSpec(*(axes.get(dimension[0]) for dimension in dimensions))

    def missing(self, name: str, axes: Mapping[str, tuple[str, ...]]) -> tuple[str, ...]:
        """Axes over which this result is one of the summands."""
        if not self._sums():
            return ()
        own = {dimension[0] for dimension in self.results[name]}
        return tuple(axis for factor, of in axes.items() if factor not in own for axis in of)

    def share(self, mesh: Any, axes: Mapping[str, tuple[str, ...]]) -> float:
        """What a device's results count for in the whole: linear_cross_entropy's are means over its rows."""
        if not self.op.startswith("linear_cross_entropy"):
            return 1.0
        devices: int = math.prod(mesh.shape[axis] for of in axes.values() for axis in of)
        return 1.0 / devices

    def _sums(self) -> bool:
        if self.op.startswith("cross_entropy") and not self.op.startswith("cross_entropy_rows"):
            return not self.values.get("mean")
        is_product_or_loss = self.op.startswith(("linear", "matmul"))
        return is_product_or_loss or (self.op.endswith("_backward") and not self.op.startswith("rope"))

    def _free_words(self, given: set[str]) -> set[str]:
        """A product's columns are free, and what it sums over where nothing but the sum follows."""
        words = {"leading", "batch", "heads", "key_heads"}
        if self.op.startswith("matmul"):
            return words | {"m", "n", "k"}
        if self.op in ("linear", "linear_forward", "linear_backward") and not self.values.get("gated"):
            words.add("out")
            if self.values.get("activation") == "identity" and not given & {"bias", "residual"}:
                words.add("in")
        return words

    def _free(self, given: set[str]) -> tuple[str, ...]:
        """Numbers that depend on positions (dropout's, those of score functions, lists of blocks) bind everything."""
        if given & {"seed", "blocks", "captured", "cu_seqlens_q", "offsets", "inverse_frequencies"}:
            return ()
        if self.values.get("score_mod") or self.values.get("mask_mod"):
            return ()
        factors = {dimension[0] for dimensions in self.operands for dimension in dimensions}
        words = self._free_words(given)
        free = [factor for factor in sorted(factors) if factor.rstrip("0123456789") in words]
        if self._sums() or self.op.startswith("rope"):
            return tuple(free)
        kept = [one for one in self.results.values() if one]
        whole = [{dimension[0] for dimension in one} for one in kept if not all(self.sizes[d[0]] == 0 for d in one)]
        if len(kept) < len(self.results):  # a scalar: every row is in it
            return ()
        return tuple(factor for factor in free if all(factor in one for one in whole))

    def _dimensions(self, name: str, shape: tuple[int, ...]) -> list[Dimension]:
        words = self._words(name, len(shape))
        dimensions = [self._factors(word, size) for word, size in zip(words, shape)]
        for dimension, size in zip(dimensions, shape):
            if len(dimension) == 1:
                self.sizes.setdefault(dimension[0], size)
        return dimensions

    def _words(self, name: str, rank: int) -> list[Any]:
        words = self.dimensions.words(name, rank)
        if "..." in words:
            at = words.index("...")
            words[at : at + 1] = [f"leading{i}" for i in range(rank - len(words) + 1)]
        return words if len(words) == rank else [None] * rank

    def _factors(self, word: Any, size: int) -> Dimension:
        if not isinstance(word, str) or not word.isidentifier() or self.sizes.get(word, size) != size:
            factor = next(self.others)  # a number, a formula, or a dimension of 1 that is repeated
            self.sizes[factor] = size
            return (factor,)
        key_heads = self._key_heads() if word == "heads" else 0
        if not key_heads:
            return (word,)
        if size == key_heads:
            return ("key_heads",)
        if size % key_heads == 0:
            self.sizes.update(key_heads=key_heads, group=size // key_heads)
            return ("key_heads", "group")
        return (next(self.others),)

    def _key_heads(self) -> int:
        """Heads of the keys that queries come with, which a device must have for its queries; 0 for none."""
        key = self.given.get("key", self.given.get("grad_key"))
        if key is None or key.ndim != 4:
            return 0
        return int(key.shape[1 if self.values.get("heads_first") else 2])


def _seen(array: Any) -> tuple[int, ...]:
    return tuple(array.shape[:-1] if array.dtype == jax.numpy.uint32 else array.shape)
