"""The next token of each row of logits."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from ._call import call

Array = jax.Array


def _row(value: Any, rows: int, dtype: Any) -> Array | None:
    if value is None:
        return None
    numbers = jnp.asarray(value)
    is_whole = jnp.issubdtype(dtype, jnp.integer) and jnp.issubdtype(numbers.dtype, jnp.integer)
    numbers = numbers if is_whole and numbers.dtype in (jnp.int32, jnp.int64) else numbers.astype(dtype)
    return jnp.broadcast_to(numbers, (rows,))


def sample(
    logits: Array,
    *,
    temperature: Any = None,
    top_k: Any = None,
    top_p: Any = None,
    min_p: Any = None,
    seeds: Any = None,
    positions: Any = None,
) -> Array:
    """The next token of each row, int32 [rows]; numbers as in `functional.sample`, one for all rows or one for each.

    Args:
        logits: [rows, vocabulary].
        seeds: whole numbers; JAX has no generator of its own, so that None is refused unless the temperature is 0.
        positions: whole numbers, the place of the token in its text.
    """
    if seeds is None and not (isinstance(temperature, int | float) and temperature == 0):
        raise ValueError("sample: seeds are missing; give whole numbers, or temperature=0 for the largest logits")
    rows = logits.shape[0]
    tensors = {
        "logits": jax.lax.stop_gradient(logits),
        "temperature": _row(temperature, rows, jnp.float32),
        "top_k": None if top_k is None else jnp.broadcast_to(jnp.asarray(top_k, jnp.int32), (rows,)),
        "top_p": _row(top_p, rows, jnp.float32),
        "min_p": _row(min_p, rows, jnp.float32),
        "seeds": _row(seeds, rows, jnp.int32),
        "positions": _row(positions, rows, jnp.int32),
    }
    tokens: Array = call("sample", tensors)["tokens"]
    return tokens
