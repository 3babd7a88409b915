"""ejKernel's grouped matmul, both versions."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from .._call import Array
from ..experts import grouped_matmul as _grouped_matmul
from ._common import allows_tf32, checked, run
from ._configs import GroupedMatmulConfig
from ._registry import registered


@registered
def grouped_matmul(
    lhs: Array,
    rhs: Array,
    group_sizes: Array,
    group_offset: Array | None = None,
    existing_out: Array | None = None,
    /,
    *,
    preferred_element_type: Any = None,
    transpose_rhs: bool = False,
    interpret: bool = False,
    do_padding: bool = True,
    precision: Any = None,
    use_v2: bool = False,
    out_shard_callback: Any = None,
    platform: Any = None,
    cfg: Any = None,
) -> Array:
    """Rows of lhs [m, k] by the matrix of their group: rhs [groups, k, n], or [groups, n, k] with transpose_rhs.

    Group i has the next group_sizes[i] rows; rows behind the last are 0. With group_offset rhs has the groups from
    there on, and other rows are 0. existing_out [m, n] is added, with a gradient. Nothing is padded and both versions
    are one kernel, so that do_padding and use_v2 change nothing. Sums are fp32.
    """
    name = "grouped_matmul"
    checked(name, platform, cfg, GroupedMatmulConfig, interpret=interpret, out_shard_callback=out_shard_callback)
    allows_tf32(name, precision)  # sums are fp32 whatever it asks for
    return _run(name, lhs, rhs, group_sizes, group_offset, existing_out, preferred_element_type, transpose_rhs, cfg)


@registered
def grouped_matmulv2(
    lhs: Array,
    rhs: Array,
    group_sizes: Array,
    group_offset: Array | None = None,
    /,
    *,
    preferred_element_type: Any = None,
    transpose_rhs: bool = False,
    interpret: bool = False,
    precision: Any = None,
    platform: Any = None,
    cfg: Any = None,
) -> Array:
    """`grouped_matmul` under its second name, without existing_out."""
    name = "grouped_matmulv2"
    checked(name, platform, cfg, GroupedMatmulConfig, interpret=interpret)
    allows_tf32(name, precision)
    return _run(name, lhs, rhs, group_sizes, group_offset, None, preferred_element_type, transpose_rhs, cfg)


def _run(
    name: str, lhs: Array, rhs: Array, sizes: Array, offset: Array | None, existing: Array | None, dtype: Any,
    transposed: bool, cfg: Any,
) -> Array:  # fmt: skip
    wanted = jnp.dtype(dtype or jnp.result_type(lhs, rhs))

    def multiply(lhs: Array, rhs: Array, sizes: Array, offset: Array | None) -> Array:
        out_dtype = None if wanted == jnp.result_type(lhs, rhs) else jnp.float32
        options: dict[str, Any] = dict(transpose_weight=transposed, out_dtype=out_dtype)
        if offset is None:
            return _grouped_matmul(lhs, rhs, jnp.cumsum(sizes), **options)
        first = jnp.asarray(offset, jnp.int32).reshape(())
        begin = jnp.sum(jnp.where(jnp.arange(sizes.shape[0]) < first, sizes, 0))
        own = jax.lax.dynamic_slice(sizes, (first,), (rhs.shape[0],))
        rows = jnp.minimum(jnp.arange(lhs.shape[0]) + begin, lhs.shape[0] - 1)
        return jnp.roll(_grouped_matmul(lhs, rhs, jnp.cumsum(own), gather=rows, **options), begin, 0)

    output = run(name, multiply, (lhs, rhs, jnp.asarray(sizes), offset), cfg).astype(wanted)
    return output if existing is None else output + existing.astype(wanted)  # type: ignore[no-any-return]
