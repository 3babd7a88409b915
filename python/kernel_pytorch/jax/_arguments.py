"""What several functions do to their arguments before the call."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from ._call import Array, int64_words


def parameter_for(x: Array, parameter: Any) -> Any:
    """A parameter in a type that ops take next to x: x's own, or fp32 next to 16 bits."""
    if parameter is None:
        return None
    parameter = jnp.asarray(parameter)
    if parameter.dtype == x.dtype or (parameter.dtype == jnp.float32 and x.dtype != jnp.float64):
        return parameter
    return parameter.astype(x.dtype)


def same_type(x: Array, other: Array) -> tuple[Array, Array]:
    dtype = jnp.promote_types(x.dtype, other.dtype)
    return x.astype(dtype), other.astype(dtype)


def seed_words(op: str, seed: Any) -> Array:
    """A key of jax.random, or two 64-bit integers (seed and offset), as the op takes them."""
    if seed is None:
        raise ValueError(f"{op}: dropout needs a seed; give a key of jax.random as seed=")
    seed = jnp.asarray(seed)
    if jnp.issubdtype(seed.dtype, jax.dtypes.prng_key):
        return jax.random.bits(seed, (2, 2), jnp.uint32)
    if seed.dtype == jnp.uint32 and seed.shape == (2,):
        return jax.random.bits(jax.random.wrap_key_data(seed), (2, 2), jnp.uint32)
    if seed.shape == (2,) and jnp.issubdtype(seed.dtype, jnp.integer):
        return int64_words(seed)
    raise ValueError(
        f"{op}: seed has shape {list(seed.shape)} and type {seed.dtype}; give a key of jax.random, or two integers"
    )
