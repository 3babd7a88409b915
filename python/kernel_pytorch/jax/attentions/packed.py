"""Attention of queries, keys and values that one product made: their slices are read and written where they lie.

JAX's arrays have no strides, so a slice of a packed array that a kernel reads is a copy, and so is the array that its
gradients are put together in.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.custom_batching import custom_vmap
from jax.custom_derivatives import SymbolicZero

from ..._shape_rules import window_sides
from .. import _plain
from .._call import (
    Array,
    Part,
    attributes_of,
    check_type,
    emit,
    kernels_in_use,
    looped,
    made_once,
    parameter_for,
    result_like,
    undifferentiated,
    using_kernels,
    with_kernel,
)
from .._forward_mode import guarded
from .._gradients import RESIDUALS
from .._sharding import has_mesh
from ..attention import attention
from ..tables import rope

_OP = "attention_packed"


def attention_packed(
    qkv: Array,
    cos: Array | None = None,
    sin: Array | None = None,
    *,
    heads: int,
    key_heads: int | None = None,
    interleaved: bool = False,
    rotary_dim: int | None = None,
    causal: bool = False,
    scale: float | None = None,
    window: int | tuple[int, int] | None = None,
    softcap: float | None = None,
    deterministic: bool = False,
    allow_tf32: bool = False,
) -> Array:
    """`attention` of the heads of a packed array, after their `rope` where there are tables.

    Args:
        qkv: [batch, sequence, heads + 2 key_heads, size]: all queries, then all keys, then all values.
        cos, sin: as rope's; None: nothing is turned. They have no gradient.
        heads, key_heads: of queries, of keys and of values (None: as many).
        interleaved, rotary_dim: as rope's; the others are attention's.

    Returns:
        [batch, sequence, heads, size].
    """
    qkv = jnp.asarray(qkv)
    key_heads = heads if key_heads is None else key_heads
    if qkv.ndim != 4 or qkv.shape[2] != heads + 2 * key_heads or min(heads, key_heads) < 1:
        raise ValueError(
            f"{_OP}: qkv has shape {list(qkv.shape)}, with {heads} heads and {key_heads} key_heads; it must be [batch, "
            f"sequence, {heads + 2 * key_heads}, size]"
        )
    check_type(_OP, "qkv", qkv)
    if (cos is None) != (sin is None):
        raise ValueError(f"{_OP}: one of cos and sin is None; give both, or neither")
    left, right = window_sides("attention", window)
    turning: dict[str, Any] = {"interleaved": bool(interleaved), "rotary_dim": rotary_dim or 0}
    options: dict[str, Any] = {
        "causal": bool(causal),
        "scale": None if scale is None else float(scale),
        "window_left": left,
        "window_right": right,
        "softcap": float(softcap or 0.0),
        "deterministic": bool(deterministic),
        "allow_tf32": bool(allow_tf32),
    }
    if _plain.is_needed() or has_mesh():
        query, key, value = jnp.split(qkv, (heads, heads + key_heads), 2)
        if cos is not None and sin is not None:
            turned_query, turned_key = rope(query, key, cos, sin, **turning)
            query, key = turned_query, jnp.asarray(turned_key)
        rest = {name: one for name, one in options.items() if not name.startswith("window")}
        return attention(query, key, value, window=None if window is None else (left, right), **rest)  # type: ignore[no-any-return]
    tables = [] if cos is None else [parameter_for(qkv, one) for one in (cos, sin)]
    turning = turning if tables else {}
    run = _function(heads, key_heads, tuple(turning.items()), tuple(options.items()), kernels_in_use())
    return run(*(guarded(_OP, one) for one in (qkv, *tables)))  # type: ignore[no-any-return]


@made_once
def _function(heads: int, key_heads: int, turning: Any, options: Any, kernels: Any) -> Any:
    calls = _Calls(heads, key_heads, dict(turning), dict(options))
    compute, compute_and_save, go_back = (
        undifferentiated(_OP, _batched(one, tables=2 if turning else 0))
        for one in (calls.output, calls.output_and_saved, calls.gradient)
    )

    @jax.custom_vjp
    def function(qkv: Array, *tables: Array) -> Array:
        with using_kernels(dict(kernels)):
            return compute(qkv, *tables)  # type: ignore[no-any-return]

    def forward(qkv: Any, *tables: Any) -> Any:
        if any(table.perturbed for table in tables):
            raise NotImplementedError(f"{_OP}: cos and sin have no gradient; give jax.lax.stop_gradient of them")
        arrays = [one.value for one in (qkv, *tables)]
        with using_kernels(dict(kernels)):
            output, *saved = compute_and_save(*arrays)
        output, *saved = (checkpoint_name(one, RESIDUALS) for one in (output, *saved))
        return output, (arrays[0], output, *saved, *arrays[1:])

    def backward(saved: Any, grad: Any) -> Any:
        of_tables = (None, None) if turning else ()
        if isinstance(grad, SymbolicZero):
            return (None, *of_tables)
        with using_kernels(dict(kernels)):
            return (go_back(grad, *saved), *of_tables)

    function.defvjp(forward, backward, symbolic_zeros=True)
    return function


class _Calls:
    """The calls of forward and backward. Saved: qkv, output, lse, then where heads are turned query and key, and tables
    behind them."""

    def __init__(self, heads: int, key_heads: int, turning: dict[str, Any], options: dict[str, Any]) -> None:
        self.heads, self.key_heads = heads, key_heads
        self.turning, self.options = turning, {"heads_first": False, **options}

    def parts(self, names: str) -> tuple[Part, ...]:
        """Of a packed array: queries, keys and values, "-" for none."""
        begins = (0, self.heads, self.heads + self.key_heads)
        sizes = (self.heads, self.key_heads, self.key_heads)
        return tuple(Part(*one) for one in zip(names.split(), begins, sizes) if one[0] != "-")

    def turned(self, qkv: Array, tables: Sequence[Array]) -> list[Array]:
        results = [
            ((Part(name),), result_like((*qkv.shape[:2], count, qkv.shape[3]), qkv.dtype, (qkv,)))
            for name, count in (("rotated_query", self.heads), ("rotated_key", self.key_heads))
        ]
        attributes = attributes_of("rope", with_kernel("rope", self.turning))
        return emit("rope", [(self.parts("query key -"), qkv), *_tables(tables)], results, attributes)[:2]  # type: ignore[no-any-return]

    def attended(
        self, op: str, qkv: Array, tables: tuple[Array, ...], with_lse: bool
    ) -> tuple[list[Array], list[Array]]:
        turned = self.turned(qkv, tables) if tables else []
        batch, sequence, _, size = qkv.shape
        results = [((Part("output"),), result_like((batch, sequence, self.heads, size), qkv.dtype, (qkv,)))]
        if with_lse:
            statistic = jnp.float64 if qkv.dtype == jnp.float64 else jnp.float32
            results.append(((Part("lse"),), result_like((batch, self.heads, sequence), statistic, (qkv,))))
        attributes = attributes_of(op, with_kernel(op, self.options))
        return emit(op, self.operands(qkv, turned), results, attributes)[: len(results)], turned

    def operands(self, qkv: Array, turned: Any) -> list[Any]:
        if not turned:
            return [(self.parts("query key value"), qkv)]
        return [((Part("query"),), turned[0]), ((Part("key"),), turned[1]), (self.parts("- - value"), qkv)]

    def output(self, qkv: Array, *tables: Array) -> Array:
        return self.attended("attention", qkv, tables, with_lse=False)[0][0]

    def output_and_saved(self, qkv: Array, *tables: Array) -> tuple[Array, ...]:
        made, turned = self.attended("attention_forward", qkv, tables, with_lse=True)
        return (*made, *turned)

    def gradient(self, grad: Array, qkv: Array, output: Array, lse: Array, *rest: Array) -> Array:
        turned, tables = rest[:2], rest[2:]
        op = "attention_backward"
        operands = [*self.operands(qkv, turned)]
        operands += [((Part(name),), one) for name, one in (("output", output), ("lse", lse), ("grad_output", grad))]
        results = [
            (self.parts("grad_query grad_key grad_value"), result_like(qkv.shape, qkv.dtype, (qkv,))),
            ((Part("grad_captured"),), result_like((0,), lse.dtype, (qkv,))),
        ]
        packed: Array = emit(op, operands, results, attributes_of(op, with_kernel(op, self.options)))[0]
        if not tables:
            return packed
        op = "rope_in_place"  # values stay
        operands = [(self.parts("query key -"), packed), *_tables(tables)]
        attributes = attributes_of(op, with_kernel(op, {**self.turning, "inverse": True}))
        turned_back: Array = emit(op, operands, [], attributes, updated=[0])[0]
        return turned_back


def _tables(tables: Any) -> list[Any]:
    return [((Part(name),), one) for name, one in zip(("cos", "sin"), tables)]


def _batched(run: Any, tables: int) -> Any:
    """vmap's axis is multiplied into the batch, which comes first everywhere but in tables, the last arrays."""
    function = custom_vmap(run)

    @function.def_vmap
    def batch(size: int, mapped: Any, *arrays: Array) -> Any:
        count = len(arrays) - tables
        if any(mapped[count:]) or any(table.ndim != 2 for table in arrays[count:]):
            made = looped(function, mapped, arrays)
        else:
            spread = (
                one if is_mapped else jnp.broadcast_to(one, (size, *one.shape))
                for one, is_mapped in zip(arrays[:count], mapped)
            )
            made = function(*(one.reshape(-1, *one.shape[2:]) for one in spread), *arrays[count:])
            made = jax.tree.map(lambda one: one.reshape(size, one.shape[0] // size, *one.shape[1:]), made)
        return made, jax.tree.map(lambda _: True, made)

    return function
